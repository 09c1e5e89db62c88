"""Measures the memory of this rank's training during the third optimizer step.

`worker.engines.accelerator_patch` calls ``reset_for_prepare`` and ``start_probe`` around each
`prepare()`, which hook the prepared model's forward and optimizer's step. From the first forward
after the second step until the end of the third, `planner.tracing.memory_tracker` tracks every
operation on CPU ranks; on GPUs, the allocator's peak statistics are used from there on. Outside
that step a hook costs microseconds. A new `prepare()` restarts the measurement.

By the third step the optimizer state exists and ZeRO-3 has its prefetch trace;
`planner.memory` predicts the same step.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import sys
import threading
import time
import weakref
from collections import Counter
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
from torch.utils._pytree import tree_leaves

from nbdist.hardware import discovery
from nbdist.planner.measurement_store import record_device_memory
from nbdist.planner.tracing.memory_tracker import OTHER_PART, MemoryTracker
from nbdist.state import optimizer_properties
from nbdist.state.layouts.base import innermost_optimizer
from nbdist.worker.memory import tensor_categories
from nbdist.worker.optimizer_step_gate import optimizer_step_gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from accelerate import Accelerator

    from nbdist.strategies import Options

log = logging.getLogger(__name__)

WARMUP_STEPS = 2
"""Optimizer steps before the measured one."""
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_CLEAR_PEAK = "5"
"""proc(5): resets VmHWM."""
COMPILE_NOTE = (
    "No memory breakdown: torch.compile is in use, and allocations of compiled code on CPU ranks"
    " cannot be tracked."
)
_DEFAULTS = ("fused", "foreach", "momentum", "amsgrad")
"""Defaults of an optimizer that affect its memory."""


ForwardInputs = dict[str, tuple[torch.Size, torch.dtype]]
"""Tensor arguments of a forward: name or position -> shape and dtype."""


@dataclass
class MemoryProbe:
    """Probe of one prepared model."""

    meta_model: nn.Module | None = None
    """Meta copy of the model from before `prepare()`."""
    model: weakref.ref[nn.Module] | None = None
    optimizer: weakref.ref[AcceleratedOptimizer] | None = None
    optimizer_description: dict[str, Any] = field(default_factory=dict)
    """The user's optimizer: its class and the defaults that affect memory."""
    options: Options | None = None
    accumulate: int = 1
    is_compiled: bool = False
    num_steps: int = 0
    forward_inputs: ForwardInputs = field(default_factory=dict)
    """Tensors of the last training forward."""
    num_forwards: int = 0
    """Number of forwards with gradients, except those traced by torch.compile."""
    output: weakref.ref[torch.Tensor] | None = None
    """The largest tensor of the last training forward's output."""
    keep_outputs: bool = True
    """Whether the loop still held that output at the last optimizer step."""
    memory_tracker: MemoryTracker | None = None
    history: AllocatorHistory | None = None
    has_begun: bool = False
    has_seen_buckets: bool = False
    """A step was tracked before the measured one, so DDP's buckets are counted as OTHER."""
    measurements: dict[str, Any] | None = None
    rss_before_bytes: int = 0

    @property
    def batch_shape(self) -> tuple[int, int] | None:
        """Micro-batch of the last training forward: samples, tokens per sample."""
        return batch_shape_of(self.forward_inputs) if self.forward_inputs else None

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer inside the wrappers; None if it was freed."""
        wrapper = self.optimizer() if self.optimizer is not None else None
        inner = None if wrapper is None else innermost_optimizer(wrapper)
        return inner if isinstance(inner, torch.optim.Optimizer) else None

    @property
    def prepared_model(self) -> nn.Module | None:
        """The prepared model; None if it was freed."""
        return None if self.model is None else self.model()


@dataclass
class CurrentMemoryProbe:
    """The current probe and the device of this rank."""

    probe: MemoryProbe | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    """This rank's device; the current device of the control thread may differ."""
    device_before_bytes: int = 0
    """Bytes of the device in use before this rank created a context."""


current_probe = CurrentMemoryProbe()


def before_context(device: torch.device) -> None:
    """Record the memory of a GPU that all processes use, before NCCL or CUDA is initialized."""
    if (nvml := discovery.import_pynvml()) is not None:
        # torch 2.13 has no NVML index for a MIG instance (TypeError); a driver may fail at any call
        with contextlib.suppress(RuntimeError, TypeError, nvml.NVMLError):
            current_probe.device_before_bytes = int(torch.cuda.device_memory_used(device))


