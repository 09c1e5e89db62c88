"""State of a rank's random number generators: Python's, NumPy's and torch's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RngState:
    """State of all random number generators of one rank."""

    python: Any
    """`random.getstate()`."""
    numpy: Any
    """`numpy.random.get_state()`: name, keys, position and two numbers."""
    cpu: torch.Tensor
    """State of torch's CPU generator, uint8."""
    cuda: torch.Tensor | None = None
    """State of the generator of this rank's GPU, uint8."""


def get_rng_state() -> RngState:
    """Return the state of all generators."""
    return RngState(
        python=random.getstate(),
        numpy=np.random.get_state(),  # noqa: NPY002 - the global one, which users' code uses
        cpu=torch.get_rng_state(),
        cuda=torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    )


def set_rng_state(rng_state: RngState) -> None:
    """Set the state of all generators."""
    random.setstate(rng_state.python)
    np.random.set_state(rng_state.numpy)  # noqa: NPY002
    torch.set_rng_state(rng_state.cpu)
    if rng_state.cuda is not None:
        torch.cuda.set_rng_state(rng_state.cuda)


def to_tensors_and_json(rng_state: RngState) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a state, to save in a file, and its other values as JSON types."""
    version, words, gauss = rng_state.python
    tensors = {"cpu": rng_state.cpu, "python": torch.tensor(words, dtype=torch.int64)}
    rest: dict[str, Any] = {"python": [version, gauss]}
    if isinstance(rng_state.numpy, tuple):
        name, keys, position, has_gauss, cached = rng_state.numpy
        tensors["numpy"] = torch.from_numpy(keys.astype(np.int64))
        rest["numpy"] = [name, int(position), int(has_gauss), float(cached)]
    if rng_state.cuda is not None:
        tensors["cuda"] = rng_state.cuda
    return tensors, rest


def from_tensors_and_json(numbers: dict[str, torch.Tensor], rest: Any) -> RngState:
    """Create a state from the result of ``to_tensors_and_json``.

    Raises:
        ValueError: they are not a valid state.
    """
    current = get_rng_state()
    try:
        version, gauss = rest["python"]
        numpy_state = current.numpy
        if "numpy" in rest:
            name, position, has_gauss, cached = rest["numpy"]
            keys = numbers["numpy"].numpy().astype(np.uint32)
            numpy_state = (name, keys, position, has_gauss, cached)
        combined = RngState(
            python=(version, tuple(numbers["python"].tolist()), gauss),
            numpy=numpy_state,
            cpu=numbers["cpu"],
            cuda=numbers.get("cuda") if current.cuda is not None else None,
        )
        set_rng_state(combined)  # raises if it is not valid
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"Cannot restore the checkpoint's random generators ({error})") from error
    else:
        return combined
    finally:
        set_rng_state(current)
