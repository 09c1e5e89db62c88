"""Predicted against measured: one rank's figures of a real step beside the plan's; pure.

A rank measures its third optimizer step (`Measured`); `check` puts the model of memory beside
it, part by part. Parts that a running step does not tell apart (gathered parameters,
activations, logits, temporaries) are one line.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from html import escape
from typing import TYPE_CHECKING, Any, Literal, Self

from nbdist.display.units import gib
from nbdist.planner import memory_model, optimizers
from nbdist.planner.memory.timeline import Moment
from nbdist.planner.memory_calibration import Calibration, Learned
from nbdist.planner.model_spec import Workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbdist.planner.memory_model import Setup
    from nbdist.planner.model_spec import ModelSpec
    from nbdist.planner.optimizers import Optimizer
    from nbdist.strategies import Options

PERSISTENT = ("parameters", "master", "optimizer", "buffers")
"""Parts that rest between two steps, so that any moment shows them."""
TOLD_APART = (*PERSISTENT, "gradients")
"""Parts that a rank finds by what they belong to, where it sees every operation."""
_WORTH_SAYING = 0.01
"""Of all tensors: a smaller part needs no word."""
BESIDE = "other models"
"""What lives on the rank beside the model that is checked; seen, not predicted."""
REST = "activations and temporaries"
"""All other parts of a step."""
CPU_RANK = "CPU rank"
"""Name of the device that a CPU rank is, as `devices` has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rank held in its third optimizer step. Sizes are in bytes."""

    kind: Literal["cuda", "cpu"]
    step: int
    """Optimizer steps done at the end of the measurement."""
    batch_size: int
    """Samples of the micro-batch."""
    seq_len: int
    """Tokens of each."""
    accumulate: int
    optimizer: Mapping[str, Any]
    """Class name ("class") and defaults that change its memory."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """At the peak; on a GPU what rests between two steps. What is not told apart is "other"."""
    allocated_bytes: int | None = None
    """Peak of tensors; None on CPU ranks under torch.compile, whose operations are unseen."""
    active_bytes: int | None = None
    reserved_bytes: int | None = None
    """Peak of what the CUDA allocator held."""
    device_bytes: int | None = None
    """Of the device, by this rank: with context and communicator."""
    device_total_bytes: int | None = None
    device_name: str = CPU_RANK
    rss_bytes: int = 0
    """Peak of the process's resident memory."""
    rss_before_bytes: int = 0
    """The same before the model was prepared."""
    compiled: bool = False
    beside_bytes: int = 0
    """Of other models and their optimizers, on the rank's device."""

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        """Rebuild from a rank's message."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in plain.items() if name in known})

    @property
    def names(self) -> tuple[str, ...]:
        """Parts that this measurement tells apart at the peak."""
        return PERSISTENT if self.kind == "cuda" else TOLD_APART

    def told_apart(self) -> dict[str, int]:
        """Parts at the peak, all that is not told apart as one; empty where it was not seen."""
        if self.allocated_bytes is None:
            return {}
        known = {name: self.parts.get(name, 0) for name in self.names}
        known |= {BESIDE: self.beside_bytes} if self.beside_bytes else {}
        return known | {REST: self.allocated_bytes - sum(known.values())}


@dataclass(frozen=True, slots=True)
class Line:
    """One part: predicted and measured bytes."""

    part: str
    predicted: int | None
    measured: int | None

    @property
    def error(self) -> float | None:
        """Relative error: 0.01 is one percent too many; None where a figure is missing."""
        if self.predicted is None or not self.measured:
            return None
        return (self.predicted - self.measured) / self.measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The plan of a prepared model beside what its fullest rank measured."""

    title: str
    """Model, options, ranks and micro-batch in a line."""
    rank: int
    moment: str
    """When the prediction has its peak."""
    lines: tuple[Line, ...]
    allocated: Line
    """All tensors."""
    device: Line
    """The device on a GPU; on a CPU rank its process's resident memory, which untouched
    buffers do not add to, so that nothing is predicted for it."""
    measured: Mapping[int, Measured]
    """By rank."""
    outputs: int = 0
    """Of the prediction: logits that live on in a cell's variable (`out = model(**batch)`)."""
    runs: int = 0
    """Sessions from which the step from tensors to the device was learned."""

    @property
    def error(self) -> float | None:
        """Relative error of the predicted peak of tensors; 0.01 is one percent too many."""
        return self.allocated.error

    def __str__(self) -> str:
        """A table for a terminal."""
        rows = [(row.part, *_cells(row)) for row in (*self.lines, self.allocated, self.device)]
        head = ("", "predicted", "measured", "error")
        table = [f"  {part:<32}{a:>12}{b:>12}  {c}" for part, a, b, c in (head, *rows)]
        return "\n".join([self.title, *(line.rstrip() for line in table), f"  {self.note}"])

    __repr__ = __str__

    @property
    def note(self) -> str:
        """When and where, in a sentence."""
        step = next(iter(self.measured.values())).step
        several = len(self.measured) > 1
        kept = self.outputs > _WORTH_SAYING * (self.allocated.predicted or 0)
        logits = (
            f"; {_size(self.outputs)} of it are the model's output, which a cell that keeps the"
            " loss alone lets go"
        )
        beside = self.measured[self.rank].beside_bytes
        others = (
            f"; {_size(beside)} are held by other models on this rank, which are counted on both"
            " sides: delete them to have that memory"
        )
        return (
            f"rank {self.rank}{', the fullest,' if several else ''} in step {step}; predicted peak:"
            f" {self.moment}{logits if kept else ''}{others if beside else ''}"
        )

    def _repr_html_(self) -> str:
        """The same as a table."""
        rows = [
            f"<tr><td>{escape(row.part)}</td>"
            + "".join(f"<td style='text-align:right'>{escape(cell)}</td>" for cell in _cells(row))
            + "</tr>"
            for row in (*self.lines, self.allocated, self.device)
        ]
        head = "<tr><th></th><th>predicted</th><th>measured</th><th>error</th></tr>"
        return (
            f"<div><b>{escape(self.title)}</b></div><table>{head}{''.join(rows)}</table>"
            f"<div>{escape(self.note)}</div>"
        )


