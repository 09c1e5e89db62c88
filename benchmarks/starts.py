"""How long it takes until ranks are ready: the first cell, and a restart."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import rival_packages
from kernels import Kernel
from results import Row, middle

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUNDS = 3
RESTARTS = 7
BARRIER = "torch.distributed.barrier()"
SCRIPT = """
from accelerate import Accelerator

Accelerator(cpu=True).wait_for_everyone()
"""


def measure(others: rival_packages.Rivals, build: Path) -> Iterator[Row]:
    """Rows about starting; nbdist and the others in turns."""
    first, full, fresh, launched = [], [], [], []
    script = build / "barrier.py"
    script.write_text(SCRIPT)
    for _ in range(ROUNDS):
        full.append(ipyparallel_start(others))
        with Kernel(sys.executable) as kernel:
            first.append(first_cell(kernel))
            fresh += [restart(kernel) for _ in range(RESTARTS)]
        launched.append(launch(script))
    yield Row(
        name="first cell to a passed barrier, against ipyparallel + group",
        value=middle(first) / middle(full),
        unit="x",
        limit=0.2,
        detail=f"{middle(first):.2f} s / {middle(full):.1f} s",
    )
    yield Row(
        name="--fresh to a passed barrier, against accelerate launch",
        value=middle(fresh) / middle(launched),
        unit="x",
        limit=0.5,
        detail=f"{middle(fresh):.2f} s / {middle(launched):.1f} s",
    )
    yield Row(
        name="--fresh to a passed barrier",
        value=middle(fresh),
        unit="s",
        limit=1,
        detail=f"{min(fresh):.2f} - {max(fresh):.2f} s",
    )


def ipyparallel_start(others: rival_packages.Rivals) -> float:
    """Seconds until ipyparallel's engines have torch and a gloo group."""
    with others.kernel() as kernel:
        seconds = rival_packages.start_ipyparallel(kernel)
        rival_packages.stop_ipyparallel(kernel)
    return seconds


def first_cell(kernel: Kernel) -> float:
    """Seconds of the first cell once the launcher has warmed up in the background."""
    kernel.run("%load_ext nbdist")
    kernel.settle()
    return kernel.run(f"%%distribute -n 2\n{BARRIER}").seconds


def restart(kernel: Kernel) -> float:
    """Seconds of a cell that takes new ranks first."""
    return kernel.run(f"%%distribute --fresh\n{BARRIER}").seconds


def launch(script: Path) -> float:
    """Seconds of `accelerate launch` of a script that passes one barrier."""
    begin = time.perf_counter()
    subprocess.run(
        launch_command(script),
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - begin


def launch_command(script: Path, *arguments: str) -> list[str]:
    """Command line for two CPU ranks.

    accelerate 1.15: `--cpu` alone starts one process; `--multi_gpu` starts the elastic
    agent, and the script's `Accelerator(cpu=True)` makes gloo ranks of them.
    """
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    options = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
    chosen = [*options.split(), "--dynamo_backend", "no", "--main_process_port", str(free_port())]
    return [accelerate, "launch", *chosen, str(script), *arguments]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
