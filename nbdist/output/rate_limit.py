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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nbdist.number_formatting import format_bytes
from nbdist.output.dedup import OutputItem
from nbdist.output.line_splitter import MAX_LINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nbdist.output.dedup import ItemStream, MimeBundle

LINES_PER_DISPLAY = 10
"""Cost of one rich display, in lines."""
TAIL_LINES = 20
"""Number of lines at the end of a flood that are always shown."""

_DISPLAY_CHARS = 20
"""Text of a display costs less than printed text by this factor: figures are large."""
_LONG_BAR = 4_000
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


def display_chars(bundle: MimeBundle) -> int:
    """Return the number of characters of a display's texts."""
    return sum(len(text) for text in bundle.values() if isinstance(text, str))


def display_cost(bundle: MimeBundle) -> int:
    """Return the cost of a display in characters of printed text."""
    return 1 + display_chars(bundle) // _DISPLAY_CHARS


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
class _RankOutputBudget:
    lines: float
    chars: float
    position: int = 0
    last_at: float = float("-inf")


class OutputLimiter:
    """Passes items on, cuts them, or counts them as omitted.

    Args:
        ranks: the ranks whose output is shown.
        budget: limits of a rank, of which more than two ranks have a share only.
        pass_on: called with what is shown and its ranks.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        budget: OutputBudget,
        pass_on: Callable[[Sequence[int], OutputItem[Any]], None],
    ) -> None:
        share = min(1.0, max(0.2, 2 / max(len(ranks), 1)))  # so that the total stays readable
        self._budget = replace(
            budget, lines=int(budget.lines * share), chars=int(budget.chars * share)
        )
        self._pass_on = pass_on
        self._ranks = {
            rank: _RankOutputBudget(self._budget.lines, self._budget.chars) for rank in ranks
        }
        self._windows: deque[tuple[int, int]] = deque(maxlen=_MAX_WINDOWS)
        """Ranges of line numbers that are shown beyond the budgets."""
        self._frontier = 0
        """The first line number that is not decided yet."""
        self._lines: float = self._budget.lines_per_s
        self._chars: float = self._budget.chars_per_s
        self._refilled_at = float("-inf")
        self._is_flowing = True
        self._omitted: dict[int, OmittedOutputBuffer] = {}
        """By rank, if some of its output was omitted since it was last shown."""
        self._mid_line: set[tuple[int, ItemStream]] = set()
        """Ranks and streams whose last shown text has no newline at its end; of several ranks."""
        self._skipping: set[tuple[int, ItemStream]] = set()
        """Ranks and streams whose last omitted text has no newline at its end."""
        self._bars: dict[tuple[int, ItemStream], OutputItem[Any]] = {}
        """Last state of bars that change too fast."""

    def admit_text(self, ranks: Sequence[int], item: OutputItem[Any]) -> None:
        """Pass on what is shown of text that each of these ranks has printed."""
        text = item.content
        if self._skipping and any((rank, item.stream) in self._skipping for rank in ranks):
            self._omit_rest_of_line(ranks, item)
            return
        if "\n" not in text:
            self._admit_open_text(ranks, item)
            return
        lines = text.count("\n")
        cost = min(len(text), lines * MAX_LINE)
        ranks_by_runs: dict[tuple[tuple[bool, int], ...], list[int]] = {}
        for rank in ranks:
            self._bars.pop((rank, item.stream), None)
            runs = tuple(self.admit_lines(rank, lines, cost, now=item.arrived_at))
            ranks_by_runs.setdefault(runs, []).append(rank)
        for runs, same_ranks in ranks_by_runs.items():
            start = 0
            for number, (shown, count) in enumerate(runs, 1):
                end = start
                if number == len(runs):
                    end = len(text)  # the text after the last newline belongs to the last run
                else:
                    for _ in range(count):
                        end = text.find("\n", end) + 1
                piece = replace(item, content=text[start:end])
                start = end
                if shown:
                    self._show(same_ranks, piece)
                else:
                    self._omit(same_ranks, piece, count)

    def admit_display(self, rank: int, item: OutputItem[Any]) -> None:
        """Pass on a display, or count it as omitted."""
        bundle = item.content.bundle
        ((shown, _),) = self.admit_lines(
            rank, 1, display_cost(bundle), now=item.arrived_at, weight=LINES_PER_DISPLAY
        )
        if shown:
            self._show((rank,), item)
        else:
            omitted = self._omitted.setdefault(rank, OmittedOutputBuffer())
            omitted.num_displays += 1
            omitted.num_chars += display_chars(bundle)

    def admit_clear(self, rank: int, item: OutputItem[Any]) -> None:
        """Pass on a rank's `clear_output`, after which its omitted output is not mentioned."""
        self._omitted.pop(rank, None)
        self._pass_on((rank,), item)

    def end_floods(self, now: float, *, final: bool = False) -> None:
        """Pass on notes about floods that have ended with their last lines, and states of bars.

        Args:
            now: monotonic seconds.
            final: True if the cell has ended.
        """
        ranks_by_end: dict[tuple[OmittedOutput, tuple[tuple[ItemStream, str], ...]], list[int]] = {}
        for rank in sorted(self._omitted):
            if final or now - self._ranks[rank].last_at >= _IDLE_S:
                counts, tail = self._omitted.pop(rank).split_tail()
                ranks_by_end.setdefault((counts, tuple(tail)), []).append(rank)
        for (counts, ending), ranks in ranks_by_end.items():
            self._skipping = {place for place in self._skipping if place[0] not in ranks}
            if counts.num_lines or counts.num_displays or counts.num_chars:
                self._pass_on(ranks, OutputItem(counts, now, key=counts))
            for stream, text in ending:
                self._show(ranks, OutputItem(text, now, stream))
        for (rank, stream), bar in list(self._bars.items()):
            if final or self.admit_chars(rank, len(bar.content), now=now):
                del self._bars[rank, stream]
                self._show((rank,), replace(bar, arrived_at=now))

    def _admit_open_text(self, ranks: Sequence[int], item: OutputItem[Any]) -> None:
        """Pass on text without a newline, half a line or a progress bar, if within the budget.

        The open text of several ranks is not limited: live displays are.
        """
        text = item.content
        if "\r" in text and len(text) > _LONG_BAR:
            text = "\r" + text.rstrip("\r").rpartition("\r")[2]
            item = replace(item, content=text)
        place = ranks[0], item.stream
        if len(self._ranks) > 1 or self.admit_chars(
            ranks[0], min(len(text), MAX_LINE), now=item.arrived_at
        ):
            self._bars.pop(place, None)
            self._show(ranks, item)
        elif "\r" in text:
            self._bars[place] = item
        else:
            self._omit(ranks, item, 0)

    def _show(self, ranks: Sequence[int], item: OutputItem[Any]) -> None:
        """Pass an item on, after notes about the output of its ranks that was omitted before."""
        ranks_by_omitted: dict[OmittedOutput, list[int]] = {}
        for rank in ranks:
            if rank in self._omitted:
                counts = self._omitted.pop(rank).counts()
                ranks_by_omitted.setdefault(counts, []).append(rank)
        for omitted, same_ranks in ranks_by_omitted.items():
            self._pass_on(same_ranks, OutputItem(omitted, item.arrived_at, key=omitted))
        if len(self._ranks) > 1:
            streams: tuple[ItemStream, ...] = ("stdout", "stderr")
            if isinstance(item.content, str):
                streams = (item.stream,)
            places = {(rank, stream) for rank in ranks for stream in streams}
            if isinstance(item.content, str) and not item.content.endswith("\n"):
                self._mid_line |= places
            else:
                self._mid_line -= places
        self._pass_on(ranks, item)

    def _omit(self, ranks: Sequence[int], item: OutputItem[Any], lines: int) -> None:
        for rank in ranks:
            text, place = item.content, (rank, item.stream)
            num_lines = lines
            if lines and place in self._mid_line:  # a line of which the beginning is shown
                end = text.find("\n") + 1
                self._mid_line.discard(place)
                self._pass_on((rank,), replace(item, content=text[:end]))
                text, num_lines = text[end:], lines - 1
            if text:
                omitted = self._omitted.setdefault(rank, OmittedOutputBuffer())
                omitted.add_text(item.stream, text, num_lines)
                if not text.endswith("\n"):
                    self._skipping.add(place)

    def _omit_rest_of_line(self, ranks: Sequence[int], item: OutputItem[Any]) -> None:
        """Omit the rest of lines of which the beginning was omitted; admit the text after it."""
        ranks_by_text: dict[str, list[int]] = {}
        for rank in ranks:
            text, place = item.content, (rank, item.stream)
            if place in self._skipping:
                rest, newline, text = text.partition("\n")
                omitted = self._omitted.setdefault(rank, OmittedOutputBuffer())
                omitted.add_text(item.stream, rest + newline, len(newline))
                if newline:
                    self._skipping.discard(place)
            ranks_by_text.setdefault(text, []).append(rank)
        for text, same_ranks in ranks_by_text.items():
            if text:
                self.admit_text(same_ranks, replace(item, content=text))

    def admit_lines(
        self, rank: int, lines: int, chars: int, *, now: float, weight: int = 1
    ) -> list[tuple[bool, int]]:
        """Return the lines as runs of (shown, number of lines), in order.

        Args:
            rank: the rank that printed them.
            lines: number of lines, at least 1.
            chars: total size, at least 1.
            now: monotonic seconds.
            weight: cost of one of them, in lines.
        """
        allowance = self._recovered(rank, now)
        mean = chars / lines
        free = min(lines, int(allowance.lines // weight), int(allowance.chars // mean))
        begin, end = allowance.position + free, allowance.position + lines
        allowance.position = end
        allowance.lines -= free * weight
        allowance.chars -= free * mean
        runs = [(True, free)] if free else []
        if begin < end:
            runs += self._admitted_line_runs(begin, end, mean=mean, weight=weight)
        return runs

    def admit_chars(self, rank: int, chars: int, *, now: float) -> bool:
        """Return whether text without a newline may be shown, and charge it to the budget."""
        allowance = self._recovered(rank, now)
        if chars <= allowance.chars:
            allowance.chars -= chars
            return True
        if chars <= self._chars:
            self._chars -= chars
            return True
        return False

    def _recovered(self, rank: int, now: float) -> _RankOutputBudget:
        """Return the budget of a rank that prints now; an idle one has recovered, as the rate."""
        budget, allowance = self._budget, self._ranks[rank]
        passed, self._refilled_at = now - self._refilled_at, now
        self._lines = min(budget.lines_per_s, self._lines + passed * budget.lines_per_s)
        self._chars = min(budget.chars_per_s, self._chars + passed * budget.chars_per_s)
        idle, allowance.last_at = now - allowance.last_at, now
        if idle >= _IDLE_S:
            allowance.lines = min(budget.lines, allowance.lines + idle * budget.lines_per_s)
            allowance.chars = min(budget.chars, allowance.chars + idle * budget.chars_per_s)
        return allowance

    def _admitted_line_runs(
        self, begin: int, end: int, *, mean: float, weight: int
    ) -> Iterator[tuple[bool, int]]:
        """Runs of the lines begin..end-1, which are beyond the rank's budget."""
        # lines that another rank has already reached: decided as for that rank
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
        if begin == end:
            return
        count = min(end - begin, int(self._lines // weight), int(self._chars // mean))
        # after a gap wait until half of the rate has recovered: at most two notes per second
        budget = self._budget
        if not self._is_flowing and (
            self._lines < budget.lines_per_s / 2 or self._chars < budget.chars_per_s / 2
        ):
            count = 0
        self._is_flowing = count == end - begin
        self._frontier = end
        if count:
            self._lines -= count * weight
            self._chars -= count * mean
            start = begin
            if self._windows and self._windows[-1][1] == begin:
                start = self._windows.pop()[0]
            self._windows.append((start, begin + count))
            yield True, count
        if begin + count < end:
            yield False, end - begin - count


@dataclass(slots=True)
class OmittedOutputBuffer:
    """Omitted output of one rank, with its last lines."""

    num_lines: int = 0
    num_displays: int = 0
    num_chars: int = 0
    _tail: deque[tuple[ItemStream, str]] = field(
        default_factory=lambda: deque(maxlen=TAIL_LINES + 1)
    )
    """The last complete lines, and an unfinished one."""

    def add_text(self, name: ItemStream, text: str, lines: int) -> None:
        """Count text of a stream and keep its end."""
        self.num_lines += lines
        self.num_chars += len(text)
        pieces = text[-_TAIL_CHARS:].rsplit("\n", TAIL_LINES + 1)
        for number, piece in enumerate(pieces, 1):
            line = piece if number == len(pieces) else piece + "\n"
            if self._tail and self._tail[-1][0] == name and not self._tail[-1][1].endswith("\n"):
                line = self._tail.pop()[1] + line
            if line:
                self._tail.append((name, line[-_TAIL_CHARS:]))

    def split_tail(self) -> tuple[OmittedOutput, list[tuple[ItemStream, str]]]:
        """Return what was omitted before the last lines, and those lines as (stream, text)."""
        tail = list(self._tail)
        while sum(text.endswith("\n") for _, text in tail) > TAIL_LINES:
            del tail[0]
        self.num_lines -= sum(text.endswith("\n") for _, text in tail)
        self.num_chars -= sum(len(text) for _, text in tail)
        return self.counts(), tail

    def counts(self) -> OmittedOutput:
        """Return the size of the omitted output."""
        return OmittedOutput(self.num_lines, self.num_displays, self.num_chars)
