"""What this rank's training really holds, measured by itself in the third optimizer step.

Runs on a rank. `worker.engines.accelerator` calls `meet` and `watch` around each `prepare()`; from
then on two hooks count: the prepared model's forward and the prepared optimizer's step. From the
first forward after the second step to the end of the third, CPU ranks see every operation
through `planner.tracing.memory_tracker`; a GPU's allocator counts by itself, from there on for
good. Before and after that one step a hook costs microseconds. A new `prepare()` starts anew.

Optimizer state exists by then, and ZeRO-3 has its trace: `planner.memory_model` predicts that step.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

from nbdist.hardware import discovery
from nbdist.planner.memory_calibration import Learned
from nbdist.planner.tracing.memory_tracker import OTHER, Footprint
from nbdist.worker.engines import compile_detection, deepspeed
from nbdist.worker.memory import memory_accounting
from nbdist.worker.profiling.optimizer_hooks import slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from accelerate import Accelerator

    from nbdist.strategies import Options

log = logging.getLogger(__name__)

STEPS_BEFORE = 2
"""Optimizer steps before the measured one."""
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_CLEAR_PEAK = "5"
"""proc(5): resets VmHWM."""
NOT_SEEN = (
    "memory was not told apart: torch.compile is in use, and what compiled code allocates on a CPU"
    " rank is not seen."
)
_DEFAULTS = ("fused", "foreach", "momentum", "amsgrad")
"""What of an optimizer's defaults changes its memory."""


Call = dict[str, tuple[torch.Size, torch.dtype]]
"""Tensors of a forward: name, or place, of the argument -> shape and dtype."""


@dataclass
class Watch:
    """One prepared model, followed until it is measured."""

    twin: nn.Module | None = None
    """The model as it was before `prepare()`, without its data."""
    model: weakref.ref[nn.Module] | None = None
    optimizer: weakref.ref[AcceleratedOptimizer] | None = None
    described: dict[str, Any] = field(default_factory=dict)
    """The user's optimizer: its class and what changes its memory."""
    options: Options | None = None
    accumulate: int = 1
    compiled: bool = False
    steps: int = 0
    call: Call = field(default_factory=dict)
    """Tensors of the last training forward."""
    passes: int = 0
    """Forwards with gradients so far, but those that torch.compile has seen."""
    counting: Footprint | None = None
    begun: bool = False
    saw_buckets: bool = False
    """A whole step was counted before the measured one: DDP's buckets are among the rest."""
    figures: dict[str, Any] | None = None
    rss_before: int = 0

    def waits_for(self, optimizer: AcceleratedOptimizer) -> bool:
        """Whether a step of this optimizer counts, and gradients are complete for it."""
        if self.figures is not None or self.optimizer is None:
            return False
        complete = bool(optimizer.gradient_state.sync_gradients)
        return complete and self.optimizer() is optimizer

    @property
    def first_step(self) -> int:
        """The step before which counting begins.

        DDP's reducer holds its buckets in C++: they are seen when a backward fills them.
        """
        seen_late = (
            self.prepared is not None and memory_accounting.ddp_bucket_bytes(self.prepared) > 0
        )
        return STEPS_BEFORE - 1 if seen_late and state.device.type == "cpu" else STEPS_BEFORE

    @property
    def shape(self) -> tuple[int, int] | None:
        """Micro-batch of the last training forward: samples, tokens of each."""
        return shape_of(self.call) if self.call else None

    @property
    def prepared(self) -> nn.Module | None:
        """The model that `prepare()` returned, while it lives."""
        return None if self.model is None else self.model()


@dataclass
class State:
    """What this rank follows."""

    watch: Watch | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    """The rank's own; the control thread has another current one."""
    device_before: int = 0
    """Bytes of the device that were used before this rank had a context there."""


state = State()


def before_context(device: torch.device) -> None:
    """Note what a GPU holds; to be called before NCCL and this rank's context are there."""
    state.device_before = _device_used(device)


def install(device: torch.device) -> None:
    """Count steps of all prepared optimizers from now on; once in a process."""
    state.device = device
    for cls in (AcceleratedOptimizer, deepspeed.StepsItself):
        setattr(cls, "step", _counting(cls.__dict__["step"]))  # noqa: B010 - mypy: a method


