"""Loads the user's FSDP and DeepSpeed config files and merges them with the options.

Used by ``strategies.Options.validate`` and by the commands that take --fsdp-config or
--deepspeed-config; both also accept inline JSON. A value that is set in the file and as an option
must agree. A value that is set only in the file becomes the option. All other keys are passed to
the engine unchanged.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from nbdist.errors import OptionError
from nbdist.paths import expand_user

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

JsonObject = dict[str, Any]
_SHOWN = 200
"""Maximum number of characters of a value in a message."""

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

_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
_FSDP_FILE_NAMES = {
    "offload_params": "cpu_offload",
    "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
    "version": "fsdp_version",
}


# Paths of a DeepSpeed config (deepspeed 0.19.8, runtime/config.py and runtime/zero/config.py) with
# the type of their values; object: any, or checked elsewhere. A section precedes its keys.
_DEEPSPEED_PLANNED: Mapping[str, type] = {
    "aio": dict,
    "bf16": dict,
    "dump_state": bool,
    "fp16": dict,
    "gradient_accumulation_steps": object,
    "gradient_clipping": object,
    "memory_breakdown": bool,
    "scheduler": dict,
    "steps_per_print": object,
    "train_batch_size": int,
    "train_micro_batch_size_per_gpu": int,
    "wall_clock_breakdown": bool,
    "zero_allow_untested_optimizer": bool,
    "zero_optimization": dict,
    "zero_optimization.contiguous_gradients": bool,
    "zero_optimization.ignore_unused_parameters": bool,
    "zero_optimization.load_from_fp32_weights": bool,
    "zero_optimization.log_trace_cache_warnings": bool,
    "zero_optimization.offload_optimizer": dict,
    "zero_optimization.offload_param": dict,
    "zero_optimization.overlap_comm": bool,
    "zero_optimization.reduce_bucket_size": float,
    "zero_optimization.stage": object,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": bool,
    "zero_optimization.stage3_max_live_parameters": float,
    "zero_optimization.stage3_max_reuse_distance": float,
    "zero_optimization.stage3_param_persistence_threshold": float,
    "zero_optimization.stage3_prefetch_bucket_size": float,
    "zero_optimization.sub_group_size": float,
}
"""Settings that the planner reads, or that change neither memory nor speed."""
DEEPSPEED_TYPES: Mapping[str, type] = {
    **_DEEPSPEED_PLANNED,
    "activation_checkpointing": dict,
    "bf16.enabled": bool,
    "flops_profiler": dict,
    "fp16.enabled": bool,
    "optimizer": dict,
    "optimizer.params": dict,
    "optimizer.type": str,
    "scheduler.params": dict,
    "scheduler.type": str,
    "zero_force_ds_cpu_optimizer": bool,
    "zero_optimization.allgather_bucket_size": float,
    "zero_optimization.allgather_partitions": bool,
    "zero_optimization.reduce_scatter": bool,
}
"""Type of each value that is checked."""
_TYPE_WORDS: Mapping[type, str] = {
    bool: 'true, false or "auto"',
    dict: "a section of keys and values",
    float: 'a number >= 0 or "auto"',
    int: 'an integer >= 1 or "auto"',
    str: "text",
}
_FSDP_NOT_PLANNED = frozenset(
    {
        "auto_wrap_policy",
        "backward_prefetch",
        "forward_prefetch",
        "ignored_modules",
        "limit_all_gathers",
        "min_num_params",
        "mixed_precision_policy",
        "transformer_cls_names_to_wrap",
    }
)
"""Keys of an fsdp_config that change memory or speed, and that the planner does not read."""
_ZERO_REFUSED = {
    "cpu_offload": "Use offload cpu",
    "cpu_offload_param": "Use offload_params with offload cpu",
    **dict.fromkeys(
        (
            "mics_hierarchical_params_gather",
            "mics_shard_size",
            "zenflow",
            "zero_hpz_partition_size",
            "zero_quantized_gradients",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_weights",
        ),
        "Remove it",
    ),
}
_SECTIONS_REFUSED = frozenset(
    {
        "compression_training",
        "elasticity",
        "hybrid_engine",
        "pipeline",
        "quantize_training",
        "sequence_parallel_size",
        "tensor_parallel",
    }
)
_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")
"""Types of DeepSpeed's 1-bit optimizers (runtime/config.py)."""


