"""The result of a plan: its rows, the best one, and their text and HTML with bars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist import strategies
from nbdist.display import (
    MEMORY_COLORS,
    Html,
    Table,
    element,
    html_bar,
    legend,
    lines,
    text_bar,
)
from nbdist.errors import PlanError
from nbdist.number_formatting import (
    format_bytes,
    format_count,
    format_gib,
    format_seconds,
    memory_part_text,
)
from nbdist.planner.model_spec import num_params, num_trainable_params
from nbdist.planner.step_time import threshold_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.planner.plan_types import PlanInput, PlanRow

MAX_OTHER_ROWS = 3
"""Number of other backends that an explanation lists."""
MAX_BAR_RATIO = 1.6
"""Maximum length of a bar in HTML, relative to the free memory. Longer bars are cut."""
MAX_SHOWN_PARTS = 4
"""Number of the largest memory parts that a line lists."""
_BAR_CHARS = 20
_BEST_STYLE = "font-weight:600;background:rgba(89,161,79,.18)"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory and speed of every strategy on a cluster, and which one to use.

    Displayed as a table with bars against the device's memory; `rows` holds every variant.
    """

    question: PlanInput
    rows: tuple[PlanRow, ...]
    best: PlanRow | None
    """The simplest row that fits and is not surely slower; None if nothing fits."""
    runner_up: PlanRow | None = None
    """The row to use without the best one's backend; None if no other fits."""
    advice: tuple[str, ...] = ()
    """If nothing fits: the smallest changes that would help, one sentence each."""

    def row(self, backend: str, *, batch_size: int | None = None, **options: Any) -> PlanRow:
        """Return the row of a backend with these options; others are at their default.

        Args:
            backend: any name of the backend.
            batch_size: default: the first planned one.
            options: session options, such as offload="cpu", reshard_after_forward=False for FSDP2
                that keeps parameters gathered, or replicate_across="nodes" for FSDP2 with shards
                inside each node (HSDP).

        Raises:
            OptionError: an unknown option.
            PlanError: the plan has no such row.
        """
        plain = {key: value for key, value in options.items() if key != "reshard_after_forward"}
        strategies.Options.from_fields(plain)  # raises for an unknown name
        name = strategies.canonical_backend(backend)
        fixed = self.question.fixed_options
        # As fixed by the user, or the default.
        config = fixed.get("fsdp_config")
        resharded = strategies.Options(backend=name, fsdp_config=config).reshard_after_forward
        requested = {
            "offload": "none",
            "offload_params": False,
            "activation_checkpointing": False,
            "replicate_across": "none",
            "reshard_after_forward": resharded,
            **{key: value for key, value in fixed.items() if key in VARIANT_OPTIONS},
            **options,
        }
        size = self.question.batch_sizes[0] if batch_size is None else batch_size
        for row in self.rows:
            if (row.backend, row.batch_size) == (name, size) and _has(row, requested):
                return row
        shown = ", ".join(f"{key}={value!r}" for key, value in options.items())
        variants = sorted({row.variant for row in self.rows if row.backend == name})
        raise PlanError(
            f"The plan has no row {name} with batch_size={size}{shown and f', {shown}'}."
            f" It has {'; '.join(variants) or 'no row of this backend'}."
        )

    def explanation(self) -> list[str]:
        """Return the choice and the reasons for it, in at most eight lines."""
        best = self.best
        if best is None:
            return [
                f"nothing fits: {heading(self)}",
                *self.advice[:4],
                *_best_of_other_backends(self),
            ][:8]
        free = format_gib(self.question.cluster.smallest_device.free_bytes, unit=True)
        used = f"{format_gib(best.device_bytes)} of {free} at the {best.peak_moment}"
        return [
            f"{best.variant}: {best.why}",
            f"  {heading(self)}",
            f"  {used}: {memory_parts_text(best)}",
            *(f"  {sentence}" for sentence in _sentences_on_choice(self)),
            *_best_of_other_backends(self),
        ][:8]

    def to_pandas(self) -> Any:
        """Return all rows as a pandas.DataFrame.

        Raises:
            PlanError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise PlanError(
                "to_pandas() needs pandas, which is not installed. Install it with"
                " %pip install pandas, or use plan.rows."
            ) from None
        return pd.DataFrame([row.to_dict() for row in self.rows])

    def __str__(self) -> str:
        shown = [heading(self)]
        shown += [f"  note: {note}" for note in self.question.notes]
        shown += [f"  {line}" for line in (measurement_sources(self), *memory_sentences(self))]
        shown += [""] + [_line(row, self) for row in summary_rows(self)]
        hidden = len(self.rows) - len(summary_rows(self))
        if hidden:
            shown += [f"  and {hidden} more variants: plan.rows, plan.to_pandas()"]
        if self.best is not None:
            sentences = (f"  {sentence}" for sentence in _sentences_on_choice(self))
            shown += ["", self.best.command, *sentences]
        shown += ["", "nothing fits; what would help:"] if self.advice else []
        shown += [f"  {sentence}" for sentence in self.advice]
        return "\n".join(shown)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the table as HTML with a bar per row; a tick marks the free memory."""
        rows = summary_rows(self)
        verdict = "Nothing fits. What would help:"
        if self.best is not None:
            verdict = f"{self.best.command}   ({self.best.why})"
        advice = element("ul", *(element("li", sentence) for sentence in self.advice))
        used = {part for row in rows for part, size in row.memory.items() if size}
        all_rows = element(
            "details",
            element("summary", f"all {len(self.rows)} variants"),
            _table(self, sorted(self.rows, key=_sort_key)),
        )
        page = element(
            "div",
            element("div", element("b", verdict)),
            advice if self.advice else "",
            lines(
                [
                    heading(self),
                    *self.question.notes,
                    measurement_sources(self),
                    *memory_sentences(self),
                ]
            ),
            _table(self, rows),
            legend(MEMORY_COLORS, used),
            lines(_sentences_on_choice(self)),
            all_rows,
            style="font-size:12px;line-height:1.35",
        )
        return str(page)


