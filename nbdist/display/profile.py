"""A profile as text for a terminal and as HTML without script.

Inline styles alone, as front ends remove `<style>` from notebooks that are not trusted. Colours
stand on light and dark alike, and each piece of a bar says its name or is in the table below.
Everything of the user's is escaped.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nbdist.display import profile_tables
from nbdist.display.profile_units import percent, time
from nbdist.display.units import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from nbdist.display.profile_tables import Table
    from nbdist.profiler.advice import Advice
    from nbdist.profiler.lint_finding import Remark
    from nbdist.profiler.measurements import Part, RankFigures
    from nbdist.profiler.report import Profile

COLORS: Mapping[Part, str] = {
    "data": "#986f00",
    "copies": "#9b6c41",
    "forward": "#337ab6",
    "backward": "#875fd1",
    "optimizer": "#478429",
    "communication": "#b85d0a",
    "waiting": "#c24c7b",
    "offload": "#108380",
    "python": "#2f78c2",
    "idle": "#6c7785",
}
"""Part of the step -> colour of its piece, as in widgets/src/times.ts; white text can be read on
each (4.5:1), and each stands out from light and dark paper (3:1)."""
_NAMED = 0.1
"""Of a bar: a narrower piece has no room for its name."""
_CELL = "padding:2px 10px 2px 0;text-align:left;vertical-align:middle"
_NUMBER = "padding:2px 10px 2px 0;text-align:right;vertical-align:middle;white-space:nowrap"
_TRACK = "width:100%;min-width:240px;height:18px;border-radius:2px;overflow:hidden"
_TRACK += ";background:rgba(124,134,148,.22)"


def heading(profile: Profile) -> str:
    """How fast it was, in one line."""
    model = profile.model
    steps = f"{profile.num_steps} step{'' if profile.num_steps == 1 else 's'}"
    unit = "tokens/s" if model and model.seq_len > 1 else "samples/s"
    words = [
        f"{steps} of {time(profile.step_s)} (p50 {time(profile.p50_s)}, p90 {time(profile.p90_s)})",
        f"{profile.tokens_per_s:,.0f} {unit}" if profile.samples_per_s else "",
        _mfu(profile),
        f"{_device(profile)}, {profile.options.describe()}",
    ]
    return "; ".join(filter(None, words))


def _device(profile: Profile) -> str:
    ranks = len(profile.ranks)
    return f"{ranks} x {profile.ranks[0].device}" if ranks > 1 else profile.ranks[0].device


def _mfu(profile: Profile) -> str:
    """As "MFU 41 % of 989T FLOP/s (bf16)"."""
    if profile.mfu is None or profile.peak_flops is None:
        return ""
    precision = "fp32" if profile.precision == "no" else profile.precision
    return f"MFU {percent(profile.mfu)} of {count(profile.peak_flops)} FLOP/s ({precision})"


def remarks(profile: Profile) -> list[str]:
    """What the cell's text tells beside the advice, a sentence each."""
    return [
        f"{one.cell}, line {one.line} ({one.sure}): {one.reason.rstrip('.')}. Instead: {one.change}"
        for one in profile.remarks
        if not _told(profile, one)
    ]


def _told(profile: Profile, remark: Remark) -> bool:
    """Whether an advice says the same of the loader, or of the line."""
    return any(
        remark.kind in one.change or one.line.endswith(f": {remark.change}")
        for one in profile.advice
    )


def files(profile: Profile) -> Iterator[str]:
    """Where traces and snapshots of memory are."""
    if traces := [one.trace for one in profile.ranks if one.trace]:
        yield f"traces (Perfetto, chrome://tracing, HTA): {', '.join(traces)}"
    snapshots = [one.memory.snapshot for one in profile.ranks if one.memory]
    if snapshots := [one for one in snapshots if one]:
        yield f"memory (pytorch.org/memory_viz): {', '.join(snapshots)}"


# ---------------------------------------------------------------------------- text


def text(profile: Profile) -> str:
    """The verdict first, then the advice, then tables."""
    lines = [profile.verdict]
    lines += [f"  {profile.gained}"] if profile.gained else []
    for number, one in enumerate(profile.advice, 1):
        lines += [f"  {number}. {one.text}", f"     {one.line}"]
    lines += [f"  in the text: {one}" for one in remarks(profile)]
    lines += ["", heading(profile)]
    for table in profile_tables.of(profile):
        lines += ["", *_text_table(table)]
    tail = [*profile.notes, *files(profile)]
    return "\n".join([*lines, *([""] if tail else []), *(f"  note: {one}" for one in tail)])


