"""Combines transformers' TrainingArguments with the session's options.

A value that the user wrote, in TrainingArguments or as an option of the session, takes precedence
over a default of the other; two written values that differ raise OptionError. `fsdp=` and
`deepspeed=` must agree with the session's backend and offload; their other keys are used as those
of --fsdp-config and --deepspeed-config.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import distributed

from nbdist import strategies
from nbdist.errors import OptionError
from nbdist.worker.engines import accelerator_patch
from nbdist.worker.library_patches import patch

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.strategies import Options
    from nbdist.worker.engines.accelerator_patch import EngineConfig

MODULE = "transformers.training_args"
_OWN_ENGINE = ("deepspeed_plugin", "parallelism_config")
"""Attributes of TrainingArguments that are set if the user built an engine."""
_OPTION_DEFAULTS = {"clip": None, "accumulate": 1}
"""Default values of the session's options, which do not override TrainingArguments."""
_ADDED_FSDP_KEYS = ("min_num_params", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt")
"""Keys that transformers 5.23 adds to an fsdp_config."""


def patch_arguments() -> None:
    """Record the arguments that a user writes, and leave the engine to the session."""
    patch(f"{MODULE}:TrainingArguments.__new__", _record_written)
    patch(f"{MODULE}:TrainingArguments.__post_init__", _without_engine)


def _record_written(new: Callable[..., Any]) -> Callable[..., Any]:
    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        self = new(cls)
        names = list(cls.__dataclass_fields__)
        written = {*names[: len(args)], *kwargs}
        # A copy (dataclasses.replace, HfArgumentParser, TRL) passes every field.
        is_copy = len(written) > len(names) // 2
        self._nbdist_written = frozenset() if is_copy else frozenset(written)
        return self

    return __new__


def _without_engine(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    def __post_init__(self: Any) -> None:  # noqa: N807
        if accelerator_patch.current_config().hardware.kind == "cpu":
            self.use_cpu = True
        own = self.parallelism_config is not None
        written, self.deepspeed = self.deepspeed, self.deepspeed if own else None
        post_init(self)
        self.deepspeed = written
        if not own:
            self.fsdp_plugin_args = None

    return __post_init__


def has_own_engine(args: Any) -> bool:
    """Return whether the user built an engine, which the session then leaves alone."""
    return any(getattr(args, name, None) is not None for name in _OWN_ENGINE)


def check_auto(args: Any, session: EngineConfig) -> None:
    """Raise OptionError if --auto has not decided yet and the arguments choose an engine."""
    written = next((name for name in ("deepspeed", "fsdp") if getattr(args, name)), None)
    if session.auto_strategy is not None and written is not None:
        wanted = _wanted(args, session.options)
        raise OptionError(
            f"TrainingArguments has {written}=, but --auto chooses the backend itself. Remove"
            f" {written}=, or use `%%distribute {_line(wanted)}`."
        )


def combine(args: Any, session: EngineConfig) -> Options:
    """Return the options of a Trainer's engine, and set its arguments to agree with them.

    Raises:
        OptionError: a value of the arguments differs from an option of the session.
    """
    # Undo what an earlier Trainer has set: the session may have switched since.
    for name, (value, own) in vars(args).pop("_nbdist_replaced", {}).items():
        if getattr(args, name) == value:
            setattr(args, name, own)
    options = _with_engine_config(args, session)
    strategy = options.strategy
    if strategy.is_flat and args.optim == "adafactor" and args.save_strategy != "no":
        # torch 2.13 compares state such as its RMS between ranks, which hold other shards.
        raise OptionError(
            f"Adafactor's state cannot be saved under {strategy.name}. Use backend fsdp, or"
            " save_strategy='no'."
        )
    whole = next((n for n in ("bf16_full_eval", "fp16_full_eval") if getattr(args, n)), None)
    if whole and strategy.engine == "deepspeed":
        # transformers 5.23 casts the parameters in place, which ZeRO's buffers refer to.
        raise OptionError(
            f"TrainingArguments has {whole}=True, which casts parameters that {strategy.name} owns."
            " Remove it, or use bf16=True."
        )
    values = _precision_values(args, session, options)
    for name, option in (
        ("max_grad_norm", "clip"),
        ("gradient_accumulation_steps", "accumulate"),
    ):
        given, value = getattr(args, name), getattr(options, option)
        if value in (given, _OPTION_DEFAULTS[option]):
            continue
        if _is_written(args, name):
            raise _conflict(name, given, option, value)
        values[name] = value
    before = vars(args).get("_nbdist_shown")
    replaced = {name: (value, getattr(args, name)) for name, value in values.items()}
    vars(args).update(values, _nbdist_replaced=replaced, _nbdist_shown=values)
    if values and values != before and distributed.get_rank() == 0:
        text = ", ".join(f"{name}={value}" for name, value in values.items())
        print(f"Trainer takes from the session's options: {text}.")  # noqa: T201
    return options


def _is_written(args: Any, name: str) -> bool:
    if name in vars(args).get("_nbdist_written", ()):
        return True
    default = type(args).__dataclass_fields__[name].default
    return default is not None and getattr(args, name) != default  # TRL replaces None itself


def _conflict(name: str, given: object, option: str, value: object) -> OptionError:
    return OptionError(
        f"TrainingArguments has {name}={given} but the session has --{option} {value}. Remove one"
        " of them."
    )


def _precision_values(args: Any, session: EngineConfig, options: Options) -> dict[str, Any]:
    precision, default = options.precision or "no", session.hardware.default_precision
    given = next((name for name in ("fp16", "bf16") if getattr(args, name)), "no")
    if any(_is_written(args, name) for name in ("fp16", "bf16")):
        if precision not in (given, default):
            name = "bf16" if given == "no" else given
            raise _conflict(name, getattr(args, name), "precision", precision)
        return {}
    if given != "no" and precision == default:
        return {}  # TRL 1.16 has bf16 by default
    # With fp8 accelerate 1.15 sets bf16 in DeepSpeed's config, and transformers compares it.
    name = precision if precision in ("no", "fp16") else "bf16"
    values = {"mixed_precision": precision, "fp16": name == "fp16", "bf16": name == "bf16"}
    return {name: value for name, value in values.items() if getattr(args, name) != value}


def _with_engine_config(args: Any, session: EngineConfig) -> Options:
    """Return the session's options with the keys of `fsdp=` and `deepspeed=`."""
    options = session.options
    if args.deepspeed or args.fsdp:
        options = _validated(args, session)
    if args.save_only_model and options.strategy.engine == "fsdp":
        # transformers 5.23 refuses save_only_model with sharded checkpoints.
        config = {"state_dict_type": "FULL_STATE_DICT"} | dict(options.fsdp_config or {})
        options = replace(options, fsdp_config=config)
    return options


def _validated(args: Any, session: EngineConfig) -> Options:
    """Return the session's options with the config of the arguments.

    Raises:
        OptionError: the backend, the offload or another value differs.
    """
    options, name = session.options, "deepspeed" if args.deepspeed else "fsdp"
    wanted = _wanted(args, options)
    if (wanted.backend, wanted.offload_device, wanted.offload_params) != (
        options.backend,
        options.offload_device,
        options.offload_params,
    ):
        raise OptionError(
            f"TrainingArguments({name}=...) asks for {_line(wanted)}, but the session has"
            f" {_line(options)}. Use `%%distribute {_line(wanted)}`, which does the same, or"
            f" remove {name}=."
        )
    written = None if options.precision == session.hardware.default_precision else options.precision
    file: dict[str, Any] = {f"{name}_config": _engine_config(args, options)}
    try:
        combined = replace(options, precision=written, **file).validate(session.hardware)
    except OptionError as error:
        raise OptionError(f"TrainingArguments({name}=...): {error}") from error
    own = getattr(options, f"{name}_config")
    if own is not None and own != getattr(combined, f"{name}_config"):
        raise OptionError(
            f"TrainingArguments has {name}= and the session has --{name}-config, with other"
            " values. Remove one of them."
        )
    return combined


def _wanted(args: Any, options: Options) -> Options:
    """Return the options with the backend and the offload that the arguments name."""
    if not args.deepspeed:
        version = args.fsdp_config.get("version", args.fsdp_config.get("fsdp_version", ""))
        is_named = options.strategy.engine == "fsdp" and not version
        backend = options.backend if is_named else strategies.backend_of("fsdp", version or 2)
        offload = "cpu" if args.fsdp_config.get("cpu_offload") else options.offload
        return replace(options, backend=backend, offload=offload)
    zero = _deepspeed_config(args).get("zero_optimization") or {}
    stage = zero.get("stage", "auto")
    if stage == "auto":
        stage = options.strategy.level if options.strategy.engine == "deepspeed" else 2
    backend = strategies.backend_of("deepspeed", stage)
    where = zero.get("offload_optimizer") or {}
    device = where.get("device") or "none"
    offload = f"nvme:{where.get('nvme_path')}" if device == "nvme" else device
    params = (zero.get("offload_param") or {}).get("device") or "none"
    return replace(
        options,
        backend=backend,
        offload=options.offload if offload == "none" else offload,
        offload_params=options.offload_params or params != "none",
    )


def _line(options: Options) -> str:
    """Return the options of `%%distribute` for a backend and its offload."""
    offload = "" if options.offload == "none" else f" --offload {options.offload}"
    params = " --offload-params" if options.offload_params else ""
    return f"--backend {options.backend}{offload}{params}"


def _deepspeed_config(args: Any) -> dict[str, Any]:
    given = args.deepspeed
    return dict(given) if isinstance(given, dict) else strategies.load_config(given)


def _engine_config(args: Any, options: Options) -> dict[str, Any]:
    """Return the config of the arguments without the offload, which is an option."""
    if not args.deepspeed:
        config = {
            key: value
            for key, value in args.fsdp_config.items()
            if key not in {"cpu_offload", "offload_params"}
            and (value or key not in _ADDED_FSDP_KEYS)
        }
        if options.strategy.level == 1 and isinstance(config.get("reshard_after_forward"), bool):
            # transformers 5.23 writes it for "full_shard" and "shard_grad_op" without a version.
            strategy = "FULL_SHARD" if config.pop("reshard_after_forward") else "SHARD_GRAD_OP"
            config["sharding_strategy"] = strategy
        return config
    config = _deepspeed_config(args)
    if isinstance(zero := config.get("zero_optimization"), dict):
        tuning = {
            name: {k: v for k, v in section.items() if k not in {"device", "nvme_path"}}
            for name, section in zero.items()
            if name in {"offload_optimizer", "offload_param"} and isinstance(section, dict)
        }
        config["zero_optimization"] = zero | tuning
    return config
