"""Each session starts its own launcher, but where the ranks alone are the victims."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.reused_launcher import reusing_launchers, reusing_provider

if TYPE_CHECKING:
    from collections.abc import Iterator

REUSING = {"test_chaos", "test_requests", "test_spin", "test_stop"}


@pytest.fixture(scope="module", autouse=True)
def launchers(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.path.stem in REUSING:
        with reusing_launchers():
            yield
    else:  # processes are counted: none that another module has handed on may be among them
        reusing_provider.end()
        yield
