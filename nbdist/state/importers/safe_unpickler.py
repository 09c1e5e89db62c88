"""Reader of pickled files that runs no code from them.

A pickle names functions and calls them. Here each name is looked up in an allowlist: classes are
replaced by inert objects that only store values, all other names are refused. Not even torch's
own classes are instantiated. With `trust`, which the user must set, everything in the file may
run.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import torch
from torch.torch_version import TorchVersion

from nbdist.checkpoint.manifest import SAFETENSORS_DTYPES
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_METADATA = frozenset(
    {
        "torch.distributed.checkpoint.metadata",
        "torch.distributed._shard.sharded_tensor.metadata",
        "torch.distributed.checkpoint.filesystem",
    }
)
"""Modules whose classes only hold values (torch 2.0 to 2.13); read as ``InertObject``."""
_PLACEHOLDERS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Classes in DeepSpeed's files (0.9 to 0.19) whose objects are not needed."""
_MAX_METADATA_BYTES = 1 << 30
_SAFE_TORCH = TorchVersion("2.10")
"""First release whose `weights_only` reader has no known memory corruption (CVE-2026-24747)."""


class InertObject:
    """Values of an object whose class is not instantiated."""

    def __init__(self, *values: object) -> None:
        self.values = values
        self.state: Any = {}

    def __setstate__(self, state: object) -> None:
        """Store the pickled state of the object."""
        self.state = state

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("state")
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(name)


class _DcpMetadataUnpickler(pickle.Unpickler):
    """Unpickler that allows only the names in metadata of torch.distributed.checkpoint."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a harmless replacement for a name."""
        if module in _METADATA and name.isidentifier():
            return type(name, (InertObject,), {})
        if module == "torch" and name in SAFETENSORS_DTYPES:
            return getattr(torch, name)
        if (module, name) in _SAFE_CONSTRUCTORS:
            return _SAFE_CONSTRUCTORS[module, name]
        raise pickle.UnpicklingError(f"it uses {module}.{name}")


def _text(*values: object) -> str:
    return "/".join(map(str, values))


_SAFE_CONSTRUCTORS: dict[tuple[str, str], Callable[..., object]] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _text,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): _text,
    ("pathlib", "PurePosixPath"): _text,
    ("pathlib._local", "PosixPath"): _text,
}


def read_dcp_metadata(path: Path, *, trust: bool) -> Any:
    """Read `.metadata` of torch.distributed.checkpoint; objects are read as ``InertObject``.

    Raises:
        CheckpointError: the file is damaged or uses a name that is not allowed.
    """
    with path.open("rb") as file:
        if path.stat().st_size > _MAX_METADATA_BYTES:
            raise CheckpointError(
                f"{path} has {path.stat().st_size} bytes, more than the limit of"
                f" {_MAX_METADATA_BYTES}."
            )
        try:
            return pickle.load(file) if trust else _DcpMetadataUnpickler(file).load()  # noqa: S301 - see above
        except Exception as error:  # noqa: BLE001 - hostile bytes may raise anything
            _refuse(path, error, trust=trust)


def load_torch_file(path: Path | IO[bytes], *, trust: bool, name: Path | None = None) -> Any:
    """Load a `torch.save` file onto the CPU; large files are memory-mapped.

    Args:
        trust: allow code in the file to run.
        name: path for messages if `path` is an open file.

    Raises:
        CheckpointError: the file is damaged, contains more than tensors and plain values, or
            this torch is too old to read it safely.
    """
    shown = path if isinstance(path, Path) else name or Path("file")
    if not trust and TorchVersion(torch.__version__) < _SAFE_TORCH:
        raise CheckpointError(
            f"{shown} cannot be read safely with torch {torch.__version__}: a malicious file could"
            " run code (CVE-2026-24747). Install torch 2.10 or newer."
        )
    allowed = [
        (type(full_name.rpartition(".")[2], (InertObject,), {}), full_name)
        for full_name in _PLACEHOLDERS
    ]
    mapped: Sequence[bool] = (True, False) if isinstance(path, Path) else (False,)
    for number, mmap in enumerate(mapped):
        try:
            with torch.serialization.safe_globals([*allowed]), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns about how the file was pickled
                return torch.load(path, map_location="cpu", weights_only=not trust, mmap=mmap)
        except Exception as error:  # noqa: BLE001 - hostile bytes may raise anything
            if number + 1 == len(mapped) or isinstance(error, pickle.UnpicklingError):
                _refuse(shown, error, trust=trust)
    raise AssertionError


def _refuse(path: Path, error: Exception, *, trust: bool) -> NoReturn:
    """Raise the error for a file that cannot be read, with the risk of `--trust`."""
    reason = " ".join(str(error).split())
    if isinstance(error, pickle.UnpicklingError) and not trust:
        requested = reason.partition("Unsupported global: GLOBAL ")[2].split(" ")[0]
        detail = f"it uses {requested}" if requested else reason.partition(". ")[0]
        raise CheckpointError(
            f"{path} contains more than tensors and plain values ({detail[:120]}). --trust loads it"
            " but runs any code in the file with all your permissions. Use it only for files from"
            " people you trust."
        ) from error
    raise CheckpointError(
        f"Cannot read {path} ({type(error).__name__}: {reason[:120]}). Load another checkpoint."
    ) from error
