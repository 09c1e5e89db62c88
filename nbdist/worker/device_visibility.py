"""Makes a rank's GPUs visible again, which the launcher hides before it forks."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def take(shown: Mapping[str, str]) -> None:
    """Make this process's GPUs visible; call it before any use of CUDA.

    Args:
        shown: from `launcher.device_visibility.shown`.
    """
    os.environ.update(shown)
    # transformers 5 checks for a GPU at import (for flash attention) and caches the result.
    functions = vars(sys.modules.get("transformers.utils.import_utils", object))
    for function in functions.values():
        if callable(cache_clear := getattr(function, "cache_clear", None)):
            cache_clear()


def open_nvml() -> None:
    """Initialize NVML in DeepSpeed where it works; call it after importing DeepSpeed.

    deepspeed 0.19.8 parses CUDA_VISIBLE_DEVICES as integers (`_get_nvml_gpu_id`), which fails for
    the UUIDs of MIG instances. Without NVML it gets the free memory from torch.
    """
    from deepspeed.accelerator import cuda_accelerator, get_accelerator

    named = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    if not all(map(str.isdecimal, named)):
        cuda_accelerator.pynvml = None
    elif cuda_accelerator.pynvml is None:  # the launcher has shut it down
        get_accelerator()._init_pynvml()  # noqa: SLF001