def reset_for_prepare(
    models: Sequence[nn.Module], args: Sequence[object], meta_model: nn.Module | None
) -> None:
    """Create a new probe if `prepare()` is called with a new model.

    Args:
        models: the models that are not prepared yet.
        meta_model: meta copy of the last new model; None if it cannot be copied.
    """
    if not models:
        return
    stop_tracking()
    current_probe.probe = MemoryProbe(
        meta_model=meta_model, rss_before_bytes=psutil.Process().memory_info().rss
    )
    optimizer = next((arg for arg in args if isinstance(arg, torch.optim.Optimizer)), None)
    if optimizer is not None:
        current_probe.probe.optimizer_description = describe_optimizer(optimizer)


def last_forward_inputs() -> ForwardInputs:
    """Return the tensor arguments of the last training forward; empty before the first."""
    return {} if current_probe.probe is None else current_probe.probe.forward_inputs


def record_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Record the arguments of a forward if the model is the probed one."""
    if current_probe.probe is not None and current_probe.probe.prepared_model is model:
        current_probe.probe.forward_inputs = forward_inputs_of(args, kwargs)


def restore_forward_inputs(before: ForwardInputs) -> None:
    """Restore the recorded arguments after a switch, until the next forward."""
    if current_probe.probe is not None and not current_probe.probe.forward_inputs:
        current_probe.probe.forward_inputs = before


def start_probe(accelerator: Accelerator, result: object, options: Options | None) -> None:
    """Attach the probe to the prepared model and optimizer.

    Args:
        options: options of the engine; None for a user's own.
    """
    probe = current_probe.probe
    if probe is None:
        return
    prepared = result if isinstance(result, (list, tuple)) else (result,)
    models = [item for item in prepared if isinstance(item, nn.Module)]
    optimizers = [item for item in prepared if isinstance(item, AcceleratedOptimizer)]
    probe.options = options
    probe.accumulate = int(accelerator.gradient_accumulation_steps)
    if probe.model is None and models:
        probe.model = weakref.ref(models[-1])
        probe.is_compiled = any(
            hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
            for module in models[-1].modules()
        )
        models[-1].register_forward_pre_hook(_before_forward, with_kwargs=True)
        models[-1].register_forward_hook(_after_forward)
    if probe.optimizer is None and optimizers:
        probe.optimizer = weakref.ref(optimizers[0])
        inner = probe.inner_optimizer  # a DummyOptim has no inner optimizer before `prepare()`
        if inner is not None:
            probe.optimizer_description = probe.optimizer_description or describe_optimizer(inner)


def stop_tracking() -> None:
    """Stop tracking, as at the end of a cell; an incomplete step is measured again later."""
    if current_probe.probe is not None and current_probe.probe.has_begun:
        _stop(current_probe.probe)


def get_measurements() -> dict[str, Any] | None:
    """Return the measurements as JSON values; None before the end of the third step."""
    measured = current_probe.probe and current_probe.probe.measurements
    if measured and measured["kind"] == "cuda":
        measured |= _device_memory(current_probe.device)
    return measured or None


def describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the class, the memory-relevant defaults and the state of an optimizer."""
    defaults = {key: optimizer.defaults[key] for key in _DEFAULTS if key in optimizer.defaults}
    properties = optimizer_properties.properties_of(optimizer)
    return {
        "class": type(optimizer).__name__,
        "state_bytes_per_element": properties.state_bytes_per_element,
        "is_elementwise": properties.is_elementwise,
        **defaults,
    }


# ---------------------------------------------------------------------------- hooks


def _before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():  # excluded from compiled models
        _on_forward(model, args, kwargs)