def _is_off(value: object) -> bool:
    """True if a refused key does nothing with this value."""
    is_default = type(value) is int and value in {-1, 0, 1}  # of groups and sizes
    return is_default or value is None or value is False or value == "auto"


def unplanned_settings(
    fsdp_config: Mapping[str, Any] | None, deepspeed_config: Mapping[str, Any] | None
) -> list[str]:
    """Return the keys of validated configs that predictions of memory and speed ignore."""
    fsdp, deepspeed = fsdp_config or {}, deepspeed_config or {}
    keys = sorted(_FSDP_NOT_PLANNED & fsdp.keys())
    zero = deepspeed.get("zero_optimization") or {}
    paths = [*sorted(deepspeed), *(f"zero_optimization.{key}" for key in sorted(zero))]
    keys += [path for path in paths if path not in _DEEPSPEED_PLANNED]
    return [abbreviate(key).strip("'") for key in keys]


def _check_types(content: Mapping[str, Any]) -> None:
    """Raise for a value of another type than its key has; null stands for the default."""
    for path, kind in DEEPSPEED_TYPES.items():
        value: Any = content
        for key in path.split("."):
            value = (value or {}).get(key)
        if value is not None and not _has_type(value, kind):
            raise OptionError(
                f"{path} of the deepspeed_config must be {_TYPE_WORDS[kind]}, got"
                f" {abbreviate(value)}."
            )


def _has_type(value: Any, kind: type) -> bool:
    if value == "auto":
        return kind is not dict
    if kind is int:
        return type(value) is int and value >= 1
    if kind is float:
        return type(value) in {int, float} and 0 <= value < float("inf")
    return isinstance(value, kind)


def _refuse_unsupported(content: Mapping[str, Any], zero: Mapping[str, Any]) -> None:
    """Raise for misspelled settings, and for those that nbdist can neither plan nor move."""
    for key in content:  # deepspeed 0.19.8 ignores unknown ones
        close_keys = get_close_matches(str(key), DEEPSPEED_TYPES, n=1, cutoff=0.85)
        if close_keys and key not in DEEPSPEED_TYPES:
            raise OptionError(f"DeepSpeed has no setting {key}. Did you mean {close_keys[0]}?")
    found = [(key, "Remove it") for key in sorted(_SECTIONS_REFUSED & content.keys())]
    found += [
        (f"zero_optimization.{key}", action)
        for key, action in _ZERO_REFUSED.items()
        if not _is_off(zero.get(key))
    ]
    kind = str((content.get("optimizer") or {}).get("type"))
    if kind.lower() in _ONE_BIT:
        found.append((f"optimizer type {kind}", "Use Adam or AdamW"))
    for name, action in found:
        raise OptionError(
            f"The deepspeed_config has {name}, which nbdist can neither plan, save nor switch."
            f" {action}."
        )


def load_config(config: str | Path) -> JsonObject:
    """Load the value of --fsdp-config or --deepspeed-config.

    In an Accelerate config file the `fsdp_config` section is used.

    Raises:
        OptionError: as `load_mapping`.
    """
    content = load_mapping(config)
    return _check_mapping(content.get("fsdp_config", content), config)


def load_mapping(config: str | Path) -> JsonObject:
    """Load inline JSON, or a JSON or YAML file.

    Text that starts with a brace is JSON, anything else a path. YAML is read with the safe loader.

    Raises:
        OptionError: the file cannot be read, is neither JSON nor YAML, or is not a mapping.
    """
    if str(config).startswith("{"):
        try:
            inline: JsonObject = json.loads(str(config))
        except (ValueError, RecursionError) as error:
            shown = str(config)[:_SHOWN]
            raise OptionError(
                f"{shown} is not JSON ({error}). Put it in single quotes, or name a file."
            ) from error
        return inline
    import yaml  # only here: most sessions have no config file

    file = expand_user(config)
    is_yaml = file.suffix in {".yaml", ".yml"}
    try:
        text = file.read_text(encoding="utf-8-sig")
        content: Any = yaml.safe_load(text) if is_yaml else json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"Cannot read the config file {str(config)!r}: {reason}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = f"is not JSON ({error}). Name it .yaml if it is YAML."
        if is_yaml:
            problem = f"is not YAML: {' '.join(str(error).split())}. Correct the file."
        raise OptionError(f"The config file {str(file)!r} {problem}") from error
    return _check_mapping(content, config)


