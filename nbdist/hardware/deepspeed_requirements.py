"""Checks the requirements for compiling DeepSpeed ops."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

NVME_OP = "async_io"
STALE_S = 1800.0
"""An older lock was left by a killed build: no build takes this long."""


def build_search_path() -> str:
    """Return PATH with this environment's programs in front."""
    # ninja's console script is next to the interpreter, whose folder may not be on PATH
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def missing_requirements(ops: Sequence[str], kind: str) -> str:
    """Return what is missing to build the ops and how to install it, or "".

    Args:
        ops: names of the ops.
        kind: device of the ranks, "cpu" or "cuda".
    """
    compiler, path = os.environ.get("CXX", "c++"), build_search_path()
    for tool, package in ((compiler, "g++"), ("ninja", "ninja (`pip install ninja`)")):
        if shutil.which(tool, path=path) is None:
            return (
                f"This offload compiles DeepSpeed's {', '.join(ops)} once, and {tool} is not on"
                f" PATH. Install {package}, or leave the offload out."
            )
    include = [compiler, "-x", "c++", "-fsyntax-only", "-include", "libaio.h", os.devnull]
    if NVME_OP in ops and subprocess.run(include, capture_output=True, check=False).returncode:  # noqa: S603
        return (
            f"Offload to NVMe compiles DeepSpeed's {NVME_OP}, and libaio.h is missing. Install it"
            " (Debian, Ubuntu: apt install libaio-dev; Fedora: dnf install libaio-devel), or use"
            " offload cpu."
        )
    # deepspeed 0.19.8: the only offload op that is a CUDAOpBuilder
    if NVME_OP in ops and kind == "cuda" and not _has_cuda_toolkit():
        return (
            f"Offload to NVMe on GPUs compiles DeepSpeed's {NVME_OP} with the CUDA toolkit, and"
            " nvcc or CUDA's headers are missing. Install the toolkit of torch's CUDA version and"
            " set CUDA_HOME to its folder, or use offload cpu."
        )
    return ""


def stale_build_locks() -> list[Path]:
    """Return locks that killed builds left in torch's default extension folder.

    torch 2.13 waits forever for such a lock. nbdist builds in its own folder, under a lock that the
    operating system releases with its holder.
    """
    extensions_dir = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(extensions_dir).expanduser() if extensions_dir else cache / "torch_extensions"
    locks = [*root.glob("*/lock"), *root.glob("*/*/lock")]
    stale = []
    for lock in sorted(locks):
        with contextlib.suppress(OSError):  # already released
            if time.time() - lock.stat().st_mtime > STALE_S:
                stale.append(lock)
    return stale


def _has_cuda_toolkit() -> bool:
    """Return True if nvcc and CUDA's headers are where torch.utils.cpp_extension expects them."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        nvcc = shutil.which("nvcc")
        home = str(Path(nvcc).parent.parent) if nvcc else "/usr/local/cuda"
    toolkit = Path(home)
    return (toolkit / "bin" / "nvcc").exists() and (toolkit / "include" / "cuda.h").exists()