@_disable_dynamo  # torch.compiler.disable imports dynamo immediately
def _on_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Record a forward with gradients; start tracking in the step before the measured one."""
    probe = current_probe.probe
    if probe is None or not torch.is_grad_enabled() or probe.prepared_model is not model:
        return
    record_forward(model, args, kwargs)
    probe.num_forwards += 1
    if probe.memory_tracker is not None:  # a further micro-batch of the measured step
        with _logged():
            probe.memory_tracker.track_tensors("gradients", tensor_categories.gradients(model))
    elif (
        probe.measurements is None
        and not probe.has_begun
        and optimizer_step_gate.listener is None
        and probe.num_steps >= WARMUP_STEPS - 1
    ):
        # DDP's reducer holds its buckets in C++: on a CPU they are tracked only if a backward
        # fills them, so tracking starts a step earlier.
        has_buckets = tensor_categories.ddp_bucket_bytes(model) > 0
        if probe.num_steps >= WARMUP_STEPS or (has_buckets and current_probe.device.type == "cpu"):
            with _logged():
                _begin(probe, model)


def _after_forward(model: nn.Module, _: object, output: object) -> None:
    """Refer weakly to the output, to see at the step whether the loop holds it."""
    probe = current_probe.probe
    if torch.compiler.is_compiling() or probe is None or probe.prepared_model is not model:
        return
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    if torch.is_grad_enabled() and tensors:
        probe.output = weakref.ref(max(tensors, key=torch.Tensor.numel))


@contextlib.contextmanager
def step(optimizer: AcceleratedOptimizer) -> Iterator[None]:
    """Context of a step of a prepared optimizer, which counts and measures it."""
    probe = current_probe.probe
    # Without gradient synchronization there is no step: see `prepared_models.wrap_step`.
    if (
        probe is None
        or probe.measurements is not None
        or probe.optimizer is None
        or probe.optimizer() is not optimizer
    ):
        yield
        return
    model = probe.prepared_model
    if probe.output is not None:
        probe.keep_outputs = probe.output() is not None
    if probe.memory_tracker is not None and model is not None:
        with _logged():  # before the step frees them
            probe.memory_tracker.track_tensors("gradients", tensor_categories.gradients(model))
    yield
    probe.num_steps += 1
    if probe.has_begun:
        with _logged():
            if probe.num_steps > WARMUP_STEPS:
                _end(probe)
            elif probe.memory_tracker is not None:  # the measured step is the next one
                probe.memory_tracker.reset_peak()
                probe.has_seen_buckets = True


# ---------------------------------------------------------------------------- measured step


def _begin(probe: MemoryProbe, model: nn.Module) -> None:
    """Start tracking, unless something else already intercepts operations."""
    device = current_probe.device
    probe.is_compiled = probe.is_compiled or is_compile_active()
    if device.type == "cuda":
        probe.history = AllocatorHistory(device)
    elif not probe.is_compiled:
        if why_not_counted(probe) is not None:
            return
        tracker = MemoryTracker(
            on_change=lambda: tracker.track_tensors(
                "buffers", tensor_categories.zero_buckets(model)
            )
        )
        enter_memory_tracker(tracker, model, probe.inner_optimizer, preexisting=OTHER_PART)
        probe.memory_tracker = tracker
    reset_peak_rss()
    probe.has_begun = True


def why_not_counted(probe: MemoryProbe) -> str | None:
    """Return why the operations of the main thread cannot be tracked; None if they can."""
    if probe.is_compiled or is_compile_active():
        return COMPILE_NOTE
    on_main_thread = threading.current_thread() is threading.main_thread()
    if _get_current_dispatch_mode() is not None or not on_main_thread:
        return "No memory breakdown: the cell uses its own dispatch mode."
    return None


def enter_memory_tracker(
    tracker: MemoryTracker,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    *,
    preexisting: str,
) -> None:
    """Enter a memory tracker that knows the existing tensors.

    Args:
        preexisting: part of the tensors that do not belong to the model.
    """
    tracker.track_tensors(preexisting, tensor_categories.all_tensors())
    for part, tensors in tensor_categories.tensors_by_use(model, optimizer):
        tracker.track_tensors(part, tensors)
    tracker.reset_peak()
    tracker.__enter__()


class AllocatorHistory:
    """Bytes that tensors request from the CUDA caching allocator, recorded until `stop()`.

    torch's peak statistics are not used, since resetting them would affect the user's cells. Blocks
    are up to 1 MiB larger than requests.
    """

    def __init__(self, device: torch.device, *, stacks: bool = False) -> None:
        """Start recording, unless the cell does already."""
        self.snapshot: dict[str, Any] = {}
        self._device = device
        self._is_users_history: bool = torch._C._cuda_isHistoryEnabled()  # noqa: SLF001
        if not self._is_users_history:
            torch.cuda.memory._record_memory_history(  # noqa: SLF001
                "all", context="all" if stacks else None, stacks="python"
            )
        self._began_us = time.time_ns() // 1000
        self._before: int = torch.cuda.memory_stats(device)["requested_bytes.all.current"]

    def stop(self) -> None:
        """Take the snapshot, then stop recording; torch 2.11 deletes the history with it."""
        self.snapshot = torch.cuda.memory._snapshot(self._device)  # noqa: SLF001
        if not self._is_users_history:
            torch.cuda.memory._record_memory_history(None)  # noqa: SLF001

    def peak(
        self, place_of: Callable[[Iterable[dict[str, Any]]], Any] = lambda _: None
    ) -> tuple[int, Counter[Any]]:
        """Return the most bytes, and those allocated since the start by place.

        Args:
            place_of: returns the place of a stack, or None.
        """
        alive: dict[int, tuple[Any, int]] = {}
        counted: Counter[Any] = Counter()
        peak = total = self._before
        at_peak: Counter[Any] = Counter()
        for event in itertools.chain(*self.snapshot["device_traces"]):
            if event["time_us"] < self._began_us:  # recorded by the cell
                continue
            if event["action"] == "alloc":
                place = place_of(event.get("frames", ()))
                alive[event["addr"]] = place, event["size"]
                total += event["size"]
                if place is not None:
                    counted[place] += event["size"]
                if total > peak:
                    peak, at_peak = total, Counter(counted)
            elif event["action"] == "free_completed":
                total -= event["size"]  # also what was allocated before the start
                place, size = alive.pop(event["addr"], (None, 0))
                if place is not None:
                    counted[place] -= size
        return peak, at_peak


def _end(probe: MemoryProbe) -> None:
    tracker, history, model = probe.memory_tracker, probe.history, probe.prepared_model
    _stop(probe)
    if model is None:
        return
    device, inner = current_probe.device, probe.inner_optimizer
    samples, tokens = probe.batch_shape or (0, 0)
    probe.measurements = {
        "kind": device.type,
        "step": probe.num_steps,
        "batch_size": samples,
        "seq_len": tokens,
        "accumulate": probe.accumulate,
        "keep_outputs": probe.keep_outputs,
        "optimizer": probe.optimizer_description,
        "compiled": probe.is_compiled,
        "rss_bytes": peak_rss_bytes(),
        "rss_before_bytes": probe.rss_before_bytes,
        "beside_bytes": other_models_bytes(model, inner),
    }
    if history is not None:
        found: dict[str, Any] = {"parts": resting_bytes(model, inner), **_device_memory(device)}
        found["allocated_bytes"] = history.peak()[0]
        found["device_name"] = torch.cuda.get_device_name(device)
        probe.measurements |= found
        # The ratio of device memory to tensor memory, for later plans. A toy model's is larger than
        # that of one which fills the device.
        fills = found["allocated_bytes"] > found["device_total_bytes"] / 10
        if fills and probe.options is not None and torch.distributed.get_rank() == 0:
            record_device_memory(
                found["device_name"],
                probe.options.backend,
                probe.options.offload_device,
                allocated_bytes=found["allocated_bytes"],
                reserved_bytes=found["reserved_bytes"],
                device_bytes=found["device_bytes"],
            )
    elif tracker is not None and not is_compile_active():
        buckets = tensor_categories.ddp_bucket_bytes(model)
        if probe.has_seen_buckets:
            tracker.at_peak[OTHER_PART] -= buckets
        parts = _parts(tracker.at_peak, buckets)
        probe.measurements |= {"parts": parts, "allocated_bytes": sum(parts.values())}
    else:
        probe.measurements |= {"parts": resting_bytes(model, inner), "allocated_bytes": None}


def _stop(probe: MemoryProbe) -> None:
    probe.has_begun, tracker, probe.memory_tracker = False, probe.memory_tracker, None
    history, probe.history = probe.history, None
    if history is not None:
        history.stop()
    if tracker is not None:
        exit_memory_tracker(tracker)


def exit_memory_tracker(counting: MemoryTracker) -> None:
    """Exit a memory tracker, even if dispatch modes of the user are above it on the stack."""
    above = []
    while (top := _get_current_dispatch_mode()) is not None and top is not counting:
        above.append(_pop_mode())
    counting.__exit__(None, None, None)
    for mode in reversed(above):
        _push_mode(mode)


def resting_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Return the bytes of parameters, gradients, optimizer and engine on this rank's device."""
    tracker = MemoryTracker()
    for part, tensors in tensor_categories.tensors_by_use(model, optimizer):
        tracker.track_tensors(part, _device_tensors(tensors))
    return _parts(tracker.current, tensor_categories.ddp_bucket_bytes(model))


