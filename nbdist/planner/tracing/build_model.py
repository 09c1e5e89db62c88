"""A transformers model from its config, without weights, and a batch for it.

Classes are transformers' own alone: `auto_map`, which names an author's code, is not followed.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nbdist.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from nbdist.planner.tracing.trace_runs import Batch

SEQ_LEN = 2048
"""Tokens of a sample where nobody says how many."""

_TASKS = (
    "CausalLM",
    "Seq2SeqLM",
    "MaskedLM",
    "ImageTextToText",
    "SpeechSeq2Seq",
    "ZeroShotImageClassification",
    "ImageClassification",
    "SequenceClassification",
)
"""Of transformers' AutoModelFor classes; the first that knows a config is what is trained."""


def of_config(fields: Mapping[str, Any]) -> tuple[nn.Module, list[str]]:
    """Build a model on the meta device; returns it with notes for the reader.

    Raises:
        PlanError: transformers has no class for it, or its fields contradict each other.
    """
    config = _config(fields)
    named = _named_class(fields)
    cls = named or _class_of(config)
    try:
        with torch.device("meta"):
            model: nn.Module = cls(config)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        message = (
            f"transformers cannot build a {cls.__name__} from this config ({_line(error)}); correct"
            " the config, or give the model itself."
        )
        raise PlanError(message) from None
    dtype = _dtype(fields)
    model = model.to(dtype) if dtype is not None else model
    return model, _notes(fields, cls, found=named is not None)


def _notes(fields: Mapping[str, Any], cls: type, *, found: bool) -> list[str]:
    """Say which class is planned, where the config names another one."""
    name = next(iter(fields.get("architectures") or ()), None)
    if name is None or found:
        return []
    return [f"planned as {cls.__name__}: transformers has no {name}, which the config names."]


def _named_class(fields: Mapping[str, Any]) -> Any:
    """The class of transformers that a config names; None where it names none of them."""
    import transformers

    name = next(iter(fields.get("architectures") or ()), None)
    return getattr(transformers, str(name), None)


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

    model_type = fields.get("model_type") or _type_of_class(fields)
    if model_type not in transformers.CONFIG_MAPPING:
        message = (
            f"transformers {transformers.__version__} has no model_type {model_type!r}; give the"
            " model itself with example inputs: nbdist.plan(model, inputs=...)."
        )
        raise PlanError(message)
    own = {name: value for name, value in fields.items() if name != "auto_map"}
    try:
        config = transformers.AutoConfig.for_model(**own | {"model_type": model_type})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"transformers cannot read this config ({_line(error)}); correct the config."
        raise PlanError(message) from None
    if fields.get("_attn_implementation"):
        config._attn_implementation = fields["_attn_implementation"]  # noqa: SLF001
    for one in (config, *(getattr(config, name) for name in config.sub_configs)):
        one.use_cache = False
    return config


def _type_of_class(fields: Mapping[str, Any]) -> str:
    """The model type of the class that a config without one names.

    Raises:
        PlanError: transformers has no such class.
    """
    cls = _named_class(fields)
    if getattr(cls, "config_class", None) is None:
        message = (
            f"the config has no model_type, and transformers has no model class"
            f" {fields['architectures'][0]!r}, which it names; add its model_type, or give the"
            " model itself with example inputs: nbdist.plan(model, inputs=...)."
        )
        raise PlanError(message)
    return str(cls.config_class.model_type)


def _line(error: Exception) -> str:
    """What an error says, in a line."""
    return " ".join(str(error).split()) or type(error).__name__


def _class_of(config: Any) -> Any:
    """The class that trains a model of this config.

    Raises:
        PlanError: none of the tasks that are known.
    """
    import transformers

    for task in _tasks(config):
        mapping = getattr(transformers, f"AutoModelFor{task}")._model_mapping  # noqa: SLF001
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    message = (
        f"it is not known how a {config.model_type} is trained; name a class of transformers in"
        " the config's architectures, or give the model with example inputs."
    )
    raise PlanError(message)


def _tasks(config: Any) -> Sequence[str]:
    """What a model may be trained for, the likeliest first.

    An encoder and a decoder are trained together, although a decoder has a class of its own.
    """
    if getattr(config, "is_encoder_decoder", False):
        return sorted(_TASKS, key=lambda task: "Seq2Seq" not in task)
    return _TASKS


def _dtype(fields: Mapping[str, Any]) -> torch.dtype | None:
    """The type that the config's weights are loaded in."""
    name = str(fields.get("dtype") or fields.get("torch_dtype") or "").removeprefix("torch.")
    found = getattr(torch, name, None) if name else None
    return found if isinstance(found, torch.dtype) else None


