"""Table of backends: what each one shards, supports, and passes to its engine.

`Options` holds the user's choices, `Hardware` describes the devices of the ranks, and a `Strategy`
turns both into keyword arguments for Accelerate, FSDP, DeepSpeed and Trainer. All differences
between backends are in this module: a new backend is a new row of `STRATEGIES`. Needs only the
standard library, so that every process can import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Literal

from nbdist.errors import OptionError
from nbdist.strategies.config_files import (
    abbreviate,
    derive_accumulation,
    load_config,
    read_deepspeed_config,
    read_fsdp_config,
    unplanned_settings,
)
from nbdist.strategies.option_arguments import option, parse_clip_norm, strip_quotes

BACKENDS: tuple[str, ...] = ("ddp", "fsdp", "fsdp2", "fsdp1", "zero1", "zero2", "zero3")
PRECISIONS = ("no", "fp16", "bf16", "fp8")
OFFLOADS = ("none", "cpu", "nvme:PATH")
REPLICATE_ACROSS = ("none", "nodes")
ALIASES: Mapping[str, str] = {"fsdp": "fsdp2"}

Engine = Literal["ddp", "fsdp", "deepspeed"]
JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Properties of the ranks' devices that a strategy depends on."""

    kind: Literal["cpu", "cuda"] = "cpu"
    bf16: bool = False
    """True if the GPUs support bfloat16 (compute capability 8.0 or newer)."""
    fp8: bool = False
    """True if the GPUs support float8 and a library for it is installed."""
    world_size: int = 1
    deepspeed: bool = True
    """True if DeepSpeed is installed."""
    nodes: int = 1
    """Number of machines, with consecutive ranks and the same number of ranks on each."""

    @property
    def default_precision(self) -> str:
        """Precision of a session without --precision."""
        return "bf16" if self.kind == "cuda" and self.bf16 else "no"

    def to_json(self) -> JsonObject:
        """Return the fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the training engine; equal options mean equal engines.

    A field here is an option of `%%distribute` and `%nbdist switch`, a keyword of `Session`, and a
    row of docs/options.md.
    """

    backend: str = option(
        "ddp",
        short_flag="-b",
        metavar="NAME",
        help="ddp, fsdp (= fsdp2), fsdp1, zero1, zero2, zero3; prepared models are switched to it",
        values=BACKENDS,
        panel_limit=64,
    )
    precision: str | None = option(
        None,  # the default of the hardware
        metavar="NAME",
        help="no, fp16, bf16, fp8; default: bf16 if the hardware supports it, else no",
        values=PRECISIONS,
        panel_limit=64,
    )
    offload: str = option(
        "none",
        metavar="WHERE",
        help="where to offload optimizer state: none, cpu, nvme:PATH",
        values=("none", "cpu", "nvme:"),
        panel_limit=1024,
    )
    offload_params: bool = option(default=False, help="also offload the parameters", panel_limit=1)
    activation_checkpointing: bool = option(
        default=False, help="recompute activations in the backward pass", panel_limit=1
    )
    compile: bool = option(default=False, help="torch.compile each block of a model at prepare()")
    compile_model: bool = option(
        default=False, help="torch.compile the whole model, slower to start than --compile"
    )
    fsdp_config: Mapping[str, Any] | None = option(
        None,
        metavar="FILE",
        help="your own FSDP settings with Accelerate's names: a file or '{...}' inline",
        type=strip_quotes,
        load=load_config,
        can_be_unset=True,
    )
    deepspeed_config: Mapping[str, Any] | None = option(
        None,
        metavar="FILE",
        help="your own DeepSpeed config: a JSON or YAML file, or '{...}' inline",
        type=strip_quotes,
        load=load_config,
        can_be_unset=True,
    )
    replicate_across: str = option(
        "none",
        metavar="WHAT",
        help="nodes: shard parameters inside each node and replicate them across nodes (HSDP);"
        " needs fsdp and several nodes; default: none",
        values=REPLICATE_ACROSS,
        panel_limit=64,
    )
    sharded_load: bool = option(
        default=True,
        help="fsdp, fsdp1, zero3: a rank reads only its shards of a pretrained model; default: on",
    )
    accumulate: int = option(
        1, metavar="N", help="micro-batches per optimizer step", type=int, panel_limit=4096
    )
    clip: float | None = option(
        None,  # no clipping
        metavar="NORM",
        help="maximum gradient norm, or none",
        type=parse_clip_norm,
        can_be_unset=True,
    )

    @property
    def strategy(self) -> Strategy:
        """Strategy of the backend."""
        return STRATEGIES[canonical_backend(self.backend)]

    @property
    def is_compiled(self) -> bool:
        """True if blocks or the whole model are compiled."""
        return self.compile or self.compile_model

    @property
    def offload_device(self) -> str:
        """Offload device: none, cpu or nvme."""
        return self.offload.partition(":")[0]

    @property
    def offload_path(self) -> str | None:
        """Folder of an NVMe offload; None without one."""
        return self.offload.partition(":")[2] or None

    @property
    def reshard_after_forward(self) -> bool:
        """FSDP: True if parameters are resharded between forward and backward."""
        config = self.fsdp_config or {}
        # accelerate 1.15 has a default for sharding_strategy, which takes precedence under FSDP1.
        if self.strategy.is_flat:
            return str(config.get("sharding_strategy")).upper() != "SHARD_GRAD_OP"
        return str(config.get("reshard_after_forward")).upper() != "FALSE"

    @property
    def unplanned_note(self) -> str:
        """Sentence that names the settings that the planner ignores; "" if there are none."""
        keys = ", ".join(unplanned_settings(self.fsdp_config, self.deepspeed_config))
        return (
            f"Not planned, so memory and speed may differ from predictions: {keys}" if keys else ""
        )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Options:
        """Build from named values without validating them.

        Raises:
            OptionError: unknown option name.
        """
        cls.check_names(fields)
        return cls(**fields)

    @classmethod
    def check_names(cls, names: Iterable[str]) -> None:
        """Check that options exist.

        Raises:
            OptionError: unknown option name.
        """
        flags = {
            field.metadata["argument"].flag.removeprefix("--"): name
            for name, field in cls.__dataclass_fields__.items()
        }
        known = list(cls.__dataclass_fields__)
        for name in names:
            if name not in known:
                close = [flags[name]] if name in flags else get_close_matches(name, known, n=1)
                advice = f"Did you mean {close[0]}?" if close else f"Use {', '.join(known)}."
                raise OptionError(f"Unknown option {name}. {advice}")

    def describe(self) -> str:
        """Return the backend and all values that differ from its defaults."""
        words = [self.backend]
        for item in fields(self):
            name, value = item.name.replace("_", " "), getattr(self, item.name)
            if item.name == "fsdp_config":
                words += [] if self.reshard_after_forward else ["no reshard"]
            elif value in (item.default, "no") or item.name in {"backend", "deepspeed_config"}:
                continue
            elif isinstance(value, bool):
                words.append(name if value else f"no {name}")
            else:
                words.append(f"{name} {value:g}" if item.name == "clip" else f"{name} {value}")
        return ", ".join(words)

    def to_json(self) -> JsonObject:
        """Return the fields as JSON values."""
        return asdict(self)

    def validate(self, hardware: Hardware) -> Options:
        """Return validated options with defaults and config files applied.

        The backend gets its canonical name and the precision its default. Clipping, accumulation,
        precision and offload are taken over from a config file.

        Raises:
            OptionError: unknown value, unsupported by the engine or the hardware, or conflicting
                options.
        """
        _check_types(self)
        options = replace(self, backend=canonical_backend(self.backend))
        _check_engine(options, hardware)
        level = options.strategy.level
        # asdict would copy nested containers; a config may refer to the same one a million times.
        given = {field.name: getattr(options, field.name) for field in fields(options)}
        if options.fsdp_config is not None:
            filed = read_fsdp_config(options.fsdp_config, given, level)
            options = replace(options, **filed)
        if options.deepspeed_config is not None:
            filed = read_deepspeed_config(options.deepspeed_config, given, level)
            options = replace(options, **filed)
        _check_numbers(options)
        accumulate = derive_accumulation(
            self.deepspeed_config or {}, options.accumulate, hardware.world_size
        )
        _check_offload(options)
        _check_replication(options, hardware)
        return replace(options, accumulate=accumulate, precision=_precision(options, hardware))


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A backend: what it shards, which engine runs it, and what it supports."""

    name: str
    title: str
    shards: tuple[str, ...]
    """State sharded across the ranks: optimizer, gradients, parameters."""
    engine: Engine
    level: int
    """FSDP version or ZeRO stage; 0 for DDP."""
    offloads: tuple[str, ...] = ("none",)
    offload_params: bool = False
    can_skip_resharding: bool = False
    """`reshard_after_forward` can be turned off: more memory, half of the all-gathers."""
    can_replicate: bool = False
    """Supports hybrid sharding: shards inside a node, replicas across nodes."""
    is_legacy: bool = False
    """Superseded by another row."""

    @property
    def is_flat(self) -> bool:
        """True for FSDP1, whose shards are parts of flat parameters."""
        return (self.engine, self.level) == ("fsdp", 1)

    @property
    def steps_flat_parameters(self) -> bool:
        """True if optimizers step parts of flattened parameters, as under FSDP1 and ZeRO."""
        return self.is_flat or self.engine == "deepspeed"

    @property
    def trainer_state_files(self) -> str:
        """Pattern of the files in a Trainer's checkpoint that only this engine reads."""
        if self.engine == "deepspeed":
            name = "mp_rank_00_model_states.pt"
            return f"global_step*/{'zero_pp_rank_0_' if 'parameters' in self.shards else ''}{name}"
        return "optimizer_0" if self.engine == "fsdp" else "optimizer.pt"

    def accelerator_kwargs(self, options: Options) -> JsonObject:
        """Arguments of `Accelerator(...)` common to all engines."""
        kwargs: JsonObject = {
            "mixed_precision": options.precision or "no",
            "gradient_accumulation_steps": options.accumulate,
        }
        return kwargs | ({"dynamo_backend": "inductor"} if options.compile_model else {})

    def fsdp_kwargs(self, options: Options) -> JsonObject:
        """Arguments of `FullyShardedDataParallelPlugin(...)`; the user's file takes precedence."""
        kwargs: JsonObject = {
            "fsdp_version": self.level,
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_offload": options.offload_device == "cpu",
            "cpu_ram_efficient_loading": False,
        }
        kwargs |= _FSDP_VERSION_KWARGS[self.level]
        return kwargs | dict(options.fsdp_config or {})

    def parallelism_kwargs(self, options: Options, hardware: Hardware) -> JsonObject:
        """Arguments of `ParallelismConfig(...)`; empty without replication across nodes."""
        if options.replicate_across == "none":
            return {}
        nodes = hardware.nodes
        return {"dp_replicate_size": nodes, "dp_shard_size": hardware.world_size // nodes}

    def deepspeed_config(self, options: Options, hardware: Hardware) -> JsonObject:
        """Return a DeepSpeed config. `prepare()` fills "auto"; the user's file takes precedence."""
        zero: JsonObject = {"stage": self.level}
        if "parameters" in self.shards:
            zero["stage3_gather_16bit_weights_on_model_save"] = True
        if options.offload_device != "none":
            where: JsonObject = {
                "device": options.offload_device,
                "pin_memory": hardware.kind == "cuda",
            }
            if options.offload_path:
                where["nvme_path"] = options.offload_path
            zero["offload_optimizer"] = where
            if options.offload_params:
                zero["offload_param"] = dict(where)
        config: JsonObject = {
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            # A Trainer fills "auto" with its max_grad_norm, `worker.engines.deepspeed` with 0,
            # which disables clipping.
            "gradient_clipping": options.clip or "auto",
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
        }
        if options.offload_device == "nvme":
            config["aio"] = dict(_AIO_CONFIG)
        return merge_configs(config, options.deepspeed_config or {})

    def training_arguments(self, options: Options, hardware: Hardware) -> JsonObject:
        """Arguments of `TrainingArguments(...)`; the session sets the engine."""
        precision = {name: True for name in ("bf16", "fp16") if options.precision == name}
        return precision | {
            "use_cpu": hardware.kind == "cpu",
            "gradient_accumulation_steps": options.accumulate,
            # transformers 5.23 clips at 1.0 by default.
            "max_grad_norm": options.clip or 0.0,
            # transformers 5.23 looks for unused parameters in every step and torch warns.
            "ddp_find_unused_parameters": False,
        }

    def required_ops(self, options: Options) -> tuple[str, ...]:
        """DeepSpeed ops to compile before the ranks start, by DeepSpeed's names."""
        if self.engine != "deepspeed":
            return ()
        return _OFFLOAD_OPS[options.offload_device]


_FSDP_VERSION_KWARGS: Mapping[int, JsonObject] = {
    1: {"use_orig_params": True, "sync_module_states": False},
    2: {"reshard_after_forward": True},
}
_AIO_CONFIG: JsonObject = {
    "block_size": 1 << 20,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}
_OFFLOAD_OPS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "cpu": ("cpu_adam",),
    # deepspeed 0.19: async_io gets its page-locked buffers from pin_memory.
    "nvme": ("cpu_adam", "pin_memory", "async_io"),
}

