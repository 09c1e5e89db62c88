"""Limits the output of a cell that prints faster than anyone can read.

Each rank has a budget (a burst). Beyond it, lines are shown at a fixed rate and the others are
counted as omitted output.

Ranks that print the same output are cut at the same lines: the first rank that reaches a line
number decides for all ranks whether that line is shown, so that their omissions are equal and can
be merged. The budget of a rank recovers over time, so a quiet rank is never cut because of another
rank's flood.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.output.ansi import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LINES_PER_DISPLAY = 10
"""Cost of one rich display, in lines."""
TAIL_LINES = 20
"""Number of lines at the end of a flood that are always shown."""

_IDLE_S = 0.5
_TAIL_CHARS = 64_000
_MAX_WINDOWS = 1000


@dataclass(frozen=True, slots=True)
class OutputBudget:
    """Limits of the shown output: a burst, then a rate per second."""

    lines: int = 5000
    chars: int = 1_000_000
    lines_per_s: int = 200
    chars_per_s: int = 200_000

    def per_rank(self, num_ranks: int) -> OutputBudget:
        """Return the budget of one of several ranks, so that the total stays readable."""
        if num_ranks <= 2:  # noqa: PLR2004 - two ranks may use the full budget each
            return self
        share = max(0.2, 2 / num_ranks)
        return OutputBudget(
            int(self.lines * share), int(self.chars * share), self.lines_per_s, self.chars_per_s
        )


@dataclass(frozen=True, slots=True)
class OmittedOutput:
    """Output of one rank that is not shown, between two pieces that are."""

    num_lines: int
    num_displays: int
    num_chars: int

    def describe(self, rank: int) -> str:
        """Return a message with the size of the omitted output and where to read the end of it."""
        counts = ((self.num_lines, "line"), (self.num_displays, "display"))
        omitted = " and ".join(f"{n:,} {word}{'s'[: n != 1]}" for n, word in counts if n)
        omitted = omitted or "unfinished text"
        return (
            f"{omitted} ({format_bytes(self.num_chars)}) not shown;"
            f" `%nbdist log {rank}` shows the last of it"
        )


@dataclass(slots=True)
class _RankBudget:
    lines: float
    chars: float
    position: int = 0
    last_at: float = float("-inf")


class OutputLimiter:
    """Decides which lines of each rank are shown."""

    def __init__(self, ranks: Sequence[int], *, budget: OutputBudget) -> None:
        self._budget = budget.per_rank(len(ranks))
        self._ranks = {rank: _RankBudget(self._budget.lines, self._budget.chars) for rank in ranks}
        self._windows: deque[tuple[int, int]] = deque(maxlen=_MAX_WINDOWS)
        self._frontier = 0
        self._lines: float = self._budget.lines_per_s
        self._chars: float = self._budget.chars_per_s
        self._refilled_at = float("-inf")
        self._flowing = True

    def admit_lines(
        self, rank: int, lines: int, chars: int, *, now: float, weight: int = 1
    ) -> list[tuple[bool, int]]:
        """Return the lines as runs of (shown, number of lines), in order.

        Args:
            rank: the rank that printed them.
            lines: number of lines, at least 1.
            chars: total size.
            now: monotonic seconds.
            weight: cost of one of them, in lines.
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
        """Return whether text without a newline may be shown, and charge it to the budget."""
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

    def is_quiet(self, rank: int, now: float) -> bool:
        """Return whether the flood of the rank has ended."""
        return now - self._ranks[rank].last_at >= _IDLE_S

    def _recover(self, allowance: _RankBudget, now: float) -> None:
        idle = now - allowance.last_at
        allowance.last_at = now
        if idle >= _IDLE_S:
            budget = self._budget
            allowance.lines = min(budget.lines, allowance.lines + idle * budget.lines_per_s)
            allowance.chars = min(budget.chars, allowance.chars + idle * budget.chars_per_s)

    def _refill(self, now: float) -> None:
        budget = self._budget
        passed = now - self._refilled_at
        self._refilled_at = now
        self._lines = min(budget.lines_per_s, self._lines + passed * budget.lines_per_s)
        self._chars = min(budget.chars_per_s, self._chars + passed * budget.chars_per_s)

    def _paced(
        self, begin: int, end: int, *, mean: float, weight: int, now: float
    ) -> Iterator[tuple[bool, int]]:
        """Runs of the lines begin..end-1: earlier decisions, then new ones."""
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
        """True if the rate budget has recovered enough; limits the notes to two per second."""
        budget = self._budget
        return self._lines >= budget.lines_per_s / 2 and self._chars >= budget.chars_per_s / 2

    def _note(self, start: int, stop: int) -> None:
        if self._windows and self._windows[-1][1] == start:
            start = self._windows.pop()[0]
        self._windows.append((start, stop))


@dataclass(slots=True)
class OmittedBuffer:
    """Omitted output of one rank, with its last lines."""

    num_lines: int = 0
    num_displays: int = 0
    num_chars: int = 0
    _tail: deque[tuple[str, str, int]] = field(default_factory=deque)

    def __bool__(self) -> bool:
        """Return whether any output was omitted."""
        return bool(self.num_lines or self.num_displays or self.num_chars)

    def add_text(self, name: str, text: str, lines: int) -> None:
        """Count text of a stream and keep its end."""
        self.num_lines += lines
        self.num_chars += len(text)
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
        self.num_displays += 1
        self.num_chars += chars

    def pop_with_tail(self) -> tuple[OmittedOutput, list[tuple[str, str]]]:
        """Return the omitted output and its last lines as (stream, text), and reset the buffer."""
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

    def pop_counts(self) -> OmittedOutput:
        """Return the omitted output including its last lines, and reset the buffer."""
        gap = self._gap(0, 0)
        self.clear()
        return gap

    def clear(self) -> None:
        """Reset the buffer."""
        self.num_lines = self.num_displays = self.num_chars = 0
        self._tail.clear()

    def _gap(self, shown_lines: int, shown_chars: int) -> OmittedOutput:
        return OmittedOutput(
            self.num_lines - shown_lines, self.num_displays, self.num_chars - shown_chars
        )


def _quotient(amount: float, each: float) -> int:
    return int(amount // each) if each else int(amount)


def _last_lines(text: str, count: int) -> str:
    """At most `count` complete lines from the end, and an unfinished one."""
    end = len(text)
    for _ in range(count + 1):
        end = text.rfind("\n", 0, end)
        if end < 0:
            return text
    return text[end + 1 :]
