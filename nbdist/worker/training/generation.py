"""Generation with prepared models: `nbdist.generate` on a rank.

``too_large_tokenizer`` compares the user's tokenizers with the embedding of a model.

transformers' `model.generate()` calls the forward of the module that it belongs to. Under FSDP and
ZeRO-3 each forward is a collective, so all ranks have to call it equally often, also when some have
finished their texts (`synced_gpus`). ``patch_generate`` sees to this in every `generate()`.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from IPython import get_ipython
from torch import distributed, nn

from nbdist.errors import OptionError
from nbdist.state import collectives, layouts
from nbdist.state.layouts.base import unwrap_engine
from nbdist.worker import process_group
from nbdist.worker.library_patches import patch
from nbdist.worker.training import prepared_models, whole_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_MODULE = "transformers.generation.utils"


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
            # transformers 5.23 sets it under FSDP alone, and its Seq2SeqTrainer passes False.
            kwargs["synced_gpus"] = not prepared.is_whole and distributed.get_world_size() > 1
            if prepared.is_whole:
                return original(self, *args, **kwargs)
            process_group.require_all_ranks("generate() of a model with sharded parameters")
            # Also the model's own generate() may call a part of it, such as the encoder of a T5.
            contexts.enter_context(
                kind.root_parameters(whole_weights.engine_module(prepared.model))
            )
            prepared.interrupted_pass = "forward"  # noqa: S105
            prepared.stays_gathered = True
            try:
                result = original(self, *args, **kwargs)
            finally:
                prepared.stays_gathered = False
            prepared.interrupted_pass, prepared.may_be_gathered = "", True
            return result

    return generate


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
