"""Makes the HF Trainer use the session's strategy.

A Trainer creates its own `Accelerator()`, which uses the session's engine like any other
(`worker.engines.accelerator`). TrainingArguments also set clipping, gradient accumulation and
precision: those left at their default are taken from the session, and conflicting values raise
OptionError. Under --auto the engine is decided here, before the Trainer builds it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import distributed, nn

from nbdist.errors import OptionError
from nbdist.worker.engines import accelerator
from nbdist.worker.engines.auto_strategy import MicroBatch
from nbdist.worker.engines.deepspeed import SteppingOptimizerWrapper
from nbdist.worker.import_hook import when_imported
from nbdist.worker.library_patches import patch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.strategies import Options
    from nbdist.worker.engines.accelerator import EngineConfig
    from nbdist.worker.engines.auto_strategy import AutoStrategy

DEFAULT_BATCH_SIZE = 8
"""Trainer's default of per_device_train_batch_size."""
DEFAULT_OPTIMIZER = {"class": "AdamW", "fused": True}
"""Trainer's default, adamw_torch_fused in transformers 5.23."""
MODULE = "transformers.trainer"
_OWN_ENGINE = ("deepspeed_plugin", "fsdp_plugin_args", "parallelism_config")
"""Attributes of TrainingArguments that are set if the user selected an engine."""


def install() -> None:
    """Patch Trainer, now or when it is imported; call it once per process.

    Importing transformers' Trainer takes seconds, so it is not imported here.
    """
    when_imported(MODULE, _patch_trainer)


def _patch_trainer() -> None:
    """Make Trainers use the session's options, and keep the engine across `train()` calls.

    transformers 5.23 (`deepspeed_init`) would create a new optimizer for an engine that has one.
    """

    def with_session(create: Callable[[Any], None]) -> Callable[[Any], None]:
        def create_accelerator_and_postprocess(self: Any) -> None:
            if all(getattr(self.args, name, None) is None for name in _OWN_ENGINE):
                session = accelerator.decide_options(functools.partial(_choose, self))
                _take_over(self.args, session)
            create(self)

        return create_accelerator_and_postprocess

    def keep_engine(init: Callable[..., Any]) -> Callable[..., Any]:
        def deepspeed_init(self: Any, *args: Any, **kwargs: Any) -> Any:
            optimizer = self.optimizer
            is_own = isinstance(optimizer, SteppingOptimizerWrapper)
            if is_own and optimizer.engine is self.model_wrapped:
                return optimizer, None
            return init(self, *args, **kwargs)

        return deepspeed_init

    patch(f"{MODULE}:Trainer.create_accelerator_and_postprocess", with_session)
    patch(f"{MODULE}:deepspeed_init", keep_engine)


def _choose(trainer: Any, chooser: AutoStrategy) -> Options:
    """Decide under --auto from the model and batch size of a Trainer."""
    if trainer.model is None:
        message = (
            "--auto needs the model, which Trainer creates later from model_init. Pass model="
            " or choose a backend."
        )
        raise OptionError(message)
    guess = "Assumed seq_len. Set it with nbdist.trainer_arguments(model, seq_len=...)."
    batch_size = trainer.args.per_device_train_batch_size
    batch = MicroBatch(batch_size=batch_size, seq_len=None, assumption=guess)
    return chooser.decide(trainer.model, DEFAULT_OPTIMIZER, lambda: batch)


