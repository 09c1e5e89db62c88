"""The tables of a profile: step parts per rank, collectives, source lines, memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.display.profile_units import format_duration, format_percent, format_source_line
from nbdist.display.units import format_bytes
from nbdist.profiler.measurements import STEP_PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.profiler.analysis import ProfileAnalysis
    from nbdist.profiler.measurements import CollectiveStats, PeakMemory, RankProfile

_MAX_RANKS = 8
"""Maximum number of ranks in a table."""
_MAX_LINES = 5
_MIN_SHARE = 0.001
"""Share of a step: a part that is shorter on all ranks is omitted."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of formatted cells."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: frozenset[int] = frozenset({0})
    """Indices of the columns that hold text instead of numbers."""
    note: str = ""


def profile_tables(profile: ProfileAnalysis) -> list[TextTable]:
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


def step_parts_table(profile: ProfileAnalysis) -> TextTable:
    """Return the share and duration of each step part, one column per rank."""
    ranks = shown_ranks(profile)
    rows = [
        (name, *(_share(rank.parts.get(name, 0.0), rank.step_s) for rank in ranks))
        for name in STEP_PARTS
        if any(rank.parts.get(name, 0.0) > _MIN_SHARE * rank.step_s for rank in ranks)
    ]
    rows.append(("step", *(format_duration(rank.step_s) for rank in ranks)))
    hidden = len(profile.ranks) - len(ranks)
    return TextTable(
        header=("part of a step", *(f"rank {rank.rank}" for rank in ranks)),
        rows=tuple(rows),
        note=f"and {hidden} more ranks: profile.ranks" if hidden > 0 else "",
    )


def _share(seconds: float, step: float) -> str:
    return f"{format_percent(seconds / step if step > 0 else 0.0)}  {format_duration(seconds):>7}"


def collectives_table(profile: ProfileAnalysis) -> TextTable:
    """Return each kind of collective, per step and averaged over the ranks."""
    rows = tuple(_collective(traffic) for traffic in profile.traffic)
    head = (
        "collective",
        "per step",
        "size",
        "bandwidth",
        "exposed",
        "of which waiting",
        "overlapped",
    )
    return TextTable(header=head, rows=rows)


def _collective(stats: CollectiveStats) -> tuple[str, ...]:
    return (
        stats.name,
        f"{stats.count:g}",
        format_bytes(stats.bytes),
        f"{format_bytes(stats.bandwidth)}/s" if stats.bandwidth else "-",
        format_duration(stats.exposed_s),
        format_duration(stats.waiting_s),
        format_duration(max(0.0, stats.seconds - stats.exposed_s)),
    )


def source_lines_table(profile: ProfileAnalysis) -> TextTable:
    """Return the slowest source lines outside of the model, on the slowest or the first rank."""
    slow = next(
        (rank for rank in profile.ranks if rank.rank == profile.straggler), profile.ranks[0]
    )
    longest = sorted(slow.lines, key=lambda line: -line.seconds)[:_MAX_LINES]
    rows = tuple(
        (f"{line.cell}, line {line.line}", format_duration(line.seconds), format_source_line(line))
        for line in longest
        if line.seconds > _MIN_SHARE * slow.step_s
    )
    return TextTable(
        header=(f"slowest lines, rank {slow.rank}", "per step", ""), rows=rows, text_columns=_ENDS
    )


_ENDS = frozenset({0, 2})


def memory_table(profile: ProfileAnalysis) -> TextTable:
    """Return the memory parts at the peak of the fullest rank, measured and predicted."""
    fullest_rank = peak_memory_rank(profile)
    if fullest_rank is None:
        return TextTable(header=(), rows=())
    rank, peak = fullest_rank
    predicted = predicted_memory_parts(profile)
    rows: list[tuple[str, ...]] = [
        (name, format_bytes(peak.parts.get(name, 0)), _predicted(predicted, name))
        for name in dict.fromkeys((*peak.parts, *predicted))
        if peak.parts.get(name) or predicted.get(name)
    ]
    total = format_bytes(sum(predicted.values())) if predicted else "-"
    rows.append(("all tensors", format_bytes(sum(peak.parts.values())), total))
    rows += _whole(profile, peak)
    rows += [
        (f"{line.cell}, line {line.line}: {format_source_line(line)}", format_bytes(line.bytes), "")
        for line in sorted(peak.lines, key=lambda line: -line.bytes)[:_MAX_LINES]
        if line.bytes > 0
    ]
    return TextTable(
        header=(f"memory peak, rank {rank}", "measured", "predicted"), rows=tuple(rows)
    )


def _whole(profile: ProfileAnalysis, peak: PeakMemory) -> Iterator[tuple[str, ...]]:
    if peak.device_bytes is None:
        return
    if profile.kind == "cpu":
        yield ("resident memory", format_bytes(peak.device_bytes), "-")
    else:
        row = profile.predicted
        yield (
            "whole device",
            format_bytes(peak.device_bytes),
            format_bytes(row.device_bytes) if row else "-",
        )


def peak_memory_rank(profile: ProfileAnalysis) -> tuple[int, PeakMemory] | None:
    """Return the rank with the highest memory peak, and its measurement."""
    peaks = [(rank.rank, rank.memory) for rank in profile.ranks if rank.memory]
    return max(peaks, key=lambda pair: sum(pair[1].parts.values()), default=None)


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
    for part, bytes_ in items:
        sums[_CATEGORY_BY_PART.get(part, part)] += bytes_
    del sums[""]
    return dict(sums)


def _predicted(predicted: Mapping[str, int], name: str) -> str:
    return format_bytes(predicted.get(name, 0)) if predicted else "-"
