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

from dataclasses import replace
from typing import TYPE_CHECKING

from nbdist.plan.spec import Group
from nbdist.plan.units import Ground, Unit, Widths, unit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.plan.memory import Moment, Setup
    from nbdist.plan.spec import MicroBatch, ModelSpec, Step
    from nbdist.plan.units import Micro


def ground(model: ModelSpec, setup: Setup) -> Ground:
    """The model as FSDP1 shards it: flat units; the root's stands for the last group."""
    widths, ranks = Widths.of(model, setup), setup.world_size
    last = len(model.groups) - 1

    def flat(group: Group) -> Unit:
        share = -(-group.params // ranks)
        # A flat parameter has one gradient, zeros for what is frozen.
        whole = group.params if group.trainable else 0
        made = unit(group, widths, share, ranks, accumulate=widths.compute)
        return replace(
            made, gradients=widths.compute * whole, accumulated=widths.compute * whole
        )

    units = [flat(g) if g.role == "block" else Unit() for g in model.groups]
    units[last] = flat(_root(model))
    return Ground(model, setup, widths, tuple(units), last)


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


def during(base: Ground, run: MicroBatch, step: Step, micro: Micro) -> Iterator[Moment]:
    """The moments of one step of a micro-batch."""
    whole, shards = _gradients(base, step, micro)
    backward = step.phase == "backward"
    made = base.widths.compute * step.grads + (_root_made(base, step) if backward else 0)
    yield base.moment(
        step,
        whole_gradients=whole + made,
        gradient_shards=shards,
        gathered=_resident(base, step),
        activations=step.activations + (0 if step.phase == "loss" else step.inside),
        loss=step.inside if step.phase == "loss" else 0,
    )
    if backward and (over := _finished(base, step)) is not None:
        handed = run.passes[step.group].gradient
        yield from _reduction(base, step, micro, over, handed, whole=whole, shards=shards)


def _gradients(base: Ground, step: Step, micro: Micro) -> tuple[int, int]:
    """Whole gradients that wait, and gradient shards, of the blocks that are over."""
    over = base.model.groups[step.group].count - 1 - step.index if _is_block(base, step) else 0
    over += sum(
        group.count for group in base.model.groups[step.group + 1 :] if group.role == "block"
    )
    pairs = zip(base.model.groups, base.units, strict=True)
    one = next((unit for group, unit in pairs if group.role == "block"), Unit())
    done = over if step.phase == "backward" else 0
    shards = done * one.kept if micro in {"only", "last"} else 0
    if micro == "only":
        return 0, shards
    if micro == "first":
        return done * one.accumulated, shards
    return base.total("accumulated") - (done * one.accumulated if micro == "last" else 0), shards


def _is_block(base: Ground, step: Step) -> bool:
    return base.model.groups[step.group].role == "block"


def _root_made(base: Ground, step: Step) -> int:
    """Gradients of the root's parameters that groups before in the backward have made."""
    after = base.model.groups[step.group + 1 :]
    return base.widths.compute * sum(g.trainable for g in after if g.role != "block")


def _resident(base: Ground, step: Step) -> int:
    """Bytes of whole units: the root, and the block at work; all blocks if none is resharded."""
    blocks = 0
    for number, group in enumerate(base.model.groups):
        if group.role != "block":
            continue
        if base.resharded:
            count = int(number == step.group and step.phase != "loss")
        elif step.phase == "loss" or number < step.group:
            count = group.count
        else:
            count = step.index + 1 if number == step.group else 0
        blocks += count * base.units[number].whole
    return blocks + base.units[base.tail].whole


def _finished(base: Ground, step: Step) -> Unit | None:
    """The unit whose gradients are complete after a step: the root's at the very end."""
    if _is_block(base, step):
        return base.units[step.group]
    return None if step.group else base.units[base.tail]


def _reduction(  # noqa: PLR0913 - what is held, part by part
    base: Ground, step: Step, micro: Micro, over: Unit, handed: int, *, whole: int, shards: int
) -> Iterator[Moment]:
    """Gradients are put together; then the unit is in shards again, and they are reduced."""
    others = _root_made(base, step) if _is_block(base, step) else 0
    gathered = _resident(base, step)
    yield base.moment(
        step,
        whole_gradients=whole + others + 2 * over.gradients,
        gradient_shards=shards,
        gathered=gathered,
        activations=step.activations + handed,
    )
    if micro in {"first", "middle"}:
        return
    cast = over.reduced if base.widths.reduce != base.widths.compute else 0
    yield base.moment(
        step,
        whole_gradients=whole + others + over.gradients,
        gradient_shards=shards,
        gathered=gathered - over.whole,
        buffers=cast + over.reduced_shard,
        activations=step.activations + handed,
    )
