"""What a step is bound by, in one sentence; pure.

Each cause has a threshold, with its reason beside it. A cause under its threshold is not
blamed: a wrong blame costs a user more than a missing one. Where a rank makes the others wait,
the others' figures are judged, for its own loss is told once already.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nbdist.display.profile_units import percent, source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.profiler.measurements import Line, Part, RankFigures
    from nbdist.profiler.report import Profile

Kind = Literal["straggler", "input", "communication", "offload", "optimizer", "host", "memory"]

# Control runs of tests/planted.py, a Llama of 3 M parameters on two CPU ranks: data and Python
# under 2 % of the step, communication 1 to 6 %, optimizer 9 to 12 %. The thresholds leave room for
# smaller models and batches, where these weigh more and nothing is wrong; how much is estimated.
_WAITED_FOR_DATA = 0.12
"""Cheap to mend, so the lowest of those that every loop has."""
_COPIED = 0.12
"""The same."""
_COMMUNICATED = 0.25
"""Some of it is never hidden, a tenth at the best (see plan.cost)."""
_GATHERED = 0.15
"""Enough for a change to be weighed, though not for a blame, where parameters are gathered in
every micro-batch: small units of FSDP took 20 % on CPU ranks, where accumulation gained 36 %."""
_ONE_UNIT = 0.10
"""Less is enough where the wrapping itself says why nothing hides it."""
_WHOLE = 0.8
"""Of the parameters: a unit that has so many leaves nothing to gather while it is gathered."""
_HIDDEN = 0.5
"""Of all communication; where more is hidden, more units would not hide much more."""
_OFFLOADED = 0.10
"""The lowest of all, for an option alone puts the optimizer there; 14 % in the planted run."""
_OPTIMIZED = 0.30
"""A third of a small model's step at a small batch is usual, and only a larger batch helps."""
_HOST = 0.20
"""Python and scheduling of small models, and the profile's own part of it."""
_ONE_LINE = 0.12
"""Less than _HOST is enough where one line of the cell explains it."""
_ON_THE_LINE = 1.2
"""A line that takes so many times the Python of a step is of another part, as `backward()`."""
_HALF = 0.5
_ELEMENTWISE = 0.6
"""Of the device's computing; transformers at a fair size have 20 to 40 %."""
_WELL_USED = 0.35
"""An MFU from which on elementwise kernels do not keep the device from its work."""
_COMPUTING: tuple[Part, ...] = ("forward", "backward")
_MATRICES = re.compile(r"mm\b|gemm|nvjet|conv|attention|linear|flash|matmul|wgmma", re.IGNORECASE)
"""Operators and kernels that multiply matrices."""
_NOTHING_GAINS = "; none of the known changes gains 5 %"
_LINKS = {"nvlink": "NVLink", "pcie": "PCIe", "cpu": "the loopback"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """One cause that costs more than it should."""

    kind: Kind
    share: float
    """Of the step."""
    parts: tuple[Part, ...]
    """What it is made of; advice must make one of them shorter."""
    sentence: str
    line: Line | None = None
    """Of the cell, where one explains it."""


def blamed(profile: Profile) -> list[Blame]:
    """All causes above their thresholds, gravest first."""
    causes = (_straggler, _input, _copies, _communication, _optimizer, _host, _elementwise)
    found = [blame for cause in causes for blame in cause(profile)]
    return sorted(found, key=lambda blame: -blame.share)


def bound(profile: Profile) -> str:
    """The gravest cause in a word; without any "compute", or "mixed" where that is no half."""
    if profile.blamed:
        return profile.blamed[0].kind
    return "compute" if profile.share(*_COMPUTING) >= _HALF else "mixed"


def sentence(profile: Profile) -> str:
    """The verdict."""
    if profile.blamed:
        first = profile.blamed[0]
        known = first.kind == "input" or (first.kind == "optimizer" and profile.planner)
        alone = known and not profile.advice
        return f"{first.sentence}{_NOTHING_GAINS if alone else ''}"
    computing = profile.share(*_COMPUTING)
    if computing < _HALF:
        largest = sorted(profile.parts.items(), key=lambda item: -item[1])[:3]
        words = ", ".join(f"{part} {percent(profile.share(part))}" for part, _ in largest)
        return f"no single bottleneck: {words}"
    if profile.advice:
        return f"compute-bound: {percent(computing)} of the step is forward and backward"
    if gathers_much(profile):
        share = percent(usual(profile, "communication"))
        return f"compute-bound, but {share} of the step is communication{_NOTHING_GAINS}"
    return "compute-bound, nothing cheap to gain"


def usual(profile: Profile, *parts: Part) -> float:
    """Share of parts in the step, in the mean of the ranks that nobody waits for."""
    return _share([one for one in profile.ranks if one.rank != profile.straggler], *parts)


def _share(ranks: Sequence[RankFigures], *parts: Part) -> float:
    step = statistics.fmean(one.step_s for one in ranks)
    spent = statistics.fmean(sum(one.parts.get(part, 0.0) for part in parts) for one in ranks)
    return spent / step if step > 0 else 0.0


# ------------------------------------------------------------------------------- causes


def _straggler(profile: Profile) -> Iterator[Blame]:
    slow = profile.slowest
    if slow is None:
        return
    who = "the others wait" if len(profile.ranks) > 2 else "the other waits"  # noqa: PLR2004
    yield Blame(
        kind="straggler",
        share=slow.waited,
        parts=("waiting",),
        sentence=(
            f"rank {slow.rank} is {percent(slow.slower)} slower: {who} {percent(slow.waited)} of"
            f" the step; it loses the time in {slow.where}"
        ),
    )


def _input(profile: Profile) -> Iterator[Blame]:
    loader, reader = profile.loader, profile.reader
    share = _share([reader], "data") if reader else usual(profile, "data")
    if share < _WAITED_FOR_DATA:
        return
    workers = f" (num_workers={loader.num_workers})" if loader else ""
    whose = f", which rank {reader.rank} reads for all" if reader else ""
    yield Blame(
        kind="input",
        share=share,
        parts=("data",),
        sentence=(
            f"input-bound: {percent(share)} of the step waits for the next batch{workers}{whose}"
        ),
    )


def _copies(profile: Profile) -> Iterator[Blame]:
    share = usual(profile, "copies")
    if share < _COPIED:
        return
    yield Blame(
        kind="input",
        share=share,
        parts=("copies",),
        sentence=f"input-bound: {percent(share)} of the step copies batches to the device",
    )


def _communication(profile: Profile) -> Iterator[Blame]:
    share = usual(profile, "communication")
    one_unit = unhidden_unit(profile)
    if share < (_ONE_UNIT if one_unit else _COMMUNICATED):
        return
    exposed = max(profile.traffic, key=lambda one: one.exposed_s - one.waiting_s, default=None)
    name = exposed.name if exposed else "other ranks"
    link = profile.setting.cluster.link
    where = _unit_words(profile) if one_unit else _LINKS.get(link, link)
    yield Blame(
        kind="communication",
        share=share,
        parts=("communication",),
        sentence=(f"communication-bound: {percent(share)} of the step waits for {name}; {where}"),
    )


def gathers_much(profile: Profile) -> bool:
    """Whether an engine that gathers parameters spends more of the step on it than it need."""
    gathers = any(one.name == "all_gather" and one.count > 1 for one in profile.traffic)
    return gathers and usual(profile, "communication") >= _GATHERED


def _unit_words(profile: Profile) -> str:
    model = profile.model
    which = (
        "the model is one FSDP unit"
        if model is None or model.units == 1
        else f"one FSDP unit has {percent(model.largest_unit / model.params)} of the model"
    )
    return f"{which}, so nothing is gathered ahead"


def unhidden_unit(profile: Profile) -> bool:
    """Whether FSDP gathers the whole model at once, and computing hides little of it."""
    model = profile.model
    if model is None or not model.units or model.largest_unit < _WHOLE * model.params:
        return False
    exposed = profile.parts["communication"]
    return profile.hidden_s < _HIDDEN * (profile.hidden_s + exposed)


def _optimizer(profile: Profile) -> Iterator[Blame]:
    offload = profile.setting.options.offload_device
    if offload != "none":
        share = usual(profile, "optimizer", "offload")
        if share >= _OFFLOADED:
            yield Blame(
                kind="offload",
                share=share,
                parts=("optimizer", "offload"),
                sentence=(
                    f"optimizer-bound (offloaded): {percent(share)} of the step is the optimizer"
                    f" on the CPU and what moves to and from {_PLACES[offload]}"
                ),
            )
        return
    share = usual(profile, "optimizer")
    if share >= _OPTIMIZED:
        yield Blame(
            kind="optimizer",
            share=share,
            parts=("optimizer",),
            sentence=f"optimizer-bound: {percent(share)} of the step is the optimizer's own",
        )


_PLACES = {"cpu": "host memory", "nvme": "NVMe"}


def _host(profile: Profile) -> Iterator[Blame]:
    share = usual(profile, "python", "idle")
    line = costly_line(profile)
    one_line = line is not None and line.seconds >= _ONE_LINE * profile.step_s
    if share < (_ONE_LINE if one_line else _HOST):
        return
    sleeping = usual(profile, "idle") > share / 2
    what = "nothing to compute" if sleeping else "the cell's own Python"
    at = f"; most of it at {line.cell}, line {line.line}: {source(line)}" if line else ""
    yield Blame(
        kind="host",
        share=share,
        parts=("python", "idle"),
        sentence=f"host-bound: {percent(share)} of the step is {what}{at}",
        line=line,
    )


def costly_line(profile: Profile) -> Line | None:
    """The line of the cell that most of the Python or idle time is on; None where none is."""
    ranks = [one for one in profile.ranks if one.rank != profile.straggler]
    lost = profile.step_s * usual(profile, "python", "idle")
    lines = [line for line in ranks[0].lines if line.seconds <= _ON_THE_LINE * lost]
    longest = max(lines, key=lambda line: line.seconds, default=None)
    return longest if longest and longest.seconds >= lost / 2 else None


def _elementwise(profile: Profile) -> Iterator[Blame]:
    """A GPU that waits for its own memory, not the user's."""
    mfu = profile.mfu
    computing = usual(profile, *_COMPUTING)
    if mfu is None or mfu >= _WELL_USED or computing < _HALF or profile.setting.options.compile:
        return
    operators = profile.ranks[0].operators
    total = sum(one.seconds for one in operators)
    products = sum(one.seconds for one in operators if _MATRICES.search(one.name))
    if total <= 0 or 1 - products / total < _ELEMENTWISE:
        return
    share = computing * (1 - products / total)
    yield Blame(
        kind="memory",
        share=share,
        parts=_COMPUTING,
        sentence=(
            f"memory-bound: {percent(share)} of the step is elementwise kernels, which wait for"
            " the device's memory"
        ),
    )
