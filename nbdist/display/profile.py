"""A profile as text for a terminal and as static HTML.

Uses inline styles only, as front ends strip `<style>` from untrusted notebooks. The colours work on
light and dark themes, and every piece of a bar has a label or a row in the table below. All user
text is escaped.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nbdist.display import profile_tables
from nbdist.display.profile_units import format_duration, format_percent
from nbdist.display.units import format_count
from nbdist.profiler.advice import remarks_without_advice

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from nbdist.display.profile_tables import TextTable
    from nbdist.profiler.advice import Advice
    from nbdist.profiler.analysis import ProfileAnalysis
    from nbdist.profiler.measurements import RankProfile, StepPart

COLORS: Mapping[StepPart, str] = {
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
"""Part of the step -> colour of its piece, as in widgets/src/times.ts. White text is readable on
each (contrast 4.5:1), and each contrasts with light and dark backgrounds (3:1)."""
_MIN_LABEL_SHARE = 0.1
"""Share of a bar: a narrower piece has no room for its name."""
_CELL = "padding:2px 10px 2px 0;text-align:left;vertical-align:middle"
_NUMBER = "padding:2px 10px 2px 0;text-align:right;vertical-align:middle;white-space:nowrap"
_TRACK = "width:100%;min-width:240px;height:18px;border-radius:2px;overflow:hidden"
_TRACK += ";background:rgba(124,134,148,.22)"


def heading(profile: ProfileAnalysis) -> str:
    """Return the speed of the run in one line."""
    model = profile.model
    steps = f"{profile.num_steps} step{'' if profile.num_steps == 1 else 's'}"
    unit = "tokens/s" if model and model.seq_len > 1 else "samples/s"
    parts = [
        (
            f"{steps} of {format_duration(profile.step_s)} (p50 {format_duration(profile.p50_s)},"
            f" p90 {format_duration(profile.p90_s)})"
        ),
        f"{profile.tokens_per_s:,.0f} {unit}" if profile.samples_per_s else "",
        _mfu(profile),
        f"{_device(profile)}, {profile.options.describe()}",
    ]
    return "; ".join(filter(None, parts))


def _device(profile: ProfileAnalysis) -> str:
    ranks = len(profile.ranks)
    return f"{ranks} x {profile.ranks[0].device}" if ranks > 1 else profile.ranks[0].device


def _mfu(profile: ProfileAnalysis) -> str:
    """The MFU as "MFU 41 % of 989T FLOP/s (bf16)"."""
    if profile.mfu is None or profile.peak_flops is None:
        return ""
    precision = "fp32" if profile.precision == "no" else profile.precision
    peak = f"{format_count(profile.peak_flops)} FLOP/s ({precision})"
    return f"MFU {format_percent(profile.mfu)} of {peak}"


def lint_lines(profile: ProfileAnalysis) -> list[str]:
    """Return the lint findings that no advice covers, one sentence each."""
    return [
        f"{finding.cell}, line {finding.line} ({finding.sure}): {finding.reason.rstrip('.')}."
        f" Instead: {finding.change}"
        for finding in remarks_without_advice(profile.remarks, profile.advice)
    ]


def trace_file_lines(profile: ProfileAnalysis) -> Iterator[str]:
    """Yield the paths of traces and memory snapshots."""
    if traces := [rank.trace for rank in profile.ranks if rank.trace]:
        yield f"traces (Perfetto, chrome://tracing, HTA): {', '.join(traces)}"
    snapshots = [rank.memory.snapshot for rank in profile.ranks if rank.memory]
    if snapshots := [path for path in snapshots if path]:
        yield f"memory (pytorch.org/memory_viz): {', '.join(snapshots)}"


# ---------------------------------------------------------------------------- text


def render_text(profile: ProfileAnalysis) -> str:
    """Return the profile as text: verdict, advice, tables."""
    lines = [profile.verdict]
    lines += [f"  {profile.advice_outcome}"] if profile.advice_outcome else []
    for number, item in enumerate(profile.advice, 1):
        lines += [f"  {number}. {item.text}", f"     {item.line}"]
    lines += [f"  in the text: {item}" for item in lint_lines(profile)]
    lines += ["", heading(profile)]
    for table in profile_tables.profile_tables(profile):
        lines += ["", *_text_table(table)]
    tail = [*profile.notes, *trace_file_lines(profile)]
    return "\n".join([*lines, *([""] if tail else []), *(f"  note: {item}" for item in tail)])


def _text_table(table: TextTable) -> Iterator[str]:
    """Lines of a table with aligned columns; numbers are right-aligned."""
    rows = [table.header, *table.rows]
    widths = [max(len(row[at]) for row in rows) for at in range(len(table.header))]
    for row in rows:
        cells = (
            cell.ljust(width) if at in table.text_columns else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield f"  {'  '.join(cells)}".rstrip()
    if table.note:
        yield f"  {table.note}"


# ---------------------------------------------------------------------------- HTML


def render_html(profile: ProfileAnalysis) -> str:
    """Return the profile as HTML, with one stacked bar per rank."""
    gained = f"<div>{escape(profile.advice_outcome)}</div>" if profile.advice_outcome else ""
    findings = "".join(f"<div>in the text: {escape(item)}</div>" for item in lint_lines(profile))
    notes = "".join(
        f"<div>{escape(item)}</div>" for item in (*profile.notes, *trace_file_lines(profile))
    )
    shown = profile_tables.profile_tables(profile)
    sections = (
        f"<div style='font-weight:600;font-size:14px'>{escape(profile.verdict)}</div>",
        gained,
        _advice(profile.advice),
        findings,
        f"<div style='margin-top:6px'>{escape(heading(profile))}</div>",
        render_rank_bars(profile),
        *(_html_table(item) for item in shown[:2]),
        _folded(shown[2:]),
        notes,
    )
    return f"<div style='font-size:13px;line-height:1.4;max-width:960px'>{''.join(sections)}</div>"


def _advice(several: Sequence[Advice]) -> str:
    items = "".join(
        f"<li>{escape(advice.text)}<br><code>{escape(advice.line)}</code></li>"
        for advice in several
    )
    return f"<ol style='margin:2px 0 2px 1.6em;padding:0'>{items}</ol>" if items else ""


def render_rank_bars(profile: ProfileAnalysis) -> str:
    """Return one bar per rank, on a common scale, with a legend."""
    longest = max(sum(rank.parts.values()) for rank in profile.ranks) or 1.0
    rows = "".join(
        f"<tr><td style='{_CELL};white-space:nowrap'>{_whose(profile, rank)}</td>"
        f"<td style='{_CELL};width:100%'>{_bar(rank, longest)}</td>"
        f"<td style='{_NUMBER}'>{format_duration(rank.step_s)}</td></tr>"
        for rank in profile_tables.shown_ranks(profile)
    )
    return f"<table style='width:100%;border-collapse:collapse'>{rows}</table>{_key(profile)}"


def _whose(profile: ProfileAnalysis, rank: RankProfile) -> str:
    slow = " (slowest)" if rank.rank == profile.straggler else ""
    return f"rank {rank.rank}{slow}"


def _bar(rank: RankProfile, longest: float) -> str:
    """The stacked bar of one rank, with a description for screen readers."""
    pieces = ""
    for part, color in COLORS.items():
        seconds = rank.parts.get(part, 0.0)
        share = seconds / longest
        if share <= 0:
            continue
        label = f"{part} {format_percent(share)}"
        pieces += (
            f"<div title='{label}, {format_duration(seconds)}' style='float:left;"
            f"box-sizing:border-box;height:100%;width:{100 * share:.2f}%;"
            f"background:{color};color:#fff;font-size:11px;"
            "line-height:18px;text-align:center;overflow:hidden;white-space:nowrap;"
            "border-right:1px solid rgba(255,255,255,.6)'>"
            f"{part if share >= _MIN_LABEL_SHARE else ''}</div>"
        )
    spoken = ", ".join(
        f"{part} {format_percent(seconds / longest)}"
        for part, seconds in rank.parts.items()
        if seconds > 0
    )
    return (
        f"<div role='img' aria-label='rank {rank.rank}: {spoken}' style='{_TRACK}'>{pieces}</div>"
    )


def _key(profile: ProfileAnalysis) -> str:
    items = "".join(
        "<span style='white-space:nowrap;margin-right:12px'><span style='display:inline-block;"
        f"width:10px;height:10px;background:{color}'></span> {part}</span> "
        for part, color in COLORS.items()
        if profile.parts[part] > 0
    )
    return f"<div>{items}</div>"


def _html_table(table: TextTable) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag} style='{_CELL if column in table.text_columns else _NUMBER}'>"
            f"{escape(cell)}</{tag}>"
            for column, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in table.rows)
    note = f"<div>{escape(table.note)}</div>" if table.note else ""
    head = f"<tr>{row(table.header, 'th')}</tr>"
    return f"<table style='border-collapse:collapse;margin-top:6px'>{head}{body}</table>{note}"


def _folded(several: Iterable[TextTable]) -> str:
    """A collapsed section with the source line and memory tables."""
    body = "".join(_html_table(table) for table in several)
    return f"<details><summary>lines and memory</summary>{body}</details>" if body else ""
