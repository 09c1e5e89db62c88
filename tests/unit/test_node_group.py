"""The kernel's side of several nodes: which ranks each gets, their end, the loss of one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from nbdist.cluster import protocol
from nbdist.cluster.allocation import AllocatedNode
from nbdist.cluster.launcher_process import EXITED
from nbdist.cluster.local_launcher import LAUNCHER_GONE
from nbdist.cluster.node_group import NodeGroup
from nbdist.protocol import messages
from tests.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.cluster.rank_channels import RankChannels

GENERATION = 4


class Agent:
    """The connection of one node, without a launcher behind it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], ticket: str) -> None:
        given = protocol.AgentCredentials.from_json(ticket)
        self.has_ended = False
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.curve_serverkey = given.hub_key.encode()
        self.socket.curve_publickey = given.public.encode()
        self.socket.curve_secretkey = given.secret.encode()
        self.socket.connect(given.hub)
        self.send(protocol.AgentHello(launcher=2, run_dir="/run", bulk_dir="/bulk", machine={}))

    def send(self, message: protocol.Message) -> None:
        self.socket.send_multipart(protocol.pack_message(message))

    def tell(self, line: messages.LauncherMessage) -> None:
        """Send what the node's launcher says."""
        self.send(protocol.LauncherLinkMessage(messages.encode_line(line).decode()))

    def heard(self, kind: type[Any]) -> Any:
        """Read up to the next message of this kind."""
        while self.socket.poll(5000):
            message, _ = protocol.unpack_message(self.socket.recv_multipart())
            if isinstance(message, kind):
                return message
        pytest.fail(f"no {kind.__name__} was sent")

    def answer(self) -> None:
        """Answer the last request, for the log."""
        self.send(protocol.AgentReply(self.heard(protocol.AgentRequest).id, ""))

    def end(self) -> None:
        self.heard(protocol.StopAgentRequest)
        self.send(protocol.AgentExited("ended"))
        self.has_ended = True


class TwoNodes:
    """A cluster with two ranks on each of two nodes."""

    name = "double"
    kernel_address = "127.0.0.1"

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.context = context
        self.agents: list[Agent] = []

    def allocate_nodes(self, _progress: object) -> list[AllocatedNode]:
        return [
            AllocatedNode(name=name, address=f"10.0.0.{number}", ranks=2)
            for number, name in enumerate(["alpha", "beta"], 1)
        ]

    def start_agents(self, tickets: Sequence[str]) -> None:
        self.agents = [Agent(self.context, ticket) for ticket in tickets]

    def drained_nodes(self) -> Mapping[int, float | None]:
        return {}

    def lost_nodes(self) -> Mapping[int, str]:
        return {}

    def close(self) -> None:
        """Nothing is reserved."""


class Heard:
    """What a session is told."""

    def __init__(self, group: NodeGroup, cluster: TwoNodes) -> None:
        self.group, self.agents = group, cluster.agents
        self.lines: list[messages.LauncherMessage] = []
        self.channels: list[RankChannels] = []
        group.listener = self.lines.append

    def on_message(self, *_: Any) -> None:
        """No rank says anything."""

    def on_idle(self) -> bool:
        return False

    def launch(self, world_size: int) -> None:
        launch = messages.LaunchRanksRequest(GENERATION, world_size, None, {}, None, {}, "", "")
        self.channels.append(self.group.launch(launch, "key", self))


@pytest.fixture
def heard() -> Iterator[Heard]:
    with zmq.Context() as context:
        cluster = TwoNodes(context)
        group = NodeGroup(cluster, "cpu")
        group.start(lambda _: None)
        made = Heard(group, cluster)
        yield made
        for channels in made.channels:
            channels.close()
        closing = threading.Thread(target=group.close)
        closing.start()
        left = [agent for agent in made.agents if not agent.has_ended]
        for agent in left:
            agent.answer()
        for agent in left:
            agent.end()
        closing.join()
        for agent in made.agents:
            agent.socket.close()


def test_nodes_get_ranks_in_their_order(heard: Heard) -> None:
    heard.launch(3)
    fields = [agent.heard(protocol.LaunchNodeRanksRequest).fields for agent in heard.agents]
    assert [(one["first"], one["here"], one["node"], one["nodes"]) for one in fields] == [
        (0, 2, 0, 2),
        (2, 1, 1, 2),
    ]
    assert [heard.group.node_of(rank) for rank in range(4)] == ["alpha", "alpha", "beta", ""]
    assert [one["name"] for one in heard.group.describe()] == [
        "the launcher on alpha",
        "the launcher on beta",
    ]


def test_nodes_are_warm_once_each_launcher_is(heard: Heard) -> None:
    for agent in heard.agents:
        assert not heard.group.is_warm
        agent.tell(messages.LauncherReady())
    eventually(lambda: heard.lines == [messages.LauncherReady()], within_s=5)
    assert heard.group.is_warm


def test_the_end_of_all_ranks_is_reported_once_with_the_first_cause(heard: Heard) -> None:
    heard.launch(4)
    alpha, beta = heard.agents
    beta.tell(messages.AllRanksExited(GENERATION - 1))
    beta.tell(messages.AllRanksExited(GENERATION, {"2": 1}))
    line = alpha.heard(protocol.LauncherLinkMessage)
    assert messages.decode_line(line.text.encode()) == messages.StopRanksRequest()
    assert heard.lines == []
    alpha.tell(messages.AllRanksExited(GENERATION, {"0": -15}))
    ended = messages.AllRanksExited(GENERATION, {"0": -15, "2": 1}, node="beta")
    eventually(lambda: heard.lines == [ended], within_s=5)


def test_the_loss_of_a_node_ends_the_others(heard: Heard) -> None:
    heard.launch(4)
    alpha, beta = heard.agents
    beta.send(protocol.AgentExited("failed: no space"))
    beta.has_ended = True
    alpha.answer()
    alpha.end()
    assert not heard.group.is_alive
    error = "node beta (10.0.0.2) failed: no space"
    assert heard.lines == [messages.AllRanksExited(LAUNCHER_GONE, error=error, node="beta")]
    assert {one.status for one in heard.group.process_statuses({}).values()} == {EXITED}
