"""Files that are pickles, read without running anything that stands in them.

A pickle names functions and calls them. Here each name is looked up in a short list of our
own: of classes only their values are kept, under their names, and whatever else is asked for
is refused. So not even torch's own classes are made. `trust` is the user's word for the
opposite: everything in the file may run.
"""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import torch
from torch.torch_version import TorchVersion

from nbdist.checkpoint.safetensors_header import TORCH_NAMES
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
"""Modules whose classes hold values only (torch 2.0 to 2.13); kept as `Record`."""
_STAND_INS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""Classes in DeepSpeed's files (0.9 to 0.19), none of which is needed."""
_MAX_METADATA_BYTES = 1 << 30
_SAFE_TORCH = TorchVersion("2.10")
"""First release whose reader of hostile files is not known to corrupt memory (CVE-2026-24747)."""


class Record:
    """The values of an object whose class is not made."""

    def __init__(self, *values: object) -> None:
        """Keep them."""
        self.values = values
        self.state: Any = {}

    def __setstate__(self, state: object) -> None:
        """Keep what the object had."""
        self.state = state

    def __getattr__(self, name: str) -> Any:
        """Give one of its values; a record that has none was never what it says."""
        state = self.__dict__.get("state")
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(name)


class _Unpickler(pickle.Unpickler):
    """Knows the names in metadata of torch.distributed.checkpoint, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """Give a harmless stand-in for a name."""
        if module in _METADATA and name.isidentifier():
            return type(name, (Record,), {})
        if module == "torch" and name in TORCH_NAMES:
            return getattr(torch, name)
        if (module, name) in _HARMLESS:
            return _HARMLESS[module, name]
        message = f"it asks for {module}.{name}"
        raise pickle.UnpicklingError(message)


def _text(*values: object) -> str:
    return "/".join(map(str, values))


_HARMLESS: dict[tuple[str, str], Callable[..., object]] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _text,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): _text,
    ("pathlib", "PurePosixPath"): _text,
    ("pathlib._local", "PosixPath"): _text,
}


def metadata(path: Path, *, trust: bool) -> Any:
    """Read `.metadata` of torch.distributed.checkpoint; objects come as `Record`.

    Raises:
        CheckpointError: it asks for something that is not on the list, or is damaged.
    """
    with path.open("rb") as file:
        if path.stat().st_size > _MAX_METADATA_BYTES:
            message = f"{path} has {path.stat().st_size} bytes, too many for a list of tensors."
            raise CheckpointError(message)
        try:
            return pickle.load(file) if trust else _Unpickler(file).load()  # noqa: S301 - see above
        except Exception as error:  # noqa: BLE001 - hostile bytes raise whatever they like
            _refuse(path, error, trust=trust)


def torch_file(path: Path | IO[bytes], *, trust: bool, name: Path | None = None) -> Any:
    """Read what `torch.save` wrote, onto the CPU; large files are mapped, not read.

    Args:
        path: the file, or an open one.
        trust: whether code in it may run.
        name: for messages, of an open one.

    Raises:
        CheckpointError: it holds more than tensors and plain values, or is damaged, or this
            torch is too old to read it safely.
    """
    shown = path if isinstance(path, Path) else name or Path("file")
    if not trust and TorchVersion(torch.__version__) < _SAFE_TORCH:
        message = (
            f"{shown} is not read with torch {torch.__version__}: a hostile file could run code in"
            " it even so (CVE-2026-24747); install torch 2.10 or newer."
        )
        raise CheckpointError(message)
    allowed = [(type(one.rpartition(".")[2], (_StandIn,), {}), one) for one in _STAND_INS]
    mapped: Sequence[bool] = (True, False) if isinstance(path, Path) else (False,)
    for number, mmap in enumerate(mapped):
        try:
            with torch.serialization.safe_globals([*allowed]), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch: about how the file was pickled
                return torch.load(path, map_location="cpu", weights_only=not trust, mmap=mmap)
        except Exception as error:  # noqa: BLE001 - hostile bytes raise whatever they like
            if number + 1 == len(mapped) or isinstance(error, pickle.UnpicklingError):
                _refuse(shown, error, trust=trust)
    raise AssertionError


class _StandIn:
    """An object of DeepSpeed's that nobody looks at."""

    def __new__(cls, *_: object) -> Any:
        """Take any values."""
        return super().__new__(cls)

    def __init__(self, *_: object) -> None:
        """Forget them."""

    def __setstate__(self, state: object) -> None:
        """Forget what it had."""


def _refuse(path: Path, error: Exception, *, trust: bool) -> NoReturn:
    """Say why a file is not read, and what trust would mean."""
    why = " ".join(str(error).split())
    if isinstance(error, pickle.UnpicklingError) and not trust:
        asked = why.partition("Unsupported global: GLOBAL ")[2].split(" ")[0]
        what = f"it asks for {asked}" if asked else why.partition(". ")[0]
        message = (
            f"{path} holds more than tensors and plain values ({what[:120]}); --trust reads it"
            " by running whatever code its writer put into it, with all your rights, so give it"
            " only for files that you or people you trust have written."
        )
        raise CheckpointError(message) from error
    message = (
        f"{path} cannot be read ({type(error).__name__}: {why[:120]}); take another checkpoint."
    )
    raise CheckpointError(message) from error
