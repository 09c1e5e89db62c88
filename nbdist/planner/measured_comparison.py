"""Compares a plan with the memory that ranks measured in a real step; pure.

Each rank measures its third optimizer step (`MeasuredMemory`); `compare_plan_with_measurements`
compares it with the memory model, part by part. Parts that a running step cannot separate (gathered
parameters, activations, logits, temporaries) form one line.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from nbdist.display import Table, element, join
from nbdist.number_formatting import format_bytes
from nbdist.planner import memory, optimizers
from nbdist.planner.measurement_store import MeasurementStore, device_overhead
from nbdist.planner.memory.timeline import TrainingSetup, sum_parts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.memory.timeline import MemoryUsage
    from nbdist.planner.model_spec import ModelSpec
    from nbdist.strategies import Options

PERSISTENT_PARTS = ("parameters", "master", "optimizer", "buffers")
"""Parts that exist between steps, so they can be measured at any time."""
DISTINCT_PARTS = (*PERSISTENT_PARTS, "gradients")
"""Parts that a CPU rank can separate, since it sees every operation."""
_MIN_SHARE = 0.01
"""Fraction of all tensors below which a part is not mentioned."""
OTHER_MODELS_PART = "other models"
"""Memory of other models on the rank; measured, not predicted."""
REMAINING_PART = "activations and temporaries"
"""All other parts of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """Memory of one rank in its third optimizer step. Sizes are in bytes."""

    kind: Literal["cuda", "cpu"]
    step: int
    """Number of optimizer steps at the end of the measurement."""
    batch_size: int
    """Samples per micro-batch."""
    seq_len: int
    """Tokens per sample."""
    accumulate: int
    optimizer: Mapping[str, Any]
    """Class name ("class") and the defaults that affect its memory."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Parts at the peak; on a GPU those between two steps. The rest is "other"."""
    allocated_bytes: int | None = None
    """Peak of all tensors; None on CPU ranks under torch.compile, which hides operations."""
    reserved_bytes: int | None = None
    """Peak of the memory reserved by the CUDA allocator."""
    device_bytes: int | None = None
    """Device memory used by this rank, including context and communicator."""
    device_name: str = "CPU rank"
    rss_bytes: int = 0
    """Peak resident memory of the process."""
    rss_before_bytes: int = 0
    """Peak resident memory before the model was prepared."""
    keep_outputs: bool = True
    """Whether the loop held the model's output from one step to the next."""
    beside_bytes: int = 0
    """Memory of other models and their optimizers on the rank's device."""

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Self:
        """Restore from a rank's message."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in plain.items() if name in known})

    @property
    def distinct_part_names(self) -> tuple[str, ...]:
        """Parts that this measurement separates at the peak."""
        return PERSISTENT_PARTS if self.kind == "cuda" else DISTINCT_PARTS

    def distinct_parts(self) -> dict[str, int]:
        """Return the parts at the peak, the rest as one part; empty if it was not measured."""
        if self.allocated_bytes is None:
            return {}
        known = {name: self.parts.get(name, 0) for name in self.distinct_part_names}
        known |= {OTHER_MODELS_PART: self.beside_bytes} if self.beside_bytes else {}
        return known | {REMAINING_PART: self.allocated_bytes - sum(known.values())}


@dataclass(frozen=True, slots=True)
class PartComparison:
    """Predicted and measured bytes of one part."""

    part: str
    predicted_bytes: int | None
    measured_bytes: int | None

    @property
    def relative_error(self) -> float | None:
        """Relative error, 0.01 for one percent too many; None if a figure is missing."""
        if self.predicted_bytes is None or not self.measured_bytes:
            return None
        return (self.predicted_bytes - self.measured_bytes) / self.measured_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredComparison:
    """The plan of a prepared model compared with its fullest rank's measurement."""

    title: str
    """Model, options, ranks and micro-batch in one line."""
    rank: int
    peak_moment: str
    """When the predicted peak occurs."""
    lines: tuple[PartComparison, ...]
    allocated: PartComparison
    """All tensors."""
    device: PartComparison
    """The GPU, or the resident memory of a CPU rank. The latter is not predicted, since untouched
    buffers do not count as resident."""
    measured_by_rank: Mapping[int, MeasuredMemory]
    """Measurements by rank."""
    output_bytes: int = 0
    """Predicted bytes of logits that a cell's variable keeps alive (`out = model(**batch)`)."""
    unplanned_note: str = ""
    """Settings of the engine's config that the prediction ignores."""

    def __str__(self) -> str:
        table = [f"  {line}" for line in self._table.text.splitlines()]
        return "\n".join([self.title, *table, f"  {self.note}"])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        title = element("div", element("b", self.title))
        return str(join([title, self._table.html, element("div", self.note)]))

    @property
    def _table(self) -> Table:
        rows = []
        for line in (*self.lines, self.allocated, self.device):
            error = "" if line.relative_error is None else f"{line.relative_error:+z.1%}"
            sizes = map(format_bytes, (line.predicted_bytes, line.measured_bytes))
            rows.append([line.part, *sizes, error])
        return Table(header=["", "predicted", "measured", "error"], rows=rows)

    @property
    def note(self) -> str:
        """Rank, step and predicted peak in one sentence."""
        step = next(iter(self.measured_by_rank.values())).step
        several = len(self.measured_by_rank) > 1
        has_output = self.output_bytes > _MIN_SHARE * (self.allocated.predicted_bytes or 0)
        logits = (
            f"; {format_bytes(self.output_bytes)} of it is the model's output, which is freed if"
            " the cell keeps only the loss"
        )
        extra = self.measured_by_rank[self.rank].beside_bytes
        others = (
            f"; {format_bytes(extra)} are held by other models on this rank and counted on both"
            " sides: delete them to free that memory"
        )
        return (
            f"rank {self.rank}{', the fullest,' if several else ''} in step {step}; predicted peak:"
            f" {self.peak_moment}{logits if has_output else ''}{others if extra else ''}"
            f"{self.unplanned_note and f'; {self.unplanned_note}'}"
        )


