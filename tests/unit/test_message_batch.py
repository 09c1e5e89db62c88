"""What ranks of a node say reaches the kernel signed, once, and from their own node."""

from __future__ import annotations

from typing import Any

import pytest

from nbdist.cluster import message_batch
from nbdist.cluster.message_batch import RankMessages
from nbdist.cluster.node_group import NodeChannels
from nbdist.protocol.signing import MessageSigner
from tests.conftest import eventually

KEY = b"k" * 64


def said(ranks: tuple[int, ...], text: str) -> RankMessages:
    """A message of ranks."""
    signer = MessageSigner(key=KEY)
    parent = signer.msg("execute_request", {})
    _, _, *parts = signer.serialize(signer.msg("stream", {"text": text}, parent=parent))
    return RankMessages(ranks, "iopub", parts)


def test_what_is_packed_comes_out() -> None:
    given = [said((0, 1), "a"), RankMessages((1,), "shell", []), said((2,), "b")]
    given[2].parts.append(b"a buffer")
    number, found = message_batch.decode_batch(message_batch.encode_batch(given, KEY, 3), KEY, 2)
    assert number == 3
    assert found == given
    message = message_batch.decode_message(found[2].parts)
    assert message["content"] == {"text": "b"}
    assert message["header"]["date"].timestamp() > 0
    assert bytes(message["buffers"][0]) == b"a buffer"


@pytest.mark.parametrize("changed", range(4))
def test_a_changed_frame_is_seen(changed: int) -> None:
    frames = message_batch.encode_batch([said((0,), "a")], KEY, 1)
    frames[changed] += b" "
    with pytest.raises(ValueError, match="not signed"):
        message_batch.decode_batch(frames, KEY, 0)


def test_a_bundle_is_taken_once() -> None:
    frames = message_batch.encode_batch([said((0,), "a")], KEY, 1)
    with pytest.raises(ValueError, match="repeated"):
        message_batch.decode_batch(frames, KEY, 1)


class Node:
    """The kernel's side of two nodes with one rank each."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.received: list[tuple[tuple[int, ...], str]] = []

    def ranks_of(self, index: int) -> frozenset[int]:
        return frozenset({index})

    def acknowledge_batch(self, index: int) -> None:
        self.told.append(index)

    def detach_channels(self, _relay: object) -> None:
        """Nothing is held."""

    def on_message(self, ranks: Any, _channel: str, message: Any) -> None:
        self.received.append((ranks, message["content"]["text"]))

    def on_idle(self) -> bool:
        return False


def test_the_kernel_takes_what_is_a_nodes_own_and_asks_for_more() -> None:
    node = Node()
    relay = NodeChannels(node, KEY, node)  # type: ignore[arg-type]
    unreadable = RankMessages((0,), "iopub", [b"{", b"[", b"", b"1"])
    forged = message_batch.encode_batch([said((0,), "forged")], b"o" * 64, 1)
    first = message_batch.encode_batch([said((0,), "a"), said((1,), "stolen"), unreadable], KEY, 1)
    for index, frames in [
        (0, forged),
        (0, first),
        (0, first),
        (1, message_batch.encode_batch([RankMessages((1,), "iopub", []), said((1,), "b")], KEY, 1)),
        (0, []),
        (0, message_batch.encode_batch([said((0,), "c")], KEY, 2)),
    ]:
        relay.add_batch(index, frames)
    eventually(lambda: node.received[-1:] == [((0,), "c")], within_s=10)
    relay.close()
    assert node.received == [((0,), "a"), ((1,), "b"), ((0,), "c")]
    assert node.told == [0, 1, 0]
