"""DeepSpeed's training step under ZeRO-1 and 2; stage 3 is told in `zero3`.

Every rank holds all parameters; the master copy, optimizer state and (stage 2) gradients
are cut into equal partitions of one long row, so that ranks differ: a rank keeps the whole
gradient of a parameter that reaches into its partition. The fullest rank counts.
DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from nbdist.plan.engines import layout, zero3
from nbdist.plan.engines.deepspeed import CUTS_GRADIENTS, CUTS_PARAMETERS, MASTER, NORM, Story

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.plan.engines.layout import Reduction
    from nbdist.plan.engines.story import Held
    from nbdist.plan.memory import Setup
    from nbdist.plan.spec import ModelSpec, Step


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
        shares = layout.shares(model.groups, tied=model.tied, world_size=setup.world_size)
        self._shares = shares
        touched = [share.touched for share in shares]
        self._from_the_first = list(accumulate(touched, max))
        self._from_the_last = list(accumulate(reversed(touched), max))
        """Elements on the fullest of the ranks whose partitions a backward came to."""
        self._most_touched = max(touched)

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
            "buffers": self.unit * self.largest,
        }

    def during(self, steps: tuple[Step, ...]) -> Iterator[tuple[int, Held]]:
        """Forward, loss, backward."""
        for at, step in enumerate(steps):
            if step.phase not in {"before", "after"}:
                yield at, self.holding(self._during(step))

    def reduced(self) -> Iterator[tuple[Reduction | None, Held]]:
        """Reductions while the backward runs, or after it."""
        yield from self._reduced_at_once() if self._at_once else self._reduced_after()

    def _bucket(self) -> dict[str, int]:
        return {"buffers": self.unit * self.config.bucket * self.config.buffers}

    def _earlier(self) -> dict[str, int]:
        """Gradients that stage 1 has of earlier micro-batches: all of them."""
        whole = self.again and not self._cuts_gradients
        return {"gradients": self.unit * self.trainable} if whole else {}

    def _during(self, step: Step) -> dict[str, int]:
        """Bytes of gradients, and of the bucket they wait in."""
        made = layout.finished(self.model, step) + step.grads
        if self.again and not self._cuts_gradients:
            # Stage 1 keeps its bucket from one micro-batch to the next.
            return self._earlier() | self._bucket() | self.coming(step)
        if step.phase != "backward" or not made:
            return {"gradients": self._mine(0)}
        if not self._at_once:
            return self._bucket() | {"gradients": self.unit * made}
        reductions, done = self.reductions(backward=True), made - self.shared
        ends = [one.moved for one in reductions]
        number = bisect_left(ends, done)
        # A full bucket is reduced when the next gradient comes, a large gradient at once.
        if done in ends[number : number + 1] and self.is_large(reductions[number]):
            number += 1
        moved = ends[number - 1] if number else 0
        return self._bucket() | {"gradients": self._mine(moved)} | self.coming(step)

    def _mine(self, moved: int) -> int:
        """Bytes of reduced gradients of this micro-batch, and under stage 2 of earlier ones."""
        mine = self._partition_buffer(moved)
        if not self.again or not self._cuts_gradients or self.offloaded:
            return mine
        return max(self.unit * self._most_touched, 2 * mine)

    def _partition_buffer(self, moved: int, *, backward: bool = True) -> int:
        """Bytes of reduced gradients on the fullest of the ranks that were reached by now."""
        if not moved or self.offloaded:
            return 0
        reached = -(-moved // max(1, self.partition))
        most = self._from_the_last if backward else self._from_the_first
        return self.unit * most[reached - 1]

    def _reduced_at_once(self) -> Iterator[tuple[Reduction, Held]]:
        """Buckets that fill while the backward runs."""
        made = self.reductions(backward=True)
        for one in _telling(made):
            before = self._mine(one.moved - one.filled)
            after = self._mine(one.moved)
            around = {"gradients": self.outside(one)}
            for grads, temporary in ((before, self._flat(one)), (after, self._norm())):
                yield (
                    one,
                    self.holding(
                        self._earlier(),
                        self._bucket(),
                        around,
                        {"gradients": grads, "temporaries": temporary},
                    ),
                )

    def _flat(self, one: Reduction) -> int:
        """Bytes of the copy that is reduced, where pieces go to several ranks.

        A parameter above the bucket's size goes piece by piece, or a bucket of them at once.
        """
        if not one.split or (self.is_large(one) and self.partition > self.config.bucket):
            return 0
        return self.unit * min(one.filled, self.config.bucket + self.partition)

    def _norm(self) -> int:
        """Bytes of the fp64 copy, for its norm, of a gradient on its way to the host."""
        return NORM * min(self.largest, self.partition) if self.offloaded else 0

    def _reduced_after(self) -> Iterator[tuple[None, Held]]:
        """Stage 1: all gradients exist, and go through the bucket from the first to the last."""
        worst = max(self._one_after_the_other(), key=sum)
        gradients, temporaries = worst
        yield (
            None,
            self.holding(self._bucket(), {"gradients": gradients, "temporaries": temporaries}),
        )

    def _one_after_the_other(self) -> Iterator[tuple[int, int]]:
        """Bytes of gradients and temporaries, before and after each reduction."""
        outside = 0
        for one in self.reductions(backward=False):
            outside += one.filled if self.is_large(one) else 0
            rest = self.unit * (self.trainable - one.moved + outside)
            before = self._partition_buffer(one.moved - one.filled, backward=False)
            yield rest + before, self._flat(one)
            yield rest + self._partition_buffer(one.moved, backward=False), self._norm()

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