_ROWS = (
    Strategy(
        name="ddp",
        title="DDP: every rank holds a full copy",
        shards=(),
        engine="ddp",
        level=0,
    ),
    Strategy(
        name="fsdp2",
        title="FSDP2: parameters, gradients and optimizer state sharded",
        shards=("optimizer", "gradients", "parameters"),
        engine="fsdp",
        level=2,
        offloads=("none", "cpu"),
        offload_params=True,
        can_skip_resharding=True,
        can_replicate=True,
    ),
    Strategy(
        name="fsdp1",
        title="FSDP1: like FSDP2, with flat parameters (legacy)",
        shards=("optimizer", "gradients", "parameters"),
        engine="fsdp",
        level=1,
        offloads=("none", "cpu"),
        offload_params=True,
        is_legacy=True,
    ),
    Strategy(
        name="zero1",
        title="DeepSpeed ZeRO-1: optimizer state sharded",
        shards=("optimizer",),
        engine="deepspeed",
        level=1,
        offloads=("none", "cpu"),
    ),
    Strategy(
        name="zero2",
        title="DeepSpeed ZeRO-2: optimizer state and gradients sharded",
        shards=("optimizer", "gradients"),
        engine="deepspeed",
        level=2,
        offloads=("none", "cpu"),
    ),
    Strategy(
        name="zero3",
        title="DeepSpeed ZeRO-3: parameters, gradients and optimizer state sharded",
        shards=("optimizer", "gradients", "parameters"),
        engine="deepspeed",
        level=3,
        offloads=("none", "cpu", "nvme"),
        offload_params=True,
    ),
)

