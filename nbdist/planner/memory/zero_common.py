"""What ZeRO's stages have in common: DeepSpeed's config, and a story's beginnings.

`zero` tells stages 1 and 2, `zero3` tells stage 3. Facts are of DeepSpeed 0.19.8, measured
tensor by tensor with the config that `strategies` hands it.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nbdist.errors import PlanError
from nbdist.planner import model_spec
from nbdist.planner.memory import partitioning, timeline, zero3_prefetch
from nbdist.planner.memory.timeline import Held
from nbdist.strategies import Hardware

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.planner.memory.partitioning import Place, Reduction
    from nbdist.planner.memory.timeline import Parts
    from nbdist.planner.memory_model import Setup
    from nbdist.planner.model_spec import MicroBatch, ModelSpec, Step

CUTS_GRADIENTS = 2
CUTS_PARAMETERS = 3
MASTER = 4
"""Bytes of an element of the master copy, which is always fp32."""
NORM = 8
"""Bytes of an element while a norm is taken, in fp64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What DeepSpeed was told, in elements; its own defaults elsewhere."""

    bucket: int
    buffers: int
    """Buckets that exist at once."""
    overlap: bool
    sub_group: int
    rules: zero3_prefetch.Rules
    offload_optimizer: Mapping[str, Any]
    offload_param: Mapping[str, Any]


def read_config(model: ModelSpec, setup: Setup) -> Config:
    """Read the session's config as DeepSpeed will (runtime/zero/config.py)."""
    strategy = setup.options.strategy
    hardware = Hardware(kind=setup.kind, world_size=setup.world_size)
    zero = strategy.deepspeed_config(setup.options, hardware)["zero_optimization"]
    number = _Numbers(zero, model)
    cuts_parameters = strategy.level == CUTS_PARAMETERS
    overlap = zero.get("overlap_comm")
    overlap = cuts_parameters if overlap is None else bool(overlap)
    contiguous = bool(zero.get("contiguous_gradients", True))
    return Config(
        bucket=number("reduce_bucket_size", 5e8),
        buffers=int(contiguous) * (2 if overlap and not cuts_parameters else 1),
        overlap=overlap,
        sub_group=number("sub_group_size", 1e9),
        rules=zero3_prefetch.Rules(
            prefetch=number("stage3_prefetch_bucket_size", 5e7),
            max_live=number("stage3_max_live_parameters", 1e9),
            reuse=number("stage3_max_reuse_distance", 1e9),
            persist=number("stage3_param_persistence_threshold", 1e5),
        ),
        offload_optimizer=zero.get("offload_optimizer", {}),
        offload_param=zero.get("offload_param", {}),
    )


class _Numbers:
    """Numbers of the zero_optimization section; accelerate 1.15 fills "auto" by hidden size."""

    def __init__(self, zero: Mapping[str, Any], model: ModelSpec) -> None:
        # The smallest parameter beside the head is the final norm's, of hidden size.
        hidden = min(partitioning.sizes(model.groups[-1]), default=0)
        self._zero = zero
        self._automatic = {
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": 9 * hidden * hidden // 10,
            "stage3_param_persistence_threshold": 10 * hidden,
        }

    def __call__(self, key: str, default: float) -> int:
        value = self._zero.get(key, default)
        return self._automatic.get(key, int(default)) if value == "auto" else int(value)


