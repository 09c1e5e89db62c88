"""Clusters for the tests of `make nodes`: made once, skipped with a reason where they cannot be."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.live_kernel import LiveKernel
from tests.nodes import slurm as slurms
from tests.nodes.hosts import Hosts
from tests.nodes.slurm import Slurm

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    """Three hosts, two of them with Ray."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: `make nodes` installs it")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    try:
        made = Hosts.made()
    except (AssertionError, OSError) as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    with made:
        yield made


@pytest.fixture(scope="module")
def notebook(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveKernel]:
    """A notebook's kernel on the first host."""
    folder = tmp_path_factory.mktemp("notebook")
    with LiveKernel(folder, within=hosts.here.within, **hosts.environ) as kernel:
        assert kernel.run("%load_ext nbdist").status == "ok"
        yield kernel


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root")
    if missing := slurms.missing():
        pytest.skip(f"{', '.join(missing)} not found: apt-get install slurm-wlm munge")
    # below a folder that others may enter: munge refuses what others may write to
    folder = Path(tempfile.mkdtemp(prefix="nbs", dir="/run"))
    folder.chmod(0o755)
    with Slurm(folder) as running:
        yield running


@pytest.fixture(scope="module")
def login(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveKernel]:
    with LiveKernel(tmp_path_factory.mktemp("login"), **slurm.environ) as kernel:
        assert kernel.run("%load_ext nbdist").status == "ok"
        yield kernel
