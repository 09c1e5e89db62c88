"""A rank's GPUs, which the launcher that forked it has hidden from itself."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def take(shown: Mapping[str, str]) -> None:
    """Let this process see its GPUs; call it before anything of CUDA.

    Args:
        shown: from `launcher.device_visibility.shown`.
    """
    os.environ.update(shown)
    # transformers 5 asks torch once whether there is a GPU, for flash attention at its import
    answers = vars(sys.modules.get("transformers.utils.import_utils", object))
    for answer in answers.values():
        if callable(forget := getattr(answer, "cache_clear", None)):
            forget()


def open_nvml() -> None:
    """Let DeepSpeed ask NVML for free memory where it can; call it after DeepSpeed's import.

    deepspeed 0.19.8 reads CUDA_VISIBLE_DEVICES as numbers (`_get_nvml_gpu_id`), and cannot with
    the UUIDs of MIG instances. Without NVML it asks torch instead.
    """
    from deepspeed.accelerator import cuda_accelerator, get_accelerator

    named = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    if not all(map(str.isdecimal, named)):
        cuda_accelerator.pynvml = None
    elif cuda_accelerator.pynvml is None:  # the launcher has closed it
        get_accelerator()._init_pynvml()  # noqa: SLF001
