"""Hosts on one machine: network namespaces on a switch, and Ray in them."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from tests.conftest import eventually

NETWORK = "10.213.0"
PORT = 6379
UP_S = 120.0


def call(*command: str, environ: dict[str, str] | None = None) -> str:
    """Run a command of the system; what it wrote."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=UP_S, env=environ
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass
class Host:
    """One of them."""

    name: str
    """Of its namespace and of its end of the link."""
    address: str

    @property
    def within(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    def link(self, state: str) -> None:
        """Pull out the cable, or put it back: down, up."""
        call("ip", "-n", self.name, "link", "set", self.name, state)

    def processes(self, words: str = "") -> set[psutil.Process]:
        """That run there and have these words in their command line."""
        found = set()
        for pid in call("ip", "netns", "pids", self.name).split():
            with suppress(psutil.Error):
                process = psutil.Process(int(pid))
                line = " ".join(process.cmdline())
                if words in line and process.status() != psutil.STATUS_ZOMBIE:
                    found.add(process)
        return found

    def kill(self, words: str = "") -> None:
        """Kill what has these words in its command line."""
        for process in self.processes(words):
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)

    def ours(self) -> set[psutil.Process]:
        """What a cluster has started for nbdist: agent, launcher, ranks.

        A notebook's own launcher, which warms up for ranks beside it, is none of that.
        """
        notebooks = [f"nbdist-{one.pid}-" for one in self.processes("ipykernel")]
        found = set()
        for process in self.processes("nbdist."):
            with suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if not any(folder in line for folder in notebooks):
                    found.add(process)
        return found


@dataclass
class Hosts:
    """All of them, and the cluster on the first two. A context manager."""

    all: list[Host]
    switch: str
    """Namespace of what connects them."""
    folder: Path
    """Private, with Ray's token and its own folders."""
    environ: dict[str, str] = field(default_factory=dict)
    """With which Ray and its users run."""

    @classmethod
    def made(cls, count: int = 3) -> Self:
        """Make the namespaces; raises AssertionError where that is not possible."""
        stem = f"nbd{os.getpid() % 10000}"
        made = [Host(f"{stem}{chr(ord('a') + n)}", f"{NETWORK}.{n + 1}") for n in range(count)]
        # short: Ray puts sockets below it, whose paths may have 107 characters
        folder = Path(tempfile.mkdtemp(prefix="nbr", dir="/tmp"))
        hosts = cls(made, f"{stem}s", folder)
        within = ("ip", "-n", hosts.switch, "link")
        call("ip", "netns", "add", hosts.switch)
        call(*within, "add", "switch", "type", "bridge")
        call(*within, "set", "switch", "up")
        for host in made:
            call("ip", "netns", "add", host.name)
            ends = (host.name, "netns", host.name, "type", "veth", "peer", "name", host.name)
            call("ip", "link", "add", *ends, "netns", hosts.switch)
            call(*within, "set", host.name, "master", "switch", "up")
            call("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", host.name)
            call("ip", "-n", host.name, "link", "set", "lo", "up")
            host.link("up")
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        hosts.environ = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
        }
        return hosts

    @property
    def here(self) -> Host:
        return self.all[0]

    @property
    def there(self) -> Host:
        """The other one of the cluster, as a rule."""
        return self.all[1]

    @property
    def third(self) -> Host:
        """One more: a test that needs it starts Ray there."""
        return self.all[2]

    def ours(self) -> set[psutil.Process]:
        return set().union(*(host.ours() for host in self.all))

    def start_ray(self, host: Host, *, hidden: Path | None = None, **environ: str) -> None:
        """Start its node of the cluster.

        Args:
            host: which.
            hidden: a folder that is empty for this node.
            environ: variables it has beside ours.
        """
        hiding = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden)]
        head = ["--head", "--port", str(PORT), "--include-dashboard=false"]
        join = ["--address", f"{self.here.address}:{PORT}"]
        call(
            *(
                *host.within,
                *(hiding if hidden else []),
                sys.executable,
                "-m",
                "ray.scripts.scripts",
                "start",
            ),
            *(head if host is self.here else join),
            *("--node-ip-address", host.address, "--temp-dir", str(self.folder / host.name)),
            *("--num-cpus", "2", "--num-gpus", "0", "--object-store-memory", "100000000"),
            *("--disable-usage-stats", "--include-log-monitor=false"),
            *(["--ray-client-server-port", "10001"] if host is self.here else []),
            environ={**self.environ, **environ},
        )

    def __enter__(self) -> Self:
        self.start_ray(self.here)
        self.start_ray(self.there)
        return self

    def __exit__(self, *_: object) -> None:
        """End what still runs in them, and the hosts."""
        for host in self.all:
            host.kill()
            eventually(lambda host=host: not host.processes(), within_s=20)
            call("ip", "netns", "delete", host.name)
        call("ip", "netns", "delete", self.switch)
        shutil.rmtree(self.folder, ignore_errors=True)
