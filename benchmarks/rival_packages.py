"""The rivals, installed from their registry packages into an environment of the benchmark's own.

build/bench-env sees the packages of .venv through a .pth file, so that all run on the same
torch, ipykernel and Python; only the rivals themselves are installed into it.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import time
import venv
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels import Kernel

if TYPE_CHECKING:
    from pathlib import Path

PINNED = ("ipyparallel==9.2.0", "nbdistributed==0.1.0")
STUB = """#!/bin/sh
# nbdistributed ends processes by name pattern; here it may not.
echo "$@" >> "$0.log"
"""

TORCH_GROUP = """
import socket
probe = socket.socket(); probe.bind(("127.0.0.1", 0)); port = probe.getsockname()[1]; probe.close()
rc[:].block = True
for number in range(2):
    rc[number].push(dict(RANK=number, PORT=port), block=True)
rc[:].execute('''
import os
os.environ.update(RANK=str(RANK), LOCAL_RANK=str(RANK), WORLD_SIZE="2",
                  MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT))
dist.init_process_group("gloo")
dist.barrier()
''')
"""
NBDISTRIBUTED_READY = """
communication = get_ipython().magics_manager.registry["DistributedMagic"]._comm_manager
while True:
    try:
        communication.send_to_all("get_status", {}, timeout=0.2)
        break
    except TimeoutError:
        pass
"""


@dataclass(frozen=True, slots=True)
class Rivals:
    """The rivals' environment."""

    python: str
    stubs: str
    """Folder with a `pkill` that only writes down what it was asked."""

    @classmethod
    def installed(cls, build: Path) -> Rivals:
        """Make build/bench-env, or use the one made before."""
        folder = build / "bench-env"
        python = folder / "bin" / "python"
        stamp = folder / ".ready"
        if not (stamp.exists() and stamp.read_text() == repr(PINNED)):
            print(f"==> making {folder} with {', '.join(PINNED)}", flush=True)
            make(folder, python)
            stamp.write_text(repr(PINNED))
        return cls(str(python), str(folder / "stubs"))

    def kernel(self) -> Kernel:
        """A kernel in which both rivals can be imported."""
        return Kernel(self.python, path=(self.stubs,))


def make(folder: Path, python: Path) -> None:
    """Create the environment and install the rivals into it."""
    venv.create(folder, with_pip=True, clear=True)
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (site / "nbdist-bench.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    stubs = folder / "stubs"
    stubs.mkdir()
    stub = stubs / "pkill"
    stub.write_text(STUB)
    stub.chmod(0o755)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    ipyparallel, nbdistributed = PINNED
    subprocess.run([*pip, ipyparallel], check=True)
    # its own requirements would bring another torch; what it imports is in .venv
    subprocess.run([*pip, "--no-deps", nbdistributed], check=True)


def start_ipyparallel(kernel: Kernel) -> float:
    """Two engines with torch and a gloo group that has passed a barrier; seconds it took."""
    begin = time.perf_counter()
    kernel.run(
        "import ipyparallel as ipp\n"
        "cluster = ipp.Cluster(n=2, log_level=40)\n"
        "rc = cluster.start_and_connect_sync(activate=True)"
    )
    kernel.run("%%px\nimport torch, torch.distributed as dist")
    kernel.run(TORCH_GROUP)
    return time.perf_counter() - begin


def stop_ipyparallel(kernel: Kernel) -> None:
    """End engines and controller the way its manual says."""
    kernel.run("cluster.stop_cluster_sync()")


def start_nbdistributed(kernel: Kernel) -> None:
    """Two of its processes that really answer (its own "ready" comes earlier)."""
    kernel.run("%load_ext nbdistributed")
    kernel.run("%dist_init -n 2")
    kernel.run("%dist_mode --disable")
    kernel.run(NBDISTRIBUTED_READY)
