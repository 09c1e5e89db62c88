"""Reads and validates fields of a transformers config; pure.

Every reader raises `PlanError` with the field, its value, and the allowed values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from nbdist.errors import PlanError
from nbdist.planner.models.autograd_tape import FULL_BYTES, HALF_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping


MAX_SIZE = 10_000_000
"""Upper limit of widths, vocabularies and lengths; a larger number is an error."""
MAX_LAYERS = 1_000


def read_size(
    config: Mapping[str, Any], *names: str, default: int | None = None, most: int = MAX_SIZE
) -> int:
    """Return an integer from 1 to `most`, from the first of these fields that the config has.

    Raises:
        PlanError: none of the fields, or an invalid value.
    """
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if type(value) is not int or not 1 <= value <= most:
        message = (
            f"The config's {names[0]} must be an integer from 1 to {most:,}, got {value!r}."
            " Complete the config."
        )
        raise PlanError(message)
    return value


def read_dropout_rate(config: Mapping[str, Any], name: str, default: float) -> float:
    """Return a dropout rate.

    Raises:
        PlanError: not between 0 and 1.
    """
    value = config.get(name, default)
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        message = f"The config's {name} must be a dropout rate between 0 and 1, got {value!r}."
        raise PlanError(message)
    return float(value)


_ELEMENTS = {
    "float32": FULL_BYTES,
    "float16": HALF_BYTES,
    "bfloat16": HALF_BYTES,
    "None": FULL_BYTES,
}


def param_dtype_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes per parameter in the config's dtype; fp32 if there is none.

    Raises:
        PlanError: an unsupported dtype.
    """
    given = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    if given not in _ELEMENTS:
        allowed = ", ".join(name for name in _ELEMENTS if name != "None")
        message = f"Unknown dtype {given!r} in the config. Use one of {allowed}."
        raise PlanError(message)
    return _ELEMENTS[given]


def attention_implementation(config: Mapping[str, Any]) -> Literal["sdpa", "eager"]:
    """Return the config's attention implementation: eager if requested, otherwise sdpa."""
    return "eager" if config.get("_attn_implementation") == "eager" else "sdpa"


def check_divides(whole: int, part: int, whole_name: str, part_name: str) -> None:
    """Check that heads have equal sizes.

    Raises:
        PlanError: `whole` is not a multiple of `part`.
    """
    if whole % part:
        message = (
            f"{whole_name} {whole} must be a multiple of {part_name} {part} to split it into"
            " attention heads. Correct the config."
        )
        raise PlanError(message)


def config_notes(config: Mapping[str, Any]) -> list[str]:
    """Return sentences about settings of a config that the plan ignores."""
    quantized = config.get("quantization_config")
    if not quantized:
        return []
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    bits = 8 * param_dtype_bytes(config)
    note = (
        f"quantization_config{f' ({method})' if method else ''} is ignored: the plan trains all"
        f" parameters, loaded with {bits} bits each."
    )
    return [note]
