"""Parameters of a test of which `make test` runs some, and `make nightly` all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable


def nightly(*values: Any) -> Any:
    """Return a case that only `make nightly` runs."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def with_core(cases: Iterable[str], *core: str) -> list[Any]:
    """Return these cases; those that are not in `core` are left to `make nightly`."""
    return [case if case in core else nightly(case) for case in cases]
