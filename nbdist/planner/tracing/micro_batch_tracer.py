"""Records the bytes that one micro-batch of a fake module holds at every moment.

Forward, loss and backward run on fake tensors under a `MemoryTracker`; nothing is computed and no
memory is allocated, except for small convolutions on a CPU. A condition on tensor values is false,
and a selection by values selects all. Hooks at the groups split the time: a
group's forward lasts until the next group begins, its backward from the gradient of its output to
that of its input. Everything before the first group belongs to the root. A group saves what its
part of the forward has allocated and still holds when the forward ends.
"""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch._C import _autograd, _profiler
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

from nbdist.planner.tracing.memory_tracker import OTHER_PART, MemoryTracker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from nbdist.planner.tracing.memory_tracker import TrackedStorage
    from nbdist.planner.tracing.wrap_units import FsdpGroup

PARAMETERS = "parameters"


class MemoryTracePoint(NamedTuple):
    """Bytes held after one allocation."""

    held_bytes: int
    """Bytes without parameters, without gradients of groups whose backward has begun and, in any
    backward, without those of the root."""
    num_done: int
    """Gradient elements of the current group; in the forward, matrices of it that are used."""


MarkKind = Literal["forward", "exit", "returned", "backward", "end"]
"""Start and end of a group's forward; return of the model; start of a group's backward; end."""


class GroupBoundary(NamedTuple):
    """Begin or end of the forward or backward pass of a group of modules."""

    kind: MarkKind
    group_index: int
    """Index of the group."""
    moment_index: int
    """Index of the first moment after it."""
    flops: float
    """Operations until then."""


class MicroBatchMemoryTrace(NamedTuple):
    """Recording of one micro-batch."""

    moments: list[MemoryTracePoint]
    marks: list[GroupBoundary]
    saved_bytes: dict[int, int]
    """Bytes left from each group's forward when the backward begins, by group index, without the
    model's output."""
    forward_only_bytes: dict[int, int]
    """Bytes left from it when the last group has ended, and freed when the model returns:
    autocast's copies of weights that no operation has saved."""
    output_bytes: int
    """Bytes of the model's output."""
    batch_bytes: int
    """Bytes of the batch."""
    gradients: dict[int, list[MemoryTracePoint]]
    """Moments at which a gradient of a group is complete, by group index."""
    depends_on_values: bool
    """The model has read values of tensors, which fake tensors do not have."""


def record_micro_batch(
    model: nn.Module,
    groups: Sequence[FsdpGroup],
    batch: Any,
    step: Callable[[Any], tuple[torch.Tensor, Any]],
    *,
    device_kind: str = "cuda",
) -> MicroBatchMemoryTrace:
    """Run one micro-batch and record it.

    Args:
        model: with fake parameters, its mode and checkpointing set; it accumulates gradients.
        groups: its groups, the root first.
        batch: nested inputs for `step`.
        step: runs the forward; returns the loss, and the outputs that a cell's variable keeps.
        device_kind: whose convolutions run: "cuda" or "cpu".
    """
    trace = _RecordingTracker(model, batch, device_kind)
    removable = [*trace.watch(groups)]
    removable.append(model.register_forward_hook(lambda *_: trace.mark("returned", 0)))
    try:
        with trace:
            trace.mark("forward", 0)
            loss, outputs = step(batch)
            saved, passing = trace.finish_forward(outputs)
            loss.backward()
            trace.mark("end", 0)
    finally:
        for handle in removable:
            handle.remove()
    return MicroBatchMemoryTrace(
        trace.moments,
        trace.marks,
        saved,
        passing,
        sum(_sizes(outputs).values()),
        sum(_sizes(batch).values()),
        trace.gradients,
        trace.depends_on_values,
    )


def _nonzero(mask: torch.Tensor) -> torch.Tensor:
    return mask.new_empty((mask.numel(), mask.dim()), dtype=torch.int64)


