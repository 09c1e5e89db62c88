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


def tensors(kept: State) -> dict[str, torch.Tensor]:
    """A state's numbers, for a file."""
    found = {"cpu": kept.cpu, "python": torch.tensor(kept.python[1], dtype=torch.int64)}
    if isinstance(kept.numpy, tuple):
        found["numpy"] = torch.from_numpy(kept.numpy[1].astype(np.int64))
    if kept.cuda is not None:
        found["cuda"] = kept.cuda
    return found


def plain(kept: State) -> dict[str, Any]:
    """The rest of it, as JSON has it."""
    version, _, gauss = kept.python
    found: dict[str, Any] = {"python": [version, gauss]}
    if isinstance(kept.numpy, tuple):
        name, _, place, has_gauss, cached = kept.numpy
        found["numpy"] = [name, int(place), int(has_gauss), float(cached)]
    return found


def put_together(numbers: dict[str, torch.Tensor], rest: Any) -> State:
    """Make a state of `tensors` and `plain`.

    Raises:
        ValueError: they are not of one state.
    """
    now = state()
    try:
        version, gauss = rest["python"]
        of_numpy = now.numpy
        if "numpy" in rest:
            name, place, has_gauss, cached = rest["numpy"]
            of_numpy = (name, numbers["numpy"].numpy().astype(np.uint32), place, has_gauss, cached)
        made = State(
            python=(version, tuple(numbers["python"].tolist()), gauss),
            numpy=of_numpy,
            cpu=numbers["cpu"],
            cuda=numbers.get("cuda") if now.cuda is not None else None,
        )
        restore(made)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        message = f"the random generators of the checkpoint cannot be set ({error})"
        raise ValueError(message) from error
    else:
        return made
    finally:
        restore(now)
