"""What one rank has measured in its window of steps; pure, and plain JSON on the wire.

Times are seconds of one optimizer step, as a mean over the window, unless said otherwise.
Moments are unix seconds: ranks of one machine share the clock, so moments of different ranks
compare.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

if TYPE_CHECKING:
    from collections.abc import Mapping

Part = Literal[
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

PARTS: tuple[Part, ...] = get_args(Part)
"""Every moment of a step belongs to exactly one.

data            the main thread waits for the next batch of a DataLoader
copies          batches on their way to the device, that nothing hides
forward         computing in the model's forward and the loss
backward        computing in the backward
optimizer       computing in the optimizer's step, gradient clipping included
communication   collectives that no computing hides, once all ranks are there
waiting         in a collective for a rank that came later; 0 until ranks are compared
offload         the engine moves state between device, host and NVMe, and nothing hides it
python          the cell's own code, and the libraries' outside of the above
idle            the main thread (on a GPU: the device) had nothing to do: asleep, or launches
                come too slowly
"""

Ended = Literal["steps", "stable", "time", "cell"]
"""What ended a window: the steps that were asked for, or the most of them; step times that differ
by less than 3 %, its longest time, or the end of the cell."""


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Collectives of one kind in a step."""

    name: str
    """As torch.distributed calls it: all_reduce, all_gather, reduce_scatter, broadcast, ..."""
    count: float
    bytes: int
    """Of the full tensors: of all_gather's output, reduce_scatter's input."""
    seconds: float
    """From the first rank's begin to the end, on this rank."""
    exposed_s: float
    """Of these, no computing ran beside it; waiting for later ranks included until they are
    compared."""
    waiting_s: float = 0.0
    """Of the exposed: another rank was not there yet."""

    @property
    def bandwidth(self) -> float:
        """Bytes of full tensors a second, while all ranks were there; 0 where unknown."""
        moving = self.seconds - self.waiting_s
        return self.bytes / moving if moving > 0 else 0.0


@dataclass(slots=True, kw_only=True)
class Line:
    """A line of a cell, with what the profile found on it."""

    cell: str
    """"In[3]"."""
    line: int
    source: str
    seconds: float = 0.0
    """Of a step, the main thread was on it."""
    bytes: int = 0
    """Allocated on it and alive at the moment of the peak."""


@dataclass(slots=True, kw_only=True)
class Loader:
    """A prepared DataLoader that the loop took batches from."""

    num_workers: int
    pin_memory: bool
    batch_size: int | None
    sharded: bool
    """Ranks get different samples."""
    batches: float
    """Taken in a step."""
    fetch_s: float
    """That one batch takes to make where nothing is fetched ahead; 0 where it is not known."""
    fetch_cpu_s: float = 0.0
    """Of these, the main thread computed; the rest it waited, as for a disk."""


@dataclass(slots=True, kw_only=True)
class Operator:
    """An operator of torch, as torch.profiler's own table has it."""

    name: str
    count: float
    seconds: float
    """Self time, on the CPU or on the device."""


@dataclass(slots=True, kw_only=True)
class Memory:
    """The peak of a step's tensors, told apart."""

    parts: dict[str, int]
    """parameters, gradients, optimizer, activations, buffers, other -> bytes."""
    lines: list[Line]
    """Of the user's cells, those that allocated the most of it."""
    device_bytes: int | None = None
    """Peak of the device, or of resident memory on CPU ranks."""
    snapshot: str = ""
    """File for PyTorch's memory viewer; GPUs only."""


@dataclass(slots=True, kw_only=True)
class Model:
    """What the engine made of the model."""

    backend: str
    params: int
    units: int
    """What FSDP gathers at once: 1 where the model is one unit; 0 for engines without units."""
    largest_unit: int
    """Parameters of the largest."""
    training: bool
    precision: str
    optimizer: str
    samples: int
    """Of a micro-batch of this rank."""
    seq_len: int
    accumulate: int


@dataclass(slots=True, kw_only=True)
class RankFigures:
    """One rank's window."""

    rank: int
    kind: Literal["cuda", "cpu"]
    device: str
    ends: list[float]
    """Moments at which steps ended; the first one began the window, so one more than steps."""
    parts: dict[str, float]
    """`Part` -> seconds; sums up to the mean step."""
    traffic: list[Traffic] = field(default_factory=list)
    hidden_s: float = 0.0
    """Communication beside computing."""
    begins: dict[str, list[list[float]]] = field(default_factory=dict)
    """Collectives in their order by process group, which ranks are compared by: [begin, exposed
    seconds, whole seconds, and of each exposed span its begin and end after the first] of each."""
    lines: list[Line] = field(default_factory=list)
    """Those on which the main thread was the longest, outside of passes through the model."""
    loaders: list[Loader] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    memory: Memory | None = None
    model: Model | None = None
    ended: Ended = "steps"
    trace: str = ""
    """File of this rank's trace."""
    notes: list[str] = field(default_factory=list)
    """What could not be measured, a sentence each."""

    @property
    def steps(self) -> list[float]:
        """Seconds of each step."""
        return [then - now for now, then in zip(self.ends, self.ends[1:], strict=False)]

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return (self.ends[-1] - self.ends[0]) / max(1, len(self.ends) - 1)

    def to_json(self) -> dict[str, Any]:
        """Return the fields for a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        known = {one.name for one in fields(cls)}
        made = cls(**{name: value for name, value in plain.items() if name in known})
        made.traffic = [Traffic(**one) for one in plain.get("traffic", [])]
        made.lines = [Line(**one) for one in plain.get("lines", [])]
        made.loaders = [Loader(**one) for one in plain.get("loaders", [])]
        made.operators = [Operator(**one) for one in plain.get("operators", [])]
        if memory := plain.get("memory"):
            lines = [Line(**one) for one in memory["lines"]]
            made.memory = Memory(**{**memory, "lines": lines})
        if model := plain.get("model"):
            made.model = Model(**model)
        return made