def _check_mapping(content: Any, config: str | Path) -> JsonObject:
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        kind = type(content).__name__
        raise OptionError(
            f"The config file {str(config)!r} must contain a mapping with string keys, got {kind}."
        )
    return content


def abbreviate(config: object) -> str:
    """Return the repr of a value for a message, shortened."""
    text = repr(config)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _check_agreement(option: str, value: object, key: str, filed: object, *, unset: object) -> Any:
    """Return the value of an option that may also be in the file; raise if the two differ."""
    if filed in (None, "auto", value):
        return value
    if value == unset:
        return filed
    raise OptionError(
        f"{option} is {abbreviate(value)} but the config file has {key} = {abbreviate(filed)}."
        " Remove one of them."
    )


def read_fsdp_config(
    content: Mapping[str, Any], options: Mapping[str, Any], version: int
) -> JsonObject:
    """Return the options that an FSDP config file sets.

    Args:
        content: the file's keys, named as in Accelerate's config file or in its plugin.
        options: the fields of `Options` that the user gave.
        version: FSDP version of the backend.
    """
    plain: JsonObject = {}
    for key, value in content.items():
        short = str(key).removeprefix("fsdp_")
        plain[_FSDP_FILE_NAMES.get(short, short)] = value
    unknown = sorted(plain.keys() - FSDP_KEYS)
    if unknown:
        raise OptionError(
            f"Unknown keys in the fsdp_config: {', '.join(unknown)[:_SHOWN]}. "
            f"Use {', '.join(sorted(FSDP_KEYS))}."
        )
    sharding = plain.get("sharding_strategy", _SHARDING[0])
    if str(sharding).upper() not in _SHARDING:
        raise OptionError(
            f"sharding_strategy {abbreviate(sharding)} in the fsdp_config is not supported. Use"
            f" {', '.join(_SHARDING)}, or fsdp2 with replicate_across nodes for HYBRID_SHARD."
        )
    file_version = plain.pop("fsdp_version", None)
    if str(file_version) not in {"1", "2", "None"}:
        raise OptionError(
            f"fsdp_version in the fsdp_config must be 1 or 2, got {abbreviate(file_version)}."
        )
    if str(file_version) not in {str(version), "None"}:
        raise OptionError(
            f"The fsdp_config is for version {file_version} but the backend is"
            f" {options['backend']}. Use backend fsdp{file_version}."
        )
    if "reshard_after_forward" in plain:
        plain["reshard_after_forward"] = _resharding(plain["reshard_after_forward"], version)
    offload = "cpu" if _truth(plain, "cpu_offload") else None
    checkpointing = _truth(plain, "activation_checkpointing")
    return {
        "fsdp_config": plain,
        "offload": _check_agreement(
            "offload", options["offload"], "cpu_offload", offload, unset="none"
        ),
        "activation_checkpointing": checkpointing or options["activation_checkpointing"],
    }


_BOOLEANS = {"true": True, "false": False}


def _truth(plain: JsonObject, key: str) -> bool:
    """Remove a switch from the file's content and return it."""
    value = plain.pop(key, None)
    truth = False if value is None else _BOOLEANS.get(str(value).lower())
    if truth is None:
        raise OptionError(
            f"{key} in the fsdp_config must be true or false, got {abbreviate(value)}."
        )
    return truth


def _resharding(value: object, version: int) -> object:
    """Return the value for accelerate 1.15: a bool under FSDP2, a strategy name under FSDP1."""
    truth = _BOOLEANS.get(str(value).lower())
    if version == 1 and (value is None or str(value).upper() in _SHARDING):
        return value
    if version != 1 and truth is not None:
        return truth
    allowed, hint = "true or false", ""
    if version == 1:
        allowed, hint = "FULL_SHARD", " To keep parameters gathered, use sharding_strategy."
    raise OptionError(
        f"reshard_after_forward in the fsdp_config of fsdp{version} must be {allowed},"
        f" got {abbreviate(value)}.{hint}"
    )


