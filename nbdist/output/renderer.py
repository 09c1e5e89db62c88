"""Renders the output of a cell: text, displays and errors of the ranks, merged into one output.

The cell passes messages of the ranks and calls `tick()` every 50-100 ms. Only the thread that owns
the sink may call the renderer. Output is an ``OutputItem`` in each stage:

    decode      the renderer's methods make items, log all text, and drop that of hidden ranks
    limit       ``OutputLimiter`` counts what is omitted
    split       ``LineSplitter`` makes lines; open lines stay there until a newline
    merge       ``OutputMerger`` unites equal items of several ranks
    write       ``CellWriter`` adds labels and writes to the sink

If a single rank writes, its text is neither split nor merged: the front end handles its progress
bars and half lines.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from nbdist.output import tracebacks
from nbdist.output.ansi import replace_invalid_chars
from nbdist.output.dedup import (
    MERGE_DELAY_S,
    ClearOutput,
    DisplayOutput,
    OutputItem,
    OutputMerger,
)
from nbdist.output.line_splitter import (
    MAX_DISPLAY_ROWS,
    MAX_LINE,
    LineSplitter,
    OpenLinesDisplay,
    truncate_lines,
    truncate_open_line,
)
from nbdist.output.rate_limit import OmittedOutput, OutputBudget, OutputLimiter
from nbdist.output.replay import RankLogTail, RecordingSink
from nbdist.rank_sets import describe_ranks, format_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.output.dedup import MimeBundle, StreamName
    from nbdist.output.line_splitter import TerminalEmulator
    from nbdist.output.sink import OutputSink
    from nbdist.protocol.messages import RankError

ShownRanks = Literal["all", "none"] | frozenset[int]

_UPDATE_S = 0.1
"""Displays are updated at most this often."""
_FLUSH_S = 0.1


class OutputRenderer:
    """Shows the output of one cell.

    Args:
        screen: the output sink.
        ranks: the ranks that run the cell.
        show: the ranks whose output is displayed. Everything is logged.
        clock: returns monotonic seconds.
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
        budget: OutputBudget | None = None,
        logs: Mapping[int, RankLogTail] | None = None,
    ) -> None:
        chosen = {"all": ranks, "none": ()}[show] if isinstance(show, str) else show
        self._shown = [rank for rank in ranks if rank in chosen]
        self.rank_logs = {rank: (logs or {}).get(rank) or RankLogTail() for rank in ranks}
        self._clock = clock
        self.recorder = RecordingSink(screen)
        """Keeps the output and passes it on to its `sink`, which may be replaced."""
        self._merger: OutputMerger[Any] = OutputMerger(self._shown)
        self._splitter = LineSplitter(self._merger)
        self._writer = CellWriter(self.recorder, self._shown)
        self._limiter = OutputLimiter(
            self._shown,
            budget=budget or OutputBudget(),
            pass_on=self._splitter.split if len(self._shown) > 1 else self._writer.write_now,
        )
        self._comm_updates: dict[str, tuple[MimeBundle, MimeBundle]] = {}
        """By comm id the content and metadata of a widget's merged state update."""
        self._display_updates: dict[str, DisplayOutput] = {}
        """Last update by display id."""
        self._updated_at = self._flushed_at = float("-inf")
        self._status_text = ""
        self._status_id = f"nbdist-{uuid4().hex}"
        self._status_shown = False

    def write_text(self, ranks: Sequence[int], name: StreamName, text: str) -> None:
        """Add text that each of these ranks has printed."""
        text = replace_invalid_chars(text)
        for rank in ranks:
            self.rank_logs[rank].append(text, name=name)
        shown = [rank for rank in ranks if rank in self._shown]
        if shown and text:
            self._limiter.admit_text(shown, OutputItem(text, self._clock(), name))

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
        if rank not in self._shown:
            return
        own_id = None if display_id is None else f"nbdist-{rank}-{display_id}"
        display = DisplayOutput(_sanitize(bundle), _sanitize(metadata), own_id)
        if own_id is not None and update:
            self._display_updates[own_id] = display
            return
        if own_id is not None:
            self._writer.pending_displays.add(own_id)
        self._limiter.admit_display(rank, OutputItem(display, self._clock()))

    def result(self, rank: int, bundle: MimeBundle, metadata: MimeBundle) -> None:
        """Add the value of a cell's last expression."""
        plain = bundle.get("text/plain")
        if isinstance(plain, str):
            self.rank_logs[rank].append(f"{replace_invalid_chars(plain)}\n")
        self.display(rank, bundle, metadata)

    def clear_output(self, rank: int, *, wait: bool) -> None:
        """Add a rank's clear_output, which takes effect once all ranks have called it."""
        if rank in self._shown:
            self._limiter.admit_clear(rank, OutputItem(ClearOutput(wait), self._clock()))

    def relay_comm(
        self,
        rank: int,
        msg_type: str,
        content: MimeBundle,
        metadata: MimeBundle,
        buffers: list[Any],
    ) -> None:
        """Forward a widget's comm message to the front end, in order for each widget.

        State updates of a widget are merged until the next tick; the newest value of each key wins.
        A front end handles about 500 messages per second and a `tqdm.notebook` bar sends three per
        step.
        """
        if rank not in self._shown:
            return
        content = _sanitize(content)
        comm_id, data = str(content.get("comm_id")), content.get("data")
        is_state = (
            msg_type == "comm_msg"
            and isinstance(data, dict)
            and data.get("method") == "update"
            and isinstance(data.get("state"), dict)
            and not (buffers or data.get("buffer_paths"))
        )
        if not is_state:
            self._send_comm_update(comm_id)
            self.recorder.relay_comm(msg_type, content, metadata, buffers)
            return
        earlier, _ = self._comm_updates.pop(comm_id, ({"data": {"state": {}}}, {}))
        state = {**earlier["data"]["state"], **content["data"]["state"]}
        merged = {**content, "data": {**content["data"], "state": state}}
        self._comm_updates[comm_id] = merged, metadata

    def show_errors(
        self, errors: Sequence[RankError], *, waiting: Sequence[int], advice: Sequence[str] = ()
    ) -> None:
        """Show the errors of a cell, whose other ranks may still run."""
        groups = tracebacks.group_errors(errors)
        several = len(waiting) > 1
        lines = [*tracebacks.format_tracebacks(groups), *advice]
        if waiting:
            running = f"{describe_ranks(waiting)} still run{'' if several else 's'}"
            lines.append(
                f"{running}. Interrupt the cell to stop {'them' if several else 'it'};"
                " a rank that waits for others is interrupted soon."
            )
        self.show_lines(lines)

    def show_lines(self, lines: Sequence[str]) -> None:
        """Show lines of nbdist below the output of the ranks."""
        self.tick()
        self.recorder.write("stderr", "\n".join([*lines, ""]))
        self.recorder.flush()

    def show_bundle(self, bundle: MimeBundle) -> None:
        """Show a display of nbdist below the output of the ranks."""
        self.tick()
        self.recorder.display(bundle, {})
        self.recorder.flush()

    def set_status_line(self, text: str) -> None:
        """Show one line that changes in place below the output; "" removes it.

        Without updatable displays the first text is printed and stays.
        """
        if text == self._status_text:
            return
        first, self._status_text = not self._status_text, text
        if not self.recorder.can_update:
            if first:
                self.show_lines([text])
            return
        shown = {"text/plain": f"nbdist: {text}" if text else ""}
        self.recorder.display(shown, {}, display_id=self._status_id, update=self._status_shown)
        self._status_shown = True

    def tick(self, *, final: bool = False) -> None:
        """Show output that is due. Call it every 50-100 ms and after each batch of messages.

        Args:
            final: also show output that is not due yet, with notes about omitted output.
        """
        now = self._clock()
        self._limiter.end_floods(now, final=final)
        for comm_id in list(self._comm_updates):
            self._send_comm_update(comm_id)
        self._splitter.end_bars(now, final=final)
        for ranks, item in self._merger.pop_ready(now, final=final):
            self._writer.write(ranks, item)
        self._writer.flush_text()
        for rank, lines in self._splitter.open_lines() if self.recorder.can_update else ():
            is_next = not lines.is_displayed and not self._merger.has_items(rank)
            if is_next and (lines.is_progress_bar or now - lines.began >= MERGE_DELAY_S):
                self._writer.show_open_lines(rank, lines)
        self._writer.draw(now, final=final)
        if final or now - self._updated_at >= _UPDATE_S:
            self._updated_at = now
            for display_id in self._display_updates.keys() - self._writer.pending_displays:
                last = self._display_updates.pop(display_id)
                self.recorder.display(
                    last.bundle, last.metadata, display_id=display_id, update=True
                )
        if final or now - self._flushed_at >= _FLUSH_S:
            self._flushed_at = now
            self.recorder.flush()

    def _send_comm_update(self, comm_id: str) -> None:
        if comm_id in self._comm_updates:
            content, metadata = self._comm_updates.pop(comm_id)
            self.recorder.relay_comm("comm_msg", content, metadata, [])


