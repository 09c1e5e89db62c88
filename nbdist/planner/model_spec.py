"""The planner's view of a model: groups of parameters, and the bytes of one micro-batch.

Pure arithmetic. A `ModelSpec` is made by `models.analytic` (formulas for known architectures) or
`models.traced` (a trace of any module). The timelines in `memory` take its activations for a
micro-batch and add the engine's own memory.

Sizes are in bytes, parameters in elements. T = batch_size * seq_len tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

if TYPE_CHECKING:
    from collections.abc import Iterable

ComputeMode = Literal["full", "half", "half_shards", "autocast", "half_autocast"]
"""Compute mode of an engine.

full: in the parameters' own data type, without casts (precision "no").
half: parameters are bf16 or fp16 when used, without autocast (DeepSpeed).
half_shards: as half; outside its module's forward a parameter is a shard in fp32 (FSDP2).
autocast: fp32 parameters under torch.autocast, outputs cast back to fp32 (DDP).
half_autocast: both (FSDP1 through accelerate 1.15, which also casts outputs to fp32).
"""

COMPUTE_MODES: tuple[ComputeMode, ...] = get_args(ComputeMode)
HALF_MODES = frozenset({"half", "half_shards", "half_autocast"})
AUTOCAST_MODES = frozenset({"autocast", "half_autocast"})

FrozenSaves = Literal["nothing", "linear", "all"]
"""linear: ZeRO-3's own linear layer; all: FSDP1, whose parameters are views of a trainable one."""

LayerRole = Literal["embedding", "block", "tail", "root"]
"""tail: final norm and head. root: parameters outside all other groups, used throughout."""

StepPhase = Literal["before", "forward", "loss", "backward", "after"]
"""Phase of a group in a micro-batch. before: its forward has not begun; after: its backward has
ended and its input gradient exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One micro-batch on one rank, and how it is computed."""

    batch_size: int = 1
    seq_len: int = 2048
    compute: ComputeMode = "half"
    activation_checkpointing: bool = False
    kind: Literal["cuda", "cpu"] = "cuda"
    """Device whose autocast rules apply: a GPU returns layer norms and softmax in fp32."""
    frozen_saves: FrozenSaves = "nothing"
    """Layers that save their input although their weight is frozen."""
    keep_outputs: bool = True
    """True if a variable of the cell holds the model's output until the next one exists."""

    @property
    def num_tokens(self) -> int:
        """T: tokens per micro-batch."""
        return self.batch_size * self.seq_len