class Sample(NamedTuple):
    """What a model trains on."""

    batch: Batch
    has_tokens: bool
    """Whether a sample is a row of tokens; else samples are counted."""
    notes: Sequence[str] = ()
    """For the reader: what a sample is, where it is not tokens alone."""


class _Inputs(NamedTuple):
    """Arguments of a forward, labels left out."""

    named: dict[str, Any]
    has_tokens: bool = False
    text: int = 0
    """Tokens of each sample's labels, where they are text."""
    notes: Sequence[str] = ()


def sample_for(model: nn.Module, batch_size: int, seq_len: int) -> Sample:
    """Return a batch that a transformers model trains on.

    Raises:
        PlanError: a model whose input is not known.
    """
    config: Any = getattr(model, "config", None)
    taken = inspect.signature(model.forward).parameters
    main = str(getattr(model, "main_input_name", None))
    make = _pairs if "return_loss" in taken and "pixel_values" in taken else _INPUTS.get(main)
    if config is None or make is None or (make is _pixels and "input_ids" in taken):
        raise PlanError(_unknown_input(model))
    try:
        inputs = make(config, batch_size, seq_len)
    except (AttributeError, TypeError):  # a config of another shape than its kind has
        raise PlanError(_unknown_input(model)) from None
    if "token_type_ids" in taken and _sees(config):
        inputs.named["token_type_ids"] = _ids(batch_size, seq_len)  # Gemma 3 asks for them
    text = config.get_text_config()
    if getattr(text, "pad_token_id", None) is None:  # a classifier of sequences asks for one
        text.pad_token_id = 0
    labels = _labels(model, batch_size, inputs.text)
    return Sample(((), inputs.named | labels), inputs.has_tokens, inputs.notes)


def _unknown_input(model: nn.Module) -> str:
    """Say what a model needs whose input is not known; of several parts, which one is."""
    part = " or, for its language model alone, give config.text_config" * _sees(
        getattr(model, "config", None)
    )
    return (
        f"it is not known what a {type(model).__name__} trains on; give the model itself with"
        f" example inputs, nbdist.plan(model, inputs={{'name': tensor, ...}}){part}."
    )


def _sees(config: Any) -> bool:
    """Whether a model takes pictures beside text."""
    return hasattr(config, "vision_config") and hasattr(config, "text_config")


def _tokens(config: Any, batch_size: int, seq_len: int) -> _Inputs:
    """Token ids; of a model with further towers, text is all that is known."""
    towers = {"vision_config": "pictures", "audio_config": "sound"}
    beside = [what for name, what in towers.items() if getattr(config, name, None) is not None]
    note = (
        f"planned for text alone, without {' and '.join(beside)}: of the other towers the"
        " parameters count, their activations do not; give the model itself with example inputs,"
        " nbdist.plan(model, inputs=...), for all of it."
    )
    named = {"input_ids": _ids(batch_size, seq_len)}
    return _Inputs(named, has_tokens=True, text=seq_len, notes=[note] if beside else [])


def _pixels(config: Any, batch_size: int, _: int) -> _Inputs:
    """Pictures of the config's size."""
    return _Inputs({"pixel_values": _pictures(config, batch_size)})


def _pairs(config: Any, batch_size: int, seq_len: int) -> _Inputs:
    """Pictures and their texts, for a contrastive loss (CLIP, SigLIP)."""
    pictures = _pictures(config.vision_config, batch_size)
    tokens = min(seq_len, config.text_config.max_position_embeddings)
    named = {
        "input_ids": _ids(batch_size, tokens),
        "pixel_values": pictures,
        "return_loss": True,
    }
    height, width = pictures.shape[-2:]
    note = f"a sample is a picture of {height} x {width} and a text of {tokens} tokens."
    return _Inputs(named, notes=[note])


def _sound(config: Any, batch_size: int, seq_len: int) -> _Inputs:
    """Spectrograms of the length that the encoder takes, and their text (Whisper)."""
    frames = 2 * config.max_source_positions  # the second convolution halves them
    tokens = min(seq_len, config.max_target_positions)
    features = torch.empty((batch_size, config.num_mel_bins, frames), device="meta")
    note = f"a sample is {frames:,} frames of sound and a text of {tokens} tokens."
    return _Inputs({"input_features": features}, text=tokens, notes=[note])


def _pictures(config: Any, batch_size: int) -> torch.Tensor:
    """Pixels."""
    size = config.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    shape = (batch_size, getattr(config, "num_channels", 3), height, width)
    return torch.empty(shape, device="meta")


_INPUTS: Mapping[str, Callable[[Any, int, int], _Inputs]] = {
    "input_ids": _tokens,
    "pixel_values": _pixels,
    "input_features": _sound,
}
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
