"""The table of backends: what each one shards, can do, and hands to its engine; pure.

Every process may import this; it needs the standard library only. `Options` is what a user
chose, `Hardware` is what the ranks run on, and a `Strategy` turns the two into plain
keyword arguments of Accelerate, FSDP, DeepSpeed and Trainer. What differs between the
backends is said here and nowhere else: a new backend is one more row of `STRATEGIES`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from nbdist.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

PRECISIONS = ("no", "fp16", "bf16", "fp8")
OFFLOADS = ("none", "cpu", "nvme:PATH")
ALIASES: Mapping[str, str] = MappingProxyType({"fsdp": "fsdp2"})

Engine = Literal["ddp", "fsdp", "deepspeed"]
Plain = dict[str, Any]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What the ranks run on, as far as a strategy must know."""

    kind: Literal["cpu", "cuda"] = "cpu"
    bf16: bool = False
    """The GPUs compute in bfloat16 (compute capability 8.0 or newer)."""
    fp8: bool = False
    """The GPUs compute in float8 and a library for it is installed."""
    world_size: int = 1
    deepspeed: bool = True
    """DeepSpeed is installed."""

    def to_json(self) -> Plain:
        """Return the fields for a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Hardware:
        """Rebuild from `to_json()`."""
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user chose for the engine; equal options mean equal engines."""

    backend: str = "ddp"
    precision: str | None = None
    """One of PRECISIONS; None means the default of the hardware."""
    offload: str = "none"
    """none, cpu, or nvme:PATH."""
    offload_params: bool = False
    activation_checkpointing: bool = False
    compile: bool = False
    accumulate: int = 1
    """Micro batches in one optimizer step."""
    clip: float | None = None
    """Largest gradient norm; None clips nothing."""
    fsdp_config: Mapping[str, Any] | None = None
    deepspeed_config: Mapping[str, Any] | None = None

    @property
    def strategy(self) -> Strategy:
        """The row of the table for the backend."""
        return STRATEGIES[canonical(self.backend)]

    @property
    def offload_device(self) -> str:
        """Return none, cpu or nvme."""
        return self.offload.partition(":")[0]

    @property
    def offload_path(self) -> str | None:
        """Folder of an NVMe offload."""
        return self.offload.partition(":")[2] or None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Options:
        """Build from named values; `checked()` looks at what they are.

        Raises:
            OptionError: a name that is not an option.
        """
        known = cls.__dataclass_fields__.keys()
        unknown = sorted(fields.keys() - known)
        if unknown:
            message = f"{', '.join(unknown)} is no option; use {', '.join(known)}."
            raise OptionError(message)
        return cls(**fields)

    def describe(self) -> str:
        """Backend and what differs from its defaults, in a few words."""
        words = [self.backend]
        words += [f"precision {self.precision}"] if self.precision not in {None, "no"} else []
        words += [f"offload {self.offload}"] if self.offload != "none" else []
        flags = ("offload_params", "activation_checkpointing", "compile")
        words += [name.replace("_", " ") for name in flags if getattr(self, name)]
        words += [f"accumulate {self.accumulate}"] if self.accumulate != 1 else []
        words += [f"clip {self.clip:g}"] if self.clip is not None else []
        return ", ".join(words)

    def to_json(self) -> Plain:
        """Return the fields for a message."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Options:
        """Rebuild from `to_json()`."""
        return cls(**fields)

    def checked(self, hardware: Hardware) -> Options:
        """Return the same options made complete, or say what cannot be.

        The backend gets its canonical name and the precision its default; what a config
        file says of clipping, accumulation, precision and offload is taken over.

        Raises:
            OptionError: an unknown value, something the engine or the hardware lacks, or
                two options that contradict each other; one sentence.
        """
        options = replace(self, backend=canonical(self.backend))
        _check_installed(options, hardware)
        _check_numbers(options)
        _check_config_owner(options)
        if options.fsdp_config is not None:
            options = _with_fsdp_file(options, options.fsdp_config)
        if options.deepspeed_config is not None:
            options = _with_deepspeed_file(options, options.deepspeed_config)
        _check_offload(options)
        return replace(options, precision=_precision(options, hardware))


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One backend: what it shards, which engine runs it, what it can do."""

    name: str
    title: str
    shards: tuple[str, ...]
    """What is split over the ranks: optimizer, gradients, parameters."""
    engine: Engine
    level: int
    """Of the engine's own numbering: FSDP version or ZeRO stage; 0 for DDP."""
    offloads: tuple[str, ...] = ("none",)
    offload_params: bool = False

    def accelerator_kwargs(self, options: Options) -> Plain:
        """Arguments of `Accelerator(...)` that every engine takes."""
        kwargs: Plain = {
            "mixed_precision": options.precision or "no",
            "gradient_accumulation_steps": options.accumulate,
        }
        return kwargs | ({"dynamo_backend": "inductor"} if options.compile else {})

    def fsdp_kwargs(self, options: Options) -> Plain:
        """Arguments of `FullyShardedDataParallelPlugin(...)`; the user's file wins."""
        kwargs: Plain = {
            "fsdp_version": self.level,
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_offload": options.offload_device == "cpu",
            "cpu_ram_efficient_loading": False,
        }
        kwargs |= _FSDP_VERSION_KWARGS[self.level]
        return kwargs | dict(options.fsdp_config or {})

    def deepspeed_config(self, options: Options, hardware: Hardware) -> Plain:
        """Return a DeepSpeed config; "auto" is filled by Accelerate, the user's file wins."""
        zero: Plain = {"stage": self.level} | _ZERO_STAGE_KEYS.get(self.level, {})
        zero |= _zero_offload(options, hardware)
        config: Plain = {
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            # accelerate 1.15 fills "auto" with 1.0 while the other engines do not clip.
            "gradient_clipping": options.clip or 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
        }
        if options.offload_device == "nvme":
            config["aio"] = dict(_AIO)
        return _merged(config, options.deepspeed_config or {})

    def training_arguments(self, options: Options, hardware: Hardware) -> Plain:
        """Arguments of `TrainingArguments(...)`; the engine itself comes from the session."""
        return {
            "use_cpu": hardware.kind == "cpu",
            "bf16": options.precision == "bf16",
            "fp16": options.precision == "fp16",
            "gradient_accumulation_steps": options.accumulate,
            # transformers 5.23 clips at 1.0 unless told otherwise.
            "max_grad_norm": options.clip or 0.0,
            # transformers 5.23 looks for unused parameters in every step and torch warns.
            "ddp_find_unused_parameters": False,
        }

    def extensions(self, options: Options, hardware: Hardware) -> tuple[str, ...]:
        """DeepSpeed ops to build before the ranks start, in DeepSpeed's own names."""
        if self.engine != "deepspeed":
            return ()
        return _OFFLOAD_OPS[options.offload_device]


