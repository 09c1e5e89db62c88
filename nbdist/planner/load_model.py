"""What a user hands to `plan`, made into a spec: a size, a folder, a config, a module.

Nothing is downloaded and no code of a model's author is run: a config is read as JSON, and
`auto_map` (remote code) is never followed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from nbdist.errors import PlanError
from nbdist.paths import expanded
from nbdist.planner import memory_model
from nbdist.planner.model_spec import noted
from nbdist.planner.models import analytic, parameter_count, traced

if TYPE_CHECKING:
    from nbdist.planner.model_spec import ModelSpec

Progress = Callable[[str], None]
Kind = Literal["cuda", "cpu"]

DEFAULT_SEQ_LEN = 2048
"""Where neither user nor config says how long a sample is."""
_LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_target_positions",
)
_RELATIVE = "relative_attention_num_buckets"
"""In the config of a model whose positions are relative (T5), so that none is the last one."""


def model_spec(
    given: object,
    *,
    batch_size: int,
    seq_len: int | None,
    kind: Kind,
    precision: str,
    inputs: object = None,
    progress: Progress,
) -> tuple[ModelSpec, int]:
    """Return the spec of what was given, and the tokens of a sample to plan for.

    Args:
        given: a `PretrainedConfig`, a mapping, a folder or config.json, an `nn.Module`, a
            size such as "7b", or a spec.
        batch_size: of the trace, where one is needed.
        seq_len: tokens of a sample; default: what the model takes, 2048 at most.
        kind: of the devices; a trace computes as they do.
        precision: to plan for.
        inputs: example input of a module, where it cannot be known from its config.
        progress: told what a trace is doing.

    Raises:
        PlanError: not of these kinds, or a config that lacks a field.
    """
    if _is_spec(given):
        return given, _length_of_spec(given, seq_len or DEFAULT_SEQ_LEN)
    if _is_module(given):
        length = seq_len or _module_length(given)
        found = traced.of_module(
            given,
            batch_size=batch_size,
            seq_len=length,
            inputs=inputs,
            progress=progress,
            kinds=(kind,),
        )
        return _measured(found, _module_config(given), _length_of_inputs(found, seq_len) or length)
    # Path.exists() raises where a name is too long
    if isinstance(given, str) and parameter_count.is_size(given) and not os.path.exists(given):  # noqa: PTH110
        return parameter_count.with_size(given), seq_len or DEFAULT_SEQ_LEN
    config = _config(given)
    length = seq_len or length_of(config)
    if analytic.knows(config):
        return noted(analytic.from_config(config), length_notes(config, length)), length
    found = traced.of_config(
        config,
        batch_size=batch_size,
        seq_len=length,
        progress=progress,
        kinds=(kind,),
        computes=memory_model.computes(precision),
    )
    return _measured(found, config, length)


def _measured(spec: ModelSpec, config: Mapping[str, Any], length: int) -> tuple[ModelSpec, int]:
    """A spec, noted where its samples are longer than its positions, and their length."""
    counted = _length_of_spec(spec, length)
    return noted(spec, length_notes(config, counted)), counted


def _length_of_inputs(spec: ModelSpec, asked: int | None) -> int | None:
    """Tokens of a sample of the example inputs; None where they hold none.

    Raises:
        PlanError: another length was asked for.
    """
    found = spec.seq_len if isinstance(spec, traced.Traced) else None
    if None not in {found, asked} and found != asked:
        message = (
            f"inputs have {found} tokens a sample and seq_len is {asked}; leave seq_len out, or"
            " give inputs of that length."
        )
        raise PlanError(message)
    return found


def _length_of_spec(spec: ModelSpec, asked: int) -> int:
    """The length to plan for: 1 for a model that takes no tokens, so that samples are counted."""
    return 1 if isinstance(spec, traced.Traced) and spec.seq_len is None else asked


def _is_spec(given: object) -> TypeGuard[ModelSpec]:
    return hasattr(given, "micro_batch")


def _is_module(given: object) -> bool:
    """Whether it is an `nn.Module`; torch is not imported to ask."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.nn.Module)


def _module_length(module: Any) -> int:
    """Tokens of a sample for a module, by its config where it has one."""
    return length_of(_module_config(module))


def _module_config(module: Any) -> Mapping[str, Any]:
    """The fields of a module's config; none where it has no such."""
    to_dict = getattr(getattr(module, "config", None), "to_dict", dict)
    fields: Mapping[str, Any] = to_dict()
    return fields


def spec_from_json(fields: Mapping[str, Any]) -> ModelSpec:
    """Rebuild a spec from its `to_json()`."""
    readers = {"closed form": analytic.from_json, "traced": traced.from_json}
    return readers[fields["depth"]](fields)


def _config(given: object) -> Mapping[str, Any]:
    """The fields of a transformers config, whatever holds them."""
    if isinstance(given, Mapping):
        return given
    to_dict = getattr(given, "to_dict", None)
    if hasattr(given, "model_type") and callable(to_dict):
        fields: Mapping[str, Any] = to_dict()
        return fields
    if given == "":
        message = (
            'the model is "", which names none; give a size such as "7b", a folder with'
            " config.json, a transformers config or an nn.Module."
        )
        raise PlanError(message)
    if isinstance(given, (str, Path)):
        return _config_file(expanded(given))
    message = (
        f"an object of class {type(given).__name__} cannot be planned; give a transformers"
        ' config, a folder with config.json, an nn.Module, or a size such as "7b".'
    )
    raise PlanError(message)


def _config_file(path: Path) -> Mapping[str, Any]:
    """The fields in a file.

    Raises:
        PlanError: there is none, or it holds no config.
    """
    file = path
    try:
        file = path / "config.json" if path.is_dir() else path
        fields = json.loads(file.read_text())
    except FileNotFoundError:
        message = (
            f"{str(path)!r} is neither a size such as '7b' nor a folder with config.json on this"
            " machine; nbdist downloads nothing, so download the model's config.json first."
        )
        raise PlanError(message) from None
    except (OSError, ValueError, RecursionError) as error:
        message = f"{file} cannot be read as a config ({error}); give a transformers config.json."
        raise PlanError(message) from None
    if not isinstance(fields, dict):
        message = f"{file} holds a {type(fields).__name__}; a config.json holds an object."
        raise PlanError(message)
    return fields


def length_of(config: Mapping[str, Any]) -> int:
    """Tokens of a sample: the most that the model takes, 2048 at most."""
    _, most = _positions(config)
    return min(most or DEFAULT_SEQ_LEN, DEFAULT_SEQ_LEN)


def length_notes(config: Mapping[str, Any], seq_len: int) -> list[str]:
    """Say that samples are longer than the model has positions."""
    name, most = _positions(config)
    if not most or seq_len <= most or _RELATIVE in config:
        return []
    note = (
        f"seq_len {seq_len:,} is more than the config's {name} of {most:,}, beyond which the model"
        f" was not trained or fails; extend its positions, or plan for {most:,}."
    )
    return [note]


def _positions(config: Mapping[str, Any]) -> tuple[str, int | None]:
    """The field that says how many tokens a sample may have, and its value.

    Of a model with several towers it is the text's.
    """
    text = config.get("text_config")
    for fields in (config, text if isinstance(text, Mapping) else {}):
        for name in _LENGTH_FIELDS:
            value = fields.get(name)
            if isinstance(value, int) and value > 0:
                return name, value
    return "", None
