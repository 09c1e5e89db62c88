"""What the ranks of a group do together with state: all of it is here, so that tests can stand in.

Collectives of a group; None is all ranks, or this process alone where there is no group.
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

Group = distributed.ProcessGroup | None


def size(group: Group = None) -> int:
    """Ranks in a group."""
    return distributed.get_world_size(group) if distributed.is_initialized() else 1


def rank(group: Group = None) -> int:
    """This process's place in a group."""
    return distributed.get_rank(group) if distributed.is_initialized() else 0


def device(group: Group = None) -> torch.device:
    """Where tensors must be to go between ranks: on the GPU where NCCL carries them."""
    nccl = "nccl" in str(distributed.get_backend_config(group))
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def everyones(mine: Any, group: Group = None, *, about: int = 0) -> list[Any]:
    """What each rank of a group gives, in their order; a collective.

    For names, numbers, and dataclasses of nbdist with such in them. torch's own
    `all_gather_object` would unpickle, and so run, whatever comes over gloo's or NCCL's
    connections, which nobody signs.

    Args:
        mine: what this rank gives.
        group: the ranks.
        about: number of what it is about, the same on all ranks.

    Raises:
        CollectiveMismatch: it is not: a rank that has failed is at another place than the others.
        pickle.UnpicklingError: it holds something else.
    """
    if size(group) == 1:
        return [mine]
    packed = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    heads = _gathered(torch.tensor([packed.numel(), about], device=device(group)), group)
    lengths, abouts = zip(*(head.tolist() for head in heads), strict=True)
    if len(set(abouts)) > 1:
        message = "the ranks tell one another of different things."
        raise CollectiveMismatch(message)
    room = torch.zeros(max(lengths), dtype=torch.uint8, device=device(group))
    room[: packed.numel()] = packed
    every = _gathered(room, group)
    return [unpacked(one[:length]) for one, length in zip(every, lengths, strict=True)]


def _gathered(tensor: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """The tensors of all ranks, which are of one shape."""
    found = [torch.empty_like(tensor) for _ in range(size(group))]
    distributed.all_gather(found, tensor, group=group)
    return found


def unpacked(packed: torch.Tensor) -> Any:
    """Read what another rank has packed; nothing in it is called but what is plainly data.

    Raises:
        pickle.UnpicklingError: it asks for anything else.
    """
    return _DataOnly(io.BytesIO(packed.cpu().numpy().tobytes())).load()


class _DataOnly(pickle.Unpickler):
    """Makes plain values, dtypes, paths, and the dataclasses and named tuples of nbdist."""

    def find_class(self, module: str, name: str) -> Any:
        """Give a type that holds values and does nothing."""
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module.startswith("nbdist.") and name.isidentifier():
            made = super().find_class(module, name)
            if isinstance(made, type) and made.__module__ == module and _holds_values(made):
                return made
        message = f"another rank sent a {module}.{name}, which is no plain value"
        raise pickle.UnpicklingError(message)


def _holds_values(made: type) -> bool:
    return dataclasses.is_dataclass(made) or issubclass(made, tuple | enum.Enum)


_PLAIN = {
    *(("builtins", "set"), ("builtins", "frozenset"), ("builtins", "complex")),
    *(("collections", "OrderedDict"), ("torch", "Size")),
    *(("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")),
}


def sums(numbers: Sequence[int], group: Group = None) -> list[int]:
    """Sum of each number over the ranks, modulo 2**64, in [-2**63, 2**63); a collective."""
    added = torch.tensor(numbers, dtype=torch.int64, device=device(group))
    distributed.all_reduce(added, group=group)
    found: list[int] = added.tolist()
    return found


def exchange(
    outgoing: torch.Tensor, sizes: Sequence[int], expected: Sequence[int], group: Group = None
) -> torch.Tensor:
    """Give each rank its part of some bytes and return what came from each; a collective.

    Args:
        outgoing: bytes for all ranks one after the other, on `device(group)`.
        sizes: bytes for each rank.
        expected: bytes from each rank.
    """
    incoming = torch.empty(sum(expected), dtype=torch.uint8, device=outgoing.device)
    distributed.all_to_all_single(incoming, outgoing, list(expected), list(sizes), group=group)
    return incoming
