"""Where the main thread is, while a window is open; runs on a rank.

`install` puts a mark around what every loop passes: a DataLoader's next batch, its way to the
device, passes through the prepared models, the optimizer, collectives. `Patches.undo` takes
away all of it.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import accelerate.data_loader
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch._C._distributed_c10d import Work
from torch.distributed import distributed_c10d
from torch.utils.data import dataloader

from nbdist.worker import collective_check
from nbdist.worker.engines import compile_detection, deepspeed
from nbdist.worker.memory import memory_probe
from nbdist.worker.training import prepared_models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nbdist.worker.profiling.intervals import Span


@dataclass(slots=True)
class Met:
    """A collective that Python called: where the ranks met before it."""

    group: str
    span: Span
    bytes: int


class Marks:
    """Spans of the main thread by what it was at, in unix nanoseconds."""

    def __init__(self) -> None:
        """Have seen nothing."""
        self.spans: dict[str, list[Span]] = defaultdict(list)
        self.met: list[Met] = []
        self.waits: list[Span] = []
        self.loaders: dict[int, Taken] = {}
        """By the id of an iterator; facts alone, so that the iterator can end."""
        self.passes: Counter[torch.nn.Module] = Counter()
        """Forwards of each prepared model with gradients."""
        self.hooked = False
        """Prepared models are marked themselves, and not only what torch.compile returned."""
        self.size = 0
        """Bytes of the collective that is about to be called."""
        self.idle: list[tuple[int, int]] = []
        """End of a stay outside of all marks, and the nanoseconds of it in which the main thread
        did not run: asleep, or another one had its core."""
        self._open: list[tuple[str, int]] = []
        self._left: tuple[int, int] | None = None
        """When the last mark ended, and the main thread's own time at that."""

    @property
    def now_at(self) -> str:
        """The innermost mark; empty in the cell's own code. Read from another thread too."""
        try:
            return self._open[-1][0]
        except IndexError:
            return ""

    def begin(self, name: str) -> None:
        """The main thread comes to it."""
        now = time.time_ns()
        if self._left is not None:
            since, ran = self._left
            self.idle.append((now, max(0, now - since - (time.thread_time_ns() - ran))))
            self._left = None
        self._open.append((name, now))

    def end(self, name: str) -> None:
        """The main thread has left it."""
        if self._open and self._open[-1][0] == name:
            now = time.time_ns()
            self.spans[name].append((self._open.pop()[1], now))
            if not self._open:
                self._left = now, time.thread_time_ns()

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Mark what runs inside; other threads do not count."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def passes_begin(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A prepared model goes forward, or what an engine has wrapped in it."""
        if torch.is_grad_enabled() and not any(name == "forward" for name, _ in self._open):
            self.passes[model] += 1
            memory_probe.note_call(model, args, kwargs)
        self.begin("forward")

    def closed(self) -> None:
        """End what is still open: a pass that was cut short leaves it so."""
        while self._open:
            self.end(self._open[-1][0])


@dataclass(slots=True, kw_only=True)
class Taken:
    """What an iterator of a DataLoader gave."""

    num_workers: int
    pin_memory: bool
    batch_size: int | None
    sharded: bool
    batches: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of these, this thread had a core."""

    @classmethod
    def of(cls, iterator: Any) -> Taken:
        """Look at an iterator's own facts."""
        sampler = iterator._index_sampler  # noqa: SLF001
        inner = getattr(sampler, "sampler", None)
        kinds = (sampler, inner, getattr(inner, "sampler", None), iterator._dataset)  # noqa: SLF001
        return cls(
            num_workers=iterator._num_workers,  # noqa: SLF001
            pin_memory=bool(iterator._pin_memory),  # noqa: SLF001
            batch_size=getattr(sampler, "batch_size", None),
            sharded=any("Shard" in _name(one) or "Distributed" in _name(one) for one in kinds),
        )


def _name(one: object) -> str:
    return type(one).__name__


class Patches:
    """Attributes that are replaced for a while, and hooks."""

    def __init__(self) -> None:
        """Nothing is replaced."""
        self._undo: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Put what `wrap` makes of an attribute in its place; an inherited one stays so."""
        own = vars(owner).get(name)
        setattr(owner, name, wrap(getattr(owner, name)))
        if own is None:
            self._undo.append(lambda: delattr(owner, name))
        else:
            self._undo.append(lambda: setattr(owner, name, own))

    def later(self, undo: Callable[[], object]) -> None:
        """Call this too when all is undone."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Put everything back, the last one first."""
        while self._undo:
            self._undo.pop()()


def install(marks: Marks) -> Patches:
    """Mark from now on."""
    patches = Patches()
    try:
        _install(marks, patches)
    except BaseException:
        patches.undo()
        raise
    return patches


