"""Real kernels, driven over jupyter_client and timed as a front end would.

The time of a cell is from its request to the later of its reply and its `idle`. All
processes of a kernel carry a mark in their environment, so that what a rival leaves behind
can be ended by process id afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil
import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MARK = "NBDIST_BENCH_KERNEL"
START_S = 60.0
GONE_S = 10.0


@dataclass
class Cell:
    """What a cell gave."""

    seconds: float = 0.0
    status: str = ""
    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)
    displays: dict[str, str] = field(default_factory=dict)
    """Last text of each display, by its id."""
    errors: list[str] = field(default_factory=list)
    peak_bytes: int = 0
    """Largest resident memory of the kernel seen while the cell ran, where asked for."""

    @property
    def text(self) -> str:
        return "".join(self.stdout)

    @property
    def page(self) -> str:
        """All text that a reader sees in the end, streams first."""
        return "\n".join([self.text, "".join(self.stderr), *self.displays.values()])


class CellFailed(RuntimeError):  # noqa: N818 - reads as what happened
    """A cell of a benchmark raised: the benchmark is wrong, not slow."""


class Kernel:
    """A kernel process in a temporary folder of its own.

    Args:
        python: the interpreter.
        env: added to this process's environment.
        path: folders put before PATH.
        within: a command that runs it, as `ip netns exec NAME`.
    """

    def __init__(
        self,
        python: str,
        *,
        env: Mapping[str, str] | None = None,
        path: tuple[str, ...] = (),
        within: Sequence[str] = (),
    ) -> None:
        """Start it and wait until it answers."""
        self._folder = tempfile.TemporaryDirectory(prefix="nbb-")
        self.folder = Path(self._folder.name)
        self.mark = secrets.token_hex(8)
        self.manager = KernelManager()
        if within:  # sockets of files are seen from here
            self.manager.transport, self.manager.ip = "ipc", str(self.folder / "k")
        argv = [*within, python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self.manager._kernel_spec = KernelSpec(argv=argv, display_name="bench", language="python")
        with (self.folder / "kernel.log").open("w") as log:
            self.manager.start_kernel(
                cwd=str(self.folder),
                env=self._environment(python, env or {}, path),
                stdout=log,
                stderr=log,
            )
        self.client: BlockingKernelClient = self.manager.client()
        # ZMQ drops what exceeds a high-water mark, unseen: a flood would look as if lines were lost
        self.client.context.setsockopt(zmq.RCVHWM, 0)
        self.client.start_channels()
        self.client.wait_for_ready(timeout=START_S)
        self.process = psutil.Process(self.manager.provisioner.pid)

    def _environment(
        self, python: str, env: Mapping[str, str], path: tuple[str, ...]
    ) -> dict[str, str]:
        folders = (*path, str(Path(python).parent), os.environ["PATH"])
        quiet = {
            "PATH": os.pathsep.join(folders),
            "IPYTHONDIR": str(self.folder / "ipython"),
            "TMPDIR": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
            MARK: self.mark,
        }
        return {**os.environ, **quiet, **env}

    def run(self, code: str, *, timeout_s: float = 300, watch_memory: bool = False) -> Cell:
        """Run one cell and wait for its end.

        Raises:
            CellFailed: it raised, or took longer than `timeout_s`.
        """
        cell = run_on(
            self.client,
            code,
            timeout_s=timeout_s,
            watched=self.process if watch_memory else None,
        )
        if cell.status != "ok":
            msg = f"{cell.status} after {cell.seconds:.0f} s:\n{code}\n{cell.text}\n" + "\n".join(
                cell.errors
            )
            raise CellFailed(msg)
        return cell

    def value(self, expression: str) -> Any:
        """Value of an expression that JSON can carry."""
        cell = self.run(f"import json; print('VALUE ' + json.dumps({expression}))")
        line = next(line for line in cell.text.splitlines() if line.startswith("VALUE "))
        return json.loads(line.removeprefix("VALUE "))

    def tree(self) -> list[psutil.Process]:
        """All processes that carry this kernel's mark: the kernel, and what came of it."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return process.environ().get(MARK) == self.mark
        return False

    def settle(self, *, quiet_s: float = 1.0, deadline_s: float = 90.0) -> None:
        """Wait until no process of the tree has computed anything for `quiet_s`."""
        end = time.monotonic() + deadline_s
        before = -1.0
        while time.monotonic() < end:
            used = sum(cpu_seconds(process) for process in self.tree())
            if abs(used - before) < 0.02 * quiet_s:  # an idle poll loop stays below 2 %
                return
            before = used
            time.sleep(quiet_s)

    def resident_bytes(self) -> int:
        resident: int = self.process.memory_info().rss
        return resident

    def close(self, *, now: bool = False, gone_s: float = GONE_S) -> list[str]:
        """End the kernel; returns names of processes that outlived it, ended by now.

        Args:
            now: kill its process group instead of asking, as Jupyter does before a restart.
            gone_s: how long the processes have for ending.
        """
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=now)
        _, left = psutil.wait_procs(self.tree(), timeout=gone_s)
        names = [process.name() for process in left]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=GONE_S)
        self._folder.cleanup()
        return names

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cpu_seconds(process: psutil.Process) -> float:
    """Processor time that a process has used; 0 for one that has ended."""
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def run_on(
    client: BlockingKernelClient,
    code: str,
    *,
    timeout_s: float,
    watched: psutil.Process | None = None,
) -> Cell:
    cell, idle = Cell(), False
    begin = time.perf_counter()
    request = client.execute(code)
    while not (idle and cell.status):
        if time.perf_counter() - begin > timeout_s:
            cell.status = "no end"
            break
        if not idle:
            idle = take_output(client, request, cell)
            if watched is not None:
                cell.peak_bytes = max(cell.peak_bytes, watched.memory_info().rss)
        else:
            cell.status = reply_status(client, request)
    cell.seconds = time.perf_counter() - begin
    return cell


def take_output(client: BlockingKernelClient, request: str, cell: Cell) -> bool:
    """Take one message of output; True when it says that the cell is over."""
    try:
        message = client.get_iopub_msg(timeout=0.05)
    except queue.Empty:
        return False
    if message["parent_header"].get("msg_id") != request:
        return False
    content = message["content"]
    match message["msg_type"]:
        case "status":
            return bool(content["execution_state"] == "idle")
        case "stream":
            (cell.stdout if content["name"] == "stdout" else cell.stderr).append(content["text"])
        case "display_data" | "update_display_data":
            place = content.get("transient", {}).get("display_id", message["header"]["msg_id"])
            cell.displays[place] = content["data"].get("text/plain", "")
        case "error":
            cell.errors.extend(content["traceback"])
    return False


def reply_status(client: BlockingKernelClient, request: str) -> str:
    """Status of the cell's reply, or "" when it is not there yet."""
    try:
        reply = client.get_shell_msg(timeout=1)
    except queue.Empty:
        return ""
    return (
        str(reply["content"]["status"]) if reply["parent_header"].get("msg_id") == request else ""
    )


def attached(connection_file: Path) -> BlockingKernelClient:
    """A client of a kernel that somebody else started, such as one rank."""
    client = BlockingKernelClient()
    client.load_connection_file(str(connection_file))
    client.start_channels(hb=False, stdin=False, control=False)
    client.wait_for_ready(timeout=START_S)
    return client