VARIANT_OPTIONS = ("offload", "offload_params", "activation_checkpointing", "replicate_across")
"""Options that distinguish rows of one backend, and that a switch accepts."""


def _has(row: PlanRow, requested: Mapping[str, Any]) -> bool:
    options = row.options
    return all(
        value in {getattr(options, key), options.offload_device}
        if key == "offload"
        else getattr(options, key) == value
        for key, value in requested.items()
    )


# ---------------------------------------------------------------------------- words


def heading(plan: Plan) -> str:
    """Return one line on what was planned."""
    request, model = plan.question, plan.question.model
    trained = num_trainable_params(model)
    frozen = "" if trained == num_params(model) else f" ({format_count(trained)} trained)"
    sizes = ", ".join(map(str, request.batch_sizes)) + (
        f" x {request.seq_len}" if has_token_samples(plan) else ""
    )
    precision = "full precision" if request.precision == "no" else request.precision
    return (
        f"{model.name}{frozen} on {request.cluster.describe()}: micro-batch {sizes},"
        f" {request.optimizer.name}, {precision}; {model.depth}"
    )


def has_token_samples(plan: Plan) -> bool:
    """Return whether samples consist of tokens. Otherwise speed is counted in samples."""
    return plan.question.seq_len > 1


def memory_parts_text(row: PlanRow) -> str:
    """Return the largest memory parts of a row: "optimizer 12.1, activations 3.0, ..."."""
    largest = sorted(row.memory.items(), key=lambda item: -item[1])[:MAX_SHOWN_PARTS]
    return ", ".join(memory_part_text(part, size) for part, size in largest if size)


def _sentences_on_choice(plan: Plan) -> Iterator[str]:
    """Name the runner-up and why it lost, the best row's speed, and what limits it."""
    best, request = plan.best, plan.question
    if best is None or best.cost is None:
        return
    if plan.runner_up is None:
        yield "runner-up: none, no other backend fits"
    else:
        yield f"runner-up: {plan.runner_up.variant}: {plan.runner_up.why}"
    cost, unit = best.cost, "tokens/s" if has_token_samples(plan) else "samples/s"
    low, high = cost.range_s
    slowest, fastest = (cost.tokens_per_s * cost.step_time_s / end for end in (high, low))
    yield (
        f"about {cost.tokens_per_s:,.0f} {unit} ({slowest:,.0f} to {fastest:,.0f}),"
        f" {format_seconds(cost.step_time_s)} per step"
        f" ({format_seconds(low)} to {format_seconds(high)})"
    )
    if request.cluster.kind == "cuda" and has_token_samples(plan):
        yield threshold_text(cost, best.batch_size * request.seq_len)


