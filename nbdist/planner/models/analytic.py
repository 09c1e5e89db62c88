"""Closed forms of known architectures: what transformers' own code keeps and makes.

From a config's fields alone; no torch. A family writes its operations down as transformers
5.23 runs them (`closed_decoder`, `closed_encoder`, `closed_seq2seq`), and a `Tape` reads the
bytes off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.errors import PlanError
from nbdist.planner.model_spec import noted
from nbdist.planner.models import analytic_decoder, analytic_encoder, analytic_seq2seq
from nbdist.planner.models.config import config_notes
from nbdist.planner.models.parameter_count import with_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.planner.model_spec import ModelSpec

__all__ = ["FAMILIES", "from_config", "from_json", "knows", "with_size"]

FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    **analytic_decoder.FAMILIES,
    **analytic_encoder.FAMILIES,
    **analytic_seq2seq.FAMILIES,
}
"""model_type -> reader of its config."""
_TRAINED: Mapping[str, frozenset[str]] = {
    **analytic_decoder.TRAINED,
    **analytic_encoder.TRAINED,
    **analytic_seq2seq.TRAINED,
}
"""model_type -> classes that have a closed form."""
_CAUSAL = ("ForCausalLM", "LMHeadModel")
"""Ends of the name of a causal model's class, of transformers or of an author's own."""
_CLASSES: Mapping[str, Any] = {
    **analytic_decoder.CLASSES,
    **analytic_encoder.CLASSES,
    **analytic_seq2seq.CLASSES,
}
"""Name of a family's class, as its `to_json()` has it."""


def knows(config: Mapping[str, Any]) -> bool:
    """Whether there is a closed form for a transformers config and the class that it names."""
    model_type = _type_of(config)
    if model_type not in _TRAINED:
        return False
    named = _named(config)
    if named is None or named in _TRAINED[model_type]:
        return model_type in analytic_decoder.FAMILIES or not config.get("is_decoder")
    return model_type in analytic_decoder.FAMILIES and named.endswith(_CAUSAL)


def from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the closed form of a transformers config.

    Raises:
        PlanError: another architecture, or a field that is missing or absurd.
    """
    named = _named(config)
    if not knows(config):
        message = (
            f"model_type {config.get('model_type')!r}{f' as {named}' if named else ''} has no"
            f" closed form; these have one: {', '.join(sorted(FAMILIES))}."
        )
        raise PlanError(message)
    model_type = _type_of(config)
    notes = config_notes(config)
    if named is not None and named not in _TRAINED[model_type]:
        (own,) = _TRAINED[model_type]
        notes.append(f"planned as {own}: the code of {named}, which the config names, is not run.")
    return noted(FAMILIES[model_type]({**config, "model_type": model_type}), notes)


def _type_of(config: Mapping[str, Any]) -> str:
    """The config's model type, or that of the class which it names where it has none."""
    found = config.get("model_type")
    if found is None:
        named = _named(config)
        found = next((one for one, classes in _TRAINED.items() if named in classes), None)
    return str(found)


def _named(config: Mapping[str, Any]) -> str | None:
    """The class that a config names."""
    given = config.get("architectures")
    named = given[0] if isinstance(given, (list, tuple)) and given else None
    return None if named is None else str(named)


def from_json(fields: Mapping[str, Any]) -> ModelSpec:
    """Rebuild a spec from its `to_json()`."""
    spec: ModelSpec = _CLASSES[fields["family"]].from_json(fields)
    return spec
