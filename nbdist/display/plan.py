"""A plan as text for a terminal and as HTML with bars for a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nbdist.display.units import format_count, format_gib, format_seconds, memory_part_text
from nbdist.planner.model_spec import Workload, num_params, num_trainable_params
from nbdist.planner.step_time import threshold_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from nbdist.planner.plan_table import PlanRow, PlanTable
    from nbdist.planner.step_time import StepCost

MAX_OTHER_ROWS = 3
"""Number of other backends that an explanation lists."""
MAX_BAR_RATIO = 1.6
"""Maximum length of a bar in HTML, relative to the free memory. Longer bars are cut."""
MAX_SHOWN_PARTS = 4
"""Number of the largest memory parts that a line lists."""

COLORS = {
    "parameters": "#4878a8",
    "master": "#86a8cc",
    "gradients": "#59a14f",
    "optimizer": "#e0a030",
    "buffers": "#b07aa1",
    "gathered": "#76b7b2",
    "activations": "#d9634f",
    "logits": "#9c755f",
    "temporaries": "#b8b0ac",
    "context": "#8a8a8a",
    "margin": "#c8c8c8",
}
"""Memory part -> colour, in the order of the bar."""


# ---------------------------------------------------------------------------- words


def heading(plan: PlanTable) -> str:
    """Return one line on what was planned."""
    request, model = plan.question, plan.question.model
    trained = num_trainable_params(model)
    frozen = "" if trained == num_params(model) else f" ({format_count(trained)} trained)"
    sizes = ", ".join(map(str, request.batch_sizes)) + (
        f" x {request.seq_len}" if has_token_samples(plan) else ""
    )
    return (
        f"{model.name}{frozen} on {request.cluster.describe()}: micro-batch {sizes},"
        f" {request.optimizer.name}, {_precision(request.precision)}; {model.depth}"
    )


def has_token_samples(plan: PlanTable) -> bool:
    """Return whether samples consist of tokens. Otherwise speed is counted in samples."""
    return plan.question.seq_len > 1


def _per_second(plan: PlanTable) -> str:
    return "tokens/s" if has_token_samples(plan) else "samples/s"


def _precision(precision: str) -> str:
    return "full precision" if precision == "no" else precision


def explanation(plan: PlanTable) -> list[str]:
    """Return the choice and the reasons for it, in at most eight lines."""
    best = plan.best
    if best is None:
        return [f"nothing fits: {heading(plan)}", *plan.advice[:4], *_others(plan)][:8]
    free = format_gib(plan.question.cluster.smallest_device.free_bytes, unit=True)
    used = f"{format_gib(best.device_bytes)} of {free} at the {best.peak_moment}"
    return [
        f"{best.variant}: {best.why}",
        f"  {heading(plan)}",
        f"  {used}: {memory_parts_text(best)}",
        *(f"  {sentence}" for sentence in _closing(plan)),
        *_others(plan),
    ][:8]


def memory_parts_text(row: PlanRow) -> str:
    """Return the largest memory parts of a row: "optimizer 12.1, activations 3.0, ..."."""
    largest = sorted(row.memory.items(), key=lambda item: -item[1])[:MAX_SHOWN_PARTS]
    return ", ".join(memory_part_text(part, size) for part, size in largest if size)


def speed_text(plan: PlanTable, cost: StepCost) -> str:
    """Return the speed: "about 3,100 tokens/s (within 25 %), 1.2 s per step"."""
    return (
        f"about {cost.tokens_per_s:,.0f} {_per_second(plan)} (within {cost.uncertainty:.0%}),"
        f" {format_seconds(cost.step_time_s)} per step"
    )


def _closing(plan: PlanTable) -> Iterator[str]:
    """Speed of the best row, and the batch size at which communication becomes the bottleneck."""
    best, request = plan.best, plan.question
    if best is None or best.cost is None:
        return
    yield speed_text(plan, best.cost)
    if request.cluster.kind == "cuda" and has_token_samples(plan):
        batch = Workload(batch_size=best.batch_size, seq_len=request.seq_len)
        yield threshold_text(best.cost, batch)


def measurement_sources(plan: PlanTable) -> str:
    """Return the source of the numbers of a plan: measured on this machine or the catalogue."""
    request, cluster = plan.question, plan.question.cluster
    days: dict[str, str] = {}
    if cluster.world_size > 1:
        days["link"] = cluster.comm_speed.day if cluster.comm_speed else ""
    days["compute speed"] = cluster.slowest_device.measured_date(request.precision)
    if cluster.kind == "cuda":
        row = plan.best or min(plan.rows, key=lambda row: (row.cost is None, row.device_bytes))
        days["memory"] = row.learned if cluster.measurement_store else ""
    if cluster.disk_speed is not None:
        days["disk"] = cluster.disk_speed.day
    by_day: dict[str, list[str]] = {}
    for item, day in days.items():
        by_day.setdefault(day, []).append(item)
    measured = [f"{_and(items)} measured here ({day})" for day, items in by_day.items() if day]
    catalogue = [f"{_and(by_day[''])} from the catalogue"] if "" in by_day else []
    return f"sources: {'; '.join([*measured, *catalogue])}{_how_to_measure(plan, measured)}"


def _how_to_measure(plan: PlanTable, here: Sequence[str]) -> str:
    """Hint at calibration for a machine that was not measured yet."""
    if here or plan.question.cluster.measurement_store is None:
        return ""
    return " (%nbdist profile --calibrate measures them here)"


def _and(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _others(plan: PlanTable) -> Iterator[str]:
    """One line for each of the best rows of other backends."""
    rows = [row for row in summary_rows(plan) if row is not plan.best]
    taken = _kind(plan.best) if plan.best else None
    different = [row for row in rows if _kind(row) != taken]
    for row in different[:MAX_OTHER_ROWS]:
        yield f"  {row.variant}: {row.why}"


def summary_rows(plan: PlanTable) -> list[PlanRow]:
    """Return the most relevant rows, best first: the best variant per backend and offload.

    A backend with replicas across nodes counts as a separate backend.
    """
    shown: dict[tuple[tuple[str, str], str], PlanRow] = {}
    for row in sorted(plan.rows, key=_order):
        shown.setdefault((_kind(row), row.options.offload_device), row)
    rows = sorted(shown.values(), key=_order)
    if plan.best is None:
        return rows
    same = [row for row in plan.rows if _same(row, plan.best)]
    return same + [row for row in rows if not _same(row, plan.best)]


def _kind(row: PlanRow) -> tuple[str, str]:
    return row.backend, row.options.replicate_across


def _same(row: PlanRow, other: PlanRow) -> bool:
    return (row.options, row.batch_size) == (other.options, other.batch_size)


def _order(row: PlanRow) -> tuple[bool, float, int]:
    """Sort key: rows that fit by speed, then the others by memory."""
    return (not row.fits, -row.tokens_per_s if row.fits else 0.0, row.device_bytes)


# ---------------------------------------------------------------------------- text

_WIDTH = 20


def render_text(plan: PlanTable) -> str:
    """Return the table as text, one line per backend and offload."""
    free = plan.question.cluster.smallest_device.free_bytes
    lines = [heading(plan)]
    lines += [f"  note: {note}" for note in plan.question.notes]
    lines += [f"  {measurement_sources(plan)}"]
    lines += [""] + [_line(row, plan, free) for row in summary_rows(plan)]
    hidden = len(plan.rows) - len(summary_rows(plan))
    if hidden:
        lines += [f"  and {hidden} more variants: plan.rows, plan.to_pandas()"]
    if plan.best is not None:
        lines += ["", plan.best.command, *(f"  {sentence}" for sentence in _closing(plan))]
    lines += ["", "nothing fits; these changes would make it fit:"] if plan.advice else []
    lines += [f"  {sentence}" for sentence in plan.advice]
    return "\n".join(lines)


def _line(row: PlanRow, plan: PlanTable, free: int) -> str:
    mark = ">" if plan.best is not None and _same(row, plan.best) else " "
    size = f" b{row.batch_size}" if len(plan.question.batch_sizes) > 1 else ""
    if row.cost is None:
        return f"{mark} {row.variant + size:<52} {'':{_WIDTH}} {'':>7}  {row.why}"
    filled = min(_WIDTH, round(_WIDTH * row.device_bytes / free)) if free else _WIDTH
    over = "!" if row.device_bytes > free else " "
    bar = "#" * filled + "." * (_WIDTH - filled)
    return (
        f"{mark} {row.variant + size:<52} {bar}{over}{format_gib(row.device_bytes):>7}  {row.why}"
    )


# ---------------------------------------------------------------------------- HTML

# "!important" overrides JupyterLab's own style of tables in outputs.
_STYLE = (
    ".nbdist-plan{font-family:var(--jp-ui-font-family,sans-serif);font-size:12px;"
    "line-height:1.35}"
    ".nbdist-plan table{border-collapse:collapse;margin:4px 0;font-size:12px}"
    ".nbdist-plan td,.nbdist-plan th{padding:2px 6px!important;text-align:left!important;"
    "vertical-align:middle;white-space:nowrap}"
    ".nbdist-plan td.n,.nbdist-plan th.n{text-align:right!important;"
    "font-variant-numeric:tabular-nums}"
    ".nbdist-plan td.why{white-space:normal;min-width:200px}"
    ".nbdist-plan ul{margin:2px 0 4px}"
    ".nbdist-plan tr{background:none!important}"
    ".nbdist-plan tr.best{font-weight:600;background:rgba(89,161,79,.18)!important}"
    ".nbdist-plan tr.no td{opacity:.62}"
    ".nbdist-plan .bar{display:inline-flex;width:150px;height:12px;position:relative;"
    "background:rgba(128,128,128,.15);overflow:hidden;vertical-align:middle}"
    ".nbdist-plan .bar i{display:block;height:100%}"
    ".nbdist-plan .bar b{position:absolute;top:0;bottom:0;width:2px;"
    "background:var(--jp-ui-font-color1,currentColor)}"
    ".nbdist-plan .key span{white-space:nowrap}"
    ".nbdist-plan .key i{display:inline-block;width:10px;height:10px;margin:0 4px 0 10px}"
)


def render_html(plan: PlanTable) -> str:
    """Return the table as HTML with one bar per row; a tick marks the free memory of the device."""
    rows = summary_rows(plan)
    return "".join(
        (
            f"<style>{_STYLE}</style><div class='nbdist-plan'>",
            f"<div><b>{escape(_verdict(plan))}</b></div>{_list(plan.advice)}",
            f"<div>{escape(heading(plan))}</div>",
            *(f"<div>{escape(note)}</div>" for note in plan.question.notes),
            f"<div>{escape(measurement_sources(plan))}</div>",
            _table(plan, rows),
            _key(rows),
            *(f"<div>{escape(sentence)}</div>" for sentence in _closing(plan)),
            _folded(plan),
            "</div>",
        )
    )


def _verdict(plan: PlanTable) -> str:
    if plan.best is None:
        return "Nothing fits. These changes would make it fit:"
    return f"{plan.best.command}   ({plan.best.why})"


def _list(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def _table(plan: PlanTable, rows: Sequence[PlanRow]) -> str:
    free = plan.question.cluster.smallest_device.free_bytes
    longest = max(row.device_bytes for row in rows)
    scale = max(free, min(longest, int(MAX_BAR_RATIO * free))) or 1
    head = (
        "<tr><th></th><th>memory per device</th><th class='n'>GiB</th>"
        f"<th class='n'>{_per_second(plan)}</th><th></th></tr>"
    )
    return f"<table>{head}{''.join(_html_row(row, plan, free, scale) for row in rows)}</table>"


def _html_row(row: PlanRow, plan: PlanTable, free: int, scale: int) -> str:
    best = plan.best is not None and _same(row, plan.best)
    kind = "best" if best else "" if row.fits else "no"
    size = f", micro-batch {row.batch_size}" if len(plan.question.batch_sizes) > 1 else ""
    has_no_cost = row.cost is None
    cells = (
        f"<td>{escape(row.variant + size)}</td>",
        f"<td>{'' if has_no_cost else _bar(row, free, scale)}</td>",
        f"<td class='n'>{'' if has_no_cost else format_gib(row.device_bytes)}</td>",
        f"<td class='n'>{'' if has_no_cost else f'{row.tokens_per_s:,.0f}'}</td>",
        f"<td class='why'>{escape(row.why)}</td>",
    )
    return f"<tr class='{kind}'>{''.join(cells)}</tr>"


def _bar(row: PlanRow, free: int, scale: int) -> str:
    """Stacked bar of the memory parts, cut at the end of the scale. The tooltip lists the parts."""
    pieces = (
        f"<i style='flex:none;width:{100 * row.memory.get(part, 0) / scale:.2f}%;"
        f"background:{color}'></i>"
        for part, color in COLORS.items()
        if row.memory.get(part)
    )
    tip = f"{row.peak_moment}: {memory_parts_text(row)}"
    mark = f"<b style='left:{100 * free / scale:.2f}%'></b>"
    label = f"{format_gib(row.device_bytes)} of {format_gib(free, unit=True)}"
    return (
        f"<span class='bar' role='img' aria-label='{escape(label)}' title='{escape(tip)}'>"
        f"{''.join(pieces)}{mark}</span>"
    )


def _key(rows: Iterable[PlanRow]) -> str:
    used = {part for row in rows for part, size in row.memory.items() if size}
    items = (
        f"<span><i style='background:{color}'></i>{part}</span> "
        for part, color in COLORS.items()
        if part in used
    )
    return f"<div class='key'>{''.join(items)}</div>"


def _folded(plan: PlanTable) -> str:
    """A collapsed table of all rows."""
    summary = f"<summary>all {len(plan.rows)} variants</summary>"
    return f"<details>{summary}{_table(plan, sorted(plan.rows, key=_order))}</details>"
