"""Messages of a node's ranks on their way to the kernel: equal ones travel as one.

Runs in the agent. The kernel checks the signature of the message that travels, the agent those
of the equal ones that it stands for. Each rank's messages keep their order on each channel.
"""

from __future__ import annotations

import functools
import hmac
import json
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jupyter_client.session import DELIM

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HOLD_S = 0.03
"""How long a message waits for ranks that may still say the same."""
KEPT_REQUESTS = 1024
KEPT_SIGNATURES = 1 << 16
_PARTS = 4
"""Of a message: header, parent, metadata, content; buffers follow."""


@dataclass(frozen=True, slots=True)
class _Read:
    """What a message is compared by, and what shows that it is a rank's."""

    key: tuple[object, ...]
    request: str
    signature: bytes
    parts: list[bytes]


@dataclass(slots=True)
class _Group:
    """A message and the ranks that have sent it."""

    number: int
    """Of its channel, from 1."""
    key: tuple[object, ...] | None
    """None: nothing can be equal to it."""
    turn: int
    """The how manieth message it is of the first of them, since a request came."""
    ranks: list[int]
    frames: list[bytes]
    awaited: Sequence[int]
    """Ranks that may send it."""
    until: float


class Together:
    """The messages of one channel.

    Args:
        ranks: of this node.
        key: that signs.
    """

    def __init__(self, ranks: Sequence[int], key: bytes) -> None:
        """Hold nothing yet."""
        self._ranks, self._key = tuple(ranks), key
        self._asked: dict[str, tuple[int, ...]] = {}
        """Ranks by request, the newest last."""
        self._groups: deque[_Group] = deque()
        self._by_key: dict[tuple[object, ...], deque[_Group]] = {}
        """Those that are held, the oldest first."""
        self._last = dict.fromkeys(self._ranks, 0)
        """Number of each rank's newest message."""
        self._said = dict.fromkeys(self._ranks, 0)
        """How many messages of each rank have come since a request went to it."""
        self._count = 0
        self._joined: set[bytes] = set()
        """Signatures that stand behind another one: the kernel does not see them."""
        self._order: deque[bytes] = deque()

    def asked(self, ranks: Sequence[int], frames: list[bytes]) -> None:
        """Note who gets a request: they may answer the same."""
        read = _read(frames)
        if read is None:
            return
        self._asked[json.loads(read.parts[0])["msg_id"]] = tuple(ranks)
        self._said.update(dict.fromkeys(ranks, 0))
        if len(self._asked) > KEPT_REQUESTS:
            del self._asked[next(iter(self._asked))]

    def put(self, rank: int, frames: list[bytes], now: float) -> None:
        """Take a message of a rank."""
        read = _read(frames) if len(self._ranks) > 1 else None
        if read is not None and read.signature in self._joined:
            return  # recorded and sent again: the kernel would not know
        self._said[rank] += 1
        if read is not None and self._joins(rank, read):
            return
        self._count += 1
        self._last[rank] = self._count
        awaited = () if read is None else self._asked.get(read.request, self._ranks)
        key = None if read is None else read.key
        group = _Group(self._count, key, self._said[rank], [rank], frames, awaited, now + HOLD_S)
        self._groups.append(group)
        if key is not None:
            self._by_key.setdefault(key, deque()).append(group)

    def leave(self, now: float) -> Iterator[tuple[tuple[int, ...], list[bytes]]]:
        """Messages that wait for nobody, with their ranks, in their order."""
        while self._groups and self._may_leave(self._groups[0], now):
            group = self._groups.popleft()
            if group.key is not None:
                equal = self._by_key[group.key]
                equal.popleft()
                if not equal:
                    del self._by_key[group.key]
            yield tuple(sorted(group.ranks)), group.frames

    @property
    def due(self) -> float | None:
        """When the next one leaves at the latest; None: nothing is held."""
        return self._groups[0].until if self._groups else None

    def _joins(self, rank: int, read: _Read) -> bool:
        """Whether an equal message waits that may stand for this one."""
        held = self._by_key.get(read.key, ())
        group = next((one for one in held if one.number > self._last[rank]), None)
        if group is None:
            return False
        if not hmac.compare_digest(read.signature, self._signature(read.parts)):
            return False  # the kernel refuses it
        group.ranks.append(rank)
        self._last[rank] = group.number
        self._remember(read.signature)
        return True

    def _remember(self, signature: bytes) -> None:
        self._joined.add(signature)
        self._order.append(signature)
        if len(self._order) > KEPT_SIGNATURES:
            self._joined.discard(self._order.popleft())

    def _may_leave(self, group: _Group, now: float) -> bool:
        """Whether its time is up, or each rank has said the same, or something else in its turn."""
        return now >= group.until or all(
            self._last[rank] >= group.number or self._said[rank] >= group.turn
            for rank in group.awaited
        )

    def _signature(self, parts: list[bytes]) -> bytes:
        return hmac.digest(self._key, b"".join(parts[:_PARTS]), "sha256").hex().encode()


def _read(frames: list[bytes]) -> _Read | None:
    """Take a message apart; None where it is none."""
    try:
        at = frames.index(DELIM) + 1
        signature, header, parent, metadata, *rest = frames[at:]
        kind = json.loads(header)["msg_type"]
        request = _request(parent)
    except (ValueError, LookupError, TypeError):
        return None  # the kernel says what it thinks of it
    if not rest:
        return None
    # replies have in their metadata when they began, which nobody reads
    key: tuple[Any, ...] = (kind, parent, b"" if kind.endswith("_reply") else metadata, *rest)
    return _Read(key, request, signature, [header, parent, metadata, *rest])


@functools.lru_cache(maxsize=64)
def _request(parent: bytes) -> str:
    """Id of the request that a message answers; "" without one."""
    return str(json.loads(parent).get("msg_id", ""))
