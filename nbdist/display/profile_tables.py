"""The tables of a profile: parts by rank, collectives, lines, memory; pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbdist.display.profile_units import percent, source, time
from nbdist.display.units import size
from nbdist.profiler.measurements import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.profiler.measurements import Memory, RankFigures, Traffic
    from nbdist.profiler.report import Profile

_MOST_RANKS = 8
"""That a table shows."""
_MOST_LINES = 5
_TOLD = 0.001
"""Of a step: a part that is shorter on all ranks is left out."""


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: frozenset[int] = frozenset({0})
    """Columns that are no numbers."""
    note: str = ""


def of(profile: Profile) -> list[Table]:
    """All tables that have something to say."""
    made = (parts(profile), collectives(profile), lines(profile), memory(profile))
    return [one for one in made if one.rows]


def shown(profile: Profile) -> list[RankFigures]:
    """The ranks to show: the first ones, the straggler among them."""
    first = list(profile.ranks[:_MOST_RANKS])
    slow = [one for one in profile.ranks[_MOST_RANKS:] if one.rank == profile.straggler]
    return [*first[: _MOST_RANKS - len(slow)], *slow]


def parts(profile: Profile) -> Table:
    """Shares and times of each part, a column for each rank."""
    ranks = shown(profile)
    rows = [
        (name, *(_share(one.parts.get(name, 0.0), one.step_s) for one in ranks))
        for name in PARTS
        if any(one.parts.get(name, 0.0) > _TOLD * one.step_s for one in ranks)
    ]
    rows.append(("step", *(time(one.step_s) for one in ranks)))
    hidden = len(profile.ranks) - len(ranks)
    return Table(
        head=("part of a step", *(f"rank {one.rank}" for one in ranks)),
        rows=tuple(rows),
        note=f"and {hidden} more ranks: profile.ranks" if hidden > 0 else "",
    )


def _share(seconds: float, step: float) -> str:
    return f"{percent(seconds / step if step > 0 else 0.0)}  {time(seconds):>7}"


def collectives(profile: Profile) -> Table:
    """Each kind of collective in a step, in the mean of the ranks."""
    rows = tuple(_collective(one) for one in profile.traffic)
    head = ("collective", "a step", "size", "bandwidth", "exposed", "of it waiting", "hidden")
    return Table(head=head, rows=rows)


def _collective(one: Traffic) -> tuple[str, ...]:
    return (
        one.name,
        f"{one.count:g}",
        size(one.bytes),
        f"{size(one.bandwidth)}/s" if one.bandwidth else "-",
        time(one.exposed_s),
        time(one.waiting_s),
        time(max(0.0, one.seconds - one.exposed_s)),
    )


def lines(profile: Profile) -> Table:
    """Where the main thread was outside of the model, on the slowest or the first rank."""
    slow = next((one for one in profile.ranks if one.rank == profile.straggler), profile.ranks[0])
    longest = sorted(slow.lines, key=lambda line: -line.seconds)[:_MOST_LINES]
    rows = tuple(
        (f"{line.cell}, line {line.line}", time(line.seconds), source(line))
        for line in longest
        if line.seconds > _TOLD * slow.step_s
    )
    return Table(head=(f"slowest lines, rank {slow.rank}", "a step", ""), rows=rows, words=_ENDS)


_ENDS = frozenset({0, 2})


def memory(profile: Profile) -> Table:
    """Tensors at the peak of the fullest rank beside the prediction, and who allocated them."""
    found = fullest(profile)
    if found is None:
        return Table(head=(), rows=())
    rank, peak = found
    predicted = expected(profile)
    rows: list[tuple[str, ...]] = [
        (name, size(peak.parts.get(name, 0)), _predicted(predicted, name))
        for name in dict.fromkeys((*peak.parts, *predicted))
        if peak.parts.get(name) or predicted.get(name)
    ]
    total = size(sum(predicted.values())) if predicted else "-"
    rows.append(("all tensors", size(sum(peak.parts.values())), total))
    rows += _whole(profile, peak)
    rows += [
        (f"{line.cell}, line {line.line}: {source(line)}", size(line.bytes), "")
        for line in sorted(peak.lines, key=lambda line: -line.bytes)[:_MOST_LINES]
        if line.bytes > 0
    ]
    return Table(head=(f"peak of memory, rank {rank}", "measured", "predicted"), rows=tuple(rows))


def _whole(profile: Profile, peak: Memory) -> Iterator[tuple[str, ...]]:
    if peak.device_bytes is None:
        return
    if profile.kind == "cpu":
        yield ("resident memory", size(peak.device_bytes), "-")
    else:
        row = profile.predicted
        yield ("the device", size(peak.device_bytes), size(row.device_bytes) if row else "-")


def fullest(profile: Profile) -> tuple[int, Memory] | None:
    """The rank with the highest peak."""
    found = [(one.rank, one.memory) for one in profile.ranks if one.memory]
    return max(found, key=lambda pair: sum(pair[1].parts.values()), default=None)


_TOGETHER: Mapping[str, str] = {
    "master": "optimizer",
    "gathered": "parameters",
    "logits": "activations",
    "temporaries": "other",
    "context": "",
    "margin": "",
}
"""The planner's part -> the category that a rank measures it in; "" for what is no tensor."""


def expected(profile: Profile) -> dict[str, int]:
    """The planner's peak in the categories of the measurement; empty where it is not known.

    CPU ranks measure what is offloaded too: it is in the same memory.
    """
    row = profile.predicted
    if row is None:
        return {}
    held = [*row.memory.items(), *(row.host.items() if profile.kind == "cpu" else ())]
    sums: Counter[str] = Counter()
    for part, bytes_ in held:
        sums[_TOGETHER.get(part, part)] += bytes_
    del sums[""]
    return dict(sums)


def _predicted(predicted: Mapping[str, int], name: str) -> str:
    return size(predicted.get(name, 0)) if predicted else "-"
