"""Counts live bytes of tensors while code runs: on a rank, in a trace, in the benchmark.

torch's CUDA allocator counts the bytes of tensors; its CPU allocator does not. `MemoryTracker` is a
dispatch mode that sees every operation, so it works for real and fake tensors alike, at some
microseconds per operation. It counts each storage once, as long as it lives, and follows FSDP's way
of emptying a storage without freeing the tensor. Compare `MemTracker` of torch.distributed._tools
(torch 2.13), which also hooks modules and therefore does not support FSDP1 and accumulation.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

OTHER_PART = "other"
"""Part of tensors that are not assigned: activations and temporaries."""


class MemoryTracker(TorchDispatchMode):
    """Counts bytes of live storages while it is entered.

    Attributes:
        current: current bytes by part.
        total: current bytes.
        peak: peak bytes since `reset_peak()`.
        at_peak: bytes by part at the peak.
    """

    def __init__(self, *, on_change: Callable[[], object] | None = None) -> None:
        """Start empty; `on_change` is called after every allocation."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.current: Counter[str] = Counter()
        self.total = 0
        self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self._on_change = on_change
        self._num_storages = 0
        """Number of storages counted so far."""
        self._num_storages_at_peak = 0
        """The same at the peak: storages with a higher number did not exist then."""
        self._tracked: dict[int, TrackedStorage] = {}
        self._resize = torch.UntypedStorage.resize_

    def track_tensors(self, part: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """Assign tensors to a part; they are counted if they were not before.

        The parts in `at_peak` are corrected for tensors that existed at the peak.
        """
        for storage in _storages(tensors):
            tracked = self._tracked.get(storage._cdata)  # noqa: SLF001
            if tracked is None:
                self._add(storage, part)
            elif tracked.part != part:
                self._move(self.current, tracked, part)
                if tracked.born <= self._num_storages_at_peak:
                    self._move(self.at_peak, tracked, part)
                tracked.part = part

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep this mode out of torch.compile."""
        return True  # else dynamo permanently gives up on compiling what it encounters

    def reset_peak(self) -> None:
        """Restart the peak from the current bytes."""
        self.peak, self.at_peak = self.total, Counter(self.current)
        self._num_storages_at_peak = self._num_storages

    def __enter__(self) -> Self:
        """Start counting, including FSDP's resizing of storages."""

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            tracked = self._tracked.get(storage._cdata)  # noqa: SLF001
            if tracked is None:
                self._add(storage, OTHER_PART)
            else:
                change, tracked.size = storage.nbytes() - tracked.size, storage.nbytes()
                self._count(tracked.part, change)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # A DTensor runs first, so that its operations on local tensors are counted.
        if any(kind is DTensor for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for storage in _storages([result] if type(result) is torch.Tensor else tree_leaves(result)):
            self._track_storage(storage)
        return result

    def _track_storage(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._tracked:  # noqa: SLF001
            self._add(storage, OTHER_PART)

    def _add(self, storage: torch.UntypedStorage, part: str) -> None:
        size = storage.nbytes()
        key = storage._cdata  # noqa: SLF001
        gone = weakref.ref(storage, functools.partial(self._remove, key))
        self._num_storages += 1
        self._tracked[key] = TrackedStorage(gone, size, part, self._num_storages)
        self._count(part, size)

    def _remove(self, key: int, _: object) -> None:
        tracked = self._tracked.pop(key)
        self._count(tracked.part, -tracked.size)

    def _count(self, part: str, change: int) -> None:
        self.current[part] += change
        self.total += change
        if self.total > self.peak:
            self.reset_peak()
        if change > 0 and self._on_change is not None:
            self._on_change()

    @staticmethod
    def _move(counted: Counter[str], storage: TrackedStorage, part: str) -> None:
        counted[storage.part] -= storage.size
        counted[part] += storage.size


@dataclass(eq=False, slots=True)
class TrackedStorage:
    """A live storage: its size in bytes, its part, and its serial number."""

    gone: weakref.ref[torch.UntypedStorage]
    size: int
    part: str
    born: int


def _storages(values: Iterable[object]) -> Iterator[torch.UntypedStorage]:
    """Storages of all tensors among the values; for a subclass those of its inner tensors."""
    for value in values:
        # A meta tensor has a size but no memory; deepspeed 0.19 keeps a model's worth of them.
        # A fake one has a meta storage, but reports the device that it stands for.
        if not isinstance(value, torch.Tensor) or value.device.type == "meta":
            continue
        flatten = getattr(value, "__tensor_flatten__", None)  # of a wrapper subclass (DTensor)
        if flatten is not None:
            yield from _storages(getattr(value, name) for name in flatten()[0])
        elif value.layout == torch.strided:  # a sparse tensor has no storage
            yield value.untyped_storage()