def meet(models: Sequence[nn.Module], args: Sequence[object], twin: nn.Module | None) -> None:
    """Forget what was followed where a new model comes to `prepare()`.

    Args:
        models: the new ones, bare.
        args: of `prepare()`.
        twin: the last new model without its data; None where it cannot be copied.
    """
    if not models:
        return
    state.watch = Watch(twin=twin, rss_before=psutil.Process().memory_info().rss)
    optimizer = next((one for one in args if isinstance(one, torch.optim.Optimizer)), None)
    if optimizer is not None:
        state.watch.described = described(optimizer)


def fed() -> Call:
    """Tensors of the last training forward; none before one."""
    return {} if state.watch is None else state.watch.call


def note_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note what a model goes forward with, where it is the one that is followed."""
    if state.watch is not None and state.watch.prepared is model:
        state.watch.call = call_of(args, kwargs)


def fed_like(before: Call) -> None:
    """After a switch a model is fed as it was before, until a forward tells otherwise."""
    if state.watch is not None and not state.watch.call:
        state.watch.call = before


def watch(accelerator: Accelerator, result: object, options: Options | None) -> None:
    """Follow the model and the optimizer that `prepare()` returned.

    Args:
        accelerator: whose `prepare()`.
        result: what it returned.
        options: of the engine; None for a user's own.
    """
    following = state.watch
    if following is None:
        return
    prepared = result if isinstance(result, (list, tuple)) else (result,)
    models = [one for one in prepared if isinstance(one, nn.Module)]
    optimizers = [one for one in prepared if isinstance(one, AcceleratedOptimizer)]
    following.options = options
    following.accumulate = int(accelerator.gradient_accumulation_steps)
    if following.model is None and models:
        following.model = weakref.ref(models[-1])
        following.compiled = hasattr(models[-1], "_orig_mod") or _compiles(models[-1])
        models[-1].register_forward_pre_hook(_before_forward, with_kwargs=True)
    if following.optimizer is None and optimizers:
        following.optimizer = weakref.ref(optimizers[0])
        inside = innermost(following)  # a DummyOptim has none of its own before `prepare()`
        if inside is not None:
            following.described = following.described or described(inside)


def cell_ended() -> None:
    """Stop counting at the end of a cell, whatever ended it; the next step is tried instead."""
    if state.watch is not None and state.watch.begun:
        _stop(state.watch)


def figures() -> dict[str, Any] | None:
    """What was measured, as plain values; None before the end of the third step."""
    measured = state.watch and state.watch.figures
    if measured and measured["kind"] == "cuda":
        measured |= _on_gpu(state.device)
    return measured or None


def described(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Class and memory-relevant defaults of an optimizer."""
    defaults = {key: optimizer.defaults[key] for key in _DEFAULTS if key in optimizer.defaults}
    return {"class": type(optimizer).__name__, **defaults}


# ---------------------------------------------------------------------------- hooks


def _before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note the micro-batch; nothing of it becomes part of a compiled model."""
    if not torch.compiler.is_compiling():
        _note_pass(model, args, kwargs)


@_disable_dynamo  # torch.compiler.disable imports dynamo at once
def _note_pass(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note a forward with gradients; begin to measure where it is time."""
    following = state.watch
    if following is None or not torch.is_grad_enabled() or following.prepared is not model:
        return
    note_call(model, args, kwargs)
    following.passes += 1
    if following.counting is not None:  # a further micro-batch of the measured step
        with _logged():
            following.counting.know("gradients", memory_accounting.gradients(model))
    elif (
        following.figures is None
        and not following.begun
        and slot.window is None
        and following.steps >= following.first_step
    ):
        with _logged():
            _begin(following, model)


