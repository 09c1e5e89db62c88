"""Output of a cell in which several ranks write: labelled, and merged where equal.

Runs in the notebook's kernel; one of the two lanes of the renderer (`solo` is the other).
Complete lines and displays go through `Merge`; open lines stand in live regions.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from nbdist.output.ansi import clean, contained, rank_label
from nbdist.output.dedup import Item, Merge
from nbdist.output.live_display import Region
from nbdist.output.rate_limit import Gap
from nbdist.output.terminal_line import Typist, shortened

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from nbdist.output.sink import Bundle, Screen, StreamName

HOLD_S = 0.15
"""How long a line waits for the other ranks to print the same."""
_CLEAR_HOLD_S = 1.0
_DISPLAY_HOLD_S = 1.0
"""A figure takes each rank a different time to draw; shown twice it is worse than late."""
_SETTLE_S = 0.15
_WIDGET = "application/vnd.jupyter.widget-view+json"
_PLAIN_MIMES = frozenset({"text/plain"})


@dataclass(frozen=True, slots=True)
class _Line:
    name: StreamName
    text: str


@dataclass(frozen=True, slots=True)
class _Show:
    bundle: Bundle
    metadata: Bundle
    display_id: str | None


@dataclass(frozen=True, slots=True)
class _Clear:
    wait: bool


_Content = _Line | _Show | _Clear | Gap


class Several:
    """Merges the output of several ranks onto one screen."""

    charges_open_text = False

    def __init__(self, screen: Screen, ranks: Sequence[int], *, hold_s: float) -> None:
        self.screen = screen
        self._hold_s = hold_s
        self._merge: Merge[_Content] = Merge(ranks)
        self._typists: dict[tuple[int, StreamName], Typist] = {}
        self._regions: list[Region] = []
        self._serial = 0
        self._wrote: dict[int, int] = dict.fromkeys(ranks, 0)
        self._held_ids: set[str] = set()
        self._text: list[str] = []
        self._text_name: StreamName = "stdout"

    def text(self, ranks: Sequence[int], name: StreamName, text: str, now: float) -> None:
        """Take a piece of a stream that all of these have written."""
        text = clean(shortened(text))
        alike: dict[str, dict[int, Typist]] = {}
        """Of whole lines the style in which they begin is all that one must know."""
        for rank in ranks:
            typist = self._typists.setdefault((rank, name), Typist())
            if typist.between_lines(text):
                alike.setdefault(typist.style, {})[rank] = typist
            else:
                self._put_lines((rank,), name, typist.feed(text, now=now), now)
        for typists in alike.values():
            first, *others = typists.values()
            lines = first.feed(text, now=now)
            for other in others:
                other.style = first.style
            self._put_lines(tuple(typists), name, lines, now)

    def display(
        self, rank: int, bundle: Bundle, metadata: Bundle, *, display_id: str | None, now: float
    ) -> None:
        """Take a display; one with an id is never merged, one of plain text becomes lines."""
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
        alone = display_id is not None or _WIDGET in bundle  # each rank's own: no twin to wait for
        hold_s = self._hold_s if alone else _DISPLAY_HOLD_S
        content = _Show(bundle, metadata, display_id)
        self._merge.put((rank,), [Item(("show", key), "", now, hold_s, content)])

    def gap(self, ranks: Sequence[int], gap: Gap, now: float) -> None:
        """Take a piece that is not shown."""
        self._merge.put(ranks, [Item(gap, "", now, self._hold_s, gap)])

    def clear(self, rank: int, *, wait: bool, now: float) -> None:
        """Take a rank's wish to clear; it is done where all ranks have it."""
        self._end_half_lines(rank, now)
        self._merge.put((rank,), [Item(("clear",), "", now, _CLEAR_HOLD_S, _Clear(wait))])

    def midline(self, rank: int, name: StreamName) -> bool:
        """Whether the stream stands in an unfinished line."""
        typist = self._typists.get((rank, name))
        return bool(typist and typist.block and typist.block.fresh_at is None)

    def holds(self, display_id: str) -> bool:
        """Whether a display with this id waits to be shown."""
        return display_id in self._held_ids

    def tick(self, now: float) -> None:
        """Show what has waited long enough; redraw the live regions."""
        self._settle(now)
        self._emit(now, final=False)
        self._open_regions(now)
        self._draw(now)

    def close(self, now: float) -> None:
        """Show everything that is held."""
        for (rank, name), typist in self._typists.items():
            self._put_lines((rank,), name, typist.close(), now)
        self._emit(now, final=True)
        self._draw(now, final=True)

    def _put_lines(
        self, ranks: Sequence[int], name: StreamName, lines: list[str], now: float
    ) -> None:
        hold_s = self._hold_s
        items: list[Item[_Content]] = [
            Item((name, one), name, now, hold_s, _Line(name, one)) for one in lines
        ]
        self._merge.put(ranks, items)

    def _end_half_lines(self, rank: int, now: float) -> None:
        """What comes next stands below a line that has no newline yet."""
        for name in ("stdout", "stderr"):
            typist = self._typists.get((rank, name))
            if typist and typist.block and not typist.block.drawn:
                self._put_lines((rank,), name, typist.close(), now)

    def _settle(self, now: float) -> None:
        """Close bars that ended with a newline and were not taken up again."""
        for (rank, name), typist in self._typists.items():
            since = typist.block.fresh_at if typist.block else None
            if since is not None and now - since >= _SETTLE_S:
                self._put_lines((rank,), name, typist.close(), now)

    def _emit(self, now: float, *, final: bool) -> None:
        for ranks, content in self._merge.leave(now, final=final):
            if isinstance(content, _Line):
                self._line(content.name, f"[{_label(ranks)}] {content.text}\n")
            elif isinstance(content, Gap):
                self._line("stderr", f"[{_label(ranks)}] {content.sentence(ranks[0])}\n")
            elif isinstance(content, _Show):
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
            self.screen.write(self._text_name, "".join(self._text))
            self._text.clear()

    def _show(self, ranks: tuple[int, ...], show: _Show) -> None:
        self._line("stdout", f"[{_label(ranks)}]\n")
        self._write_text()
        self.screen.display(show.bundle, show.metadata, display_id=show.display_id)
        self._held_ids.discard(show.display_id or "")

    def _clear_for(self, ranks: tuple[int, ...], clear: _Clear) -> None:
        if len(ranks) < len(self._wrote):
            return
        self._write_text()
        self.screen.clear(wait=clear.wait)
        for region in self._regions:
            region.forget()
        self._regions.clear()

    def _open_regions(self, now: float) -> None:
        """Show open lines whose rank has nothing else waiting before them."""
        if not self.screen.can_update:
            return
        for (rank, _), typist in self._typists.items():
            block = typist.block
            if block is None or block.shown or self._merge.waiting(rank):
                continue
            if block.drawn or now - block.began >= self._hold_s:
                self._region_for(rank).add(rank, block)

    def _region_for(self, rank: int) -> Region:
        """The last region, unless the rank wrote something after it began."""
        last = self._regions[-1] if self._regions else None
        if last is not None and not last.full and last.began >= self._wrote[rank]:
            return last
        self._regions.append(Region(began=self._serial))
        return self._regions[-1]

    def _draw(self, now: float, *, final: bool = False) -> None:
        for region in self._regions:
            region.draw(self.screen, now=now, final=final or not region.live)
        last = self._regions[-1:]
        self._regions = [region for region in self._regions[:-1] if region.live] + last


_label = functools.lru_cache(maxsize=64)(rank_label)
"""The same ranks write line after line."""


def _contained_lines(text: str) -> list[str]:
    """Lines of a result, each with its colours closed."""
    lines: list[str] = []
    style = ""
    for line in text.split("\n"):
        closed, style = contained(line, style)
        lines.append(closed)
    return lines


def _digest(bundle: Bundle, metadata: Bundle) -> bytes:
    """Equal for equal bundles; short, so that a queue of figures stays small."""
    packed = json.dumps([bundle, metadata], sort_keys=True, default=repr)
    return blake2b(packed.encode(), digest_size=16).digest()
