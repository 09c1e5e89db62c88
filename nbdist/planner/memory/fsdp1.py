"""Memory of a rank during a micro-batch under FSDP1.

Follows torch 2.13 (`FullyShardedDataParallel`) and accelerate 1.15 with their defaults, original
parameters and no prefetch: each block is a unit with one flat parameter; the rest belongs to the
root, which stays gathered from the first forward to the end of the backward.

A unit is gathered in place. Autograd sees its parameters as views of the flat one, so their
gradients are kept until all exist and are then copied together; that copy is cast to the reduce
dtype during the reduction. During accumulation, full gradients stay on every rank as autograd makes
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.planner.memory.fsdp_units import (
    DtypeBytes,
    FsdpRankMemory,
    FsdpUnit,
    TransientMemory,
    build_unit,
)
from nbdist.planner.model_spec import LayerGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.planner.memory.fsdp_units import MicroBatchPosition
    from nbdist.planner.memory.timeline import Allocation
    from nbdist.planner.memory.training_setup import TrainingSetup
    from nbdist.planner.model_spec import ModelSpec, WalkStep


def build_rank_memory(model: ModelSpec, setup: TrainingSetup) -> FsdpRankMemory:
    """Return the model as FSDP1 shards it: flat units, with the root in place of the last group."""
    widths, ranks = DtypeBytes.for_model(model, setup), setup.world_size
    last = len(model.groups) - 1

    def flat(group: LayerGroup) -> FsdpUnit:
        share = -(-group.num_params // ranks)
        # A flat parameter has one gradient, with zeros for frozen parameters.
        grad_elements = group.num_params if group.trainable else 0
        largest = min(share, group.largest)
        built = build_unit(group, widths, share, ranks, accumulate=widths.compute, largest=largest)
        grad_bytes = grad_elements * widths.compute
        return built._replace(gradient_bytes=grad_bytes, accumulated_grad_bytes=grad_bytes)

    units = [flat(g) if g.role == "block" else FsdpUnit() for g in model.groups]
    units[last] = flat(_root(model))
    return FsdpRankMemory(
        model=model, setup=setup, dtype_bytes=widths, units=tuple(units), is_flat=True
    )


def _root(model: ModelSpec) -> LayerGroup:
    """All parameters outside blocks, as one group."""
    rest = [group for group in model.groups if group.role != "block"]
    return LayerGroup(
        name="root",
        role="root",
        trainable=sum(group.count * group.trainable for group in rest),
        frozen=sum(group.count * group.frozen for group in rest),
        largest=max(group.largest for group in rest),
    )


def allocations_at(
    base: FsdpRankMemory, micro: MicroBatchPosition, step: WalkStep
) -> tuple[Allocation, ...]:
    """Return the memory held at a step of a micro-batch."""
    if step.phase == "after":
        return tuple(base.allocation_for(place) for place in _reductions(base, step, micro))
    if step.phase == "before":
        return ()
    key = (micro, step.phase, step.group_index, step.block_index)
    if key not in base.transient_memory:
        base.transient_memory[key] = _place(base, step, micro)
    return (
        base.allocation_for(
            base.transient_memory[key], gradients=base.dtype_bytes.compute * step.num_grads
        ),
    )


def _place(base: FsdpRankMemory, step: WalkStep, micro: MicroBatchPosition) -> TransientMemory:
    """Transient memory besides the current unit."""
    full, shards = _gradients(base, step, micro)
    if step.phase == "backward":
        full += _of_root(base, step)
    return TransientMemory(_resident(base, step), full, shards)


def _reductions(
    base: FsdpRankMemory, step: WalkStep, micro: MicroBatchPosition
) -> Iterator[TransientMemory]:
    """Gradients are copied together; then the unit is resharded and they are reduced."""
    block = _is_block(base, step)
    if step.group_index and not block:
        return
    finished = base.units[step.group_index if block else base.last_group]
    full, shards = _gradients(base, step, micro)
    full += _of_root(base, step) if block else 0
    gathered = _resident(base, step)
    yield TransientMemory(gathered, full + 2 * finished.gradient_bytes, shards)
    if micro in {"only", "last"}:
        cast = finished.reduce_bytes if base.dtype_bytes.reduce != base.dtype_bytes.compute else 0
        buffers = cast + finished.reduce_shard_bytes
        yield TransientMemory(
            gathered - finished.full_param_bytes, full + finished.gradient_bytes, shards, buffers
        )


def _gradients(base: FsdpRankMemory, step: WalkStep, micro: MicroBatchPosition) -> tuple[int, int]:
    """Pending full gradients and gradient shards of the blocks whose backward has ended."""
    finished = _over(base, step) if step.phase in {"backward", "after"} else (0, 0)
    return base.pending_gradient_bytes(micro, *finished)


def _over(base: FsdpRankMemory, step: WalkStep) -> tuple[int, int]:
    """Accumulated gradients and gradient shards of the blocks whose backward has ended."""
    accumulated = kept = 0
    for number in range(step.group_index, base.last_group):
        group, of_one = base.groups[number], base.units[number]
        count = group.count - 1 - step.block_index if number == step.group_index else group.count
        accumulated += count * of_one.accumulated_grad_bytes
        kept += count * of_one.grad_shard_bytes
    return accumulated, kept


def _is_block(base: FsdpRankMemory, step: WalkStep) -> bool:
    return base.groups[step.group_index].role == "block"


def _of_root(base: FsdpRankMemory, step: WalkStep) -> int:
    """Gradients of the root's parameters that later groups have made."""
    after = base.groups[step.group_index + 1 :]
    return base.dtype_bytes.compute * sum(g.trainable for g in after if g.role != "block")


def _resident(base: FsdpRankMemory, step: WalkStep) -> int:
    """Bytes of gathered units: the root, and the current block, or all if none is resharded."""
    return base.units[base.last_group].full_param_bytes + sum(
        base.units[number].full_param_bytes * _whole_count(base, number, step)
        for number in range(base.last_group)
    )


def _whole_count(base: FsdpRankMemory, number: int, step: WalkStep) -> int:
    """Number of gathered blocks of a group at a step."""
    if base.reshard_after_forward:
        return int(number == step.group_index and step.phase != "loss")
    if step.phase == "loss" or number < step.group_index:
        return base.groups[number].count
    return step.block_index + 1 if number == step.group_index else 0