def _take_over(args: Any, session: EngineConfig) -> None:
    """Set TrainingArguments that have their default value from the session's options.

    Raises:
        OptionError: an argument conflicts with the session's options.
    """
    options, fields = session.options, type(args).__dataclass_fields__
    before: dict[str, tuple[Any, Any]] = vars(args).pop("_nbdist_taken", {})
    # Undo what an earlier Trainer has set: the session may have switched since.
    for name, (value, own) in before.items():
        if getattr(args, name) == value:
            setattr(args, name, own)
    values: dict[str, Any] = {}
    for name, option, value in (
        ("max_grad_norm", "clip", options.clip),
        ("gradient_accumulation_steps", "accumulate", options.accumulate),
    ):
        given = getattr(args, name)
        if value == given or value == _UNSET[option]:
            continue
        if given != fields[name].default:
            message = (
                f"TrainingArguments has {name}={given} but the session has --{option} {value}."
                " Remove one of them."
            )
            raise OptionError(message)
        values[name] = value
    if args.mixed_precision == "no" and options.precision not in {None, "no"}:
        values["mixed_precision"] = options.precision
        # With fp8 accelerate 1.15 sets bf16 in DeepSpeed's config, and transformers compares it.
        values["fp16" if options.precision == "fp16" else "bf16"] = True
    taken = {name: (value, getattr(args, name)) for name, value in values.items()}
    vars(args).update(values, _nbdist_taken=taken)
    if session.hardware.kind == "cpu":
        args.dataloader_pin_memory = False  # as use_cpu=True does; torch warns for each loader
    if taken and taken != before and distributed.get_rank() == 0:
        text = ", ".join(f"{name}={value}" for name, value in values.items())
        print(f"Trainer takes from the session's options: {text}.")  # noqa: T201


_UNSET = {"clip": None, "accumulate": 1}
"""Default values of the session's options, which do not override TrainingArguments."""


def trainer_arguments(
    model: nn.Module | None = None, *, batch_size: int | None = None, seq_len: int | None = None
) -> dict[str, Any]:
    """Return arguments for `TrainingArguments(..., **nbdist.trainer_arguments())`.

    They are needed only to override Trainer's defaults: it clips at 1.0 if neither the session
    nor TrainingArguments set a value, and --auto assumes a sequence length.

    Args:
        model: the model that Trainer will get; required under --auto.
        batch_size: samples in one rank's micro-batch; default: Trainer's default, 8.
        seq_len: tokens per sample; default: the model's maximum, at most 2048.

    Raises:
        SessionError: not called on a rank of a session.
        OptionError: no model is given under --auto.
    """

    def choice(chooser: AutoStrategy) -> Options:
        if model is None:
            message = (
                "--auto needs the model: use nbdist.trainer_arguments(model=model), with"
                " batch_size= and seq_len= to decide for your batch."
            )
            raise OptionError(message)
        given = {"batch_size": batch_size, "seq_len": seq_len}
        missing = [name for name, value in given.items() if value is None]
        guess = f"Assumed {' and '.join(missing)}. Set them with trainer_arguments(...)."
        batch = MicroBatch(
            batch_size=batch_size or DEFAULT_BATCH_SIZE,
            seq_len=seq_len,
            assumption=guess if missing else "",
        )
        return chooser.decide(model, DEFAULT_OPTIMIZER, lambda: batch)

    session = accelerator.decide_options(choice)
    return session.options.strategy.training_arguments(session.options, session.hardware)


def find_trainers(names: Mapping[str, Any]) -> list[Any]:
    """Return the transformers Trainers among variables; does not import transformers."""
    return [
        value
        for value in names.values()
        if any(
            base.__name__ == "Trainer" and base.__module__.startswith("transformers.")
            for base in type(value).__mro__
        )
    ]


def update_trainer_engine(trainer: Any) -> None:
    """Update a Trainer's attributes after its model's engine has changed.

    Its `model` is the user's model, but under FSDP the wrapped one (transformers 5.23).
    """
    state = trainer.accelerator.state
    trainer.is_deepspeed_enabled = getattr(state, "deepspeed_plugin", None) is not None
    trainer.is_fsdp_enabled = getattr(state, "fsdp_plugin", None) is not None
    wrapped = trainer.model_wrapped
    if isinstance(wrapped, nn.Module):
        bare = trainer.accelerator.unwrap_model(wrapped)
        trainer.model = wrapped if trainer.is_fsdp_enabled else bare
        trainer.deepspeed = wrapped if trainer.is_deepspeed_enabled else None
