"""What the ranks of a node have said, on its way to the kernel in one message; pure.

The agent checks the signature of every message of a rank, and signs what it makes of them with
the same key, which it has since it starts the ranks. The kernel checks that one signature, and
that no bundle comes twice.
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


class Said(NamedTuple):
    """What some ranks have said in the same words."""

    ranks: tuple[int, ...]
    channel: Channel
    parts: list[bytes]
    """Header, parent, metadata, content, buffers; empty: it was not signed."""


def packed(said: Sequence[Said], key: bytes, number: int) -> list[bytes]:
    """The frames of a bundle.

    Args:
        said: in its order.
        key: that signs, of one start.
        number: of the bundle, from 1.
    """
    places = [number, [(one.ranks, one.channel, len(one.parts)) for one in said]]
    signed = [json.dumps(places).encode(), *(part for one in said for part in one.parts)]
    return [_signature(signed, key), *signed]


def unpacked(frames: Sequence[bytes], key: bytes, after: int) -> tuple[int, list[Said]]:
    """Number of a bundle and what is in it.

    Args:
        frames: what came.
        key: that has to have signed it.
        after: number of the last one.

    Raises:
        ValueError: it is not signed, or came before.
    """
    signature, *signed = frames
    if not hmac.compare_digest(signature, _signature(signed, key)):
        msg = "a bundle that is not signed"
        raise ValueError(msg)
    number, places = json.loads(signed[0])
    if number <= after:
        msg = "a bundle that came before"
        raise ValueError(msg)
    return number, list(_said(places, iter(signed[1:])))


def _said(places: list[Any], parts: Iterator[bytes]) -> Iterator[Said]:
    for ranks, channel, count in places:
        yield Said(tuple(ranks), channel, [next(parts) for _ in range(count)])


def read(parts: Sequence[bytes]) -> Message:
    """A message as jupyter_client reads it; the headers of requests are shared.

    Raises:
        ValueError, LookupError, TypeError: it is none.
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
        "buffers": [memoryview(one) for one in buffers],
    }


@functools.lru_cache(maxsize=256)
def _parent(parent: bytes) -> Any:
    return extract_dates(json.loads(parent))


def _signature(signed: Sequence[bytes], key: bytes) -> bytes:
    made = hmac.new(key, digestmod="sha256")
    for frame in signed:
        made.update(frame)
    return made.digest()
