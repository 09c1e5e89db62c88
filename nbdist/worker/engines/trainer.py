"""HF Trainer under the session's strategy; runs on a rank.

A Trainer makes its own `Accelerator()`, which takes the session's engine as any other
does (`worker.engines.accelerator`). Clipping, accumulation and precision are also
TrainingArguments of
its own: what these leave at its default comes from the session, and two different values are
refused. Under --auto the engine is decided here, before Trainer builds it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import inspect
import sys
from typing import TYPE_CHECKING, Any

from torch import distributed, nn

from nbdist.errors import OptionError
from nbdist.worker.engines import accelerator
from nbdist.worker.engines.auto_strategy import Batch
from nbdist.worker.engines.deepspeed import StepsItself

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from nbdist.strategies import Options
    from nbdist.worker.engines.accelerator import Session
    from nbdist.worker.engines.auto_strategy import Chooser

BATCH_SIZE = 8
"""Trainer's default of per_device_train_batch_size."""
OPTIMIZER = {"class": "AdamW", "fused": True}
"""Trainer's default (adamw_torch_fused in transformers 5.23)."""
MODULE = "transformers.trainer"
_OWN_ENGINE = ("deepspeed_plugin", "fsdp_plugin_args", "parallelism_config")
"""Attributes of TrainingArguments that are set where the user gave an engine."""


def install() -> None:
    """Put every Trainer of this rank under the session; to be called once.

    The import of transformers' Trainer takes seconds, so that it is not imported here.
    """
    if MODULE in sys.modules:
        _patch(sys.modules[MODULE])
    else:
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(importlib.abc.MetaPathFinder):
    """Patches Trainer's module as soon as it is imported."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - importlib's signature
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Find Trainer's module as the other finders do, and patch it when it has run."""
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _patch(module)

        loader.exec_module = exec_module
        return spec


def _patch(module: Any) -> None:
    """Let Trainers take what the session says, and keep engine and optimizer in a second `train()`.

    transformers 5.23 (`deepspeed_init`) makes a new optimizer for an engine that has one.
    """
    trainer = module.Trainer
    create, init = trainer.create_accelerator_and_postprocess, module.deepspeed_init

    @functools.wraps(create)
    def create_accelerator_and_postprocess(self: Any) -> None:
        if all(getattr(self.args, name, None) is None for name in _OWN_ENGINE):
            session = accelerator.decide(functools.partial(_choose, self))
            _take_over(self.args, session)
        create(self)

    @functools.wraps(init)
    def deepspeed_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept = self.optimizer
        if isinstance(kept, StepsItself) and kept.engine is self.model_wrapped:
            return kept, None
        return init(self, *args, **kwargs)

    trainer.create_accelerator_and_postprocess = create_accelerator_and_postprocess
    module.deepspeed_init = deepspeed_init


def _choose(trainer: Any, chooser: Chooser) -> Options:
    """Decide under --auto by the model and the batch size of a Trainer."""
    if trainer.model is None:
        message = (
            "--auto decides by the model, which Trainer makes later from model_init; give it"
            " model=, or name a backend."
        )
        raise OptionError(message)
    guess = "assumed: seq_len; nbdist.trainer_arguments(model, seq_len=...) takes your own"
    batch_size = trainer.args.per_device_train_batch_size
    batch = Batch(batch_size=batch_size, seq_len=None, guess=guess)
    return chooser.decide(trainer.model, OPTIMIZER, lambda: batch)


