"""Model specs from a parameter count such as "7b"."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from nbdist.errors import PlanError
from nbdist.planner.models.analytic_decoder import Llama

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.model_spec import ModelSpec

_PUBLISHED: Mapping[str, tuple[int, int, int, int, int, int, bool]] = {
    # hidden, ff, layers, heads, kv heads, vocab, tied
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
_LIKE = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:e\+?\d{1,3})?)\s*([a-z]{0,8})")
"""A number, optionally with a unit."""
_SMALLEST, _LARGEST = 1e6, 10_000e9
_HEAD_DIM = 128
_VOCAB = 32_000


def is_parameter_count(text: str) -> bool:
    """Return whether a text looks like a size, valid or not: "7b", "1.5 B", "1e9", "7 bn"."""
    return _LIKE.fullmatch(text.strip().lower()) is not None


def spec_from_parameter_count(text: str) -> ModelSpec:
    """Return a Llama with approximately this many parameters: "7b", "1.3 B", "350m", "7e9".

    Uses a published shape if there is one; otherwise width 128 times depth (Kaplan et al. 2020
    find loss flat around it), with Llama-2's MLP and vocabulary.

    Raises:
        PlanError: not a valid size.
    """
    count = _parameters(text.strip().lower())
    if not _SMALLEST <= count <= _LARGEST:
        message = (
            f'Invalid model size {text[:60]!r}. Use a size between "1m" and "10000b", such as "7b",'
            ' "350m" or "7e9".'
        )
        raise PlanError(message)
    shape = _PUBLISHED.get(f"{count / 1e9:g}b") or _shape(count)
    hidden, ff, layers, heads, kv_heads, vocab, tied = shape
    return Llama(
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


def _parameters(text: str) -> float:
    """Parse a number with unit; 0 if the text is invalid."""
    match = _LIKE.fullmatch(text)
    if match is None or match[2] not in _SCALE:
        return 0
    return float(re.sub("[_,]", "", match[1])) * _SCALE[match[2]]


def _shape(count: float) -> tuple[int, int, int, int, int, int, bool]:
    """Return the shape with the closest number of parameters, near width = 128 depth."""
    ideal = (count * 128 / 12) ** (1 / 3)
    step = 128 if ideal > 1024 else 64  # noqa: PLR2004
    centre = max(1, round(ideal / step))
    widths = [step * multiple for multiple in range(max(1, centre - 3), centre + 4)]
    return min((_at_width(count, width) for width in widths), key=lambda s: abs(_count(s) - count))


def _at_width(count: float, hidden: int) -> tuple[int, int, int, int, int, int, bool]:
    ff = 64 * math.ceil(hidden * 8 / 3 / 64)
    heads = max(1, hidden // _HEAD_DIM) if hidden % _HEAD_DIM == 0 else hidden // 64
    tied = 2 * _VOCAB * hidden > count / 4
    tables = (1 if tied else 2) * _VOCAB * hidden
    layers = max(1, round((count - tables) / (4 * hidden**2 + 3 * hidden * ff)))
    return hidden, ff, layers, heads, heads, _VOCAB, tied


def _count(shape: tuple[int, int, int, int, int, int, bool]) -> int:
    hidden, ff, layers, _, _, vocab, tied = shape
    block = 4 * hidden**2 + 3 * hidden * ff + 2 * hidden
    return layers * block + (1 if tied else 2) * vocab * hidden + hidden
