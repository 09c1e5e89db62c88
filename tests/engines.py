"""Engines as parameters of a test: `make test` runs two of them, `make nightly` all."""

from __future__ import annotations

from typing import Any

from nbdist.strategies import STRATEGIES
from tests.nightly import with_core

CORE = ("ddp", "zero3")
"""The two that differ most in where they keep the training state."""


def each(*core: str) -> list[Any]:
    """Return all engines, as `pytest.mark.parametrize` and fixtures take them.

    Args:
        core: engines that `make test` runs too; DDP and ZeRO-3 unless given.
    """
    return with_core(STRATEGIES, *(core or CORE))
