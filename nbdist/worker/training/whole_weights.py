"""Whole weights of sharded models: `nbdist.full_parameters`, and functions that expect them.

``save_from_all_ranks`` is for `save_pretrained()`, ``refuse_shards`` for `torch.save()`,
``refuse_shards_in_safetensors`` for safetensors, ``refuse_empty_tensors`` for `state_dict()`, and
``load_whole_tensors`` for `load_state_dict()`. ``add_advice`` is for all other uses, which fail in
torch.
"""

from __future__ import annotations

import contextlib
import copy
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parameter import is_lazy

from nbdist.errors import CheckpointError
from nbdist.state import layouts, meta_model
from nbdist.state.layouts.base import unwrap_compiled, unwrap_engine
from nbdist.worker import process_group, stacks
from nbdist.worker.training import prepared_models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_SHARD_ERRORS = re.compile(
    r"mixed torch\.Tensor and DTensor|storage of size 0"  # fsdp2
    r"|tensor [ab] \(0\)|vec \(0\)|1x0|got \[0\] but|must be (2-D|a matrix)"  # zero3
)
"""Messages of torch 2.13 if a shard or an empty tensor is used as a whole parameter."""

_COPY_ERRORS = re.compile(
    r"does not support deepcopy"
    r"|pickle .*(hook_forward|ProcessGroup|DeepSpeedEngine|fsdp\._fully_shard)"
)
"""Messages of torch 2.13 and copy if a prepared model is copied or pickled."""


@contextlib.contextmanager
def full_parameters(model: nn.Module) -> Iterator[nn.Module]:
    """Gather all parameters of a prepared model; see `nbdist.full_parameters`."""
    process_group.require_all_ranks("nbdist.full_parameters()")
    reference = prepared_models.find_model(model)
    prepared = reference and reference.prepared
    if prepared is None or prepared.is_whole:
        yield _bare(model)
        return
    wrapper = engine_module(prepared.model)
    with layouts.kind_of(wrapper).full_parameters(wrapper):
        prepared.is_whole = True
        try:
            yield _bare(wrapper)
        finally:
            prepared.is_whole = False


def engine_module(model: nn.Module) -> nn.Module:
    """Return the engine's module; with --compile-model, FSDP2 shards torch.compile's wrapper."""
    return model if isinstance(model, FSDPModule) else unwrap_compiled(model)


def _bare(model: nn.Module) -> nn.Module:
    """Return the module inside of the engine."""
    inner = unwrap_engine(model)
    return getattr(inner, "_fsdp_wrapped_module", inner)


def save_from_all_ranks(original: Callable[..., None]) -> Callable[..., None]:
    """Make `save_pretrained()` of a sharded model write all parameters, from rank 0."""

    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        reference = prepared_models.find_model(self)
        prepared = reference and reference.prepared
        if (
            prepared is None
            or kwargs.get("state_dict") is not None  # a Trainer has gathered it
            or not layouts.kind_of(prepared.model).shards_parameters
            or prepared.is_whole
            or self is not _bare(prepared.model)
        ):
            return original(self, *args, **kwargs)
        if "state_dict" in kwargs and not kwargs.get("is_main_process", True):
            return None  # accelerator.get_state_dict() has returned None: rank 0 writes
        process_group.require_all_ranks("save_pretrained() of a model with sharded parameters")
        # If only the main process calls it, this wait is recognized as one that cannot end.
        prepared.owner.wait_for_everyone()
        weights = prepared.owner.get_state_dict(prepared.model)
        if distributed.get_rank() == 0:
            original(self, *args, **kwargs | {"state_dict": weights})
        prepared.owner.wait_for_everyone()
        return None

    return save_pretrained


def refuse_shards(original: Callable[..., None]) -> Callable[..., None]:
    """Make `torch.save()` in the user's code refuse tensors that the engine shards.

    It would write this rank's shards or empty tensors without a message. FSDP and DeepSpeed write
    such files on purpose.
    """

    def save(obj: object, *args: Any, **kwargs: Any) -> None:
        caller = sys._getframe(1)  # noqa: SLF001
        while caller.f_back and caller.f_globals.get("__name__", "").startswith("accelerate."):
            caller = caller.f_back  # accelerator.save()
        if not stacks.is_library_file(caller.f_code.co_filename):
            _check_whole(obj, "torch.save()")
        original(obj, *args, **kwargs)

    return save