def _text_table(table: Table) -> Iterator[str]:
    """Columns as wide as their longest cell; numbers to the right."""
    rows = [table.head, *table.rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(table.head))]
    for row in rows:
        cells = (
            cell.ljust(width) if at in table.words else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield f"  {'  '.join(cells)}".rstrip()
    if table.note:
        yield f"  {table.note}"


# ---------------------------------------------------------------------------- HTML


def html(profile: Profile) -> str:
    """The same, with one stacked bar for each rank."""
    gained = f"<div>{escape(profile.gained)}</div>" if profile.gained else ""
    told = "".join(f"<div>in the text: {escape(one)}</div>" for one in remarks(profile))
    notes = "".join(f"<div>{escape(one)}</div>" for one in (*profile.notes, *files(profile)))
    shown = profile_tables.of(profile)
    parts = (
        f"<div style='font-weight:600;font-size:14px'>{escape(profile.verdict)}</div>",
        gained,
        _advice(profile.advice),
        told,
        f"<div style='margin-top:6px'>{escape(heading(profile))}</div>",
        bars(profile),
        *(_html_table(one) for one in shown[:2]),
        _folded(shown[2:]),
        notes,
    )
    return f"<div style='font-size:13px;line-height:1.4;max-width:960px'>{''.join(parts)}</div>"


def _advice(several: Sequence[Advice]) -> str:
    items = "".join(
        f"<li>{escape(one.text)}<br><code>{escape(one.line)}</code></li>" for one in several
    )
    return f"<ol style='margin:2px 0 2px 1.6em;padding:0'>{items}</ol>" if items else ""


def bars(profile: Profile) -> str:
    """One bar a rank, on one scale, and what the colours stand for."""
    longest = max(sum(one.parts.values()) for one in profile.ranks) or 1.0
    rows = "".join(
        f"<tr><td style='{_CELL};white-space:nowrap'>{_whose(profile, one)}</td>"
        f"<td style='{_CELL};width:100%'>{_bar(one, longest)}</td>"
        f"<td style='{_NUMBER}'>{time(one.step_s)}</td></tr>"
        for one in profile_tables.shown(profile)
    )
    return f"<table style='width:100%;border-collapse:collapse'>{rows}</table>{_key(profile)}"


def _whose(profile: Profile, one: RankFigures) -> str:
    slow = " (slowest)" if one.rank == profile.straggler else ""
    return f"rank {one.rank}{slow}"


def _bar(one: RankFigures, longest: float) -> str:
    """The parts of one rank side by side; the whole in words for who does not see it."""
    pieces = ""
    for part, color in COLORS.items():
        seconds = one.parts.get(part, 0.0)
        share = seconds / longest
        if share <= 0:
            continue
        label = f"{part} {percent(share)}"
        pieces += (
            f"<div title='{label}, {time(seconds)}' style='float:left;box-sizing:border-box;"
            f"height:100%;width:{100 * share:.2f}%;background:{color};color:#fff;font-size:11px;"
            "line-height:18px;text-align:center;overflow:hidden;white-space:nowrap;"
            f"border-right:1px solid rgba(255,255,255,.6)'>{part if share >= _NAMED else ''}</div>"
        )
    spoken = ", ".join(f"{part} {percent(s / longest)}" for part, s in one.parts.items() if s > 0)
    return f"<div role='img' aria-label='rank {one.rank}: {spoken}' style='{_TRACK}'>{pieces}</div>"


def _key(profile: Profile) -> str:
    items = "".join(
        "<span style='white-space:nowrap;margin-right:12px'><span style='display:inline-block;"
        f"width:10px;height:10px;background:{color}'></span> {part}</span> "
        for part, color in COLORS.items()
        if profile.parts[part] > 0
    )
    return f"<div>{items}</div>"


def _html_table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag} style='{_CELL if at in table.words else _NUMBER}'>{escape(cell)}</{tag}>"
            for at, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in table.rows)
    note = f"<div>{escape(table.note)}</div>" if table.note else ""
    head = f"<tr>{row(table.head, 'th')}</tr>"
    return f"<table style='border-collapse:collapse;margin-top:6px'>{head}{body}</table>{note}"


def _folded(several: Iterable[Table]) -> str:
    """Lines and memory, to be opened."""
    body = "".join(_html_table(one) for one in several)
    return f"<details><summary>lines and memory</summary>{body}</details>" if body else ""
