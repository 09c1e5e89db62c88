"""A plan as text for a terminal and as HTML with bars for a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from nbdist.display.units import count, gib, part_words, seconds
from nbdist.planner.model_spec import Workload, params, trainable
from nbdist.planner.step_time import threshold_sentence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from nbdist.planner.result import Plan, Row
    from nbdist.planner.step_time import Cost

OTHERS = 3
"""Rows besides the best one that an explanation names."""
LONGEST_BAR = 1.6
"""In HTML, of the free memory; a longer bar is cut."""
SHOWN_PARTS = 4
"""Parts of the memory that a line names, the largest ones."""

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
"""Part -> colour of its bar, in the order of the bar."""


# ---------------------------------------------------------------------------- words


def heading(plan: Plan) -> str:
    """What was planned, in one line."""
    ask, model = plan.question, plan.question.model
    trained = trainable(model)
    frozen = "" if trained == params(model) else f" ({count(trained)} trained)"
    sizes = ", ".join(map(str, ask.batch_sizes)) + (f" x {ask.seq_len}" if tokens(plan) else "")
    return (
        f"{model.name}{frozen} on {ask.cluster.describe()}: micro-batch {sizes},"
        f" {ask.optimizer.name}, {_precision(ask.precision)}; {model.depth}"
    )


def tokens(plan: Plan) -> bool:
    """Whether samples are made of tokens; else they are counted themselves."""
    return plan.question.seq_len > 1


def _per_second(plan: Plan) -> str:
    return "tokens/s" if tokens(plan) else "samples/s"


def _precision(precision: str) -> str:
    return "full precision" if precision == "no" else precision


def explanation(plan: Plan) -> list[str]:
    """The choice and why, in at most eight lines."""
    best = plan.best
    if best is None:
        return [f"nothing fits: {heading(plan)}", *plan.advice[:4], *_others(plan)][:8]
    free = gib(plan.question.cluster.smallest.free_bytes, unit=True)
    used = f"{gib(best.device_bytes)} of {free} at the {best.peak_moment}"
    return [
        f"{best.variant}: {best.why}",
        f"  {heading(plan)}",
        f"  {used}: {parts_words(best)}",
        *(f"  {sentence}" for sentence in _closing(plan)),
        *_others(plan),
    ][:8]


def parts_words(row: Row) -> str:
    """The largest parts of a row's memory: "optimizer 12.1, activations 3.0, ..."."""
    largest = sorted(row.memory.items(), key=lambda item: -item[1])[:SHOWN_PARTS]
    return ", ".join(part_words(part, size) for part, size in largest if size)


def speed_words(plan: Plan, cost: Cost) -> str:
    """Speed with its uncertainty: "about 3,100 tokens/s (within 25 %), 1.2 s a step"."""
    return (
        f"about {cost.tokens_per_s:,.0f} {_per_second(plan)} (within {cost.uncertainty:.0%}),"
        f" {seconds(cost.step_time_s)} a step"
    )


def _closing(plan: Plan) -> Iterator[str]:
    """Speed of the best row, and what its batch means for communication between GPUs."""
    best, ask = plan.best, plan.question
    if best is None or best.cost is None:
        return
    yield speed_words(plan, best.cost)
    if ask.cluster.kind == "cuda" and tokens(plan):
        batch = Workload(batch_size=best.batch_size, seq_len=ask.seq_len)
        yield threshold_sentence(best.cost, batch)


def sources(plan: Plan) -> str:
    """Where the figures of a plan are from: measured on this machine, or the catalogue."""
    ask, cluster = plan.question, plan.question.cluster
    days: dict[str, str] = {}
    if cluster.world_size > 1:
        days["link"] = cluster.links.day if cluster.links else ""
    days["compute speed"] = cluster.slowest.measured_on(ask.precision)
    if cluster.kind == "cuda":
        row = plan.best or min(plan.rows, key=lambda one: (one.cost is None, one.device_bytes))
        days["memory"] = row.learned if cluster.known else ""
    if cluster.disk is not None:
        days["disk"] = cluster.disk.day
    by_day: dict[str, list[str]] = {}
    for what, day in days.items():
        by_day.setdefault(day, []).append(what)
    here = [f"{_and(whats)} measured here ({day})" for day, whats in by_day.items() if day]
    rest = [f"{_and(by_day[''])} from the catalogue"] if "" in by_day else []
    return f"figures: {'; '.join([*here, *rest])}{_how_to_measure(plan, here)}"


def _how_to_measure(plan: Plan, here: Sequence[str]) -> str:
    """The line to paste where this machine was not measured yet."""
    if here or plan.question.cluster.known is None:
        return ""
    return " (%nbdist profile --calibrate measures them here)"