def memory_sentences(plan: Plan) -> list[str]:
    """Return what the margin of free memory is made of, and the bytes of kept outputs."""
    shown = plan.best or min(plan.rows, key=lambda row: (row.cost is None, row.device_bytes))
    if shown.cost is None:
        return []
    sentences = [shown.margin.describe()]
    if shown.output_bytes:
        sentences.append(
            f"outputs = model(**batch) keeps {format_bytes(shown.output_bytes)} of outputs until"
            " the next forward; del outputs before loss.backward() frees them (planned with"
            " keep_outputs=False or --drop-outputs)"
        )
    return sentences


def measurement_sources(plan: Plan) -> str:
    """Return the source of the numbers of a plan: measured on this machine or the catalogue."""
    request, cluster = plan.question, plan.question.cluster
    days: dict[str, str] = {}
    if cluster.world_size > 1:
        days["link"] = cluster.comm_measured_date
    days["compute speed"] = cluster.slowest_device.measured_date(request.precision)
    if cluster.kind == "cuda":
        row = plan.best or min(plan.rows, key=lambda row: (row.cost is None, row.device_bytes))
        days["memory"] = row.learned if cluster.measurement_store else ""
    if cluster.disk_speed is not None:
        days["disk"] = cluster.disk_speed.day
    by_day: dict[str, list[str]] = {}
    for item, day in days.items():
        by_day.setdefault(day, []).append(item)
    measured = [
        f"{_join_with_and(items)} measured here ({day})" for day, items in by_day.items() if day
    ]
    catalogue = [f"{_join_with_and(by_day[''])} from the catalogue"] if "" in by_day else []
    hint = ""
    if not measured and cluster.measurement_store is not None:
        hint = " (%nbdist profile --calibrate measures them here)"
    return f"sources: {'; '.join([*measured, *catalogue])}{hint}"


def _join_with_and(items: Sequence[str]) -> str:
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last


def _best_of_other_backends(plan: Plan) -> Iterator[str]:
    """One line for each of the best rows of other backends."""
    best_key = _row_key(plan.best) if plan.best else None
    named = (plan.best, plan.runner_up)
    different = [
        row
        for row in summary_rows(plan)
        if _row_key(row) != best_key and not any(each and _is_same_row(row, each) for each in named)
    ]
    for row in different[:MAX_OTHER_ROWS]:
        yield f"  {row.variant}: {row.why}"


def summary_rows(plan: Plan) -> list[PlanRow]:
    """Return the most relevant rows, best first: the best variant per backend and offload.

    A backend with replicas across nodes counts as a separate backend.
    """
    shown: dict[tuple[tuple[str, str], str], PlanRow] = {}
    for row in sorted(plan.rows, key=_sort_key):
        shown.setdefault((_row_key(row), row.options.offload_device), row)
    rows = sorted(shown.values(), key=_sort_key)
    if plan.best is None:
        return rows
    same = [row for row in plan.rows if _is_same_row(row, plan.best)]
    return same + [row for row in rows if not _is_same_row(row, plan.best)]


def _row_key(row: PlanRow) -> tuple[str, str]:
    return row.backend, row.options.replicate_across


def _is_same_row(row: PlanRow, other: PlanRow) -> bool:
    return (row.options, row.batch_size) == (other.options, other.batch_size)


def _sort_key(row: PlanRow) -> tuple[bool, float, int]:
    """Sort key: rows that fit by speed, then the others by memory."""
    return (not row.fits, -row.tokens_per_s if row.fits else 0.0, row.device_bytes)


# ---------------------------------------------------------------------------- text


def _line(row: PlanRow, plan: Plan) -> str:
    free = plan.question.cluster.smallest_device.free_bytes
    mark = ">" if plan.best is not None and _is_same_row(row, plan.best) else " "
    size = f" b{row.batch_size}" if len(plan.question.batch_sizes) > 1 else ""
    bar = over = used = ""
    if row.cost is not None:
        bar = text_bar(row.device_bytes, free or 1, _BAR_CHARS)
        over = "!" if row.device_bytes > free else " "
        used = format_gib(row.device_bytes)
    bar = f"{bar}{over}"
    return f"{mark} {row.variant + size:<52} {bar:{_BAR_CHARS + 1}}{used:>7}  {row.why}"


# ---------------------------------------------------------------------------- HTML


def _table(plan: Plan, rows: Sequence[PlanRow]) -> Html:
    free = plan.question.cluster.smallest_device.free_bytes
    longest = max(row.device_bytes for row in rows)
    scale = max(free, min(longest, int(MAX_BAR_RATIO * free))) or 1
    per_second = "tokens/s" if has_token_samples(plan) else "samples/s"
    table = Table(
        header=["", "memory per device", "GiB", per_second, ""],
        rows=[_html_cells(row, plan, free, scale) for row in rows],
        text_columns={0, 1, 4},
        row_styles=[
            _BEST_STYLE
            if plan.best is not None and _is_same_row(row, plan.best)
            else ""
            if row.fits
            else "opacity:.62"
            for row in rows
        ],
    )
    return table.html


