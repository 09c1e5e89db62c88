"""Model types of the installed transformers, parsed from its source files; pure, milliseconds.

Importing transformers takes seconds because it imports torch; a config that cannot be built is
rejected without that.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

_PAIR = re.compile(r'"([^"\n]+)"[,:]\s*"\w+Config"')
"""A model type and its config class in the mapping of transformers 5.23."""
_FILES = ("configuration_auto.py", "auto_mappings.py")
_GIVE = "give the model itself with example inputs: nbdist.plan(model, inputs=...)"


def check_model_type(config: Mapping[str, Any]) -> None:
    """Reject a config that transformers cannot build.

    Raises:
        PlanError: neither type nor class is given, or transformers lacks the type.
    """
    model_type = config.get("model_type")
    if model_type is None:
        if not config.get("architectures"):
            raise PlanError(_nameless(config))
        return
    types = model_types()
    if types and str(model_type) not in types:
        raise PlanError(unknown_type_message(str(model_type), remote="auto_map" in config))


def unknown_type_message(model_type: str, *, remote: bool) -> str:
    """Return the error message for a type that transformers lacks.

    Args:
        model_type: type in the config.
        remote: True if the config refers to the author's own code.
    """
    near = get_close_matches(model_type, sorted(model_types()), n=2, cutoff=0.8)
    hint = f"Did you mean {' or '.join(near)}? Or {_GIVE}" if near else _GIVE.capitalize()
    code = " (its auto_map names the author's code, which is not run)" if remote else ""
    return f"transformers {_version()} has no model_type {model_type!r}{code}. {hint}."


@functools.cache
def model_types() -> frozenset[str]:
    """Return all types, or an empty set if they cannot be read (importing transformers decides)."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return frozenset()
    folder = Path(spec.origin).parent / "models" / "auto"
    texts = [(folder / name).read_text() for name in _FILES if (folder / name).is_file()]
    return frozenset(name for text in texts for name in _PAIR.findall(text))


def _nameless(config: Mapping[str, Any]) -> str:
    """Return the error message for a config with neither type nor class."""
    if "_class_name" in config:
        return f"The config belongs to {config['_class_name']} of diffusers. {_GIVE.capitalize()}."
    return (
        "The config has neither model_type nor architectures, so its model is unknown. Use a"
        f" complete config.json of transformers, or {_GIVE}."
    )


def _version() -> str:
    return metadata.version("transformers")
