"""Engines as parameters of a test: those that are much like another one are left to `make nightly`."""

from __future__ import annotations

from typing import Any

import pytest

from nbdist.strategies import STRATEGIES

LIKE_OTHERS = frozenset({"fsdp1", "zero1", "zero2"})
"""One of a kind stays: DDP, FSDP2 and ZeRO-3."""


def each() -> list[Any]:
    """All engines, as `pytest.mark.parametrize` and fixtures take them."""
    return [
        pytest.param(name, marks=pytest.mark.nightly) if name in LIKE_OTHERS else name
        for name in STRATEGIES
    ]
