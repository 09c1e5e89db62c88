"""Measurements of one rank over a window of steps, sent to the kernel as JSON.

Durations are seconds per optimizer step, averaged over the window, unless noted otherwise.
Timestamps are Unix seconds. Ranks of one machine share the clock, so their timestamps are
comparable.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

if TYPE_CHECKING:
    from collections.abc import Mapping

StepPart = Literal[
    "data",
    "copies",
    "forward",
    "backward",
    "optimizer",
    "communication",
    "waiting",
    "offload",
    "python",
    "idle",
]

STEP_PARTS: tuple[StepPart, ...] = get_args(StepPart)
"""Parts of a step. Each moment belongs to exactly one.

data            the main thread waits for the next batch of a DataLoader
copies          exposed copies of batches to the device
forward         computation in the forward of the model and in the loss
backward        computation in the backward
optimizer       computation in the optimizer step, including gradient clipping
communication   exposed collectives, after all ranks have entered them
waiting         time in a collective until the last rank enters it; 0 until ranks are compared
offload         exposed transfers of engine state between device, host and NVMe
python          code of the cell, and of libraries outside of the above
idle            the main thread (on a GPU: the device) is idle, because it sleeps or because
                kernels are launched too slowly
"""

WindowEndReason = Literal["steps", "stable", "time", "cell"]
"""Reason for the end of a window: requested or maximum number of steps reached, step times that
differ by less than 3 %, maximum duration, or end of the cell."""


@dataclass(slots=True, kw_only=True)
class CollectiveStats:
    """All collectives of one kind in a step."""

    name: str
    """Name in torch.distributed: all_reduce, all_gather, reduce_scatter, broadcast, ..."""
    count: float
    bytes: int
    """Size of the full tensors: the output of all_gather, the input of reduce_scatter."""
    seconds: float
    """Time from start to end on this rank."""
    exposed_s: float
    """Part of `seconds` without overlapping computation. Includes waiting for other ranks."""
    waiting_s: float = 0.0
    """Part of `exposed_s` before the last rank entered the collective."""

    @property
    def bandwidth(self) -> float:
        """Bytes of full tensors per second, without waiting; 0 if unknown."""
        moving = self.seconds - self.waiting_s
        return self.bytes / moving if moving > 0 else 0.0


@dataclass(slots=True, kw_only=True)
class LineProfile:
    """Measurements of one line of a cell."""

    cell: str
    """Name of the cell, such as "In[3]"."""
    line: int
    source: str
    seconds: float = 0.0
    """Time per step that the main thread spent on the line."""
    bytes: int = 0
    """Memory allocated on the line that is in use at the peak."""


@dataclass(slots=True, kw_only=True)
class DataLoaderStats:
    """Measurements of a DataLoader that the loop iterated over."""

    num_workers: int
    pin_memory: bool
    batch_size: int | None
    sharded: bool
    """Whether ranks get different samples."""
    batches: float
    """Batches per step."""
    fetch_s: float
    """Time to load one batch without prefetching; 0 if unknown."""
    fetch_cpu_s: float = 0.0
    """CPU time of the main thread in `fetch_s`. The rest is waiting, for example for a disk."""


@dataclass(slots=True, kw_only=True)
class OperatorStats:
    """Row of the operator table of torch.profiler."""

    name: str
    count: float
    seconds: float
    """Self time, on the CPU or on the device."""


@dataclass(slots=True, kw_only=True)
class PeakMemory:
    """Tensor memory at the peak of a step, by category."""

    parts: dict[str, int]
    """parameters, gradients, optimizer, activations, buffers, other -> bytes."""
    lines: list[LineProfile]
    """Lines of the user's cells that allocated most of it."""
    device_bytes: int | None = None
    """Peak memory of the device, or resident memory on CPU ranks."""
    snapshot: str = ""
    """Snapshot file for the PyTorch memory visualizer; GPUs only."""


@dataclass(slots=True, kw_only=True)
class ProfiledModel:
    """The prepared model and its workload."""

    backend: str
    params: int
    units: int
    """Number of FSDP units, which are gathered at once; 0 for other backends."""
    largest_unit: int
    """Parameters of the largest unit."""
    training: bool
    precision: str
    optimizer: str
    samples: int
    """Samples in a micro-batch of this rank."""
    seq_len: int
    accumulate: int


@dataclass(slots=True, kw_only=True)
class RankProfile:
    """All measurements of one rank."""

    rank: int
    kind: Literal["cuda", "cpu"]
    device: str
    ends: list[float]
    """Timestamps of the ends of steps, preceded by the start of the window: steps + 1 values."""
    parts: dict[str, float]
    """``StepPart`` -> seconds. The sum is the mean step time."""
    traffic: list[CollectiveStats] = field(default_factory=list)
    hidden_s: float = 0.0
    """Communication that overlaps with computation."""
    begins: dict[str, list[list[float]]] = field(default_factory=dict)
    """Process group -> its collectives in order, used to compare ranks. Each is a list: start
    timestamp, exposed seconds, total seconds, then start and end of each exposed span relative to
    the start timestamp."""
    lines: list[LineProfile] = field(default_factory=list)
    """Lines on which the main thread spent most time, outside of forward and backward."""
    loaders: list[DataLoaderStats] = field(default_factory=list)
    operators: list[OperatorStats] = field(default_factory=list)
    memory: PeakMemory | None = None
    model: ProfiledModel | None = None
    ended: WindowEndReason = "steps"
    trace: str = ""
    """Path of the trace file of this rank."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what could not be measured."""

    @property
    def steps(self) -> list[float]:
        """Duration of each step in seconds."""
        return [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]

    @property
    def step_s(self) -> float:
        """Mean step time in seconds."""
        return (self.ends[-1] - self.ends[0]) / max(1, len(self.ends) - 1)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        """Create from the result of `to_json`. Unknown keys are ignored.

        Raises:
            ValueError: if a number is infinite or NaN, which the panel cannot show.
        """
        json.dumps(plain, allow_nan=False)
        known = {item.name for item in fields(cls)}
        profile = cls(**{name: value for name, value in plain.items() if name in known})
        profile.traffic = [CollectiveStats(**item) for item in plain.get("traffic", [])]
        profile.lines = [LineProfile(**item) for item in plain.get("lines", [])]
        profile.loaders = [DataLoaderStats(**item) for item in plain.get("loaders", [])]
        profile.operators = [OperatorStats(**item) for item in plain.get("operators", [])]
        if memory := plain.get("memory"):
            lines = [LineProfile(**item) for item in memory["lines"]]
            profile.memory = PeakMemory(**{**memory, "lines": lines})
        if model := plain.get("model"):
            profile.model = ProfiledModel(**model)
        return profile
