"""What runs on a node for its cluster: says what is there, holds the agent as a child.

Executed on the node: as a Ray actor's class, or as `python -m nbdist.cluster.bootstrap` by Slurm's
srun. The agent ends when this process does, since only this process holds its input open.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import nbdist
from nbdist.cluster.process_log import Log
from nbdist.errors import StartError
from nbdist.hardware import discovery

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MARK = "nbdist-place "
"""Begins each line that a task of srun says to the kernel; a site's own scripts may print too."""
END_S = 10.0
"""For the agent to end launcher and ranks before it is killed."""
LOG_TAIL_BYTES = 2000
NOT_HANDED_ON = ("RAY_", "OMP_NUM_THREADS", "SLURM_", "PMI_", "PMIX_")
"""Beginnings of variables that the cluster has set for its own process alone."""


def versions() -> dict[str, str]:
    """Of what kernel and ranks must have in common; imports no torch."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    return {
        "python": platform.python_version(),
        "torch": torch,
        "nbdist": nbdist.__version__,
    }


def about(toward: str, interface: str, folder: str) -> dict[str, Any]:
    """Say what this node is, or in "error" why it cannot take part.

    Args:
        toward: an address that the nodes must reach, the notebook's or the head's.
        interface: of the network to use, as "ib0"; "": the one that leads there.
        folder: where the notebook works.
    """
    try:
        address = of_interface(interface) if interface else leading(toward)
    except (OSError, StartError) as error:
        return {"host": socket.gethostname(), "error": str(error)}
    gpus = discovery.found().gpus
    return {
        "host": socket.gethostname(),
        "address": address,
        "has_folder": Path(folder).is_dir(),
        "gpus": [gpu.uuid for gpu in gpus],
        "capability": min((gpu.capability for gpu in gpus), default=None),
        "versions": versions(),
    }


def check(told: Iterable[Mapping[str, Any]]) -> None:
    """Refuse nodes that cannot take part.

    Args:
        told: what each said `about` itself.

    Raises:
        StartError: the first one's reason.
    """
    for one in told:
        if "error" in one:
            raise StartError(f"{one['host']} cannot take part: {one['error']}")


def check_folder(told: Iterable[Mapping[str, Any]], folder: str) -> None:
    """Refuse nodes that do not have the notebook's folder.

    Raises:
        StartError: which do not.
    """
    without = [one["host"] for one in told if not one["has_folder"]]
    if without:
        raise StartError(
            f"There is no folder {folder} on {', '.join(without)}, where the notebook works; open"
            " it in a folder that all nodes share under the same path."
        )


def leading(toward: str) -> str:
    """This machine's own address on the way to another."""
    family = socket.AF_INET6 if ":" in toward else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((toward, 9))
        return str(probe.getsockname()[0])


def of_interface(name: str) -> str:
    """The address of an interface of this machine.

    Raises:
        StartError: there is none of this name with an address.
    """
    import psutil  # 20 ms that a kernel need not wait for

    known = psutil.net_if_addrs()
    for one in known.get(name, ()):
        if one.family == socket.AF_INET:
            return str(one.address)
    raise StartError(
        f"{socket.gethostname()} has no interface {name!r} with an address; it has"
        f" {', '.join(known)}."
    )


class Agent:
    """The agent's process, held by its standard input."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, ticket: str) -> str:
        """Run the agent until it ends; returns why, in words, for the kernel.

        Args:
            ticket: of the kernel's hub, a secret; nobody but the agent's input gets it.
        """
        log = Log()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nbdist.cluster.agent.child"],  # -P: not the folder's
                stdin=subprocess.PIPE,
                stdout=log.writing,
                stderr=log.writing,
                env=handed_on(os.environ),
            )
            log.started()
            self._tell(self._process.stdin, ticket)
            return self._ended(self._process.wait(), log)
        finally:
            log.close()

    def end(self) -> None:
        """End the agent with all that it has started; killed if it does not."""
        if self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    @staticmethod
    def _tell(pipe: IO[bytes] | None, ticket: str) -> None:
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # its end is told by its code
                pipe.write(ticket.encode() + b"\n")
                pipe.flush()

    @staticmethod
    def _ended(code: int, log: Log) -> str:
        tail = log.tail(LOG_TAIL_BYTES).strip() if code else ""
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"its agent {how}" + (f"; it said last: {tail.splitlines()[-1]}" if tail else "")


class Node(Agent):
    """What the kernel calls on a node; Ray makes an actor of it."""

    def about(self, toward: str, interface: str, folder: str) -> dict[str, Any]:
        """As the function of this name."""
        return about(toward, interface, folder)


def handed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """The agent's environment: this one, without what is the cluster's, with our own path."""
    kept = {name: v for name, v in environ.items() if not name.startswith(NOT_HANDED_ON)}
    own = str(Path(nbdist.__file__).parents[1])  # perhaps brought here by the cluster
    before = kept.get("PYTHONPATH")
    return kept | {"PYTHONPATH": own + (os.pathsep + before if before else "")}


class Task:
    """One task of srun: takes lines of JSON on its input, answers with marked lines.

    {"about": [toward, interface, folder]}, then {"tickets": [...]} by the number of the task. The
    end of the input is the end of everything here.
    """

    def __init__(self, index: int) -> None:
        """Make the task of this number."""
        self._index, self._node = index, Node()

    def run(self) -> None:
        """Serve until the input ends."""
        for line in sys.stdin:
            asked = json.loads(line)
            if "about" in asked:
                self._about(*asked["about"])
            else:
                self._start(asked["tickets"][self._index])
        self._node.end()

    def _about(self, toward: str, interface: str, folder: str) -> None:
        toward = toward or os.environ.get("SLURM_SRUN_COMM_HOST", "127.0.0.1")
        told = about(toward, interface, folder) | {"toward": toward}
        told["host"] = os.environ.get("SLURMD_NODENAME") or told["host"]
        self._say(about=told)

    def _start(self, ticket: str) -> None:
        def run() -> None:
            self._say(ended=self._node.run(ticket))

        threading.Thread(target=run, name="agent", daemon=True).start()

    def _say(self, **what: Any) -> None:
        text = json.dumps({"task": self._index, **what})
        sys.stdout.write(f"{MARK}{text}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    Task(int(os.environ.get("SLURM_PROCID", "0"))).run()
