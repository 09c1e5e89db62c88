"""FSDP units of one rank, in bytes, and the memory that a rank holds throughout a step.

Shared by FSDP1 and FSDP2, whose timelines are in `fsdp1` and `fsdp2`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from nbdist.planner.memory.timeline import Allocation

if TYPE_CHECKING:
    from nbdist.planner.memory.timeline import BytesByPart
    from nbdist.planner.memory.training_setup import TrainingSetup
    from nbdist.planner.model_spec import LayerGroup, ModelSpec

MicroBatchPosition = Literal["only", "first", "middle", "last"]
"""Position of a micro-batch in an optimizer step; gradients are reduced in the last (or only)."""

_HALF, _FULL = 2, 4


class FsdpUnit(NamedTuple):
    """One FSDP unit, in bytes; all zero for a group without parameters."""

    full_param_bytes: int = 0
    """All parameters in the compute dtype, padded to equal shards."""
    gradient_bytes: int = 0
    """All gradients as autograd makes them."""
    reduce_bytes: int = 0
    """All gradients in the reduce dtype, padded."""
    accumulated_grad_bytes: int = 0
    """All gradients as accumulated until the last micro-batch."""
    largest_grad_bytes: int = 0
    """The largest gradient as autograd makes it."""
    reduce_shard_bytes: int = 0
    """This rank's gradient shard, in the reduce dtype."""
    param_shard_bytes: int = 0
    """This rank's parameter shard."""
    grad_shard_bytes: int = 0
    """This rank's gradient shard, in the parameters' dtype."""
    num_trainable: int = 0
    """Trainable elements of this rank's shard."""
    largest_shard_size: int = 0
    """Elements of this rank's shard of the largest parameter."""


@dataclass(frozen=True, slots=True)
class DtypeBytes:
    """Bytes per element."""

    compute: int
    """Gathered parameters, and the gradients that autograd makes."""
    reduce: int
    stored: int
    """Trainable parameters in shards."""
    frozen: int
    """Frozen parameters in shards."""

    @classmethod
    def for_model(cls, model: ModelSpec, setup: TrainingSetup) -> DtypeBytes:
        """Return the widths of a model under a setup."""
        if setup.is_half_precision:
            # In mixed precision accelerate 1.15 makes trainable shards fp32; nbdist reduces in it.
            return cls(compute=_HALF, reduce=_FULL, stored=_FULL, frozen=model.element)
        return cls(*[model.element] * 4)


class TransientMemory(NamedTuple):
    """Memory besides the current unit, in bytes, constant while the unit is at work."""

    gathered: int
    """Gathered parameters and gather buffers."""
    full_gradients: int = 0
    """Pending full gradients."""
    gradient_shards: int = 0
    """Gradient shards."""
    buffers: int = 0
    """Buffers of a running reduction."""


@dataclass(frozen=True, kw_only=True)
class FsdpRankMemory:
    """Units of a model on one rank, and the memory that is constant during a step."""

    model: ModelSpec
    setup: TrainingSetup
    dtype_bytes: DtypeBytes
    units: tuple[FsdpUnit, ...]
    """One unit for each of the model's groups."""
    is_flat: bool
    """True if shards are pieces of flat parameters."""
    transient_memory: dict[tuple[MicroBatchPosition, str, int, int], TransientMemory] = field(
        default_factory=dict
    )
    """Cache: micro-batch, phase, group, index -> transient memory."""

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Groups of the model."""
        return self.model.groups

    @cached_property
    def tied(self) -> bool:
        """True if embedding and tail share a parameter."""
        return self.model.tied

    @cached_property
    def last_group(self) -> int:
        """Index of the last group."""
        return len(self.units) - 1

    @cached_property
    def reshard_after_forward(self) -> bool:
        """True if blocks are sharded between forward and backward."""
        return self.setup.options.reshard_after_forward

    @cached_property
    def total_unit(self) -> FsdpUnit:
        """The sum over all units of the model."""
        pairs = list(zip(self.units, self.groups, strict=True))
        return FsdpUnit(
            *(sum(g.count * unit[n] for unit, g in pairs) for n in range(len(FsdpUnit())))
        )

    def pending_gradient_bytes(
        self, micro: MicroBatchPosition, accumulated: int, kept: int
    ) -> tuple[int, int]:
        """Return pending full gradients and gradient shards, in bytes.

        Args:
            micro: position of the micro-batch.
            accumulated: full gradients of the units whose backward has ended in it.
            kept: their gradient shards.
        """
        if micro == "only":
            return 0, kept
        if micro == "first":
            return accumulated, 0
        if micro == "middle":
            return self.total_unit.accumulated_grad_bytes, 0
        return self.total_unit.accumulated_grad_bytes - accumulated, kept

    @cached_property
    def is_offloaded(self) -> bool:
        """True if shards, gradients and optimizer are in host memory."""
        return self.setup.options.offload_device != "none"

    def allocation_for(self, place: TransientMemory, *, gradients: int = 0) -> Allocation:
        """Return the memory held with this transient memory.

        Args:
            place: memory besides the current unit.
            gradients: bytes of full gradients in addition to the pending ones.
        """
        parts = {
            "gradients": place.full_gradients + gradients,
            "buffers": place.buffers,
            "gathered": place.gathered,
        }
        return self._placed(parts, place.gradient_shards)

    def optimizer_step_allocation(self) -> Allocation:
        """Return the memory of the optimizer step: all gradient shards, and temporaries."""
        largest = max(unit.largest_shard_size for unit in self.units)
        scratch = self.setup.optimizer.num_temporaries(self.total_unit.num_trainable, largest)
        return self._placed(
            {}, self.total_unit.grad_shard_bytes, {"temporaries": self.dtype_bytes.stored * scratch}
        )

    def _placed(
        self, parts: BytesByPart, shards: int, update: BytesByPart | None = None
    ) -> Allocation:
        """Put shards and optimizer state on the device or in host memory."""
        where = (self._shards, {"gradients": shards}, update or {})
        return Allocation(parts, host=where) if self.is_offloaded else Allocation(*where, parts)

    @cached_property
    def _shards(self) -> BytesByPart:
        """Bytes of parameters and optimizer state on this rank."""
        state = self.setup.optimizer.state_bytes(
            self.total_unit.num_trainable, element=self.dtype_bytes.stored, flat=self.is_flat
        )
        return {"parameters": self.total_unit.param_shard_bytes, "optimizer": state}


def build_unit(
    group: LayerGroup, widths: DtypeBytes, share: int, ranks: int, *, accumulate: int, largest: int
) -> FsdpUnit:
    """Return a group as a unit.

    Args:
        group: parameters that are used together.
        widths: bytes per element.
        share: elements of the first rank's shard.
        ranks: number of shards.
        accumulate: bytes per element of accumulated gradients.
        largest: elements of the largest parameter in the first rank's shard.
    """
    trained = share * group.trainable // group.num_params if group.num_params else 0
    return FsdpUnit(
        full_param_bytes=widths.compute * share * ranks,
        gradient_bytes=widths.compute * group.trainable,
        reduce_bytes=widths.reduce * trained * ranks,
        accumulated_grad_bytes=accumulate * group.trainable,
        largest_grad_bytes=widths.compute * group.largest if group.trainable else 0,
        reduce_shard_bytes=widths.reduce * trained,
        param_shard_bytes=widths.stored * trained + widths.frozen * (share - trained),
        grad_shard_bytes=widths.stored * trained,
        num_trainable=trained,
        largest_shard_size=largest if trained else 0,
    )
