"""What the ranks of a group do together with state: all of it is here, so that tests can stand in.

Collectives of a group; None is all ranks, or this process alone where there is no group.

Each begins with the same small all_gather, over gloo also on GPUs, in which every rank says what it
is about. A rank that has failed, and tells the others so, is never paired with the others'
exchange: NCCL would hang or fill tensors with wrong bytes.
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

SUMS, EXCHANGE = -1, -2
"""What `sums` and `exchange` are about; `everyones` has 0 and above."""


def size(group: Group = None) -> int:
    """Ranks in a group."""
    return distributed.get_world_size(group) if distributed.is_initialized() else 1


def rank(group: Group = None) -> int:
    """This process's place in a group."""
    return distributed.get_rank(group) if distributed.is_initialized() else 0


def device(group: Group = None) -> torch.device:
    """Where tensors must be for `exchange`: on the GPU where NCCL carries them."""
    nccl = "nccl" in str(distributed.get_backend_config(group))
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _agreeing(group: Group) -> torch.device:
    """Where tensors must be for everything else: on the CPU, unless the group has NCCL alone."""
    gloo = "gloo" in str(distributed.get_backend_config(group))
    return torch.device("cpu") if gloo else device(group)


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
    lengths = _heads(packed.numel(), about, group)
    room = torch.zeros(max(lengths), dtype=torch.uint8, device=_agreeing(group))
    room[: packed.numel()] = packed
    every = _gathered(room, group)
    return [unpacked(one[:length]) for one, length in zip(every, lengths, strict=True)]


def _heads(number: int, about: int, group: Group) -> list[int]:
    """Every rank's number, once it is certain that all ranks are about the same.

    Raises:
        CollectiveMismatch: they are not, and nothing else has begun.
    """
    mine = torch.tensor([number, about], device=_agreeing(group))
    numbers, abouts = zip(*(head.tolist() for head in _gathered(mine, group)), strict=True)
    if len(set(abouts)) > 1:
        message = "the ranks tell one another of different things."
        raise CollectiveMismatch(message)
    return list(numbers)


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
    """Sum of each number over the ranks, modulo 2**64, in [-2**63, 2**63); a collective.

    Raises:
        CollectiveMismatch: a rank has failed, and is at another place than the others.
    """
    _heads(len(numbers), SUMS, group)
    added = torch.tensor(numbers, dtype=torch.int64, device=_agreeing(group))
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

    Raises:
        CollectiveMismatch: a rank has failed, for lack of memory as a rule; nothing was sent.
    """
    incoming = torch.empty(sum(expected), dtype=torch.uint8, device=outgoing.device)
    _heads(0, EXCHANGE, group)
    distributed.all_to_all_single(incoming, outgoing, list(expected), list(sizes), group=group)
    return incoming
