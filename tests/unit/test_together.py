"""What ranks of a node say in the same words goes to the kernel once."""

from __future__ import annotations

import pytest

from nbdist.node.together import HOLD_S, Together
from nbdist.signed import Signer

KEY = b"k" * 64
RANKS = range(4, 8)


class Node:
    """The ranks of a node, and what of them goes to the kernel."""

    def __init__(self) -> None:
        self.together = Together(RANKS, KEY)
        self.kernel = Signer(key=KEY)
        self.request = self.kernel.msg("execute_request", {"code": "x"})
        self.together.asked(RANKS, self.kernel.serialize(self.request))
        self.now = 0.0

    def says(self, rank: int, text: str, key: bytes = KEY) -> list[bytes]:
        signer = Signer(key=key)
        told = signer.msg("stream", {"name": "stdout", "text": text}, parent=self.request)
        frames: list[bytes] = signer.serialize(told, ident=b"topic of %d" % rank)
        self.together.put(rank, frames, self.now)
        return frames

    def leave(self) -> list[tuple[tuple[int, ...], str]]:
        """Ranks and text of what leaves now; "" for what the kernel refuses."""
        found = []
        for ranks, frames in self.together.leave(self.now):
            message = self.kernel.opened(frames)
            found.append((ranks, message["content"]["text"] if message else ""))
        return found


@pytest.fixture
def node() -> Node:
    return Node()


def test_equal_messages_leave_once_and_at_once(node: Node) -> None:
    for rank in RANKS:
        assert node.leave() == []
        node.says(rank, "hello")
    assert node.leave() == [((4, 5, 6, 7), "hello")]
    assert node.together.due is None


def test_different_messages_wait_for_nobody_who_has_spoken(node: Node) -> None:
    for rank in RANKS:
        node.says(rank, f"I am {rank}")
    assert node.leave() == [((rank,), f"I am {rank}") for rank in RANKS]


def test_a_silent_rank_is_waited_for_briefly(node: Node) -> None:
    for rank in (4, 5, 6):
        node.says(rank, "hello")
    assert node.leave() == []
    node.now = node.together.due or 0.0
    assert node.now == HOLD_S
    assert node.leave() == [((4, 5, 6), "hello")]


def test_each_rank_keeps_its_order(node: Node) -> None:
    for text in ("a", "b"):
        node.says(4, text)
    for text in ("b", "a"):
        node.says(5, text)
    node.now = HOLD_S
    assert node.leave() == [((4,), "a"), ((4, 5), "b"), ((5,), "a")]


def test_a_rank_that_says_it_twice_has_said_it_twice(node: Node) -> None:
    for rank in RANKS:
        node.says(rank, "again")
        node.says(rank, "again")
    assert node.leave() == [((4, 5, 6, 7), "again")] * 2


def test_what_is_signed_with_another_key_joins_nothing(node: Node) -> None:
    node.says(4, "hello")
    node.says(5, "hello", key=b"o" * 64)
    node.now = HOLD_S
    assert node.leave() == [((4,), "hello"), ((5,), "")]


def test_a_message_that_stood_behind_another_is_not_taken_again(node: Node) -> None:
    node.says(4, "hello")
    recorded = node.says(5, "hello")
    node.now = HOLD_S
    assert node.leave() == [((4, 5), "hello")]
    node.together.put(6, recorded, node.now)
    node.now += HOLD_S
    assert node.leave() == []


@pytest.mark.parametrize("frames", [[], [b""], [b"<IDS|MSG>"], [b"<IDS|MSG>", *[b"{"] * 5]])
def test_what_is_no_message_is_passed_on(node: Node, frames: list[bytes]) -> None:
    node.together.put(4, frames, node.now)
    assert list(node.together.leave(node.now)) == [((4,), frames)]
