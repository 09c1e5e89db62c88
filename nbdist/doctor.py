"""`%nbdist doctor`: is this machine fit for each backend? Starts no rank."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil

from nbdist import machine
from nbdist.engines.environment import scrubbed
from nbdist.engines.run_dir import MIN_BULK_BYTES, SHARED_MEMORY

PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "ipykernel", "jupyter_client")
GB = 1e9


def report() -> str:
    """All findings, a line each."""
    lines = [
        f"python        {platform.python_version()} on {platform.platform()}",
        f"devices       {machine.found().describe()}",
        *(f"{name:<13} {_version(name)}" for name in PACKAGES),
        f"compilers     {_compilers()}",
        f"shared memory {_shared_memory()}",
        f"environment   {_environment()}",
    ]
    return "\n".join(lines)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"not installed: pip install {package}"


def _compilers() -> str:
    missing = [name for name in ("g++", "ninja") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not on PATH: offload under DeepSpeed and --compile need them"
    return "g++ and ninja found"


def _shared_memory() -> str:
    if not SHARED_MEMORY.is_dir():
        return f"{SHARED_MEMORY} is missing: push and pull go through the temp folder, slower"
    free = shutil.disk_usage(SHARED_MEMORY).free
    words = f"{free / GB:.1f} GB free in {SHARED_MEMORY}"
    return words if free >= MIN_BULK_BYTES else f"{words}: push and pull go through the temp folder"


def _environment() -> str:
    stale = sorted(os.environ.keys() - scrubbed(os.environ).keys())
    return f"kept from the ranks, another launcher's: {', '.join(stale)}" if stale else "clean"
