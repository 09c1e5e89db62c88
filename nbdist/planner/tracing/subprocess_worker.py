"""Work of a trace's child process: turns a request or a module into figures or an error.

Any exception that a model's code raises on fake tensors becomes an error message.
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

    from nbdist.planner.tracing.trace_runs import ForwardBatch, TraceRequest


def trace_requested_config(
    request: Mapping[str, Any], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Trace a transformers config; return the fields of a `TracedModel`, or {"error": message}."""
    torch.set_num_threads(1)
    try:
        build_model.disable_tracing_branches()
        model, notes = build_model.build_from_config(request["config"])
        build_model.use_grouped_experts(model)
        sample = build_model.make_sample_batch(model, request["batch_size"], request["seq_len"])
    except PlanError as error:
        return {"error": str(error)}
    options = trace_runs.TraceRequest(
        batch_size=request["batch_size"],
        seq_len=request["seq_len"] if sample.has_tokens else None,
        compute_modes=request.get("computes", trace_runs.COMPUTE_MODES),
        device_kinds=request.get("kinds", trace_runs.DEVICE_KINDS),
    )
    fields = trace_module_fields(model, sample.batch, options, progress)
    if "error" in fields:
        return fields
    name = f"{type(model).__name__}, {format_num_params(num_model_params(fields))}"
    return fields | {"name": name, "notes": [*notes, *sample.notes]}


def trace_module_fields(
    model: nn.Module, batch: ForwardBatch, request: TraceRequest, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Trace a module; return the fields of a `TracedModel`, or {"error": message}."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a model's own warnings are irrelevant here
            return trace_runs.trace_all_modes(model, batch, request, progress)
    except PlanError as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything
        message = (
            f"Cannot trace the model ({trace_runs.trace_error_text(model, error)}). Give"
            " example inputs that its forward accepts, nbdist.plan(model, inputs=...), or plan"
            " for a size such as '7b'."
        )
        return {"error": message}


def num_model_params(fields: Mapping[str, Any]) -> int:
    """Return the number of parameters of a traced model."""
    return sum(
        group["count"] * (group["trainable"] + group["frozen"]) for group in fields["groups"]
    )


def format_num_params(params: int) -> str:
    """Format a number of parameters: "1.50B parameters"."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if params >= scale:
            return f"{params / scale:.3g}{unit} parameters"
    return f"{params} parameters"