def check(
    model: ModelSpec, options: Options, measured: Mapping[int, Measured], *, nodes: int = 1
) -> Check:
    """Predict what the ranks have measured, and put both side by side.

    Args:
        model: of the prepared model.
        options: of the session, checked.
        measured: by rank; at least one.
        nodes: machines that the ranks are on.
    """
    rank = max(measured, key=lambda one: measured[one].allocated_bytes or measured[one].rss_bytes)
    found = measured[rank]
    setup = setup_of(options, len(measured), found, nodes=nodes)
    moment = predicted(model, setup, found)
    parts = together(moment.parts, found.names)
    seen = found.told_apart()
    if seen and found.beside_bytes:  # without it the sums would be of different things
        parts[BESIDE] = found.beside_bytes
    expected = sum(parts.values())
    names = [name for name in (*found.names, BESIDE, REST) if parts.get(name) or seen.get(name)]
    calibration = Learned().known(
        found.device_name,
        options.backend,
        options.offload_device,
        kind=found.kind,
        world_size=len(measured),
    )
    return Check(
        title=(
            f"{model.name}, {options.describe()}, {len(measured)} ranks, micro-batch"
            f" {found.batch_size} x {found.seq_len} ({model.depth})"
        ),
        rank=rank,
        moment=moment.name,
        lines=tuple(Line(name, parts.get(name, 0), seen.get(name)) for name in names),
        allocated=Line("all tensors", expected, found.allocated_bytes),
        device=_device_line(found, calibration, expected),
        measured=dict(measured),
        outputs=model.micro_batch(workload_of(setup, found)).outputs,
        runs=calibration.runs,
    )


def predicted(model: ModelSpec, setup: Setup, found: Measured) -> Moment:
    """The peak of a rank's tensors; CPU ranks hold what is offloaded in the same memory."""
    moments = memory_model.moments(model, workload_of(setup, found), setup)
    if found.kind == "cpu":
        moments = map(_with_host, moments)
    return max(moments, key=lambda moment: moment.total)


def setup_of(options: Options, world_size: int, found: Measured, *, nodes: int = 1) -> Setup:
    """How the measured model is trained."""
    return memory_model.Setup(
        options=replace(options, accumulate=found.accumulate),
        world_size=world_size,
        optimizer=optimizer_of(found.optimizer, found.kind),
        kind=found.kind,
        nodes=nodes,
    )


def workload_of(setup: Setup, found: Measured) -> Workload:
    """The measured micro-batch."""
    return Workload(
        batch_size=found.batch_size,
        seq_len=found.seq_len,
        compute=memory_model.compute_of(setup),
        activation_checkpointing=setup.options.activation_checkpointing,
        kind=found.kind,
    )


def optimizer_of(described: Mapping[str, Any], kind: Literal["cuda", "cpu"]) -> Optimizer:
    """The planner's optimizer for a described one; AdamW where there is none.

    Raises:
        PlanError: a class that the planner does not know.
    """
    return optimizers.of_torch(described.get("class", "AdamW"), described, kind)


def together(parts: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    """The named parts, and all others as one."""
    known = {name: parts.get(name, 0) for name in names}
    return known | {REST: sum(parts.values()) - sum(known.values())}


def _with_host(moment: Moment) -> Moment:
    """A moment with the host's parts among its own."""
    names: Iterable[str] = dict.fromkeys((*moment.parts, *moment.host))
    parts = {name: moment.parts.get(name, 0) + moment.host.get(name, 0) for name in names}
    return Moment(name=moment.name, parts=parts)


def _device_line(found: Measured, calibration: Calibration, allocated: int) -> Line:
    """Bytes beyond tensors."""
    if found.kind == "cpu":
        return Line("resident memory", None, found.rss_bytes)
    return Line("the device", calibration.device_bytes(allocated), found.device_bytes)


def _cells(line: Line) -> tuple[str, str, str]:
    """Predicted, measured and error, in words."""
    share = "" if line.error is None else f"{line.error:+.1%}"
    return _size(line.predicted), _size(line.measured), share


def _size(size: int | None) -> str:
    """Bytes for a table; small models are told in MiB."""
    if size is None:
        return "-"
    return gib(size, unit=True) if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
