"""Elements of all views: tables, bars and legends, as HTML and as text.

HTML uses inline styles only, since front ends strip `<style>`, `<svg>` and `<script>` from
untrusted notebooks, but keep tables, `<details>` and images. The colours work on light and dark
themes. Text is escaped unless it is of the type `Html`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

MEMORY_COLORS = {
    "parameters": "#3987c8",
    "master": "#2b6fb3",
    "gradients": "#c2620a",
    "optimizer": "#8a63d2",
    "gathered": "#12938f",
    "activations": "#4b8b2b",
    "logits": "#a87b00",
    "buffers": "#c4527f",
    "temporaries": "#96683f",
    "context": "#7c8694",
    "margin": "#6b7280",
    "other": "#6b7280",
}
"""Part of the memory -> colour, in the order of a bar. The contrast with light and dark backgrounds
is 3:1. The planner's margin is called "other" in the panel."""
STEP_COLORS = {
    "data": "#986f00",
    "copies": "#9b6c41",
    "forward": "#337ab6",
    "backward": "#875fd1",
    "optimizer": "#478429",
    "communication": "#b85d0a",
    "waiting": "#c24c7b",
    "offload": "#108380",
    "python": "#6f7a1f",
    "idle": "#6c7785",
}
"""Part of a step -> colour, in the order of a bar. White text is readable on each (contrast 4.5:1),
and each contrasts with light and dark backgrounds (3:1)."""
MUTED_COLOR = "#7c8694"
PAGE_STYLE = "font-size:13px;line-height:1.4;max-width:960px"
_CELL = "padding:2px 8px 2px 0;text-align:left;vertical-align:middle"
_NUMBER = "padding:2px 8px 2px 0;text-align:right;vertical-align:middle;white-space:nowrap"
_CAPTION = "text-align:left;white-space:nowrap"
_HEADING = "padding:8px 8px 2px 0;text-align:left;font-weight:normal"
_TABLE = "border-collapse:collapse;margin:2px 0;font-size:inherit"
_TRACK = (
    "position:relative;width:100%;border-radius:2px;overflow:hidden;"
    "background:rgba(124,134,148,.22)"
)
_MIN_NAMED_SHARE = 0.1
"""Share of a bar: a narrower piece has no room for its name."""
_NAMED_PIECE = (
    "box-sizing:border-box;border-right:1px solid rgba(255,255,255,.6);color:#fff;font-size:11px;"
    "line-height:18px;text-align:center;overflow:hidden;white-space:nowrap"
)
_OVERLAYS = {
    "used": ("height:5px;background:currentColor", "in use"),
    "others": (f"background:{MUTED_COLOR};opacity:.6", "other processes"),
    "peak": ("width:2px;background:currentColor", "peak"),
    "limit": ("width:2px;background:currentColor", "free memory of a device"),
}
"""What is drawn over a bar -> its style, and its label in the legend."""
_OVERLAY_POSITIONS = {
    "used": "left:0;bottom:0;width:{}",
    "others": "right:0;top:0;height:100%;width:{}",
    "peak": "left:{};margin-left:-2px;top:0;height:100%",
    "limit": "left:{};margin-left:-2px;top:0;height:100%",
}
"""The same -> where the amount is drawn."""


class Html(str):
    """Markup. Every other string is text.

    `_repr_html_` returns a plain string: marimo (0.25) cannot send a subclass of str.
    """

    __slots__ = ()


def element(tag: str, *children: str, **attributes: object) -> Html:
    """Return an element.

    Args:
        tag: its name.
        children: text, which is escaped, and `Html`.
        attributes: by name, with "_" for "-". Empty ones are omitted.
    """
    opening = "".join(
        f" {name.replace('_', '-')}='{escape(str(value))}'"
        for name, value in attributes.items()
        if value != ""
    )
    if tag in {"br", "img"}:
        return Html(f"<{tag}{opening}>")
    return Html(f"<{tag}{opening}>{join(children)}</{tag}>")


