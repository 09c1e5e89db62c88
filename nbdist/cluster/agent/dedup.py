"""What a node's ranks say on its way to the kernel: what they say alike travels once.

Runs in the agent, which checks every signature: what is passed on is a rank's. Text is compared
by lines, however each rank's messages cut it; other messages as wholes. Each rank's order on
each channel is kept.
"""

from __future__ import annotations

import functools
import hmac
import json
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jupyter_client.session import DELIM

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

HOLD_S = 0.03
"""How long something waits for ranks that may still say the same."""
BUNDLE_BYTES = 4 << 20
"""So much leaves at once, and one message more."""
TEXT_CHARS = 1 << 20
"""Text of one rank that waits is brought together up to about this."""
KEPT_REQUESTS = 1024
KEPT_SIGNATURES = 1 << 16
_Kind = tuple[bytes, str]
"""Of text: what it answers, and the stream."""


@dataclass(slots=True, eq=False)
class _Whole:
    """A message that is compared as a whole."""

    head: tuple[object, ...]
    """Equal for equal messages."""
    parts: list[bytes]
    request: str
    at: float


@dataclass(slots=True, eq=False)
class _Text:
    """What a rank has written to a stream and has not left yet."""

    kind: _Kind
    begin: list[bytes]
    """Header, parent and metadata of the first message."""
    request: str
    text: str = ""
    _ends: deque[tuple[int, float]] = field(default_factory=deque)
    """Where each piece ends, and when it came."""
    _gone: int = 0

    @property
    def head(self) -> tuple[object, ...]:
        """Equal for texts that begin with the same line, or are the same open one."""
        return self.kind, self.text[: self.text.find("\n") + 1] or self.text

    @property
    def at(self) -> float:
        """When its beginning came."""
        return self._ends[0][1]

    @property
    def open(self) -> bool:
        """Whether its line may go on."""
        return "\n" not in self.text

    def add(self, text: str, at: float) -> None:
        """Take more of it."""
        self.text += text
        self._ends.append((self._gone + len(self.text), at))

    def lines(self, heads: set[tuple[object, ...]], most: int) -> str:
        """The first line, and at most so many that are no other's head."""
        end = 0
        for _ in range(most):
            begin, end = end, self.text.find("\n", end) + 1 or len(self.text)
            if begin and (self.kind, self.text[begin:end]) in heads:
                return self.text[:begin]
            if end == len(self.text):
                break
        return self.text[:end]

    def cut(self, length: int) -> None:
        """Let its beginning go."""
        self.text = self.text[length:]
        self._gone += length
        while self._ends and self._ends[0][0] <= self._gone:
            self._ends.popleft()


