"""Variables that a rank's namespace has before the first cell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator

    from nbdist.worker.report import Reporter


@dataclass(slots=True, kw_only=True)
class InitialNamespace:
    """State of a rank before the first cell; later differences are the user's."""

    names: dict[str, Any]
    """Variables of the user's namespace."""
    environ: dict[str, str]
    reporter: Reporter


def initial_names(
    *, rank: int, local_rank: int, world_size: int, accelerator: Accelerator
) -> dict[str, Any]:
    """Return the predefined names of a rank; the user may overwrite any of them."""
    return {
        "accelerator": accelerator,
        "rank": rank,
        "local_rank": local_rank,
        "world_size": world_size,
        "device": accelerator.device,
        "torch": torch,
    }
