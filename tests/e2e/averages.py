"""A module of a project, with a distributed function that other modules use."""

# ruff: noqa: F821 - the ranks define accelerator and device

from __future__ import annotations

import torch

import nbdist


@nbdist.distribute
def mean_over_ranks(value: float) -> float:
    mean = accelerator.reduce(torch.tensor(float(value), device=device), "mean")  # type: ignore[name-defined]
    return float(mean)
