"""Bottlenecks of a training step and the verdict, a summary in one sentence.

Each bottleneck has a threshold, documented below. A cause under its threshold is not reported:
a false report costs a user more than a missing one. If there is a straggler, all other
bottlenecks are computed from the other ranks, so that its slowness is not reported twice.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nbdist.number_formatting import format_percent, format_source_line
from nbdist.profiler.profile_data import STEP_PART_LABELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.profiler.advice import Advice
    from nbdist.profiler.measurements import LineProfile, RankProfile, StepPart
    from nbdist.profiler.profile_data import ProfileData

BottleneckKind = Literal[
    "straggler", "input", "communication", "offload", "optimizer", "host", "memory"
]

# All thresholds are shares of the step unless noted. Control runs of tests/bottleneck_loops.py (a
# Llama with 3 M parameters on two CPU ranks) had data and Python under 2 %, communication 1 to 6 %,
# optimizer 9 to 12 %. The thresholds leave an estimated margin for smaller models and batches,
# where these shares are larger without anything being wrong.
_DATA_SHARE = 0.12
"""Waiting for data. Easy to fix, so the lowest threshold of the parts that every loop has."""
_COPY_SHARE = 0.12
"""Copies of batches to the device."""
_COMMUNICATION_SHARE = 0.25
"""Exposed communication. Some of it, at best a tenth, cannot be hidden (see
``planner.step_time``)."""
_GATHER_SHARE = 0.15
"""Communication from which changes are evaluated, without a reported bottleneck, if parameters
are gathered in every micro-batch. Small FSDP units took 20 % on CPU ranks, where gradient
accumulation gained 36 %."""
_SINGLE_UNIT_SHARE = 0.10
"""Exposed communication if the model is wrapped as one FSDP unit, which explains it."""
_WHOLE_MODEL_SHARE = 0.8
"""Share of the parameters from which a unit counts as the whole model: nothing is left to
prefetch."""
_HIDDEN_SHARE = 0.5
"""Share of the communication. If more is hidden already, more units would not hide much more."""
_OFFLOAD_SHARE = 0.10
"""Offloaded optimizer. The lowest threshold, since only an option puts it there. The planted
run has 24 %."""
_OPTIMIZER_SHARE = 0.30
"""Optimizer. A third of the step is usual for a small model and batch, and only a larger batch
reduces it."""
_HOST_SHARE = 0.20
"""Python and idle time. Leaves a margin for the overhead of small models and of the profiler."""
_LINE_SHARE = 0.12
"""Like `_HOST_SHARE`, if one line of the cell explains it."""
_MAX_LINE_RATIO = 1.2
"""A line that takes more than so many times the Python and idle time is part of another phase,
such as `backward()`."""
HALF = 0.5
_ELEMENTWISE_SHARE = 0.6
"""Share of elementwise kernels in the device time. Transformers of usual size have 20 to 40 %."""
_HIGH_MFU = 0.35
"""MFU from which elementwise kernels are not considered a bottleneck."""
COMPUTING: tuple[StepPart, ...] = ("forward", "backward")
_MATRIX_KERNELS = re.compile(
    r"mm\b|gemm|nvjet|conv|attention|linear|flash|matmul|wgmma", re.IGNORECASE
)
"""Names of operators and kernels that multiply matrices."""
_NO_GAIN_TEXT = "; none of the known changes gains 5 %"
_LINK_NAMES = {"nvlink": "NVLink", "pcie": "PCIe", "cpu": "the loopback"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """A bottleneck above its threshold."""

    kind: BottleneckKind
    step_share: float
    parts: tuple[StepPart, ...]
    """Parts of the step it consists of. Advice must shorten one of them."""
    sentence: str
    line: LineProfile | None = None
    """Line of the cell that explains it, if there is one."""


def find_bottlenecks(profile: ProfileData, mfu: float | None) -> list[Bottleneck]:
    """Return all bottlenecks above their thresholds, largest share first."""
    causes = (_straggler, _input, _copies, _communication, _optimizer, _host)
    found = [blame for cause in causes for blame in cause(profile)]
    found += _elementwise(profile, mfu)
    return sorted(found, key=lambda blame: -blame.step_share)


def bottleneck_summary(
    profile: ProfileData,
    bottlenecks: Sequence[Bottleneck],
    advice: Sequence[Advice],
    *,
    planned: bool,
) -> str:
    """Return the verdict, a summary in one sentence."""
    if bottlenecks:
        first = bottlenecks[0]
        known = first.kind == "input" or (first.kind == "optimizer" and planned)
        alone = known and not advice
        return f"{first.sentence}{_NO_GAIN_TEXT if alone else ''}"
    computing = profile.share(*COMPUTING)
    if computing < HALF:
        largest = sorted(profile.parts.items(), key=lambda item: -item[1])[:3]
        words = ", ".join(f"{part} {format_percent(profile.share(part))}" for part, _ in largest)
        return f"no single bottleneck: {words}"
    if advice:
        return f"compute-bound: {format_percent(computing)} of the step is forward and backward"
    if is_gather_bound(profile):
        share = format_percent(typical_share(profile, "communication"))
        return f"compute-bound, but {share} of the step is communication{_NO_GAIN_TEXT}"
    return "compute-bound, nothing cheap to gain"


def typical_share(profile: ProfileData, *parts: StepPart) -> float:
    """Return the share of parts in the step, averaged over all ranks except the straggler."""
    return _share([rank for rank in profile.ranks if rank.rank != profile.straggler], *parts)


def _share(ranks: Sequence[RankProfile], *parts: StepPart) -> float:
    step = statistics.fmean(rank.step_s for rank in ranks)
    part_s = statistics.fmean(sum(rank.parts.get(part, 0.0) for part in parts) for rank in ranks)
    return part_s / step if step > 0 else 0.0


# ------------------------------------------------------------------------------- causes


def _straggler(profile: ProfileData) -> Iterator[Bottleneck]:
    slow = profile.straggler_details
    if slow is None:
        return
    waiting_text = "the others wait" if len(profile.ranks) > 2 else "the other rank waits"  # noqa: PLR2004
    yield Bottleneck(
        kind="straggler",
        step_share=slow.wait_share,
        parts=("waiting",),
        sentence=(
            f"rank {slow.rank} is {format_percent(slow.slowdown)} slower: {waiting_text}"
            f" {format_percent(slow.wait_share)} of the step; most of the extra time is in"
            f" {STEP_PART_LABELS[slow.slowest_part]}"
        ),
    )


def _input(profile: ProfileData) -> Iterator[Bottleneck]:
    loader, reader = profile.loader, profile.reader
    share = _share([reader], "data") if reader else typical_share(profile, "data")
    if share < _DATA_SHARE:
        return
    workers = f" (num_workers={loader.num_workers})" if loader else ""
    reader_text = f", which rank {reader.rank} reads for all ranks" if reader else ""
    yield Bottleneck(
        kind="input",
        step_share=share,
        parts=("data",),
        sentence=(
            f"input-bound: {format_percent(share)} of the step waits for the next"
            f" batch{workers}{reader_text}"
        ),
    )


def _copies(profile: ProfileData) -> Iterator[Bottleneck]:
    share = typical_share(profile, "copies")
    if share < _COPY_SHARE:
        return
    yield Bottleneck(
        kind="input",
        step_share=share,
        parts=("copies",),
        sentence=f"input-bound: {format_percent(share)} of the step copies batches to the device",
    )


def _communication(profile: ProfileData) -> Iterator[Bottleneck]:
    share = typical_share(profile, "communication")
    one_unit = is_single_unit_exposed(profile)
    if share < (_SINGLE_UNIT_SHARE if one_unit else _COMMUNICATION_SHARE):
        return
    exposed = max(profile.traffic, key=lambda kind: kind.exposed_s - kind.waiting_s, default=None)
    name = exposed.name if exposed else "other ranks"
    link, model = profile.setting.cluster.link, profile.model
    where = _LINK_NAMES.get(link, link)
    if one_unit:
        where = "the model is one FSDP unit, so nothing is prefetched"
        if model is not None and model.units > 1:
            largest = format_percent(model.largest_unit / model.params)
            where = f"one FSDP unit has {largest} of the model, so nothing is prefetched"
    yield Bottleneck(
        kind="communication",
        step_share=share,
        parts=("communication",),
        sentence=(
            f"communication-bound: {format_percent(share)} of the step waits for {name}; {where}"
        ),
    )


def is_gather_bound(profile: ProfileData) -> bool:
    """Return whether the backend gathers parameters repeatedly and spends much of a step on it."""
    gathers = any(kind.name == "all_gather" and kind.count > 1 for kind in profile.traffic)
    return gathers and typical_share(profile, "communication") >= _GATHER_SHARE


def is_single_unit_exposed(profile: ProfileData) -> bool:
    """Return whether FSDP gathers the whole model at once with little overlap."""
    model = profile.model
    if model is None or not model.units or model.largest_unit < _WHOLE_MODEL_SHARE * model.params:
        return False
    exposed = profile.parts["communication"]
    return profile.hidden_s < _HIDDEN_SHARE * (profile.hidden_s + exposed)


def _optimizer(profile: ProfileData) -> Iterator[Bottleneck]:
    offload = profile.setting.options.offload_device
    if offload != "none":
        share = typical_share(profile, "optimizer", "offload")
        if share >= _OFFLOAD_SHARE:
            yield Bottleneck(
                kind="offload",
                step_share=share,
                parts=("optimizer", "offload"),
                sentence=(
                    f"optimizer-bound (offloaded): {format_percent(share)} of the step is the"
                    " optimizer on the CPU and transfers to and from"
                    f" {'NVMe' if offload == 'nvme' else 'host memory'}"
                ),
            )
        return
    share = typical_share(profile, "optimizer")
    if share >= _OPTIMIZER_SHARE:
        yield Bottleneck(
            kind="optimizer",
            step_share=share,
            parts=("optimizer",),
            sentence=f"optimizer-bound: {format_percent(share)} of the step is the optimizer",
        )


def _host(profile: ProfileData) -> Iterator[Bottleneck]:
    share = typical_share(profile, "python", "idle")
    # The line of the cell that takes most of the Python and idle time, if there is one.
    ranks = [rank for rank in profile.ranks if rank.rank != profile.straggler]
    lost = profile.step_s * share
    lines = [line for line in ranks[0].lines if line.seconds <= _MAX_LINE_RATIO * lost]
    line = max(lines, key=lambda line: line.seconds, default=None)
    line = line if line and line.seconds >= lost / 2 else None
    one_line = line is not None and line.seconds >= _LINE_SHARE * profile.step_s
    if share < (_LINE_SHARE if one_line else _HOST_SHARE):
        return
    sleeping = typical_share(profile, "idle") > share / 2
    what = "idle time" if sleeping else "Python code of the cell"
    at = ""
    if line:
        source = format_source_line(line.source)
        at = f"; most of it at {line.cell}, line {line.line}: {source}"
    yield Bottleneck(
        kind="host",
        step_share=share,
        parts=("python", "idle"),
        sentence=f"host-bound: {format_percent(share)} of the step is {what}{at}",
        line=line,
    )


def _elementwise(profile: ProfileData, mfu: float | None) -> Iterator[Bottleneck]:
    computing = typical_share(profile, *COMPUTING)
    if mfu is None or mfu >= _HIGH_MFU or computing < HALF or profile.setting.options.is_compiled:
        return
    operators = profile.ranks[0].operators
    total = sum(operator.seconds for operator in operators)
    products = sum(item.seconds for item in operators if _MATRIX_KERNELS.search(item.name))
    if total <= 0 or 1 - products / total < _ELEMENTWISE_SHARE:
        return
    share = computing * (1 - products / total)
    yield Bottleneck(
        kind="memory",
        step_share=share,
        parts=COMPUTING,
        sentence=(
            f"memory-bound: {format_percent(share)} of the step is elementwise kernels, which are"
            " limited by the memory bandwidth of the device"
        ),
    )