def _take_over(args: Any, session: Session) -> None:
    """Set what TrainingArguments leave at their default to what the session says.

    Raises:
        OptionError: they say something else than the session's options.
    """
    options, fields = session.options, type(args).__dataclass_fields__
    before: dict[str, tuple[Any, Any]] = vars(args).pop("_nbdist_taken", {})
    for name, (value, own) in before.items():  # an earlier Trainer's; the session may have switched
        if getattr(args, name) == value:
            setattr(args, name, own)
    values: dict[str, Any] = {}
    for name, option, value in (
        ("max_grad_norm", "clip", options.clip),
        ("gradient_accumulation_steps", "accumulate", options.accumulate),
    ):
        mine = getattr(args, name)
        if value == mine or value == _UNSET[option]:
            continue
        if mine != fields[name].default:
            message = (
                f"TrainingArguments has {name}={mine} and the session has --{option} {value}; keep"
                " one of them."
            )
            raise OptionError(message)
        values[name] = value
    if args.mixed_precision == "no" and options.precision not in {None, "no"}:
        values["mixed_precision"] = options.precision
        # With fp8 accelerate 1.15 sets bf16 in DeepSpeed's config, and transformers compares.
        values["fp16" if options.precision == "fp16" else "bf16"] = True
    taken = {name: (value, getattr(args, name)) for name, value in values.items()}
    vars(args).update(values, _nbdist_taken=taken)
    if session.hardware.kind == "cpu":
        args.dataloader_pin_memory = False  # as use_cpu=True does; torch warns at each loader
    if taken and taken != before and distributed.get_rank() == 0:
        text = ", ".join(f"{name}={value}" for name, value in values.items())
        print(f"Trainer takes from the session's options: {text}.")  # noqa: T201


_UNSET = {"clip": None, "accumulate": 1}
"""Values of the session's options that say nothing."""


def trainer_arguments(
    model: nn.Module | None = None, *, batch_size: int | None = None, seq_len: int | None = None
) -> dict[str, Any]:
    """Return arguments for `TrainingArguments(..., **nbdist.trainer_arguments())`.

    A Trainer needs them only for what it would do otherwise: it clips at 1.0 where neither the
    session nor TrainingArguments say anything, and --auto assumes a sequence length.

    Args:
        model: needed under --auto, which decides by it: the model that Trainer will get.
        batch_size: samples of one rank's micro-batch; default: Trainer's own, 8.
        seq_len: tokens of a sample; default: what the model takes, 2048 at most.

    Raises:
        SessionError: not called on a rank of a session.
        OptionError: --auto, and no model.
    """

    def choice(chooser: Chooser) -> Options:
        if model is None:
            message = (
                "--auto decides by the model: nbdist.trainer_arguments(model=model), and say"
                " batch_size= and seq_len= for a choice that fits your batch."
            )
            raise OptionError(message)
        given = {"batch_size": batch_size, "seq_len": seq_len}
        guessed = [name for name, value in given.items() if value is None]
        guess = f"assumed: {' and '.join(guessed)}; give trainer_arguments(...) your own"
        batch = Batch(
            batch_size=batch_size or BATCH_SIZE, seq_len=seq_len, guess=guess if guessed else ""
        )
        return chooser.decide(model, OPTIMIZER, lambda: batch)

    session = accelerator.decide(choice)
    return session.options.strategy.training_arguments(session.options, session.hardware)


def found(names: Mapping[str, Any]) -> list[Any]:
    """Trainers of transformers among variables."""
    return [value for value in names.values() if _is_trainer(type(value))]


def _is_trainer(kind: type) -> bool:
    """Whether it is a Trainer or made of one, without importing it."""
    bases = inspect.getmro(kind)
    return any(
        base.__name__ == "Trainer" and base.__module__.startswith("transformers.") for base in bases
    )


def follow(trainer: Any) -> None:
    """Let a Trainer know the engine that its model has now.

    Its `model` is the bare one, but under FSDP the wrapped one (transformers 5.23).
    """
    state = trainer.accelerator.state
    trainer.is_deepspeed_enabled = getattr(state, "deepspeed_plugin", None) is not None
    trainer.is_fsdp_enabled = getattr(state, "fsdp_plugin", None) is not None
    wrapped = trainer.model_wrapped
    if isinstance(wrapped, nn.Module):
        bare = trainer.accelerator.unwrap_model(wrapped)
        trainer.model = wrapped if trainer.is_fsdp_enabled else bare
        trainer.deepspeed = wrapped if trainer.is_deepspeed_enabled else None
