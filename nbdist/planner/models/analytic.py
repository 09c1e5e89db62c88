"""Builds analytic specs of decoder-only models from a transformers config or a parameter count.

Pure: reads fields and validates them. Every reader raises `PlanError` with the field, its value,
and the allowed values.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from nbdist.errors import PlanError
from nbdist.planner.models.autograd_tape import FULL_BYTES, HALF_BYTES
from nbdist.planner.models.decoder import ACTIVATIONS, DecoderSpec, Gpt2Spec, LlamaSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


MODEL_CLASSES: Mapping[str, str] = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""model_type -> class of transformers that has an analytic spec."""
_CAUSAL = ("ForCausalLM", "LMHeadModel")
"""Suffixes of the class name of a causal model, in transformers or third-party code."""
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
"""Defaults of transformers' config classes; Llama's default is the number of heads."""

MAX_SIZE = 10_000_000
"""Upper limit of widths, vocabularies and lengths; a larger number is an error."""
MAX_LAYERS = 1_000


def is_supported(config: Mapping[str, Any]) -> bool:
    """Return whether a transformers config and its model class have an analytic spec."""
    named, model_type = _named_class(config), _model_type(config)
    activation = config.get("activation_function" if model_type == "gpt2" else "hidden_act")
    is_known = activation is None or str(activation) in ACTIVATIONS  # others are traced
    return model_type in MODEL_CLASSES and is_known and (named is None or named.endswith(_CAUSAL))


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Return the analytic spec of a transformers config.

    Raises:
        PlanError: another architecture, or a missing or invalid field.
    """
    model_type, named = _model_type(config), _named_class(config)
    if not is_supported(config):
        raise PlanError(
            f"model_type {config.get('model_type')!r}{f' as {named}' if named else ''} has no"
            f" analytic formula. Supported: {', '.join(sorted(MODEL_CLASSES))}. For other"
            " models, plan the model itself: it is traced."
        )
    notes = config_notes(config)
    own = MODEL_CLASSES[model_type]
    if named not in {None, own}:
        notes.append(f"Planned as {own}: the config names {named}, whose code is not run.")
    build: Callable[[Mapping[str, Any]], DecoderSpec] = _gpt2 if model_type == "gpt2" else _llama
    spec = build({**config, "model_type": model_type})
    return replace(spec, notes=(*spec.notes, *notes))


def config_notes(config: Mapping[str, Any]) -> list[str]:
    """Return sentences about settings of a config that the plan ignores."""
    quantized = config.get("quantization_config")
    if not quantized:
        return []
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    note = (
        f"quantization_config{f' ({method})' if method else ''} is ignored: the plan trains all"
        f" parameters, loaded with {8 * _param_dtype_bytes(config)} bits each."
    )
    return [note]


def _model_type(config: Mapping[str, Any]) -> str:
    """Return the config's model type, or else that of the class it names."""
    if config.get("model_type") is not None:
        return str(config["model_type"])
    named = _named_class(config)
    return next((known for known, cls in MODEL_CLASSES.items() if cls == named), "None")


def _named_class(config: Mapping[str, Any]) -> str | None:
    class_names = config.get("architectures")
    named = class_names[0] if isinstance(class_names, (list, tuple)) and class_names else None
    return None if named is None else str(named)


