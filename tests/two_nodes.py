"""A cluster of nodes on this machine: real agents, each of which takes itself for a machine.

Plain, all have the address of loopback. With `hosts` each runs in a network namespace of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, ClassVar, Self

import psutil

from nbdist.cluster.allocation import AllocatedNode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ENDED_S = 10.0


class LocalNodes:
    """Nodes on this machine, `ranks` on each."""

    name = "double"
    module = "nbdist.cluster.agent"
    """Of the agents."""
    kernel_address = "127.0.0.1"

    def __init__(self, *names: str, ranks: int = 1) -> None:
        """Give these nodes, in this order."""
        self.names = list(names)
        self.ranks = ranks
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        """By name of the node."""
        self.tickets: list[str] = []
        self.messages: dict[int, str] = {}
        """What `lost_nodes` says."""
        self.drained: dict[int, float | None] = {}
        """What `drained_nodes` says."""
        self.unreachable: set[str] = set()
        """Nodes that cannot be told to end."""
        self._given: list[AllocatedNode] = []

    def allocate_nodes(self, progress: Callable[[str], None]) -> list[AllocatedNode]:
        progress("waiting in no queue")
        self._given = [self.place(name) for name in self.names]
        return self._given

    def place(self, name: str) -> AllocatedNode:
        return AllocatedNode(name=name, address=self.kernel_address, ranks=self.ranks)

    def start_agents(self, tickets: Sequence[str]) -> None:
        self.tickets = list(tickets)
        for place, ticket in zip(self._given, tickets, strict=True):
            agent = subprocess.Popen(
                [*self.prefix(place.name), sys.executable, "-m", self.module],
                stdin=subprocess.PIPE,
                env={**os.environ, "NBDIST_TEST_NODE": place.name},
                start_new_session=True,
            )
            self.agents[place.name] = agent
            assert agent.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended, which `lost_nodes` may tell
                agent.stdin.write(f"{ticket}\n".encode())
                agent.stdin.flush()

    def prefix(self, name: str) -> list[str]:  # noqa: ARG002 - of a subclass
        """Command that runs another one on a node."""
        return []

    def lost_nodes(self) -> Mapping[int, str]:
        return self.messages

    def drained_nodes(self) -> Mapping[int, float | None]:
        return self.drained

    def close(self) -> None:
        """End the agents; what they do not end themselves stays, for the test to find."""
        for name, agent in self.agents.items():
            if name in self.unreachable:
                continue
            try:
                agent.wait(0.1)
            except subprocess.TimeoutExpired:
                agent.send_signal(signal.SIGKILL)
                agent.wait(ENDED_S)
            assert agent.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                agent.stdin.close()
        self.agents.clear()
        self.messages.clear()

    def processes(self, name: str) -> list[psutil.Process]:
        """Everything that runs on a node: the agent, the launcher, ranks."""
        agent = psutil.Process(self.agents[name].pid)
        return [agent, *agent.children(recursive=True)]


class Hosts:
    """Two network namespaces that a cable connects; only root can make them."""

    addresses: ClassVar = {"alpha": "10.213.0.1", "beta": "10.213.0.2"}

    def __init__(self, prefix: str | None = None, *, slow: Sequence[float] = ()) -> None:
        """Make nothing yet.

        Args:
            prefix: names those that somebody else has made.
            slow: delay in seconds, share of packets that are lost, bytes a second of the link.
        """
        self._slow, self._link = slow, None
        self.prefix = f"nbd{os.getpid()}" if prefix is None else prefix
        self.spaces = {name: f"{self.prefix}{name[0]}" for name in self.addresses}

    def __enter__(self) -> Self:
        """Make them; raises OSError where that is not allowed."""
        try:
            for name in self.spaces:
                _ip("netns", "add", self.spaces[name])
                _ip("-n", self.spaces[name], "link", "set", "lo", "up")
            if self._slow:
                self._connect_slowly()
            else:
                self._connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _connect(self) -> None:
        one, other = self.spaces.values()
        ends = ["cable", "netns", one, "type", "veth", "peer", "cable", "netns", other]
        _ip("link", "add", *ends)
        for name, space in self.spaces.items():
            _ip("-n", space, "addr", "add", f"{self.addresses[name]}/24", "dev", "cable")
            _ip("-n", space, "link", "set", "cable", "up")

    def _connect_slowly(self) -> None:
        ends = [f"{self.spaces[name]}={address}" for name, address in self.addresses.items()]
        self._link = subprocess.Popen(
            [sys.executable, "-m", "tests.slow_network", *map(str, self._slow), *ends],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._link.stdout is not None
        if not self._link.stdout.readline():
            raise OSError("no TUN devices can be made")

    def __exit__(self, *_: object) -> None:
        if self._link is not None:
            self._link.communicate()
        for space in self.spaces.values():
            with contextlib.suppress(OSError):  # it was not made
                _ip("netns", "del", space)

    def cut(self, name: str) -> None:
        """Pull the cable out of a host."""
        _ip("-n", self.spaces[name], "link", "set", "cable", "down")

    def inside(self, name: str) -> list[str]:
        """Command that runs another one on a host."""
        return ["ip", "netns", "exec", self.spaces[name]]


class NodesOnHosts(LocalNodes):
    """Nodes on these hosts; the notebook runs on alpha."""

    kernel_address = Hosts.addresses["alpha"]

    def __init__(self, hosts: Hosts) -> None:
        super().__init__(*hosts.spaces)
        self._hosts = hosts

    def place(self, name: str) -> AllocatedNode:
        return AllocatedNode(name=name, address=Hosts.addresses[name], ranks=self.ranks)

    def prefix(self, name: str) -> list[str]:
        return self._hosts.inside(name)


def _ip(*arguments: str) -> None:
    """Change the network; raises OSError."""
    try:
        subprocess.run(["/usr/bin/env", "ip", *arguments], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        raise OSError(error.stderr.decode()) from error