_FSDP_VERSION_KWARGS: Mapping[int, Plain] = {
    1: {"use_orig_params": True, "sync_module_states": False},
    2: {"reshard_after_forward": True},
}
_ZERO_STAGE_KEYS: Mapping[int, Plain] = {
    3: {"stage3_gather_16bit_weights_on_model_save": True},
}
_AIO: Plain = {
    "block_size": 1 << 20,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}
_OFFLOAD_OPS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "cpu": ("cpu_adam",),
    # deepspeed 0.19: async_io takes its page-locked buffers from pin_memory.
    "nvme": ("cpu_adam", "pin_memory", "async_io"),
}

_ROWS = (
    Strategy(
        name="ddp",
        title="DDP: every rank holds everything",
        shards=(),
        engine="ddp",
        level=0,
    ),
    Strategy(
        name="fsdp2",
        title="FSDP2: parameters, gradients and optimizer state in shards",
        shards=("optimizer", "gradients", "parameters"),
        engine="fsdp",
        level=2,
        offloads=("none", "cpu"),
        offload_params=True,
    ),
    Strategy(
        name="fsdp1",
        title="FSDP1: as FSDP2, with flat parameters (older)",
        shards=("optimizer", "gradients", "parameters"),
        engine="fsdp",
        level=1,
        offloads=("none", "cpu"),
        offload_params=True,
    ),
    Strategy(
        name="zero1",
        title="DeepSpeed ZeRO-1: optimizer state in shards",
        shards=("optimizer",),
        engine="deepspeed",
        level=1,
        offloads=("none", "cpu"),
    ),
    Strategy(
        name="zero2",
        title="DeepSpeed ZeRO-2: optimizer state and gradients in shards",
        shards=("optimizer", "gradients"),
        engine="deepspeed",
        level=2,
        offloads=("none", "cpu"),
    ),
    Strategy(
        name="zero3",
        title="DeepSpeed ZeRO-3: parameters, gradients and optimizer state in shards",
        shards=("optimizer", "gradients", "parameters"),
        engine="deepspeed",
        level=3,
        offloads=("none", "cpu", "nvme"),
        offload_params=True,
    ),
)

