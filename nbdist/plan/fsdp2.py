"""A micro-batch under FSDP2: what one rank holds at its moments.

Read in torch 2.13 (`torch.distributed.fsdp._fully_shard`) and accelerate 1.15
(`fsdp2_prepare_model`): each block is a unit, the embedding is one, final norm and head are
one that stays whole from forward to backward; with tied weights the embedding belongs to
that one. What no unit takes is the root's and stays whole as well.

A unit is gathered into one buffer and copied out of it, so that it is there twice all through
its forward; in backward the next unit's buffer is there beside a unit. Gradients are reduced
in a buffer of the reduce type, which lives until the next unit reduces. While gradients
accumulate they stay whole, in the reduce type, on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.plan.units import Ground, Unit, Widths, unit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.plan.memory import Moment, Setup
    from nbdist.plan.spec import Group, MicroBatch, ModelSpec, Step
    from nbdist.plan.units import Micro


def ground(model: ModelSpec, setup: Setup) -> Ground:
    """The model as FSDP2 shards it: by rows of each parameter."""
    widths, ranks = Widths.of(model, setup), setup.world_size
    units = tuple(
        unit(group, widths, _share(group, ranks), ranks, accumulate=widths.reduce)
        for group in model.groups
    )
    return Ground(model, setup, widths, units, len(units) - 1)


def _share(group: Group, ranks: int) -> int:
    """Elements of the first rank's shard."""
    if not group.tensors:
        return -(-group.params // ranks)
    return sum(-(-rows // ranks) * (elements // rows) for rows, elements in group.tensors)


def during(base: Ground, run: MicroBatch, step: Step, micro: Micro) -> Iterator[Moment]:
    """The moments of one step of a micro-batch."""
    whole, shards = _gradients(base, step, micro)
    if step.phase == "forward":
        own, before = _buffers(base, step)
        gathered = own + _resident(base, step)
        # The buffer of the unit before goes when this unit's has been copied.
        yield base.moment(
            step, whole_gradients=whole, gradient_shards=shards, gathered=before + gathered
        )
        yield base.moment(
            step,
            whole_gradients=whole,
            gradient_shards=shards,
            gathered=gathered,
            activations=step.activations + step.inside,
        )
    elif step.phase == "loss":
        yield base.moment(
            step,
            whole_gradients=whole,
            gradient_shards=shards,
            gathered=_resident(base, step),
            loss=step.inside,
        )
    else:
        yield _backward(base, step, micro, whole=whole, shards=shards)
        if (over := _finished(base, step)) is not None:
            handed = run.passes[step.group].gradient
            yield _reduction(base, step, micro, over, handed, whole=whole, shards=shards)


def _gradients(base: Ground, step: Step, micro: Micro) -> tuple[int, int]:
    """Whole and sharded gradients of the units that are not at work."""
    over = step.phase == "backward"
    done = _over(base, step, "accumulated") if over else 0
    shards = _over(base, step, "kept") if over and micro in {"only", "last"} else 0
    if micro == "only":
        return 0, shards
    if micro == "first":
        return done, shards
    return base.total("accumulated") - (done if micro == "last" else 0), shards


def _over(base: Ground, step: Step, field: str) -> int:
    """A field over the units whose backward is over at a step."""
    groups = base.model.groups
    total = (groups[step.group].count - 1 - step.index) * int(
        getattr(base.units[step.group], field)
    )
    for number in range(step.group + 1, len(groups)):
        # Tied to the embedding, the tail is over when that is.
        if not (base.model.tied and number == base.tail):
            total += groups[number].count * int(getattr(base.units[number], field))
    return total


def _backward(base: Ground, step: Step, micro: Micro, *, whole: int, shards: int) -> Moment:
    """A unit's backward, beside the next unit's buffer and the reduction of the one before."""
    made = base.widths.compute * step.grads
    if base.model.tied and step.group != base.tail:
        made += base.units[base.tail].gradients
    return base.moment(
        step,
        whole_gradients=whole + made,
        gradient_shards=shards,
        gathered=_resident(base, step) + _ahead(base, step),
        buffers=_in_flight(base, step, micro),
        activations=step.activations + step.inside,
    )


def _reduction(  # noqa: PLR0913 - what is held, part by part
    base: Ground, step: Step, micro: Micro, over: Unit, handed: int, *, whole: int, shards: int
) -> Moment:
    """A unit is in shards again; its gradients are copied to be reduced, or are kept whole."""
    buffers, made = 0, 0
    if micro in {"only", "last"}:
        buffers = over.reduced + over.reduced_shard
    if micro == "first":
        # One after the other becomes one of the reduce type.
        made = over.largest + over.accumulated
    elif micro in {"only", "middle"}:
        made = over.gradients
    return base.moment(
        step,
        whole_gradients=whole + made,
        gradient_shards=shards,
        gathered=_resident(base, step) - over.whole + _ahead(base, step),
        buffers=buffers,
        activations=step.activations + handed,
    )


# -- which units are whole -------------------------------------------------------------------


def _gathering(base: Ground, number: int) -> Unit:
    """The unit that a group's forward gathers: a tied embedding gathers the tail."""
    tied_embedding = base.model.tied and base.model.groups[number].role == "embedding"
    return base.units[base.tail if tied_embedding else number]


def _buffers(base: Ground, step: Step) -> tuple[int, int]:
    """The gather buffer that a unit's forward keeps, and that of the unit before."""
    if base.model.tied and step.group == base.tail:
        return _gathering(base, step.group - 1).whole, 0
    own = _gathering(base, step.group).whole
    if step.index:
        return own, own
    return own, _gathering(base, step.group - 1).whole if step.group else 0


def _resident(base: Ground, step: Step) -> int:
    """Bytes of whole units: the one at work, tail and root; all where none is resharded."""
    pairs = enumerate(zip(base.model.groups, base.units, strict=True))
    return sum(one.whole * _whole_count(base, group, n, step) for n, (group, one) in pairs)


def _whole_count(base: Ground, group: Group, number: int, step: Step) -> int:
    """How many of a group are whole at a step."""
    if group.role == "root":
        return 1
    if number == base.tail:
        return int(base.model.tied or step.phase == "loss" or step.group == base.tail)
    if base.resharded:
        return int(number == step.group and step.phase != "loss")
    if step.phase == "loss" or number < step.group:
        return group.count
    return step.index + 1 if number == step.group else 0


def _ahead(base: Ground, step: Step) -> int:
    """The buffer of the unit whose backward is next."""
    if not base.resharded:
        return 0
    if step.index:
        return base.units[step.group].whole
    before = step.group - 1
    return base.units[before].whole if before >= 0 else 0


def _in_flight(base: Ground, step: Step, micro: Micro) -> int:
    """The reduction of the unit before, until the next one begins."""
    if micro in {"first", "middle"} or step.group == base.tail:
        return 0
    if step.index < base.model.groups[step.group].count - 1:
        return base.units[step.group].reduced
    after = step.group + 1
    return 0 if after == base.tail and base.model.tied else base.units[after].reduced


def _finished(base: Ground, step: Step) -> Unit | None:
    """The unit whose gradients are complete after a step of the backward."""
    if base.model.tied and step.group == base.tail:
        return None
    return _gathering(base, step.group)
