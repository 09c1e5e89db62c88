"""A Slurm of its own on this machine, with two nodes: Debian's munged, slurmctld, slurmd."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import psutil

from tests.conftest import eventually
from tests.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "srun")
NODES = ("nodea", "nodeb")
CONF = """\
ClusterName=nbdist
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=2
{nodes}
PartitionName=short Nodes=nodea,nodeb Default=YES MaxTime=60 State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=2000"


@dataclass
class Slurm:
    """The daemons. A context manager."""

    folder: Path
    """Absolute and private."""
    pids: list[int] = field(default_factory=list)

    @property
    def environ(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *command: str) -> str:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, **self.environ},
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def jobs(self) -> list[str]:
        """Numbers of all jobs that it has."""
        return self.call("squeue", "--noheader", "--format", "%i").split()

    def holding_all(self) -> subprocess.Popen[bytes]:
        """Let a job of somebody else hold all nodes."""
        command = ["srun", "--nodes=2", "--exclusive", "sleep", "1000"]
        return subprocess.Popen(command, env={**os.environ, **self.environ})

    @contextmanager
    def allocation(self) -> Iterator[dict[str, str]]:
        """A job of both nodes that outlives one of them; the environment inside."""
        self.call("salloc", "--nodes=2", "--no-shell", "--quiet", "--no-kill")
        (job,) = self.jobs()
        try:
            yield {"SLURM_JOB_ID": job, "SLURM_JOB_NUM_NODES": "2", **self.environ}
        finally:
            self.call("scancel", job)

    def update(self, node: str, state: str) -> None:
        """Tell Slurm what becomes of a node: down, resume."""
        self.call("scontrol", "update", f"nodename={node}", f"state={state}", "reason=test")

    def kill(self, node: str) -> None:
        """Let a node die: its slurmd, and everything that its tasks run."""
        self._end(self.folder / f"{node}.pid", signal.SIGKILL)
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == node:
                    process.kill()

    @contextmanager
    def dead(self, node: str) -> Iterator[None]:
        """A node that dies in here, and is there again afterwards."""
        try:
            yield
        finally:
            self.call("slurmd", "-N", node)
            self.update(node, "down")  # ends what it was thought to be still running
            self.revive(node)

    def revive(self, node: str) -> None:
        """Have a node take jobs that Slurm was told is down."""
        with suppress(AssertionError):  # its slurmd has registered in between
            self.update(node, "resume")
        state = ("sinfo", "--noheader", "--nodes", node, "--format", "%T")
        eventually(lambda: "down" not in self.call(*state), within_s=30)

    def __enter__(self) -> Self:
        folder, host = self.folder, socket.gethostname().split(".")[0]
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.touch(mode=0o400)
        key.write_bytes(secrets.token_bytes(128))
        nodes = "\n".join(NODE.format(name=n, host=host, port=free_port()) for n in NODES)
        conf = CONF.format(host=host, ctld=free_port(), folder=folder, nodes=nodes)
        (folder / "slurm.conf").write_text(conf)
        files = {"key-file": key, "socket": folder / "munge.sock", "pid-file": folder / "munge.pid"}
        files |= {"log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}
        self.call(munged(), "--force", *(f"--{name}={path}" for name, path in files.items()))
        self.call("slurmctld")
        for name in NODES:
            self.call("slurmd", "-N", name)
        idle = "idle\nidle"
        states = ("sinfo", "--noheader", "--Node", "--format", "%T")
        eventually(lambda: self.call(*states).strip() == idle, within_s=30)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(AssertionError):
            for job in self.jobs():
                self.call("scancel", job)
            eventually(lambda: not self.jobs(), within_s=20)
        for name in (*(f"{node}.pid" for node in NODES), "ctld.pid", "munge.pid"):
            self._end(self.folder / name)
        shutil.rmtree(self.folder, ignore_errors=True)

    @staticmethod
    def _end(pid_file: Path, how: signal.Signals = signal.SIGTERM) -> None:
        with suppress(psutil.Error, OSError, ValueError):
            process = psutil.Process(int(pid_file.read_text()))
            process.send_signal(how)
            with suppress(psutil.TimeoutExpired):
                process.wait(10)
                return
            process.kill()


def munged() -> str:
    """Where it is: not in every root's path."""
    return shutil.which("munged") or "/usr/sbin/munged"


def missing() -> Sequence[str]:
    """Which of the daemons are not installed here."""
    return [name for name in DAEMONS if shutil.which(name) is None]
