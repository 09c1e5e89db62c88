"""How much of a cell's output is shown when it prints faster than anybody can read.

Runs in the notebook's kernel, used by the renderer alone. Each rank has an allowance (a
burst); beyond it lines are shown at a fixed rate, and the others are counted as a `Gap`.

Ranks that print the same flood are cut at the same lines: whoever is first past a line
decides for all whether lines with that number are shown, so their gaps are equal and merge.
A rank that was silent for a while gets its allowance back by time; so a quiet rank is never
cut because another one floods.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.output.ansi import size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DISPLAY_LINES = 10
"""What one rich display costs, in lines."""
TAIL_LINES = 20
"""Lines before the end of a flood that are always shown."""

_IDLE_S = 0.5
_TAIL_CHARS = 64_000
_MAX_WINDOWS = 1000


@dataclass(frozen=True, slots=True)
class Budget:
    """Output that is shown: a burst at once, then this much a second."""

    lines: int = 5000
    chars: int = 1_000_000
    lines_s: int = 200
    chars_s: int = 200_000

    def shared(self, num_ranks: int) -> Budget:
        """Burst of one of several ranks: all of them together stay readable."""
        if num_ranks <= 2:  # noqa: PLR2004 - a pair may fill the page twice over
            return self
        share = max(0.2, 2 / num_ranks)
        return Budget(int(self.lines * share), int(self.chars * share), self.lines_s, self.chars_s)


@dataclass(frozen=True, slots=True)
class Gap:
    """Output of one rank that is not shown, between two pieces that are."""

    lines: int
    displays: int
    chars: int

    def sentence(self, rank: int) -> str:
        """Say what is missing and where the last of it can be read."""
        counts = ((self.lines, "line"), (self.displays, "display"))
        what = " and ".join(f"{n:,} {word}{'s'[: n != 1]}" for n, word in counts if n)
        what = what or "unfinished text"
        return f"{what} ({size(self.chars)}) not shown; `%nbdist log {rank}` has the last ones"


@dataclass(slots=True)
class _Allowance:
    lines: float
    chars: float
    position: int = 0
    last_at: float = float("-inf")


class Gate:
    """Decides which lines of each rank are shown."""

    def __init__(self, ranks: Sequence[int], *, budget: Budget) -> None:
        self._budget = budget.shared(len(ranks))
        self._ranks = {r: _Allowance(self._budget.lines, self._budget.chars) for r in ranks}
        self._windows: deque[tuple[int, int]] = deque(maxlen=_MAX_WINDOWS)
        self._frontier = 0
        self._lines: float = self._budget.lines_s
        self._chars: float = self._budget.chars_s
        self._refilled_at = float("-inf")
        self._flowing = True

    def admit(
        self, rank: int, lines: int, chars: int, *, now: float, weight: int = 1
    ) -> list[tuple[bool, int]]:
        """Runs of (shown, number of lines) that make up these lines, in order.

        Args:
            rank: who printed.
            lines: number of lines, at least 1.
            chars: size of all of them.
            now: monotonic seconds.
            weight: what one of them costs, in lines.
        """
        allowance = self._ranks[rank]
        self._recover(allowance, now)
        mean = chars / lines
        free = min(lines, int(allowance.lines // weight), _quotient(allowance.chars, mean))
        begin, end = allowance.position + free, allowance.position + lines
        allowance.position = end
        allowance.lines -= free * weight
        allowance.chars -= free * mean
        runs = [(True, free)] if free else []
        if begin < end:
            runs += self._paced(begin, end, mean=mean, weight=weight, now=now)
        return runs

    def admit_chars(self, rank: int, chars: int, *, now: float) -> bool:
        """Whether text without a line end may be shown; it takes what is left."""
        allowance = self._ranks[rank]
        self._recover(allowance, now)
        self._refill(now)
        if chars <= allowance.chars:
            allowance.chars -= chars
            return True
        if chars <= self._chars:
            self._chars -= chars
            return True
        return False

    def quiet(self, rank: int, now: float) -> bool:
        """Whether the rank's flood is over."""
        return now - self._ranks[rank].last_at >= _IDLE_S

    def _recover(self, allowance: _Allowance, now: float) -> None:
        idle = now - allowance.last_at
        allowance.last_at = now
        if idle >= _IDLE_S:
            budget = self._budget
            allowance.lines = min(budget.lines, allowance.lines + idle * budget.lines_s)
            allowance.chars = min(budget.chars, allowance.chars + idle * budget.chars_s)

    def _refill(self, now: float) -> None:
        budget = self._budget
        passed = now - self._refilled_at
        self._refilled_at = now
        self._lines = min(budget.lines_s, self._lines + passed * budget.lines_s)
        self._chars = min(budget.chars_s, self._chars + passed * budget.chars_s)

    def _paced(
        self, begin: int, end: int, *, mean: float, weight: int, now: float
    ) -> Iterator[tuple[bool, int]]:
        """Runs of the lines begin..end-1: as decided before, or decided now."""
        for start, stop in self._windows:
            low, high = max(begin, start), min(end, stop)
            if low < high:
                if begin < low:
                    yield False, low - begin
                yield True, high - low
                begin = high
        known = min(end, self._frontier)
        if begin < known:
            yield False, known - begin
            begin = known
        if begin < end:
            yield from self._decided(begin, end, mean=mean, weight=weight, now=now)

    def _decided(
        self, begin: int, end: int, *, mean: float, weight: int, now: float
    ) -> Iterator[tuple[bool, int]]:
        self._refill(now)
        count = min(end - begin, int(self._lines // weight), _quotient(self._chars, mean))
        if not self._flowing and not self._half_full():
            count = 0
        self._flowing = count == end - begin
        self._frontier = end
        if count:
            self._lines -= count * weight
            self._chars -= count * mean
            self._note(begin, begin + count)
            yield True, count
        if begin + count < end:
            yield False, end - begin - count

    def _half_full(self) -> bool:
        """Whether showing again is worth a gap's notice: at most two of them a second."""
        budget = self._budget
        return self._lines >= budget.lines_s / 2 and self._chars >= budget.chars_s / 2

    def _note(self, start: int, stop: int) -> None:
        if self._windows and self._windows[-1][1] == start:
            start = self._windows.pop()[0]
        self._windows.append((start, stop))


@dataclass(slots=True)
class Dropped:
    """What one rank printed and nobody saw, with its last lines."""

    lines: int = 0
    displays: int = 0
    chars: int = 0
    _tail: deque[tuple[str, str, int]] = field(default_factory=deque)

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self.lines or self.displays or self.chars)

    def add(self, name: str, text: str, lines: int) -> None:
        """Count text of a stream and keep its end."""
        self.lines += lines
        self.chars += len(text)
        if len(text) > _TAIL_CHARS:
            text = text[-_TAIL_CHARS:]
            lines = text.count("\n")
        self._tail.append((name, text, lines))
        while sum(kept for _, _, kept in self._tail) - self._tail[0][2] >= TAIL_LINES + 1:
            self._tail.popleft()
        while len(self._tail) > 10 * TAIL_LINES:
            self._tail.popleft()

    def add_display(self, chars: int) -> None:
        """Count a display."""
        self.displays += 1
        self.chars += chars

    def taken(self) -> tuple[Gap, list[tuple[str, str]]]:
        """The gap, and the last lines as (stream, text); begins anew."""
        tail: deque[tuple[str, str]] = deque()
        missing = TAIL_LINES
        for name, text, _ in reversed(self._tail):
            piece = _last_lines(text, missing)
            tail.appendleft((name, piece))
            missing -= piece.count("\n")
            if missing <= 0:
                break
        shown = "".join(text for _, text in tail)
        gap = self._gap(shown.count("\n"), len(shown))
        self.clear()
        return gap, list(tail)

    def counted(self) -> Gap:
        """The gap without its last lines; begins anew."""
        gap = self._gap(0, 0)
        self.clear()
        return gap

    def clear(self) -> None:
        """Forget everything."""
        self.lines = self.displays = self.chars = 0
        self._tail.clear()

    def _gap(self, shown_lines: int, shown_chars: int) -> Gap:
        return Gap(self.lines - shown_lines, self.displays, self.chars - shown_chars)


def _quotient(amount: float, each: float) -> int:
    return int(amount // each) if each else int(amount)


def _last_lines(text: str, count: int) -> str:
    """At most `count` ended lines from the end, and an unfinished one."""
    end = len(text)
    for _ in range(count + 1):
        end = text.rfind("\n", 0, end)
        if end < 0:
            return text
    return text[end + 1 :]
