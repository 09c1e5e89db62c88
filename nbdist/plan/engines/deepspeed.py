"""What ZeRO's stages have in common: DeepSpeed's config, and a story's beginnings.

`zero` tells stages 1 and 2, `zero3` tells stage 3. Facts are of DeepSpeed 0.19.8, measured
tensor by tensor with the config that `strategies` hands it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nbdist.errors import PlanError
from nbdist.plan import spec
from nbdist.plan.engines import gathering, layout
from nbdist.plan.memory import Moment
from nbdist.strategies import Hardware

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nbdist.plan.engines.layout import Place, Reduction
    from nbdist.plan.memory import Parts, Setup
    from nbdist.plan.spec import ModelSpec, Step, Workload

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
    rules: gathering.Rules
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
        rules=gathering.Rules(
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
        hidden = min(layout.sizes(model.groups[-1]), default=0)
        self._zero = zero
        self._automatic = {
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": 9 * hidden * hidden // 10,
            "stage3_param_persistence_threshold": 10 * hidden,
        }

    def __call__(self, key: str, default: float) -> int:
        value = self._zero.get(key, default)
        return self._automatic.get(key, int(default)) if value == "auto" else int(value)


class Story(ABC):
    """A training step under DeepSpeed; of several micro-batches the last, which has the most."""

    def __init__(self, model: ModelSpec, workload: Workload, setup: Setup) -> None:
        """Work out what all moments need."""
        self.model, self.workload, self.setup = model, workload, setup
        self.config = read_config(model, setup)
        self.unit = 2 if setup.half else 4
        """Bytes of an element of parameters and gradients in use."""
        self.trainable = spec.trainable(model)
        if not self.trainable:
            message = "the model has no trainable parameter; DeepSpeed needs one, so unfreeze some."
            raise PlanError(message)
        self.largest = max(max(layout.sizes(one), default=0) for one in model.groups)
        """Elements of the largest trainable parameter."""
        self.offloaded = setup.options.offload_device != "none"
        self.again = setup.options.accumulate > 1
        """Gradients of earlier micro-batches exist."""
        self.shared = layout.shared(model)
        self.run = model.micro_batch(workload)

    @cached_property
    def partition(self) -> int:
        """Elements of a rank's share of the master copy."""
        return layout.partition(self.trainable, self.setup.world_size)

    @abstractmethod
    def held(self) -> dict[str, int]:
        """Bytes on the device that stay for good."""

    @abstractmethod
    def host(self) -> dict[str, int]:
        """Bytes in host memory that stay for good."""

    def nvme(self) -> int:
        """Bytes on NVMe."""
        return 0

    def moment(self, name: str, *more: Parts, host: Parts | None = None) -> Moment:
        """Put a moment together of what is held and of what comes on top."""
        held, away, files = self._for_good
        return Moment(
            name=name,
            parts=total((held, *more)),
            host=total((away, host)) if host else away,
            nvme=files,
        )

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

    def outputs(self) -> dict[str, int]:
        """Bytes of the logits that a cell's variable keeps."""
        return {"logits": self.run.outputs}

    def activations(self, step: Step) -> dict[str, int]:
        """Bytes of a step's activations and logits."""
        loss = step.phase == "loss"
        return {
            "activations": step.activations + (0 if loss else step.inside),
            "logits": step.outputs + (step.inside if loss else 0),
        }

    def coming(self, step: Step) -> dict[str, int]:
        """Bytes of gradients that are made and not in the bucket yet."""
        if step.phase != "backward":
            return {}
        new = min(step.grads, self.model.groups[step.group].largest)
        tail = step.group == len(self.model.groups) - 1
        return {"temporaries": self.unit * (new + (0 if tail else self.shared))}

    def outside(self, reduction: Reduction) -> int:
        """Bytes of gradients in no bucket while one is reduced.

        The one that comes next, a tied head's, and a large one, which is reduced where it is.
        """
        at = reduction.at
        waits = 0 if at is None else max(at.size, self.shared)
        large = reduction.filled if self.is_large(reduction) else 0
        return self.unit * (waits + large)

    def is_large(self, reduction: Reduction) -> bool:
        """Whether it is of one parameter above the bucket's size."""
        return reduction.filled > self.config.bucket

    def at(self, reduction: Reduction) -> dict[str, int]:
        """Bytes of activations when a reduction begins."""
        place = reduction.at
        if place is None or self._is_tied_head(place):
            return self.outputs()
        before = sum(
            group.count * part.saved
            for group, part in list(zip(self.model.groups, self.run.passes, strict=True))[
                : place.group
            ]
        )
        own = self.run.passes[place.group]
        made = [one.held for one in own.backward if one.grads >= reduction.own]
        held = min(made or [one.held for one in own.backward], default=0)
        return {"activations": before + place.nth * own.saved + held} | self.outputs()

    def _is_tied_head(self, place: Place) -> bool:
        """Whether it is the first of all: its gradient is complete when the backward is over."""
        return self.model.tied and place == layout.places(self.model.groups, tied=True)[0]

    def reductions(self, *, backward: bool) -> tuple[Reduction, ...]:
        """The reductions of this model's gradients."""
        return layout.reductions(
            self.model.groups,
            tied=self.model.tied,
            world_size=self.setup.world_size,
            bucket=self.config.bucket,
            backward=backward,
        )


def total(many: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add parts up by name."""
    sums: dict[str, int] = {}
    for parts in many:
        for name, count in parts.items():
            sums[name] = sums.get(name, 0) + count
    return sums
