"""What the ranks of a group do together with state: all of it is here, so that tests can stand in.

Collectives of a group; None is all ranks, or this process alone where there is no group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

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


def everyones(mine: Any, group: Group = None) -> list[Any]:
    """What each rank of a group gives, in their order; a collective.

    For names and numbers; the ranks are our own processes, so pickles between them are safe.
    """
    if size(group) == 1:
        return [mine]
    found: list[Any] = [None] * size(group)
    distributed.all_gather_object(found, mine, group=group)
    return found


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
