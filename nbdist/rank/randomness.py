"""The random generators of a rank: Python's, NumPy's, torch's; runs on a rank."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Of all generators of one rank."""

    python: Any
    """`random.getstate()`."""
    numpy: Any
    """`numpy.random.get_state()`: name, keys, position and two numbers."""
    cpu: torch.Tensor
    """Bytes of torch's generator."""
    cuda: torch.Tensor | None = None
    """Bytes of the generator of the rank's own GPU."""


def state() -> State:
    """Return the generators' state."""
    return State(
        python=random.getstate(),
        numpy=np.random.get_state(),  # noqa: NPY002 - the one that users' code draws from
        cpu=torch.get_rng_state(),
        cuda=torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    )


def restore(kept: State) -> None:
    """Set the generators to a state of before."""
    random.setstate(kept.python)
    np.random.set_state(kept.numpy)  # noqa: NPY002
    torch.set_rng_state(kept.cpu)
    if kept.cuda is not None:
        torch.cuda.set_rng_state(kept.cuda)