def join(children: Iterable[str]) -> Html:
    """Return elements and text one after the other."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children))


def lines(texts: Iterable[str]) -> Html:
    """Return each text that is not empty as a line."""
    return join(element("div", text) for text in texts if text)


def show_as_text(report: object, printer: Any, cycle: bool) -> None:  # noqa: FBT001 - IPython's
    """Show a report in IPython by its `str()`; the reports have it as `_repr_pretty_`.

    Not inherited: IPython prefers the `__repr__` of a dataclass to a method of its base class.
    """
    printer.text(f"{type(report).__name__}(...)" if cycle else str(report))


# ---------------------------------------------------------------------------- tables


@dataclass(frozen=True, slots=True)
class Rich:
    """Content that differs in HTML and text; a cell or a part of a page."""

    html: Html
    text: str
    """Lines; "" if a text does not have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of formatted cells, which is shown as HTML and as text."""

    header: Sequence[str] = ()
    """Empty for none."""
    rows: Sequence[Sequence[str | Rich] | str]
    """A string is a heading across all columns."""
    text_columns: Collection[int] = frozenset({0})
    """Indices of the columns that hold text instead of numbers, and are left-aligned."""
    wide_column: int | None = None
    """Index of the column that gets all space that the others do not need."""
    caption: str = ""
    style: str = ""
    row_styles: Sequence[str] = ()
    """Style of each row; empty for none."""
    note: str = ""
    """Line below the table."""

    @property
    def html(self) -> Html:
        """The table as HTML."""
        shown = [element("caption", self.caption, style=_CAPTION)] if self.caption else []
        shown += [element("tr", *self._html_cells(self.header, "th"))] if self.header else []
        styles = iter(self.row_styles or [""] * len(self.rows))
        for row, style in zip(self.rows, styles, strict=True):
            if isinstance(row, str):
                colspan = len(self.header)
                heading = element("th", row, colspan=colspan, scope="colgroup", style=_HEADING)
                shown.append(element("tr", heading))
            else:
                shown.append(element("tr", *self._html_cells(row, "td"), style=style))
        table = element("table", *shown, style=f"{_TABLE};{self.style}".rstrip(";"))
        return join([table, lines([self.note])])

    def _html_cells(self, cells: Sequence[str | Rich], tag: str) -> Iterator[Html]:
        scope = "col" if tag == "th" else ""
        for column, cell in enumerate(cells):
            style = _CELL if column in self.text_columns else _NUMBER
            style += ";width:100%" if tag == "td" and column == self.wide_column else ""
            content = cell.html if isinstance(cell, Rich) else cell
            yield element(tag, content, scope=scope, style=style)

    @property
    def text(self) -> str:
        """The table as lines with aligned columns."""
        rows = [self.header, *self.rows] if self.header else self.rows
        cells = [
            [cell.text if isinstance(cell, Rich) else cell for cell in row]
            for row in rows
            if not isinstance(row, str)
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        aligned = iter(
            "  ".join(
                cell.ljust(width) if column in self.text_columns else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        )
        shown = [row if isinstance(row, str) else next(aligned) for row in rows]
        return "\n".join([*shown, *([self.note] if self.note else [])])


# ---------------------------------------------------------------------------- bars


def text_bar(part: float, whole: float, width: int) -> str:
    """Return a bar of "#" and "."."""
    filled = min(width, round(width * part / whole)) if whole else 0
    return "#" * filled + "." * (width - filled)


def html_bar(
    pieces: Iterable[tuple[str, float, str]],
    colors: Mapping[str, str],
    whole: float,
    *,
    label: str,
    title: str = "",
    names: bool = False,
    overlays: Mapping[str, float | None] | None = None,
) -> Html:
    """Return a stacked bar.

    Args:
        pieces: part, amount and tooltip of each piece, in order.
        colors: part -> colour. Unknown parts are grey.
        whole: amount that fills the bar; more is cut.
        label: description for screen readers.
        title: tooltip of the bar.
        names: whether the bar is so high that wide pieces can show their names.
        overlays: kind of an overlay, as in `legend` -> its amount; None and 0 are not drawn.
    """

    def percent(amount: float) -> str:
        # rounded down: pieces of more than 100 % would not have room next to each other
        return f"{math.floor(min(1.0, amount / whole) * 10_000) / 100 if whole else 0:.2f}%"

    drawn, remaining = [], whole
    for part, amount, tooltip in pieces:
        shown = min(amount, remaining)  # a piece that is too wide would disappear
        remaining -= shown
        style = f"float:left;height:100%;width:{percent(shown)};background:"
        style += colors.get(part, MUTED_COLOR)
        has_name = names and shown >= _MIN_NAMED_SHARE * whole
        drawn.append(
            element(
                "div",
                part if has_name else "",
                title=tooltip,
                style=f"{style};{_NAMED_PIECE}" if names else style,
            )
        )
    for kind, overlay in (overlays or {}).items():
        if overlay:
            position = f"{_OVERLAY_POSITIONS[kind].format(percent(overlay))};{_OVERLAYS[kind][0]}"
            drawn.append(element("div", style=f"position:absolute;{position}"))
    size = "min-width:240px;height:18px" if names else "min-width:140px;height:14px"
    style = f"{_TRACK};{size}"
    return element("div", *drawn, role="img", aria_label=label, title=title, style=style)


def legend(
    colors: Mapping[str, str], used: Collection[str], overlays: Mapping[str, bool] | None = None
) -> Html:
    """Return the legend of the used colours, and of the overlays that are shown."""
    shown = [(f"background:{color}", part) for part, color in colors.items() if part in used]
    shown += [_OVERLAYS[kind] for kind, is_shown in (overlays or {}).items() if is_shown]
    items = []
    for style, label in shown:
        swatch = element("span", style=f"display:inline-block;width:10px;height:10px;{style}")
        item_style = "white-space:nowrap;margin-right:12px"
        items += [element("span", swatch, f" {label}", style=item_style), " "]
    return element("div", *items) if items else Html()
