"""Generation with prepared models: `generate` and `full_parameters` of `nbdist`, on a rank.

`save_from_all_ranks` is for `save_pretrained()`, which reads all parameters too, and
`refuse_shards` for `torch.save()`, which cannot.
``too_large_tokenizer`` compares the user's tokenizers with the embedding of a model.

transformers' `model.generate()` calls the forward of the module that it belongs to. Under FSDP and
ZeRO-3 each forward is a collective, so all ranks have to call it equally often, also when some have
finished their texts (`synced_gpus`). ``patch_generate`` sees to this in every `generate()`.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import warnings
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from IPython import get_ipython
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from nbdist.errors import CheckpointError, OptionError
from nbdist.state import collectives, layouts
from nbdist.state.layouts.base import unwrap_compiled, unwrap_engine
from nbdist.worker import process_group
from nbdist.worker.library_patches import patch
from nbdist.worker.training import prepared_models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_MODULE = "transformers.generation.utils"
_gathered: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Prepared models inside of `full_parameters`."""


def patch_generate() -> None:
    """Patch transformers' `generate()`, once a model that has it is prepared."""
    if _MODULE in sys.modules:
        patch(f"{_MODULE}:GenerationMixin.generate", _wrap_generate)


def _wrap_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make `generate()` of a sharded model work on all ranks together."""

    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        reference = prepared_models.find_model(self)
        prepared = reference and reference.prepared
        with contextlib.ExitStack() as contexts:
            if any(module._compiled_call_impl for module in self.modules()):  # noqa: SLF001
                # Each step has another shape, for which the blocks of --compile would be compiled.
                contexts.enter_context(torch.compiler.set_stance("force_eager"))
            if prepared is None or not (kind := layouts.kind_of(prepared.model)).shards_parameters:
                return original(self, *args, **kwargs)
            is_local = prepared.model in _gathered
            # transformers 5.23 sets it under FSDP alone, and its Seq2SeqTrainer passes False.
            kwargs["synced_gpus"] = not is_local and distributed.get_world_size() > 1
            if is_local:
                return original(self, *args, **kwargs)
            process_group.require_all_ranks("generate() of a model with sharded parameters")
            # Also the model's own generate() may call a part of it, such as the encoder of a T5.
            contexts.enter_context(kind.root_parameters(_engine(prepared.model)))
            prepared.interrupted_pass = "forward"  # noqa: S105
            result = original(self, *args, **kwargs)
            prepared.interrupted_pass, prepared.may_be_gathered = "", True
            return result

    return generate


def save_from_all_ranks(original: Callable[..., None]) -> Callable[..., None]:
    """Make `save_pretrained()` of a sharded model write all parameters, from rank 0."""

    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        reference = prepared_models.find_model(self)
        prepared = reference and reference.prepared
        if (
            prepared is None
            or kwargs.get("state_dict") is not None  # a Trainer has gathered it
            or not layouts.kind_of(prepared.model).shards_parameters
            or prepared.model in _gathered
            or self is not _bare(prepared.model)
        ):
            return original(self, *args, **kwargs)
        if "state_dict" in kwargs and not kwargs.get("is_main_process", True):
            return None  # accelerator.get_state_dict() has returned None: rank 0 writes
        process_group.require_all_ranks("save_pretrained() of a model with sharded parameters")
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
        if not caller.f_code.co_filename.startswith(sysconfig.get_path("purelib")):
            _check_whole(obj)
        original(obj, *args, **kwargs)

    return save


def _check_whole(saved: object) -> None:
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
                f"torch.save() would write {'a DTensor' if is_sharded else 'an empty tensor'}"
                f"{f' for {name!r}' if name else ''}, because the backend shards it. Use"
                " %nbdist export DIR for the weights, %nbdist save NAME for weights and optimizer,"
                " or save on rank 0 what accelerator.get_state_dict(model) returns on all ranks."
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


@contextlib.contextmanager
def full_parameters(model: nn.Module) -> Iterator[nn.Module]:
    """Gather all parameters of a prepared model; see `nbdist.full_parameters`."""
    process_group.require_all_ranks("nbdist.full_parameters()")
    reference = prepared_models.find_model(model)
    prepared = reference and reference.prepared
    if prepared is None or prepared.model in _gathered:
        yield _bare(model)
        return
    wrapper = _engine(prepared.model)
    with layouts.kind_of(wrapper).full_parameters(wrapper):
        _gathered.add(prepared.model)
        try:
            yield _bare(wrapper)
        finally:
            _gathered.discard(prepared.model)


def _engine(model: nn.Module) -> nn.Module:
    """Return the engine's module; with --compile-model, FSDP2 shards torch.compile's wrapper."""
    return model if isinstance(model, FSDPModule) else unwrap_compiled(model)


def _bare(model: nn.Module) -> nn.Module:
    """Return the module inside of the engine."""
    inner = unwrap_engine(model)
    return getattr(inner, "_fsdp_wrapped_module", inner)


def generate(
    model: nn.Module,
    inputs: Sequence[str] | Mapping[str, torch.Tensor] | torch.Tensor,
    tokenizer: Any,
    *,
    batch_size: int | None,
    **options: Any,
) -> Any:
    """Generate for a share of the inputs on each rank; see `nbdist.generate`."""
    process_group.require_all_ranks("nbdist.generate()")
    bare: Any = unwrap_engine(model)
    if not hasattr(bare, "generate"):
        raise OptionError(
            f"nbdist.generate() needs a model with generate(), got {type(bare).__name__}."
        )
    if options.get("return_dict_in_generate"):
        raise OptionError(
            "nbdist.generate() returns sequences only. Use model.generate() for the rest."
        )
    if batch_size is not None and batch_size < 1:
        raise OptionError(f"nbdist.generate() needs a batch_size of 1 or more, got {batch_size}.")
    tensors = _as_tensors(inputs, tokenizer, is_decoder=not bare.config.is_encoder_decoder)
    num_inputs = len(next(iter(tensors.values())))
    rank, share = distributed.get_rank(), -(-num_inputs // distributed.get_world_size())
    # Every rank generates for equally many: the last ones repeat the last input.
    rows = torch.arange(rank * share, (rank + 1) * share).clamp(max=num_inputs - 1)
    device = next(bare.parameters()).device
    sequences: list[list[int]] = []
    with _evaluating(bare):
        for part in rows.split(batch_size or share):
            batch = {name: tensor[part].to(device) for name, tensor in tensors.items()}
            sequences += bare.generate(**batch, **options).tolist()
    everyone = [row for rows in collectives.all_gather_values(sequences) for row in rows]
    # `num_return_sequences` gives several for each input.
    kept = everyone[: num_inputs * len(sequences) // share]
    if isinstance(tensors, _Tokenized):
        return tokenizer.batch_decode(kept, skip_special_tokens=True)
    padding = _pad_token(bare.generation_config, options)
    longest = max(map(len, kept))
    return torch.tensor([row + [padding] * (longest - len(row)) for row in kept], device=device)


class _Tokenized(dict[str, torch.Tensor]):
    """Tensors made from texts."""


def _as_tensors(inputs: Any, tokenizer: Any, *, is_decoder: bool) -> dict[str, torch.Tensor]:
    """Return inputs as keyword arguments of `generate()`; their rows are the inputs.

    Raises:
        OptionError: texts without a tokenizer, a single text, or nothing.
    """
    if isinstance(inputs, torch.Tensor):
        inputs = {"input_ids": inputs}
    if hasattr(inputs, "keys"):  # a BatchEncoding is not a dict
        tensors = {name: torch.as_tensor(inputs[name]) for name in inputs}
        if not all(tensor.ndim and len(tensor) for tensor in tensors.values()) or not tensors:
            raise OptionError("nbdist.generate() got no inputs. Pass tensors with one row or more.")
        return tensors
    is_texts = isinstance(inputs, (list, tuple)) and all(isinstance(text, str) for text in inputs)
    if not is_texts or tokenizer is None or not inputs:
        given = type(inputs).__name__ if inputs or not is_texts else "no texts"
        raise OptionError(
            "nbdist.generate() takes a list of texts with tokenizer=..., or the tensors that the"
            f" tokenizer returns, got {given}"
            f"{' without a tokenizer' if tokenizer is None else ''}."
        )
    side = "left" if is_decoder else "right"
    tokens = tokenizer(list(inputs), return_tensors="pt", padding=True, padding_side=side)
    return _Tokenized(tokens)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Turn off dropout and activation checkpointing in this context."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _pad_token(config: Any, options: Mapping[str, Any]) -> int:
    """Return the token with which `generate()` pads: the pad token, or the (first) end token."""
    tokens = [
        {**config.to_dict(), **options}.get(name) for name in ("pad_token_id", "eos_token_id")
    ]
    token = next((token for token in tokens if token is not None), 0)
    return token[0] if isinstance(token, list) else token


# -- tokenizers


def warn_of_large_tokenizer(model: nn.Module) -> None:
    """Warn if the variables have tokenizers and none of them fits a model."""
    shell = get_ipython()
    if shell is not None and (problem := too_large_tokenizer(model, shell.user_ns)):
        warnings.warn(problem, stacklevel=2)


def too_large_tokenizer(model: nn.Module, names: Mapping[str, Any]) -> str:
    """Return a sentence if all tokenizers have more tokens than the embedding has rows.

    On a GPU a token without a row ends the process, on the CPU it is an IndexError.
    """
    find = getattr(model, "get_input_embeddings", None)
    try:
        rows = getattr(find(), "num_embeddings", None) if callable(find) else None
    except (AttributeError, NotImplementedError):  # transformers 5.23: not a model of text
        rows = None
    sizes = {
        name: len(value)
        for name, value in names.items()
        if not name.startswith("_")
        and any(base.__name__ == "PreTrainedTokenizerBase" for base in type(value).__mro__)
    }
    if not isinstance(rows, int) or not sizes or min(sizes.values()) <= rows:
        return ""
    name = min(sizes, key=lambda name: sizes[name])
    return (
        f"The tokenizer {name!r} has {sizes[name]:,} tokens, but the embedding of"
        f" {type(model).__name__} has {rows:,} rows. Call"
        f" model.resize_token_embeddings(len({name})) before prepare()."
    )
