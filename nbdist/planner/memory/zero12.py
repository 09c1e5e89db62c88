"""DeepSpeed's training step under ZeRO-1 and 2; stage 3 is told in `zero3`.

Every rank holds all parameters; the master copy, optimizer state and (stage 2) gradients
are cut into equal partitions of one long row, so that ranks differ: a rank keeps the whole
gradient of a parameter that reaches into its partition. The fullest rank counts.
DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import TYPE_CHECKING

from nbdist.planner.memory import partitioning, zero3
from nbdist.planner.memory.zero_common import CUTS_GRADIENTS, CUTS_PARAMETERS, MASTER, NORM, Story
from nbdist.planner.model_spec import last_and

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.planner.memory.partitioning import Kept, Reduction
    from nbdist.planner.memory.timeline import Held, Parts
    from nbdist.planner.memory_model import Setup
    from nbdist.planner.model_spec import ModelSpec, Step, Visits


def story(model: ModelSpec, setup: Setup) -> Story:
    """A training step on the fullest rank."""
    cuts_parameters = setup.options.strategy.level == CUTS_PARAMETERS
    return zero3.Cut(model, setup) if cuts_parameters else _Whole(model, setup)


class _Whole(Story):
    """Stages 1 and 2."""

    def __init__(self, model: ModelSpec, setup: Setup) -> None:
        super().__init__(model, setup)
        self._cuts_gradients = setup.options.strategy.level == CUTS_GRADIENTS
        self._at_once = self._cuts_gradients or self.config.overlap
        """Gradients are reduced while the backward runs, not after it."""
        shares = partitioning.shares(model.groups, tied=model.tied, world_size=setup.world_size)
        self._shares = shares
        self._most_touched = max(share.touched for share in shares)

    def held(self) -> dict[str, int]:
        """All parameters; the rest is here or in host memory."""
        parameters = sum(one.count * one.params for one in self.model.groups)
        parts = {"parameters": self.unit * parameters}
        if self.offloaded:
            # Through it gradients of a parameter come back from the host to be added to.
            return parts | {"buffers": self.unit * self.largest}
        return parts | self.state()

    def host(self) -> dict[str, int]:
        """Master copy, its gradients, state, and a copy in 16 bits on its way back."""
        if not self.offloaded:
            return {}
        kept = self._most_touched if self.again and self._cuts_gradients else 0
        return self.state() | {
            "parameters": self.unit * self.partition,
            "gradients": MASTER * self.partition + self.unit * kept,
            "buffers": self.unit * self.largest
            + self.page_locked(
                MASTER * self.partition,  # the master copy
                MASTER * self.partition,  # its gradients
                self.unit * self.partition,
                self.unit * self.largest,
            ),
        }

    def during(self, steps: tuple[Step, ...]) -> Iterator[tuple[int, Held]]:
        """Forward, loss, backward."""
        for at, step in enumerate(steps):
            if step.phase not in {"before", "after"}:
                yield at, self.holding(self._during(step))

    @cached_property
    def visited(self) -> Visits:
        """The last blocks; where the bucket comes; the first, or where a rank keeps more."""
        groups = self.model.groups
        if self._at_once:
            grown = [one.of.at for one in self._kept if one.of.at and one.after > one.before]
            begins = [(at.group, at.nth) for at in grown]
        else:
            begins = [(number, 0) for number in range(len(groups))]
        # The bucket comes with the first gradient.
        earliest = max(number for number, one in enumerate(groups) if one.trainable)
        begins.append((earliest, groups[earliest].count - 1))
        # Instants of a block may be before its gradient; those of the next one are after it.
        also = [(number, max(0, nth)) for number, at in begins for nth in (at, at - 1)]
        return last_and(groups, also)

    def reduced(self) -> Iterator[tuple[Reduction, Parts]]:
        """Reductions while the backward runs, or after it."""
        return self._reduced_at_once() if self._at_once else self._reduced_after()

    def _bucket(self) -> dict[str, int]:
        return {"buffers": self.unit * self.config.bucket * self.config.buffers}

    @property
    def _adds_up(self) -> bool:
        """Stage 1 adds to gradients of earlier micro-batches, which are all there."""
        return self.again and not self._cuts_gradients

    def _earlier(self, gone: int) -> int:
        """Bytes of gradients of earlier micro-batches, `gone` elements being elsewhere.

        In the last one, which is reduced, a gradient becomes a view of the bucket that it is
        copied to, so that its own tensor is free (stage_1_and_2.py:1457 to 1461).
        """
        return self.unit * (self.trainable - gone) if self._adds_up else 0

    def _during(self, step: Step) -> dict[str, int]:
        """Bytes of gradients, and of the bucket they wait in."""
        made = partitioning.finished(self.model, step) + step.grads
        kept = self._mine(self._kept_at(step, made))
        if self._adds_up:
            # The bucket stays too. The fullest is the last micro-batch, or the one before it.
            reduces = self._at_once and step.phase == "backward"
            done = max(0, made - self.shared) if reduces else 0
            gradients = max(self._earlier(0), self._earlier(done) + kept)
            return self._bucket() | {"gradients": gradients} | self.coming(step)
        if step.phase != "backward" or not made:
            return {"gradients": kept}
        if not self._at_once:
            return self._bucket() | {"gradients": self.unit * made}
        return self._bucket() | {"gradients": kept} | self.coming(step)

    def _kept_at(self, step: Step, made: int) -> int:
        """Elements of reduced gradients; a bucket waits for the gradient after it.

        A large gradient waits as well (stage_1_and_2.py:1420, 1450).
        """
        if step.phase != "backward" or not self._at_once:
            return 0
        number = bisect_left(self._moved, made - self.shared)
        return self._kept[number - 1].after if number else 0

    @cached_property
    def _moved(self) -> list[int]:
        return [one.of.moved for one in self._kept]

    @cached_property
    def _kept(self) -> tuple[Kept, ...]:
        return self._stays(partitioning.kept, backward=True)

    def _stays(self, read: Callable[..., tuple[Kept, ...]], *, backward: bool) -> tuple[Kept, ...]:
        """What stays of each reduction; offloaded gradients go to the host.

        Stage 2 clears what is in other ranks' partitions, stage 1 does not
        (stage_1_and_2.py:2261 to 2274).
        """
        return read(
            self.model.groups,
            tied=self.model.tied,
            world_size=self.setup.world_size,
            bucket=self.config.bucket,
            backward=backward,
            buffered=not self.offloaded,
            large_stay=not self._cuts_gradients,
        )

    def _mine(self, kept: int) -> int:
        """Bytes of reduced gradients of this micro-batch, and under stage 2 of earlier ones."""
        mine = self.unit * kept
        if not self.again or not self._cuts_gradients or self.offloaded:
            return mine
        return max(self.unit * self._most_touched, 2 * mine)

    def _reduced_at_once(self) -> Iterator[tuple[Reduction, Parts]]:
        """Buckets that fill while the backward runs, before and after each reduction.

        Any may be it: activations become fewer, while more ranks have gradients of their own.
        """
        bucket = self._bucket()
        for kept in self._stays(partitioning.telling, backward=True):
            one = kept.of
            comes = one.at.size if one.at is not None else 0
            around = self.outside(one) + self._earlier(one.moved + comes)
            for grads, extra in ((kept.before, self._flat(one)), (kept.during, self._norm(one))):
                gradients = around + self._mine(grads)
                yield one, bucket | {"gradients": gradients, "temporaries": extra}

    def _flat(self, one: Reduction) -> int:
        """Bytes of the copy that is reduced, where pieces go to several ranks.

        A parameter above the bucket's size goes piece by piece, or a bucket of them at once.
        """
        if not one.split or (self.is_large(one) and self.partition > self.config.bucket):
            return 0
        return self.unit * min(one.filled, self.config.bucket + self.partition)

    def _norm(self, one: Reduction) -> int:
        """Bytes of the fp64 copy, for its norm, of a gradient on its way to the host."""
        return NORM * min(one.filled, self.largest, self.partition) if self.offloaded else 0

    def _reduced_after(self) -> Iterator[tuple[Reduction, Parts]]:
        """Stage 1: all gradients exist, and go through the bucket from the first to the last."""
        for kept in self._stays(partitioning.telling, backward=False):
            one = kept.of
            rest = self.trainable - one.moved + (one.filled if self.is_large(one) else 0)
            for grads, extra in ((kept.before, self._flat(one)), (kept.during, self._norm(one))):
                parts = {"gradients": self.unit * (rest + grads), "temporaries": extra}
                yield one._replace(at=None), self._bucket() | parts

    def updated(self) -> Iterator[tuple[str, Held]]:
        """The norm, the flat fp32 gradients, the step."""
        if self.offloaded:
            yield "optimizer step", self.holding(host=self.host_update(self.partition))
            return
        reduced = {"gradients": self.unit * self._most_touched}
        fullest = max(self._shares, key=lambda one: self.unit * one.touched + NORM * one.piece)
        norm = {"gradients": self.unit * fullest.touched, "temporaries": NORM * fullest.piece}
        yield "gradient norm", self.holding(norm)
        cast = MASTER if self.unit != MASTER else 0
        flat = {"temporaries": (self.unit + cast) * self.partition}
        yield "gradients to fp32", self.holding(reduced, flat)
        yield "optimizer step", self.holding(self.update(self.partition))


def _telling(made: tuple[Reduction, ...]) -> list[Reduction]:
    """Those reductions one of which is the worst: activations only become fewer."""
    split = [one for one in made if one.split]
    fullest = max(made, key=lambda one: one.filled)
    return [made[0], *split[:1], fullest, made[-1]]
