"""Controls which GPUs the launcher and its ranks see.

A process that has initialised CUDA cannot fork processes that use it, and libraries may initialise
CUDA at import. So the launcher hides all GPUs from itself; ranks, and the processes that build
DeepSpeed's ops, see theirs.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from nbdist.hardware import amd, discovery

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"


def hide_gpus() -> None:
    """Hide all GPUs from this process."""
    os.environ.update(amd.visibility_variables(""))
    # torch 2.13: without it is_available() calls cuInit, which breaks forked processes
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def shown(uuids: Sequence[str] | None) -> dict[str, str]:
    """Return environment variables that show a process these GPUs of this machine.

    Args:
        uuids: as in ``LaunchRanksRequest.devices``; None for CPU ranks.
    """
    if not uuids:
        return amd.visibility_variables("")
    # CUDA's default order is fastest first; NVML, DeepSpeed and torch use PCI bus order
    variables = amd.visibility_variables(discovery.cuda_visible_devices(uuids))
    return {**variables, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def take(shown: Mapping[str, str]) -> None:
    """Make this rank's GPUs visible, which the launcher hid; call it before any use of CUDA.

    Args:
        shown: from ``shown``.
    """
    os.environ.update(shown)
    # transformers 5 checks for a GPU at import (for flash attention) and caches the result.
    functions = vars(sys.modules.get("transformers.utils.import_utils", object))
    for function in functions.values():
        if callable(cache_clear := getattr(function, "cache_clear", None)):
            cache_clear()


def is_gpu(shown: Mapping[str, str]) -> bool:
    """Return True if a process with these variables sees a GPU."""
    return bool(shown.get(VISIBLE))


def close_nvml() -> None:
    """Close NVML before forking; `worker.engines.deepspeed` reopens it on the ranks.

    NVML does not guarantee to work across forks, and DeepSpeed 0.19.8 opens it at import.
    """
    accelerator: Any = sys.modules.get("deepspeed.accelerator.cuda_accelerator")
    if accelerator is not None and accelerator.pynvml is not None:
        accelerator.pynvml.nvmlShutdown()
        accelerator.pynvml = None
