"""Accelerate's config file, in both directions: `%nbdist script` writes one, --config reads one.

accelerate 1.15 itself reads the file in accelerate.commands.config, which imports torch; the
notebook's kernel must not. A test compares the keys with its `ClusterConfig`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.errors import OptionError
from nbdist.paths import expand_user
from nbdist.strategies.backends import canonical_backend
from nbdist.strategies.config_files import abbreviate, enabled_precision, load_mapping

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.strategies.backends import Hardware, JsonObject, Options

_ENGINES = {
    "NO": "ddp",
    "MULTI_CPU": "ddp",
    "MULTI_GPU": "ddp",
    "FSDP": "fsdp",
    "DEEPSPEED": "deepspeed",
}
"""distributed_type of the file -> engine."""
READ_KEYS = frozenset(
    {
        "compute_environment",
        "deepspeed_config",
        "distributed_type",
        "dynamo_config",
        "fsdp_config",
        "gpu_ids",
        "mixed_precision",
        "num_processes",
        "use_cpu",
    }
)
KEYS_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "command_file": (),
    "commands": (),
    "debug": (),
    "downcast_bf16": ("no",),
    "enable_cpu_affinity": (),
    "fp8_config": (),
    "machine_rank": (),
    "main_process_ip": (),
    "main_process_port": (),
    "main_training_function": ("main",),
    "megatron_lm_config": (),
    "mpirun_config": (),
    "num_machines": (1,),
    "parallelism_config": (),
    "rdzv_backend": ("static", "c10d"),
    "same_network": (True,),
    "tpu_env": (),
    "tpu_name": (),
    "tpu_use_cluster": (),
    "tpu_use_sudo": (),
    "tpu_vm": (),
    "tpu_zone": (),
}
"""Other keys of the file -> values that change nothing, besides null, false, 0 and empty ones."""
_FSDP_DONE = frozenset({"cpu_ram_efficient_loading", "sync_module_states"})
"""Keys of fsdp_config for what a session always does: see --sharded-load."""
_FSDP_ALONE = frozenset({"activation_checkpointing_offload"})
"""Keys of fsdp_config that have no effect in a session."""
_DEEPSPEED_KEYS = frozenset(
    {
        "gradient_accumulation_steps",
        "gradient_clipping",
        "offload_optimizer_device",
        "offload_optimizer_nvme_path",
        "offload_param_device",
        "offload_param_nvme_path",
        "zero_stage",
    }
)
_DEEPSPEED_DONE = frozenset({"deepspeed_config_file", "zero3_save_16bit_model"})


def load_accelerate_config(config: str) -> JsonObject:
    """Load the value of --config, with the DeepSpeed file that it names.

    Raises:
        OptionError: one of the files cannot be read.
    """
    content = load_mapping(config)
    section = content.get("deepspeed_config")
    named = section.get("deepspeed_config_file") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(named, str):
        return content
    # Accelerate reads it from the working directory; beside the file is where a user puts it.
    beside = expand_user(config).parent / named
    file = str(beside) if beside.is_file() else named
    return content | {"deepspeed_config": section | {"deepspeed_config_file": load_mapping(file)}}


def read_accelerate_config(content: Mapping[str, Any]) -> tuple[JsonObject, list[str]]:
    """Return the options of a session that a config sets, and the keys that have no effect.

    Args:
        content: of Accelerate's config file, or of a DeepSpeed config.

    Raises:
        OptionError: unknown keys, or a kind of training that no session supports.
    """
    if "zero_optimization" in content:
        return _deepspeed_file_options(content), []
    if unknown := sorted(
        content.keys() - READ_KEYS - KEYS_WITHOUT_EFFECT.keys() - {"dynamo_backend"}
    ):
        raise OptionError(
            f"Unknown keys in the config file: {abbreviate(', '.join(unknown))}. Remove them, or"
            " use a file that `accelerate config` or `%nbdist script` wrote."
        )
    environment = content.get("compute_environment", "LOCAL_MACHINE")
    if content.get("distributed_type") is False:  # YAML reads NO as false
        content = {**content, "distributed_type": "NO"}
    kind = str(content.get("distributed_type"))
    if environment != "LOCAL_MACHINE" or kind not in _ENGINES:
        what = f"distributed_type {kind}" if environment == "LOCAL_MACHINE" else environment
        raise OptionError(
            f"A session cannot run the config's {abbreviate(what)}. Use distributed_type"
            f" {', '.join(_ENGINES)}."
        )
    sizes = content.get("parallelism_config") or {}
    for name in [f"parallelism_config_{kind}_size" for kind in ("tp", "cp", "sp")]:
        if sizes.get(name) not in {None, 1}:  # these change the training
            raise OptionError(
                f"A session cannot run the config's parallelism_config: {name} is {sizes[name]!r}."
                " Set it to 1; docs/scope.md lists what to use instead."
            )
    options: JsonObject = {"precision": str(content.get("mixed_precision") or "no")}
    ignored = [
        key
        for key, harmless in KEYS_WITHOUT_EFFECT.items()
        if content.get(key) and content[key] not in harmless
    ]
    if _ENGINES[kind] == "ddp":
        options["backend"] = "ddp"
    others = [f"{engine}_config" for engine in _SECTIONS if engine != _ENGINES[kind]]
    ignored += [key for key in others if content.get(key)]
    for read in (_rank_options, _compile_options, *_SECTIONS[_ENGINES[kind]]):
        more, unused = read(content)
        options |= more
        ignored += unused
    return options, ignored


def _rank_options(content: Mapping[str, Any]) -> tuple[JsonObject, list[str]]:
    options: JsonObject = {}
    processes, ignored = content.get("num_processes", -1), []
    if content.get("distributed_type") == "NO":  # Accelerate starts a single process
        ignored = ["num_processes"] if processes not in (-1, 1) else []
        processes = 1
    if processes != -1:
        options["nproc"] = processes
    if content.get("use_cpu"):
        options["devices"] = "none"
    elif content.get("gpu_ids") not in (None, "all"):
        options["devices"] = str(content["gpu_ids"])
    return options, ignored


def _compile_options(content: Mapping[str, Any]) -> tuple[JsonObject, list[str]]:
    dynamo = {
        key.removeprefix("dynamo_"): value
        for key, value in _section(content, "dynamo_config").items()
    }
    backend = str(dynamo.pop("backend", content.get("dynamo_backend") or "no")).lower()
    regional = dynamo.pop("use_regional_compilation", False)
    ignored = [
        f"dynamo_{key}" for key, value in dynamo.items() if value not in (None, False, "default")
    ]
    if backend == "inductor":
        return {"compile" if regional else "compile_model": True}, ignored
    return {}, ignored + ([] if backend == "no" else [f"dynamo_backend {backend}"])


def _fsdp_options(content: Mapping[str, Any]) -> tuple[JsonObject, list[str]]:
    named = {
        key.removeprefix("fsdp_"): value
        for key, value in _section(content, "fsdp_config").items()
        if value not in (None, "None")
    }
    version = named.pop("version", 1)  # accelerate 1.15's default
    if version not in (1, 2):
        raise OptionError(f"fsdp_version must be 1 or 2, got {abbreviate(version)}.")
    ignored = [f"fsdp_{key}" for key in sorted(_FSDP_ALONE) if named.get(key)]
    config = {k: v for k, v in named.items() if k not in _FSDP_DONE | _FSDP_ALONE}
    return {"backend": f"fsdp{version}", "fsdp_config": config}, ignored


def _deepspeed_options(content: Mapping[str, Any]) -> tuple[JsonObject, list[str]]:
    section = _section(content, "deepspeed_config")
    ignored = [
        key
        for key, value in section.items()
        if value and key not in _DEEPSPEED_KEYS | _DEEPSPEED_DONE
    ]
    file = section.get("deepspeed_config_file")
    if isinstance(file, dict):
        clash = sorted(section.keys() & _DEEPSPEED_KEYS)
        if clash:  # accelerate 1.15 refuses these, too
            raise OptionError(
                f"The config file has {', '.join(clash)} in addition to deepspeed_config_file."
                " Set them in the DeepSpeed file only."
            )
        return _deepspeed_file_options(file), ignored
    options: JsonObject = {"backend": _zero_backend(section.get("zero_stage", 2))}
    for key, name in (("gradient_accumulation_steps", "accumulate"), ("gradient_clipping", "clip")):
        if section.get(key) not in (None, "auto"):
            options[name] = section[key]
    device = str(section.get("offload_optimizer_device") or "none")
    if device != "none":
        path = section.get("offload_optimizer_nvme_path") or ""
        options["offload"] = f"nvme:{path}" if device == "nvme" else device
    if str(section.get("offload_param_device") or "none") != "none":
        options["offload_params"] = True
    return options, ignored


def _deepspeed_file_options(content: Mapping[str, Any]) -> JsonObject:
    """Return the options of a DeepSpeed config; "auto" values stay for the engine."""
    zero = content.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    options: JsonObject = {"backend": _zero_backend(stage), "deepspeed_config": dict(content)}
    sections = [content.get(name) for name in ("fp16", "bf16")]
    is_auto = any(isinstance(part, dict) and part.get("enabled") == "auto" for part in sections)
    precision = enabled_precision(content)
    if precision or not is_auto:  # "auto": mixed_precision of Accelerate's file
        options["precision"] = precision or "no"
    return options


_SECTIONS = {"ddp": (), "fsdp": (_fsdp_options,), "deepspeed": (_deepspeed_options,)}


def _zero_backend(stage: object) -> str:
    if stage not in (1, 2, 3):
        raise OptionError(
            f"The config file has ZeRO stage {abbreviate(stage)}. Use stage 1, 2 or 3, or"
            " distributed_type MULTI_GPU for DDP."
        )
    return f"zero{stage}"


def _section(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = content.get(name) or {}
    if not isinstance(section, dict):
        raise OptionError(f"{name} of the config file must be a mapping.")
    return section


def merge_config_file(options: Mapping[str, Any]) -> tuple[JsonObject, list[str]]:
    """Replace the option `config` by the options that it sets; return also what has no effect.

    A number of ranks or devices that is given as an option takes precedence over the file.

    Raises:
        OptionError: another option differs from the file.
    """
    given = {name: value for name, value in options.items() if name != "config"}
    if not options.get("config"):
        return given, []
    filed, ignored = read_accelerate_config(options["config"])
    if {"nproc", "devices"} & {name for name, value in given.items() if value is not None}:
        filed = {k: v for k, v in filed.items() if k not in {"nproc", "devices"}}
    if given.get("auto"):
        raise OptionError("auto chooses the backend, but the config file names one. Use only one.")
    for name, value in filed.items():
        own = given.get(name)
        if name == "backend" and own is not None:
            own = canonical_backend(own)
        if own not in (None, value):
            raise OptionError(
                f"{name} is {abbreviate(own)} but the config file has {abbreviate(value)}. Remove"
                " one of them."
            )
    return given | filed, ignored


def write_accelerate_config(
    options: Options,
    hardware: Hardware,
    *,
    devices: Sequence[int] | None,
    deepspeed_file: str,
) -> JsonObject:
    """Return the content of an Accelerate config file for validated options.

    Args:
        options: of the session.
        hardware: of its ranks.
        devices: GPUs of this machine, if a part of them was chosen.
        deepspeed_file: name of the DeepSpeed config, for a DeepSpeed backend.
    """
    strategy, world_size = options.strategy, hardware.world_size
    kind = {"ddp": "MULTI_GPU", "fsdp": "FSDP", "deepspeed": "DEEPSPEED"}[strategy.engine]
    content: JsonObject = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO" if kind == "MULTI_GPU" and world_size == 1 else kind,
        "num_processes": world_size,
        "num_machines": hardware.nodes,
        "machine_rank": 0,
        # accelerate 1.15 starts one process, without an engine, with use_cpu.
        "use_cpu": False,
    }
    if devices:
        content["gpu_ids"] = ",".join(map(str, devices))
    if options.is_compiled:
        regional = not options.compile_model
        content["dynamo_config"] = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_use_regional_compilation": regional,
        }
    if strategy.engine == "deepspeed":
        # accelerate 1.15 takes the precision from the DeepSpeed file, and refuses it here.
        section = {"deepspeed_config_file": deepspeed_file, "zero3_init_flag": False}
        return content | {"deepspeed_config": section}
    content["mixed_precision"] = options.precision
    if strategy.engine == "fsdp":
        content["fsdp_config"] = _fsdp_section(options)
    if sizes := strategy.parallelism_kwargs(options, hardware):
        content["parallelism_config"] = {f"parallelism_config_{k}": v for k, v in sizes.items()}
    return content


def _fsdp_section(options: Options) -> JsonObject:
    kwargs = options.strategy.fsdp_kwargs(options)
    names = {
        "cpu_offload": "offload_params",
        "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    }
    section = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"} | {
        names.get(key.removeprefix("fsdp_"), key.removeprefix("fsdp_")): value
        for key, value in kwargs.items()
    }
    # runtime.py broadcasts the weights of rank 0. accelerate 1.15 would do it only with FSDP1.
    section["sync_module_states"] = False
    section["activation_checkpointing"] = False  # runtime.py: the same for all engines
    if isinstance(wrapped := section.get("transformer_layer_cls_to_wrap"), (list, tuple)):
        section["transformer_layer_cls_to_wrap"] = ",".join(wrapped)
    return {f"fsdp_{key}": value for key, value in section.items()}


def write_deepspeed_config(options: Options, hardware: Hardware) -> JsonObject:
    """Return the DeepSpeed config of a session; Accelerate or a Trainer fill "auto"."""
    config = options.strategy.deepspeed_config(options, hardware)
    if options.accumulate > 1:
        config["gradient_accumulation_steps"] = options.accumulate
    return config | {
        name: {"enabled": True} for name in ("fp16", "bf16") if options.precision == name
    }
