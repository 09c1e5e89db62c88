"""A transformers model from its config, without weights, and a batch for it.

Classes are transformers' own alone: `auto_map`, which names an author's code, is not followed.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from nbdist.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from nbdist.trace.runs import Batch

SEQ_LEN = 2048
"""Tokens of a sample where nobody says how many."""

_TASKS = (
    "CausalLM",
    "Seq2SeqLM",
    "MaskedLM",
    "ImageTextToText",
    "SpeechSeq2Seq",
    "ImageClassification",
    "SequenceClassification",
)
"""Of transformers' AutoModelFor classes; the first that knows a config is what is trained."""


def of_config(fields: Mapping[str, Any]) -> nn.Module:
    """Build a model on the meta device.

    Raises:
        PlanError: transformers has no class for it, or its fields contradict each other.
    """
    import transformers

    config = _config(fields)
    name = next(iter(fields.get("architectures") or ()), None)
    cls = getattr(transformers, str(name), None) or _class_of(config)
    try:
        with torch.device("meta"):
            model: nn.Module = cls(config)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        message = (
            f"transformers cannot build a {cls.__name__} from this config ({error}); correct the"
            " config, or give the model itself."
        )
        raise PlanError(message) from None
    dtype = _dtype(fields)
    return model.to(dtype) if dtype is not None else model


def without_tracing_branches() -> None:
    """Let transformers 5.23 run on fake tensors as it does on real ones.

    Its masks take FakeTensorMode for a trace, look for packed sequences and would be built
    with S x S elements. Experts meet their tokens in grouped products, whose sizes do not
    depend on the routing; torch 2.13 has no fake one but for bf16, while the stand-in that
    transformers registers keeps and makes the same. Experts one by one ("eager") have shapes
    that depend on the routing: they are traced as grouped ones, which hold as much when the
    routing is balanced.
    """
    from transformers import masking_utils
    from transformers.integrations import moe

    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    moe._can_use_grouped_mm = lambda _, weight, *__: weight.dtype == torch.bfloat16  # noqa: SLF001


def with_grouped_experts(model: nn.Module) -> None:
    """Let experts that run one by one run in groups, whose shapes are known."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) == "eager":
            config._experts_implementation = "grouped_mm"  # noqa: SLF001


def _config(fields: Mapping[str, Any]) -> Any:
    """The config's own class.

    Raises:
        PlanError: transformers has none.
    """
    import transformers

    model_type = fields.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        remote = " (its auto_map names code of its author, which is not run)" * (
            "auto_map" in fields
        )
        message = (
            f"transformers {transformers.__version__} has no model_type {model_type!r}{remote};"
            " give the model itself as an nn.Module with example inputs."
        )
        raise PlanError(message)
    known = {name: value for name, value in fields.items() if name != "auto_map"}
    config = transformers.AutoConfig.for_model(**known)
    if fields.get("_attn_implementation"):
        config._attn_implementation = fields["_attn_implementation"]  # noqa: SLF001
    config.use_cache = False
    return config


def _class_of(config: Any) -> Any:
    """The class that trains a model of this config.

    Raises:
        PlanError: none of the tasks that are known.
    """
    import transformers

    for task in _TASKS:
        mapping = getattr(transformers, f"AutoModelFor{task}")._model_mapping  # noqa: SLF001
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    message = (
        f"it is not known how a {config.model_type} is trained; name a class of transformers in"
        " the config's architectures, or give the model with example inputs."
    )
    raise PlanError(message)


def _dtype(fields: Mapping[str, Any]) -> torch.dtype | None:
    """The type that the config's weights are loaded in."""
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "").removeprefix("torch.")
    found = getattr(torch, name, None) if name else None
    return found if isinstance(found, torch.dtype) else None


def batch_for(model: nn.Module, batch_size: int, seq_len: int) -> tuple[Batch, bool]:
    """Return a batch that a transformers model trains on, and whether it holds tokens.

    Raises:
        PlanError: a model whose input is not known.
    """
    config: Any = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    make = _INPUTS.get(str(main))
    if config is None or make is None:
        message = (
            f"it is not known what a {type(model).__name__} takes; give example inputs:"
            " inputs=(tensor, ...) or inputs={'name': tensor}."
        )
        raise PlanError(message)
    inputs = make(config, batch_size, seq_len)
    labels = _labels(model, batch_size, seq_len)
    return ((), inputs | labels), main == "input_ids"


def _tokens(_: Any, batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
    """Token ids."""
    return {"input_ids": _ids(batch_size, seq_len)}


def _pixels(config: Any, batch_size: int, _: int) -> dict[str, torch.Tensor]:
    """Pictures of the config's size."""
    size = config.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    shape = (batch_size, getattr(config, "num_channels", 3), height, width)
    return {"pixel_values": torch.empty(shape, device="meta")}


_INPUTS = {"input_ids": _tokens, "pixel_values": _pixels}
"""What models take, by transformers' `main_input_name`."""


def _labels(model: nn.Module, batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
    """Labels, where the model computes its loss from them."""
    if "labels" not in inspect.signature(model.forward).parameters:
        return {}
    return {"labels": _ids(batch_size, seq_len) if _is_text(model) else _ids(batch_size)}


def _is_text(model: nn.Module) -> bool:
    """Whether each token has a label."""
    name = type(model).__name__
    return name.endswith(("LM", "LMHeadModel", "Generation", "TokenClassification", "PreTraining"))


def _ids(*shape: int) -> torch.Tensor:
    """Whole numbers."""
    return torch.empty(shape, dtype=torch.long, device="meta")
