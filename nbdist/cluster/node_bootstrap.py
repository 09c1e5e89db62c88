"""Bootstrap process on a cluster node: reports its resources and runs the agent as a child.

Runs on the node as a Ray actor, or as `python -m nbdist.cluster.node_bootstrap` under Slurm's srun.
Only this process holds the agent's stdin open, so the agent ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.cluster.allocation import software_versions
from nbdist.cluster.launcher_process import ProcessLogTail
from nbdist.errors import StartError
from nbdist.hardware import discovery
from nbdist.paths import PACKAGE_DIR

if TYPE_CHECKING:
    from collections.abc import Mapping

STDOUT_MARKER = "nbdist-place "
"""Prefix of the lines that an srun task sends to the kernel; other scripts may print too."""
END_S = 10.0
"""Time for the agent to end launcher and ranks before it is killed."""
DRAIN_POLL_S = 1.0
LOG_TAIL_BYTES = 2000
DROPPED_ENV_PREFIXES = ("RAY_", "OMP_NUM_THREADS", "SLURM_", "PMI_", "PMIX_")
"""Prefixes of environment variables that the cluster sets only for its own process."""


def local_address_toward(toward: str) -> str:
    """Return this machine's own address on the route to another."""
    family = socket.AF_INET6 if ":" in toward else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connect() sends nothing for UDP
        probe.connect((toward, 9))
        return str(probe.getsockname()[0])


def interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface of this machine.

    Raises:
        StartError: no such interface, or it has no address.
    """
    import psutil  # takes 20 ms; rarely needed

    known = psutil.net_if_addrs()
    for address in known.get(name, ()):
        if address.family == socket.AF_INET:
            return str(address.address)
    raise StartError(
        f"{socket.gethostname()} has no interface {name!r} with an IPv4 address. Use one of"
        f" {', '.join(known)}."
    )


class NodeBootstrap:
    """The kernel's interface to a node: describes it and runs the agent. Ray makes an actor of it.

    The agent is a child process, which ends when its stdin is closed.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def describe_node(self, toward: str, interface: str, folder: str) -> dict[str, Any]:
        """Return a description of this node, or in "error" why it cannot be used.

        Args:
            toward: an address that the nodes must reach, the notebook's or the head's.
            interface: network interface to use, such as "ib0"; "": the one that routes there.
            folder: the notebook's working folder.
        """
        try:
            address = interface_address(interface) if interface else local_address_toward(toward)
        except (OSError, StartError) as error:
            return {"host": socket.gethostname(), "error": str(error)}
        return {
            "host": socket.gethostname(),
            "address": address,
            "has_folder": Path(folder).is_dir(),
            "gpus": [gpu.uuid for gpu in discovery.discover_machine().gpus],
            "versions": software_versions(),
        }

    def run(self, ticket: str) -> str:
        """Run the agent until it ends; return the reason as text for the kernel.

        Args:
            ticket: ticket from the kernel, a secret; only written to the agent's stdin.
        """
        log = ProcessLogTail()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nbdist.cluster.agent"],  # -P: no "" in sys.path
                stdin=subprocess.PIPE,
                stdout=log.write_fd,
                stderr=log.write_fd,
                env=agent_environment(os.environ),
            )
            os.close(log.write_fd)
            if self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # its exit code is reported
                    self._process.stdin.write(ticket.encode() + b"\n")
                    self._process.stdin.flush()
            code = self._process.wait()
            tail = log.tail(LOG_TAIL_BYTES).strip() if code else ""
        finally:
            log.close()
        exit_text = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"its agent {exit_text}" + (
            f"; last output: {tail.splitlines()[-1]}" if tail else ""
        )

    def wait_for_drain(self) -> float | None:
        """Return when Ray drains this node: the Unix time at which it ends, None if not known."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        while True:
            # ray 2.60 has no public name; its Train library polls it too.
            draining = ray._private.state.state.get_draining_nodes()  # noqa: SLF001
            if node in draining:
                return draining[node] / 1000 or None
            time.sleep(DRAIN_POLL_S)

    def end(self) -> None:
        """End the agent with all that it started; kill it after a timeout."""
        if self._process is None or self._process.stdin is None:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


def agent_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the agent's environment: without cluster variables, with nbdist's import path."""
    environment = {
        name: v for name, v in environ.items() if not name.startswith(DROPPED_ENV_PREFIXES)
    }
    own = str(PACKAGE_DIR.parent)  # possibly copied here by the cluster
    before = environment.get("PYTHONPATH")
    return environment | {"PYTHONPATH": own + (os.pathsep + before if before else "")}


def serve_srun_task(index: int) -> None:
    """Serve an srun task: read lines of JSON from stdin, answer with marked lines on stdout.

    {"about": [toward, interface, folder]}, then {"tickets": [...]} by task number. At the end of
    stdin everything here ends.
    """
    node = NodeBootstrap()

    def answer(**what: Any) -> None:
        sys.stdout.write(f"{STDOUT_MARKER}{json.dumps({'task': index, **what})}\n")
        sys.stdout.flush()

    for line in sys.stdin:
        request = json.loads(line)
        if "about" in request:
            toward, interface, folder = request["about"]
            toward = toward or os.environ.get("SLURM_SRUN_COMM_HOST", "127.0.0.1")
            description = node.describe_node(toward, interface, folder) | {"toward": toward}
            description["host"] = os.environ.get("SLURMD_NODENAME") or description["host"]
            answer(about=description)
        else:
            ticket = request["tickets"][index]
            threading.Thread(
                target=lambda ticket: answer(ended=node.run(ticket)),
                args=(ticket,),
                name="agent",
                daemon=True,
            ).start()
    node.end()


if __name__ == "__main__":
    serve_srun_task(int(os.environ.get("SLURM_PROCID", "0")))
