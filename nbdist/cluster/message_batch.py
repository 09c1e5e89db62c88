"""Packs messages of a node's ranks into one signed batch for the kernel.

The agent verifies the signature of each message and signs the batch with the same key, which it
received to start the ranks. The kernel verifies the batch's signature and rejects repeated batches.
"""

from __future__ import annotations

import functools
import hmac
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from jupyter_client.jsonutil import extract_dates

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.cluster.rank_channels import Channel, Message


class RankMessages(NamedTuple):
    """A message that some ranks have sent, equal on all of them."""

    ranks: tuple[int, ...]
    channel: Channel
    parts: list[bytes]
    """Header, parent, metadata, content, buffers; empty if it was not signed."""


def encode_batch(messages: Sequence[RankMessages], key: bytes, number: int) -> list[bytes]:
    """Return the frames of a batch.

    Args:
        messages: messages in order.
        key: signing key of this start.
        number: number of the batch, from 1.
    """
    index = [number, [(message.ranks, message.channel, len(message.parts)) for message in messages]]
    parts = (part for message in messages for part in message.parts)
    signed = [json.dumps(index).encode(), *parts]
    return [_signature(signed, key), *signed]


def decode_batch(frames: Sequence[bytes], key: bytes, after: int) -> tuple[int, list[RankMessages]]:
    """Return the number and the messages of a batch.

    Args:
        frames: the received frames.
        key: signing key of this start.
        after: number of the previous batch.

    Raises:
        ValueError: the signature is invalid, or the batch was received before.
    """
    signature, *signed = frames
    if not hmac.compare_digest(signature, _signature(signed, key)):
        msg = "a batch that is not signed"
        raise ValueError(msg)
    number, places = json.loads(signed[0])
    if number <= after:
        msg = "a repeated batch"
        raise ValueError(msg)
    return number, list(_split_by_ranks(places, iter(signed[1:])))


def _split_by_ranks(places: list[Any], parts: Iterator[bytes]) -> Iterator[RankMessages]:
    for ranks, channel, count in places:
        yield RankMessages(tuple(ranks), channel, [next(parts) for _ in range(count)])


def decode_message(parts: Sequence[bytes]) -> Message:
    """Decode a message as jupyter_client does; cached parent headers are shared.

    Raises:
        ValueError, LookupError, TypeError: not a message.
    """
    header, parent, metadata, content, *buffers = parts
    head = extract_dates(json.loads(header))
    return {
        "header": head,
        "msg_id": head["msg_id"],
        "msg_type": head["msg_type"],
        "parent_header": _parent(parent),
        "metadata": json.loads(metadata),
        "content": json.loads(content),
        "buffers": [memoryview(buffer) for buffer in buffers],
    }


@functools.lru_cache(maxsize=256)
def _parent(parent: bytes) -> Any:
    return extract_dates(json.loads(parent))


def _signature(signed: Sequence[bytes], key: bytes) -> bytes:
    made = hmac.new(key, digestmod="sha256")
    for frame in signed:
        made.update(frame)
    return made.digest()
