"""Tests of docs/security.md: strangers' files, frames and hands on a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import nbdist
from tests.reused_launcher import reusing_launchers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist import Session


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with reusing_launchers(), nbdist.Session(nproc=2) as running:
        yield running
