"""Makes the HF Trainer use the session's strategy.

A Trainer creates its own `Accelerator()`, which uses the session's engine like any other
(`worker.engines.accelerator`), with the values of its TrainingArguments
(`worker.engines.training_arguments`). Under --auto the engine is decided here, before the Trainer
builds it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from torch import distributed, nn
from torch.distributed.fsdp import StateDictType

from nbdist.errors import OptionError
from nbdist.worker.engines import accelerator, deepspeed, peft_adapters, training_arguments
from nbdist.worker.engines.auto_strategy import MicroBatch
from nbdist.worker.library_patches import patch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from nbdist.strategies import Options
    from nbdist.worker.engines.auto_strategy import AutoStrategy

DEFAULT_BATCH_SIZE = 8
"""Trainer's default of per_device_train_batch_size."""
DEFAULT_OPTIMIZER = {"class": "AdamW", "fused": True}
"""Trainer's default, adamw_torch_fused in transformers 5.23."""
MODULE = "transformers.trainer"


def install() -> None:
    """Patch Trainer, TrainingArguments and peft, now or when they are imported; call it once.

    Importing transformers' Trainer takes seconds, so it is not imported here.
    """
    for name, patch_module in (
        (training_arguments.MODULE, training_arguments.patch_arguments),
        (MODULE, _patch_trainer),
        (peft_adapters.MODULE, peft_adapters.patch_peft),
    ):
        if name in sys.modules:
            patch_module()
        else:
            sys.meta_path.insert(0, _WhenImported(name, patch_module))


class _WhenImported(importlib.abc.MetaPathFinder):
    """Import hook that patches a module after its import."""

    def __init__(self, name: str, patch_module: Callable[[], None]) -> None:
        self._name, self._patch_module = name, patch_module

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - importlib's signature
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Find the module with the other finders, and patch it after execution."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._patch_module()

        loader.exec_module = exec_module
        return spec


def _patch_trainer() -> None:
    """Make Trainers use the session's options, and repair what differs between the engines."""
    patch(f"{MODULE}:Trainer.create_accelerator_and_postprocess", _with_session)
    patch(f"{MODULE}:Trainer.save_model", _write_sharded_model)
    patch(f"{MODULE}:deepspeed_init", _keep_engine)
    patch(
        f"{MODULE}:MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        lambda names: {**names, **{f"fsdp_{key}": f"FSDP{name}" for key, name in names.items()}},
    )
    if distributed.get_rank() != 0:
        from transformers.trainer_callback import ProgressCallback

        patch(f"{MODULE}:DEFAULT_PROGRESS_CALLBACK", lambda _: ProgressCallback)


def _with_session(create: Callable[[Any], None]) -> Callable[[Any], None]:
    """Build a Trainer's Accelerator with the session's options and its arguments."""

    def create_accelerator_and_postprocess(self: Any) -> None:
        if training_arguments.has_own_engine(self.args):
            create(self)
            return
        training_arguments.check_auto(self.args, accelerator.current_config())
        session = accelerator.decide_options(functools.partial(_choose, self))
        with accelerator.temporary_options(training_arguments.combine(self.args, session)):
            create(self)
        if self.is_deepspeed_enabled:
            deepspeed.reset_zero3_globals(self.accelerator.state.deepspeed_plugin)

    return create_accelerator_and_postprocess


def _write_sharded_model(save_model: Callable[..., None]) -> Callable[..., None]:
    """Write the whole model under FSDP too, whatever the format of the optimizer state."""

    def save(self: Any, *args: Any, **kwargs: Any) -> None:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is None:
            return save_model(self, *args, **kwargs)
        before, plugin.state_dict_type = plugin.state_dict_type, StateDictType.FULL_STATE_DICT
        try:
            return save_model(self, *args, **kwargs)
        finally:
            plugin.state_dict_type = before

    return save


def _keep_engine(init: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the engine across `train()` calls.

    transformers 5.23 would create a new optimizer for an engine that has one.
    """

    def deepspeed_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = self.optimizer
        is_own = isinstance(optimizer, deepspeed.SteppingOptimizerWrapper)
        if is_own and optimizer.engine is self.model_wrapped:
            return optimizer, None
        return init(self, *args, **kwargs)

    return deepspeed_init


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


def trainer_arguments(
    model: nn.Module | None = None, *, batch_size: int | None = None, seq_len: int | None = None
) -> dict[str, Any]:
    """Return arguments for `TrainingArguments(..., **nbdist.trainer_arguments())`.

    A Trainer does not need them. They clip only if the session has --clip, where a Trainer's
    default is 1.0, and tell --auto the sequence length.

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