def _ctc_loss(
    log_probabilities: torch.Tensor, targets: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    length, samples, _classes = log_probabilities.shape
    states = 2 * (targets.shape[-1] if targets.dim() > 1 else targets.numel()) + 1
    sizes = (samples, length, states)
    return log_probabilities.new_empty(samples), log_probabilities.new_empty(sizes)


_aten = torch.ops.aten
_LARGEST_RESULTS: dict[Any, Callable[..., Any]] = {
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: lambda values, mask: values.new_empty(
        torch.broadcast_shapes(values.shape, mask.shape).numel()
    ),
    _aten._ctc_loss.Tensor: _ctc_loss,  # noqa: SLF001
    _aten._ctc_loss_backward.Tensor: lambda _, values, *_rest: torch.empty_like(values),  # noqa: SLF001
}
"""Operations whose result's size depends on values -> its largest result."""
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


def _without_masks(indices: Sequence[Any]) -> list[Any]:
    """Return indices in which masks are replaced by the positions that they select."""
    positions: list[Any] = []
    for index in indices:
        positions += _nonzero(index).unbind(1) if _is_mask(index) else [index]
    return positions


class _RecordingTracker(MemoryTracker):
    """A memory tracker that records its history."""

    def __init__(self, model: nn.Module, batch: Any, device_kind: str) -> None:
        super().__init__(on_change=self._record_moment)
        self._workspace = _CPU_WORKSPACE if device_kind == "cpu" else {}
        self.moments: list[MemoryTracePoint] = []
        self.marks: list[GroupBoundary] = []
        self.gradients: dict[int, list[MemoryTracePoint]] = {}
        self.in_forward = True
        self.depends_on_values = False
        self.flops = 0.0
        self._formulas = _table()
        self._part = _part_of_forward(0)
        self._at_exit: Counter[str] = Counter()
        self._block = 0
        self._uncounted_parts = {PARAMETERS}
        self._grads: dict[int, int] = {}
        self._num_used = 0
        self._hooked_tensors = WeakIdKeyDictionary()
        self.track_tensors(PARAMETERS, model.parameters())
        self.track_tensors(_part_of_forward(0), [*model.buffers(), *tree_leaves(batch)])

    def mark(self, kind: MarkKind, place: int) -> None:
        """Record a point in time and the bytes held."""
        self.marks.append(GroupBoundary(kind, place, len(self.moments), self.flops))
        self._record_moment()

    def finish_forward(self, outputs: Any) -> tuple[dict[int, int], dict[int, int]]:
        """Return the bytes saved by each group, and those freed at the end, by group index."""
        self.in_forward = False
        left = self.current.copy()
        for key, size in _sizes(outputs).items():
            if key in self._tracked:
                left[self._tracked[key].part] -= size
        self._part = "backward"
        saved, before = self._by_place(left), self._by_place(self._at_exit)
        return saved, {place: before[place] - size for place, size in saved.items()}

    def _by_place(self, parts: Counter[str]) -> dict[int, int]:
        """Bytes of each group that has begun; later bytes belong to the loss."""
        places = [mark.group_index for mark in self.marks if mark.kind == "forward"]
        last = next(
            (mark.group_index for mark in reversed(self.marks) if mark.kind == "exit"), None
        )
        after = {place: parts[_part_after_group(place)] for place in places if place != last}
        return {place: parts[_part_of_forward(place)] + after.get(place, 0) for place in places}

    def watch(self, groups: Sequence[FsdpGroup]) -> Iterator[Any]:
        """Hook the modules that begin and end a group's forward, its matrices and gradients."""
        for place, group in enumerate(groups):
            matrices = {  # all but vectors
                id(own) for own in group.own_params if own.dim() and len(own) != own.numel()
            }
            for module in group.first_modules:
                yield module.register_forward_pre_hook(
                    partial(self._start_forward, place), with_kwargs=True
                )
                yield module.register_forward_hook(partial(self._end_forward, place))
                for inner in module.modules():
                    used = sum(id(each) in matrices for each in inner.parameters(recurse=False))
                    if used:
                        yield inner.register_forward_pre_hook(partial(self._use_matrices, used))
            for parameter in group.own_params:
                if parameter.requires_grad:
                    yield parameter.register_post_accumulate_grad_hook(
                        partial(self._separate_gradient, place)
                    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count an operation's bytes and floating point operations."""
        if func is _aten._local_scalar_dense.default and args[0].dtype == torch.bool:  # noqa: SLF001
            self.depends_on_values = True
            return False
        if func in _LARGEST_RESULTS:
            self.depends_on_values = True
            result = _LARGEST_RESULTS[func](*args)
            for tensor in tree_leaves(result):
                self._track_storage(tensor.untyped_storage())
            return result
        if func._overloadpacket in _INDEXING:  # noqa: SLF001
            self.depends_on_values |= any(_is_mask(index) for index in args[1])
            args = (args[0], _without_masks(args[1]), *args[2:])
        replaced = None
        if func is torch.ops.aten.add.Tensor and not self.in_forward:
            replaced = self._only_use(args[0])
        if replaced is not None:
            self._count(replaced.part, -replaced.size)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if replaced is not None:
            self.current[replaced.part] += replaced.size
            self.total += replaced.size
        if (formula := self._formulas.get(func._overloadpacket)) is not None:  # noqa: SLF001
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        if (workspace := self._workspace.get(func._overloadpacket)) is not None:  # noqa: SLF001
            num_bytes = workspace(*args)
            self._count(self._part, num_bytes)
            self._count(self._part, -num_bytes)
        return result

    def _add(self, storage: torch.UntypedStorage, part: str) -> None:
        """Count a new storage for the current group."""
        super()._add(storage, self._part if part == OTHER_PART else part)

    def _only_use(self, gradient: torch.Tensor) -> TrackedStorage | None:
        """Return the storage of a gradient to which autograd adds in place, if it is not fake.

        torch 2.13, csrc/autograd/input_buffer.cpp: if nothing else refers to it.
        """
        storage = gradient.untyped_storage()
        uses = torch._C._storage_Use_Count(storage._cdata)  # noqa: SLF001
        # The gradient and `storage` are two.
        return None if uses - 2 else self._tracked.get(storage._cdata)  # noqa: SLF001

    def _record_moment(self) -> None:
        self.moments.append(self._moment_of(self._block))

    def _moment_of(self, place: int) -> MemoryTracePoint:
        """Return the bytes held now, with the gradients of a group."""
        apart = sum(self.current[part] for part in self._uncounted_parts)
        num_done = self._num_used if self.in_forward else self._grads.get(place, 0)
        return MemoryTracePoint(self.total - apart, num_done)

    def _use_matrices(self, used: int, *_: Any) -> None:
        self._num_used += used
        self._record_moment()

    def _start_forward(self, place: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a group's forward; recomputation is ignored."""
        if self.in_forward and not self._has_begun("forward", place):
            # Gradients of the inputs end this group's backward and begin its predecessor's.
            started = [mark.group_index for mark in self.marks if mark.kind == "forward"]
            self._hook((args, kwargs), started[-1])
            self._part = _part_of_forward(place)
            self._num_used = 0
            self.mark("forward", place)

    def _end_forward(self, place: int, _: nn.Module, __: Any, output: Any) -> None:
        if self.in_forward:
            self._hook(output, place)
            self._part = _part_after_group(place)
            self._at_exit = self.current.copy()
            self.mark("exit", place)

    def _separate_gradient(self, place: int, parameter: torch.Tensor) -> None:
        """Separate a parameter's gradient from other memory."""
        begun = [mark for mark in self.marks if mark.kind == "backward"]
        places = [mark.group_index for mark in begun]
        if self._block != place and place in places:
            # The gradient of a tied weight is complete only after its second use; until then
            # autograd holds it, not the parameter. It counts from the end of its group's backward
            # on, as engines count it.
            size = parameter.numel() * parameter.element_size()
            end = begun[places.index(place) + 1].moment_index
            for index in range(end, len(self.moments)):
                moment = self.moments[index]
                self.moments[index] = moment._replace(held_bytes=moment.held_bytes - size)
        self.track_tensors(_part_of_gradients(place), [parameter.grad])
        self._grads[place] = self._grads.get(place, 0) + parameter.numel()
        self.gradients.setdefault(place, []).append(self._moment_of(place))

    def _hook(self, values: Any, place: int) -> None:
        """Begin a group's backward when one of these tensors has its gradient."""
        for tensor in tree_leaves(values):
            if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
                continue
            if tensor not in self._hooked_tensors:
                self._hooked_tensors[tensor] = True
                tensor.register_hook(lambda _: self._start_backward(place))

    def _start_backward(self, place: int) -> None:
        if not self.in_forward and not self._has_begun("backward", place):
            self._block = place
            # Those of the root's parameters after the last block already exist.
            self._uncounted_parts |= {_part_of_gradients(0), _part_of_gradients(place)}
            self.mark("backward", place)

    def _has_begun(self, kind: str, place: int) -> bool:
        return any(mark.kind == kind and mark.group_index == place for mark in self.marks)


def _part_of_gradients(place: int) -> str:
    return f"gradients {place}"


def _part_of_forward(place: int) -> str:
    return f"saved {place}"


def _part_after_group(place: int) -> str:
    """Name of the part of tensors made after it, before the next group."""
    return f"after {place}"


def _sizes(values: Any) -> dict[int, int]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage.nbytes() for storage in storages}  # noqa: SLF001


def _attention_flops(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _convolution_workspace(operation: Any, num_batched: int, *args: Any) -> int:
    """Return the bytes that a convolution needs on this processor besides its result.

    oneDNN copies weights, inputs and results into layouts that depend on the processor. Real
    convolutions measure them: of one image, or of two and of three, from which more images differ
    proportionally.

    Args:
        num_batched: number of leading arguments whose first dimension is that of the images.
    """
    described = tuple(
        (arg.shape, arg.stride(), arg.dtype)
        if isinstance(arg, torch.Tensor)
        else tuple(arg)
        if isinstance(arg, list)
        else arg
        for arg in args
    )
    measure = partial(_measure_workspace, operation, num_batched, described=described)
    if (num_images := len(args[0])) == 1:
        return measure(1)
    small, large = measure(2), measure(3)
    return small + (num_images - 2) * (large - small)


@cache
def _measure_workspace(
    operation: Any, num_batched: int, batch_size: int, described: tuple[Any, ...]
) -> int:
    with _disable_current_modes():  # those of fake tensors and of the tracker
        args = list(described)
        for position, each in enumerate(described):
            if isinstance(each, tuple) and isinstance(each[-1], torch.dtype):
                shape, stride, dtype = each
                shape = (batch_size, *shape[1:]) if position < num_batched else shape
                args[position] = torch.empty_strided(shape, stride, dtype=dtype).zero_()
        # It records every allocation of the CPU, as Kineto does, whose only session may be in use.
        _autograd._enable_profiler_legacy(  # noqa: SLF001
            _profiler.ProfilerConfig(
                _profiler.ProfilerState.CPU,
                report_input_shapes=False,
                profile_memory=True,
                with_stack=False,
                with_flops=False,
                with_modules=False,
                experimental_config=_profiler._ExperimentalConfig(),  # noqa: SLF001
            )
        )
        try:
            result = operation(*args)
        finally:
            threads: Any = _autograd._disable_profiler_legacy()  # noqa: SLF001
    events = [event for thread in threads for event in thread if event.kind() == "memory_alloc"]
    sizes: list[int] = [event.cpu_memory_usage() for event in events]
    del result
    return max(accumulate(sizes)) - sum(sizes)


_CPU_WORKSPACE: dict[Any, Callable[..., int]] = {
    operation: partial(_convolution_workspace, operation, num_batched)
    for operation, num_batched in (
        (torch.ops.aten.convolution, 1),
        (torch.ops.aten.convolution_backward, 2),
    )
}
"""Bytes that an operation needs besides its result."""


def _grouped_flops(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of a grouped product: each row of one side is used in one group."""
    return 2 * left.numel() * right.shape[-1]


def _table() -> dict[Any, Callable[..., float]]:
    """Return FLOP formulas; torch's table lacks the CPU's attention and the grouped product."""
    aten, own = torch.ops.aten, torch.ops.transformers
    table: dict[Any, Callable[..., float]] = {
        **flop_registry,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,  # noqa: SLF001
        # Five products instead of the forward's two.
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (  # noqa: SLF001
            lambda _, query, key, value, *__, **___: 2.5 * _attention_flops(query, key, value)
        ),
        aten._grouped_mm: _grouped_flops,  # noqa: SLF001
    }
    # Of transformers with experts, if it is loaded; 5.17 has no operator for the backward.
    for name, formula in (
        ("grouped_mm_fallback", _grouped_flops),
        (
            "grouped_mm_fallback_backward",  # two products
            lambda _, right, __, grad, **___: 4 * grad.numel() * right.shape[-2],
        ),
    ):
        if hasattr(own, name):
            table[getattr(own, name)] = formula
    return table