def read_deepspeed_config(
    content: Mapping[str, Any], options: Mapping[str, Any], stage: int
) -> JsonObject:
    """Return the options that a DeepSpeed config file sets.

    Args:
        content: the file's keys.
        options: the fields of `Options` that the user gave.
        stage: ZeRO stage of the backend.
    """
    _check_types(content)
    zero = content.get("zero_optimization") or {}
    _refuse_unsupported(content, zero)
    file_stage = zero.get("stage", "auto")
    if file_stage != "auto" and (type(file_stage) is not int or file_stage not in (1, 2, 3)):
        raise OptionError(
            f"stage in the deepspeed_config must be 1, 2 or 3, got {abbreviate(file_stage)}."
        )
    if file_stage not in ("auto", stage):
        raise OptionError(
            f"The deepspeed_config has ZeRO stage {file_stage} but the backend is"
            f" {options['backend']}. Use backend zero{file_stage} or change the stage."
        )
    accumulate = content.get("gradient_accumulation_steps")
    clipping = content.get("gradient_clipping") or None
    devices = {
        name: str(section.get("device") or "none") for name, section in _sections(zero).items()
    }
    offload = devices.get("offload_optimizer", "none")
    if offload == "nvme":
        offload = f"nvme:{zero['offload_optimizer'].get('nvme_path') or ''}"
    agreed = {
        name: _check_agreement(name, options[name], key, filed, unset=unset)
        for name, key, filed, unset in (
            ("accumulate", "gradient_accumulation_steps", accumulate, 1),
            ("clip", "gradient_clipping", clipping, None),
            ("precision", "precision", enabled_precision(content), None),
            ("offload", "offload_optimizer", None if offload == "none" else offload, "none"),
        )
    }
    return {
        "deepspeed_config": _without_options(content, stage),
        "offload_params": options["offload_params"]
        or devices.get("offload_param", "none") != "none",
        **agreed,
    }


def micro_batch_size(content: Mapping[str, Any], accumulate: int, ranks: int) -> int | None:
    """Return the samples per rank and micro-batch of a DeepSpeed config; None if it names none."""
    micro, total = _batch_sizes(content)
    return micro or (total and total // (accumulate * ranks))


def derive_accumulation(content: Mapping[str, Any], accumulate: int, ranks: int) -> int:
    """Return the micro-batches per step, which DeepSpeed derives if it has both batch sizes.

    Raises:
        OptionError: the batch sizes contradict each other.
    """
    micro, total = _batch_sizes(content)
    if total is None:
        return accumulate
    steps = content.get("gradient_accumulation_steps")
    if micro and accumulate == 1 and steps in (None, "auto"):
        accumulate = max(1, total // (micro * ranks))
    if total % (accumulate * ranks) or (micro and total != micro * accumulate * ranks):
        raise OptionError(
            f"train_batch_size of the deepspeed_config is {total}, which is not {micro or 'N'}"
            f" samples x {accumulate} micro-batches x {ranks} ranks. Correct it, or remove it."
        )
    return accumulate


def _batch_sizes(content: Mapping[str, Any]) -> list[int | None]:
    """Samples of one micro-batch, and of a step of all ranks; None for "auto" or none."""
    keys = ("train_micro_batch_size_per_gpu", "train_batch_size")
    return [content[key] if isinstance(content.get(key), int) else None for key in keys]


def enabled_precision(content: Mapping[str, Any]) -> str | None:
    """Return fp16 or bf16 if a DeepSpeed config turns it on."""
    for name in ("fp16", "bf16"):
        if isinstance(content.get(name), dict) and content[name].get("enabled") is True:
            return name
    return None


def _without_options(content: Mapping[str, Any], stage: int) -> JsonObject:
    """Return the file without null and the keys that are covered by options."""
    plain = {
        key: value
        for key, value in content.items()
        if value is not None and key not in {"gradient_clipping", "gradient_accumulation_steps"}
    }
    zero = plain.get("zero_optimization", {}) | {"stage": stage}
    sections = _sections(zero)
    zero = {k: v for k, v in zero.items() if v is not None and k not in _SECTIONS}
    for name, section in sections.items():
        # The offload device is already an option; the remaining keys tune it.
        tuning = {k: v for k, v in section.items() if k not in {"device", "nvme_path"}}
        if tuning:
            zero[name] = tuning
    plain["zero_optimization"] = zero
    return plain


_SECTIONS = ("offload_optimizer", "offload_param")


def _sections(zero: Mapping[str, Any]) -> JsonObject:
    """ZeRO's offload sections that are present."""
    return {name: zero[name] for name in _SECTIONS if zero.get(name) is not None}
