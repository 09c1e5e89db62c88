"""State that DeepSpeed or FSDP keeps away from the device; runs on a rank.

The main thread is marked where DeepSpeed reads or writes files of NVMe, and where it copies
gradients to the host; updated parameters are copied back in the optimizer's step, inline.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from nbdist.worker.memory import memory_probe

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.worker.profiling.instrumentation import Marks, Patches

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
"""Module -> class -> methods of deepspeed 0.19.8 that move state."""


def configured() -> bool:
    """Whether the engine of the followed model offloads something."""
    watch = memory_probe.state.watch
    options = watch.options if watch is not None else None
    return options is not None and options.offload_device != "none"


def mark(marks: Marks, patches: Patches) -> None:
    """Mark DeepSpeed's moves until the patches are undone; what is not imported is not in use."""
    if not configured():
        return
    for name, classes in _MOVES.items():
        module = sys.modules.get(name)
        for cls, methods in classes.items():
            owner = getattr(module, cls, None)
            for method in methods:
                if owner is not None and method in vars(owner):
                    patches.replace(owner, method, _marking(marks))


def _marking(marks: Marks) -> Callable[[Any], Any]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with marks.at("offload"):
                return original(*args, **kwargs)

        return marked

    return wrap
