"""Messages of a node's ranks: equal ones go to the kernel once, signed, and from their own node."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from jupyter_client.session import DELIM

from nbdist.cluster.allocation import AllocatedNode
from nbdist.cluster.node_group import Node as SessionNode
from nbdist.cluster.node_group import NodeChannels
from nbdist.cluster.protocol import MessagesFromRanks
from nbdist.output.dedup import MESSAGE_DELAY_S, MessageMerger
from nbdist.protocol.signing import MessageSigner
from tests.conftest import eventually

KEY = b"k" * 64
RANKS = range(4, 8)


class Node:
    """The ranks of a node, and what of them goes to the kernel."""

    def __init__(self) -> None:
        self.relay = MessageMerger(RANKS, KEY)
        self.kernel = MessageSigner(key=KEY)
        self.request = self.kernel.msg("execute_request", {"code": "x"})
        self.now = 0.0

    def says(self, rank: int, text: str, key: bytes = KEY) -> list[bytes]:
        return self.sends(rank, "stream", {"name": "stdout", "text": text}, key)

    def sends(self, rank: int, kind: str, content: object, key: bytes = KEY) -> list[bytes]:
        signer = MessageSigner(key=key)
        sent = signer.msg(kind, content, parent=self.request)
        frames: list[bytes] = signer.serialize(sent, ident=b"topic of %d" % rank)
        self.taken = self.relay.add_message(rank, frames, self.now)
        return frames

    def leave(self) -> list[tuple[tuple[int, ...], str]]:
        """Ranks and text of what leaves now; of what is no text its kind."""
        found = []
        for ranks, frames in self.relay.pop_ready(self.now):
            message = self.kernel.deserialize(frames[frames.index(DELIM) + 1 :])
            found.append((ranks, message["content"].get("text", message["msg_type"])))
        return found


@pytest.fixture
def node() -> Node:
    return Node()


def test_different_messages_are_held_briefly(node: Node) -> None:
    for rank in RANKS:
        node.says(rank, f"I am {rank}\n")
    assert node.leave() == []
    assert node.relay.next_due_at == MESSAGE_DELAY_S
    node.now = MESSAGE_DELAY_S
    assert node.leave() == [((rank,), f"I am {rank}\n") for rank in RANKS]


def test_lines_are_compared_however_they_were_cut(node: Node) -> None:
    lines = [f"line {number}\n" for number in range(12)]
    for rank in RANKS:
        for begin in range(0, len(lines), rank):
            node.says(rank, "".join(lines[begin : begin + rank]))
    assert node.leave() == [((4, 5, 6, 7), "".join(lines))]


def test_what_is_alike_again_after_a_difference_is_said_once(node: Node) -> None:
    for rank in RANKS:
        node.says(rank, f"epoch 1\nrank {rank}\nepoch 2\n")
    node.now = MESSAGE_DELAY_S
    assert node.leave() == [
        (tuple(RANKS), "epoch 1\n"),
        *(((rank,), f"rank {rank}\n") for rank in RANKS),
        (tuple(RANKS), "epoch 2\n"),
    ]


def test_nothing_passes_what_its_rank_said_before(node: Node) -> None:
    for rank in RANKS:
        node.says(rank, "a\n")
        node.sends(rank, "display_data", {"data": {}})
        node.says(rank, "b\n")
    assert [text for _, text in node.leave()] == ["a\n", "display_data", "b\n"]


def test_equal_text_under_one_header_is_not_a_replay(node: Node) -> None:
    node.says(4, "a\nx\na\n")
    node.says(5, "x\n")
    node.now = MESSAGE_DELAY_S
    assert node.leave() == [((4,), "a\n"), ((4, 5), "x\n"), ((4,), "a\n")]


def test_what_any_ranks_say_leaves_whole_and_in_order(node: Node) -> None:
    rng = random.Random(5)  # noqa: S311 - a test's own dice
    for _ in range(100):
        sent, left = (dict.fromkeys(RANKS, "") for _ in range(2))
        for _ in range(20):
            rank = rng.choice(RANKS)
            text = "".join(rng.choice(["a", "b\n", "c\n"]) for _ in range(rng.randrange(5)))
            node.says(rank, text)
            sent[rank] += text
            node.now += rng.choice([0.0, MESSAGE_DELAY_S / 3])
            for ranks, leaves in node.leave():
                for one in ranks:
                    left[one] += leaves
        node.now += MESSAGE_DELAY_S
        for ranks, leaves in node.leave():
            for one in ranks:
                left[one] += leaves
        assert left == sent


def test_what_is_signed_with_another_key_joins_nothing(node: Node) -> None:
    node.says(4, "hello")
    node.says(5, "hello", key=b"o" * 64)
    assert not node.taken
    node.now = MESSAGE_DELAY_S
    assert node.leave() == [((4,), "hello")]


def test_a_message_is_not_taken_twice(node: Node) -> None:
    recorded = node.says(5, "hello")
    assert node.taken
    assert not node.relay.add_message(6, recorded, node.now)


@pytest.mark.parametrize("frames", [[], [b""], [b"<IDS|MSG>"], [b"<IDS|MSG>", *[b"{"] * 5]])
def test_other_input_than_a_message_is_rejected(node: Node, frames: list[bytes]) -> None:
    assert not node.relay.add_message(4, frames, node.now)


@pytest.mark.parametrize("content", ['{"name": "stdout"}', '{"text": 3}', '{"text": ["a"]}'])
def test_a_stream_without_text_is_passed_on(node: Node, content: str) -> None:
    signer = MessageSigner(key=KEY)
    _, _, *parts = signer.serialize(signer.msg("stream", {}, parent=node.request))
    parts[-1] = content.encode()
    assert node.relay.add_message(4, [DELIM, signer.sign(parts), *parts], node.now)
    node.now = MESSAGE_DELAY_S
    assert node.relay.pop_ready(node.now) == [((4,), [DELIM, signer.sign(parts), *parts])]


# --- the kernel's side


class Kernel:
    """The kernel's side of two nodes with one rank each."""

    agent_connections = SimpleNamespace(wake=lambda: None)

    def __init__(self) -> None:
        self.received: list[tuple[tuple[int, ...], str]] = []
        self.nodes = [
            SessionNode(
                rank,
                AllocatedNode(name=f"n{rank}", address="10.0.0.1", ranks=1),
                ranks=range(rank, rank + 1),
            )
            for rank in range(2)
        ]

    def detach_channels(self, _relay: object) -> None:
        """Nothing is held."""

    def on_message(self, ranks: Any, _channel: str, message: Any) -> None:
        self.received.append((tuple(ranks), message["content"]["text"]))

    def on_idle(self) -> bool:
        return False