def _counting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the step of a prepared optimizer."""

    @functools.wraps(original)
    def step(self: AcceleratedOptimizer, closure: Callable[[], object] | None = None) -> Any:
        following = state.watch
        if following is None or not following.waits_for(self):
            return original(self, closure)
        with _logged():
            _before_step(following)
        result = original(self, closure)
        following.steps += 1
        if following.begun:
            with _logged():
                _end_of_step(following)
        return result

    return step


# ---------------------------------------------------------------------------- the one step


def _begin(following: Watch, model: nn.Module) -> None:
    """Begin to count, unless something else watches operations already."""
    device = state.device
    following.compiled = following.compiled or compile_detection.in_use()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif not following.compiled:
        if why_not_counted(following) is not None:
            return
        following.counting = _entered(model, innermost(following))
    reset_rss_peak()
    following.begun = True


def why_not_counted(following: Watch) -> str | None:
    """Say why no footprint can count the operations of the main thread now; None: it can."""
    if following.compiled or compile_detection.in_use():
        return NOT_SEEN
    if _get_current_dispatch_mode() is not None or not _on_main_thread():
        return "memory was not told apart: the cell has a dispatch mode of its own."
    return None


def _entered(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Footprint:
    """A footprint that knows what there is, and counts."""
    counting = Footprint(
        on_change=lambda: counting.know("buffers", memory_accounting.buckets(model))
    )
    counting.know(OTHER, memory_accounting.everything())
    for part, tensors in memory_accounting.held(model, optimizer):
        counting.know(part, tensors)
    counting.restart_peak()
    return counting.__enter__()


def _before_step(following: Watch) -> None:
    """Tell gradients from activations while they are there."""
    if following.counting is not None and following.prepared is not None:
        following.counting.know("gradients", memory_accounting.gradients(following.prepared))


def _end_of_step(following: Watch) -> None:
    """Let the measured step begin, or end."""
    if following.steps > STEPS_BEFORE:
        _end(following)
    elif following.counting is not None:
        following.counting.restart_peak()
        following.saw_buckets = True


def _end(following: Watch) -> None:
    """Stop counting and keep the figures."""
    counting, model = following.counting, following.prepared
    _stop(following)
    if model is None:
        return
    device = state.device
    samples, tokens = following.shape or (0, 0)
    following.figures = {
        "kind": device.type,
        "step": following.steps,
        "batch_size": samples,
        "seq_len": tokens,
        "accumulate": following.accumulate,
        "optimizer": following.described,
        "compiled": following.compiled,
        "rss_bytes": rss_peak(),
        "rss_before_bytes": following.rss_before,
    }
    inner = innermost(following)
    following.figures["beside_bytes"] = beside(model, inner)
    if device.type == "cuda":
        following.figures |= {"parts": resting(model, inner)} | _on_gpu(device)
        following.figures["device_name"] = torch.cuda.get_device_name(device)
        if following.options is not None and torch.distributed.get_rank() == 0:
            _learn(following.options, following.figures)
    elif counting is not None and not compile_detection.in_use():
        buckets = memory_accounting.ddp_bucket_bytes(model)
        if following.saw_buckets:
            counting.at_peak[OTHER] -= buckets
        parts = _parts(counting.at_peak, buckets)
        following.figures |= {"parts": parts, "allocated_bytes": sum(parts.values())}
    else:
        following.figures |= {"parts": resting(model, inner), "allocated_bytes": None}


def _learn(options: Options, found: dict[str, Any]) -> None:
    """Remember how the device's bytes follow from those of tensors, for the next plan."""
    Learned().learn(
        found["device_name"],
        options.backend,
        options.offload_device,
        allocated_bytes=found["allocated_bytes"],
        reserved_bytes=found["reserved_bytes"],
        device_bytes=found["device_bytes"],
    )


def _stop(following: Watch) -> None:
    """Count no more."""
    following.begun, counting, following.counting = False, following.counting, None
    if counting is not None:
        leave(counting)


def leave(counting: Footprint) -> None:
    """Leave a footprint, also where modes of the user lie above it."""
    above = []
    while (top := _get_current_dispatch_mode()) is not None and top is not counting:
        above.append(_pop_mode())
    counting.__exit__(None, None, None)
    for mode in reversed(above):
        _push_mode(mode)


