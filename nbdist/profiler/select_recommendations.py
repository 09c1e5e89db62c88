"""Selection of the recommendations of a profile: at most three, largest speedup first.

A change is recommended only if it shortens a bottleneck or the computation itself. Changes of the
cell are here, changes of the options in ``option_recommendations``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nbdist.number_formatting import format_duration, format_source_line
from nbdist.profiler import option_recommendations
from nbdist.profiler.advice import MIN_GAIN, Advice, Speedup, speedup_without
from nbdist.profiler.dataloader_call import loader_code
from nbdist.profiler.profile_data import STEP_PART_LABELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.profiler.bottleneck import Bottleneck
    from nbdist.profiler.profile_data import ProfileData
    from nbdist.profiler.what_if import CalibratedPlanner

MAX_RECOMMENDATIONS = 3
_MIN_EXPOSED_LOAD_SHARE = 0.1
"""Share of the load time that workers cannot hide: transfer between processes, and the first
batches of an epoch."""
_UNEVEN = 1.2
"""Factor for workers that finish unevenly and compete with the rank for cores."""
_MAX_WORKERS = 8
_PINNED = 0.5
"""Time of a copy from pinned memory, relative to pageable memory."""
_TRAINS = re.compile(r"\b(?:step|backward|model)\(")
"""Matches a line that is required in every step."""


def best_recommendations(
    profile: ProfileData, bottlenecks: Sequence[Bottleneck], planner: CalibratedPlanner | None
) -> list[Advice]:
    """Return at most three recommendations, largest speedup first."""
    candidates: list[Advice] = []
    for bottleneck in bottlenecks:
        match bottleneck.kind:
            case "input" if "copies" in bottleneck.parts:
                candidates += _pin_memory(profile)
            case "input":
                candidates += _more_workers(profile)
            case "straggler":
                candidates += _check_straggler(profile, bottleneck)
            case "host":
                candidates += _run_line_less_often(profile, bottleneck)
    kinds = {bottleneck.kind for bottleneck in bottlenecks}
    engine = profile.setting.options.strategy.engine
    if engine == "fsdp":
        candidates += option_recommendations.recommend_fsdp_config(profile, planner, kinds)
    elif engine == "deepspeed":
        candidates += option_recommendations.recommend_zero_config(profile)
    if planner is not None:
        candidates += option_recommendations.recommend_options(profile, planner, kinds)
    memories = [rank.memory for rank in profile.ranks if rank.memory]
    peak = max((sum(memory.parts.values()) for memory in memories), default=0)
    # FSDP units remove the cause of a bottleneck, so they are kept even if they only save memory.
    causes = [
        advice
        for advice in candidates
        if "largest_unit" in advice.change
        and (advice.is_worthwhile or advice.saves_bytes > MIN_GAIN * peak)
    ]
    others = sorted(
        (advice for advice in candidates if advice.is_worthwhile and advice not in causes),
        key=lambda advice: -advice.gain.faster,
    )
    shown = [*causes, *others[: MAX_RECOMMENDATIONS - len(causes)]]
    return sorted(shown, key=lambda advice: -advice.gain.faster)


def _pin_memory(profile: ProfileData) -> Iterator[Advice]:
    loader = profile.loader
    if profile.kind == "cuda" and loader is not None and not loader.pin_memory:
        yield Advice(
            title="pin_memory=True",
            why="Copies from pinned memory take about half as long.",
            line=loader_code(profile.loader_text, pin_memory=True),
            gain=speedup_without(profile, _PINNED * profile.parts["copies"]),
            change={"pin_memory": True},
        )


def _more_workers(profile: ProfileData) -> Iterator[Advice]:
    """Recommend the number of DataLoader workers, if more are faster.

    W workers load W batches in the time of one. With n batches of f seconds per step, and R for
    the rest of the step, the step waits max(0, n f / W - R). On CPU ranks, workers that compute
    take cores from the ranks.
    """
    loader, cluster = profile.loader, profile.setting.cluster
    if loader is None:
        return
    step, data = profile.step_s, profile.data_s
    if loader.fetch_s > 0:
        fetch = loader.fetch_s * max(1.0, loader.batches)
    elif loader.num_workers == 0:
        fetch = data
    else:
        fetch = step * loader.num_workers  # the step is limited by the workers
    cores = float(_MAX_WORKERS)
    if cluster.num_cpus is not None:
        cores = cluster.num_cpus * cluster.num_nodes / len(cluster.devices)
    computing = loader.fetch_cpu_s * loader.batches
    # Workers that compute need cores; those that wait for a disk or a network do not.
    max_workers = max(_MAX_WORKERS, 2 * loader.num_workers)
    if computing > loader.fetch_s * loader.batches / 2:
        max_workers = max(1, int(min(_MAX_WORKERS, cores)))
    shared = computing / cores if profile.kind == "cpu" else 0.0

    options: list[tuple[int, Speedup]] = []
    rest = max(0.0, step - data)
    count = min(max_workers, 2 * max(1, loader.num_workers))
    while loader.num_workers < count <= max_workers:
        left = max(0.0, _UNEVEN * fetch / count - rest) + _MIN_EXPOSED_LOAD_SHARE * fetch / count
        left = min(data, max(left, shared))
        options.append((count, Speedup.from_times(profile.kind, step, rest + left, data - left)))
        count *= 2
    best = max((gain.faster for _, gain in options), default=0.0)
    if best <= 0:
        return
    sufficient = option_recommendations.NEARLY_BEST * best
    count, gain = next(option for option in options if option[1].faster >= sufficient)

    source = profile.loader_text
    current = f"{loader.num_workers} workers" if loader.num_workers else "the main thread"
    reason = (
        f"Batches are loaded by {current}, and each step waits {format_duration(data)} for them."
        f" {count} workers load them while the ranks compute"
        f"{f' ({source.cell}, line {source.line})' if source else ''}."
    )
    if cluster.num_cpus and count > cluster.num_cpus and loader.fetch_s:  # torch warns of it
        reason += (
            f" They wait more than they compute, so {count} workers are fine on"
            f" {cluster.num_cpus} cores."
        )
    if profile.reader:
        reason += (
            " An IterableDataset must shard its samples among the workers"
            " (torch.utils.data.get_worker_info)."
        )
    yield Advice(
        title=f"num_workers={count}",
        why=reason,
        line=loader_code(source, num_workers=count, persistent_workers=True),
        gain=gain,
        change={"num_workers": count},
    )


def _check_straggler(profile: ProfileData, bottleneck: Bottleneck) -> Iterator[Advice]:
    slow = profile.straggler_details
    if slow is None:
        return
    others = {
        (line.cell, line.line): line.seconds
        for rank in profile.ranks
        if rank.rank != slow.rank
        for line in rank.lines
    }
    here = "check what else runs on its device, and whether its batches are larger"
    for line in next(rank for rank in profile.ranks if rank.rank == slow.rank).lines:
        if line.seconds - others.get((line.cell, line.line), 0.0) >= slow.lost_s / 2:
            here = f"{line.cell}, line {line.line}: {format_source_line(line.source)}"
            break
    yield Advice(
        title=f"rank {slow.rank} as fast as the others",
        why=(
            f"Its steps take {format_duration(slow.lost_s)} longer, mostly in"
            f" {STEP_PART_LABELS[slow.slowest_part]}; {here}."
        ),
        line="%nbdist doctor",
        gain=speedup_without(profile, min(slow.lost_s, bottleneck.step_share * profile.step_s)),
    )


def _run_line_less_often(profile: ProfileData, bottleneck: Bottleneck) -> Iterator[Advice]:
    line = bottleneck.line
    if line is None:
        return
    where = f"{line.cell}, line {line.line}"
    why = (
        f"`{format_source_line(line.source)}` takes {format_duration(line.seconds)} of every step."
    )
    change = (
        "move the slow part to a separate line and profile again"
        if _TRAINS.search(line.source)
        else "do this less often or outside of the loop; the workers of a DataLoader can prepare"
        " batches"
    )
    for remark in profile.remarks:
        if (remark.kind, remark.cell, remark.line) == ("sync", line.cell, line.line):
            why, change = remark.reason, remark.change
    yield Advice(
        title=where,
        why=why,
        # A comment rather than code, since the code around the line is unknown.
        line=f"# {where}: {change}",
        gain=speedup_without(profile, min(line.seconds, bottleneck.step_share * profile.step_s)),
    )
