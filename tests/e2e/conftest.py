"""Real ranks for tests: one session a module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import nbdist
from tests.live_kernel import LiveKernel
from tests.reused_launcher import reusing_launchers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist import Session


@pytest.fixture(scope="module", autouse=True)
def one_launcher() -> Iterator[None]:
    """Sessions take over the launcher of those before; in tests/faults many start their own."""
    with reusing_launchers():
        yield


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with nbdist.Session(nproc=2) as running:
        yield running


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Two ranks that have run the module's DEFINITIONS; each test builds its model anew."""
    with nbdist.Session(nproc=2) as running:
        running.run(request.module.DEFINITIONS)
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which the notebook runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made := tmp_path_factory.mktemp("notebook"))
        yield made


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveKernel]:
    """A notebook's kernel with the extension loaded."""
    with LiveKernel(tmp_path_factory.mktemp("notebook")) as kernel:
        assert kernel.run("%load_ext nbdist").status == "ok"
        yield kernel
