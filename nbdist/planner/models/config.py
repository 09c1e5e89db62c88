"""Fields of a transformers config, read and checked; pure.

Every reader raises `PlanError` with the field, what it is, and what it may be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from nbdist.errors import PlanError
from nbdist.planner.models.autograd_tape import FULL, HALF

if TYPE_CHECKING:
    from collections.abc import Mapping


MOST = 10_000_000
"""Of a width, a vocabulary, a length: beyond it a number is a slip of the hand."""
MOST_LAYERS = 1_000


def size(
    config: Mapping[str, Any], *names: str, default: int | None = None, most: int = MOST
) -> int:
    """A whole number from 1 to `most` under the first of the names that the config has.

    Raises:
        PlanError: none of the names, or no such number.
    """
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if type(value) is not int or not 1 <= value <= most:
        message = (
            f"the config's {names[0]} is {value!r}; it must be a whole number from 1 to {most:,}:"
            " complete the config."
        )
        raise PlanError(message)
    return value


def rate(config: Mapping[str, Any], name: str, default: float) -> float:
    """A dropout rate.

    Raises:
        PlanError: not between 0 and 1.
    """
    value = config.get(name, default)
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        message = f"the config's {name} is {value!r}; a dropout rate is between 0 and 1."
        raise PlanError(message)
    return float(value)


_ELEMENTS = {"float32": FULL, "float16": HALF, "bfloat16": HALF, "None": FULL}


def element(config: Mapping[str, Any]) -> int:
    """Bytes of a parameter in the type that the config names; fp32 where it names none.

    Raises:
        PlanError: a type that is not trained in.
    """
    given = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    if given not in _ELEMENTS:
        allowed = ", ".join(name for name in _ELEMENTS if name != "None")
        message = f"the config's dtype is {given!r}; known ones are {allowed}."
        raise PlanError(message)
    return _ELEMENTS[given]


def attention(config: Mapping[str, Any]) -> Literal["sdpa", "eager"]:
    """Which attention the config asks for: eager by name, sdpa otherwise."""
    return "eager" if config.get("_attn_implementation") == "eager" else "sdpa"


def check_divides(whole: int, part: int, whole_name: str, part_name: str) -> None:
    """Refuse heads that are not equal shares.

    Raises:
        PlanError: `whole` is not a multiple of `part`.
    """
    if whole % part:
        message = (
            f"{whole_name} {whole} is not a multiple of {part_name} {part}; "
            "attention needs heads in equal shares: correct the config."
        )
        raise PlanError(message)


def config_notes(config: Mapping[str, Any]) -> list[str]:
    """What of a config is not planned for, a sentence each."""
    quantized = config.get("quantization_config")
    if not quantized:
        return []
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    bits = 8 * element(config)
    note = (
        f"quantization_config{f' ({method})' if method else ''} is left out: the plan trains all"
        f" parameters, loaded with {bits} bits each."
    )
    return [note]