STRATEGIES: Mapping[str, Strategy] = {row.name: row for row in _ROWS}


def backend_of(engine: Engine, level: object) -> str:
    """Return the backend of an engine with an FSDP version or ZeRO stage.

    Raises:
        OptionError: there is none.
    """
    for row in _ROWS:
        if (row.engine, str(row.level)) == (engine, str(level)):
            return row.name
    rows = [f"{row.level} ({row.name})" for row in _ROWS if row.engine == engine]
    raise OptionError(f"{engine} has no version or stage {level!r}. Use one of {', '.join(rows)}.")


def canonical_backend(name: str) -> str:
    """Resolve aliases of a backend: fsdp is fsdp2.

    Raises:
        OptionError: unknown backend.
    """
    resolved = ALIASES.get(name, name)
    if resolved not in STRATEGIES:
        raise OptionError(f"Unknown backend {name!r}. Use one of {', '.join(BACKENDS)}.")
    return resolved


def merge_configs(base: Mapping[str, Any], top: Mapping[str, Any]) -> JsonObject:
    """Return base updated with top, merging nested mappings."""
    merged = dict(base)
    for key, value in top.items():
        inner: Any = merged.get(key)
        both = isinstance(inner, dict) and isinstance(value, dict)
        merged[key] = merge_configs(inner, value) if both else value
    return merged


