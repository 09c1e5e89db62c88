"""Which model types the installed transformers knows, read off its sources; pure, milliseconds.

Importing transformers takes seconds, because torch comes with it; a config that nobody can
build need not wait for that.
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
"""A model type and its class, as transformers 5.23 writes its mapping."""
_FILES = ("configuration_auto.py", "auto_mappings.py")
_GIVE = "give the model itself with example inputs: nbdist.plan(model, inputs=...)"


def check(config: Mapping[str, Any]) -> None:
    """Refuse a config that transformers certainly cannot build.

    Raises:
        PlanError: it names neither type nor class, or a type that transformers does not have.
    """
    model_type = config.get("model_type")
    if model_type is None:
        if not config.get("architectures"):
            raise PlanError(_nameless(config))
        return
    types = model_types()
    if types and str(model_type) not in types:
        raise PlanError(unknown(str(model_type), remote="auto_map" in config))


def unknown(model_type: str, *, remote: bool) -> str:
    """Say that transformers has no such type.

    Args:
        model_type: of the config.
        remote: the config names code of its author.
    """
    near = get_close_matches(model_type, sorted(model_types()), n=2, cutoff=0.8)
    hint = f"did you mean {' or '.join(near)}? Or " if near else ""
    code = " (its auto_map names code of its author, which is not run)" if remote else ""
    return f"transformers {_version()} has no model_type {model_type!r}{code}; {hint}{_GIVE}."


@functools.cache
def model_types() -> frozenset[str]:
    """All types; empty where they cannot be read, so that the import of transformers decides."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return frozenset()
    folder = Path(found.origin).parent / "models" / "auto"
    texts = [(folder / name).read_text() for name in _FILES if (folder / name).is_file()]
    return frozenset(name for text in texts for name in _PAIR.findall(text))


def _nameless(config: Mapping[str, Any]) -> str:
    """Say that a config names neither its type nor its class."""
    if "_class_name" in config:
        return f"the config is that of a {config['_class_name']} of diffusers; {_GIVE}."
    return (
        "the config has neither model_type nor architectures, so that it is not known what it"
        f" describes; complete it as a config.json of transformers, or {_GIVE}."
    )


def _version() -> str:
    return metadata.version("transformers")
