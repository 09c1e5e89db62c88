"""The launcher sees no GPU, its ranks see theirs.

A process that has initialised CUDA cannot fork others that use it. Libraries may do so when
they are imported, so the launcher hides all GPUs from itself for as long as it lives. Ranks,
and the processes that build DeepSpeed's ops, are given theirs.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from nbdist.hardware import discovery

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"


def hide() -> None:
    """Show this process no GPU."""
    os.environ[VISIBLE] = ""
    # torch 2.13: is_available() would call cuInit without it, and so break forks
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def shown(uuids: Sequence[str] | None) -> dict[str, str]:
    """Environment variables that show a process these GPUs of this machine.

    Args:
        uuids: as in `wire.Launch.devices`; None for CPU ranks.
    """
    if not uuids:
        return {VISIBLE: ""}
    # CUDA would put the fastest first; NVML, and so DeepSpeed and torch, count by PCI bus
    return {VISIBLE: discovery.cuda_visible_devices(uuids), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def is_gpu(shown: Mapping[str, str]) -> bool:
    """Whether a process with these variables sees a GPU."""
    return bool(shown.get(VISIBLE))


def close_nvml() -> None:
    """Close NVML, which promises nothing about forks; DeepSpeed 0.19.8 opens it at import.

    `worker.device_visibility.open_nvml` opens it again on the ranks.
    """
    accelerator: Any = sys.modules.get("deepspeed.accelerator.cuda_accelerator")
    if accelerator is not None and accelerator.pynvml is not None:
        accelerator.pynvml.nvmlShutdown()
        accelerator.pynvml = None
