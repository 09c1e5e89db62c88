"""The user's own config files for an engine: read, and brought together with the options; pure.

Called by `strategies.Options.checked` and by whoever takes --fsdp-config or
--deepspeed-config, which may also be JSON in the line itself. What a file and an option both
say must agree; what only the file says becomes the option; what is left is handed to the
engine as it stands.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbdist.errors import OptionError
from nbdist.paths import expanded

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from nbdist.strategies.backends import Options

Plain = dict[str, Any]
_SHOWN = 200
"""Characters of what was given, in a message."""

FSDP_KEYS = frozenset(
    {
        "activation_checkpointing",
        "auto_wrap_policy",
        "backward_prefetch",
        "cpu_offload",
        "cpu_ram_efficient_loading",
        "forward_prefetch",
        "fsdp_version",
        "ignored_modules",
        "limit_all_gathers",
        "min_num_params",
        "mixed_precision_policy",
        "reshard_after_forward",
        "sharding_strategy",
        "state_dict_type",
        "sync_module_states",
        "transformer_cls_names_to_wrap",
        "use_orig_params",
    }
)
"""Keys of an --fsdp-config file: fields of Accelerate's FullyShardedDataParallelPlugin."""

_FSDP_FILE_NAMES = {
    "offload_params": "cpu_offload",
    "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
    "version": "fsdp_version",
}


def load_config(given: str | Path) -> Plain:
    """Return what --fsdp-config or --deepspeed-config say: JSON, or a file of JSON or YAML.

    What begins with a brace is JSON, anything else a file. YAML is read with the safe loader.
    An Accelerate config file works too: its `fsdp_config` section is taken.

    Raises:
        OptionError: the file cannot be read, is neither JSON nor YAML, or is not a mapping.
    """
    if str(given).startswith("{"):
        return _inline(str(given))
    return _load_file(given)


def _inline(text: str) -> Plain:
    """Parse JSON that stands in the line."""
    try:
        content: Plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"{text[:_SHOWN]} is not JSON ({error}); put it in single quotes, or name a file."
        raise OptionError(message) from error
    return content


