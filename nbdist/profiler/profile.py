"""Profile of a training window: measurements, bottlenecks, advice; its text and its static HTML."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from nbdist.display import (
    PAGE_STYLE,
    STEP_COLORS,
    Html,
    Table,
    element,
    html_bar,
    join,
    legend,
    lines,
)
from nbdist.errors import NbdistError
from nbdist.number_formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_source_line,
    precision_label,
)
from nbdist.profiler import advice, bottleneck, profile_data, select_recommendations, what_if
from nbdist.profiler.measurements import STEP_PARTS
from nbdist.profiler.profile_data import ProfileData

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from nbdist.planner.plan_types import PlanRow
    from nbdist.profiler.advice import Advice
    from nbdist.profiler.bottleneck import Bottleneck
    from nbdist.profiler.dataloader_call import DataLoaderCall
    from nbdist.profiler.lint import LintFinding
    from nbdist.profiler.measurements import RankProfile
    from nbdist.profiler.profile_data import ProfiledConfig
    from nbdist.profiler.what_if import CalibratedPlanner

_MAX_RANKS = 8
"""Maximum number of ranks in a table."""
_MAX_LINES = 5
_MIN_SHARE = 0.001
"""Share of a step: a part that is shorter on all ranks is omitted."""


@dataclass(frozen=True, kw_only=True)
class Profile(ProfileData):
    """Time breakdown of a training step, and changes that would make it faster.

    Created with `Profile.of`. All times are seconds per optimizer step.
    """

    before: Profile | None = field(default=None, repr=False)
    """Previous profile, whose advice may have been followed."""

    @classmethod
    def of(
        cls,
        figures: Iterable[RankProfile],
        setting: ProfiledConfig,
        *,
        remarks: Sequence[LintFinding] = (),
        loader_text: DataLoaderCall | None = None,
        before: Profile | None = None,
        notes: Sequence[str] = (),
    ) -> Self:
        """Create a profile from the measurements of the ranks.

        Args:
            figures: measurements of at least one rank.
            setting: configuration of the profiled session.
            remarks: lint findings, confirmed by these measurements.
            loader_text: source of the call that created the loop's DataLoader, if known.
            before: previous profile of the session.
            notes: notes for the user, such as ranks that did not take part and why.

        Raises:
            ValueError: `figures` is empty.
        """
        ranks, unknown = profile_data.compare_ranks(list(figures))
        if not ranks:
            raise ValueError("A profile needs the measurements of at least one rank.")
        return cls(
            ranks=ranks,
            setting=setting,
            remarks=tuple(remarks),
            loader_text=loader_text,
            # Without its own previous profile: profiles do not form a chain.
            before=before and replace(before, before=None),
            general_notes=(*notes, *unknown),
        )

    @cached_property
    def model_flops(self) -> float | None:
        """FLOPs of one rank per step, without recomputation; None if unknown."""
        return what_if.model_flops(self)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: model FLOP/s as a share of `peak_flops`; None if unknown."""
        if not self.peak_flops or self.model_flops is None or self.step_s <= 0:
            return None
        return self.model_flops / self.step_s / self.peak_flops

    @cached_property
    def bottlenecks(self) -> tuple[Bottleneck, ...]:
        """Bottlenecks above their thresholds, largest first."""
        return tuple(bottleneck.find_bottlenecks(self, self.mfu))

    @property
    def bound(self) -> str:
        """Kind of the largest bottleneck: a ``BottleneckKind``, "compute" or "mixed"."""
        if self.bottlenecks:
            return self.bottlenecks[0].kind
        computing = self.share(*bottleneck.COMPUTING)
        return "compute" if computing >= bottleneck.HALF else "mixed"

    @cached_property
    def verdict(self) -> str:
        """Summary of the largest bottleneck in one sentence."""
        return bottleneck.bottleneck_summary(
            self, self.bottlenecks, self.advice, planned=self.calibrated_planner is not None
        )

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """At most three recommendations, largest speedup first."""
        return tuple(
            select_recommendations.best_recommendations(
                self, self.bottlenecks, self.calibrated_planner
            )
        )

    @cached_property
    def advice_outcome(self) -> str:
        """Speedup by followed advice of the previous profile; empty if none was followed."""
        return advice.advice_outcome(self.before.advice, self.before, self) if self.before else ""

    @cached_property
    def calibrated_planner(self) -> CalibratedPlanner | None:
        """The planner, calibrated to this profile; None if it does not support the model."""
        try:
            return what_if.CalibratedPlanner(self)
        except NbdistError:
            return None

    @property
    def predicted(self) -> PlanRow | None:
        """The planner's prediction for the profiled configuration, if there is one."""
        return self.calibrated_planner.row if self.calibrated_planner else None

    def to_json(self) -> dict[str, Any]:
        """Return the profile as JSON values."""
        return {
            "verdict": self.verdict,
            "bound": self.bound,
            "advice": [advice.to_json() for advice in self.advice],
            "gained": self.advice_outcome,
            "step_s": self.step_s,
            "p50_s": self.p50_s,
            "p90_s": self.p90_s,
            "parts": dict(self.parts),
            "hidden_s": self.hidden_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "peak_flops": self.peak_flops,
            "straggler": self.straggler,
            "notes": self.notes,
            "ranks": [rank.to_json() for rank in self.ranks],
        }

    def __str__(self) -> str:
        shown = [self.verdict]
        shown += [f"  {self.advice_outcome}"] if self.advice_outcome else []
        for number, item in enumerate(self.advice, 1):
            shown += [f"  {number}. {item.text}", f"     {item.line}"]
        shown += [f"  in the code: {item}" for item in _lint_lines(self)]
        shown += ["", _heading(self)]
        for table in _tables(self):
            shown += ["", *(f"  {line}" for line in table.text.splitlines())]
        tail = [*self.notes, *_trace_file_lines(self)]
        return "\n".join([*shown, *([""] if tail else []), *(f"  note: {item}" for item in tail)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the profile as HTML without scripts, with a stacked bar per rank."""
        steps = [
            element("li", item.text, element("br"), element("code", item.line))
            for item in self.advice
        ]
        tables = [table.html for table in _tables(self)]
        folded = element("details", element("summary", "lines and memory"), *tables[2:])
        page = element(
            "div",
            element("div", self.verdict, style="font-weight:600;font-size:14px"),
            lines([self.advice_outcome]),
            element("ol", *steps, style="margin:2px 0 2px 1.6em;padding:0") if steps else "",
            lines(f"in the code: {item}" for item in _lint_lines(self)),
            element("div", _heading(self), style="margin-top:6px"),
            _rank_bars(self),
            *tables[:2],
            folded if tables[2:] else "",
            lines([*self.notes, *_trace_file_lines(self)]),
            style=PAGE_STYLE,
        )
        return str(page)


# ---------------------------------------------------------------------------- words


def _heading(profile: Profile) -> str:
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


def _lint_lines(profile: Profile) -> list[str]:
    """Return the lint findings that no advice covers, one sentence each."""
    return [
        f"{finding.cell}, line {finding.line} ({finding.sure}): {finding.reason.rstrip('.')}."
        f" Instead: {finding.change}"
        for finding in advice.remarks_without_advice(profile.remarks, profile.advice)
    ]


def _trace_file_lines(profile: Profile) -> Iterator[str]:
    """Yield the paths of traces and memory snapshots."""
    if traces := [rank.trace for rank in profile.ranks if rank.trace]:
        yield f"traces (Perfetto, chrome://tracing, HTA): {', '.join(traces)}"
    snapshots = [rank.memory.snapshot for rank in profile.ranks if rank.memory]
    if snapshots := [path for path in snapshots if path]:
        yield f"memory (pytorch.org/memory_viz): {', '.join(snapshots)}"


# ---------------------------------------------------------------------------- tables


def _tables(profile: Profile) -> list[Table]:
    """Return all tables that are not empty."""
    tables = (
        _step_parts_table(profile),
        _collectives_table(profile),
        _source_lines_table(profile),
        _memory_table(profile),
    )
    return [table for table in tables if table.rows]


def shown_ranks(profile: Profile) -> list[RankProfile]:
    """Return the ranks to show: the first ones, and the straggler."""
    first = list(profile.ranks[:_MAX_RANKS])
    slow = [rank for rank in profile.ranks[_MAX_RANKS:] if rank.rank == profile.straggler]
    return [*first[: _MAX_RANKS - len(slow)], *slow]


def _step_parts_table(profile: Profile) -> Table:
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


def _collectives_table(profile: Profile) -> Table:
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


def _source_lines_table(profile: Profile) -> Table:
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


def _memory_table(profile: Profile) -> Table:
    """Return the memory parts at the peak of the fullest rank, measured and predicted."""
    peaks = [(rank.rank, rank.memory) for rank in profile.ranks if rank.memory]
    if not peaks:
        return Table(rows=())
    rank, peak = max(peaks, key=lambda pair: sum(pair[1].parts.values()))
    predicted = _predicted_memory_parts(profile)

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


def _predicted_memory_parts(profile: Profile) -> dict[str, int]:
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


def _rank_bars(profile: Profile) -> Html:
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
        rows.append([f"rank {rank.rank}{slow}", bar, format_duration(rank.step_s)])
    used = {part for part in STEP_PARTS if profile.parts[part] > 0}
    table = Table(rows=rows, text_columns={1}, wide_column=1, style="width:100%")
    return join([table.html, legend(STEP_COLORS, used)])