def _llama(config: Mapping[str, Any]) -> LlamaSpec:
    model_type = config["model_type"]
    hidden, heads = _read_size(config, "hidden_size"), _read_size(config, "num_attention_heads")
    kv_heads = _read_size(config, "num_key_value_heads", default=_KV_HEADS.get(model_type, heads))
    _check_divides(heads, kv_heads, "num_attention_heads", "num_key_value_heads")
    biases = _read_flag(config, "attention_bias")
    has_window = model_type == "mistral" or _read_flag(config, "use_sliding_window")
    head_dim = 128 if model_type == "qwen3" else hidden // heads
    return LlamaSpec(
        model_type=model_type,
        hidden=hidden,
        ff=_read_size(config, "intermediate_size"),
        layers=_read_size(config, "num_hidden_layers", largest=MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_read_size(config, "head_dim", default=head_dim),
        vocab=_read_size(config, "vocab_size"),
        activation=str(config.get("hidden_act") or "silu"),
        tied=_read_flag(config, "tie_word_embeddings"),
        attention="eager" if config.get("_attn_implementation") == "eager" else "sdpa",
        attention_dropout=_read_dropout_rate(config, "attention_dropout", 0.0),
        element=_param_dtype_bytes(config),
        qkv_bias=biases or model_type == "qwen2",
        out_bias=biases and model_type != "qwen2",
        mlp_bias=_read_flag(config, "mlp_bias"),
        qk_norm=model_type == "qwen3",
        window=config.get("sliding_window") if has_window else None,
    )


def _gpt2(config: Mapping[str, Any]) -> Gpt2Spec:
    hidden = _read_size(config, "n_embd", "hidden_size")
    heads = _read_size(config, "n_head", "num_attention_heads")
    _check_divides(hidden, heads, "n_embd", "n_head")
    return Gpt2Spec(
        model_type="gpt2",
        hidden=hidden,
        ff=_read_size(config, "n_inner", default=4 * hidden),
        layers=_read_size(config, "n_layer", "num_hidden_layers", largest=MAX_LAYERS),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=_read_size(config, "vocab_size"),
        positions=_read_size(config, "n_positions", "max_position_embeddings", default=1024),
        activation=str(config.get("activation_function") or "gelu_new"),
        tied=_read_flag(config, "tie_word_embeddings", default=True),
        attention="eager" if config.get("_attn_implementation") == "eager" else "sdpa",
        attention_dropout=_read_dropout_rate(config, "attn_pdrop", 0.1),
        embedding_dropout=_read_dropout_rate(config, "embd_pdrop", 0.1),
        residual_dropout=_read_dropout_rate(config, "resid_pdrop", 0.1),
        element=_param_dtype_bytes(config),
    )


def _read_size(
    config: Mapping[str, Any], *names: str, default: int | None = None, largest: int = MAX_SIZE
) -> int:
    """Return an integer from 1 to `largest`, from the first of these fields that the config has."""
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if type(value) is not int or not 1 <= value <= largest:
        raise PlanError(
            f"The config's {names[0]} must be an integer from 1 to {largest:,}, got {value!r}."
            " Complete the config."
        )
    return value


def _read_flag(config: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = default if config.get(name) is None else config[name]
    if value not in (True, False):
        raise PlanError(f"The config's {name} must be true or false, got {value!r}.")
    return bool(value)


def _read_dropout_rate(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise PlanError(
            f"The config's {name} must be a dropout rate between 0 and 1, got {value!r}."
        )
    return float(value)


def _param_dtype_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes per parameter in the config's dtype; fp32 if there is none."""
    sizes = {"float32": FULL_BYTES, "float16": HALF_BYTES, "bfloat16": HALF_BYTES}
    dtype = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    if dtype not in {*sizes, "None"}:
        raise PlanError(f"Unknown dtype {dtype!r} in the config. Use one of {', '.join(sizes)}.")
    return sizes.get(dtype, FULL_BYTES)


def _check_divides(whole: int, part: int, whole_name: str, part_name: str) -> None:
    if whole % part:
        raise PlanError(
            f"{whole_name} {whole} must be a multiple of {part_name} {part} to split it into"
            " attention heads. Correct the config."
        )


# -- parameter counts such as "7b" -----------------------------------------------------------

_LlamaShape = tuple[int, int, int, int, int, int, bool]
"""hidden, ff, layers, heads, kv heads, vocab, tied."""
_PUBLISHED: Mapping[str, _LlamaShape] = {
    "0.5b": (896, 4864, 24, 14, 2, 151_936, True),  # Qwen2-0.5B
    "1b": (2048, 8192, 16, 32, 8, 128_256, True),  # Llama-3.2-1B
    "1.1b": (2048, 5632, 22, 32, 4, 32_000, False),  # TinyLlama-1.1B
    "1.5b": (1536, 8960, 28, 12, 2, 151_936, True),  # Qwen2-1.5B
    "3b": (3072, 8192, 28, 24, 8, 128_256, True),  # Llama-3.2-3B
    "7b": (4096, 11_008, 32, 32, 32, 32_000, False),  # Llama-2-7B
    "8b": (4096, 14_336, 32, 32, 8, 128_256, False),  # Llama-3-8B
    "13b": (5120, 13_824, 40, 40, 40, 32_000, False),  # Llama-2-13B
    "34b": (8192, 22_016, 48, 64, 8, 32_000, False),  # Code Llama 34B
    "65b": (8192, 22_016, 80, 64, 64, 32_000, False),  # LLaMA-65B
    "70b": (8192, 28_672, 80, 64, 8, 128_256, False),  # Llama-3-70B
    "405b": (16_384, 53_248, 126, 128, 8, 128_256, False),  # Llama-3.1-405B
}
_SCALE = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_SCALE |= {"million": 1e6, "bn": 1e9, "billion": 1e9}
_NUMBER_WITH_UNIT = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:e\+?\d{1,3})?)\s*([a-z]{0,8})")
_SMALLEST, _LARGEST = 1e6, 10_000e9
_HEAD_DIM = 128
_VOCAB = 32_000


def is_parameter_count(text: str) -> bool:
    """Return whether a text looks like a size, valid or not: "7b", "1.5 B", "1e9", "7 bn"."""
    return _NUMBER_WITH_UNIT.fullmatch(text.strip().lower()) is not None


@lru_cache(maxsize=16)  # activations, which a spec keeps, are used by later plans, too
def spec_from_parameter_count(text: str) -> DecoderSpec:
    """Return a Llama with approximately this many parameters: "7b", "1.3 B", "350m", "7e9".

    Uses a published shape if there is one; otherwise width 128 times depth (Kaplan et al. 2020
    find loss flat around it), with Llama-2's MLP and vocabulary.

    Raises:
        PlanError: not a valid size.
    """
    match = _NUMBER_WITH_UNIT.fullmatch(text.strip().lower())
    count = 0.0
    if match is not None and match[2] in _SCALE:
        count = float(re.sub("[_,]", "", match[1])) * _SCALE[match[2]]
    if not _SMALLEST <= count <= _LARGEST:
        raise PlanError(
            f'Invalid model size {text[:60]!r}. Use a size between "1m" and "10000b", such as "7b",'
            ' "350m" or "7e9".'
        )
    shape = _PUBLISHED.get(f"{count / 1e9:g}b") or _closest_shape(count)
    hidden, ff, layers, heads, kv_heads, vocab, tied = shape
    return LlamaSpec(
        model_type="llama",
        hidden=hidden,
        ff=ff,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab=vocab,
        activation="silu",
        tied=tied,
    )


def _closest_shape(count: float) -> _LlamaShape:
    """Return the shape with the closest number of parameters, near width = 128 depth."""
    ideal = (count * 128 / 12) ** (1 / 3)
    step = 128 if ideal > 1024 else 64  # noqa: PLR2004
    centre = max(1, round(ideal / step))
    shapes: list[tuple[float, _LlamaShape]] = []
    for hidden in (step * multiple for multiple in range(max(1, centre - 3), centre + 4)):
        ff = 64 * math.ceil(hidden * 8 / 3 / 64)
        heads = max(1, hidden // _HEAD_DIM) if hidden % _HEAD_DIM == 0 else hidden // 64
        tied = 2 * _VOCAB * hidden > count / 4
        tables = (1 if tied else 2) * _VOCAB * hidden
        linears = 4 * hidden**2 + 3 * hidden * ff
        layers = max(1, round((count - tables) / linears))
        total = layers * (linears + 2 * hidden) + tables + hidden
        shapes.append((abs(total - count), (hidden, ff, layers, heads, heads, _VOCAB, tied)))
    return min(shapes, key=lambda item: item[0])[1]
