"""Real engines on CPU ranks; the only module that knows how.

Runs on a rank without a GPU, before anything of Accelerate is used. Accelerate 1.15 drops
an FSDP or DeepSpeed request on a CPU without a word and trains plain DDP, or each rank
alone. `install()` lets its two state objects see CPU ranks as it sees GPUs, so the engines
are built by Accelerate's own code, for the session's accelerator, a user's `Accelerator()`
and a `Trainer` alike. With a GPU nothing here is used.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

if TYPE_CHECKING:
    from collections.abc import Callable

Init = Any
"""An `__init__` of Accelerate, as a plain function."""


def install() -> None:
    """Patch Accelerate's states in this process; a second call changes nothing."""
    # accelerate 1.15 sets the number of threads and warns where the variable is missing.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    # accelerate 1.15: with it every Accelerator is told cpu=True, which turns DeepSpeed off.
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    _patch(PartialState, _cpu_rank)
    _patch(AcceleratorState, _as_on_a_gpu)


def skip_shared_memory_op() -> None:
    """Tell DeepSpeed that its shared-memory collectives cannot be built here.

    deepspeed 0.19 compiles them (12-137 s) at every first start on a CPU, and uses them
    for `inference_all_reduce` alone; training goes through gloo either way. Without
    them nothing is left in /dev/shm.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _patch(cls: type, around: Callable[[Init], Init]) -> None:
    """Wrap a class's `__init__`, once."""
    original: Init = cls.__dict__["__init__"]
    if not hasattr(original, "__wrapped__"):
        cls.__init__ = around(original)  # type: ignore[misc]


def _cpu_rank(original: Init) -> Init:
    """Wrap PartialState's init: a gloo group of CPU ranks whatever it is asked for."""

    @functools.wraps(original)
    def init(self: PartialState, cpu: bool = False, **kwargs: Any) -> None:  # noqa: ARG001, FBT001, FBT002
        fresh = not PartialState._shared_state  # noqa: SLF001
        kwargs.pop("backend", None)
        original(self, cpu=True, **kwargs)
        if fresh:
            # accelerate 1.15 says "cpu:0", which FSDP1 refuses as another device than "cpu".
            self.device = torch.device("cpu")

    return init


def _as_on_a_gpu(original: Init) -> Init:
    """Wrap AcceleratorState's init: plugins count on a CPU too."""

    @functools.wraps(original)
    def init(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        if not PartialState._shared_state:  # noqa: SLF001
            PartialState()
        shared = PartialState._shared_state  # noqa: SLF001
        promoted = (
            kwargs.get("fsdp_plugin") is not None
            and shared["distributed_type"] == DistributedType.MULTI_CPU
        )
        if promoted:
            # accelerate 1.15, state.py: only the MULTI_<device> types are turned into FSDP.
            shared["distributed_type"] = DistributedType.MULTI_GPU
        # cpu=True would turn DeepSpeed off; the ranks are CPU ranks already.
        original(self, *args, **(kwargs | {"cpu": False}))

    return init