class Story(timeline.Story):
    """A training step under DeepSpeed; of several micro-batches the last, which has the most."""

    def __init__(self, model: ModelSpec, setup: Setup) -> None:
        """Work out what all moments need."""
        super().__init__(model)
        self.setup = setup
        self.config = read_config(model, setup)
        self.unit = 2 if setup.half else 4
        """Bytes of an element of parameters and gradients in use."""
        self.trainable = model_spec.trainable(model)
        if not self.trainable:
            message = "the model has no trainable parameter; DeepSpeed needs one, so unfreeze some."
            raise PlanError(message)
        self.largest = max(max(partitioning.sizes(one), default=0) for one in model.groups)
        """Elements of the largest trainable parameter."""
        self.offloaded = setup.options.offload_device != "none"
        self.again = setup.options.accumulate > 1
        """Gradients of earlier micro-batches exist."""
        self.shared = partitioning.shared(model)

    @cached_property
    def partition(self) -> int:
        """Elements of a rank's share of the master copy."""
        return partitioning.partition(self.trainable, self.setup.world_size)

    @abstractmethod
    def held(self) -> dict[str, int]:
        """Bytes on the device that stay for good."""

    @abstractmethod
    def host(self) -> dict[str, int]:
        """Bytes in host memory that stay for good."""

    def nvme(self) -> int:
        """Bytes on NVMe."""
        return 0

    @abstractmethod
    def reduced(self) -> Iterator[tuple[Reduction, Parts]]:
        """What comes on top at those reductions that may be the fullest, in their order."""

    @abstractmethod
    def updated(self) -> Iterator[tuple[str, Held]]:
        """What is held at the parts of an optimizer's step, each with its name."""

    def between(self, run: MicroBatch) -> Iterator[tuple[str, Held, int]]:
        """Reductions, then the optimizer's step."""
        before = model_spec.saved_before(self.model, run)
        for reduction, held in self._reduced:
            yield "gradient reduction", held, self._alive(reduction, run, before)
        for name, held in self._updated:
            yield name, held, 0

    @cached_property
    def _reduced(self) -> list[tuple[Reduction, Held]]:
        """Reductions one of which is the fullest for any micro-batch."""
        found: list[tuple[Reduction, int, Parts]] = []
        for one, parts in self.reduced():
            size = sum(parts.values())
            if not any(more >= size and _is_before(other, one) for other, more, _ in found):
                found.append((one, size, parts))
        return [(one, self.holding(parts)) for one, _, parts in found]

    @cached_property
    def _updated(self) -> list[tuple[str, Held]]:
        return list(self.updated())

    def holding(self, *more: Parts, host: Parts | None = None) -> Held:
        """Put together what is held for good and what comes on top."""
        kept, away, files = self._for_good
        return Held(kept, *more, host=(away, host) if host else (away,), nvme=files)

    @cached_property
    def _for_good(self) -> tuple[dict[str, int], dict[str, int], int]:
        """What stays on the device, in host memory and on NVMe."""
        return self.held(), self.host(), self.nvme()

    def state(self) -> dict[str, int]:
        """Bytes of master copy and optimizer state, wherever they are."""
        optimizer = self.setup.optimizer
        return {
            "master": MASTER * self.partition,
            "optimizer": optimizer.state_bytes(self.partition, flat=True),
        }

    def page_locked(self, *sizes: int) -> int:
        """Bytes that page-locked tensors of these sizes take beyond them.

        torch 2.13 rounds each one up to a power of two (CachingHostAllocator.h).
        """
        if not self.config.offload_optimizer.get("pin_memory"):
            return 0
        return sum((1 << (size - 1).bit_length()) - size for size in sizes if size)

    def update(self, elements: int) -> dict[str, int]:
        """Bytes of updating so many elements: fp32 gradients and the optimizer's temporaries."""
        return {
            "gradients": MASTER * elements,
            "temporaries": MASTER * self.setup.optimizer.scratch(elements, elements),
        }

    def host_update(self, elements: int) -> dict[str, int]:
        """Bytes of temporaries of updating in host memory; DeepSpeed's own works in place."""
        optimizer = self.setup.optimizer
        copies = 0 if optimizer.cpu_version else optimizer.alone
        return {"temporaries": round(MASTER * copies * elements)}

    def coming(self, step: Step) -> dict[str, int]:
        """Bytes of gradients that are made and not in the bucket yet."""
        return {"temporaries": self.unit * partitioning.coming(self.model, step)}

    def outside(self, reduction: Reduction) -> int:
        """Bytes of gradients in no bucket while one is reduced.

        The one that comes next, a tied head's, which waits for the embedding's part until the
        backward is over, and a large one, which is reduced where it is.
        """
        at = reduction.at
        head = 0 if at is None or self._is_tied_head(at) else self.shared
        waits = 0 if at is None else at.size + head
        large = reduction.filled if self.is_large(reduction) else 0
        return self.unit * (waits + large)

    def is_large(self, reduction: Reduction) -> bool:
        """Whether it is of one parameter above the bucket's size."""
        return reduction.filled > self.config.bucket

    def _alive(self, reduction: Reduction, run: MicroBatch, before: list[int]) -> int:
        """Bytes of activations when a reduction begins, those `before` its group's included.

        It begins when the gradient that finds no room exists: at the first instant of its group
        with so many gradients.
        """
        place = reduction.at
        if place is None or self._is_tied_head(place):
            return 0
        own = run.passes[place.group]
        made = [one.held for one in own.backward if one.grads >= reduction.own]
        held = max(made or [one.held for one in own.backward], default=0)
        return before[place.group] + place.nth * own.saved + held

    def _is_tied_head(self, place: Place) -> bool:
        """Whether it is the first of all: its gradient is complete when the backward is over."""
        return self.model.tied and place == partitioning.places(self.model.groups, tied=True)[0]

    def reductions(self, *, backward: bool) -> tuple[Reduction, ...]:
        """The reductions of this model's gradients."""
        return partitioning.reductions(
            self.model.groups,
            tied=self.model.tied,
            world_size=self.setup.world_size,
            bucket=self.config.bucket,
            backward=backward,
        )


def _is_before(other: Reduction, one: Reduction) -> bool:
    """Whether another reduction, not later than one, has its activations and perhaps more."""
    if one.at is None or other.at is None:
        return one.at is None
    return other.at.group == one.at.group and other.own <= one.own