def other_models_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of other models and their optimizers on this rank's device."""
    tracker = MemoryTracker()
    tracker.track_tensors(
        OTHER_PART, _device_tensors(tensor_categories.tensors_of_other_models(model, optimizer))
    )
    for part, tensors in tensor_categories.tensors_by_use(model, optimizer):
        tracker.track_tensors(part, _device_tensors(tensors))
    return max(0, tracker.current[OTHER_PART])


def _device_tensors(values: Iterable[object]) -> list[torch.Tensor]:
    kind = current_probe.device.type
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.device.type == kind]


def _parts(counted: dict[str, int], buckets: int) -> dict[str, int]:
    """Return the non-empty parts, with DDP's buckets in "buffers" and OTHER last."""
    parts = {part: size for part, size in counted.items() if size > 0 and part != OTHER_PART}
    if buckets:
        parts["buffers"] = parts.get("buffers", 0) + buckets
    return parts | ({OTHER_PART: counted[OTHER_PART]} if counted.get(OTHER_PART) else {})


# ---------------------------------------------------------------------------- helpers


def forward_inputs_of(args: Sequence[object], kwargs: Mapping[str, object]) -> ForwardInputs:
    """Return shapes and dtypes of the tensors in a call, including those in a mapping.

    Runs in every forward, so it must be fast.
    """
    call: ForwardInputs = {}
    for index, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            call[str(index)] = value.shape, value.dtype
        elif isinstance(value, Mapping):
            call |= forward_inputs_of((), value)
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            call[name] = value.shape, value.dtype
    return call


