"""A cell's output: what the ranks print and display, merged onto one screen.

Runs in the notebook's kernel. The cell feeds it messages of the ranks and calls `tick()`
every 50-100 ms; only the thread that owns the screen may call it. Text passes

    log (everything) -> show (whose?) -> gate (how much?) -> lane (labels, merging) -> screen
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

from nbdist.output import tracebacks
from nbdist.output.ansi import clean, rank_label
from nbdist.output.comm_relay import Relay
from nbdist.output.multi_rank import HOLD_S, Several
from nbdist.output.rank_log import RankLog
from nbdist.output.rate_limit import DISPLAY_LINES, Budget, Dropped, Gap, Gate
from nbdist.output.single_rank import Solo
from nbdist.output.terminal_line import MAX_LINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nbdist.output.sink import Bundle, Screen, StreamName
    from nbdist.protocol.messages import RankError

Show = Literal["all", "none"] | frozenset[int]

_UPDATE_S = 0.1
_FLUSH_S = 0.1
_DISPLAY_CHARS = 20
"""A display's text is this much cheaper than printed text: figures are large."""
_LONG_BAR = 4_000


class Renderer:
    """Shows the output of one cell.

    Args:
        screen: where it goes.
        ranks: the ranks that run the cell.
        show: whose output is displayed; the logs get everything.
        clock: monotonic seconds.
        hold_s: how long a line waits for the other ranks to print the same.
        budget: how much is shown of a flood.
        logs: log of each rank; made here where not given.
    """

    def __init__(
        self,
        screen: Screen,
        *,
        ranks: Sequence[int],
        show: Show = "all",
        clock: Callable[[], float] = time.monotonic,
        hold_s: float = HOLD_S,
        budget: Budget | None = None,
        logs: Mapping[int, RankLog] | None = None,
    ) -> None:
        writers = _writers(ranks, show)
        self.logs = {rank: (logs or {}).get(rank) or RankLog() for rank in ranks}
        self._screen = screen
        self._clock = clock
        self._lane = Several(screen, writers, hold_s=hold_s) if len(writers) > 1 else Solo(screen)
        self._gate = Gate(writers, budget=budget or Budget())
        self._dropped = {rank: Dropped() for rank in writers}
        self._skipping: set[tuple[int, StreamName]] = set()
        self._bars: dict[tuple[int, StreamName], str] = {}
        self._updates: dict[str, tuple[Bundle, Bundle]] = {}
        self._updated_at = self._flushed_at = float("-inf")
        self._relay = Relay(screen)
        self._notice = self._noticed_by = ""

    @property
    def screen(self) -> Screen:
        """Where the output goes; may be changed while the cell runs."""
        return self._screen

    @screen.setter
    def screen(self, screen: Screen) -> None:
        self._screen = self._lane.screen = self._relay.screen = screen

    def stream(self, ranks: Sequence[int], name: StreamName, text: str) -> None:
        """Take text that each of these printed."""
        now = self._clock()
        alike: dict[str, list[int]] = {}
        for rank in ranks:
            self.logs[rank].append(text, name=name)
            if rank in self._dropped:
                skips = (rank, name) in self._skipping
                rest = self._end_of_dropped_line(rank, name, text) if skips else text
                alike.setdefault(rest, []).append(rank)
        for rest, few in alike.items():
            if lines := rest.count("\n"):
                self._lines(few, name, rest, lines, now)
            elif rest:
                self._open_text(few, name, rest, now)

    def display(
        self,
        rank: int,
        bundle: Bundle,
        metadata: Bundle,
        *,
        display_id: str | None = None,
        update: bool = False,
    ) -> None:
        """Take a display of a rank, or a change of one that has an id."""
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
        runs = self._gate.admit(rank, 1, cost, now=now, weight=DISPLAY_LINES)
        if not runs[0][0]:
            self._dropped[rank].add_display(chars)
            return
        self._end_gaps((rank,), now)
        self._lane.display(rank, bundle, metadata, display_id=own_id, now=now)

    def result(self, rank: int, bundle: Bundle, metadata: Bundle) -> None:
        """Take the value of a cell's last expression."""
        plain = bundle.get("text/plain")
        if isinstance(plain, str):
            self.logs[rank].append(f"{plain}\n")
        self.display(rank, bundle, metadata)

    def clear(self, rank: int, *, wait: bool) -> None:
        """Take a rank's clear_output; with several ranks it needs all of them."""
        if rank in self._dropped:
            self._dropped[rank].clear()
            self._lane.clear(rank, wait=wait, now=self._clock())

    def relay(
        self, rank: int, msg_type: str, content: Bundle, metadata: Bundle, buffers: list[Any]
    ) -> None:
        """Pass a widget's comm message on to the front end."""
        if rank in self._dropped:
            self._relay.take(msg_type, _cleaned(content), metadata, buffers)

    def failure(
        self, errors: Sequence[RankError], *, waiting: Sequence[int], advice: Sequence[str] = ()
    ) -> None:
        """Show errors of a cell that has returned, or whose other ranks still run."""
        groups = tracebacks.grouped(errors)
        label = rank_label(tuple(waiting))
        several = len(waiting) > 1
        lines = [*tracebacks.render(groups), *advice]
        if waiting:
            running = f"rank{'s'[:several]} {label} still run{'s'[several:]}"
            lines.append(f"{running}; Stop ends it, and a rank that waits is stopped soon.")
        self.note(lines)

    def note(self, lines: Sequence[str]) -> None:
        """Show lines of our own below what the ranks have printed."""
        self._lane.tick(self._clock())
        self._screen.write("stderr", "\n".join([*lines, ""]))
        self._screen.flush()

    def show(self, bundle: Bundle) -> None:
        """Display something of our own below what the ranks have printed."""
        self._lane.tick(self._clock())
        self._screen.display(bundle, {})
        self._screen.flush()

    def notice(self, text: str) -> None:
        """Show one line that changes below the output; "" takes it away.

        Where displays cannot change, its first words are printed and stay.
        """
        if text == self._notice:
            return
        first, self._notice = not self._notice, text
        if not self._screen.can_update:
            if first:
                self.note([text])
            return
        shown = {"text/plain": f"nbdist: {text}"} if text else {"text/plain": ""}
        update, self._noticed_by = bool(self._noticed_by), self._noticed_by or uuid4().hex
        self._screen.display(shown, {}, display_id=f"nbdist-{self._noticed_by}", update=update)

    def tick(self) -> None:
        """Show what is due; call it every 50-100 ms and after each batch of messages."""
        now = self._clock()
        dropped = [rank for rank, dropped in self._dropped.items() if dropped]
        self._end_floods([rank for rank in dropped if self._gate.quiet(rank, now)], now)
        self._show_bars(now, final=False)
        self._relay.flush()
        self._lane.tick(now)
        self._send_updates(now)
        if now - self._flushed_at >= _FLUSH_S:
            self._flushed_at = now
            self._screen.flush()

    def close(self) -> None:
        """Show everything that is held and say what was not shown."""
        now = self._clock()
        self._end_floods([rank for rank, dropped in self._dropped.items() if dropped], now)
        self._show_bars(now, final=True)
        self._relay.flush()
        self._lane.close(now)
        self._send_updates(now, final=True)
        self._screen.flush()

    def _lines(
        self, ranks: Sequence[int], name: StreamName, text: str, lines: int, now: float
    ) -> None:
        """Show and drop lines as the gate says."""
        cost = min(len(text), lines * MAX_LINE)
        alike: dict[tuple[tuple[bool, int], ...], list[int]] = {}
        for rank in ranks:
            self._bars.pop((rank, name), None)
            runs = tuple(self._gate.admit(rank, lines, cost, now=now))
            alike.setdefault(runs, []).append(rank)
        for runs, few in alike.items():
            for shown, count, piece in _pieces(text, runs):
                if shown:
                    self._end_gaps(few, now)
                    self._lane.text(few, name, piece, now)
                else:
                    for rank in few:
                        self._drop(rank, name, piece, count, now)

    def _drop(self, rank: int, name: StreamName, text: str, lines: int, now: float) -> None:
        if self._lane.midline(rank, name):
            end = text.find("\n") + 1
            self._lane.text((rank,), name, text[:end], now)
            text, lines = text[end:], lines - 1
        if not text:
            return
        self._dropped[rank].add(name, text, lines)
        if not text.endswith("\n"):
            self._skipping.add((rank, name))

    def _end_of_dropped_line(self, rank: int, name: StreamName, text: str) -> str:
        """Drop up to the newline: the line's beginning was dropped. The rest."""
        end = text.find("\n") + 1
        self._dropped[rank].add(name, text[: end or None], 1 if end else 0)
        if not end:
            return ""
        self._skipping.discard((rank, name))
        return text[end:]

    def _open_text(self, ranks: Sequence[int], name: StreamName, text: str, now: float) -> None:
        """Text without a newline: half a line, or a bar that overwrites itself."""
        if "\r" in text and len(text) > _LONG_BAR:
            text = "\r" + text.rstrip("\r").rpartition("\r")[2]
        shown = []
        for rank in ranks:
            if not self._lane.charges_open_text or self._gate.admit_chars(
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
            self._lane.text(shown, name, text, now)

    def _show_bars(self, now: float, *, final: bool) -> None:
        """Show the last state of bars that moved too fast."""
        for (rank, name), text in list(self._bars.items()):
            if final or self._gate.admit_chars(rank, len(text), now=now):
                del self._bars[rank, name]
                self._lane.text((rank,), name, text, now)

    def _end_gaps(self, ranks: Sequence[int], now: float) -> None:
        """Say what was dropped before something is shown again."""
        alike: dict[Gap, list[int]] = {}
        for rank in ranks:
            if self._dropped[rank]:
                alike.setdefault(self._dropped[rank].counted(), []).append(rank)
        for gap, few in alike.items():
            self._lane.gap(few, gap, now)

    def _end_floods(self, ranks: Sequence[int], now: float) -> None:
        """Say what was dropped, and show the last lines of it."""
        alike: dict[tuple[Gap, tuple[tuple[str, str], ...]], list[int]] = {}
        for rank in ranks:
            gap, last = self._dropped[rank].taken()
            alike.setdefault((gap, tuple(last)), []).append(rank)
        for (gap, tail), few in alike.items():
            if gap.lines or gap.displays or gap.chars:
                self._lane.gap(few, gap, now)
            for name, text in tail:
                self._lane.text(few, _stream_name(name), text, now)
        if ranks:
            ended = frozenset(ranks)
            self._skipping = {one for one in self._skipping if one[0] not in ended}

    def _send_updates(self, now: float, *, final: bool = False) -> None:
        """Send the last state of each changed display, at most every _UPDATE_S."""
        if not self._updates or not (final or now - self._updated_at >= _UPDATE_S):
            return
        self._updated_at = now
        for display_id, (bundle, metadata) in list(self._updates.items()):
            if not self._lane.holds(display_id):
                del self._updates[display_id]
                self._screen.display(bundle, metadata, display_id=display_id, update=True)


def _writers(ranks: Sequence[int], show: Show) -> list[int]:
    """Ranks whose output is displayed."""
    if show == "all":
        return list(ranks)
    return [] if isinstance(show, str) else [rank for rank in ranks if rank in show]


def _pieces(text: str, runs: Sequence[tuple[bool, int]]) -> Iterator[tuple[bool, int, str]]:
    """Cut text into the runs; what follows the last newline goes with the last run."""
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
        return clean(value)
    if isinstance(value, dict):
        return {clean(key): _cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return value


def _stream_name(name: str) -> StreamName:
    return "stderr" if name == "stderr" else "stdout"
