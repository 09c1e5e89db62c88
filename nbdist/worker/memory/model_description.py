"""Describes a model of this rank for the planner.

A prepared model may be sharded or wrapped, so its meta copy is described, which
`worker.memory.memory_probe` keeps from before `prepare()`. Tracing runs in a child process
(`planner.tracing.trace_module`) and changes neither the model nor a random state.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from nbdist.errors import PlanError
from nbdist.planner import build_model_spec
from nbdist.planner.model_spec import with_notes
from nbdist.planner.models import traced
from nbdist.worker.memory import memory_probe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.planner.model_spec import ModelSpec
    from nbdist.protocol import messages
    from nbdist.worker.memory.memory_probe import ForwardInputs, MemoryProbe


def model_reply(request: messages.ModelRequest, names: Mapping[str, Any]) -> messages.ModelReply:
    """Reply to the kernel's request for a model.

    Args:
        request: the request with the name of the model and the micro-batch.
    """
    try:
        model, probe = _select_model(request["name"], names)
        samples, tokens = (probe.batch_shape if probe else None) or (1, None)
        samples = request["batch_size"] or samples
        tokens = request["seq_len"] or tokens or default_seq_len(model)
        spec = describe_model(
            model,
            batch_size=samples,
            seq_len=tokens,
            call=probe.forward_inputs if probe else {},
            kind=request["kind"],
            quick=request["quick"],
        )
    except PlanError as error:
        return {"status": "error", "error": str(error)}
    except Exception as error:  # noqa: BLE001 - the kernel waits for a reply
        message = f"Cannot describe the model ({type(error).__name__}: {error})."
        return {"status": "error", "error": message}
    return {
        "status": "ok",
        "spec": spec.to_json(),
        "batch_size": samples,
        "seq_len": tokens,
        "optimizer": probe.optimizer_description if probe else {},
        "keep_outputs": probe.keep_outputs if probe else True,
    }


def describe_model(
    model: nn.Module,
    *,
    batch_size: int,
    seq_len: int,
    call: ForwardInputs,
    kind: Literal["cuda", "cpu"],
    progress: Callable[[str], None] = lambda _: None,
    quick: bool = False,
) -> ModelSpec:
    """Describe an unprepared model: analytically, by a cached trace, or by a trace in a child.

    Args:
        model: not prepared, on any device including meta.
        batch_size: samples in the micro-batch.
        seq_len: tokens per sample.
        call: tensors of a real forward, if there was one.
        kind: kind of the devices to plan for.
        progress: called with the progress of a trace. By default none is shown: the kernel itself
            shows that it waits.
        quick: without a new trace: analytically, or by the cached trace of an earlier plan.

    Raises:
        PlanError: the model cannot be described, or `quick` and it needs a trace.
    """
    inputs = meta_inputs(call, model) if call else None
    if quick:
        known = traced.find_known_spec(
            model, batch_size=batch_size, seq_len=seq_len, inputs=inputs, kinds=(kind,)
        )
        if known is None:
            raise PlanError(
                f"{type(model).__name__} has no analytic description: it needs a trace, which takes"
                " seconds."
            )
        spec = known
    else:
        spec = traced.spec_from_module(
            model,
            inputs=inputs,
            batch_size=batch_size,
            seq_len=seq_len,
            progress=progress,
            kinds=(kind,),
        )
    return with_notes(spec, build_model_spec.seq_len_notes(_config(model), seq_len))


def meta_inputs(
    call: ForwardInputs, model: nn.Module
) -> dict[str, torch.Tensor] | tuple[torch.Tensor, ...]:
    """Return meta tensors for a forward: by argument name, or a tuple if all are positional."""
    tensors = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in call.items()
    }
    if all(name.isdigit() for name in tensors):
        return tuple(tensors.values())
    names = list(inspect.signature(model.forward).parameters)
    return {
        names[int(name)] if name.isdigit() else name: tensor for name, tensor in tensors.items()
    }


def default_seq_len(model: nn.Module) -> int:
    """Return the default tokens per sample: the model's maximum, at most 2048."""
    return build_model_spec.default_seq_len(_config(model))


def _config(model: nn.Module) -> dict[str, Any]:
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    return to_dict() if callable(to_dict) else {}


def _select_model(
    name: str | None, names: Mapping[str, Any]
) -> tuple[nn.Module, MemoryProbe | None]:
    """Return the unprepared model for a name, and its probe if it is being trained.

    Raises:
        PlanError: there is no such model, or it could not be copied in `prepare()`.
    """
    probe = memory_probe.current_probe.probe
    if name is None and probe is None:
        raise PlanError(
            "No model is prepared on the ranks. Call accelerator.prepare() in a %%distribute"
            " cell, or name the model to plan."
        )
    model = None if name is None else names.get(name)
    is_probed = probe is not None and model is not None and probe.prepared_model is model
    if probe is not None and (name is None or is_probed):
        if probe.meta_model is None:
            raise PlanError(
                "The prepared model cannot be planned because copy.deepcopy fails for it. Name a"
                " newly built model."
            )
        return probe.meta_model, probe
    if not isinstance(model, nn.Module):
        kind = f"a {type(model).__name__}" if name in names else "not a variable"
        raise PlanError(f"{name} is {kind} on the ranks. Use the name of an nn.Module.")
    if getattr(model, "_is_accelerate_prepared", False):
        raise PlanError(
            f"{name} was prepared before another model. Prepare it last, or name a model that is"
            " not prepared."
        )
    return model, None