def batch_shape_of(call: ForwardInputs) -> tuple[int, int]:
    """Return batch size and tokens per sample of a forward; tokens are 1 if there are none.

    Tokens are an integer tensor with two dimensions, or embeddings with three.
    """
    shaped = [(shape, dtype) for shape, dtype in call.values() if shape]
    tokens = [
        shape for shape, dtype in shaped if len(shape) == _TOKENS and not dtype.is_floating_point
    ]
    embedded = [shape for shape, _ in shaped if len(shape) == _EMBEDDINGS]
    for shape in (*tokens, *embedded):
        return shape[0], shape[1]
    return (shaped[0][0][0], 1) if shaped else (1, 1)


_TOKENS, _EMBEDDINGS = 2, 3
"""Number of dimensions of token ids and of embeddings."""


def _device_memory(device: torch.device) -> dict[str, int]:
    """Return the bytes that the allocator and the driver hold."""
    free, total = torch.cuda.mem_get_info(device)
    return {
        "reserved_bytes": torch.cuda.memory_reserved(device),
        "device_bytes": total - free - current_probe.device_before_bytes,
        "device_total_bytes": total,
    }


def trim_malloc() -> None:
    """Return freed memory to the system; glibc keeps buffers of up to 32 MiB otherwise."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def reset_peak_rss() -> None:
    """Reset the peak of resident memory to the current value."""
    with contextlib.suppress(OSError):  # unsupported in a sandbox: the peak is since the start
        _CLEAR.write_text(_CLEAR_PEAK)


def peak_rss_bytes() -> int:
    """Return the peak resident memory in bytes since ``reset_peak_rss``."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Log errors of the measurement instead of failing the user's training."""
    try:
        yield
    except Exception:
        log.exception("measuring memory failed; training continues")
        if current_probe.probe is not None:
            current_probe.probe.measurements = current_probe.probe.measurements or {}
            _stop(current_probe.probe)


def is_compile_active() -> bool:
    """Return whether compiled code is alive; dynamo (torch 2.13) keeps it in a weak map."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.orig_code_map.values)


def on_compile(notify: Callable[[], object]) -> Callable[[], object]:
    """Register a callback for the start of a compilation; return a function that removes it."""
    dynamo: Any = sys.modules.get("torch._dynamo.callback")
    if dynamo is None:  # nothing has been compiled yet
        return lambda: None
    handler = dynamo.callback_handler
    callback = handler.register_start_callback(lambda _: notify())

    def remove() -> None:
        with contextlib.suppress(ValueError):  # torch.compiler.reset() has removed it
            handler.remove_start_callback(callback)

    return remove
