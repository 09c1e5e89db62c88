"""A micro-batch under FSDP1: what one rank holds at its moments.

Read in torch 2.13 (`FullyShardedDataParallel`) and accelerate 1.15, with original parameters
and no prefetch, which are their defaults: each block is a unit of one flat parameter, all
the rest is the root's, which stays whole from the first forward to the end of the backward.

A unit is gathered in place. Autograd sees its parameters as views of the flat one, so their
gradients wait until all are there and are then copied together; that copy is cast to the
reduce type while it is reduced. While gradients accumulate they stay whole, as autograd
makes them, on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.planner.memory.fsdp_units import Ground, Place, Unit, Widths, unit
from nbdist.planner.model_spec import Group

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.planner.memory.fsdp_units import Micro
    from nbdist.planner.memory.timeline import Held
    from nbdist.planner.memory_model import Setup
    from nbdist.planner.model_spec import ModelSpec, Step


def ground(model: ModelSpec, setup: Setup) -> Ground:
    """The model as FSDP1 shards it: flat units; the root's stands for the last group."""
    widths, ranks = Widths.of(model, setup), setup.world_size
    last = len(model.groups) - 1

    def flat(group: Group) -> Unit:
        share = -(-group.params // ranks)
        # A flat parameter has one gradient, zeros for what is frozen.
        whole = group.params if group.trainable else 0
        largest = min(share, group.largest)
        made = unit(group, widths, share, ranks, accumulate=widths.compute, largest=largest)
        whole *= widths.compute
        return made._replace(gradients=whole, accumulated=whole)

    units = [flat(g) if g.role == "block" else Unit() for g in model.groups]
    units[last] = flat(_root(model))
    return Ground(model=model, setup=setup, widths=widths, units=tuple(units), flat=True)


def _root(model: ModelSpec) -> Group:
    """All parameters outside of blocks."""
    rest = [group for group in model.groups if group.role != "block"]
    return Group(
        name="root",
        role="root",
        trainable=sum(group.count * group.trainable for group in rest),
        frozen=sum(group.count * group.frozen for group in rest),
        largest=max(group.largest for group in rest),
    )


def held_at(base: Ground, micro: Micro, step: Step) -> tuple[Held, ...]:
    """What is held at a step of a micro-batch."""
    if step.phase == "after":
        return tuple(base.held(place) for place in _reductions(base, step, micro))
    if step.phase == "before":
        return ()
    key = (micro, step.phase, step.group, step.nth)
    if key not in base.places:
        base.places[key] = _place(base, step, micro)
    return (base.held(base.places[key], gradients=base.widths.compute * step.grads),)


def _place(base: Ground, step: Step, micro: Micro) -> Place:
    """What is there beside a unit at work."""
    whole, shards = _gradients(base, step, micro)
    if step.phase == "backward":
        whole += _of_root(base, step)
    return Place(_resident(base, step), whole, shards)


def _reductions(base: Ground, step: Step, micro: Micro) -> Iterator[Place]:
    """Gradients are put together; then the unit is in shards again, and they are reduced."""
    block = _is_block(base, step)
    if step.group and not block:
        return
    over = base.units[step.group if block else base.tail]
    whole, shards = _gradients(base, step, micro)
    whole += _of_root(base, step) if block else 0
    gathered = _resident(base, step)
    yield Place(gathered, whole + 2 * over.gradients, shards)
    if micro in {"only", "last"}:
        cast = over.reduced if base.widths.reduce != base.widths.compute else 0
        buffers = cast + over.reduced_shard
        yield Place(gathered - over.whole, whole + over.gradients, shards, buffers)


def _gradients(base: Ground, step: Step, micro: Micro) -> tuple[int, int]:
    """Whole gradients that wait, and gradient shards, of the blocks that are over."""
    over = _over(base, step) if step.phase in {"backward", "after"} else (0, 0)
    return base.waiting(micro, *over)


def _over(base: Ground, step: Step) -> tuple[int, int]:
    """Accumulated gradients and gradient shards of the blocks whose backward is over."""
    accumulated = kept = 0
    for number in range(step.group, base.tail):
        group, one = base.groups[number], base.units[number]
        count = group.count - 1 - step.nth if number == step.group else group.count
        accumulated += count * one.accumulated
        kept += count * one.kept
    return accumulated, kept


def _is_block(base: Ground, step: Step) -> bool:
    return base.groups[step.group].role == "block"


def _of_root(base: Ground, step: Step) -> int:
    """Gradients of the root's parameters that the groups after have made."""
    after = base.groups[step.group + 1 :]
    return base.widths.compute * sum(g.trainable for g in after if g.role != "block")


def _resident(base: Ground, step: Step) -> int:
    """Bytes of whole units: the root, and the block at work; all blocks if none is resharded."""
    return base.units[base.tail].whole + sum(
        base.units[number].whole * _whole_count(base, number, step) for number in range(base.tail)
    )


def _whole_count(base: Ground, number: int, step: Step) -> int:
    """How many blocks of a group are whole at a step."""
    if base.resharded:
        return int(number == step.group and step.phase != "loss")
    if step.phase == "loss" or number < step.group:
        return base.groups[number].count
    return step.nth + 1 if number == step.group else 0
