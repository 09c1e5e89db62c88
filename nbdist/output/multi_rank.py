"""Output of a cell in which several ranks write: labelled, and merged where equal.

Complete lines and displays are merged; open lines are shown in live displays. `single_rank` is the
counterpart for one rank.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from nbdist.output.ansi import close_colours, rank_label, replace_invalid_chars
from nbdist.output.dedup import OutputItem, OutputMerger
from nbdist.output.live_display import LiveDisplay
from nbdist.output.rate_limit import OmittedOutput
from nbdist.output.terminal_line import LineAssembler, truncate_lines

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from nbdist.output.sink import MimeBundle, OutputSink, StreamName

MERGE_DELAY_S = 0.15
"""Maximum wait of a line for the same line of the other ranks."""
_CLEAR_HOLD_S = 1.0
_DISPLAY_HOLD_S = 1.0
"""Drawing a figure takes a different time on each rank, and a late figure is better than two."""
_SETTLE_S = 0.15
_WIDGET = "application/vnd.jupyter.widget-view+json"
_PLAIN_MIMES = frozenset({"text/plain"})


@dataclass(frozen=True, slots=True)
class _TextLine:
    name: StreamName
    text: str


@dataclass(frozen=True, slots=True)
class _DisplayOutput:
    bundle: MimeBundle
    metadata: MimeBundle
    display_id: str | None


@dataclass(frozen=True, slots=True)
class _ClearOutput:
    wait: bool


_Content = _TextLine | _DisplayOutput | _ClearOutput | OmittedOutput


class MultiRankOutput:
    """Merges the output of several ranks into one cell output."""

    limits_open_text = False

    def __init__(self, screen: OutputSink, ranks: Sequence[int], *, hold_s: float) -> None:
        self.sink = screen
        self._hold_s = hold_s
        self._merge: OutputMerger[_Content] = OutputMerger(ranks)
        self._assemblers: dict[tuple[int, StreamName], LineAssembler] = {}
        self._live_displays: list[LiveDisplay] = []
        self._serial = 0
        self._wrote: dict[int, int] = dict.fromkeys(ranks, 0)
        self._held_ids: set[str] = set()
        self._text: list[str] = []
        self._text_name: StreamName = "stdout"

    def write_text(self, ranks: Sequence[int], name: StreamName, text: str, now: float) -> None:
        """Add a piece of a stream that all these ranks have written."""
        text = replace_invalid_chars(truncate_lines(text))
        # For complete lines, the output depends only on the style in which they begin.
        by_style: dict[str, dict[int, LineAssembler]] = {}
        for rank in ranks:
            typist = self._assemblers.setdefault((rank, name), LineAssembler())
            if typist.stays_at_line_start(text):
                by_style.setdefault(typist.style, {})[rank] = typist
            else:
                self._put_lines((rank,), name, typist.feed(text, now=now), now)
        for typists in by_style.values():
            first, *others = typists.values()
            lines = first.feed(text, now=now)
            for other in others:
                other.style = first.style
            self._put_lines(tuple(typists), name, lines, now)

    def display(
        self,
        rank: int,
        bundle: MimeBundle,
        metadata: MimeBundle,
        *,
        display_id: str | None,
        now: float,
    ) -> None:
        """Add a display. With an id it is never merged; plain text is handled as lines."""
        self._end_half_lines(rank, now)
        if not bundle:
            return
        if display_id is None and bundle.keys() <= _PLAIN_MIMES:
            self._put_lines((rank,), "stdout", _contained_lines(bundle.get("text/plain", "")), now)
            return
        key: Hashable = display_id
        if display_id is None:
            key = _digest(bundle, metadata)
        else:
            self._held_ids.add(display_id)
        alone = display_id is not None or _WIDGET in bundle  # never equal to another rank's
        hold_s = self._hold_s if alone else _DISPLAY_HOLD_S
        content = _DisplayOutput(bundle, metadata, display_id)
        self._merge.add_items((rank,), [OutputItem(("show", key), "", now, hold_s, content)])

    def show_omitted(self, ranks: Sequence[int], gap: OmittedOutput, now: float) -> None:
        """Add a note about omitted output."""
        self._merge.add_items(ranks, [OutputItem(gap, "", now, self._hold_s, gap)])

    def clear(self, rank: int, *, wait: bool, now: float) -> None:
        """Add a rank's clear_output, which takes effect once all ranks have called it."""
        self._end_half_lines(rank, now)
        self._merge.add_items(
            (rank,), [OutputItem(("clear",), "", now, _CLEAR_HOLD_S, _ClearOutput(wait))]
        )

    def is_mid_line(self, rank: int, name: StreamName) -> bool:
        """Return whether the stream is in the middle of a line."""
        typist = self._assemblers.get((rank, name))
        return bool(typist and typist.open_lines and typist.open_lines.empty_row_since is None)

    def holds_display(self, display_id: str) -> bool:
        """Return whether a display with this id is not shown yet."""
        return display_id in self._held_ids

    def tick(self, now: float) -> None:
        """Emit output that is due and redraw the live displays."""
        self._settle(now)
        self._emit(now, final=False)
        self._open_regions(now)
        self._draw(now)

    def close(self, now: float) -> None:
        """Emit all pending output."""
        for (rank, name), typist in self._assemblers.items():
            self._put_lines((rank,), name, typist.close(), now)
        self._emit(now, final=True)
        self._draw(now, final=True)

    def _put_lines(
        self, ranks: Sequence[int], name: StreamName, lines: list[str], now: float
    ) -> None:
        hold_s = self._hold_s
        items: list[OutputItem[_Content]] = [
            OutputItem((name, line), name, now, hold_s, _TextLine(name, line)) for line in lines
        ]
        self._merge.add_items(ranks, items)

    def _end_half_lines(self, rank: int, now: float) -> None:
        """End the lines without a newline, so that a display starts below them."""
        for name in ("stdout", "stderr"):
            typist = self._assemblers.get((rank, name))
            if typist and typist.open_lines and not typist.open_lines.is_progress_bar:
                self._put_lines((rank,), name, typist.close(), now)

    def _settle(self, now: float) -> None:
        """Close bars that ended with a newline and were not continued."""
        for (rank, name), typist in self._assemblers.items():
            since = typist.open_lines.empty_row_since if typist.open_lines else None
            if since is not None and now - since >= _SETTLE_S:
                self._put_lines((rank,), name, typist.close(), now)

    def _emit(self, now: float, *, final: bool) -> None:
        for ranks, content in self._merge.pop_ready(now, final=final):
            if isinstance(content, _TextLine):
                self._line(content.name, f"[{_label(ranks)}] {content.text}\n")
            elif isinstance(content, OmittedOutput):
                self._line("stderr", f"[{_label(ranks)}] {content.describe(ranks[0])}\n")
            elif isinstance(content, _DisplayOutput):
                self._show(ranks, content)
            else:
                self._clear_for(ranks, content)
            self._serial += 1
            self._wrote.update(dict.fromkeys(ranks, self._serial))
        self._write_text()

    def _line(self, name: StreamName, text: str) -> None:
        if name != self._text_name:
            self._write_text()
            self._text_name = name
        self._text.append(text)

    def _write_text(self) -> None:
        if self._text:
            self.sink.write(self._text_name, "".join(self._text))
            self._text.clear()

    def _show(self, ranks: tuple[int, ...], show: _DisplayOutput) -> None:
        self._line("stdout", f"[{_label(ranks)}]\n")
        self._write_text()
        self.sink.display(show.bundle, show.metadata, display_id=show.display_id)
        self._held_ids.discard(show.display_id or "")

    def _clear_for(self, ranks: tuple[int, ...], clear: _ClearOutput) -> None:
        if len(ranks) < len(self._wrote):
            return
        self._write_text()
        self.sink.clear(wait=clear.wait)
        for region in self._live_displays:
            region.release_lines()
        self._live_displays.clear()

    def _open_regions(self, now: float) -> None:
        """Show open lines of ranks without other pending output before them."""
        if not self.sink.can_update:
            return
        for (rank, _), typist in self._assemblers.items():
            block = typist.open_lines
            if block is None or block.is_displayed or self._merge.has_items(rank):
                continue
            if block.is_progress_bar or now - block.output_serial >= self._hold_s:
                self._region_for(rank).add_lines(rank, block)

    def _region_for(self, rank: int) -> LiveDisplay:
        """The last live display, or a new one if the rank has written something after it began."""
        last = self._live_displays[-1] if self._live_displays else None
        if last is not None and not last.is_full and last.output_serial >= self._wrote[rank]:
            return last
        self._live_displays.append(LiveDisplay(output_serial=self._serial))
        return self._live_displays[-1]

    def _draw(self, now: float, *, final: bool = False) -> None:
        for region in self._live_displays:
            region.draw(self.sink, now=now, final=final or not region.has_open_lines)
        last = self._live_displays[-1:]
        self._live_displays = [
            region for region in self._live_displays[:-1] if region.has_open_lines
        ] + last


_label = functools.lru_cache(maxsize=64)(rank_label)
"""Cached, because the same ranks write line after line."""


def _contained_lines(text: str) -> list[str]:
    """Lines of a result, each with its colours closed."""
    lines: list[str] = []
    style = ""
    for line in text.split("\n"):
        closed, style = close_colours(line, style)
        lines.append(closed)
    return lines


def _digest(bundle: MimeBundle, metadata: MimeBundle) -> bytes:
    """A short key, equal for equal bundles, so that a queue of figures stays small."""
    packed = json.dumps([bundle, metadata], sort_keys=True, default=repr)
    return blake2b(packed.encode(), digest_size=16).digest()
