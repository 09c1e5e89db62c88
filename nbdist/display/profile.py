"""A profile as text for a terminal and as static HTML."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from nbdist.display.elements import (
    PAGE_STYLE,
    STEP_COLORS,
    Html,
    Table,
    element,
    html_bar,
    html_row,
    html_table,
    join,
    legend,
    lines,
)
from nbdist.number_formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_source_line,
    precision_label,
)
from nbdist.profiler.advice import remarks_without_advice
from nbdist.profiler.measurements import STEP_PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.profiler.analysis import ProfileAnalysis
    from nbdist.profiler.measurements import RankProfile

_MAX_RANKS = 8
"""Maximum number of ranks in a table."""
_MAX_LINES = 5
_MIN_SHARE = 0.001
"""Share of a step: a part that is shorter on all ranks is omitted."""


# ---------------------------------------------------------------------------- words


def heading(profile: ProfileAnalysis) -> str:
    """Return the speed of the run in one line."""
    model, first = profile.model, profile.ranks[0]
    steps = f"{profile.num_steps} step{'' if profile.num_steps == 1 else 's'}"
    unit = "tokens/s" if model and model.seq_len > 1 else "samples/s"
    num_ranks = len(profile.ranks)
    parts = [
        (
            f"{steps} of {format_duration(profile.step_s)} (p50 {format_duration(profile.p50_s)},"
            f" p90 {format_duration(profile.p90_s)})"
        ),
        f"{profile.tokens_per_s:,.0f} {unit}" if profile.samples_per_s else "",
    ]
    if profile.mfu is not None and profile.peak_flops is not None:
        peak = f"{format_count(profile.peak_flops)} FLOP/s ({precision_label(profile.precision)})"
        parts.append(f"MFU {format_percent(profile.mfu)} of {peak}")
    device = f"{num_ranks} x {first.device}" if num_ranks > 1 else first.device
    parts.append(f"{device}, {profile.options.describe()}")
    return "; ".join(filter(None, parts))


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


# ---------------------------------------------------------------------------- tables


def profile_tables(profile: ProfileAnalysis) -> list[Table]:
    """Return all tables that are not empty."""
    tables = (
        step_parts_table(profile),
        collectives_table(profile),
        source_lines_table(profile),
        memory_table(profile),
    )
    return [table for table in tables if table.rows]


def shown_ranks(profile: ProfileAnalysis) -> list[RankProfile]:
    """Return the ranks to show: the first ones, and the straggler."""
    first = list(profile.ranks[:_MAX_RANKS])
    slow = [rank for rank in profile.ranks[_MAX_RANKS:] if rank.rank == profile.straggler]
    return [*first[: _MAX_RANKS - len(slow)], *slow]


def step_parts_table(profile: ProfileAnalysis) -> Table:
    """Return the share and duration of each step part, one column per rank."""

    def cell(seconds: float, step_s: float) -> str:
        share = seconds / step_s if step_s > 0 else 0.0
        return f"{format_percent(share)}  {format_duration(seconds):>7}"

    ranks = shown_ranks(profile)
    rows = [
        (name, *(cell(rank.parts.get(name, 0.0), rank.step_s) for rank in ranks))
        for name in STEP_PARTS
        if any(rank.parts.get(name, 0.0) > _MIN_SHARE * rank.step_s for rank in ranks)
    ]
    rows.append(("step", *(format_duration(rank.step_s) for rank in ranks)))
    hidden = len(profile.ranks) - len(ranks)
    return Table(
        header=("part of a step", *(f"rank {rank.rank}" for rank in ranks)),
        rows=tuple(rows),
        note=f"and {hidden} more ranks: profile.ranks" if hidden > 0 else "",
    )


def collectives_table(profile: ProfileAnalysis) -> Table:
    """Return each kind of collective, per step and averaged over the ranks."""
    header = ("collective", "per step", "size", "bandwidth", "exposed", "of which waiting")
    rows = tuple(
        (
            stats.name,
            f"{stats.count:g}",
            format_bytes(stats.bytes),
            f"{format_bytes(stats.bandwidth)}/s" if stats.bandwidth else "-",
            format_duration(stats.exposed_s),
            format_duration(stats.waiting_s),
            format_duration(max(0.0, stats.seconds - stats.exposed_s)),
        )
        for stats in profile.traffic
    )
    return Table(header=(*header, "overlapped"), rows=rows)


def source_lines_table(profile: ProfileAnalysis) -> Table:
    """Return the slowest source lines outside of the model, on the slowest or the first rank."""
    slow = next(
        (rank for rank in profile.ranks if rank.rank == profile.straggler), profile.ranks[0]
    )
    longest = sorted(slow.lines, key=lambda line: -line.seconds)[:_MAX_LINES]
    rows = tuple(
        (
            f"{line.cell}, line {line.line}",
            format_duration(line.seconds),
            format_source_line(line.source),
        )
        for line in longest
        if line.seconds > _MIN_SHARE * slow.step_s
    )
    header = (f"slowest lines, rank {slow.rank}", "per step", "")
    return Table(header=header, rows=rows, text_columns={0, 2})


def memory_table(profile: ProfileAnalysis) -> Table:
    """Return the memory parts at the peak of the fullest rank, measured and predicted."""
    peaks = [(rank.rank, rank.memory) for rank in profile.ranks if rank.memory]
    if not peaks:
        return Table(rows=())
    rank, peak = max(peaks, key=lambda pair: sum(pair[1].parts.values()))
    predicted = predicted_memory_parts(profile)

    def prediction(size: int) -> str:
        return format_bytes(size) if predicted else "-"

    rows = [
        (name, format_bytes(peak.parts.get(name, 0)), prediction(predicted.get(name, 0)))
        for name in dict.fromkeys((*peak.parts, *predicted))
        if peak.parts.get(name) or predicted.get(name)
    ]
    tensors = format_bytes(sum(peak.parts.values()))
    rows.append(("all tensors", tensors, prediction(sum(predicted.values()))))
    if peak.device_bytes is not None and profile.kind == "cpu":
        rows.append(("resident memory", format_bytes(peak.device_bytes), "-"))
    elif peak.device_bytes is not None:
        expected = format_bytes(profile.predicted.device_bytes) if profile.predicted else "-"
        rows.append(("whole device", format_bytes(peak.device_bytes), expected))
    for line in sorted(peak.lines, key=lambda line: -line.bytes)[:_MAX_LINES]:
        if line.bytes > 0:
            text = f"{line.cell}, line {line.line}: {format_source_line(line.source)}"
            rows.append((text, format_bytes(line.bytes), ""))
    header = (f"memory peak, rank {rank}", "measured", "predicted")
    return Table(header=header, rows=rows)


_CATEGORY_BY_PART: Mapping[str, str] = {
    "master": "optimizer",
    "gathered": "parameters",
    "logits": "activations",
    "temporaries": "other",
    "context": "",
    "margin": "",
}
"""Memory part of the planner -> measured category; "" for memory that holds no tensors."""


def predicted_memory_parts(profile: ProfileAnalysis) -> dict[str, int]:
    """Return the planner's peak in the categories of the measurement; empty if unknown.

    On CPU ranks it includes offloaded memory, which is in the same place.
    """
    row = profile.predicted
    if row is None:
        return {}
    items = [*row.memory.items(), *(row.host.items() if profile.kind == "cpu" else ())]
    sums: Counter[str] = Counter()
    for part, num_bytes in items:
        sums[_CATEGORY_BY_PART.get(part, part)] += num_bytes
    del sums[""]
    return dict(sums)


# ---------------------------------------------------------------------------- text


def render_text(profile: ProfileAnalysis) -> str:
    """Return the profile as text: verdict, advice, tables."""
    shown = [profile.verdict]
    shown += [f"  {profile.advice_outcome}"] if profile.advice_outcome else []
    for number, item in enumerate(profile.advice, 1):
        shown += [f"  {number}. {item.text}", f"     {item.line}"]
    shown += [f"  in the code: {item}" for item in lint_lines(profile)]
    shown += ["", heading(profile)]
    for table in profile_tables(profile):
        shown += ["", *(f"  {line}" for line in table.text.splitlines())]
    tail = [*profile.notes, *trace_file_lines(profile)]
    return "\n".join([*shown, *([""] if tail else []), *(f"  note: {item}" for item in tail)])


# ---------------------------------------------------------------------------- HTML


def render_html(profile: ProfileAnalysis) -> str:
    """Return the profile as HTML, with one stacked bar per rank."""
    advice = [
        element("li", item.text, element("br"), element("code", item.line))
        for item in profile.advice
    ]
    tables = [table.html for table in profile_tables(profile)]
    folded = element("details", element("summary", "lines and memory"), *tables[2:])
    return element(
        "div",
        element("div", profile.verdict, style="font-weight:600;font-size:14px"),
        lines([profile.advice_outcome]),
        element("ol", *advice, style="margin:2px 0 2px 1.6em;padding:0") if advice else "",
        lines(f"in the code: {item}" for item in lint_lines(profile)),
        element("div", heading(profile), style="margin-top:6px"),
        render_rank_bars(profile),
        *tables[:2],
        folded if tables[2:] else "",
        lines([*profile.notes, *trace_file_lines(profile)]),
        style=PAGE_STYLE,
    )


def render_rank_bars(profile: ProfileAnalysis) -> Html:
    """Return one bar per rank, on a common scale, with a legend."""
    longest = max(sum(rank.parts.values()) for rank in profile.ranks) or 1.0
    rows = []
    for rank in shown_ranks(profile):
        pieces, words = [], []
        for part in STEP_PARTS:
            seconds = rank.parts.get(part, 0.0)
            if seconds > 0:
                text = f"{part} {format_percent(seconds / longest)}"
                pieces.append((part, seconds, f"{text}, {format_duration(seconds)}"))
                words.append(text)
        label = f"rank {rank.rank}: {', '.join(words)}"
        bar = html_bar(pieces, STEP_COLORS, longest, label=label, names=True)
        slow = " (slowest)" if rank.rank == profile.straggler else ""
        cells = [f"rank {rank.rank}{slow}", bar, format_duration(rank.step_s)]
        rows.append(html_row(cells, {1}, wide_column=1))
    used = {part for part in STEP_PARTS if profile.parts[part] > 0}
    return join([html_table([], rows, style="width:100%"), legend(STEP_COLORS, used)])