def resting(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Bytes that parameters, gradients, optimizer and engine hold now on the model's device."""
    counting = Footprint()
    for part, tensors in memory_accounting.held(model, optimizer):
        counting.know(part, _here(tensors))
    return _parts(counting.current, memory_accounting.ddp_bucket_bytes(model))


def beside(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes that other models and their optimizers hold on the model's device."""
    counting = Footprint()
    counting.know(OTHER, _here(memory_accounting.of_others(model, optimizer)))
    for part, tensors in memory_accounting.held(model, optimizer):
        counting.know(part, _here(tensors))
    return max(0, counting.current[OTHER])


def _here(values: Iterable[object]) -> list[torch.Tensor]:
    """The tensors among some values that lie on this rank's device."""
    device = state.device.type
    return [one for one in values if isinstance(one, torch.Tensor) and one.device.type == device]


def _parts(counted: dict[str, int], buckets: int) -> dict[str, int]:
    """Parts with something in them, DDP's buckets included, OTHER last."""
    parts = {part: size for part, size in counted.items() if size > 0 and part != OTHER}
    if buckets:
        parts["buffers"] = parts.get("buffers", 0) + buckets
    return parts | ({OTHER: counted[OTHER]} if counted.get(OTHER) else {})


# ---------------------------------------------------------------------------- small things


def call_of(args: Sequence[object], kwargs: Mapping[str, object]) -> Call:
    """Shapes and types of the tensors in a call; a mapping among them is looked into.

    Runs in every forward, so it only takes down what is there.
    """
    call: Call = {}
    for place, one in enumerate(args):
        if isinstance(one, torch.Tensor):
            call[str(place)] = one.shape, one.dtype
        elif isinstance(one, Mapping):
            call |= call_of((), one)
    for name, one in kwargs.items():
        if isinstance(one, torch.Tensor):
            call[name] = one.shape, one.dtype
    return call


def shape_of(call: Call) -> tuple[int, int]:
    """Samples and tokens of each in a call of a model; tokens are 1 where there are none.

    Tokens are whole numbers of two dimensions, or embeddings of three.
    """
    shaped = [(shape, dtype) for shape, dtype in call.values() if shape]
    tokens = [one for one, dtype in shaped if len(one) == _TOKENS and not dtype.is_floating_point]
    embedded = [one for one, _ in shaped if len(one) == _EMBEDDINGS]
    for one in (*tokens, *embedded):
        return one[0], one[1]
    return (shaped[0][0][0], 1) if shaped else (1, 1)


_TOKENS, _EMBEDDINGS = 2, 3
"""Dimensions: samples and tokens, and hidden units too."""


def innermost(following: Watch | None) -> torch.optim.Optimizer | None:
    """The torch optimizer inside Accelerate's and DeepSpeed's wrappers."""
    found: Any = following.optimizer() if following and following.optimizer else None
    while hasattr(found, "optimizer"):
        found = found.optimizer
    return found if isinstance(found, torch.optim.Optimizer) else None


def _compiles(model: nn.Module) -> bool:
    """Whether torch.compile works on the model or inside it."""
    return any(
        hasattr(one, "_orig_mod") or getattr(one, "_compiled_call_impl", None) is not None
        for one in model.modules()
    )


def _on_gpu(device: torch.device) -> dict[str, int]:
    """What the device's allocator and the driver count since the third step began."""
    counted = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated_bytes": counted["allocated_bytes.all.peak"],
        "active_bytes": counted["active_bytes.all.peak"],
        "reserved_bytes": counted["reserved_bytes.all.peak"],
        "device_bytes": total - free - state.device_before,
        "device_total_bytes": total,
    }


def _device_used(device: torch.device) -> int:
    """Bytes of a device in use by anybody, asked without a context."""
    nvml = discovery.pynvml()
    if nvml is None:
        return 0
    # torch 2.13 has no NVML index for a MIG instance (TypeError); a driver may fail at any call
    with contextlib.suppress(RuntimeError, TypeError, nvml.NVMLError):
        return int(torch.cuda.device_memory_used(device))
    return 0


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def trim() -> None:
    """Give the system what was freed: glibc keeps buffers of up to 32 MiB for later."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


def reset_rss_peak() -> None:
    """Let the peak of resident memory be that of now."""
    with contextlib.suppress(OSError):  # a sandbox without it: the peak since the start counts
        _CLEAR.write_text(_CLEAR_PEAK)


def rss_peak() -> int:
    """Most resident memory since `reset_rss_peak`, in bytes."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Let measuring fail without the user's training."""
    try:
        yield
    except Exception:
        log.exception("the session's own measurement failed; training goes on")
        if state.watch is not None:
            state.watch.figures = state.watch.figures or {}
            _stop(state.watch)
