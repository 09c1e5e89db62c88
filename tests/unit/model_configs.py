"""Configs of models by their shape, as a config.json has them."""

from __future__ import annotations

from typing import Any


def llama(
    hidden: int, wide: int, layers: int, heads: int, kv: int, vocab: int, **more: Any
) -> dict[str, Any]:
    """A Llama, or a model of another type in `more` that has its fields."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
    } | more


def gpt2(hidden: int, layers: int, heads: int, vocab: int = 50257, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "vocab_size": vocab,
    } | more