def refuse_shards_in_safetensors(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make safetensors refuse tensors that the engine shards, for the user and for libraries.

    `save_pretrained()` of diffusers and of `PyTorchModelHubMixin` would write empty tensors.
    """

    def save(saved: Any, *args: Any, **kwargs: Any) -> Any:
        is_model = isinstance(saved, nn.Module)
        _check_whole(dict(saved.named_parameters()) if is_model else saved, "safetensors")
        return original(saved, *args, **kwargs)

    return save


def refuse_empty_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make `state_dict()` in the user's code refuse a ZeRO-3 model, whose tensors are empty.

    Within `full_parameters` it returns copies, since the end of the block frees the tensors.
    """

    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tensors = original(self, *args, **kwargs)
        # torch calls it for each module.
        if stacks.is_library_file(sys._getframe(1).f_code.co_filename):  # noqa: SLF001
            return tensors
        reference = prepared_models.find_model(self)
        if reference is None or not layouts.kind_of(reference.prepared.model).shards_parameters:
            return tensors
        if reference.prepared.is_whole:
            for name, tensor in tensors.items():
                if isinstance(tensor, torch.Tensor) and not tensor.requires_grad:  # keep_vars
                    tensors[name] = tensor.clone()
        elif any(not p.numel() and hasattr(p, "ds_shape") for p in self.parameters()):
            raise CheckpointError(
                "state_dict() returns empty tensors under zero3. Call it on all ranks within"
                " `with nbdist.full_parameters(model) as bare`, as bare.state_dict(), or use"
                " accelerator.get_state_dict(model), %nbdist save or %nbdist export."
            )
        return tensors

    return state_dict


def load_whole_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make `load_state_dict()` of a sharded model, or of a part of it, load whole tensors.

    torch refuses them under FSDP2 and ZeRO-3. A collective under ZeRO-3.
    """

    def load_state_dict(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        reference = prepared_models.find_model(self)
        if (
            reference is None
            or reference.prepared.is_whole
            or not layouts.kind_of(reference.prepared.model).shards_parameters
        ):
            return original(self, state_dict, *args, **kwargs)
        engine = engine_module(reference.prepared.model)
        if isinstance(engine, FullyShardedDataParallel) and self is _bare(engine):
            return original(engine, state_dict, *args, **kwargs)  # it gathers the root unit, too
        # FSDP2 would free what is written to parameters that an evaluation has left gathered.
        layout = layouts.layout_for(reference.prepared.model)
        tensors, whole = copy.copy(state_dict), {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            given = tensors.get(name)
            if given is None or isinstance(given, DTensor):
                continue
            if isinstance(parameter, DTensor):
                tensors[name] = distribute_tensor(
                    given.to(parameter.device),
                    parameter.device_mesh,
                    parameter.placements,
                    src_data_rank=None,
                )
            elif given.shape == getattr(parameter, "ds_shape", None):
                whole[reference.prefix + meta_model.bare_name(name)] = given
                tensors[name] = given if parameter.numel() else parameter.detach()
        result = original(self, tensors, *args, **kwargs)
        if whole:
            process_group.require_all_ranks("load_state_dict() of a model with sharded parameters")
            _write_shards(layout, whole)
        return result

    return load_state_dict


@torch.no_grad()
def _write_shards(layout: layouts.Layout, whole: Mapping[str, torch.Tensor]) -> None:
    """Write this rank's part of whole tensors, by the name of their parameter; a collective."""
    for place in layout.placements():
        if place.name in whole:
            part = whole[place.name].reshape(-1)[place.start : place.stop]
            place.weight.view(-1).copy_(part)
    layout.refresh()


def _check_whole(saved: object, writer: str) -> None:
    freed = {
        name.removeprefix("module."): parameter.untyped_storage()._cdata  # noqa: SLF001
        for prepared in prepared_models.all_models()
        for name, parameter in prepared.model.named_parameters()
        if not parameter.numel()
    }
    for name, tensor in _tensors_in(saved, "", set()):
        is_sharded = isinstance(tensor, DTensor)
        is_freed = not (is_sharded or tensor.numel()) and (
            name.removeprefix("module.") in freed
            or tensor.untyped_storage()._cdata in freed.values()  # noqa: SLF001
        )
        if is_sharded or is_freed:
            raise CheckpointError(
                f"{writer} would write {'a DTensor' if is_sharded else 'an empty tensor'}"
                f"{f' for {name!r}' if name else ''}, because the backend shards it. Use"
                " %nbdist export DIR for the weights, %nbdist save NAME for weights and optimizer,"
                " or save on rank 0 what accelerator.get_state_dict(model) returns on all ranks."
            )


def add_advice(error: BaseException | None) -> None:
    """Add a note to an error if a prepared model was used as one that is not prepared."""
    models = [prepared.model for prepared in prepared_models.all_models()]
    if error is None or not models:
        return
    is_sharded = any(layouts.kind_of(model).shards_parameters for model in models)
    if is_sharded and _SHARD_ERRORS.search(str(error)):
        error.add_note(
            "The parameters of a prepared model are sharded, except in its forward. If this code"
            " uses them, run it on all ranks within `with nbdist.full_parameters(model) as bare:`,"
            " with `bare` instead of `model`."
        )
    if _COPY_ERRORS.search(str(error)):
        error.add_note(
            "A prepared model cannot be copied or pickled. Copy it before accelerator.prepare(), or"
            " take its weights: rank 0 gets them if all ranks run"
            " `weights = accelerator.get_state_dict(model)`."
        )


def _tensors_in(
    saved: object, name: str, containers: set[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested containers and modules; `containers` are those seen already."""
    items: Iterable[tuple[object, object]] = ()
    if isinstance(saved, torch.Tensor):
        if saved.layout == torch.strided and not is_lazy(saved):  # as parameters are
            yield name, saved
    elif isinstance(saved, nn.Module):
        items = saved.named_parameters()
    elif isinstance(saved, Mapping):
        items = saved.items()
    elif isinstance(saved, list | tuple):
        items = ((name, item) for item in saved)
    if id(saved) not in containers:
        containers.add(id(saved))
        for key, item in items:
            yield from _tensors_in(item, str(key), containers)
