"""A model of this rank as the planner sees it; runs on a rank.

A prepared model is in pieces or inside an engine, so what is described is its twin without
data, which `worker.memory.memory_probe` made before `prepare()`. Looking at a model happens in a
child process (`planner.tracing.trace_module`): neither the model nor a random state changes.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from nbdist.errors import PlanError
from nbdist.planner import load_model
from nbdist.planner.model_spec import noted
from nbdist.planner.models import traced
from nbdist.worker.memory import memory_probe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.planner.model_spec import ModelSpec
    from nbdist.protocol import messages
    from nbdist.worker.memory.memory_probe import Call, Watch


def reply(asked: messages.ModelRequest, names: Mapping[str, Any]) -> messages.ModelReply:
    """Answer the kernel's question for a model.

    Args:
        asked: which model, for which micro-batch.
        names: the user's variables.
    """
    try:
        model, watch = _meant(asked["name"], names)
        samples, tokens = (watch.shape if watch else None) or (1, None)
        samples = asked["batch_size"] or samples
        tokens = asked["seq_len"] or tokens or default_length(model)
        spec = spec_of(
            model,
            batch_size=samples,
            seq_len=tokens,
            call=watch.call if watch else {},
            progress=_silent,
            kind=asked["kind"],
            quick=asked["quick"],
        )
    except PlanError as error:
        return {"status": "error", "error": str(error)}
    except Exception as error:  # noqa: BLE001 - the kernel waits for an answer
        said = f"the model cannot be looked at ({type(error).__name__}: {error})."
        return {"status": "error", "error": said}
    return {
        "status": "ok",
        "spec": spec.to_json(),
        "batch_size": samples,
        "seq_len": tokens,
        "optimizer": watch.described if watch else {},
    }


def spec_of(
    model: nn.Module,
    *,
    batch_size: int,
    seq_len: int,
    call: Call,
    progress: Callable[[str], None],
    kind: Literal["cuda", "cpu"],
    quick: bool = False,
) -> ModelSpec:
    """Describe a bare model: by its closed form, or by a trace in a child process.

    Args:
        model: bare, on any device, meta included.
        batch_size: samples of the micro-batch.
        seq_len: tokens of each.
        call: tensors of a real forward, where one was seen.
        progress: told what a trace is doing.
        kind: of the devices that it is planned for.
        quick: by its closed form or not at all.

    Raises:
        PlanError: the model cannot be looked at.
    """
    inputs = like(call, model) if call else None
    if quick:
        found = closed_form(model, inputs)
    else:
        found = traced.of_module(
            model,
            inputs=inputs,
            batch_size=batch_size,
            seq_len=seq_len,
            progress=progress,
            kinds=(kind,),
        )
    return noted(found, load_model.length_notes(_config(model), seq_len))


def closed_form(model: nn.Module, inputs: object) -> ModelSpec:
    """Describe a model in milliseconds.

    Raises:
        PlanError: only a trace could tell.
    """
    found = traced.closed_form(model) if traced.plain(inputs) else None
    if found is None:
        message = f"{type(model).__name__} has no closed form: a trace of some seconds can tell."
        raise PlanError(message)
    return found


def like(call: Call, model: nn.Module) -> dict[str, torch.Tensor] | tuple[torch.Tensor, ...]:
    """Return arguments without data for a forward: by name, or by place where there is none."""
    made = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, (shape, dtype) in call.items()
    }
    if all(name.isdigit() for name in made):
        return tuple(made.values())
    names = list(inspect.signature(model.forward).parameters)
    return {names[int(name)] if name.isdigit() else name: one for name, one in made.items()}


def default_length(model: nn.Module) -> int:
    """Tokens of a sample where none was seen: what the model takes, 2048 at most."""
    return load_model.length_of(_config(model))


def _config(model: nn.Module) -> dict[str, Any]:
    """The fields of a model's config; none where it has no such."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    return to_dict() if callable(to_dict) else {}


def _meant(name: str | None, names: Mapping[str, Any]) -> tuple[nn.Module, Watch | None]:
    """The bare model that a name means, and what is known of its training.

    Raises:
        PlanError: no such model.
    """
    watch = memory_probe.state.watch
    if name is None:
        if watch is None:
            message = (
                "no model was prepared on the ranks yet; call accelerator.prepare() in a"
                " %%distribute cell, or name what to plan."
            )
            raise PlanError(message)
        return _twin(watch), watch
    model = names.get(name)
    if watch is not None and model is not None and watch.prepared is model:
        return _twin(watch), watch
    if not isinstance(model, nn.Module):
        what = f"a {type(model).__name__}" if name in names else "not a variable"
        message = f"{name} is {what} on the ranks; name an nn.Module."
        raise PlanError(message)
    if getattr(model, "_is_accelerate_prepared", False):
        message = f"{name} was prepared before another model; prepare it last, or name a bare one."
        raise PlanError(message)
    return model, None


def _twin(watch: Watch) -> nn.Module:
    """The prepared model's twin.

    Raises:
        PlanError: the model could not be copied.
    """
    if watch.twin is None:
        message = (
            "the prepared model cannot be copied (copy.deepcopy fails), so it cannot be planned;"
            " name a newly built one."
        )
        raise PlanError(message)
    return watch.twin


def _silent(_: str) -> None:
    """Say nothing: the kernel shows that it waits."""
