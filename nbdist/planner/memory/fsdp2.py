"""Memory of a rank during a micro-batch under FSDP2.

Follows torch 2.13 (`torch.distributed.fsdp._fully_shard`) and accelerate 1.15
(`fsdp2_prepare_model`): each block is a unit, the embedding is one, and final norm and head form
one that stays gathered from forward to backward. With tied weights the embedding belongs to the
latter. The remaining parameters belong to the root, which also stays gathered.

A unit is gathered into a buffer and copied out of it, so it exists twice during its forward; in the
backward the next unit's buffer exists besides the current unit. Gradients are reduced in a buffer
of the reduce dtype, which lives until the next unit reduces. During accumulation, full gradients
stay on every rank in the reduce dtype. With replicas across nodes, parameters are sharded over a
node's ranks; nodes reduce the gradient shards in place, and torch keeps these until the end of the
backward, even if they have been offloaded to the host by then.
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

if TYPE_CHECKING:
    from nbdist.planner.memory.fsdp_units import MicroBatchPosition
    from nbdist.planner.memory.timeline import Allocation
    from nbdist.planner.memory.training_setup import TrainingSetup
    from nbdist.planner.model_spec import LayerGroup, ModelSpec, WalkStep


def build_rank_memory(model: ModelSpec, setup: TrainingSetup) -> FsdpRankMemory:
    """Return the model as FSDP2 shards it: by rows of each parameter."""
    widths, ranks = DtypeBytes.for_model(model, setup), setup.num_shards
    units = [
        build_unit(
            group,
            widths,
            _share(group, ranks),
            ranks,
            accumulate=widths.reduce,
            largest=-(-group.largest // ranks),
        )
        for group in model.groups
    ]
    return FsdpRankMemory(
        model=model, setup=setup, dtype_bytes=widths, units=tuple(units), is_flat=False
    )


def _share(group: LayerGroup, ranks: int) -> int:
    """Elements of the first rank's shard."""
    if not group.tensors:
        return -(-group.num_params // ranks)
    return sum(-(-rows // ranks) * (elements // rows) for rows, elements in group.tensors)


def allocations_at(
    base: FsdpRankMemory, micro: MicroBatchPosition, step: WalkStep
) -> tuple[Allocation, ...]:
    """Return the memory held at a step of a micro-batch."""
    if step.phase == "before":
        return (base.allocation_for(_before(base, step, micro)),)
    if step.phase == "after":
        tied = base.tied and step.group_index == base.last_group
        return () if tied else (base.allocation_for(_reduction(base, step, micro)),)
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
    gathered = _resident(base, step)
    if step.phase in {"before", "forward"}:
        return TransientMemory(gathered + _buffers(base, step)[0], full, shards)
    if step.phase == "loss":
        # If the tail has no parameters, nothing has freed the last block's buffer.
        left = 0 if base.units[base.last_group].full_param_bytes else _buffer(base, base.last_group)
        return TransientMemory(gathered + left, full, shards)
    if base.tied and step.group_index != base.last_group:
        full += base.units[base.last_group].gradient_bytes
    buffers = _in_flight(base, step, micro) + _left_behind(base, shards)
    return TransientMemory(gathered + _ahead(base, step), full, shards, buffers)


def _before(base: FsdpRankMemory, step: WalkStep, micro: MicroBatchPosition) -> TransientMemory:
    """The previous unit's buffer is freed once this unit's has been copied."""
    transient = _place(base, step, micro)
    besides = _buffers(base, step)[1] + _fetching(base, _gathering(base, step.group_index))
    return transient._replace(gathered=transient.gathered + besides)


def _fetching(base: FsdpRankMemory, over: FsdpUnit) -> int:
    """Bytes of an offloaded shard on its way to the GPU, beyond the gathered unit."""
    if base.setup.kind == "cpu" or not base.is_offloaded:
        return 0
    arrived = base.dtype_bytes.stored * over.largest_shard_size
    return max(0, arrived + over.full_param_bytes // base.setup.num_shards - over.full_param_bytes)


def _gradients(base: FsdpRankMemory, step: WalkStep, micro: MicroBatchPosition) -> tuple[int, int]:
    """Full gradients and gradient shards of the units other than the current one."""
    finished = _over(base, step) if step.phase in {"backward", "after"} else (0, 0)
    return base.pending_gradient_bytes(micro, *finished)


def _over(base: FsdpRankMemory, step: WalkStep) -> tuple[int, int]:
    """Accumulated gradients and gradient shards of the units whose backward has ended."""
    counts = [(step.group_index, base.groups[step.group_index].count - 1 - step.block_index)]
    # Tied to the embedding, the tail ends with it.
    last = base.last_group if base.tied else len(base.units)
    counts += [(number, base.groups[number].count) for number in range(step.group_index + 1, last)]
    accumulated = sum(count * base.units[number].accumulated_grad_bytes for number, count in counts)
    return accumulated, sum(count * base.units[number].grad_shard_bytes for number, count in counts)


def _reduction(base: FsdpRankMemory, step: WalkStep, micro: MicroBatchPosition) -> TransientMemory:
    """A unit is resharded; its gradients are copied to be reduced, or kept in full."""
    finished = _gathering(base, step.group_index)
    full, shards = _gradients(base, step, micro)
    buffers = 0
    if micro in {"only", "last"}:
        buffers = finished.reduce_bytes + finished.reduce_shard_bytes + _left_behind(base, shards)
    if micro == "first":
        # Gradients are cast to the reduce dtype one after another.
        full += finished.largest_grad_bytes + finished.accumulated_grad_bytes
    elif micro in {"only", "middle"}:
        full += finished.gradient_bytes
    gathered = _resident(base, step) - finished.full_param_bytes + _ahead(base, step)
    return TransientMemory(gathered, full, shards, buffers)


def _left_behind(base: FsdpRankMemory, shards: int) -> int:
    """Bytes of offloaded gradient shards that stay on the GPU as nodes reduced them there."""
    stays = base.setup.num_replicas > 1 and base.is_offloaded and base.setup.kind == "cuda"
    return shards * base.dtype_bytes.reduce // base.dtype_bytes.stored if stays else 0


# -- which units are gathered ----------------------------------------------------------------


def _gathering(base: FsdpRankMemory, number: int) -> FsdpUnit:
    """The unit that a group's forward gathers; for a tied embedding, the tail."""
    tied_embedding = base.tied and base.groups[number].role == "embedding"
    return base.units[base.last_group if tied_embedding else number]


def _buffers(base: FsdpRankMemory, step: WalkStep) -> tuple[int, int]:
    """The gather buffer that a unit's forward keeps, and that of the previous unit."""
    if base.tied and step.group_index == base.last_group:
        return _gathering(base, step.group_index - 1).full_param_bytes, 0
    own = _buffer(base, step.group_index)
    if step.block_index:
        return own, own
    gathers = _gathering(base, step.group_index).full_param_bytes
    return own, _buffer(base, step.group_index - 1) if step.group_index and gathers else 0


def _buffer(base: FsdpRankMemory, number: int) -> int:
    """The buffer of the unit gathered last; a group without parameters gathers none."""
    sizes = (_gathering(base, before).full_param_bytes for before in range(number, -1, -1))
    return next((size for size in sizes if size), 0)


def _resident(base: FsdpRankMemory, step: WalkStep) -> int:
    """Bytes of gathered units: the current one, tail and root; all if none is resharded."""
    pairs = enumerate(zip(base.groups, base.units, strict=True))
    return sum(
        each.full_param_bytes * _whole_count(base, group, n, step) for n, (group, each) in pairs
    )


def _whole_count(base: FsdpRankMemory, group: LayerGroup, number: int, step: WalkStep) -> int:
    """Number of gathered units of a group at a step."""
    if group.role == "root":
        return 1
    if number == base.last_group:
        return int(base.tied or step.phase == "loss" or step.group_index == base.last_group)
    if base.reshard_after_forward:
        return int(number == step.group_index and step.phase != "loss")
    if step.phase == "loss" or number < step.group_index:
        return group.count
    return step.block_index + 1 if number == step.group_index else 0


def _ahead(base: FsdpRankMemory, step: WalkStep) -> int:
    """The buffer of the unit whose backward is next."""
    if not base.reshard_after_forward:
        return 0
    if step.block_index:
        return base.units[step.group_index].full_param_bytes
    pairs = zip(base.groups[: step.group_index], base.units, strict=False)
    return next(
        (each.full_param_bytes for group, each in reversed([*pairs]) if group.role != "root"), 0
    )


def _in_flight(base: FsdpRankMemory, step: WalkStep, micro: MicroBatchPosition) -> int:
    """The previous unit's reduction, until the next one begins."""
    if micro in {"first", "middle"} or step.group_index == base.last_group:
        return 0
    if step.block_index < base.groups[step.group_index].count - 1:
        return base.units[step.group_index].reduce_bytes
    after = step.group_index + 1
    return 0 if after == base.last_group and base.tied else base.units[after].reduce_bytes
