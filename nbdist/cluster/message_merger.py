"""Merges equal messages of a node's ranks, so that each is sent to the kernel once.

Text is compared line by line, other messages as a whole. The order of each rank's messages per
channel is kept. Messages without a valid signature are dropped; all others are signed again.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jupyter_client.session import DELIM

from nbdist.output.dedup import OutputItem, OutputMerger
from nbdist.protocol.signing import MessageSigner

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    RankMessage = tuple[list[bytes], Hashable, str]
    """Parts of a message; of text also its stream and one line."""

MERGE_DELAY_S = 0.03
"""Time for which a message is held for other ranks to send the same."""
MAX_BATCH_BYTES = 4 << 20
"""Approximate maximum size of the messages that are sent together."""
_LINE = re.compile(r"[^\n]*\n|[^\n]+")


@dataclass(slots=True, eq=False)
class _MergedMessage:
    """A message with the ranks that have sent it."""

    ranks: tuple[int, ...]
    parts: list[bytes]
    """Header, parent header, metadata, content and buffers."""
    stream: Hashable
    """Parent header and stream name of text; None for other messages."""
    text: list[str] = field(default_factory=list)


class MessageMerger:
    """Messages of one channel.

    Args:
        ranks: the ranks of this node.
        key: signing key of the ranks' messages.
    """

    def __init__(self, ranks: Sequence[int], key: bytes) -> None:
        self._signer = MessageSigner(key=key)
        self._merger: OutputMerger[RankMessage] = OutputMerger(ranks)
        self._numbers = itertools.count()

    @property
    def next_due_at(self) -> float | None:
        """Time at which the next held message must be sent; None if none is held."""
        return self._merger.next_due_at

    def add_message(self, rank: int, frames: list[bytes], now: float) -> bool:
        """Add a message of a rank; return False if it is unsigned, replayed or malformed."""
        try:
            signature, *parts = frames[frames.index(DELIM) + 1 :]
            message = self._signer.deserialize([signature, *parts])
        except Exception:  # noqa: BLE001 - unverified frames can raise anything
            return False
        _, parent, metadata, content, *buffers = parts
        kind, text = message["msg_type"], message["content"].get("text")
        if kind == "stream" and isinstance(text, str):
            stream = parent, message["content"].get("name")
            items: list[OutputItem[RankMessage]] = [
                OutputItem((parts, stream, line), now, "", (stream, line), MERGE_DELAY_S)
                for line in _LINE.findall(text)
            ]
        else:
            # the metadata of a reply contains its start time, which is not used
            same = kind, parent, b"" if kind.endswith("_reply") else metadata, content, *buffers
            items = [OutputItem((parts, None, ""), now, "", same, MERGE_DELAY_S)]
        self._merger.add_items((rank,), items)
        return True

    def pop_ready(self, now: float) -> list[tuple[tuple[int, ...], list[bytes]]]:
        """Return the messages that need not be held any longer, with their ranks, in order."""
        outgoing: list[_MergedMessage] = []
        last_by_rank: dict[int, _MergedMessage] = {}
        size = 0
        for ranks, item in self._merger.pop_ready(now):
            parts, stream, line = item.content
            last = last_by_rank.get(ranks[0])
            if (
                last is None
                or stream is None
                or (last.ranks, last.stream) != (ranks, stream)
                or any(last_by_rank[rank] is not last for rank in ranks)
            ):
                last = _MergedMessage(ranks, parts, stream)
                outgoing.append(last)
            last_by_rank.update(dict.fromkeys(ranks, last))
            last.text.append(line)
            size += len(line) or sum(map(len, parts))
            if size > MAX_BATCH_BYTES:
                break
        signed = []
        for message in outgoing:
            parts = message.parts
            if message.stream is not None:
                content = {**json.loads(parts[3]), "text": "".join(message.text)}
                # the number makes the signature unique: equal text may leave twice under one header
                number = {"part": next(self._numbers)}
                parts = [*parts[:2], json.dumps(number).encode(), json.dumps(content).encode()]
            signed.append((message.ranks, [DELIM, self._signer.sign(parts[:4]), *parts]))
        return signed