def _check_types(options: Options) -> None:
    """Raise for a value of another type than the option has."""
    for item in fields(options):
        value, allowed = getattr(options, item.name), ""
        if isinstance(item.default, bool) and not isinstance(value, bool):
            allowed = "True or False"
        elif isinstance(item.default, str) and not isinstance(value, str):
            allowed = "text"
        elif item.name.endswith("_config") and not isinstance(value, Mapping | None):
            allowed = "a mapping, such as the content of a config file"
        if allowed:
            raise OptionError(f"{item.name} must be {allowed}, not {abbreviate(value)}.")


def _check_engine(options: Options, hardware: Hardware) -> None:
    """Raise without DeepSpeed, or for a file of another engine."""
    engine = options.strategy.engine
    if engine == "deepspeed" and not hardware.deepspeed:
        others = ", ".join(row.name for row in _ROWS if row.engine != "deepspeed")
        raise OptionError(
            f"Backend {options.backend} needs DeepSpeed, which is not installed: "
            f"`pip install deepspeed`, or use {others}."
        )
    for owner, content in (("fsdp", options.fsdp_config), ("deepspeed", options.deepspeed_config)):
        if content is not None and engine != owner:
            able = ", ".join(row.name for row in _ROWS if row.engine == owner)
            raise OptionError(
                f"A {owner}_config cannot be used with backend {options.backend}, only with {able}."
            )


