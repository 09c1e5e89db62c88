"""Builds a transformers model from its config without weights, and a batch for it.

Only transformers' own classes are used: `auto_map`, which names the author's code, is ignored.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nbdist.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from nbdist.planner.tracing.trace_variants import ForwardBatch

DEFAULT_SEQ_LEN = 2048
"""Default tokens per sample."""

_TASKS: Sequence[str] = (
    "CausalLM",
    "Seq2SeqLM",
    "MaskedLM",
    "ImageTextToText",
    "SpeechSeq2Seq",
    "ZeroShotImageClassification",
    "ImageClassification",
    "SequenceClassification",
)
"""AutoModelFor classes of transformers, in order of preference."""


def build_from_config(fields: Mapping[str, Any]) -> tuple[nn.Module, list[str]]:
    """Build a model on the meta device; return it with notes for the user.

    Raises:
        PlanError: transformers has no class for it, or its fields contradict each other.
    """
    config = _config(fields)
    named = _named_class(fields)
    cls = named or _class_of(config)
    try:
        with torch.device("meta"):
            model: nn.Module = cls(config)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise PlanError(
            f"transformers cannot build {cls.__name__} from this config ({_line(error)}). Correct"
            " the config, or give the model itself."
        ) from None
    dtype_name = str(fields.get("dtype") or fields.get("torch_dtype") or "")
    dtype = getattr(torch, dtype_name.removeprefix("torch."), None) if dtype_name else None
    model = model.to(dtype) if isinstance(dtype, torch.dtype) else model
    name = next(iter(fields.get("architectures") or ()), None)
    if name is None or named is not None:
        return model, []
    note = f"Planned as {cls.__name__}: transformers has no {name}, which the config names."
    return model, [note]


def _named_class(fields: Mapping[str, Any]) -> Any:
    import transformers

    name = next(iter(fields.get("architectures") or ()), None)
    return getattr(transformers, str(name), None)


def prepare_for_tracing(model: nn.Module) -> None:
    """Make a model of transformers 5.23 run on fake tensors as it does on real ones."""
    from transformers import masking_utils
    from transformers.integrations import moe

    # The masks treat FakeTensorMode as a trace: they would look for packed sequences and be built
    # with S x S elements.
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    # torch 2.13 has a fake grouped matrix product for bf16 only. The fallback that transformers
    # registers allocates and saves the same.
    moe._can_use_grouped_mm = lambda _, weight, *__: weight.dtype == torch.bfloat16  # noqa: SLF001
    # Shapes of experts that run one by one ("eager") depend on the routing, those of grouped matrix
    # products do not. The memory is the same if the routing is balanced.
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) == "eager":
            config._experts_implementation = "grouped_mm"  # noqa: SLF001


def _config(fields: Mapping[str, Any]) -> Any:
    """Return a config object of the config's own class."""
    import transformers

    model_type = fields.get("model_type") or _type_of_class(fields)
    if model_type not in transformers.CONFIG_MAPPING:
        raise PlanError(
            f"transformers {transformers.__version__} has no model_type {model_type!r}. Give the"
            " model itself with example inputs: nbdist.plan(model, inputs=...)."
        )
    own = {name: value for name, value in fields.items() if name != "auto_map"}
    try:
        config = transformers.AutoConfig.for_model(**own | {"model_type": model_type})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"transformers cannot read this config ({_line(error)}). Correct the config."
        ) from None
    if fields.get("_attn_implementation"):
        config._attn_implementation = fields["_attn_implementation"]  # noqa: SLF001
    for each in (config, *(getattr(config, name) for name in config.sub_configs)):
        each.use_cache = False
    return config


def _type_of_class(fields: Mapping[str, Any]) -> str:
    """Return the model type of the class that a config without model type names."""
    cls = _named_class(fields)
    if getattr(cls, "config_class", None) is None:
        raise PlanError(
            f"The config has no model_type, and transformers has no model class"
            f" {fields['architectures'][0]!r}, which it names. Add its model_type, or give the"
            " model itself with example inputs: nbdist.plan(model, inputs=...)."
        )
    return str(cls.config_class.model_type)


def _line(error: Exception) -> str:
    text = f"no entry {error}" if isinstance(error, KeyError) else str(error)
    return " ".join(text.split()) or type(error).__name__


def _class_of(config: Any) -> Any:
    """Return the class that trains a model of this config."""
    import transformers

    tasks = _TASKS
    if getattr(config, "is_encoder_decoder", False):
        # Encoder and decoder are trained together, although a decoder has a class of its own.
        tasks = sorted(_TASKS, key=lambda task: "Seq2Seq" not in task)
    elif not getattr(config, "is_decoder", False):
        # transformers can turn an encoder (BERT) into a decoder, which the config has to request.
        tasks = sorted(_TASKS, key=lambda task: task != "MaskedLM")
    for task in tasks:
        mapping = getattr(transformers, f"AutoModelFor{task}")._model_mapping  # noqa: SLF001
        if type(config) in mapping:
            cls = mapping[type(config)]
            return cls[0] if isinstance(cls, tuple) else cls
    raise PlanError(
        f"Cannot tell for which task {config.model_type} is trained. Set architectures in the"
        " config to a transformers class, or give the model itself with example inputs:"
        " nbdist.plan(model, inputs=...)."
    )


