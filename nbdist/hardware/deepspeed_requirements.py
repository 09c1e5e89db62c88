"""What a build of DeepSpeed's ops needs of this machine, and where builds are kept; pure."""

from __future__ import annotations

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
"""No build takes so long: a lock of that age was left by one that was killed."""


def cache_dir() -> Path:
    """Folder for what nbdist keeps between sessions: NBDIST_CACHE_DIR or ~/.cache/nbdist."""
    if given := os.environ.get("NBDIST_CACHE_DIR"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nbdist"


def search_path() -> str:
    """PATH with this environment's programs in front.

    ninja's console script lies beside the interpreter, whose folder need not be on PATH.
    """
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def missing(ops: Sequence[str], kind: str) -> str:
    """What a build of the ops would miss and what to do, in one sentence; empty where nothing.

    Args:
        ops: names of the ops.
        kind: of the ranks, "cpu" or "cuda".
    """
    compiler, path = os.environ.get("CXX", "c++"), search_path()
    for tool, package in ((compiler, "g++"), ("ninja", "ninja (`pip install ninja`)")):
        if shutil.which(tool, path=path) is None:
            return (
                f"this offload compiles DeepSpeed's {', '.join(ops)} once, and {tool} is not on"
                f" PATH; install {package}, or leave the offload out."
            )
    if NVME_OP in ops and not _has_header(compiler, "libaio.h"):
        return (
            f"offload to NVMe compiles DeepSpeed's {NVME_OP}, and libaio.h is missing; install it"
            " (Debian, Ubuntu: apt install libaio-dev; Fedora: dnf install libaio-devel), or use"
            " offload cpu."
        )
    # deepspeed 0.19.8: of the ops of an offload this alone is a CUDAOpBuilder
    if NVME_OP in ops and kind == "cuda" and not _has_cuda_toolkit():
        return (
            f"offload to NVMe on GPUs compiles DeepSpeed's {NVME_OP} with the CUDA toolkit, and"
            " nvcc or CUDA's headers are missing; install the toolkit of torch's CUDA version and"
            " set CUDA_HOME to its folder, or use offload cpu."
        )
    return ""


def stale_locks() -> list[Path]:
    """Locks that killed builds have left in torch's own folder of extensions.

    Whoever builds one of these later waits for ever (torch 2.13). nbdist keeps its builds in a
    folder of its own, under a lock that ends with its holder.
    """
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(given).expanduser() if given else cache / "torch_extensions"
    locks = [*root.glob("*/lock"), *root.glob("*/*/lock")]
    return sorted(lock for lock in locks if _age_s(lock) > STALE_S)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0  # released by now


def _has_cuda_toolkit() -> bool:
    """Whether nvcc and CUDA's headers are where torch.utils.cpp_extension looks for them."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        nvcc = shutil.which("nvcc")
        home = str(Path(nvcc).parent.parent) if nvcc else "/usr/local/cuda"
    toolkit = Path(home)
    return (toolkit / "bin" / "nvcc").exists() and (toolkit / "include" / "cuda.h").exists()


def _has_header(compiler: str, header: str) -> bool:
    """Whether the compiler finds a header."""
    command = [compiler, "-x", "c++", "-fsyntax-only", "-include", header, os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603
