"""What the child process of a trace does: a request, or a module, into figures or an error.

Whatever a model's code raises on fake tensors becomes one sentence.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from nbdist.errors import PlanError
from nbdist.planner.tracing import build_model, trace_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from nbdist.planner.tracing.trace_runs import Asked, Batch


def answered(request: Mapping[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """Trace a transformers config; the fields of a `Traced`, or {"error": a sentence}."""
    torch.set_num_threads(1)
    try:
        build_model.without_tracing_branches()
        model, notes = build_model.of_config(request["config"])
        build_model.with_grouped_experts(model)
        sample = build_model.sample_for(model, request["batch_size"], request["seq_len"])
    except PlanError as error:
        return {"error": str(error)}
    asked = trace_runs.Asked(
        batch_size=request["batch_size"],
        seq_len=request["seq_len"] if sample.has_tokens else None,
        computes=request.get("computes", trace_runs.COMPUTES),
        kinds=request.get("kinds", trace_runs.KINDS),
    )
    fields = figures(model, sample.batch, asked, progress)
    if "error" in fields:
        return fields
    name = f"{type(model).__name__}, {size(model_params(fields))}"
    return fields | {"name": name, "notes": [*notes, *sample.notes]}


def figures(
    model: nn.Module, batch: Batch, asked: Asked, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Trace a module; the fields of a `Traced`, or {"error": a sentence}."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a model's own advice is not about its memory
            return trace_runs.traced(model, batch, asked, progress)
    except PlanError as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything
        message = (
            f"the model could not be traced ({trace_runs.reason(model, error)}); give"
            " example inputs that its forward takes, nbdist.plan(model, inputs=...), or plan"
            " for a size such as '7b'."
        )
        return {"error": message}


def model_params(fields: Mapping[str, Any]) -> int:
    """All parameters of a traced model."""
    return sum(
        group["count"] * (group["trainable"] + group["frozen"]) for group in fields["groups"]
    )


def size(params: int) -> str:
    """A number of parameters for a reader: "1.50B parameters"."""
    for unit, one in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if params >= one:
            return f"{params / one:.3g}{unit} parameters"
    return f"{params} parameters"
