"""The notebook about several machines, on two hosts of a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.conftest import eventually
from tests.notebooks import more_machines

if TYPE_CHECKING:
    from pathlib import Path

    from tests.nodes.hosts import Hosts


@pytest.mark.nodes
@pytest.mark.timeout(600)
def test_more_machines(hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in hosts.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    more_machines.passes(tmp_path, within=hosts.here.within)
    eventually(lambda: not hosts.ours(), within_s=30)
