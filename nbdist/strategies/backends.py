"""The table of backends: what each one shards, can do, and hands to its engine; pure.

Every process may import this; it needs the standard library only. `Options` is what a user
chose, `Hardware` is what the ranks run on, and a `Strategy` turns the two into plain
keyword arguments of Accelerate, FSDP, DeepSpeed and Trainer. What differs between the
backends is said here and nowhere else: a new backend is one more row of `STRATEGIES`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from nbdist.errors import OptionError
from nbdist.strategies.config_files import shown, with_deepspeed_file, with_fsdp_file

if TYPE_CHECKING:
    from collections.abc import Mapping

PRECISIONS = ("no", "fp16", "bf16", "fp8")
OFFLOADS = ("none", "cpu", "nvme:PATH")
REPLICATIONS = ("none", "nodes")
ALIASES: Mapping[str, str] = MappingProxyType({"fsdp": "fsdp2"})

Engine = Literal["ddp", "fsdp", "deepspeed"]
Plain = dict[str, Any]


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
    nodes: int = 1
    """Machines that the ranks are on, one after the other, equally many ranks on each."""

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
    replicate_across: str = "none"
    """One of REPLICATIONS; nodes: each machine has all shards, so that parameters are gathered
    inside it."""
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

    @property
    def reshard_after_forward(self) -> bool:
        """FSDP: parameters are in shards between forward and backward."""
        key, kept = _KEEPS_GATHERED.get((self.strategy.engine, self.strategy.level), ("", ""))
        return str((self.fsdp_config or {}).get(key)).upper() != kept

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
        words += ["no reshard"] if not self.reshard_after_forward else []
        across = self.replicate_across
        words += [f"replicate across {across}"] if across != "none" else []
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
            options = with_fsdp_file(options, options.fsdp_config)
        if options.deepspeed_config is not None:
            options = with_deepspeed_file(options, options.deepspeed_config)
        _check_offload(options)
        _check_replication(options, hardware)
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
    may_keep_gathered: bool = False
    """`reshard_after_forward` is worth a choice: memory against half of the gathers."""
    may_replicate: bool = False
    """It can keep its shards inside a node, and be replicated across nodes."""
    older: bool = False
    """Another row does the same and is to be preferred."""

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

    def parallelism_kwargs(self, options: Options, hardware: Hardware) -> Plain:
        """Arguments of `ParallelismConfig(...)`; none where all ranks share one set of shards."""
        if options.replicate_across == "none":
            return {}
        nodes = hardware.nodes
        return {"dp_replicate_size": nodes, "dp_shard_size": hardware.world_size // nodes}

    def deepspeed_config(self, options: Options, hardware: Hardware) -> Plain:
        """Return a DeepSpeed config; "auto" is filled at `prepare()`, the user's file wins."""
        zero: Plain = {"stage": self.level} | _ZERO_STAGE_KEYS.get(self.level, {})
        zero |= _zero_offload(options, hardware)
        config: Plain = {
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            # A Trainer fills "auto" with its max_grad_norm, `worker.engines.deepspeed` with 0: no
            # clipping.
            "gradient_clipping": options.clip or "auto",
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

    def extensions(
        self,
        options: Options,
        hardware: Hardware,  # noqa: ARG002 - what a GPU engine compiles may come to differ
    ) -> tuple[str, ...]:
        """DeepSpeed ops to build before the ranks start, in DeepSpeed's own names."""
        if self.engine != "deepspeed":
            return ()
        return _OFFLOAD_OPS[options.offload_device]


_FSDP_VERSION_KWARGS: Mapping[int, Plain] = {
    1: {"use_orig_params": True, "sync_module_states": False},
    2: {"reshard_after_forward": True},
}
_KEEPS_GATHERED: Mapping[tuple[Engine, int], tuple[str, str]] = {
    # accelerate 1.15 has a default for sharding_strategy, which wins under FSDP1.
    ("fsdp", 1): ("sharding_strategy", "SHARD_GRAD_OP"),
    ("fsdp", 2): ("reshard_after_forward", "FALSE"),
}
"""Key of an fsdp_config, and its value that keeps parameters gathered."""
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
        may_keep_gathered=True,
        may_replicate=True,
    ),
    Strategy(
        name="fsdp1",
        title="FSDP1: as FSDP2, with flat parameters (older)",
        shards=("optimizer", "gradients", "parameters"),
        engine="fsdp",
        level=1,
        offloads=("none", "cpu"),
        offload_params=True,
        older=True,
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
        message = (
            f"offload {shown(options.offload)} is not known; use one of {', '.join(OFFLOADS)}."
        )
        raise OptionError(message)
    if device == "nvme" and not options.offload_path:
        message = "offload nvme needs a folder on a fast local disk: nvme:/path/to/folder."
        raise OptionError(message)
    if device not in strategy.offloads:
        message = (
            f"backend {strategy.name} has no offload to {device}; "
            f"{_backends_where(device)} {'has' if device == 'nvme' else 'have'} it, and offload"
            " none leaves it out."
        )
        raise OptionError(message)
    if options.offload_params and not strategy.offload_params:
        able = ", ".join(row.name for row in _ROWS if row.offload_params)
        message = f"backend {strategy.name} cannot offload parameters; {able} can."
        raise OptionError(message)
    if options.offload_params and device == "none":
        message = "offload_params needs a place: add offload cpu (or nvme:PATH under zero3)."
        raise OptionError(message)


def _check_replication(options: Options, hardware: Hardware) -> None:
    """Refuse replicas that the backend or the machines cannot have."""
    across, name = options.replicate_across, options.strategy.name
    ranks, nodes = hardware.world_size, hardware.nodes
    if across not in REPLICATIONS:
        allowed = ", ".join(REPLICATIONS)
        message = f"replicate_across {shown(across)} is not known; use one of {allowed}."
        raise OptionError(message)
    if across == "none":
        return
    if not options.strategy.may_replicate:
        able = ", ".join(row.name for row in _ROWS if row.may_replicate)
        message = (
            f"backend {name} cannot replicate across nodes; {able} can, and replicate_across none"
            " leaves it out."
        )
        raise OptionError(message)
    if nodes == 1:
        message = (
            "replicate_across nodes needs ranks on several machines and these are on one, where"
            " all ranks share one set of shards; leave it out."
        )
        raise OptionError(message)
    if ranks % nodes or ranks == nodes:
        per_node = "one rank on each" if ranks == nodes else "not equally many on each"
        message = (
            f"replicate_across nodes needs the same number of ranks on each node, at least two,"
            f" and {ranks} ranks on {nodes} nodes are {per_node}; leave it out"
            f"{', or use ddp' if ranks == nodes else ''}."
        )
        raise OptionError(message)


def _precision(options: Options, hardware: Hardware) -> str:
    """Return the precision, refused where the hardware lacks it."""
    precision = options.precision
    if precision is None:
        return "bf16" if hardware.kind == "cuda" and hardware.bf16 else "no"
    if precision not in PRECISIONS:
        message = f"precision {shown(precision)} is not known; use one of {', '.join(PRECISIONS)}."
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