STRATEGIES: Mapping[str, Strategy] = MappingProxyType({row.name: row for row in _ROWS})
BACKENDS: tuple[str, ...] = ("ddp", "fsdp", "fsdp2", "fsdp1", "zero1", "zero2", "zero3")


def canonical(name: str) -> str:
    """Return the backend's own name: fsdp is fsdp2.

    Raises:
        OptionError: no such backend.
    """
    resolved = ALIASES.get(name, name)
    if resolved not in STRATEGIES:
        message = f"{name!r} is not a backend; use one of {', '.join(BACKENDS)}."
        raise OptionError(message)
    return resolved


def load_config_file(path: str | Path) -> Plain:
    """Return the content of a JSON or YAML file for --fsdp-config or --deepspeed-config.

    YAML is read with the safe loader. An Accelerate config file works too: its
    `fsdp_config` section is taken.

    Raises:
        OptionError: the file cannot be read, is neither JSON nor YAML, or is not a mapping.
    """
    file = Path(path).expanduser()
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
        except ValueError as error:
            message = f"{str(file)!r} is not JSON ({error}); name it .yaml if it is YAML."
            raise OptionError(message) from error
        return parsed
    import yaml  # noqa: PLC0415 - only here, and not part of the standard library

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        message = f"{str(file)!r} is not YAML: {' '.join(str(error).split())}."
        raise OptionError(message) from error


def _merged(base: Plain, top: Mapping[str, Any]) -> Plain:
    """Return base with top's values, mappings merged key by key."""
    merged = dict(base)
    for key, value in top.items():
        inner: Any = merged.get(key)
        both = isinstance(inner, dict) and isinstance(value, dict)
        merged[key] = _merged(inner, value) if both else value
    return merged


def _zero_offload(options: Options, hardware: Hardware) -> Plain:
    """Return ZeRO's offload sections."""
    if options.offload_device == "none":
        return {}
    where: Plain = {"device": options.offload_device, "pin_memory": hardware.kind == "cuda"}
    if options.offload_path:
        where["nvme_path"] = options.offload_path
    sections: Plain = {"offload_optimizer": where}
    if options.offload_params:
        sections["offload_param"] = dict(where)
    return sections


def _backends_where(wanted: str) -> str:
    """Names of the backends that offload to a place."""
    return ", ".join(row.name for row in _ROWS if wanted in row.offloads)


def _check_installed(options: Options, hardware: Hardware) -> None:
    """Refuse a DeepSpeed backend without DeepSpeed."""
    if options.strategy.engine == "deepspeed" and not hardware.deepspeed:
        others = ", ".join(row.name for row in _ROWS if row.engine != "deepspeed")
        message = (
            f"backend {options.backend} needs DeepSpeed, which is not installed: "
            f"`pip install deepspeed`, or use {others}."
        )
        raise OptionError(message)


def _check_numbers(options: Options) -> None:
    """Refuse numbers without a meaning."""
    accumulate, clip = options.accumulate, options.clip
    if type(accumulate) is not int or accumulate < 1:
        message = f"accumulate is {accumulate!r}; it counts micro batches: 1, 2, 3, ..."
        raise OptionError(message)
    if clip is not None and not 0 < clip < float("inf"):
        message = f"clip is {clip!r}; it is the largest gradient norm: a number above 0."
        raise OptionError(message)


def _check_config_owner(options: Options) -> None:
    """Refuse a config file of another engine."""
    files = {"fsdp": options.fsdp_config, "deepspeed": options.deepspeed_config}
    for engine, content in files.items():
        if content is not None and options.strategy.engine != engine:
            owners = ", ".join(row.name for row in _ROWS if row.engine == engine)
            message = (
                f"a {engine}_config does not go with backend {options.backend}; it is for {owners}."
            )
            raise OptionError(message)


