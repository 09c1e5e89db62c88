"""Makes Accelerate build FSDP and DeepSpeed engines on CPU ranks.

Used only on ranks without a GPU, before Accelerate is used. On a CPU, accelerate 1.15 silently
ignores an FSDP or DeepSpeed plugin and trains with plain DDP, or each rank separately.
``patch_accelerate()`` makes its two state classes treat CPU ranks like GPU ranks, so Accelerate's
own code builds the engines for the predefined accelerator, a user's `Accelerator()` and a
`Trainer`.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from nbdist.worker.library_patches import patch

if TYPE_CHECKING:
    from collections.abc import Callable


def patch_accelerate() -> None:
    """Patch Accelerate's state classes in this process; idempotent."""
    # accelerate 1.15 sets the number of threads and warns if the variable is missing.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    # In accelerate 1.15 it implies cpu=True for every Accelerator, which disables DeepSpeed.
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    patch("accelerate.state:PartialState.__init__", _cpu_rank)
    patch("accelerate.state:AcceleratorState.__init__", _accept_gpu_plugins)
    patch(
        "torch.distributed.fsdp._flat_param:FlatParamHandle.to_cpu",
        lambda _: contextlib.nullcontext,
    )


def skip_shared_memory_op() -> None:
    """Mark DeepSpeed's shared-memory collectives as incompatible.

    deepspeed 0.19 compiles them (12-137 s) at the first start on a CPU but uses them only for
    `inference_all_reduce`; training uses gloo either way. Without them nothing is left in
    /dev/shm. The table has one entry because it is read for this op alone: to fill it, deepspeed
    0.19.8 compiles a program for each op, and prints the linker's errors.
    """
    import deepspeed

    vars(deepspeed.ops)["__compatible_ops__"] = {"deepspeed_shm_comm": False}


def _cpu_rank(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap PartialState's init to always use the gloo group of CPU ranks."""

    def init(self: PartialState, cpu: bool = False, **kwargs: Any) -> None:  # noqa: ARG001, FBT001, FBT002
        fresh = not PartialState._shared_state  # noqa: SLF001
        kwargs.pop("backend", None)
        original(self, cpu=True, **kwargs)
        if fresh:
            # accelerate 1.15 sets "cpu:0", which FSDP1 rejects as a device other than "cpu".
            self.device = torch.device("cpu")

    return init


def _accept_gpu_plugins(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap AcceleratorState's init to accept plugins on a CPU."""

    def init(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        if not PartialState._shared_state:  # noqa: SLF001
            PartialState()
        shared = PartialState._shared_state  # noqa: SLF001
        promoted = (
            kwargs.get("fsdp_plugin") is not None
            and shared["distributed_type"] == DistributedType.MULTI_CPU
        )
        if promoted:
            # accelerate 1.15, state.py: only MULTI_<device> types are replaced by FSDP.
            shared["distributed_type"] = DistributedType.MULTI_GPU
        # cpu=True would disable DeepSpeed; PartialState has already selected the CPU.
        original(self, *args, **(kwargs | {"cpu": False}))

    return init