class WeightShape(NamedTuple):
    """Shape of a parameter."""

    rows: int
    """FSDP2 shards by rows."""
    num_elements: int
    trainable: bool = True
    is_bias: bool = False
    """True for the bias of the layer that has the weight before it."""
    num_calls_before: int = 0
    """Modules without parameters that are called before this parameter's module."""
    is_scalar: bool = False
    """True for a parameter of no dimension."""

    @property
    def is_vector(self) -> bool:
        """True for a bias, or the weight of a norm."""
        return self.rows == self.num_elements

    def shard(self, ranks: int) -> WeightShape:
        """Return the first rank's shard, which is padded to equal shards."""
        rows = -(-self.rows // ranks)
        return self._replace(rows=rows, num_elements=rows * (self.num_elements // self.rows))


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Parameters that are used together, `count` times with equal shapes."""

    name: str
    """Display name: "embedding", "block", "encoder block", "tail"."""
    role: LayerRole
    count: int = 1
    tensors: tuple[WeightShape, ...] = ()
    """Each parameter of one instance that is not quantized, in the module's order."""
    quantized: int = 0
    """Frozen parameters of one instance that are stored in 4 or 8 bits, in elements."""
    quantized_bytes: int = 0
    """Their bytes with all scales; only ZeRO-3 shards them, and nothing casts them."""
    quantized_tensors: tuple[int, ...] = ()
    """Bytes of each of them, without scales."""
    shards_quantized: bool = False
    """True if they are stored in a floating-point dtype, so that FSDP2 shards them too."""
    num_late_tensors: int = 0
    """How many of the root's `tensors`, the last ones, are used after the last block."""
    ends_with_dropout: bool = False
    """True if the backward needs a saved tensor before that of the last matrix."""
    tied_tensor: int | None = None
    """Index of the root's tensor that is both the embedding's and the head's weight, if any."""

    @cached_property
    def num_params(self) -> int:
        """Parameters of one instance that are not quantized, in elements."""
        return sum(shape.num_elements for shape in self.tensors)

    @cached_property
    def trainable(self) -> int:
        """Trainable parameters of one instance, in elements."""
        return sum(shape.num_elements for shape in self.tensors if shape.trainable)

    @property
    def frozen(self) -> int:
        """Frozen parameters of one instance that are not quantized, in elements."""
        return self.num_params - self.trainable


class BackwardPeakCandidate(NamedTuple):
    """A moment in a group's backward that may be its peak."""

    held_bytes: int
    """Bytes inside the group: remaining saved tensors, recomputed activations, temporaries."""
    num_grads: int
    """Elements of the group's own parameter gradients that exist at that moment."""
    new_grads: int = 0
    """Elements of those that are just made and not yet accumulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivations:
    """Activations of one group in a micro-batch, in bytes."""

    saved_bytes: int
    """Bytes kept from its forward until its backward."""
    kept_bytes: int = 0
    """Further bytes kept from its forward as long as the graph."""
    forward_peaks: tuple[int, ...]
    """Peak bytes inside its forward, including what it has saved: until its second matrix of
    parameters is used, from there to the third, ...; a single value if that is not known."""
    input_bytes: int = 0
    """Bytes at the beginning of its forward besides those saved by earlier groups."""
    backward_moments: tuple[BackwardPeakCandidate, ...]
    """Moments of its backward that no other moment exceeds in both fields."""
    input_grad_bytes: int = 0
    """Bytes of the gradient of the group's input."""
    gradient_moments: tuple[BackwardPeakCandidate, ...] = ()
    """When each of its gradients is complete, in order; empty if that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchActivations:
    """Activations of one micro-batch."""

    layers: tuple[LayerActivations, ...]
    """Activations of one instance of each group of the model, in forward order."""
    loss_bytes: int
    """Peak bytes of the loss and its gradients, in addition to saved tensors and outputs."""
    output_bytes: int
    """Bytes of the model's output (logits) that the cell's variable keeps alive."""
    batch_bytes: int = 0
    """Bytes of the batch, which the cell's variable keeps alive in the optimizer step too; 0 for
    texts."""
    kept_bytes: int = 0
    """Bytes of activations that live as long as the graph: until the loss's variable changes."""


class ModelSpec(Protocol):
    """The planner's view of a model."""

    @property
    def name(self) -> str:
        """Display name in the plan: "llama, 8.03B parameters"."""

    @property
    def depth(self) -> Literal["closed form", "traced"]:
        """Source of the figures."""

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Groups in forward order, which hold all parameters of the model."""

    @property
    def tied(self) -> bool:
        """True if embedding and head share a weight, which is counted in the tail."""

    @property
    def element(self) -> int:
        """Bytes of one parameter as loaded: 4 for fp32, 2 for bf16."""

    @property
    def trainable_element(self) -> int:
        """The same of a trainable parameter: PEFT's adapters are fp32 in a model of any dtype."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user: how the model was read, what was omitted."""

    def micro_batch_activations(self, workload: Workload) -> MicroBatchActivations:
        """Return the activations of one micro-batch.

        Raises:
            PlanError: the spec does not cover the workload (a traced spec covers one sequence
                length, and the compute modes in which the model works).
        """

    def flops(self, workload: Workload) -> float:
        """Return the floating point operations of one micro-batch, forward and backward."""

    def to_json(self) -> dict[str, Any]:
        """Return plain fields, from which `build_model_spec.spec_from_json` restores the spec."""


def with_notes(model: ModelSpec, notes: Iterable[str]) -> ModelSpec:
    """Return the model with additional notes for the user."""
    known: Any = model  # all specs are dataclasses, which a Protocol cannot express
    same: ModelSpec = replace(known, notes=(*model.notes, *notes))
    return same


def num_trainable_params(model: ModelSpec) -> int:
    """Return the number of trainable parameters of a model."""
    return sum(group.count * group.trainable for group in model.groups)


def num_frozen_params(model: ModelSpec) -> int:
    """Return the number of frozen parameters of a model."""
    return sum(group.count * group.frozen for group in model.groups)


def num_quantized_params(model: ModelSpec) -> int:
    """Return the number of quantized parameters of a model."""
    return sum(group.count * group.quantized for group in model.groups)


def num_params(model: ModelSpec) -> int:
    """Return the number of parameters of a model."""
    trained, frozen = num_trainable_params(model), num_frozen_params(model)
    return trained + frozen + num_quantized_params(model)


def quantized_param_bytes(model: ModelSpec) -> int:
    """Return the bytes of the quantized parameters of a model with all scales."""
    return sum(group.count * group.quantized_bytes for group in model.groups)


def has_int8_params(model: ModelSpec) -> bool:
    """Return whether the quantized parameters have 8 bits, and not 4."""
    return quantized_param_bytes(model) > num_quantized_params(model)


class MicroBatchStep(NamedTuple):
    """One step of the walk through a micro-batch, independent of its size."""

    name: str
    """Display name: "backward of block 3"."""
    phase: StepPhase
    group_index: int
    """Index of the current group; for the loss, of the last one."""
    block_index: int = 0
    """Index of the instance in its group."""
    num_grads: int = 0
    """Elements of the group's own gradients that exist at this step."""
    new_grads: int = 0
    """Elements of those that are just made and not yet accumulated."""


VisitedBlocks = tuple[tuple[int, ...], ...]
"""For each group of a model, the indices of the instances that a walk visits."""


def end_blocks(groups: tuple[LayerGroup, ...]) -> VisitedBlocks:
    """Return the first two and the last two instances of each group.

    No peak is missed if an engine's bytes are affine in the index in between.
    """
    return tuple(
        tuple(sorted({0, min(1, group.count - 1), max(0, group.count - 2), group.count - 1}))
        for group in groups
    )


def last_blocks_and(
    groups: tuple[LayerGroup, ...], others: Iterable[tuple[int, int]]
) -> VisitedBlocks:
    """Return the last instance of each group, which has the most activations, and others."""
    indices = [{group.count - 1} for group in groups]
    for number, nth in others:
        indices[number].add(nth)
    return tuple(tuple(sorted(of_group)) for of_group in indices)


def schedule_micro_batch(
    model: ModelSpec, run: MicroBatchActivations, visited: VisitedBlocks
) -> tuple[tuple[MicroBatchStep, ...], list[int], list[int]]:
    """Walk through these blocks of a model in a micro-batch: forward, loss, backward.

    Returns:
        The steps, the same object for all micro-batches with the same moments; and the bytes at
        each without the engine's: activations, saved by earlier groups and inside the current one,
        and logits kept by the cell's variable, in the loss the loss's too.
    """
    grads = tuple(tuple(moment[1:] for moment in part.backward_moments) for part in run.layers)
    return _steps(model.groups, grads, visited), *_alive(model, run, visited)


@lru_cache(maxsize=64)
def _steps(
    groups: tuple[LayerGroup, ...],
    grads: tuple[tuple[tuple[int, int], ...], ...],
    visited: VisitedBlocks,
) -> tuple[MicroBatchStep, ...]:
    """Steps of a walk; `grads` has all and new gradients at each group's backward moments."""
    steps: list[MicroBatchStep] = []
    for number, group in enumerate(groups):
        for nth in visited[number]:
            name = step_name("forward", group, nth)
            steps += [
                MicroBatchStep(name, "before", number, nth),
                MicroBatchStep(name, "forward", number, nth),
            ]
    steps.append(MicroBatchStep("loss", "loss", len(groups) - 1))
    for number, group in reversed([*enumerate(groups)]):
        for nth in reversed(visited[number]) if grads[number] else ():
            name = step_name("backward", group, nth)
            steps += [
                MicroBatchStep(name, "backward", number, nth, *made) for made in grads[number]
            ]
            steps.append(MicroBatchStep(name, "after", number, nth))
    return tuple(steps)


def _alive(
    model: ModelSpec, run: MicroBatchActivations, visited: VisitedBlocks
) -> tuple[list[int], list[int]]:
    """Bytes of activations and of logits at each of the steps."""
    before = saved_bytes_before_groups(model, run, in_forward=True)
    activations: list[int] = []
    for indices, part, base in zip(visited, run.layers, before, strict=False):
        for nth in indices:
            saved = base + nth * (part.saved_bytes + part.kept_bytes)
            activations += [saved + part.input_bytes, saved + max(part.forward_peaks)]
    # The variable still holds the logits of the previous micro-batch.
    before_loss = run.output_bytes + run.kept_bytes
    logits = [before_loss] * len(activations) + [run.output_bytes + run.loss_bytes]
    activations.append(before[-1])
    before = saved_bytes_before_groups(model, run)
    kept = activations[-1] - before[-1]
    for indices, part, base in reversed([*zip(visited, run.layers, before, strict=False)]):
        for nth in reversed(indices) if part.backward_moments else ():
            saved = kept + base + nth * part.saved_bytes
            activations += [saved + moment.held_bytes for moment in part.backward_moments]
            activations.append(saved + part.input_grad_bytes)
    return activations, logits + [run.output_bytes] * (len(activations) - len(logits))


def step_name(phase: str, group: LayerGroup, nth: int) -> str:
    """Return the display name of a pass of a block: "backward of block 3"."""
    return f"{phase} of {group.name}{f' {nth}' if group.count > 1 else ''}"


def saved_bytes_before_groups(
    model: ModelSpec, run: MicroBatchActivations, *, in_forward: bool = False
) -> list[int]:
    """Return the bytes saved before each group, and after the last.

    A forward adds what is kept as long as the graph; all of it is alive in the backward.
    """
    sums = [0]
    for group, part in zip(model.groups, run.layers, strict=True):
        each = part.saved_bytes + in_forward * part.kept_bytes
        sums.append(sums[-1] + group.count * each)
    return sums
