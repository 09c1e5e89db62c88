"""Engines as parameters of a test: `make test` runs two of them, `make nightly` all."""

from __future__ import annotations

from typing import Any

import pytest

from nbdist.strategies import STRATEGIES

CORE = ("ddp", "zero3")
"""The two that differ most in where they keep the training state."""


def each(*core: str) -> list[Any]:
    """Return all engines, as `pytest.mark.parametrize` and fixtures take them.

    Args:
        core: engines that `make test` runs too; DDP and ZeRO-3 unless given.
    """
    return [
        name if name in (core or CORE) else pytest.param(name, marks=pytest.mark.nightly)
        for name in STRATEGIES
    ]
