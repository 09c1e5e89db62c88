"""A micro-batch under FSDP2: what one rank holds at its moments.

Read in torch 2.13 (`torch.distributed.fsdp._fully_shard`) and accelerate 1.15
(`fsdp2_prepare_model`): each block is a unit, the embedding is one, final norm and head are
one that stays whole from forward to backward; with tied weights the embedding belongs to
that one. What no unit takes is the root's and stays whole as well.

A unit is gathered into one buffer and copied out of it, so that it is there twice all through
its forward; in backward the next unit's buffer is there beside a unit. Gradients are reduced
in a buffer of the reduce type, which lives until the next unit reduces. While gradients
accumulate they stay whole, in the reduce type, on every rank. With replicas across nodes a rank's
share is one of its node's ranks; nodes reduce the shares of gradients in place, and torch keeps
them to the end of the backward, also where they have gone to the host by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.planner.memory.fsdp_units import Ground, Place, Unit, Widths, unit

if TYPE_CHECKING:
    from nbdist.planner.memory.fsdp_units import Micro
    from nbdist.planner.memory.timeline import Held
    from nbdist.planner.memory_model import Setup
    from nbdist.planner.model_spec import Group, ModelSpec, Step


def ground(model: ModelSpec, setup: Setup) -> Ground:
    """The model as FSDP2 shards it: by rows of each parameter."""
    widths, ranks = Widths.of(model, setup), setup.shards
    units = [
        unit(
            group,
            widths,
            _share(group, ranks),
            ranks,
            accumulate=widths.reduce,
            largest=-(-group.largest // ranks),
        )
        for group in model.groups
    ]
    return Ground(model=model, setup=setup, widths=widths, units=tuple(units), flat=False)


def _share(group: Group, ranks: int) -> int:
    """Elements of the first rank's shard."""
    if not group.tensors:
        return -(-group.params // ranks)
    return sum(-(-rows // ranks) * (elements // rows) for rows, elements in group.tensors)


def held_at(base: Ground, micro: Micro, step: Step) -> tuple[Held, ...]:
    """What is held at a step of a micro-batch."""
    if step.phase == "before":
        return (base.held(_before(base, step, micro)),)
    if step.phase == "after":
        tied = base.tied and step.group == base.tail
        return () if tied else (base.held(_reduction(base, step, micro)),)
    key = (micro, step.phase, step.group, step.nth)
    if key not in base.places:
        base.places[key] = _place(base, step, micro)
    return (base.held(base.places[key], gradients=base.widths.compute * step.grads),)


def _place(base: Ground, step: Step, micro: Micro) -> Place:
    """What is there beside a unit at work."""
    whole, shards = _gradients(base, step, micro)
    gathered = _resident(base, step)
    if step.phase in {"before", "forward"}:
        return Place(gathered + _buffers(base, step)[0], whole, shards)
    if step.phase == "loss":
        # Where the tail has no parameters, nothing has freed the last block's buffer.
        left = 0 if base.units[base.tail].whole else _buffer(base, base.tail)
        return Place(gathered + left, whole, shards)
    if base.tied and step.group != base.tail:
        whole += base.units[base.tail].gradients
    buffers = _in_flight(base, step, micro) + _left_behind(base, shards)
    return Place(gathered + _ahead(base, step), whole, shards, buffers)


def _before(base: Ground, step: Step, micro: Micro) -> Place:
    """The buffer of the unit before goes when this unit's has been copied."""
    place = _place(base, step, micro)
    besides = _buffers(base, step)[1] + _fetching(base, _gathering(base, step.group))
    return place._replace(gathered=place.gathered + besides)


def _fetching(base: Ground, over: Unit) -> int:
    """What an offloaded shard takes on its way to the GPU, beyond the unit it becomes."""
    if base.setup.kind == "cpu" or not base.offload:
        return 0
    arrived = base.widths.stored * over.largest_shard
    return max(0, arrived + over.whole // base.setup.shards - over.whole)


def _gradients(base: Ground, step: Step, micro: Micro) -> tuple[int, int]:
    """Whole and sharded gradients of the units that are not at work."""
    over = _over(base, step) if step.phase in {"backward", "after"} else (0, 0)
    return base.waiting(micro, *over)


def _over(base: Ground, step: Step) -> tuple[int, int]:
    """Accumulated gradients and gradient shards of the units whose backward is over."""
    counts = [(step.group, base.groups[step.group].count - 1 - step.nth)]
    # Tied to the embedding, the tail is over when that is.
    last = base.tail if base.tied else len(base.units)
    counts += [(number, base.groups[number].count) for number in range(step.group + 1, last)]
    accumulated = sum(count * base.units[number].accumulated for number, count in counts)
    return accumulated, sum(count * base.units[number].kept for number, count in counts)


def _reduction(base: Ground, step: Step, micro: Micro) -> Place:
    """A unit is in shards again; its gradients are copied to be reduced, or are kept whole."""
    over = _gathering(base, step.group)
    whole, shards = _gradients(base, step, micro)
    buffers = 0
    if micro in {"only", "last"}:
        buffers = over.reduced + over.reduced_shard + _left_behind(base, shards)
    if micro == "first":
        # One after the other becomes one of the reduce type.
        whole += over.largest + over.accumulated
    elif micro in {"only", "middle"}:
        whole += over.gradients
    gathered = _resident(base, step) - over.whole + _ahead(base, step)
    return Place(gathered, whole, shards, buffers)


def _left_behind(base: Ground, shards: int) -> int:
    """Gradient shards that have gone to the host and that nodes have reduced on the GPU."""
    stays = base.setup.replicas > 1 and base.offload and base.setup.kind == "cuda"
    return shards * base.widths.reduce // base.widths.stored if stays else 0


# -- which units are whole -------------------------------------------------------------------


def _gathering(base: Ground, number: int) -> Unit:
    """The unit that a group's forward gathers: a tied embedding gathers the tail."""
    tied_embedding = base.tied and base.groups[number].role == "embedding"
    return base.units[base.tail if tied_embedding else number]


def _buffers(base: Ground, step: Step) -> tuple[int, int]:
    """The gather buffer that a unit's forward keeps, and that of the unit before."""
    if base.tied and step.group == base.tail:
        return _gathering(base, step.group - 1).whole, 0
    own = _buffer(base, step.group)
    if step.nth:
        return own, own
    gathers = _gathering(base, step.group).whole
    return own, _buffer(base, step.group - 1) if step.group and gathers else 0


def _buffer(base: Ground, number: int) -> int:
    """The buffer of the last unit that was gathered: a group without parameters gathers none."""
    wholes = (_gathering(base, before).whole for before in range(number, -1, -1))
    return next((whole for whole in wholes if whole), 0)


def _resident(base: Ground, step: Step) -> int:
    """Bytes of whole units: the one at work, tail and root; all where none is resharded."""
    pairs = enumerate(zip(base.groups, base.units, strict=True))
    return sum(one.whole * _whole_count(base, group, n, step) for n, (group, one) in pairs)


def _whole_count(base: Ground, group: Group, number: int, step: Step) -> int:
    """How many of a group are whole at a step."""
    if group.role == "root":
        return 1
    if number == base.tail:
        return int(base.tied or step.phase == "loss" or step.group == base.tail)
    if base.resharded:
        return int(number == step.group and step.phase != "loss")
    if step.phase == "loss" or number < step.group:
        return group.count
    return step.nth + 1 if number == step.group else 0


def _ahead(base: Ground, step: Step) -> int:
    """The buffer of the unit whose backward is next."""
    if not base.resharded:
        return 0
    if step.nth:
        return base.units[step.group].whole
    pairs = zip(base.groups[: step.group], base.units, strict=False)
    return next((one.whole for group, one in reversed([*pairs]) if group.role != "root"), 0)


def _in_flight(base: Ground, step: Step, micro: Micro) -> int:
    """The reduction of the unit before, until the next one begins."""
    if micro in {"first", "middle"} or step.group == base.tail:
        return 0
    if step.nth < base.groups[step.group].count - 1:
        return base.units[step.group].reduced
    after = step.group + 1
    return 0 if after == base.tail and base.tied else base.units[after].reduced