@dataclass(slots=True, eq=False)
class _Leaving:
    """What some ranks have said alike."""

    ranks: list[int]
    parts: list[bytes]
    kind: _Kind | None = None
    text: list[str] = field(default_factory=list)

    def whole(self) -> tuple[tuple[int, ...], list[bytes]]:
        """The ranks and the message."""
        if self.kind is None:
            return tuple(self.ranks), self.parts
        content = {"name": self.kind[1], "text": "".join(self.text)}
        return tuple(self.ranks), [*self.parts, json.dumps(content).encode()]


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
        self._queues: dict[int, deque[_Whole | _Text]] = {rank: deque() for rank in self._ranks}
        self._came = dict.fromkeys(self._ranks, 0)
        """How much each rank has said since a request went to it, in lines and other messages."""
        self._left = dict.fromkeys(self._ranks, 0)
        """How much of that has left."""
        self._seen: dict[bytes, None] = {}
        """Signatures, the oldest first: what was recorded and is sent again is not taken."""

    def asked(self, ranks: Sequence[int], frames: list[bytes]) -> None:
        """Note who gets a request: they may answer the same."""
        try:
            request = json.loads(frames[frames.index(DELIM) + 2])["msg_id"]
        except (ValueError, LookupError, TypeError):
            return
        self._asked[request] = tuple(ranks)
        for rank in ranks:
            self._came[rank] -= self._left[rank]
            self._left[rank] = 0
        if len(self._asked) > KEPT_REQUESTS:
            del self._asked[next(iter(self._asked))]

    def put(self, rank: int, frames: list[bytes], now: float) -> bool:
        """Take a message of a rank; False where it is not signed, or came before."""
        parts = self._checked(frames)
        if parts is None:
            return False
        queue = self._queues[rank]
        try:
            kind, request = str(json.loads(parts[0])["msg_type"]), _request(parts[1])
            content = json.loads(parts[3]) if kind == "stream" else None
            text = None if content is None else (str(content["name"]), str(content["text"]))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            # the kernel says what it thinks of it
            queue.append(_Whole((object(),), parts, "", now))
            self._came[rank] += 1
            return True
        if text is None:
            # replies have in their metadata when they began, which nobody reads
            metadata = b"" if kind.endswith("_reply") else parts[2]
            queue.append(_Whole((kind, parts[1], metadata, *parts[3:]), parts, request, now))
            self._came[rank] += 1
        elif text[1]:
            self._put_text(queue, (parts[1], text[0]), text[1], parts, request, now)
            self._came[rank] += text[1].count("\n")
        return True

    def leave(self, now: float) -> list[tuple[tuple[int, ...], list[bytes]]]:
        """What waits for nobody, with its ranks, in its order."""
        leaving: list[_Leaving] = []
        last: dict[int, _Leaving] = {}
        size, most = 0, 1
        while size < BUNDLE_BYTES and (ready := self._ready(now)):
            heads = {queue[0].head for queue in self._queues.values() if queue}
            for ranks in ready:
                size += self._let_go(ranks, leaving, last, heads=heads, most=most)
            # the next line of a rank may be others' too; the longer none is, the less
            most = most * 2 if all(len(ranks) == 1 for ranks in ready) else 1
        return [one.whole() for one in leaving]

    @property
    def due(self) -> float | None:
        """When the next one leaves at the latest; None: nothing is held."""
        heads = (queue[0].at for queue in self._queues.values() if queue)
        return min((at + HOLD_S for at in heads), default=None)

    def _checked(self, frames: list[bytes]) -> list[bytes] | None:
        """The parts of a message whose signature is good and new."""
        try:
            at = frames.index(DELIM) + 1
            signature, header, parent, metadata, content, *buffers = frames[at:]
        except ValueError:
            return None
        parts = [header, parent, metadata, content]
        made = hmac.digest(self._key, b"".join(parts), "sha256").hex().encode()
        if not hmac.compare_digest(signature, made) or signature in self._seen:
            return None
        self._seen[signature] = None
        if len(self._seen) > KEPT_SIGNATURES:
            del self._seen[next(iter(self._seen))]
        return parts + buffers

    @staticmethod
    def _put_text(
        queue: deque[_Whole | _Text],
        kind: _Kind,
        text: str,
        parts: list[bytes],
        request: str,
        now: float,
    ) -> None:
        """Append text to what the rank has written to this stream before, if that still waits."""
        last = queue[-1] if queue else None
        if not isinstance(last, _Text) or last.kind != kind or len(last.text) > TEXT_CHARS:
            last = _Text(kind, parts[:3], request)
            queue.append(last)
        last.add(text, now)

    def _ready(self, now: float) -> list[list[int]]:
        """Ranks whose next words are the same and wait for nobody."""
        ready = []
        alike: dict[tuple[object, ...], list[int]] = {}
        for rank, queue in self._queues.items():
            if queue:
                alike.setdefault(queue[0].head, []).append(rank)
        least: dict[str, float] = {}
        """By request how much the rank has said that has said least and of which nothing waits."""
        for ranks in alike.values():
            items = [self._queues[rank][0] for rank in ranks]
            request = items[0].request
            if request not in least:
                awaited = self._asked.get(request, self._ranks)
                silent = (self._came[rank] for rank in awaited if not self._queues[rank])
                least[request] = min(silent, default=math.inf)
            settled = not any(self._may_go_on(rank) for rank in ranks)
            turn = min(self._left[rank] for rank in ranks)
            due = now >= min(item.at for item in items) + HOLD_S
            if due or (settled and least[request] > turn):
                ready.append(ranks)
        return ready

    def _may_go_on(self, rank: int) -> bool:
        """Whether the line that a rank has begun may still get its end."""
        queue = self._queues[rank]
        return len(queue) == 1 and isinstance(queue[0], _Text) and queue[0].open

    def _let_go(
        self,
        ranks: list[int],
        leaving: list[_Leaving],
        last: dict[int, _Leaving],
        *,
        heads: set[tuple[object, ...]],
        most: int,
    ) -> int:
        """Take what these ranks have said alike; returns its size.

        Args:
            ranks: the first words of all are the same.
            leaving: where it goes.
            last: of `leaving` the last one of each rank.
            heads: with what all ranks begin: a single one leaves no further than there.
            most: lines of a single one.
        """
        first = self._queues[ranks[0]][0]
        if isinstance(first, _Whole):
            for rank in ranks:
                self._queues[rank].popleft()
                self._left[rank] += 1
            leaving.append(_Leaving(ranks, first.parts))
            last.update(dict.fromkeys(ranks, leaving[-1]))
            return sum(map(len, first.parts))
        text = self._common(ranks) if len(ranks) > 1 else first.lines(heads, most)
        self._cut(ranks, text)
        one = last.get(ranks[0])
        follows = one is not None and one.kind == first.kind and one.ranks == ranks
        if one is None or not follows or any(last.get(rank) is not one for rank in ranks):
            one = _Leaving(ranks, first.begin, first.kind)
            leaving.append(one)
            last.update(dict.fromkeys(ranks, one))
        one.text.append(text)
        return len(text)

    def _common(self, ranks: list[int]) -> str:
        """The lines with which the text of all these begins."""
        texts = (item.text for rank in ranks if isinstance(item := self._queues[rank][0], _Text))
        shared = _shared(texts)
        return shared[: shared.rfind("\n") + 1] or shared

    def _cut(self, ranks: Iterable[int], text: str) -> None:
        """Let the beginning of these ranks' text go."""
        lines = text.count("\n")
        for rank in ranks:
            queue = self._queues[rank]
            item = queue[0]
            self._left[rank] += lines
            if isinstance(item, _Text):
                item.cut(len(text))
                if not item.text:
                    queue.popleft()


def _shared(texts: Iterable[str]) -> str:
    """What all texts begin with."""
    texts = iter(texts)
    shared = next(texts)
    for text in texts:
        if not text.startswith(shared):
            low, high = 0, min(len(shared), len(text))
            while low < high:
                middle = (low + high + 1) // 2
                if text.startswith(shared[:middle]):
                    low = middle
                else:
                    high = middle - 1
            shared = shared[:low]
    return shared


@functools.lru_cache(maxsize=64)
def _request(parent: bytes) -> str:
    """Id of the request that a message answers; "" without one."""
    return str(json.loads(parent).get("msg_id", ""))
