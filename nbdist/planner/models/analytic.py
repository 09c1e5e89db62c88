"""Analytic specs of known architectures, following the source of transformers.

They need only a config's fields, not torch. A family records its operations as transformers 5.23
runs them (`analytic_decoder`, `analytic_encoder`, `analytic_seq2seq`), and an `AutogradTape`
derives the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.errors import PlanError
from nbdist.planner.model_spec import with_notes
from nbdist.planner.models import analytic_decoder, analytic_encoder, analytic_seq2seq
from nbdist.planner.models.config import config_notes
from nbdist.planner.models.parameter_count import spec_from_parameter_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.planner.model_spec import ModelSpec

__all__ = [
    "SPEC_BUILDERS",
    "is_supported",
    "spec_from_config",
    "spec_from_json",
    "spec_from_parameter_count",
]

SPEC_BUILDERS: Mapping[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    **analytic_decoder.SPEC_BUILDERS,
    **analytic_encoder.SPEC_BUILDERS,
    **analytic_seq2seq.SPEC_BUILDERS,
}
"""model_type -> function that builds a spec from its config."""
_TRAINED: Mapping[str, frozenset[str]] = {
    **analytic_decoder.SUPPORTED_MODEL_CLASSES,
    **analytic_encoder.SUPPORTED_MODEL_CLASSES,
    **analytic_seq2seq.SUPPORTED_MODEL_CLASSES,
}
"""model_type -> model classes that have an analytic spec."""
_CAUSAL = ("ForCausalLM", "LMHeadModel")
"""Suffixes of the class name of a causal model, in transformers or third-party code."""
_CLASSES: Mapping[str, Any] = {
    **analytic_decoder.SPEC_CLASSES,
    **analytic_encoder.SPEC_CLASSES,
    **analytic_seq2seq.SPEC_CLASSES,
}
"""Class name of a family in `to_json()` -> class."""


def is_supported(config: Mapping[str, Any]) -> bool:
    """Return whether a transformers config and its model class have an analytic spec."""
    model_type = _type_of(config)
    if model_type not in _TRAINED:
        return False
    named = _named(config)
    if named is None or named in _TRAINED[model_type]:
        return model_type in analytic_decoder.SPEC_BUILDERS or not config.get("is_decoder")
    return model_type in analytic_decoder.SPEC_BUILDERS and named.endswith(_CAUSAL)


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the analytic spec of a transformers config.

    Raises:
        PlanError: another architecture, or a missing or invalid field.
    """
    named = _named(config)
    if not is_supported(config):
        message = (
            f"model_type {config.get('model_type')!r}{f' as {named}' if named else ''} has no"
            f" analytic formula. Supported: {', '.join(sorted(SPEC_BUILDERS))}. For other"
            " models, plan the model itself: it is traced."
        )
        raise PlanError(message)
    model_type = _type_of(config)
    notes = config_notes(config)
    if named is not None and named not in _TRAINED[model_type]:
        (own,) = _TRAINED[model_type]
        notes.append(f"Planned as {own}: the config names {named}, whose code is not run.")
    return with_notes(SPEC_BUILDERS[model_type]({**config, "model_type": model_type}), notes)


def _type_of(config: Mapping[str, Any]) -> str:
    """Return the config's model type, or else that of the class it names."""
    model_type = config.get("model_type")
    if model_type is None:
        named = _named(config)
        matches = (known for known, classes in _TRAINED.items() if named in classes)
        model_type = next(matches, None)
    return str(model_type)


def _named(config: Mapping[str, Any]) -> str | None:
    """Return the model class that a config names."""
    given = config.get("architectures")
    named = given[0] if isinstance(given, (list, tuple)) and given else None
    return None if named is None else str(named)


def spec_from_json(fields: Mapping[str, Any]) -> ModelSpec:
    """Restore a spec from its `to_json()`."""
    spec: ModelSpec = _CLASSES[fields["family"]].from_json(fields)
    return spec