def _html_cells(row: PlanRow, plan: Plan, free: int, scale: int) -> list[str]:
    size = f", micro-batch {row.batch_size}" if len(plan.question.batch_sizes) > 1 else ""
    if row.cost is None:
        return [row.variant + size, "", "", "", row.why]
    sizes = {part: row.memory.get(part, 0) for part in MEMORY_COLORS}
    bar = html_bar(
        [(part, size, "") for part, size in sizes.items() if size],
        MEMORY_COLORS,
        scale,
        label=f"{format_gib(row.device_bytes)} of {format_gib(free, unit=True)}",
        title=f"{row.peak_moment}: {memory_parts_text(row)}",
        overlays={"limit": free},
    )
    speed = f"{row.tokens_per_s:,.0f}"
    return [row.variant + size, bar, format_gib(row.device_bytes), speed, row.why]


# ---------------------------------------------------------------------------- machines


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRow:
    """GPUs of one kind on which a model fits, and the strategy to use there."""

    question: PlanInput
    row: PlanRow

    @property
    def gpu_hours(self) -> float:
        """GPU-hours per billion tokens; samples for a model without tokens."""
        return self.question.world_size * 1e9 / self.row.tokens_per_s / 3600


@dataclass(frozen=True, kw_only=True)
class MachinePlan:
    """The smallest machine of each GPU on which a model fits, fewest GPU-hours first."""

    request: PlanInput
    machines: tuple[MachineRow, ...]
    """The smallest of each GPU, fewest GPU-hours first."""
    too_small: tuple[str, ...]
    """GPUs of which `max_nodes` nodes are not enough."""
    max_nodes: int

    def __str__(self) -> str:
        shown = [f"  {line}" for line in _machines_table(self).text.splitlines()]
        return "\n".join(
            [_machines_heading(self), *(shown if self.machines else []), *_notes(self)]
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return which machines are enough as HTML."""
        page = element(
            "div",
            element("div", element("b", _machines_heading(self))),
            _machines_table(self).html if self.machines else "",
            lines(_notes(self)),
            style="font-size:12px;line-height:1.35",
        )
        return str(page)


def _machines_heading(table: MachinePlan) -> str:
    request = table.request
    sizes = ", ".join(map(str, request.batch_sizes))
    length = f" x {request.seq_len}" if request.seq_len > 1 else ""
    return (
        f"smallest machines for {request.model.name}: micro-batch {sizes}{length} per GPU,"
        f" {request.optimizer.name}"
    )


def _machines_table(table: MachinePlan) -> Table:
    unit = "tokens" if table.request.seq_len > 1 else "samples"
    columns = ["machine", "strategy", "GiB", "of", "step", f"{unit}/s", f"GPU-hours per 1e9 {unit}"]
    return Table(header=columns, rows=[*map(_machine_cells, table.machines)], text_columns={0, 1})


def _machine_cells(machine: MachineRow) -> list[str]:
    request, row = machine.question, machine.row
    size = f", micro-batch {row.batch_size}" if len(request.batch_sizes) > 1 else ""
    range_s = row.cost.range_s if row.cost else (row.step_time_s, row.step_time_s)
    low, high = (machine.gpu_hours * end / row.step_time_s for end in range_s)
    return [
        request.cluster.describe(),
        f"{row.variant}{size}, {request.precision}",
        format_gib(row.device_bytes),
        format_gib(request.cluster.smallest_device.free_bytes),
        format_seconds(row.step_time_s),
        f"{row.tokens_per_s:,.0f}",
        f"{machine.gpu_hours:,.0f} ({low:,.0f} to {high:,.0f})",
    ]


def _notes(table: MachinePlan) -> list[str]:
    notes = list(table.request.model.notes)
    if table.too_small:
        limit = "one node" if table.max_nodes == 1 else f"{table.max_nodes} nodes"
        notes.append(f"does not fit on {limit} of eight: {', '.join(table.too_small)}")
    notes += dict.fromkeys(
        note for machine in table.machines for note in machine.question.cluster.notes
    )
    if table.request.fixed_options["offload"] == "none":
        notes.append("without offload; --offload cpu fits on fewer GPUs with enough host memory")
    return [f"note: {note}" for note in notes]