def _load_file(path: str | Path) -> Plain:
    """Read a file."""
    file = expanded(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read the config file {str(path)!r}: {error}."
        raise OptionError(message) from error
    content = _parsed(text, file)
    section = content.get("fsdp_config", content) if isinstance(content, dict) else content
    if not isinstance(section, dict) or not all(isinstance(key, str) for key in section):
        message = f"{str(path)!r} holds {type(section).__name__}, not a mapping of names to values."
        raise OptionError(message)
    return section


def _parsed(text: str, file: Path) -> object:
    """Parse JSON, or YAML where the name says so."""
    if file.suffix not in {".yaml", ".yml"}:
        try:
            parsed: object = json.loads(text)
        except (ValueError, RecursionError) as error:
            message = f"{str(file)!r} is not JSON ({error}); name it .yaml if it is YAML."
            raise OptionError(message) from error
        return parsed
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        message = f"{str(file)!r} is not YAML: {' '.join(str(error).split())}."
        raise OptionError(message) from error


def shown(given: object) -> str:
    """What was given, for a message: it may be as long as a file."""
    text = repr(given)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _agree(option: str, given: object, key: str, filed: object, *, unset: object) -> Any:
    """Return the value that the option and the file say; refuse two different ones."""
    if filed in (None, "auto", given):
        return given
    if given == unset:
        return filed
    message = (
        f"{option} is {shown(given)} but the config file says {key} = {shown(filed)}; keep one of"
        " them."
    )
    raise OptionError(message)


def with_fsdp_file(options: Options, content: Mapping[str, Any]) -> Options:
    """Take over what an FSDP config file says, in the plugin's own names."""
    plain: Plain = {}
    for key, value in content.items():
        short = key.removeprefix("fsdp_")
        plain[_FSDP_FILE_NAMES.get(short, short)] = value
    unknown = sorted(plain.keys() - FSDP_KEYS)
    if unknown:
        message = (
            f"the fsdp_config has unknown keys: {', '.join(unknown)[:_SHOWN]}; "
            f"known are {', '.join(sorted(FSDP_KEYS))}."
        )
        raise OptionError(message)
    version = plain.pop("fsdp_version", None)
    if version is not None and str(version) != str(options.strategy.level):
        named = str(version)[:_SHOWN]
        message = (
            f"the fsdp_config is for version {named} but the backend is {options.backend}; "
            f"use backend fsdp{named}."
        )
        raise OptionError(message)
    if "reshard_after_forward" in plain:
        plain["reshard_after_forward"] = _resharding(
            plain["reshard_after_forward"], options.strategy.level
        )
    offload = "cpu" if plain.pop("cpu_offload", False) else None
    checkpointing = plain.pop("activation_checkpointing", None)
    return replace(
        options,
        fsdp_config=plain,
        offload=_agree("offload", options.offload, "cpu_offload", offload, unset="none"),
        activation_checkpointing=bool(checkpointing) or options.activation_checkpointing,
    )


def _resharding(value: object, version: int) -> object:
    """Return what accelerate 1.15 takes: a truth under FSDP2, a strategy's name under FSDP1."""
    truth = {"true": True, "false": False}.get(str(value).lower())
    if version == 1 and truth is None:
        return value
    if version != 1 and truth is not None:
        return truth
    allowed = "true or false" if version != 1 else "FULL_SHARD; keep gathered by sharding_strategy"
    given = shown(value)
    message = f"reshard_after_forward is {given} in the fsdp_config; fsdp{version} takes {allowed}."
    raise OptionError(message)


def with_deepspeed_file(options: Options, content: Mapping[str, Any]) -> Options:
    """Take over what a DeepSpeed config file says."""
    zero = content.get("zero_optimization", {})
    for name, section in {"zero_optimization": zero, **_sections(zero)}.items():
        if not isinstance(section, dict):
            message = f"{name} of the deepspeed_config is not a mapping."
            raise OptionError(message)
    stage = zero.get("stage", "auto")
    if stage not in ("auto", options.strategy.level):
        named = str(stage)[:_SHOWN]
        message = (
            f"the deepspeed_config has ZeRO stage {named} but the backend is {options.backend}; "
            f"use backend zero{named} or change the stage."
        )
        raise OptionError(message)
    accumulate = content.get("gradient_accumulation_steps")
    clipping = content.get("gradient_clipping") or None
    return replace(
        options,
        deepspeed_config=_without_ours(content, options.strategy.level),
        accumulate=_agree(
            "accumulate",
            options.accumulate,
            "gradient_accumulation_steps",
            accumulate,
            unset=1,
        ),
        clip=_agree("clip", options.clip, "gradient_clipping", clipping, unset=None),
        precision=_agree(
            "precision", options.precision, "precision", _filed_precision(content), unset=None
        ),
        offload=_agree(
            "offload", options.offload, "offload_optimizer", _filed_offload(zero), unset="none"
        ),
        offload_params=options.offload_params or _filed_device(zero, "offload_param") != "none",
    )


def _without_ours(content: Mapping[str, Any], stage: int) -> Plain:
    """Return the file without what the options say."""
    plain = {
        key: value
        for key, value in content.items()
        if key not in {"gradient_clipping", "gradient_accumulation_steps"}
    }
    zero = dict(content.get("zero_optimization", {})) | {"stage": stage}
    sections = _sections(zero)
    zero = {name: value for name, value in zero.items() if name not in _SECTIONS}
    for name, section in sections.items():
        # Where to offload is an option by now; what is left tunes it.
        tuning = {k: v for k, v in section.items() if k not in _PLACE}
        if tuning:
            zero[name] = tuning
    plain["zero_optimization"] = zero
    return plain


_PLACE = ("device", "nvme_path")
_SECTIONS = ("offload_optimizer", "offload_param")


def _sections(zero: object) -> Plain:
    """ZeRO's offload sections, those that say something."""
    if not isinstance(zero, dict):
        return {}
    return {name: zero[name] for name in _SECTIONS if zero.get(name) is not None}


def _filed_precision(content: Mapping[str, Any]) -> str | None:
    """Return fp16 or bf16 where the DeepSpeed config enables it."""
    for name in ("fp16", "bf16"):
        section = content.get(name)
        if isinstance(section, dict) and section.get("enabled") is True:
            return name
    return None


def _filed_device(zero: Mapping[str, Any], key: str) -> str:
    """Return the device of one of ZeRO's offload sections."""
    section = zero.get(key)
    return str(section.get("device") or "none") if isinstance(section, dict) else "none"


def _filed_offload(zero: Mapping[str, Any]) -> str | None:
    """Return the offload that a DeepSpeed config asks for, in our words."""
    device = _filed_device(zero, "offload_optimizer")
    if device == "none":
        return None
    path = zero["offload_optimizer"].get("nvme_path") or ""
    return f"nvme:{path}" if device == "nvme" else device
