"""Units of FSDP on one rank, in bytes, and what a rank holds all step long.

What FSDP1 and FSDP2 have in common; their stories are in `fsdp1` and `fsdp2`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from nbdist.planner.memory.timeline import Held

if TYPE_CHECKING:
    from nbdist.planner.memory.timeline import Parts
    from nbdist.planner.memory_model import Setup
    from nbdist.planner.model_spec import Group, ModelSpec

Micro = Literal["only", "first", "middle", "last"]
"""Which micro-batch of an optimizer step: gradients are reduced in the only or last one."""

_HALF, _FULL = 2, 4


class Unit(NamedTuple):
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
    largest_shard: int = 0
    """Its share of the largest parameter, in elements."""


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


class Place(NamedTuple):
    """What is there beside a unit at work, in bytes; the same for all moments of its work."""

    gathered: int
    """Whole parameters, and buffers they are gathered in."""
    whole: int = 0
    """Whole gradients that wait."""
    shards: int = 0
    """Gradient shards."""
    buffers: int = 0
    """A reduction that is under way."""


@dataclass(frozen=True, kw_only=True)
class Ground:
    """The units of a model on one rank, and what stays the same all step long."""

    model: ModelSpec
    setup: Setup
    widths: Widths
    units: tuple[Unit, ...]
    """Of one of each of the model's groups."""
    flat: bool
    """Shards are pieces of flat parameters."""
    places: dict[tuple[Micro, str, int, int], Place] = field(default_factory=dict)
    """Micro-batch, phase, group, index -> what is there; filled on the way."""

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Groups of the model."""
        return self.model.groups

    @cached_property
    def tied(self) -> bool:
        """The embedding's parameters are the tail's."""
        return self.model.tied

    @cached_property
    def tail(self) -> int:
        """Index of the last group."""
        return len(self.units) - 1

    @cached_property
    def resharded(self) -> bool:
        """Blocks are in shards between forward and backward."""
        return self.setup.options.reshard_after_forward

    @cached_property
    def all(self) -> Unit:
        """The sum over all units of the model."""
        pairs = list(zip(self.units, self.groups, strict=True))
        return Unit(*(sum(g.count * unit[n] for unit, g in pairs) for n in range(len(Unit()))))

    def waiting(self, micro: Micro, accumulated: int, kept: int) -> tuple[int, int]:
        """Whole gradients that wait for the last micro-batch, and gradient shards, in bytes.

        Args:
            micro: which micro-batch runs.
            accumulated: whole gradients of the units whose backward is over in it.
            kept: their gradient shards.
        """
        if micro == "only":
            return 0, kept
        if micro == "first":
            return accumulated, 0
        if micro == "middle":
            return self.all.accumulated, 0
        return self.all.accumulated - accumulated, kept

    @cached_property
    def offload(self) -> bool:
        """Shards, gradients and optimizer live in the host's memory."""
        return self.setup.options.offload_device != "none"

    def held(self, place: Place, *, gradients: int = 0) -> Held:
        """What is held at a place.

        Args:
            place: what is there beside.
            gradients: bytes of whole gradients on top of those that wait.
        """
        parts = {
            "gradients": place.whole + gradients,
            "buffers": place.buffers,
            "gathered": place.gathered,
        }
        return self._placed(parts, place.shards)

    def optimizer_step(self) -> Held:
        """All gradient shards, and the temporaries of the update."""
        largest = max(unit.largest_shard for unit in self.units)
        scratch = self.setup.optimizer.scratch(self.all.trained, largest)
        return self._placed({}, self.all.kept, {"temporaries": self.widths.stored * scratch})

    def _placed(self, parts: Parts, shards: int, update: Parts | None = None) -> Held:
        """Put shards and optimizer where they live: beside the rest, or in the host's memory."""
        where = (self._shards, {"gradients": shards}, update or {})
        return Held(parts, host=where) if self.offload else Held(*where, parts)

    @cached_property
    def _shards(self) -> Parts:
        """Bytes of parameters and optimizer state on this rank."""
        state = self.setup.optimizer.state_bytes(
            self.all.trained, element=self.widths.stored, flat=self.flat
        )
        return {"parameters": self.all.stored, "optimizer": state}


def unit(
    group: Group, widths: Widths, share: int, ranks: int, *, accumulate: int, largest: int
) -> Unit:
    """A group as a unit.

    Args:
        group: parameters that are used together.
        widths: bytes per element.
        share: elements that the first rank keeps.
        ranks: how many share it.
        accumulate: bytes per element of gradients that wait for the last micro-batch.
        largest: elements of the largest parameter that the first rank keeps.
    """
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
        largest_shard=largest if trained else 0,
    )
