"""Units of FSDP on one rank, in bytes, and what a rank holds all step long.

What FSDP1 and FSDP2 have in common; their stories are in `fsdp1` and `fsdp2`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nbdist.plan.memory import Moment, named

if TYPE_CHECKING:
    from nbdist.plan.memory import Setup
    from nbdist.plan.spec import Group, ModelSpec, Step

Micro = Literal["only", "first", "middle", "last"]
"""Which micro-batch of an optimizer step: gradients are reduced in the only or last one."""

_HALF, _FULL = 2, 4


@dataclass(frozen=True, slots=True)
class Unit:
    """One FSDP unit, in bytes; all zero for a group without parameters."""

    whole: int = 0
    """All parameters in the type that is computed with, padded to equal shares."""
    gradients: int = 0
    """All gradients as autograd makes them."""
    reduced: int = 0
    """All gradients in the type they are reduced in, padded."""
    accumulated: int = 0
    """All gradients as they wait for the last micro-batch."""
    largest: int = 0
    """The largest gradient as autograd makes it."""
    reduced_shard: int = 0
    """This rank's share of the gradients, in the type they are reduced in."""
    stored: int = 0
    """This rank's share of the parameters."""
    kept: int = 0
    """This rank's share of the gradients, in the parameters' type."""
    trained: int = 0
    """This rank's share of the trainable parameters, in elements."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes per element."""

    compute: int
    """Of parameters in use, and of the gradients that autograd makes."""
    reduce: int
    stored: int
    """Of trainable parameters in shards."""
    frozen: int
    """Of frozen parameters in shards."""

    @classmethod
    def of(cls, model: ModelSpec, setup: Setup) -> Widths:
        """Under mixed precision accelerate 1.15 makes trainable shards fp32; nbdist reduces so."""
        if setup.half:
            return cls(compute=_HALF, reduce=_FULL, stored=_FULL, frozen=model.element)
        return cls(*[model.element] * 4)


@dataclass(frozen=True, slots=True)
class Ground:
    """The units of a model on one rank, and what stays the same all step long."""

    model: ModelSpec
    setup: Setup
    widths: Widths
    units: tuple[Unit, ...]
    """Of one of each of the model's groups."""
    tail: int
    """Index of the last group."""

    @property
    def resharded(self) -> bool:
        """Blocks are in shards between forward and backward."""
        return self.setup.reshard_after_forward

    @property
    def offload(self) -> bool:
        """Shards, gradients and optimizer live in the host's memory."""
        return self.setup.options.offload_device != "none"

    def total(self, field: str) -> int:
        """A field of `Unit` over all units of the model."""
        counts = (group.count for group in self.model.groups)
        pairs = zip(self.units, counts, strict=True)
        return sum(count * int(getattr(unit, field)) for unit, count in pairs)

    def state(self) -> int:
        """Bytes of optimizer state on this rank."""
        return int(self.setup.optimizer.state * self.total("trained"))

    def moment(  # noqa: PLR0913 - the parts of a moment
        self,
        step: Step,
        *,
        whole_gradients: int,
        gradient_shards: int,
        gathered: int,
        buffers: int = 0,
        activations: int | None = None,
        loss: int = 0,
    ) -> Moment:
        """A moment with what the rank holds anyway."""
        device = {
            "gradients": whole_gradients,
            "buffers": buffers,
            "gathered": gathered,
            "activations": step.activations if activations is None else activations,
            "logits": step.outputs + loss,
        }
        return self._placed(named(self.model, step), device, gradient_shards)

    def optimizer_step(self, outputs: int) -> Moment:
        """All gradient shards, and the temporaries of the update."""
        temporaries = self._temporaries()
        return self._placed("optimizer step", {"logits": outputs}, self.total("kept"), temporaries)

    def _placed(
        self, name: str, device: dict[str, int], gradient_shards: int, temporaries: int = 0
    ) -> Moment:
        """Put shards and optimizer where they live: beside the rest, or in the host's memory."""
        sharded = {
            "parameters": self.total("stored"),
            "gradients": gradient_shards,
            "optimizer": self.state(),
            "temporaries": temporaries,
        }
        if self.offload:
            return Moment(name=name, parts=device, host=sharded)
        parts = {key: device.get(key, 0) + sharded.get(key, 0) for key in {**sharded, **device}}
        return Moment(name=name, parts=parts)

    def _temporaries(self) -> int:
        """What the optimizer's step needs besides."""
        width = self.widths.stored
        largest = max((unit.trained for unit in self.units), default=0)
        return {
            "foreach": width * self.total("trained"),
            "fused": 0,
            "loop": 2 * width * largest,
        }[self.setup.optimizer.how]


def unit(group: Group, widths: Widths, share: int, ranks: int, *, accumulate: int) -> Unit:
    """A group whose first rank keeps `share` elements; gradients wait with `accumulate` bytes."""
    trained = share * group.trainable // group.params if group.params else 0
    return Unit(
        whole=widths.compute * share * ranks,
        gradients=widths.compute * group.trainable,
        reduced=widths.reduce * trained * ranks,
        accumulated=accumulate * group.trainable,
        largest=widths.compute * group.largest if group.trainable else 0,
        reduced_shard=widths.reduce * trained,
        stored=widths.stored * trained + widths.frozen * (share - trained),
        kept=widths.stored * trained,
        trained=trained,
    )
