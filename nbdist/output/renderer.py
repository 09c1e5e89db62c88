"""Renders the output of a cell: text, displays and errors of the ranks, merged into one output.

The cell passes messages of the ranks and calls `tick()` every 50-100 ms. Only the thread that owns
the sink may call the renderer. Text passes these stages:

    log (everything) -> shown ranks -> rate limit -> labels and merging -> sink
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from nbdist.output import tracebacks
from nbdist.output.ansi import rank_label, replace_invalid_chars
from nbdist.output.comm_relay import CommRelay
from nbdist.output.multi_rank import MERGE_DELAY_S, MultiRankOutput
from nbdist.output.rank_log import RankLog
from nbdist.output.rate_limit import (
    LINES_PER_DISPLAY,
    OmittedBuffer,
    OmittedOutput,
    OutputBudget,
    OutputLimiter,
)
from nbdist.output.single_rank import SingleRankOutput
from nbdist.output.terminal_line import MAX_LINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nbdist.output.sink import MimeBundle, OutputSink, StreamName
    from nbdist.protocol.messages import RankError

ShownRanks = Literal["all", "none"] | frozenset[int]

_UPDATE_S = 0.1
_FLUSH_S = 0.1
_DISPLAY_CHARS = 20
"""Text of a display costs less than printed text by this factor: figures are large."""
_LONG_BAR = 4_000


class OutputRenderer:
    """Shows the output of one cell.

    Args:
        screen: the output sink.
        ranks: the ranks that run the cell.
        show: the ranks whose output is displayed. Everything is logged.
        clock: returns monotonic seconds.
        hold_s: maximum wait of a line for the same line of the other ranks.
        budget: rate limit of the shown output.
        logs: log by rank. Default: new logs.
    """

    def __init__(
        self,
        screen: OutputSink,
        *,
        ranks: Sequence[int],
        show: ShownRanks = "all",
        clock: Callable[[], float] = time.monotonic,
        hold_s: float = MERGE_DELAY_S,
        budget: OutputBudget | None = None,
        logs: Mapping[int, RankLog] | None = None,
    ) -> None:
        writers = _writers(ranks, show)
        self.rank_logs = {rank: (logs or {}).get(rank) or RankLog() for rank in ranks}
        self._screen = screen
        self._clock = clock
        self._writer = (
            MultiRankOutput(screen, writers, hold_s=hold_s)
            if len(writers) > 1
            else SingleRankOutput(screen)
        )
        self._limiter = OutputLimiter(writers, budget=budget or OutputBudget())
        self._dropped = {rank: OmittedBuffer() for rank in writers}
        self._skipping: set[tuple[int, StreamName]] = set()
        self._bars: dict[tuple[int, StreamName], str] = {}
        self._updates: dict[str, tuple[MimeBundle, MimeBundle]] = {}
        self._updated_at = self._flushed_at = float("-inf")
        self._relay = CommRelay(screen)
        self._notice = self._noticed_by = ""

    @property
    def sink(self) -> OutputSink:
        """The output sink; may be replaced while the cell runs."""
        return self._screen

    @sink.setter
    def sink(self, screen: OutputSink) -> None:
        self._screen = self._writer.sink = self._relay.sink = screen

    def write_text(self, ranks: Sequence[int], name: StreamName, text: str) -> None:
        """Add text that each of these ranks has printed."""
        now = self._clock()
        ranks_by_text: dict[str, list[int]] = {}
        for rank in ranks:
            self.rank_logs[rank].append(text, name=name)
            if rank in self._dropped:
                skips = (rank, name) in self._skipping
                rest = self._end_of_dropped_line(rank, name, text) if skips else text
                ranks_by_text.setdefault(rest, []).append(rank)
        for rest, same_ranks in ranks_by_text.items():
            if lines := rest.count("\n"):
                self._lines(same_ranks, name, rest, lines, now)
            elif rest:
                self._open_text(same_ranks, name, rest, now)

    def display(
        self,
        rank: int,
        bundle: MimeBundle,
        metadata: MimeBundle,
        *,
        display_id: str | None = None,
        update: bool = False,
    ) -> None:
        """Add a display of a rank, or an update of one with an id."""
        if rank not in self._dropped:
            return
        bundle, metadata = _cleaned(bundle), _cleaned(metadata)
        own_id = None if display_id is None else f"nbdist-{rank}-{display_id}"
        if update and own_id is not None:
            self._updates[own_id] = bundle, metadata
            return
        now = self._clock()
        chars = sum(len(text) for text in bundle.values() if isinstance(text, str))
        cost = 1 + chars // _DISPLAY_CHARS
        runs = self._limiter.admit_lines(rank, 1, cost, now=now, weight=LINES_PER_DISPLAY)
        if not runs[0][0]:
            self._dropped[rank].add_display(chars)
            return
        self._end_gaps((rank,), now)
        self._writer.display(rank, bundle, metadata, display_id=own_id, now=now)

    def result(self, rank: int, bundle: MimeBundle, metadata: MimeBundle) -> None:
        """Add the value of a cell's last expression."""
        plain = bundle.get("text/plain")
        if isinstance(plain, str):
            self.rank_logs[rank].append(f"{plain}\n")
        self.display(rank, bundle, metadata)

    def clear_output(self, rank: int, *, wait: bool) -> None:
        """Add a rank's clear_output, which takes effect once all ranks have called it."""
        if rank in self._dropped:
            self._dropped[rank].clear()
            self._writer.clear(rank, wait=wait, now=self._clock())

    def relay_comm(
        self,
        rank: int,
        msg_type: str,
        content: MimeBundle,
        metadata: MimeBundle,
        buffers: list[Any],
    ) -> None:
        """Forward a widget's comm message to the front end."""
        if rank in self._dropped:
            self._relay.add_message(msg_type, _cleaned(content), metadata, buffers)

    def show_errors(
        self, errors: Sequence[RankError], *, waiting: Sequence[int], advice: Sequence[str] = ()
    ) -> None:
        """Show the errors of a cell, whose other ranks may still run."""
        groups = tracebacks.group_errors(errors)
        label = rank_label(tuple(waiting))
        several = len(waiting) > 1
        lines = [*tracebacks.format_tracebacks(groups), *advice]
        if waiting:
            running = f"rank{'s'[:several]} {label} still run{'s'[several:]}"
            lines.append(
                f"{running}. Interrupt the cell to stop {'them' if several else 'it'};"
                " a rank that waits for others is interrupted soon."
            )
        self.show_lines(lines)

    def show_lines(self, lines: Sequence[str]) -> None:
        """Show lines of nbdist below the output of the ranks."""
        self._writer.tick(self._clock())
        self._screen.write("stderr", "\n".join([*lines, ""]))
        self._screen.flush()

    def show_bundle(self, bundle: MimeBundle) -> None:
        """Show a display of nbdist below the output of the ranks."""
        self._writer.tick(self._clock())
        self._screen.display(bundle, {})
        self._screen.flush()

    def set_status_line(self, text: str) -> None:
        """Show one line that changes in place below the output; "" removes it.

        Without updatable displays the first text is printed and stays.
        """
        if text == self._notice:
            return
        first, self._notice = not self._notice, text
        if not self._screen.can_update:
            if first:
                self.show_lines([text])
            return
        shown = {"text/plain": f"nbdist: {text}"} if text else {"text/plain": ""}
        update, self._noticed_by = bool(self._noticed_by), self._noticed_by or uuid4().hex
        self._screen.display(shown, {}, display_id=f"nbdist-{self._noticed_by}", update=update)

    def tick(self) -> None:
        """Show output that is due. Call it every 50-100 ms and after each batch of messages."""
        now = self._clock()
        dropped = [rank for rank, dropped in self._dropped.items() if dropped]
        self._end_floods([rank for rank in dropped if self._limiter.is_quiet(rank, now)], now)
        self._show_bars(now, final=False)
        self._relay.flush()
        self._writer.tick(now)
        self._send_updates(now)
        if now - self._flushed_at >= _FLUSH_S:
            self._flushed_at = now
            self._screen.flush()

    def close(self) -> None:
        """Show all pending output and notes about omitted output."""
        now = self._clock()
        self._end_floods([rank for rank, dropped in self._dropped.items() if dropped], now)
        self._show_bars(now, final=True)
        self._relay.flush()
        self._writer.close(now)
        self._send_updates(now, final=True)
        self._screen.flush()

    def _lines(
        self, ranks: Sequence[int], name: StreamName, text: str, lines: int, now: float
    ) -> None:
        """Show or drop lines as decided by the rate limit."""
        cost = min(len(text), lines * MAX_LINE)
        ranks_by_runs: dict[tuple[tuple[bool, int], ...], list[int]] = {}
        for rank in ranks:
            self._bars.pop((rank, name), None)
            runs = tuple(self._limiter.admit_lines(rank, lines, cost, now=now))
            ranks_by_runs.setdefault(runs, []).append(rank)
        for runs, same_ranks in ranks_by_runs.items():
            for shown, count, piece in _pieces(text, runs):
                if shown:
                    self._end_gaps(same_ranks, now)
                    self._writer.write_text(same_ranks, name, piece, now)
                else:
                    for rank in same_ranks:
                        self._drop(rank, name, piece, count, now)

    def _drop(self, rank: int, name: StreamName, text: str, lines: int, now: float) -> None:
        if self._writer.is_mid_line(rank, name):
            end = text.find("\n") + 1
            self._writer.write_text((rank,), name, text[:end], now)
            text, lines = text[end:], lines - 1
        if not text:
            return
        self._dropped[rank].add_text(name, text, lines)
        if not text.endswith("\n"):
            self._skipping.add((rank, name))

    def _end_of_dropped_line(self, rank: int, name: StreamName, text: str) -> str:
        """Drop the rest of a dropped line. Returns the text after it."""
        end = text.find("\n") + 1
        self._dropped[rank].add_text(name, text[: end or None], 1 if end else 0)
        if not end:
            return ""
        self._skipping.discard((rank, name))
        return text[end:]

    def _open_text(self, ranks: Sequence[int], name: StreamName, text: str, now: float) -> None:
        """Show or drop text without a newline: half a line, or a progress bar."""
        if "\r" in text and len(text) > _LONG_BAR:
            text = "\r" + text.rstrip("\r").rpartition("\r")[2]
        shown = []
        for rank in ranks:
            if not self._writer.limits_open_text or self._limiter.admit_chars(
                rank, min(len(text), MAX_LINE), now=now
            ):
                self._bars.pop((rank, name), None)
                shown.append(rank)
            elif "\r" in text:
                self._bars[rank, name] = text
            else:
                self._drop(rank, name, text, 0, now)
        if shown:
            self._end_gaps(shown, now)
            self._writer.write_text(shown, name, text, now)

    def _show_bars(self, now: float, *, final: bool) -> None:
        """Show the last state of bars that changed too fast."""
        for (rank, name), text in list(self._bars.items()):
            if final or self._limiter.admit_chars(rank, len(text), now=now):
                del self._bars[rank, name]
                self._writer.write_text((rank,), name, text, now)

    def _end_gaps(self, ranks: Sequence[int], now: float) -> None:
        """Report omitted output before new output is shown."""
        ranks_by_gap: dict[OmittedOutput, list[int]] = {}
        for rank in ranks:
            if self._dropped[rank]:
                ranks_by_gap.setdefault(self._dropped[rank].pop_counts(), []).append(rank)
        for gap, same_ranks in ranks_by_gap.items():
            self._writer.show_omitted(same_ranks, gap, now)

    def _end_floods(self, ranks: Sequence[int], now: float) -> None:
        """Report omitted output and show its last lines."""
        ranks_by_flood: dict[tuple[OmittedOutput, tuple[tuple[str, str], ...]], list[int]] = {}
        for rank in ranks:
            gap, last = self._dropped[rank].pop_with_tail()
            ranks_by_flood.setdefault((gap, tuple(last)), []).append(rank)
        for (gap, tail), same_ranks in ranks_by_flood.items():
            if gap.num_lines or gap.num_displays or gap.num_chars:
                self._writer.show_omitted(same_ranks, gap, now)
            for name, text in tail:
                self._writer.write_text(same_ranks, _stream_name(name), text, now)
        if ranks:
            ended = frozenset(ranks)
            self._skipping = {key for key in self._skipping if key[0] not in ended}

    def _send_updates(self, now: float, *, final: bool = False) -> None:
        """Send the last state of each changed display, at most every _UPDATE_S."""
        if not self._updates or not (final or now - self._updated_at >= _UPDATE_S):
            return
        self._updated_at = now
        for display_id, (bundle, metadata) in list(self._updates.items()):
            if not self._writer.holds_display(display_id):
                del self._updates[display_id]
                self._screen.display(bundle, metadata, display_id=display_id, update=True)


def _writers(ranks: Sequence[int], show: ShownRanks) -> list[int]:
    if show == "all":
        return list(ranks)
    return [] if isinstance(show, str) else [rank for rank in ranks if rank in show]


def _pieces(text: str, runs: Sequence[tuple[bool, int]]) -> Iterator[tuple[bool, int, str]]:
    """Split text into the runs; the text after the last newline belongs to the last run."""
    start = 0
    for index, (shown, count) in enumerate(runs):
        if index == len(runs) - 1:
            yield shown, count, text[start:]
            return
        end = start
        for _ in range(count):
            end = text.find("\n", end) + 1
        yield shown, count, text[start:end]
        start = end


def _cleaned(value: Any) -> Any:
    """JSON without lone surrogates and NUL."""
    if isinstance(value, str):
        return replace_invalid_chars(value)
    if isinstance(value, dict):
        return {replace_invalid_chars(key): _cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return value


def _stream_name(name: str) -> StreamName:
    return "stderr" if name == "stderr" else "stdout"