def _check_offload(options: Options) -> None:
    """Refuse an offload that the backend lacks."""
    device, strategy = options.offload_device, options.strategy
    if device not in {"none", "cpu", "nvme"} or (device != "nvme" and options.offload_path):
        message = f"offload {options.offload!r} is not known; use one of {', '.join(OFFLOADS)}."
        raise OptionError(message)
    if device == "nvme" and not options.offload_path:
        message = "offload nvme needs a folder on a fast local disk: nvme:/path/to/folder."
        raise OptionError(message)
    if device not in strategy.offloads:
        message = (
            f"backend {strategy.name} has no offload to {device}; "
            f"{_backends_where(device)} {'has' if device == 'nvme' else 'have'} it."
        )
        raise OptionError(message)
    if options.offload_params and not strategy.offload_params:
        able = ", ".join(row.name for row in _ROWS if row.offload_params)
        message = f"backend {strategy.name} cannot offload parameters; {able} can."
        raise OptionError(message)
    if options.offload_params and device == "none":
        message = "offload_params needs a place: add offload cpu (or nvme:PATH under zero3)."
        raise OptionError(message)


def _precision(options: Options, hardware: Hardware) -> str:
    """Return the precision, refused where the hardware lacks it."""
    precision = options.precision
    if precision is None:
        return "bf16" if hardware.kind == "cuda" and hardware.bf16 else "no"
    if precision not in PRECISIONS:
        message = f"precision {precision!r} is not known; use one of {', '.join(PRECISIONS)}."
        raise OptionError(message)
    here = {
        "no": True,
        "fp16": hardware.kind == "cuda",
        "bf16": hardware.kind == "cpu" or hardware.bf16,
        "fp8": hardware.kind == "cuda" and hardware.fp8,
    }
    if not here[precision]:
        allowed = ", ".join(name for name in PRECISIONS if here[name])
        message = f"precision {precision} needs {_NEEDS[precision]}; here these work: {allowed}."
        raise OptionError(message)
    return precision


_NEEDS = {
    "fp16": "a GPU",
    "bf16": "a GPU of compute capability 8.0 or newer",
    "fp8": "a GPU of compute capability 8.9 or newer and transformer-engine or torchao installed",
}


def _agree(option: str, given: object, key: str, filed: object, *, unset: object) -> Any:  # noqa: ANN401
    """Return the value that the option and the file say; refuse two different ones."""
    if filed is None or filed == "auto" or filed == given:
        return given
    if given == unset:
        return filed
    message = f"{option} is {given!r} but the config file says {key} = {filed!r}; keep one of them."
    raise OptionError(message)


def _with_fsdp_file(options: Options, content: Mapping[str, Any]) -> Options:
    """Take over what an FSDP config file says, in the plugin's own names."""
    plain: Plain = {}
    for key, value in content.items():
        short = key.removeprefix("fsdp_")
        plain[_FSDP_FILE_NAMES.get(short, short)] = value
    unknown = sorted(plain.keys() - FSDP_KEYS)
    if unknown:
        message = (
            f"the fsdp_config has unknown keys: {', '.join(unknown)}; "
            f"known are {', '.join(sorted(FSDP_KEYS))}."
        )
        raise OptionError(message)
    version = plain.pop("fsdp_version", None)
    if version is not None and int(version) != options.strategy.level:
        message = (
            f"the fsdp_config is for version {version} but the backend is {options.backend}; "
            f"use backend fsdp{version}."
        )
        raise OptionError(message)
    offload = "cpu" if plain.pop("cpu_offload", False) else None
    checkpointing = plain.pop("activation_checkpointing", None)
    return replace(
        options,
        fsdp_config=plain,
        offload=_agree("offload", options.offload, "cpu_offload", offload, unset="none"),
        activation_checkpointing=bool(checkpointing) or options.activation_checkpointing,
    )


def _with_deepspeed_file(options: Options, content: Mapping[str, Any]) -> Options:
    """Take over what a DeepSpeed config file says."""
    zero = content.get("zero_optimization", {})
    if not isinstance(zero, dict):
        message = "zero_optimization of the deepspeed_config is not a mapping."
        raise OptionError(message)
    stage = zero.get("stage", "auto")
    if stage not in ("auto", options.strategy.level):
        message = (
            f"the deepspeed_config has ZeRO stage {stage} but the backend is {options.backend}; "
            f"use backend zero{stage} or change the stage."
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
    for section in ("offload_optimizer", "offload_param"):
        # Where to offload is an option by now; what is left tunes it.
        tuning = {k: v for k, v in (zero.pop(section, None) or {}).items() if k not in _PLACE}
        if tuning:
            zero[section] = tuning
    plain["zero_optimization"] = zero
    return plain


_PLACE = ("device", "nvme_path")


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
