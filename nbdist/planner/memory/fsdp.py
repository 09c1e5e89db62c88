"""Memory timelines of FSDP1 and FSDP2: micro-batches, then the optimizer step.

Both follow torch 2.13 and accelerate 1.15. A unit is a group of parameters that is sharded,
gathered and reduced together. During accumulation, full gradients stay on every rank until the last
micro-batch.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cache, cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from nbdist.errors import PlanError
from nbdist.planner import model_spec, optimizers
from nbdist.planner.memory import zero_partitioning
from nbdist.planner.memory.timeline import NonActivationMemory, StepTimeline
from nbdist.planner.model_spec import LayerGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.planner.memory.timeline import BytesByPart, TrainingSetup
    from nbdist.planner.model_spec import MicroBatchStep, ModelSpec

MicroBatchPosition = Literal["only", "first", "middle", "last"]
"""Position of a micro-batch in an optimizer step; gradients are reduced in the last (or only)."""


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
    param_shard_bytes: int = 0
    """This rank's parameter shard."""
    grad_shard_bytes: int = 0
    """This rank's gradient shard, in the parameters' dtype."""
    num_trainable: int = 0
    """Trainable elements of this rank's shard."""
    largest_shard_size: int = 0
    """Elements of this rank's shard of the largest parameter."""
    reduction_temporaries: int = 0
    """Bytes during the reduction in addition to all gradients and its buffer."""
    added_grad_bytes: int = 0
    """Gradients, and a copy of one, while they are added to accumulated ones."""


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


def _sharded_quantized_bytes(group: LayerGroup) -> int:
    """Return the bytes of one instance's quantized parameters that FSDP2 shards."""
    return sum(group.quantized_tensors) if group.shards_quantized else 0


