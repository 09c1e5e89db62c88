"""What all ranks say to each other about state: small things, on the device that can."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

Group = distributed.ProcessGroup | None
"""None is all ranks, or this process alone where there is no group."""


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