def printed(text: str, key: bytes = KEY) -> list[bytes]:
    signer = MessageSigner(key=key)
    frames: list[bytes] = signer.serialize(signer.msg("stream", {"text": text}))
    return frames


def test_the_kernel_takes_what_is_a_nodes_own() -> None:
    kernel = Kernel()
    channels = NodeChannels(kernel, 1, KEY, kernel)  # type: ignore[arg-type]
    first = printed("a")
    for node, sent in [
        (0, [((0,), printed("forged", b"o" * 64))]),
        (0, [((0,), first), ((1,), printed("stolen")), ((0,), [DELIM, b"{"]), ((0,), [])]),
        (0, [((0,), first)]),
        (1, [((1,), printed("b"))]),
        (0, [((0,), printed("c"))]),
    ]:
        index = [(ranks, "iopub", len(frames)) for ranks, frames in sent]
        joined = [frame for _, frames in sent for frame in frames]
        channels.inbox.put((kernel.nodes[node], MessagesFromRanks(1, index), joined))
    eventually(lambda: kernel.received[-1:] == [((0,), "c")], within_s=10)
    channels.inbox.put((kernel.nodes[0], MessagesFromRanks(1, [([[]], "iopub", 1)]), [b"x"]))  # type: ignore[list-item]
    channels.inbox.put((kernel.nodes[0], MessagesFromRanks(1, [((0,), "iopub", 6)]), printed("d")))
    eventually(lambda: kernel.received[-1:] == [((0,), "d")], within_s=10)
    channels.close()
    assert kernel.received == [((0,), "a"), ((1,), "b"), ((0,), "c"), ((0,), "d")]
