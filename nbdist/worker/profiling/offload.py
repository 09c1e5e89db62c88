"""Instrumentation of offload traffic: state that DeepSpeed or FSDP keeps off the device.

Patches the DeepSpeed methods that read or write NVMe files or copy gradients to the host. Updated
parameters are copied back in the optimizer step itself.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from nbdist.worker.memory import memory_probe

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.worker.profiling.instrumentation import Patches, PhaseSpans

_MOVES: dict[str, dict[str, tuple[str, ...]]] = {
    "deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper": {
        "PartitionedOptimizerSwapper": (
            "swap_in_optimizer_state",
            "swap_out_optimizer_state",
            "swap_out_gradients",
        ),
    },
    "deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper": {
        "PipelinedOptimizerSwapper": (
            "swap_in_optimizer_state",
            "swap_out_optimizer_state",
            "swap_out_gradients",
        ),
    },
    "deepspeed.runtime.swap_tensor.partitioned_param_swapper": {
        "AsyncPartitionedParameterSwapper": (
            "swap_in",
            "swap_out_and_release",
            "synchronize_reads",
            "synchronize_writes",
        ),
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        "DeepSpeedZeroOptimizer": ("copy_grads_in_partition",),
    },
    "deepspeed.runtime.zero.stage3": {
        "DeepSpeedZeroOptimizer_Stage3": (
            "_offload_grad_partition_at_boundary",
            "_optimizer_states_and_gradient_swap_in",
            "_optimizer_states_and_gradient_swap_out",
            "_swap_in_sub_group_to_flat_buffer",
            "_swap_out_offload_fp32_gradients",
        ),
    },
}
"""Module -> class -> methods that move state, in deepspeed 0.19.8."""


def is_offloading() -> bool:
    """Return whether the backend of the measured model uses offloading."""
    probe = memory_probe.probe_state.probe
    options = probe.options if probe is not None else None
    return options is not None and options.offload_device != "none"


def mark_offload(marks: PhaseSpans, patches: Patches) -> None:
    """Record offload traffic of DeepSpeed until the patches are undone."""
    if not is_offloading():
        return
    for name, classes in _MOVES.items():
        module = sys.modules.get(name)  # a module that is not imported is not in use
        for cls, methods in classes.items():
            owner = getattr(module, cls, None)
            for method in methods:
                if owner is not None and method in vars(owner):
                    patches.replace(owner, method, _marking(marks))


def _marking(marks: PhaseSpans) -> Callable[[Any], Any]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with marks.mark("offload"):
                return original(*args, **kwargs)

        return marked

    return wrap