class SampleBatch(NamedTuple):
    """A batch that a model trains on."""

    batch: ForwardBatch
    has_tokens: bool = False
    """True if samples consist of tokens; otherwise samples are counted."""
    notes: Sequence[str] = ()
    """Notes about samples that are not only tokens."""
    num_label_tokens: int = 0
    """Tokens of each sample's labels, if they are text."""


def make_sample_batch(model: nn.Module, batch_size: int, seq_len: int) -> SampleBatch:
    """Return a batch that a transformers model trains on.

    Raises:
        PlanError: the inputs of the model are unknown.
    """
    config: Any = getattr(model, "config", None)
    accepted = inspect.signature(model.forward).parameters
    main = str(getattr(model, "main_input_name", None))
    make = (
        _image_text_pairs
        if "return_loss" in accepted and "pixel_values" in accepted
        else _INPUTS.get(main)
    )
    if config is None or make is None or (make is _pixels and "input_ids" in accepted):
        raise PlanError(_unknown_input(model))
    try:
        sample = make(config, batch_size, seq_len)
    except (AttributeError, TypeError):  # a config with an unusual structure
        raise PlanError(_unknown_input(model)) from None
    if "token_type_ids" in accepted and _takes_images(config):
        sample.batch[1]["token_type_ids"] = _ids(batch_size, seq_len)  # Gemma 3 needs them
    text = config.get_text_config()
    if getattr(text, "pad_token_id", None) is None:  # sequence classifiers need one
        text.pad_token_id = 0
    if getattr(config, "is_encoder_decoder", False) and not hasattr(
        config, "decoder_start_token_id"
    ):
        config.decoder_start_token_id = text.pad_token_id  # T5 shifts its labels with it
    sample.batch[1].update(_labels(model, batch_size, sample.num_label_tokens))
    return sample


def _unknown_input(model: nn.Module) -> str:
    part = " or, for its language model alone, give config.text_config" * _takes_images(
        getattr(model, "config", None)
    )
    return (
        f"The training inputs of {type(model).__name__} are unknown. Give the model itself with"
        f" example inputs, nbdist.plan(model, inputs={{'name': tensor, ...}}){part}."
    )


def _takes_images(config: Any) -> bool:
    return hasattr(config, "vision_config") and hasattr(config, "text_config")


def _tokens(config: Any, batch_size: int, seq_len: int) -> SampleBatch:
    """Token ids; for a multimodal model only the text."""
    towers = {"vision_config": "images", "audio_config": "audio"}
    skipped = [kind for name, kind in towers.items() if getattr(config, name, None) is not None]
    note = (
        f"Planned for text alone, without {' and '.join(skipped)}: parameters of the other towers"
        " are counted, their activations are not. Give the model itself with example inputs,"
        " nbdist.plan(model, inputs=...), to include them."
    )
    named = {"input_ids": _ids(batch_size, seq_len)}
    return SampleBatch(
        ((), named), has_tokens=True, num_label_tokens=seq_len, notes=[note] if skipped else []
    )


def _pixels(config: Any, batch_size: int, _: int) -> SampleBatch:
    return SampleBatch(((), {"pixel_values": _images(config, batch_size)}))


def _image_text_pairs(config: Any, batch_size: int, seq_len: int) -> SampleBatch:
    """Images and their texts, for a contrastive loss (CLIP, SigLIP)."""
    images = _images(config.vision_config, batch_size)
    tokens = min(seq_len, config.text_config.max_position_embeddings)
    named = {
        "input_ids": _ids(batch_size, tokens),
        "pixel_values": images,
        "return_loss": True,
    }
    height, width = images.shape[-2:]
    note = f"A sample is an image of {height} x {width} and a text of {tokens} tokens."
    return SampleBatch(((), named), notes=[note])


def _spectrograms(config: Any, batch_size: int, seq_len: int) -> SampleBatch:
    """Spectrograms of the encoder's input length, and their text (Whisper)."""
    frames = 2 * config.max_source_positions  # the second convolution halves them
    tokens = min(seq_len, config.max_target_positions)
    features = torch.empty((batch_size, config.num_mel_bins, frames), device="meta")
    note = f"A sample is {frames:,} frames of audio and a text of {tokens} tokens."
    return SampleBatch(((), {"input_features": features}), notes=[note], num_label_tokens=tokens)


def _images(config: Any, batch_size: int) -> torch.Tensor:
    size = config.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    shape = (batch_size, getattr(config, "num_channels", 3), height, width)
    return torch.empty(shape, device="meta")


_INPUTS: Mapping[str, Callable[[Any, int, int], SampleBatch]] = {
    "input_ids": _tokens,
    "pixel_values": _pixels,
    "input_features": _spectrograms,
}
"""Inputs by transformers' `main_input_name`."""


def _labels(model: nn.Module, batch_size: int, seq_len: int) -> dict[str, torch.Tensor]:
    """Labels, if the model computes its loss from them."""
    if "labels" not in inspect.signature(model.forward).parameters:
        return {}
    by_token = ("LM", "LMHeadModel", "MTModel", "Generation", "TokenClassification", "PreTraining")
    has_token_labels = type(model).__name__.endswith(by_token)
    return {"labels": _ids(batch_size, seq_len) if has_token_labels else _ids(batch_size)}


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")