def _install(marks: Marks, patches: Patches) -> None:
    around = functools.partial(_around, marks)
    patches.replace(torch.autograd, "backward", around("backward"))
    patches.replace(Accelerator, "backward", around("backward"))
    patches.replace(Accelerator, "clip_grad_norm_", around("optimizer"))
    patches.replace(torch.nn.utils, "clip_grad_norm_", around("optimizer"))
    for cls in (AcceleratedOptimizer, deepspeed.StepsItself):
        patches.replace(cls, "zero_grad", around("optimizer"))
    patches.replace(accelerate.data_loader, "send_to_device", around("copies"))
    patches.replace(dataloader._BaseDataLoaderIter, "__next__", _taking(marks))  # noqa: SLF001
    patches.replace(collective_check, "_call", _sizing(marks))
    patches.replace(collective_check.Meeting, "__call__", _meeting(marks))
    patches.replace(Work, "wait", _waiting(marks))
    models = [one.model for one in prepared_models.everything()]
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None:
        patches.replace(dynamo.OptimizedModule, "__call__", _compiled(marks, models))
    marks.hooked = (
        not compile_detection.in_use()
    )  # hooks that come and go would have it compiled anew
    if marks.hooked:
        for model in models:
            for module in _wrapped(model):
                _mark_forward(module, model, marks, patches)


def _wrapped(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a prepared model, and what engines and torch.compile have wrapped in it."""
    found: Any = model
    while isinstance(found, torch.nn.Module):
        yield found
        inside = vars(found)["_modules"]
        found = inside.get("_orig_mod", inside.get("module"))


def _around(marks: Marks, name: str) -> Callable[[Any], Any]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with marks.at(name):
                return original(*args, **kwargs)

        return marked

    return wrap


def _mark_forward(
    module: torch.nn.Module, model: torch.nn.Module, marks: Marks, patches: Patches
) -> None:
    def begins(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            marks.passes_begin(model, args, kwargs)

    def ends(*_: object) -> None:
        if not torch.compiler.is_compiling():
            marks.end("forward")

    # FSDP gathers in hooks: ours comes before them and after them
    before = module.register_forward_pre_hook(begins, prepend=True, with_kwargs=True)
    after = module.register_forward_hook(ends, always_call=True)
    patches.later(before.remove)
    patches.later(after.remove)


def _compiled(marks: Marks, models: Sequence[torch.nn.Module]) -> Callable[[Any], Any]:
    """Mark what torch.compile has wrapped from outside."""
    whose = {id(module): model for model in models for module in _wrapped(model)}

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(wrapper, *args, **kwargs)
            model = whose.get(id(wrapper._orig_mod))  # noqa: SLF001
            if model is not None:
                marks.passes_begin(model, args, kwargs)
            else:
                marks.begin("forward")
            try:
                return original(wrapper, *args, **kwargs)
            finally:
                marks.end("forward")

        return call

    return wrap


def _taking(marks: Marks) -> Callable[[Any], Any]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def take(iterator: Any) -> Any:
            began, computed = time.perf_counter(), time.thread_time()
            with marks.at("data"):
                batch = original(iterator)
            taken = marks.loaders.get(id(iterator))
            if taken is None:
                taken = marks.loaders[id(iterator)] = Taken.of(iterator)
            taken.batches += 1
            taken.seconds += time.perf_counter() - began
            taken.cpu_seconds += time.thread_time() - computed
            return batch

        return take

    return wrap


def _meeting(marks: Marks) -> Callable[[Any], Any]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def meet(meeting: Any, group: Any, call: Any, *, wait: bool) -> None:
            began = time.time_ns()
            with marks.at("collective"):
                original(meeting, group, call, wait=wait)
            if threading.current_thread() is threading.main_thread():
                name = distributed_c10d._world.pg_names.get(group, str(group.group_name))  # noqa: SLF001
                marks.met.append(Met(name, (began, time.time_ns()), marks.size))

        return meet

    return wrap


def _sizing(marks: Marks) -> Callable[[Any], Any]:
    """Note the bytes of a call: input and output, of which one is the full tensor."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def sized(name: str, args: Sequence[Any], options: object) -> Any:
            given = [collective_check.tensors_of(one) for one in args[:2]]
            sizes = [sum(one.numel() * one.element_size() for one in some) for some in given]
            marks.size = max(sizes, default=0)
            return original(name, args, options)

        return sized

    return wrap


def _waiting(marks: Marks) -> Callable[[Any], Any]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(*args: Any, **kwargs: Any) -> Any:
            began = time.time_ns()
            try:
                with marks.at("collective"):
                    return original(*args, **kwargs)
            finally:
                marks.waits.append((began, time.time_ns()))

        return wait

    return wrap