def compare_plan_with_measurements(
    model: ModelSpec, options: Options, measured: Mapping[int, MeasuredMemory], *, nodes: int = 1
) -> MeasuredComparison:
    """Predict what the ranks measured and compare both.

    Args:
        model: spec of the prepared model.
        options: validated options of the session.
        measured: measurements by rank; at least one.
        nodes: number of nodes.
    """
    rank = max(
        measured, key=lambda rank: measured[rank].allocated_bytes or measured[rank].rss_bytes
    )
    fullest = measured[rank]
    moment, output_bytes = predict_peak(model, options, len(measured), fullest, nodes=nodes)
    parts = {name: moment.parts.get(name, 0) for name in fullest.distinct_part_names}
    parts[REMAINING_PART] = sum(moment.parts.values()) - sum(parts.values())
    measured_parts = fullest.distinct_parts()
    if measured_parts and fullest.beside_bytes:  # otherwise the sums would not be comparable
        parts[OTHER_MODELS_PART] = fullest.beside_bytes
    expected = sum(parts.values())
    names = [
        name
        for name in (*fullest.distinct_part_names, OTHER_MODELS_PART, REMAINING_PART)
        if parts.get(name) or measured_parts.get(name)
    ]
    overhead = device_overhead(
        MeasurementStore(),
        fullest.device_name,
        options.backend,
        options.offload_device,
        kind=fullest.kind,
        world_size=len(measured),
    )
    device = PartComparison("resident memory", None, fullest.rss_bytes)
    if fullest.kind == "cuda":
        predicted = overhead.device_bytes(expected, moment.idle_pool_bytes)
        device = PartComparison("the device", predicted, fullest.device_bytes)
    return MeasuredComparison(
        title=(
            f"{model.name}, {options.describe()}, {len(measured)} ranks, micro-batch"
            f" {fullest.batch_size} x {fullest.seq_len} ({model.depth})"
        ),
        rank=rank,
        peak_moment=moment.name,
        lines=tuple(
            PartComparison(name, parts.get(name, 0), measured_parts.get(name)) for name in names
        ),
        allocated=PartComparison("all tensors", expected, fullest.allocated_bytes),
        device=device,
        measured_by_rank=dict(measured),
        output_bytes=output_bytes,
        unplanned_note=options.unplanned_note,
    )


def predict_peak(
    model: ModelSpec, options: Options, world_size: int, found: MeasuredMemory, *, nodes: int = 1
) -> tuple[MemoryUsage, int]:
    """Predict the peak of a rank's tensors, and the bytes of the output that the cell keeps.

    On CPU ranks offloaded parts are in the same memory.
    """
    setup = TrainingSetup(
        options=replace(options, accumulate=found.accumulate),
        world_size=world_size,
        optimizer=optimizers.optimizer_from_torch(found.optimizer, found.kind),
        kind=found.kind,
        num_nodes=nodes,
    )
    workload = setup.workload(
        model, found.batch_size, found.seq_len, keep_outputs=found.keep_outputs
    )
    moments = memory.step_memory_usage(model, workload, setup)
    if found.kind == "cpu":
        moments = (
            moment._replace(parts=sum_parts((moment.parts, moment.host_parts)), host_parts={})
            for moment in moments
        )
    peak = max(moments, key=lambda moment: moment.device_bytes)
    return peak, model.micro_batch_activations(workload).output_bytes
