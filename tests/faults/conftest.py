"""Each session starts its own launcher."""

from __future__ import annotations

import pytest

from tests.kept import keeper


@pytest.fixture(scope="module", autouse=True)
def no_launcher_of_others() -> None:
    """Processes are counted here: none that another module has handed on may be among them."""
    keeper.end()
