"""What can be shown of GPUs without one: CUDA's build of torch, and an NVML that pretends.

`make gpu-rehearsal` installs that build into a folder of its own (4.5 GB), which the processes
under test have in front of the ordinary environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.cluster.local_launcher import Launcher
from nbdist.protocol import messages
from nbdist.strategies import Hardware, Options

if TYPE_CHECKING:
    from collections.abc import Iterator

SITE = os.environ.get("NBDIST_CUDA_SITE", "")
"""Folder with CUDA's build of torch, from `make gpu-rehearsal`."""
collect_ignore_glob = [] if SITE else ["test_*.py"]
HERE = Path(__file__).parent
ENDED_S = 120.0


class Rehearsed(Launcher):
    """The launcher, with ranks that write down what they see."""

    module = "tests.rehearsal.launcher"


class GpuMachine:
    """A machine with pretended GPUs and a launcher on it.

    Args:
        folder: for the files that pretend.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._starts = folder, 0
        self._ended: Queue[messages.AllRanksExited] = Queue()
        self.has("GPU-aaaa,70", "GPU-bbbb,60")
        self.launcher = Rehearsed("cuda")
        self.launcher.listener = self._hear

    def _hear(self, message: messages.LauncherMessage) -> None:
        if isinstance(message, messages.AllRanksExited):
            self._ended.put(message)

    def has(self, *gpus: str) -> None:
        """Let the machine have these GPUs, as nvml.c reads them."""
        (self._folder / "gpus").write_text("".join(f"{gpu}\n" for gpu in gpus))

    def start(
        self, *uuids: str, options: Options | None = None, **environ: str
    ) -> tuple[list[dict[str, Any]], messages.AllRanksExited]:
        """Start a rank on each GPU; returns what each has seen, and the launcher's last word."""
        self._starts += 1
        seen = self._folder / f"seen{self._starts}"
        seen.mkdir()
        run_dir = self.launcher.run_dir
        self.launcher.send(
            messages.LaunchRanksRequest(
                generation=self._starts,
                world_size=len(uuids),
                devices=list(uuids),
                options=(options or Options()).to_json(),
                auto=None,
                hardware=Hardware(kind="cuda", world_size=len(uuids)).to_json(),
                run_dir=str(run_dir.make_start_folder(self._starts)),
                bulk_dir=str(run_dir.payload_dir),
                env={**os.environ, **environ, "NBDIST_TEST_SEEN": str(seen)},
                cwd=str(self._folder),
                path=[SITE, *sys.path],
            )
        )
        ended = self._ended.get(timeout=ENDED_S)
        return [json.loads(file.read_text()) for file in sorted(seen.iterdir())], ended


@pytest.fixture(scope="session")
def gpu_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuMachine]:
    """Give a machine whose launcher has imported everything."""
    folder = tmp_path_factory.mktemp("gpus")
    library = folder / "libnvidia-ml.so.1"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, HERE / "nvml.c"], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_NVML", str(folder / "gpus"))
        patch.setenv("LD_LIBRARY_PATH", str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([SITE, str(HERE.parent.parent)]))
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.delenv("OMP_NUM_THREADS", raising=False)
        made = GpuMachine(folder)
        try:
            yield made
        finally:
            made.launcher.close()
