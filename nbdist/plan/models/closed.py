"""Closed forms of known architectures: what transformers' own code keeps and makes.

From a config's fields alone; no torch. A family writes its operations down as transformers
5.23 runs them (`closed_decoder`, `closed_encoder`, `closed_seq2seq`), and a `Tape` reads the
bytes off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.errors import PlanError
from nbdist.plan.models import closed_decoder, closed_encoder, closed_seq2seq
from nbdist.plan.models.sizes import with_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.plan.spec import ModelSpec

__all__ = ["FAMILIES", "from_config", "from_json", "knows", "with_size"]

FAMILIES: Mapping[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    **closed_decoder.FAMILIES,
    **closed_encoder.FAMILIES,
    **closed_seq2seq.FAMILIES,
}
"""model_type -> reader of its config."""
_TRAINED: Mapping[str, frozenset[str]] = {**closed_encoder.TRAINED, **closed_seq2seq.TRAINED}
"""model_type -> classes that have a closed form; of other families the causal model alone."""
_CLASSES: Mapping[str, Any] = {
    **closed_decoder.CLASSES,
    **closed_encoder.CLASSES,
    **closed_seq2seq.CLASSES,
}
"""Name of a family's class, as its `to_json()` has it."""


def knows(config: Mapping[str, Any]) -> bool:
    """Whether there is a closed form for a transformers config and the class that it names."""
    model_type = str(config.get("model_type"))
    trained = _TRAINED.get(model_type)
    if trained is None:
        return model_type in FAMILIES
    named = next(iter(config.get("architectures") or ()), None)
    return (named is None or named in trained) and not config.get("is_decoder")


def from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the closed form of a transformers config.

    Raises:
        PlanError: another architecture, or a field that is missing or absurd.
    """
    if not knows(config):
        named = "".join(f" as {name}" for name in (config.get("architectures") or ())[:1])
        message = (
            f"model_type {config.get('model_type')!r}{named} has no closed form; these have one: "
            f"{', '.join(sorted(FAMILIES))}."
        )
        raise PlanError(message)
    return FAMILIES[config["model_type"]](config)


def from_json(fields: Mapping[str, Any]) -> ModelSpec:
    """Rebuild a spec from its `to_json()`."""
    spec: ModelSpec = _CLASSES[fields["family"]].from_json(fields)
    return spec
