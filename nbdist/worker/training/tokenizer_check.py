"""Compares the tokenizers among the user's variables with the embedding of a model."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from IPython import get_ipython

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


def warn_of_large_tokenizer(model: nn.Module) -> None:
    """Warn if the variables have tokenizers and none of them fits a model."""
    shell = get_ipython()
    if shell is not None and (problem := too_large_tokenizer(model, shell.user_ns)):
        warnings.warn(problem, stacklevel=2)


def too_large_tokenizer(model: nn.Module, names: Mapping[str, Any]) -> str:
    """Return a sentence if all tokenizers have more tokens than the embedding has rows.

    On a GPU a token without a row ends the process, on the CPU it is an IndexError.

    Args:
        model: the model, also on the meta device.
        names: the user's variables.
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
