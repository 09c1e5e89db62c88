"""Collectives for training state: all-gather of values, all-reduce and all-to-all of bytes.

They use the default process group; without one, this process is alone. All collectives on state
go through this module, so that tests can replace it.

Each collective begins with a small all-gather of a tag, over gloo even on GPUs. A failed rank
that reports its error therefore never matches the all-to-all of the other ranks, in which NCCL
would hang or corrupt tensors.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from nbdist.errors import CollectiveMismatch

if TYPE_CHECKING:
    from collections.abc import Sequence

OptionalGroup = distributed.ProcessGroup | None

SUMS, EXCHANGE = -1, -2
"""Tags of ``all_reduce_sum`` and ``all_to_all_bytes``; ``all_gather_values`` uses 0 and above."""


def group_size(group: OptionalGroup = None) -> int:
    """Return the number of ranks in a group; None means the default group."""
    return distributed.get_world_size(group) if distributed.is_initialized() else 1


def rank(group: OptionalGroup = None) -> int:
    """Return this process's rank in a group; None means the default group."""
    return distributed.get_rank(group) if distributed.is_initialized() else 0


def comm_device() -> torch.device:
    """Return the device for ``all_to_all_bytes``: the GPU with NCCL, otherwise the CPU."""
    nccl = "nccl" in str(distributed.get_backend_config())
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _metadata_device() -> torch.device:
    """Return the device for the other collectives: the CPU, unless the group has only NCCL."""
    gloo = "gloo" in str(distributed.get_backend_config())
    return torch.device("cpu") if gloo else comm_device()


def all_gather_values(value: Any, *, about: int = 0) -> list[Any]:
    """All-gather a value; return the values of all ranks in rank order; a collective.

    Supports plain values and dataclasses of nbdist that contain plain values.

    Args:
        about: tag of the collective, the same on all ranks.

    Raises:
        CollectiveMismatch: the tags differ: the ranks are in different collectives.
        pickle.UnpicklingError: a value contains an unsupported type.
    """
    # Not torch's all_gather_object: it unpickles, and so runs, whatever arrives over the
    # connections of gloo and NCCL, which are not authenticated.
    if group_size() == 1:
        return [value]
    packed = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    lengths = _gather_numbers(packed.numel(), about)
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=_metadata_device())
    padded[: packed.numel()] = packed
    return [
        unpickle_values(packed_values[:length])
        for packed_values, length in zip(_gather_tensor(padded), lengths, strict=True)
    ]


def _gather_numbers(number: int, about: int) -> list[int]:
    """All-gather a number and check that all ranks use the same tag.

    Raises:
        CollectiveMismatch: the tags differ; no other collective has begun.
    """
    own_head = torch.tensor([number, about], device=_metadata_device())
    numbers, abouts = zip(*(head.tolist() for head in _gather_tensor(own_head)), strict=True)
    if len(set(abouts)) > 1:
        raise CollectiveMismatch("The ranks are out of sync: they entered different collectives.")
    return list(numbers)


def _gather_tensor(tensor: torch.Tensor) -> list[torch.Tensor]:
    """All-gather a tensor that has the same shape on all ranks."""
    gathered = [torch.empty_like(tensor) for _ in range(group_size())]
    distributed.all_gather(gathered, tensor)
    return gathered


def unpickle_values(packed: torch.Tensor) -> Any:
    """Unpickle a value from another rank with an allowlist of plain data types.

    Raises:
        pickle.UnpicklingError: the pickle refers to any other type.
    """
    return _SafeUnpickler(io.BytesIO(packed.cpu().numpy().tobytes())).load()


class _SafeUnpickler(pickle.Unpickler):
    """Unpickles plain values, dtypes, paths, and nbdist's dataclasses, named tuples and enums."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed type."""
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module.startswith("nbdist.") and name.isidentifier():
            cls = super().find_class(module, name)
            is_own = isinstance(cls, type) and cls.__module__ == module
            if is_own and (dataclasses.is_dataclass(cls) or issubclass(cls, tuple | enum.Enum)):
                return cls
        raise pickle.UnpicklingError(
            f"another rank sent a {module}.{name}, which is not a plain value"
        )


_PLAIN = {
    *(("builtins", "set"), ("builtins", "frozenset"), ("builtins", "complex")),
    *(("collections", "OrderedDict"), ("torch", "Size")),
    *(("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")),
}


def all_reduce_sum(numbers: Sequence[int]) -> list[int]:
    """Sum each number over the ranks, modulo 2**64, in [-2**63, 2**63); a collective.

    Raises:
        CollectiveMismatch: the ranks are in different collectives, as a rule after an error.
    """
    _gather_numbers(len(numbers), SUMS)
    added = torch.tensor(numbers, dtype=torch.int64, device=_metadata_device())
    distributed.all_reduce(added)
    totals: list[int] = added.tolist()
    return totals


def all_to_all_bytes(
    outgoing: torch.Tensor, sizes: Sequence[int], expected: Sequence[int]
) -> torch.Tensor:
    """All-to-all of bytes; return the concatenated bytes from all ranks; a collective.

    Args:
        outgoing: concatenated bytes for all ranks, on ``comm_device()``.

    Raises:
        CollectiveMismatch: a rank failed, usually out of memory; nothing was sent.
    """
    incoming = torch.empty(sum(expected), dtype=torch.uint8, device=outgoing.device)
    _gather_numbers(0, EXCHANGE)
    distributed.all_to_all_single(incoming, outgoing, list(expected), list(sizes))
    return incoming