def _check_numbers(options: Options) -> None:
    """Raise for a number out of range."""
    accumulate: Any = options.accumulate  # Session(...) takes values of any type
    clip: Any = options.clip
    if type(accumulate) is not int or accumulate < 1:
        raise OptionError(
            f"accumulate (micro batches) must be an integer >= 1, got {abbreviate(accumulate)}."
        )
    if clip is not None and not (isinstance(clip, int | float) and 0 < clip < float("inf")):
        raise OptionError(
            f"clip (maximum gradient norm) must be a finite number > 0, got {abbreviate(clip)}."
        )


def _check_offload(options: Options) -> None:
    """Raise for an offload that the backend does not support."""
    device, strategy = options.offload_device, options.strategy
    if device not in {"none", "cpu", "nvme"} or (device != "nvme" and options.offload_path):
        raise OptionError(
            f"Unknown offload {abbreviate(options.offload)}. Use one of {', '.join(OFFLOADS)}."
        )
    if device == "nvme" and not options.offload_path:
        raise OptionError("offload nvme needs a folder on a fast local disk: nvme:/path/to/folder.")
    if device not in strategy.offloads:
        able = ", ".join(row.name for row in _ROWS if device in row.offloads)
        raise OptionError(
            f"Backend {strategy.name} does not support offload to {device}. "
            f"Use {able}, or offload none."
        )
    if options.offload_params and not strategy.offload_params:
        able = ", ".join(row.name for row in _ROWS if row.offload_params)
        raise OptionError(f"Backend {strategy.name} cannot offload parameters. Use {able}.")
    if options.offload_params and device == "none":
        raise OptionError(
            "offload_params needs an offload device. Add offload cpu (or nvme:PATH with zero3)."
        )


def _check_replication(options: Options, hardware: Hardware) -> None:
    """Raise for replication that the backend or the nodes do not support."""
    across, name = options.replicate_across, options.strategy.name
    ranks, nodes = hardware.world_size, hardware.nodes
    if across not in REPLICATE_ACROSS:
        allowed = ", ".join(REPLICATE_ACROSS)
        raise OptionError(f"Unknown replicate_across {abbreviate(across)}. Use one of {allowed}.")
    if across == "none":
        return
    if not options.strategy.can_replicate:
        able = ", ".join(row.name for row in _ROWS if row.can_replicate)
        raise OptionError(
            f"Backend {name} cannot replicate across nodes. Use {able}, or replicate_across none."
        )
    if nodes == 1:
        raise OptionError(
            "replicate_across nodes needs ranks on several machines, but all ranks are on one and"
            " share one set of shards. Leave it out."
        )
    if ranks % nodes or ranks == nodes:
        per_node = "one rank on each" if ranks == nodes else "not the same number on each"
        raise OptionError(
            f"replicate_across nodes needs the same number of ranks on each node, at least two,"
            f" but {ranks} ranks on {nodes} nodes are {per_node}. Leave it out"
            f"{', or use ddp' if ranks == nodes else ''}."
        )


def _precision(options: Options, hardware: Hardware) -> str:
    """Return the precision or its default; raise if the hardware does not support it."""
    precision = options.precision
    if precision is None:
        return hardware.default_precision
    if precision not in PRECISIONS:
        raise OptionError(
            f"Unknown precision {abbreviate(precision)}. Use one of {', '.join(PRECISIONS)}."
        )
    supported = {
        "no": True,
        "fp16": hardware.kind == "cuda",
        "bf16": hardware.kind == "cpu" or hardware.bf16,
        "fp8": hardware.kind == "cuda" and hardware.fp8,
    }
    if not supported[precision]:
        allowed = ", ".join(name for name in PRECISIONS if supported[name])
        raise OptionError(
            f"precision {precision} needs {_REQUIREMENTS[precision]}. Use one of {allowed}."
        )
    return precision


_REQUIREMENTS = {
    "fp16": "a GPU",
    "bf16": "a GPU of compute capability 8.0 or newer",
    "fp8": "a GPU of compute capability 8.9 or newer and transformer-engine or torchao installed",
}