def _and(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _others(plan: Plan) -> Iterator[str]:
    """One line each for the best rows of the backends that were not taken."""
    rows = [row for row in briefly(plan) if row is not plan.best]
    taken = _kind(plan.best) if plan.best else None
    different = [row for row in rows if _kind(row) != taken]
    for row in different[:OTHERS]:
        yield f"  {row.variant}: {row.why}"


def briefly(plan: Plan) -> list[Row]:
    """The rows to read first: of each backend and offload the best variant, best on top.

    With replicas across nodes a backend counts as another one.
    """
    shown: dict[tuple[tuple[str, str], str], Row] = {}
    for row in sorted(plan.rows, key=_order):
        shown.setdefault((_kind(row), row.options.offload_device), row)
    rows = sorted(shown.values(), key=_order)
    if plan.best is None:
        return rows
    same = [row for row in plan.rows if _same(row, plan.best)]
    return same + [row for row in rows if not _same(row, plan.best)]


def _kind(row: Row) -> tuple[str, str]:
    return row.backend, row.options.replicate_across


def _same(row: Row, other: Row) -> bool:
    return (row.options, row.batch_size) == (other.options, other.batch_size)


def _order(row: Row) -> tuple[bool, float, int]:
    """Fitting rows by speed, then the others by memory."""
    return (not row.fits, -row.tokens_per_s if row.fits else 0.0, row.device_bytes)


# ---------------------------------------------------------------------------- text

_WIDTH = 20


def text(plan: Plan) -> str:
    """The table for a terminal: one line for each backend and offload."""
    free = plan.question.cluster.smallest.free_bytes
    lines = [heading(plan)]
    lines += [f"  note: {note}" for note in plan.question.notes]
    lines += [f"  {sources(plan)}"]
    lines += [""] + [_line(row, plan, free) for row in briefly(plan)]
    hidden = len(plan.rows) - len(briefly(plan))
    if hidden:
        lines += [f"  and {hidden} more variants: plan.rows, plan.to_pandas()"]
    if plan.best is not None:
        lines += ["", plan.best.command, *(f"  {sentence}" for sentence in _closing(plan))]
    lines += ["", "nothing fits; these changes would:"] if plan.advice else []
    lines += [f"  {sentence}" for sentence in plan.advice]
    return "\n".join(lines)


def _line(row: Row, plan: Plan, free: int) -> str:
    mark = ">" if plan.best is not None and _same(row, plan.best) else " "
    size = f" b{row.batch_size}" if len(plan.question.batch_sizes) > 1 else ""
    if row.cost is None:
        return f"{mark} {row.variant + size:<52} {'':{_WIDTH}} {'':>7}  {row.why}"
    filled = min(_WIDTH, round(_WIDTH * row.device_bytes / free)) if free else _WIDTH
    over = "!" if row.device_bytes > free else " "
    bar = "#" * filled + "." * (_WIDTH - filled)
    return f"{mark} {row.variant + size:<52} {bar}{over}{gib(row.device_bytes):>7}  {row.why}"


# ---------------------------------------------------------------------------- HTML

# JupyterLab has rules of its own for tables in an output, which "!important" overrides.
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


def html(plan: Plan) -> str:
    """The table with a bar for each row; the mark on it is the device's free memory."""
    rows = briefly(plan)
    return "".join(
        (
            f"<style>{_STYLE}</style><div class='nbdist-plan'>",
            f"<div><b>{escape(_verdict(plan))}</b></div>{_list(plan.advice)}",
            f"<div>{escape(heading(plan))}</div>",
            *(f"<div>{escape(note)}</div>" for note in plan.question.notes),
            f"<div>{escape(sources(plan))}</div>",
            _table(plan, rows),
            _key(rows),
            *(f"<div>{escape(sentence)}</div>" for sentence in _closing(plan)),
            _folded(plan),
            "</div>",
        )
    )


def _verdict(plan: Plan) -> str:
    if plan.best is None:
        return "Nothing fits. These changes would:"
    return f"{plan.best.command}   ({plan.best.why})"


def _list(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def _table(plan: Plan, rows: Sequence[Row]) -> str:
    free = plan.question.cluster.smallest.free_bytes
    longest = max(row.device_bytes for row in rows)
    scale = max(free, min(longest, int(LONGEST_BAR * free))) or 1
    head = (
        "<tr><th></th><th>memory of a device</th><th class='n'>GiB</th>"
        f"<th class='n'>{_per_second(plan)}</th><th></th></tr>"
    )
    return f"<table>{head}{''.join(_html_row(row, plan, free, scale) for row in rows)}</table>"


def _html_row(row: Row, plan: Plan, free: int, scale: int) -> str:
    best = plan.best is not None and _same(row, plan.best)
    kind = "best" if best else "" if row.fits else "no"
    size = f", micro-batch {row.batch_size}" if len(plan.question.batch_sizes) > 1 else ""
    refused = row.cost is None
    cells = (
        f"<td>{escape(row.variant + size)}</td>",
        f"<td>{'' if refused else _bar(row, free, scale)}</td>",
        f"<td class='n'>{'' if refused else gib(row.device_bytes)}</td>",
        f"<td class='n'>{'' if refused else f'{row.tokens_per_s:,.0f}'}</td>",
        f"<td class='why'>{escape(row.why)}</td>",
    )
    return f"<tr class='{kind}'>{''.join(cells)}</tr>"


def _bar(row: Row, free: int, scale: int) -> str:
    """Parts side by side, cut at the end of the scale; the whole is in the tooltip."""
    pieces = (
        f"<i style='flex:none;width:{100 * row.memory.get(part, 0) / scale:.2f}%;"
        f"background:{color}'></i>"
        for part, color in COLORS.items()
        if row.memory.get(part)
    )
    tip = f"{row.peak_moment}: {parts_words(row)}"
    mark = f"<b style='left:{100 * free / scale:.2f}%'></b>"
    label = f"{gib(row.device_bytes)} of {gib(free, unit=True)}"
    return (
        f"<span class='bar' role='img' aria-label='{escape(label)}' title='{escape(tip)}'>"
        f"{''.join(pieces)}{mark}</span>"
    )


def _key(rows: Iterable[Row]) -> str:
    used = {part for row in rows for part, size in row.memory.items() if size}
    items = (
        f"<span><i style='background:{color}'></i>{part}</span> "
        for part, color in COLORS.items()
        if part in used
    )
    return f"<div class='key'>{''.join(items)}</div>"


def _folded(plan: Plan) -> str:
    """All rows, to be opened."""
    summary = f"<summary>all {len(plan.rows)} variants</summary>"
    return f"<details>{summary}{_table(plan, sorted(plan.rows, key=_order))}</details>"
