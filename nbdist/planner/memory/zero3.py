"""DeepSpeed's training step under ZeRO-3.

Parameters are cut one by one and gathered for use (`gathering`); reduced gradients and the
bucket have buffers that stay. DeepSpeed 0.19.8, runtime/zero/stage3.py.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from nbdist.planner.memory import partitioning, zero3_prefetch
from nbdist.planner.memory.timeline import records, total
from nbdist.planner.memory.zero_common import MASTER, NORM, Story
from nbdist.planner.model_spec import last_and

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.planner.memory.partitioning import Reduction
    from nbdist.planner.memory.timeline import Held, Parts
    from nbdist.planner.memory.zero3_prefetch import Rules, Where
    from nbdist.planner.memory_model import Setup
    from nbdist.planner.model_spec import Group, ModelSpec, Step, Visits

_SWAP_BUFFERS = 4
_PARAM_BUFFERS = 5
_PARAM_BUFFER = 1e8
_PARAMS_IN_HOST = 1e9
"""Defaults of an offload to NVMe (runtime/zero/offload_config.py)."""


class Cut(Story):
    """Stage 3."""

    def __init__(self, model: ModelSpec, setup: Setup) -> None:
        """Replay what is gathered when."""
        super().__init__(model, setup)
        self._params_away = setup.options.offload_params
        self._on_nvme = setup.options.offload_device == "nvme"
        self._gathered = zero3_prefetch.gathered(
            model.groups,
            tied=model.tied,
            recompute=setup.options.activation_checkpointing,
            rules=self.config.rules,
        )

    @cached_property
    def visited(self) -> Visits:
        """Gathered bytes are not affine in a block's index; all else is the same in each."""
        return last_and(self.model.groups, self._gathered.fullest)

    @cached_property
    def partition(self) -> int:
        """Elements of a rank's share; each parameter is cut by itself."""
        return self._share(partitioning.sizes)

    def _share(self, sizes: Callable[[Group], tuple[int, ...]]) -> int:
        """Elements that one rank has of parameters."""
        ranks = self.setup.world_size
        return sum(
            group.count * -(-size // ranks) for group in self.model.groups for size in sizes(group)
        )

    def held(self) -> dict[str, int]:
        """Shares of parameters, gradients and state, and the bucket."""
        parts = {"buffers": self.unit * self.config.bucket * self.config.buffers}
        if not self._params_away:
            parts["parameters"] = self._parameters()
        if self.offloaded:
            return parts
        return parts | self.state() | {"gradients": self.unit * self.partition}

    def _parameters(self) -> int:
        """Bytes of a rank's share of all parameters."""
        return self.unit * (self.partition + self._share(partitioning.frozen_sizes))

    def host(self) -> dict[str, int]:
        """What an offload to the host holds, or passes through it on its way to NVMe."""
        if not self.offloaded:
            return {}
        # Reduced gradients as they come, and in fp32 for the step.
        parts = {"gradients": (self.unit + MASTER) * self.partition}
        if not self._on_nvme:
            locked = self.page_locked(self.unit * self.partition, MASTER * self.partition)
            parts |= self.state() | {"buffers": locked}
            return parts | ({"parameters": self._parameters()} if self._params_away else {})
        parts["buffers"] = MASTER * self._swap_buffers() * min(self.partition, self._sub_group())
        return total((parts, self._params_in_host())) if self._params_away else parts

    def _sub_group(self) -> int:
        """Elements that are updated at once: no more than the config says, but one parameter."""
        ranks = self.setup.world_size
        return min(self.partition, max(self.config.sub_group, -(-self.largest // ranks)))

    def _swap_buffers(self) -> int:
        return int(self.config.offload_optimizer.get("buffer_count", _SWAP_BUFFERS))

    def _params_in_host(self) -> dict[str, int]:
        """Page-locked buffers of parameters on NVMe, and those that the host may keep."""
        section = self.config.offload_param
        largest = max(one.largest for one in self.model.groups)
        buffers = int(section.get("buffer_count", _PARAM_BUFFERS))
        kept = min(self.partition, int(section.get("max_in_cpu", _PARAMS_IN_HOST)))
        return {
            # nbdist.worker.engines.deepspeed sizes them by the largest parameter.
            "buffers": self.unit * buffers * int(section.get("buffer_size", largest)),
            "parameters": self.unit * kept,
        }

    def nvme(self) -> int:
        """Bytes of files: state, and parameters where they are offloaded too."""
        if not self._on_nvme:
            return 0
        return sum(self.state().values()) + (self._parameters() if self._params_away else 0)

    def during(self, steps: tuple[Step, ...]) -> Iterator[tuple[int, Held]]:
        """Gathered parameters and gradients of forward, loss, backward."""
        for at, step in enumerate(steps):
            for parts in self._during(step):
                yield at, self.holding(*parts)

    def _during(self, step: Step) -> Iterator[tuple[Parts, ...]]:
        """What comes on top at a step."""
        tail = self.model.groups[step.group].role == "tail"
        if step.phase == "loss":
            yield (self._gather(self._gathered.loss),)
        elif step.phase == "backward":
            yield self._at_work(("backward", step.group, step.nth)), self.coming(step)
        elif step.phase != "after":
            where: Where = ("forward", step.group, step.nth)
            # The head is gathered before there are logits.
            if tail and step.phase == "forward":
                yield (self._gather(self._gathered.least.get(where, 0)),)
            elif tail or step.phase == "forward":
                yield (self._at_work(where),)

    def _at_work(self, where: Where) -> dict[str, int]:
        return self._gather(self._gathered.most.get(where, 0))

    def _gather(self, elements: int) -> dict[str, int]:
        return {"gathered": self.unit * (self._gathered.persistent + elements)}

    def reduced(self) -> Iterator[tuple[Reduction, Parts]]:
        """Buckets that fill while the backward runs, each copied for its reduction."""
        found = _telling(
            self.model.groups,
            tied=self.model.tied,
            world_size=self.setup.world_size,
            bucket=self.config.bucket,
            recompute=self.setup.options.activation_checkpointing,
            rules=self.config.rules,
        )
        for one, gathered in found:
            copied = 0 if self.is_large(one) else self.unit * one.filled
            parts = {"gradients": self.outside(one), "temporaries": copied + self._norm(one)}
            yield one, parts | self._gather(gathered)

    def _norm(self, one: Reduction) -> int:
        """Bytes of the fp64 copy, for its norm, of a share of a gradient on its way to the host."""
        if not self.offloaded:
            return 0
        return NORM * -(-min(one.filled, self.largest) // self.setup.world_size)

    def updated(self) -> Iterator[tuple[str, Held]]:
        """One group of parameters after the other: fp32 gradients, the step."""
        size = self._sub_group()
        if self.offloaded:
            yield "optimizer step", self.holding(host=self.host_update(size))
            return
        cast = MASTER if self.unit != MASTER else 0
        flat = {"temporaries": (self.unit + cast) * size}
        yield "gradients to fp32", self.holding(flat)
        yield "optimizer step", self.holding(self.update(size))


@lru_cache(maxsize=64)
def _telling(
    groups: tuple[Group, ...],
    *,
    tied: bool,
    world_size: int,
    bucket: int,
    recompute: bool,
    rules: Rules,
) -> tuple[tuple[Reduction, int], ...]:
    """Those reductions that may be the fullest, and the elements that are gathered then."""
    most = zero3_prefetch.gathered(groups, tied=tied, recompute=recompute, rules=rules).most
    made = partitioning.reductions(
        groups, tied=tied, world_size=world_size, bucket=bucket, backward=True
    )
    pairs = [
        (one, 0 if one.at is None else most.get(("backward", one.at.group, one.at.nth), 0))
        for one in made
    ]
    return tuple(records((partitioning.alike(one), (there,), (one, there)) for one, there in pairs))
