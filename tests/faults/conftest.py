"""Each session starts its own launcher."""

from __future__ import annotations

import pytest

from tests.reused_launcher import reusing_provider


@pytest.fixture(scope="module", autouse=True)
def no_launcher_of_others() -> None:
    """Processes are counted here: none that another module has handed on may be among them."""
    reusing_provider.end()
