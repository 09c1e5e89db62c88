"""Builds a model spec from what the user passes to `plan`: a size, folder, config or module.

Downloads nothing and does not run the model author's code: a config is read as JSON, and
`auto_map` (remote code) is ignored.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from nbdist.errors import PlanError
from nbdist.paths import expand_user
from nbdist.planner.memory.timeline import compute_modes
from nbdist.planner.model_spec import with_notes
from nbdist.planner.models import analytic, decoder, traced
from nbdist.planner.models.autograd_tape import QuantizationMethod

if TYPE_CHECKING:
    from nbdist.planner.model_spec import ModelSpec

ProgressCallback = Callable[[str], None]
DeviceKind = Literal["cuda", "cpu"]

DEFAULT_SEQ_LEN = 2048
"""Tokens per sample if neither the user nor the config gives a length."""
_LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_target_positions",
)
_RELATIVE = "relative_attention_num_buckets"
"""Config field of models with relative positions (T5), which have no maximum length."""

_NEEDS_FORMULAS = (
    "lora and quantize need a decoder with closed formulas that trains everything (llama, mistral,"
    " qwen2, qwen3, gpt2). Plan the PEFT model or the quantized model itself."
)


def load_model_spec(  # noqa: PLR0913 - what a trace needs
    model: object,
    *,
    batch_size: int,
    seq_len: int | None,
    kind: DeviceKind,
    precision: str,
    inputs: object = None,
    lora: int | None = None,
    progress: ProgressCallback,
) -> tuple[ModelSpec, int]:
    """Return the model spec and the number of tokens per sample to plan for.

    Args:
        model: a `PretrainedConfig`, a mapping, a folder or config.json, an `nn.Module`, a
            size such as "7b", or a spec.
        batch_size: batch size of the trace, if one is needed.
        seq_len: tokens per sample. Default: the model's maximum, at most 2048.
        kind: device kind; a trace computes as on such a device.
        precision: precision to plan for.
        inputs: example input of a module whose config does not determine it.
        lora: rank of the adapters that `adapt` adds; a module may be frozen then.
        progress: called with progress messages of a trace.

    Raises:
        PlanError: an unsupported kind of model, or a config that lacks a field.
    """
    torch = sys.modules.get("torch")  # not imported here: an nn.Module comes with it
    is_module = torch is not None and isinstance(model, torch.nn.Module)
    if inputs is not None and not is_module:
        raise PlanError("inputs needs the model itself, an nn.Module. Give it, or omit inputs.")
    if hasattr(model, "micro_batch_activations"):  # a spec
        given = cast("ModelSpec", model)
        return given, _length_of_spec(given, seq_len or DEFAULT_SEQ_LEN)
    # Path.exists() raises if a name is too long
    if (
        isinstance(model, str) and analytic.is_parameter_count(model) and not os.path.exists(model)  # noqa: PTH110
    ):
        return analytic.spec_from_parameter_count(model), seq_len or DEFAULT_SEQ_LEN
    to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
    config: Mapping[str, Any] = to_dict() if is_module else _config(model)
    length = seq_len or default_seq_len(config)
    arguments: dict[str, Any] = {
        "batch_size": batch_size,
        "seq_len": length,
        "progress": progress,
        "kinds": (kind,),
    }
    spec: ModelSpec
    try:
        if is_module and lora is not None:
            spec = _frozen_base(model)
        elif is_module:
            spec = traced.spec_from_module(model, inputs=inputs, **arguments)
        elif analytic.is_supported(config):
            spec = analytic.spec_from_config(config)
        else:
            spec = traced.trace_config(config, computes=compute_modes(precision), **arguments)
    except PlanError as error:  # positions are the probable reason if there are too few
        raise PlanError(" ".join([*seq_len_notes(config, length), str(error)])) from error
    if is_module:
        length = _length_of_inputs(spec, seq_len, inputs) or length
    length = _length_of_spec(spec, length)
    notes = seq_len_notes(config, length)
    if inputs is not None and seq_len not in (None, length):
        notes.append(f"seq_len {seq_len} is not used: the inputs have no tokens.")
    return with_notes(spec, notes), length


def _frozen_base(module: object) -> ModelSpec:
    spec = traced.find_analytic_spec(module, is_frozen=True)
    if spec is None:
        raise PlanError(_NEEDS_FORMULAS)
    return spec


NF4_BF16 = "nf4-bf16"
"""nf4 with `bnb_4bit_quant_storage=torch.bfloat16`."""


def adapt(
    spec: ModelSpec, lora: int | None, target_modules: Any, quantize: str | None
) -> ModelSpec:
    """Return the spec with adapters and quantized weights, as `plan` is asked for them.

    Raises:
        PlanError: an invalid value, or a model without closed formulas.
    """
    if target_modules is not None and lora is None:
        raise PlanError("target_modules needs a rank. Add lora=16, or omit target_modules.")
    method = "nf4" if quantize == NF4_BF16 else quantize
    if method is not None and method not in get_args(QuantizationMethod):
        options = ", ".join(get_args(QuantizationMethod))
        raise PlanError(
            f"quantize must be {options} or {NF4_BF16}, got {quantize!r}. Omit it to quantize"
            " nothing."
        )
    if lora is None and quantize is None:
        return spec
    if not isinstance(spec, decoder.DecoderSpec) or not spec.trains_base:
        raise PlanError(_NEEDS_FORMULAS)
    if lora is None:
        raise PlanError(
            f"quantize={quantize!r} leaves no trainable parameter, since quantized weights are"
            " frozen. Add adapters, for example lora=16."
        )
    adapted = spec.with_lora(lora, target_modules)
    return replace(
        adapted,
        quantization=cast("QuantizationMethod | None", method),
        shards_quantized=quantize == NF4_BF16,
    )


def _length_of_inputs(spec: ModelSpec, requested: int | None, inputs: object = None) -> int | None:
    """Return the tokens per sample of the example inputs, or None if they have none."""
    ids: Any = inputs.get("input_ids") if isinstance(inputs, dict) else None
    seq_len = None if ids is None else int(ids.shape[-1])
    seq_len = spec.seq_len if isinstance(spec, traced.TracedModel) else seq_len
    if None not in {seq_len, requested} and seq_len != requested:
        raise PlanError(
            f"seq_len={requested} does not match the inputs, which have {seq_len} tokens per"
            " sample. Omit seq_len, or give inputs of that length."
        )
    return seq_len


def _length_of_spec(spec: ModelSpec, requested: int) -> int:
    """Return the length to plan for; 1 for a model without tokens, so that samples count."""
    return 1 if isinstance(spec, traced.TracedModel) and spec.seq_len is None else requested


def spec_from_json(fields: Mapping[str, Any]) -> ModelSpec:
    """Restore a spec from its `to_json()`."""
    if fields["depth"] == "traced":
        return traced.from_json(fields)
    family = decoder.LlamaSpec if fields["family"] == "LlamaSpec" else decoder.Gpt2Spec
    return family.from_json(fields)


def _config(model: object) -> Mapping[str, Any]:
    if isinstance(model, Mapping):
        named = model.get("architectures")  # a list, as transformers writes it
        return {**model, "architectures": [named]} if isinstance(named, str) else model
    to_dict = getattr(model, "to_dict", None)
    if hasattr(model, "model_type") and callable(to_dict):
        fields: Mapping[str, Any] = to_dict()
        return fields
    if model == "":
        raise PlanError(
            'The model is empty (""). Give a size such as "7b", a folder with config.json, a'
            " transformers config or an nn.Module."
        )
    if isinstance(model, (str, Path)):
        return _config(_config_file(expand_user(model)))
    raise PlanError(
        f"Cannot plan an object of class {type(model).__name__}. Give a transformers config, a"
        ' folder with config.json, an nn.Module, or a size such as "7b".'
    )


def _config_file(path: Path) -> Mapping[str, Any]:
    """Return the fields of a config file."""
    file = path
    try:
        file = path / "config.json" if path.is_dir() else path
        fields = json.loads(file.read_text())
    except FileNotFoundError:
        raise PlanError(
            f"{str(path)!r} is neither a size such as '7b' nor a folder with config.json on this"
            " machine. nbdist does not download models; download the model's config.json first."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(
            f"Cannot read {file} as a config ({error}). Give a transformers config.json."
        ) from None
    if not isinstance(fields, dict):
        raise PlanError(
            f"Invalid config {file}: expected a JSON object, got {type(fields).__name__}."
        )
    return fields


def default_seq_len(config: Mapping[str, Any]) -> int:
    """Return the tokens per sample: the model's maximum, at most 2048."""
    _, max_positions = _positions(config)
    return min(max_positions or DEFAULT_SEQ_LEN, DEFAULT_SEQ_LEN)


def seq_len_notes(config: Mapping[str, Any], seq_len: int) -> list[str]:
    """Return a note if samples are longer than the model's maximum number of positions."""
    name, max_positions = _positions(config)
    if not max_positions or seq_len <= max_positions or _RELATIVE in config:
        return []
    note = (
        f"seq_len {seq_len:,} exceeds the config's {name} of {max_positions:,}; the model was not"
        " trained on longer samples, or fails on them. Extend its positions, or plan for"
        f" {max_positions:,}."
    )
    return [note]


def _positions(config: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return name and value of the field that limits the tokens per sample.

    For multimodal models the limit is the text model's.
    """
    text = config.get("text_config")
    for fields in (config, text if isinstance(text, Mapping) else {}):
        for name in _LENGTH_FIELDS:
            value = fields.get(name)
            if isinstance(value, int) and value > 0:
                return name, value
    return "", None