class CellWriter:
    """Writes merged items to the sink, labelled if several ranks write."""

    def __init__(self, sink: OutputSink, ranks: Sequence[int]) -> None:
        self.sink = sink
        self.pending_displays: set[str] = set()
        """Ids of displays that are still in an earlier stage."""
        self._is_labelled = len(ranks) > 1
        self._text: list[str] = []
        """Text that is not yet written, all for `_stream`."""
        self._stream: StreamName = "stdout"
        self._is_mid_line = self._has_output = False
        self._live_displays: list[OpenLinesDisplay] = []
        self._serial = 0
        """Number of written items."""
        self._serials = dict.fromkeys(ranks, 0)
        """By rank the number of its last item."""

    def write(self, ranks: Sequence[int], item: OutputItem[Any]) -> None:
        """Write an item; text is joined until the next `flush_text()`."""
        content = item.content
        label = f"[{_label(tuple(ranks))}]" if self._is_labelled else ""
        stream: StreamName = item.stream or "stdout"
        text = ""
        if isinstance(content, str) and label:
            text = f"{label} {content}\n"
        elif isinstance(content, str):
            text = content
            if len(text) > MAX_LINE:
                text = truncate_open_line(truncate_lines(text))
        elif isinstance(content, OmittedOutput):
            start = f"{label} " if label else "\n" if self._is_mid_line else ""
            stream, text = "stderr", f"{start}{content.describe(ranks[0])}\n"
        elif isinstance(content, DisplayOutput):
            self._display(content, label)
        elif len(ranks) == len(self._serials):  # of a clear, all ranks have called it
            self._clear(content)
        if text:
            if stream != self._stream:
                self.flush_text()
                self._stream = stream
            self._text.append(text)
            self._is_mid_line, self._has_output = not text.endswith("\n"), True
        self._serial += 1
        self._serials.update(dict.fromkeys(ranks, self._serial))

    def write_now(self, ranks: Sequence[int], item: OutputItem[Any]) -> None:
        """Write an item at once."""
        self.write(ranks, item)
        self.flush_text()

    def flush_text(self) -> None:
        """Write the joined text."""
        if self._text:
            self.sink.write(self._stream, "".join(self._text))
            self._text.clear()

    def _display(self, content: DisplayOutput, label: str) -> None:
        self.flush_text()
        if label and self.sink.has_output_area:
            self.sink.display({"text/plain": label}, {})
        elif label:
            self.sink.write("stdout", f"{label}\n")
        self.sink.display(content.bundle, content.metadata, display_id=content.display_id)
        self.pending_displays.discard(content.display_id or "")
        self._is_mid_line, self._has_output = False, True

    def _clear(self, content: ClearOutput) -> None:
        self.flush_text()
        if self._has_output:
            self.sink.clear(wait=content.wait)
        self._is_mid_line = self._has_output = False
        for live_display in self._live_displays:  # their open lines must be shown again
            for _, lines in live_display.members:
                lines.is_displayed = False
        self._live_displays.clear()

    def show_open_lines(self, rank: int, lines: TerminalEmulator) -> None:
        """Show open lines in the last live display, or a new one if the rank has written since."""
        last = self._live_displays[-1] if self._live_displays else None
        is_full = last is not None and len(last.members) >= MAX_DISPLAY_ROWS
        if last is None or is_full or last.output_serial < self._serials[rank]:
            last = OpenLinesDisplay(output_serial=self._serial)
            self._live_displays.append(last)
            self._has_output = True
        last.members.append((rank, lines))
        lines.is_displayed = True

    def draw(self, now: float, *, final: bool = False) -> None:
        """Redraw the live displays; forget those that are complete, except the last one."""
        kept = []
        for live_display in self._live_displays:
            is_complete = all(lines.is_closed for _, lines in live_display.members)
            live_display.draw(self.sink, now=now, final=final or is_complete)
            if not is_complete or live_display is self._live_displays[-1]:
                kept.append(live_display)
        self._live_displays = kept


_label = functools.lru_cache(maxsize=64)(format_ranks)
"""Cached, because the same ranks write line after line."""


def _sanitize(value: Any) -> Any:
    """JSON without lone surrogates and NUL."""
    if isinstance(value, str):
        return replace_invalid_chars(value)
    if isinstance(value, dict):
        return {replace_invalid_chars(key): _sanitize(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_sanitize(item) for item in value]
    return value