class FsdpTimeline(StepTimeline):
    """One optimizer step under FSDP, from the third on."""

    shards_are_flat: ClassVar[bool]
    """True if shards are pieces of flat parameters."""

    def __init__(self, model: ModelSpec, setup: TrainingSetup) -> None:
        """Split the model into units."""
        if any(shape.is_scalar for group in model.groups for shape in group.tensors):
            raise PlanError(
                "FSDP does not shard scalar parameters, such as CLIP's logit_scale. Use ddp or"
                " ZeRO, or make each a tensor of one dimension."
            )
        super().__init__(model)
        self.setup, self.groups, self.last_group = setup, model.groups, len(model.groups) - 1
        self.compute_width = self.reduce_width = self.stored_width = model.trainable_element
        self.frozen_width = model.element
        if setup.is_half_precision:
            # In mixed precision accelerate 1.15 makes trainable shards fp32; nbdist reduces in it.
            self.compute_width, self.reduce_width, self.stored_width = 2, 4, 4
            self.frozen_width = 2
        # accelerate 1.15 shards quantized parameters in a floating-point dtype, without their
        # scales, and no others; an offload leaves on the device what is not sharded.
        sharded = sum(group.count * _sharded_quantized_bytes(group) for group in self.groups)
        unsharded = {"parameters": model_spec.quantized_param_bytes(model) - sharded}
        self.is_offloaded = setup.options.offload_device != "none"
        self.reshards = setup.options.reshard_after_forward
        self.units = self.build_units()
        self.total_unit = FsdpUnit(
            *(
                sum(group.count * value for group, value in zip(self.groups, values, strict=True))
                for values in zip(*self.units, strict=True)
            )
        )
        trainable = self.total_unit.num_trainable
        shapes = [] if self.shards_are_flat else optimizers.trained_shapes(model, setup.num_shards)
        shards = {
            "parameters": self.total_unit.param_shard_bytes,
            "optimizer": setup.optimizer.state_bytes(
                trainable, element=self.stored_width, flat=self.shards_are_flat, shapes=shapes
            ),
        }
        if not self.is_offloaded:
            # Allocated on the reduce-scatter stream (torch 2.13).
            self.separate_parts = {"gradients": self.total_unit.grad_shard_bytes}
        self._permanent = (
            NonActivationMemory(unsharded, host=(shards,))
            if self.is_offloaded
            else NonActivationMemory(shards, unsharded)
        )
        largest = max(unit.largest_shard_size for unit in self.units)
        scratch = self.stored_width * setup.optimizer.num_temporaries(trainable, largest, shapes)
        self._update = self._allocation_with(
            {}, {"gradients": self.total_unit.grad_shard_bytes, "temporaries": scratch}
        )
        # Several moments of a unit's backward share its transient memory.
        self._transient_memory = cache(self.transient_memory)

    @abstractmethod
    def build_units(self) -> list[FsdpUnit]:
        """Return one unit for each of the model's groups."""

    @abstractmethod
    def transient_memory(self, micro: MicroBatchPosition, step: MicroBatchStep) -> TransientMemory:
        """Return the memory besides the current unit in forward, loss and backward."""

    @abstractmethod
    def edge_memory(
        self, micro: MicroBatchPosition, step: MicroBatchStep
    ) -> Iterator[TransientMemory]:
        """Yield the memory before a unit's forward, and while its gradients are reduced."""

    def walk_allocations(
        self, steps: tuple[MicroBatchStep, ...]
    ) -> Iterator[tuple[int, NonActivationMemory]]:
        """Walk each kind of micro-batch from first to last step."""
        few: dict[int, tuple[MicroBatchPosition, ...]] = {1: ("only",), 2: ("first", "last")}
        for micro in few.get(self.setup.options.accumulate, ("first", "middle", "last")):
            for at, step in enumerate(steps):
                own = self.compute_width * self.num_own_gradients(micro, step)
                if step.phase in {"before", "after"}:
                    for transient in self.edge_memory(micro, step):
                        yield at, self._allocation(transient, own)
                else:
                    transient = self._transient_memory(micro, step._replace(num_grads=0))
                    yield at, self._allocation(transient, own)

    def num_own_gradients(self, _: MicroBatchPosition, step: MicroBatchStep) -> int:
        """Return the gradient elements of this backward in its unit, and late ones of the root."""
        is_late = step.phase in {"backward", "after"} and step.group_index
        late = zero_partitioning.late_trainable_sizes(self.model.groups) if is_late else ()
        return step.num_grads + sum(late)

    def _allocation(
        self, transient: TransientMemory, own_gradients: int = 0
    ) -> NonActivationMemory:
        parts = {
            "gradients": transient.full_gradients + own_gradients,
            "buffers": transient.buffers,
            "gathered": transient.gathered,
        }
        return self._allocation_with(parts, {"gradients": transient.gradient_shards})

    def _allocation_with(self, parts: BytesByPart, of_shards: BytesByPart) -> NonActivationMemory:
        """Return the permanent memory with more on the device, and more where the shards are."""
        if self.is_offloaded:
            return NonActivationMemory(parts, host=(of_shards,), besides=self._permanent)
        return NonActivationMemory(parts, of_shards, besides=self._permanent)

    def build_unit(
        self, group: LayerGroup, trained: int, frozen: int, *, accumulate: int, largest: int
    ) -> FsdpUnit:
        """Return a group as a unit.

        Args:
            group: parameters that are used together.
            trained: trainable elements of the first rank's shard.
            frozen: its frozen elements.
            accumulate: bytes per element of accumulated gradients.
            largest: elements of the largest trainable parameter in the first rank's shard.
        """
        ranks = self.setup.num_shards
        quantized = -(-_sharded_quantized_bytes(group) // ranks)
        frozen_bytes = self.model.element * frozen + quantized
        largest_grad = zero_partitioning.largest_trainable_size(group)
        return FsdpUnit(
            full_param_bytes=ranks
            * (self.compute_width * trained + self.frozen_width * frozen + quantized),
            gradient_bytes=self.compute_width * group.trainable,
            reduce_bytes=self.reduce_width * trained * ranks,
            accumulated_grad_bytes=accumulate * group.trainable,
            largest_grad_bytes=self.compute_width * largest_grad,
            param_shard_bytes=self.stored_width * trained + frozen_bytes,
            grad_shard_bytes=self.stored_width * trained,
            num_trainable=trained,
            largest_shard_size=largest if trained else 0,
        )

    def finished_gradients(
        self, micro: MicroBatchPosition, step: MicroBatchStep, end: int
    ) -> tuple[int, int]:
        """Return bytes of pending full gradients, and of gradient shards.

        Args:
            micro: position of the micro-batch.
            step: of the walk; in the backward, the units after it have finished.
            end: groups from this one on are not counted as finished.
        """
        accumulated = shards = 0
        if step.phase in {"backward", "after"}:
            for number in range(step.group_index, end):
                count = self.groups[number].count
                count -= step.block_index + 1 if number == step.group_index else 0
                accumulated += count * self.units[number].accumulated_grad_bytes
                shards += count * self.units[number].grad_shard_bytes
        if micro == "only":
            return 0, shards
        if micro == "first":
            return accumulated, 0
        if micro == "middle":
            return self.total_unit.accumulated_grad_bytes, 0
        return self.total_unit.accumulated_grad_bytes - accumulated, shards

    def num_gathered(self, number: int, step: MicroBatchStep) -> int:
        """Return how many instances of a group before the last are gathered at a step."""
        if self.groups[number].role == "root":
            return 1
        if self.reshards:
            return int(number == step.group_index and step.phase != "loss")
        if step.phase == "loss" or number < step.group_index:
            return self.groups[number].count
        return step.block_index + 1 if number == step.group_index else 0

    def gathered_bytes(self, step: MicroBatchStep, *, last: bool) -> int:
        """Return the bytes of gathered units; `last`: whether the last group is gathered."""
        before = sum(
            self.units[number].full_param_bytes * self.num_gathered(number, step)
            for number in range(self.last_group)
        )
        return before + last * self.units[self.last_group].full_param_bytes


class Fsdp1Timeline(FsdpTimeline):
    """`FullyShardedDataParallel` with accelerate's defaults, original parameters and no prefetch.

    Each block is a unit with one flat parameter; the rest belongs to the root, which stays gathered
    from the first forward to the end of the backward.

    A unit is gathered in place. Autograd sees its parameters as views of the flat one, so their
    gradients are kept until all exist and are then copied together; that copy is cast to the reduce
    dtype during the reduction.
    """

    shards_are_flat = True

    def __init__(self, model: ModelSpec, setup: TrainingSetup) -> None:
        sharding = (setup.options.fsdp_config or {}).get("sharding_strategy")
        if str(sharding).upper() == "NO_SHARD":
            raise PlanError(
                "NO_SHARD keeps everything on every rank. Plan ddp, which does so, too."
            )
        # What torch 2.13 cannot flatten (`FlatParamHandle._validate_tensors_to_flatten`).
        frozen = model_spec.num_frozen_params(model)
        if model_spec.num_quantized_params(model):
            raise PlanError("FSDP1 cannot flatten quantized parameters. Use another backend.")
        if frozen and model.element != model.trainable_element:
            raise PlanError(
                "FSDP1 cannot flatten fp32 adapters together with 16-bit parameters. Load the model"
                " in fp32 or use get_peft_model(..., autocast_adapter_dtype=False), or use another"
                " backend."
            )
        super().__init__(model, setup)

    def build_units(self) -> list[FsdpUnit]:
        """Flat units of the blocks, with the root in place of the last group."""
        rest = [group for group in self.groups if group.role != "block"]
        root = LayerGroup(
            name="root",
            role="root",
            tensors=tuple(shape for group in rest for shape in group.tensors * group.count),
        )
        blocks = [
            self._flat_unit(group) if group.role == "block" else FsdpUnit()
            for group in self.groups[:-1]
        ]
        return [*blocks, self._flat_unit(root, is_root=True)]

    def _flat_unit(self, group: LayerGroup, *, is_root: bool = False) -> FsdpUnit:
        share = -(-group.num_params // self.setup.num_shards)
        trained = self._trained_by_rank(group)[self._fullest_rank]
        largest = zero_partitioning.largest_trainable_size(group)
        if is_root and group.frozen:  # assumed to be spread evenly, as one parameter
            trained, largest = share * group.trainable // group.num_params, group.trainable
        unit = self.build_unit(
            group,
            trained,
            share - trained,
            accumulate=self.compute_width,
            largest=min(share, largest),
        )
        if not group.trainable:
            return unit
        # A flat parameter has one gradient, with zeros for frozen parameters.
        gradient_bytes = self.compute_width * group.num_params
        return unit._replace(
            gradient_bytes=gradient_bytes,
            accumulated_grad_bytes=gradient_bytes,
            reduce_bytes=self.reduce_width * share * self.setup.num_shards,
            grad_shard_bytes=self.stored_width * share,
        )

    def _trained_by_rank(self, group: LayerGroup) -> list[int]:
        """Trainable elements of each rank's piece of the flat parameter."""
        ranks = self.setup.num_shards
        share = max(1, -(-group.num_params // ranks))
        if not group.frozen:
            return [share * group.trainable // max(1, group.num_params)] * ranks
        trained, begin = [0] * ranks, 0
        for _, size, trainable, *_ in group.tensors:
            for rank in range(begin // share, (begin + size - 1) // share + 1):
                piece = min(begin + size, (rank + 1) * share) - max(begin, rank * share)
                trained[rank] += piece if trainable else 0
            begin += size
        return trained

    @cached_property
    def _fullest_rank(self) -> int:
        """The rank with the most trainable elements: adapters are not spread evenly."""
        units = [
            [group.count * each for each in self._trained_by_rank(group)] for group in self.groups
        ]
        sums = list(map(sum, zip(*units, strict=True)))
        return sums.index(max(sums))

    def transient_memory(self, micro: MicroBatchPosition, step: MicroBatchStep) -> TransientMemory:
        """Return the gathered units and the finished gradients."""
        full, shards = self.finished_gradients(micro, step, self.last_group)
        full += self._root_gradients(step) if step.phase == "backward" else 0
        return TransientMemory(self._gathered(micro, step), full, shards)

    def _gathered(self, micro: MicroBatchPosition, step: MicroBatchStep) -> int:
        """Bytes of gathered units.

        If no forward reshards, neither does a backward without a reduction (torch 2.13,
        `_should_free_in_backward`).
        """
        begins = micro == "first" and step.phase in {"before", "forward"}
        ends = micro == "last" and step.phase in {"backward", "after"}
        if self.reshards or micro == "only" or begins or ends:
            return self.gathered_bytes(step, last=True)
        return self.total_unit.full_param_bytes

    def edge_memory(
        self, micro: MicroBatchPosition, step: MicroBatchStep
    ) -> Iterator[TransientMemory]:
        """Gradients are copied together; then the unit is resharded and they are reduced."""
        block = self.groups[step.group_index].role == "block"
        if step.phase == "before" or (step.group_index and not block):
            return
        finished = self.units[step.group_index if block else self.last_group]
        full, shards = self.finished_gradients(micro, step, self.last_group)
        full += self._root_gradients(step) if block else 0
        gathered = self._gathered(micro, step)
        yield TransientMemory(gathered, full + 2 * finished.gradient_bytes, shards)
        if micro in {"only", "last"}:
            cast = finished.reduce_bytes if self.reduce_width != self.compute_width else 0
            yield TransientMemory(
                gathered - finished.full_param_bytes,
                full + finished.gradient_bytes,
                shards,
                cast + finished.reduce_bytes // self.setup.num_shards,
            )

    def _root_gradients(self, step: MicroBatchStep) -> int:
        """Gradients of the root's parameters that later groups have made."""
        after = self.groups[step.group_index + 1 :]
        return self.compute_width * sum(group.trainable for group in after if group.role != "block")


class Fsdp2Timeline(FsdpTimeline):
    """`fully_shard` (torch.distributed.fsdp) as accelerate's `fsdp2_prepare_model` applies it.

    Each block is a unit, the embedding is one, and final norm and head form one that stays gathered
    from forward to backward. With tied weights the embedding belongs to the latter. The remaining
    parameters belong to the root, which also stays gathered.

    A unit is gathered into a buffer and copied out of it, so it exists twice during its forward; in
    the backward the next unit's buffer exists besides the current unit. Gradients are reduced in a
    buffer of the reduce dtype, which lives until the next unit reduces; accumulated gradients have
    that dtype as well. With replicas across nodes, parameters are sharded over a node's ranks;
    nodes reduce the gradient shards in place, and torch keeps these until the end of the backward,
    even if they have been offloaded to the host by then.
    """

    shards_are_flat = False

    def __init__(self, model: ModelSpec, setup: TrainingSetup) -> None:
        # torch 2.13 makes plain parameters of `Int8Params`.
        if model_spec.has_int8_params(model):
            raise PlanError(
                "FSDP2 cannot shard bitsandbytes' int8 weights, which lose their scales. Use ddp,"
                ' zero1 or zero2, or quantize="nf4", which FSDP2 keeps unsharded.'
            )
        super().__init__(model, setup)

    def build_units(self) -> list[FsdpUnit]:
        """Return units whose parameters are sharded by rows."""
        ranks = self.setup.num_shards
        units = []
        for group in self.groups:
            shares: dict[bool, list[int]] = {True: [], False: []}
            for shape in group.tensors:
                shares[shape.trainable].append(shape.shard(ranks).num_elements)
            unit = self.build_unit(
                group,
                sum(shares[True]),
                sum(shares[False]),
                accumulate=self.reduce_width,
                largest=max(shares[True], default=0),
            )
            units.append(
                unit._replace(
                    reduction_temporaries=self._reduction_temporaries(
                        group, self.reduce_width * sum(shares[True])
                    ),
                    added_grad_bytes=self._added_grad_bytes(group),
                )
            )
        return units

    def _added_grad_bytes(self, group: LayerGroup) -> int:
        """Most bytes of gradients and the cast copy of one as they are added, then freed in turn.

        On a CPU, torch 2.13's `add_` casts the whole gradient to the dtype of the accumulated one.
        """
        if self.setup.kind != "cpu" or self.reduce_width == self.compute_width:
            return 0
        left = most = 0
        for shape in reversed([shape for shape in group.tensors if shape.trainable]):
            left += self.compute_width * shape.num_elements
            most = max(most, left + self.reduce_width * shape.num_elements)
        return most

    def _reduction_temporaries(self, group: LayerGroup, shard_bytes: int) -> int:
        """Bytes of the reduction in addition to all of a unit's gradients and its buffer.

        On a CPU, torch 2.13's `_chunk_cat` pads gradients of uneven rows, then casts one after
        another. Then all gradients but the last, which a loop variable of `foreach_reduce` holds,
        are freed before the reduced shard is allocated. Accumulated ones have the reduce dtype.
        """
        accumulates = self.setup.options.accumulate > 1
        width = self.reduce_width if accumulates else self.compute_width
        trained = [shape for shape in group.tensors if shape.trainable]
        after = shard_bytes - width * sum(shape.num_elements for shape in trained[:-1])
        if self.setup.kind != "cpu":
            return max(0, after)
        ranks = self.setup.num_shards
        sizes = [ranks * shape.shard(ranks).num_elements for shape in trained]
        copied = sum(size for shape, size in zip(trained, sizes, strict=True) if shape.rows % ranks)
        copied += max(sizes, default=0) if width != self.reduce_width else 0
        return max(width * copied, after)

    def _adds_at_once(self, micro: MicroBatchPosition) -> bool:
        """True if autograd adds each gradient to an accumulated one, which has the same dtype."""
        return micro in {"middle", "last"} and self.reduce_width == self.compute_width

    def num_own_gradients(self, micro: MicroBatchPosition, step: MicroBatchStep) -> int:
        """Return the gradient elements of this backward that exist besides accumulated ones."""
        return (
            step.new_grads if self._adds_at_once(micro) else super().num_own_gradients(micro, step)
        )

    def transient_memory(self, micro: MicroBatchPosition, step: MicroBatchStep) -> TransientMemory:
        """Return gathered units and buffers, finished gradients, and the reduction in flight."""
        full, shards = self._finished(micro, step)
        gathered, last = self._gathered(step), self.last_group
        if step.phase in {"before", "forward"}:
            return TransientMemory(gathered + self._forward_buffers(step)[0], full, shards)
        if step.phase == "loss":
            # If the tail has no parameters, nothing has freed the last block's buffer.
            left = 0 if self.units[last].full_param_bytes else self._last_buffer(last)
            return TransientMemory(gathered + left, full, shards)
        if self.model.tied and step.group_index != last:
            full += self.units[last].gradient_bytes
        buffers = self._reduction_in_flight(micro, step) + self._kept_on_gpu(shards)
        return TransientMemory(gathered + self._prefetched(step), full, shards, buffers)

    def edge_memory(
        self, micro: MicroBatchPosition, step: MicroBatchStep
    ) -> Iterator[TransientMemory]:
        """Yield the copy out of the gather buffer, and the reduction of the unit's gradients."""
        unit = self._unit_gathered_by(step.group_index)
        if step.phase == "before":
            # The previous unit's buffer is freed once this unit's has been copied.
            transient = self._transient_memory(micro, step)
            besides = self._forward_buffers(step)[1]
            if self.is_offloaded and self.setup.kind != "cpu":
                # An offloaded shard on its way to the GPU, beyond the gathered unit.
                arrived = self.stored_width * unit.largest_shard_size
                shard = unit.full_param_bytes // self.setup.num_shards
                besides += max(0, arrived + shard - unit.full_param_bytes)
            yield transient._replace(gathered=transient.gathered + besides)
            return
        if self.model.tied and step.group_index == self.last_group:
            return
        # The unit is resharded; its gradients are copied to be reduced, or kept in full.
        full, shards = self._finished(micro, step)
        if micro in {"middle", "last"}:  # before that they are added to the accumulated ones
            in_flight = self._reduction_in_flight(micro, step) + self._kept_on_gpu(shards)
            gathered = self._gathered(step) + self._prefetched(step)
            yield TransientMemory(gathered, full + unit.added_grad_bytes, shards, in_flight)
        buffers = 0
        if micro in {"only", "last"}:
            buffers = unit.reduce_bytes + unit.reduction_temporaries
            buffers += self._kept_on_gpu(shards)
        if micro == "first":
            # Gradients are cast to the reduce dtype one after another.
            full += unit.largest_grad_bytes + unit.accumulated_grad_bytes
        elif micro in {"only", "middle"} and not self._adds_at_once(micro):
            full += unit.gradient_bytes
        if self.model.tied and unit is not self.units[self.last_group]:
            full += self.units[self.last_group].gradient_bytes
        gathered = self._gathered(step) - unit.full_param_bytes + self._prefetched(step)
        yield TransientMemory(gathered, full, shards, buffers)
        if (following := self._next_in_backward(step)) is not None:
            # Then the next unit is copied out of its buffer, before it prefetches another one.
            transient = self._transient_memory(micro, following)
            more = self._prefetched(step) - self._prefetched(following)
            yield transient._replace(gathered=transient.gathered + more)

    def _finished(self, micro: MicroBatchPosition, step: MicroBatchStep) -> tuple[int, int]:
        # Tied to the embedding, the tail ends with it.
        end = self.last_group if self.model.tied else len(self.units)
        return self.finished_gradients(micro, step, end)

    def _gathered(self, step: MicroBatchStep) -> int:
        """Bytes of gathered units: the current one, tail and root; all if none is resharded."""
        at_end = step.phase == "loss" or step.group_index == self.last_group
        return self.gathered_bytes(step, last=self.model.tied or at_end)

    def _kept_on_gpu(self, shards: int) -> int:
        """Bytes of offloaded gradient shards that stay on the GPU as nodes reduced them there."""
        stays = self.setup.num_replicas > 1 and self.is_offloaded and self.setup.kind == "cuda"
        return shards * self.reduce_width // self.stored_width if stays else 0

    def _unit_gathered_by(self, number: int) -> FsdpUnit:
        """The unit that a group's forward gathers; for a tied embedding, the tail."""
        tied_embedding = self.model.tied and self.groups[number].role == "embedding"
        return self.units[self.last_group if tied_embedding else number]

    def _forward_buffers(self, step: MicroBatchStep) -> tuple[int, int]:
        """The gather buffer that a unit's forward keeps, and that of the previous unit."""
        if self.model.tied and step.group_index == self.last_group:
            return self._unit_gathered_by(step.group_index - 1).full_param_bytes, 0
        own = self._last_buffer(step.group_index)
        if step.block_index:
            return own, own
        gathers = self._unit_gathered_by(step.group_index).full_param_bytes
        has_previous = step.group_index and gathers
        return own, self._last_buffer(step.group_index - 1) if has_previous else 0

    def _last_buffer(self, number: int) -> int:
        """The buffer of the unit gathered last; a group without parameters gathers none."""
        sizes = (self._unit_gathered_by(each).full_param_bytes for each in range(number, -1, -1))
        return next((size for size in sizes if size), 0)

    def _prefetched(self, step: MicroBatchStep) -> int:
        """The buffer of the unit whose backward is next."""
        following = self._next_in_backward(step)
        return 0 if following is None else self.units[following.group_index].full_param_bytes

    def _next_in_backward(self, step: MicroBatchStep) -> MicroBatchStep | None:
        """The backward for which parameters are gathered during this one."""
        if not self.reshards:
            return None
        following = step._replace(phase="backward", num_grads=0)
        if step.block_index:
            return following._replace(block_index=step.block_index - 1)
        for number in range(step.group_index - 1, -1, -1):
            if self.groups[number].role != "root":
                last = self.groups[number].count - 1
                return following._replace(group_index=number, block_index=last)
        return None

    def _reduction_in_flight(self, micro: MicroBatchPosition, step: MicroBatchStep) -> int:
        """The previous unit's reduction, until the next one begins."""
        if micro in {"first", "middle"} or step.group_index == self.last_group:
            return 0
        if step.block_index < self.groups[step.group_index].count - 1:
            return self.units[step.group_index].reduce_bytes
        after = step.group_index + 1
        return 0 if after == self.last_group and self.model.tied else self.units[after].reduce_bytes
