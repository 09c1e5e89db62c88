"""What ranks of a node say in the same words goes to the kernel once."""

from __future__ import annotations

import random

import pytest
from jupyter_client.session import DELIM

from nbdist.cluster import message_batch
from nbdist.cluster.agent.dedup import MERGE_DELAY_S, MessageDeduplicator
from nbdist.protocol.signing import MessageSigner

KEY = b"k" * 64
RANKS = range(4, 8)


class Node:
    """The ranks of a node, and what of them goes to the kernel."""

    def __init__(self) -> None:
        self.together = MessageDeduplicator(RANKS, KEY)
        self.kernel = MessageSigner(key=KEY)
        self.request = self.kernel.msg("execute_request", {"code": "x"})
        self.together.record_request(RANKS, self.kernel.serialize(self.request))
        self.now = 0.0

    def says(self, rank: int, text: str, key: bytes = KEY) -> list[bytes]:
        """Have a rank print."""
        return self.sends(rank, "stream", {"name": "stdout", "text": text}, key)

    def sends(self, rank: int, kind: str, content: object, key: bytes = KEY) -> list[bytes]:
        """Have a rank send a message."""
        signer = MessageSigner(key=key)
        told = signer.msg(kind, content, parent=self.request)
        frames: list[bytes] = signer.serialize(told, ident=b"topic of %d" % rank)
        self.taken = self.together.add_message(rank, frames, self.now)
        return frames

    def leave(self) -> list[tuple[tuple[int, ...], str]]:
        """Ranks and text of what leaves now; of what is no text its kind."""
        found = []
        for ranks, parts in self.together.pop_ready(self.now):
            message = message_batch.decode_message(parts)
            found.append((ranks, message["content"].get("text", message["msg_type"])))
        return found


@pytest.fixture
def node() -> Node:
    return Node()


def test_equal_messages_leave_once_and_at_once(node: Node) -> None:
    for rank in RANKS:
        assert node.leave() == []
        node.says(rank, "hello\n")
    assert node.leave() == [((4, 5, 6, 7), "hello\n")]
    assert node.together.next_deadline is None


def test_different_messages_wait_for_nobody_who_has_spoken(node: Node) -> None:
    for rank in RANKS:
        node.says(rank, f"I am {rank}\n")
    assert node.leave() == [((rank,), f"I am {rank}\n") for rank in RANKS]


def test_who_has_said_less_than_the_others_waits_for_none_of_them(node: Node) -> None:
    for rank in (4, 5, 6):
        node.says(rank, "a\nb\n")
    node.now = MERGE_DELAY_S
    assert node.leave() == [((4, 5, 6), "a\nb\n")]
    node.says(7, "a\n")
    assert node.leave() == [((7,), "a\n")]


def test_lines_are_compared_however_they_were_cut(node: Node) -> None:
    text = "".join(f"line {one}\n" for one in range(10))
    for rank in RANKS:
        for begin in range(0, len(text), rank):
            node.says(rank, text[begin : begin + rank])
    assert node.leave() == [((4, 5, 6, 7), text)]


def test_what_is_alike_again_after_a_difference_is_said_once(node: Node) -> None:
    for rank in RANKS:
        node.says(rank, f"epoch 1\nrank {rank}\nepoch 2\n")
    assert node.leave() == [
        (tuple(RANKS), "epoch 1\n"),
        *(((rank,), f"rank {rank}\n") for rank in RANKS),
        (tuple(RANKS), "epoch 2\n"),
    ]


def test_a_line_that_may_go_on_waits_for_its_end(node: Node) -> None:
    for rank in RANKS:
        node.says(rank, f"{rank}%")
    assert node.leave() == []
    node.says(4, " and more\n")
    node.sends(5, "status", {"execution_state": "idle"})
    assert node.leave() == [((4,), "4% and more\n"), ((5,), "5%"), ((5,), "status")]
    node.now = MERGE_DELAY_S
    assert node.leave() == [((6,), "6%"), ((7,), "7%")]


def test_a_silent_rank_is_waited_for_briefly(node: Node) -> None:
    for rank in (4, 5, 6):
        node.says(rank, "hello\n")
    assert node.leave() == []
    node.now = node.together.next_deadline or 0.0
    assert node.now == MERGE_DELAY_S
    assert node.leave() == [((4, 5, 6), "hello\n")]


def test_nothing_passes_what_its_rank_said_before(node: Node) -> None:
    for rank in RANKS:
        node.says(rank, "a\n")
        node.sends(rank, "display_data", {"data": {}})
        node.says(rank, "b\n")
    assert [text for _, text in node.leave()] == ["a\n", "display_data", "b\n"]


def test_what_any_ranks_say_leaves_whole_and_in_order(node: Node) -> None:
    rng = random.Random(5)  # noqa: S311 - a test's own dice
    for _ in range(100):
        said, left = (dict.fromkeys(RANKS, "") for _ in range(2))
        for _ in range(20):
            rank = rng.choice(RANKS)
            text = "".join(rng.choice(["a", "b\n", "c\n"]) for _ in range(rng.randrange(5)))
            node.says(rank, text)
            said[rank] += text
            node.now += rng.choice([0.0, MERGE_DELAY_S / 3])
            for ranks, leaves in node.leave():
                for one in ranks:
                    left[one] += leaves
        node.now += MERGE_DELAY_S
        for ranks, leaves in node.leave():
            for one in ranks:
                left[one] += leaves
        assert left == said


def test_a_rank_that_says_it_twice_has_said_it_twice(node: Node) -> None:
    for rank in RANKS:
        node.sends(rank, "display_data", {"data": {}})
        node.sends(rank, "display_data", {"data": {}})
    assert node.leave() == [((4, 5, 6, 7), "display_data")] * 2


def test_what_is_signed_with_another_key_joins_nothing(node: Node) -> None:
    node.says(4, "hello")
    node.says(5, "hello", key=b"o" * 64)
    assert not node.taken
    node.now = MERGE_DELAY_S
    assert node.leave() == [((4,), "hello")]


def test_a_message_is_not_taken_twice(node: Node) -> None:
    node.says(4, "hello")
    recorded = node.says(5, "hello")
    node.now = MERGE_DELAY_S
    assert node.leave() == [((4, 5), "hello")]
    assert not node.together.add_message(6, recorded, node.now)


@pytest.mark.parametrize("frames", [[], [b""], [b"<IDS|MSG>"], [b"<IDS|MSG>", *[b"{"] * 5]])
def test_what_is_no_message_is_refused(node: Node, frames: list[bytes]) -> None:
    assert not node.together.add_message(4, frames, node.now)


@pytest.mark.parametrize("content", ["{", "[" * 100_000, '{"name": "stdout"}', '"text"'])
def test_what_is_signed_and_nobody_can_read_is_passed_on(node: Node, content: str) -> None:
    signer = MessageSigner(key=KEY)
    _, _, *parts = signer.serialize(signer.msg("stream", {}, parent=node.request))
    parts[-1] = content.encode()
    assert node.together.add_message(4, [DELIM, signer.sign(parts), *parts], node.now)
    node.now = MERGE_DELAY_S
    assert node.together.pop_ready(node.now) == [((4,), parts)]
