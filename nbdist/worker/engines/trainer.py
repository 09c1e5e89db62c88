"""Makes the HF Trainer use the session's strategy.

A Trainer creates its own `Accelerator()`, which uses the session's engine like any other
(`worker.engines.accelerator_patch`), with the values of its TrainingArguments
(`worker.engines.training_arguments`). Under --auto the engine is decided here, before the Trainer
builds it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import numbers
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor

from nbdist import checkpoint
from nbdist.checkpoint.name_validation import MANIFEST_NAME
from nbdist.errors import OptionError, PlanError, SwitchError
from nbdist.planner import optimizers
from nbdist.state.layouts.base import is_deepspeed_engine
from nbdist.strategies import STRATEGIES
from nbdist.worker import process_group
from nbdist.worker.engines import accelerator_patch, deepspeed, training_arguments
from nbdist.worker.engines.auto_strategy import MicroBatch, inspect_first_batch
from nbdist.worker.library_patches import patch, patched, when_imported
from nbdist.worker.memory import memory_probe
from nbdist.worker.training import (
    prepared_models,
    rebind_variables,
    rng_state,
    training_metadata,
    whole_weights,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch.utils.data import DataLoader

    from nbdist.checkpoint import Url
    from nbdist.strategies import Options
    from nbdist.worker.engines.auto_strategy import AutoStrategy
    from nbdist.worker.report import Reporter

DEFAULT_BATCH_SIZE = 8
"""Trainer's default of per_device_train_batch_size."""
DEFAULT_OPTIMIZER = {"class": "AdamW", "fused": True}
"""Trainer's default, adamw_torch_fused in transformers 5.23."""
MODULE = "transformers.trainer"
_PEFT = "peft.peft_model"
_TUNERS = "peft.tuners.tuners_utils"
_FSDP1_PREFIX = "_fsdp_wrapped_module."
_UNREPORTED_VALUES = ("epoch", "total_flos", "step")
_UNREPORTED_SUFFIXES = ("_runtime", "_samples_per_second", "_steps_per_second", "train_loss")
"""Logged values that are not reported: summaries of a whole run instead of a step."""


def install(
    reporter: Reporter, load: Callable[..., None], wait_for_save: Callable[[], object]
) -> None:
    """Patch Trainer, TrainingArguments and peft, now or when they are imported; call it once.

    Importing transformers' Trainer takes seconds, so it is not imported here.

    Args:
        reporter: gets the values that a Trainer logs.
        load: loads a model of a checkpoint; see ``operations.load.load_in_cell``.
        wait_for_save: waits for the running save of this rank.
    """
    when_imported(training_arguments.MODULE, training_arguments.patch_arguments)
    resume = functools.partial(_resume, load, wait_for_save)
    when_imported(MODULE, functools.partial(_patch_trainer, reporter, resume))
    when_imported(_PEFT, _patch_peft)


def _patch_trainer(reporter: Reporter, resume: Callable[..., Any]) -> None:
    patch(f"{MODULE}:Trainer.__init__", _keep_data)
    patch(f"{MODULE}:Trainer.create_accelerator_and_postprocess", _with_session)
    patch(f"{MODULE}:Trainer.train", resume)
    patch(f"{MODULE}:Trainer.save_model", _write_sharded_model)
    patch(f"{MODULE}:Trainer.evaluation_loop", _evaluate_before_training)
    patch(f"{MODULE}:deepspeed_init", _keep_optimizer)
    patch(f"{MODULE}:Trainer._wrap_model", _renew_engine)
    patch(f"{MODULE}:get_fsdp_ckpt_kwargs", _save_base_under_fsdp1)
    patch(f"{MODULE}:load_fsdp_optimizer", _with_state_to_load)
    patch(
        f"{MODULE}:MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        lambda names: {**names, **{f"fsdp_{key}": f"FSDP{name}" for key, name in names.items()}},
    )
    if distributed.get_rank() != 0:
        from transformers.trainer_callback import ProgressCallback

        patch(f"{MODULE}:DEFAULT_PROGRESS_CALLBACK", lambda _: ProgressCallback)
    # Every Trainer starts with these callbacks; there is no public function to add one.
    sys.modules[MODULE].DEFAULT_CALLBACKS.append(metrics_callback(reporter))


def _with_session(create: Callable[[Any], None]) -> Callable[[Any], None]:
    def create_accelerator_and_postprocess(self: Any) -> None:
        if training_arguments.has_own_engine(self.args):
            create(self)
            return
        training_arguments.check_auto(self.args, accelerator_patch.current_config())
        session = accelerator_patch.decide_options(functools.partial(_choose, self))
        with accelerator_patch.temporary_options(training_arguments.combine(self.args, session)):
            try:
                create(self)
            finally:  # also if it refuses the arguments
                if plugin := AcceleratorState().deepspeed_plugin:
                    deepspeed.reset_zero3_globals(plugin)

    return create_accelerator_and_postprocess


def _resume(
    load: Callable[..., None], wait_for_save: Callable[[], object], original: Callable[..., Any]
) -> Callable[..., Any]:
    """Resume `train()` from a checkpoint of `%nbdist save` too, under any backend."""

    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        training_metadata.register_trainer(self)
        _forget_released_engine(self)
        path = resume_from_checkpoint
        if path and path is not True:
            wait_for_save()
            process_group.verify_group()  # all ranks have finished the save
            if checkpoint.is_url(path) or _is_of_session(Path(path)):
                with _session_checkpoint(self, checkpoint.parse_location(path), load) as folder:
                    return original(self, folder, *args, **kwargs)
        _check_backend(self, path)
        return original(self, path, *args, **kwargs)

    return train


def _is_of_session(path: Path) -> bool:
    """Return whether to read a checkpoint of the session; its error lists those that exist."""
    return (path / MANIFEST_NAME).is_file() or not path.is_dir()


@contextlib.contextmanager
def _session_checkpoint(
    trainer: Any, location: Path | Url, load: Callable[..., None]
) -> Iterator[str]:
    """Make `train()` load a checkpoint of the session; yield a folder with the Trainer's state."""
    with checkpoint.storage_for(location.parent).open_checkpoint(location.name) as (_, manifest):
        number, saved = training_metadata.choose_trainer_state(manifest, trainer, location)
    if trainer.args.load_best_model_at_end:
        _check_backend(trainer, json.loads(saved["state"])["best_model_checkpoint"])
    generators: list[rng_state.RngState] = []
    load_weights = trainer._load_from_checkpoint  # noqa: SLF001 - of the Trainer's own checkpoints

    def load_from_checkpoint(path: str, *args: Any) -> None:
        if path != folder:
            load_weights(path, *args)

    def load_optimizer_and_scheduler(_: str) -> None:
        models = prepared_models.all_models()
        (prepared,) = (each for each in models if each.model is trainer.model_wrapped)
        before = rng_state.get_rng_state()
        load(location, only={number: prepared})
        training_metadata.set_trainer_scheduler(trainer, saved)
        generators[:] = [rng_state.get_rng_state()]
        # Until the batches of earlier steps are skipped, the Trainer draws as at the beginning.
        rng_state.set_rng_state(before)

    methods = {
        "_load_from_checkpoint": load_from_checkpoint,
        "_load_optimizer_and_scheduler": load_optimizer_and_scheduler,
        "_load_rng_state": lambda _: rng_state.set_rng_state(*generators),
    }

    def with_own_files(read: Callable[..., None]) -> Callable[..., None]:
        def deepspeed_load_checkpoint(engine: Any, path: str, **kwargs: Any) -> None:
            if path != folder:
                read(engine, path, **kwargs)

        return deepspeed_load_checkpoint

    with (
        tempfile.TemporaryDirectory() as folder,
        patched(f"{MODULE}:deepspeed_load_checkpoint", with_own_files),
    ):
        (Path(folder) / sys.modules[MODULE].TRAINER_STATE_NAME).write_text(saved["state"])
        vars(trainer).update(methods)
        try:
            yield folder
        finally:
            for name in methods:
                del vars(trainer)[name]


def _check_backend(trainer: Any, path: Any) -> None:
    """Refuse to resume from a Trainer's checkpoint of another backend.

    transformers 5.23 would continue with a new optimizer, or fail with an internal error.
    """
    from transformers.trainer_utils import get_last_checkpoint

    if path is True:
        path = get_last_checkpoint(trainer.args.output_dir)
    strategy = accelerator_patch.current_config().options.strategy
    is_own_engine = accelerator_patch.has_user_plugin(trainer.accelerator)
    names = [
        other.name
        for other in (STRATEGIES.values() if path and not is_own_engine else ())
        if other.trainer_state_files != strategy.trainer_state_files
        and any(Path(path).glob(other.trainer_state_files))
    ]
    if names and any(Path(path).glob(strategy.trainer_state_files)):
        raise OptionError(
            f"{path} has files of two runs, under {strategy.name} and under {' or '.join(names)}."
            " Delete it and resume from another checkpoint. Use an output_dir for each run."
        )
    if names:
        raise OptionError(
            f"{path} was saved under {' or '.join(names)}, but the session uses"
            f" {strategy.name}. Use `%nbdist switch {names[0]}` before this cell; a checkpoint"
            " of `%nbdist save` works under every backend."
        )


def _evaluate_before_training(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Evaluate a model before `train()` under every engine.

    transformers 5.23 refuses it under ZeRO-1 and ZeRO-2: without an optimizer there is nothing to
    shard. The model, also one that another Trainer has trained, is evaluated without an engine
    there, as under DDP. FSDP1 and ZeRO-3 cannot add an optimizer later, so a Trainer that can train
    prepares both, as `train()` does.
    """

    def evaluation_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        _forget_released_engine(self)
        state = self.accelerator.state
        stage = getattr(getattr(state, "deepspeed_plugin", None), "zero_stage", None)
        version = getattr(getattr(state, "fsdp_plugin", None), "fsdp_version", None)
        if stage == deepspeed.PARAMETER_STAGE or version == 1:
            if not self.accelerator._models and self.train_dataset is not None:  # noqa: SLF001
                self._prepare_for_training(1, None, None)  # train() creates another scheduler
            return loop(self, *args, **kwargs)
        if stage is None or self.deepspeed is not None:
            return loop(self, *args, **kwargs)
        self.is_deepspeed_enabled = False
        try:
            return loop(self, *args, **kwargs)
        finally:
            self.is_deepspeed_enabled = True

    return evaluation_loop


def _forget_released_engine(trainer: Any) -> None:
    """Reset a Trainer whose engine was freed for another one, so that it prepares its model again.

    Until then its engine and optimizer raise when they are used.
    """
    if rebind_variables.is_stale(trainer.model_wrapped):
        trainer.model_wrapped = trainer.model
        trainer.optimizer = trainer.lr_scheduler = trainer.deepspeed = None


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


def _with_state_to_load(load: Callable[..., None]) -> Callable[..., None]:
    """Create the state of a new optimizer, which accelerate 1.15 reads only where it exists."""

    def load_fsdp_optimizer(
        fsdp_plugin: Any, owner: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        if fsdp_plugin.fsdp_version == 1:
            _init_optim_state(optimizer.optimizer)
        load(fsdp_plugin, owner, optimizer, *args, **kwargs)

    return load_fsdp_optimizer


def _save_base_under_fsdp1(original: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    def get_fsdp_ckpt_kwargs() -> dict[str, Any]:
        return {} if accelerator_patch.current_config().options.strategy.is_flat else original()

    return get_fsdp_ckpt_kwargs


def _keep_optimizer(init: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the engine across `train()` calls, and the optimizer that the user gave to the Trainer.

    transformers 5.23 would create a new optimizer for an engine that has one, and silently
    replace that of `Trainer(optimizers=...)`.
    """

    def deepspeed_init(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer, scheduler = self.optimizer, self.lr_scheduler
        is_own = isinstance(optimizer, deepspeed.SteppingOptimizerWrapper)
        if is_own and optimizer.engine is self.model_wrapped:
            return optimizer, scheduler  # None if the Trainer had created it
        created = init(self, *args, **kwargs)
        is_given = created[0] is not None and optimizer is not None
        return (optimizer, scheduler) if is_given and not is_own else created

    return deepspeed_init


def _renew_engine(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Create another engine in a second `train()` if `create_optimizer()` has made a new optimizer.

    An override may do so in each `train()`. transformers 5.23 would prepare it without its model.
    """

    def wrap_model(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_new = not isinstance(self.optimizer, AcceleratedOptimizer | type(None))
        renews = is_new and is_deepspeed_engine(model)
        return wrap(self, self.model if renews else model, *args, **kwargs)

    return wrap_model


def _choose(trainer: Any, chooser: AutoStrategy) -> Options:
    if trainer.model is None:
        raise OptionError(
            "--auto needs the model, which Trainer creates later from model_init. Pass model="
            " or choose a backend."
        )
    args = trainer.args
    batch = functools.partial(
        inspect_first_batch,
        functools.partial(_train_loader, trainer),
        trainer.model,
        args.per_device_train_batch_size,
    )
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else ""
    wanted: dict[str, Any] = {"precision": precision} if precision else {}
    # transformers 5.23 has renamed it.
    if getattr(args, "activation_checkpointing", False) or args.gradient_checkpointing:
        wanted["activation_checkpointing"] = True
    return chooser.decide(trainer.model, _describe_optimizer(trainer), batch, wanted)


def _keep_data(init: Callable[..., None]) -> Callable[..., None]:
    """Keep the arguments of a Trainer: it sets its data after it has created its accelerator."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        self._nbdist_arguments = signature.bind(self, *args, **kwargs).arguments
        init(self, *args, **kwargs)
        del self._nbdist_arguments

    return __init__


def _train_loader(trainer: Any) -> DataLoader[Any]:
    """Return the loader that a Trainer will use; in a forked child, because it changes it."""
    import transformers as hf
    from transformers.utils.generic import find_labels

    given = trainer._nbdist_arguments  # noqa: SLF001 - set above
    processor, collator = given.get("processing_class"), given.get("data_collator")
    if collator is None:
        pads = isinstance(processor, (hf.PreTrainedTokenizerBase, hf.SequenceFeatureExtractor))
        collator = hf.DataCollatorWithPadding(processor) if pads else hf.default_data_collator
    # What Trainer.__init__ of transformers 5.23 sets later.
    trainer.train_dataset, trainer.data_collator = given.get("train_dataset"), collator
    trainer.processing_class, trainer._signature_columns = processor, None  # noqa: SLF001
    trainer.label_names = trainer.args.label_names or find_labels(type(trainer.model))
    trainer._train_batch_size = trainer.args.per_device_train_batch_size  # noqa: SLF001
    trainer.accelerator = SimpleNamespace(prepare=lambda loader: loader)
    loader: DataLoader[Any] = trainer.get_train_dataloader()
    return loader


def _describe_optimizer(trainer: Any) -> Mapping[str, Any]:
    given = trainer._nbdist_arguments  # noqa: SLF001 - set above
    optimizer, _ = given.get("optimizers", (None, None))
    if optimizer is not None:
        return memory_probe.describe_optimizer(optimizer)
    create = trainer.get_optimizer_cls_and_kwargs
    cls, options = given.get("optimizer_cls_and_kwargs") or create(trainer.args, trainer.model)
    # For its 8-bit optimizers, transformers 5.23 gives bitsandbytes' classes optim_bits=8.
    name = cls.__name__ + {8: "8bit"}.get(options.get("optim_bits"), "")
    try:
        optimizers.find_optimizer(name)
    except PlanError:
        return DEFAULT_OPTIMIZER
    return {"class": name, **options}


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
            raise OptionError(
                "--auto needs the model: use nbdist.trainer_arguments(model=model), with"
                " batch_size= and seq_len= to decide for your batch."
            )
        arguments = {"batch_size": batch_size, "seq_len": seq_len}
        missing = [name for name, value in arguments.items() if value is None]
        guess = f"Assumed {' and '.join(missing)}. Set them with trainer_arguments(...)."
        batch = MicroBatch(
            batch_size=batch_size or DEFAULT_BATCH_SIZE,
            seq_len=seq_len,
            assumption=guess if missing else "",
        )
        return chooser.decide(model, DEFAULT_OPTIMIZER, lambda: batch)

    session = accelerator_patch.decide_options(choice)
    return session.options.strategy.training_arguments(session.options, session.hardware)


def find_trainers(values: Iterable[object]) -> list[Any]:
    """Return the transformers Trainers among objects; does not import transformers."""
    return [
        value
        for value in values
        if any(
            base.__name__ == "Trainer" and base.__module__.startswith("transformers.")
            for base in type(value).__mro__
        )
    ]


def update_trainer_engine(trainer: Any) -> None:
    """Update a Trainer's attributes after the engine has changed.

    Its `model` is the user's model, but under FSDP the wrapped one (transformers 5.23).
    """
    from transformers.integrations.deepspeed import propagate_args_to_deepspeed

    _forget_released_engine(trainer)
    state = trainer.accelerator.state
    trainer.is_deepspeed_enabled = getattr(state, "deepspeed_plugin", None) is not None
    trainer.is_fsdp_enabled = getattr(state, "fsdp_plugin", None) is not None
    if (reference := prepared_models.find_model(trainer.model_wrapped)) is not None:
        trainer.model_wrapped = reference.prepared.model
    wrapped = trainer.model_wrapped
    if isinstance(wrapped, nn.Module):
        try:
            bare = trainer.accelerator.unwrap_model(wrapped, keep_torch_compile=False)
        except SwitchError:
            return  # an adapter that was merged: another Trainer has its base
        trainer.model = wrapped if trainer.is_fsdp_enabled else bare
        trainer.deepspeed = wrapped if is_deepspeed_engine(wrapped) else None
    if not trainer.is_deepspeed_enabled:
        return
    if trainer.deepspeed is None:  # train() creates the engine
        accelerator_patch.renew_deepspeed_plugin(state)
    propagate_args_to_deepspeed(trainer.accelerator, trainer.args)
    if trainer.deepspeed is None:
        deepspeed.reset_zero3_globals(state.deepspeed_plugin)


# -- logged values


def metrics_callback(reporter: Reporter) -> type:
    """Return the class of a TrainerCallback that reports each log; every Trainer creates one.

    The steps of a second `train()` follow those of the first one.
    """
    from transformers.trainer_callback import TrainerCallback

    class ReportMetrics(TrainerCallback):
        """Sends the Trainer's logged values to the notebook."""

        offset = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.on_step_end(args, state, control, **given)
            # A Trainer counts from 1: the step after the last reported one.
            self.offset = max(0, reporter.next_step - 1 - state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ARG002
            training_metadata.update_step_counts(given["optimizer"], state.global_step)

        def on_log(
            self,
            args: Any,  # noqa: ARG002
            state: Any,
            control: Any,  # noqa: ARG002
            logs: Mapping[str, Any] | None = None,
            **_: Any,
        ) -> None:
            values = {
                name: float(value)
                for name, value in (logs or {}).items()
                if isinstance(value, numbers.Real)
                and name not in _UNREPORTED_VALUES
                and not name.endswith(_UNREPORTED_SUFFIXES)
            }
            if values:
                reporter.report(self.offset + state.global_step, **values)

    return ReportMetrics


# -- peft


def _patch_peft() -> None:
    """Make peft save adapters whose parameters are sharded, and refuse a merge that loses them.

    A Trainer gathers the state dict on all ranks and saves it on rank 0. For most adapters peft
    saves the tensors of this state dict; for prompt tuning it would compute them.
    """
    patch(f"{_PEFT}:PeftModel.named_modules", _without_fsdp1)
    patch(f"{_PEFT}:PeftModel.save_pretrained", whole_weights.save_from_all_ranks)
    patch(f"{_TUNERS}:BasePromptEncoder._get_adapter_state_dict", _save_given_prompt)
    patch(f"{_TUNERS}:BaseTuner._unload_and_optionally_merge", _check_merge)
    patch(f"{_TUNERS}:BaseTuner.merge_adapter", _check_merge)


def _without_fsdp1(original: Callable[..., Any]) -> Callable[..., Any]:
    def named_modules(
        self: Any, memo: Any = None, prefix: str = "", *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, Any]]:
        for name, module in original(self, memo, prefix, *args, **kwargs):
            yield prefix + name[len(prefix) :].replace(_FSDP1_PREFIX, ""), module

    return named_modules


def _check_merge(original: Callable[..., Any]) -> Callable[..., Any]:
    def merge(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_fsdp1 = any(isinstance(each, FullyShardedDataParallel) for each in self.model.modules())
        if is_fsdp1 or any(
            isinstance(each, DTensor) or (hasattr(each, "ds_id") and not each.numel())
            for each in self.model.parameters()
        ):
            raise OptionError(
                "peft cannot merge or unload an adapter whose base is partitioned. Save the"
                " adapter, and merge it into a new copy of the base:"
                " PeftModel.from_pretrained(base, folder).merge_and_unload()."
            )
        return original(self, *args, **kwargs)

    return merge


def _save_given_prompt(original: Any) -> Any:
    def _get_adapter_state_dict(
        cls: type,
        model: Any,
        config: Any,
        adapter_name: str,
        state_dict: Mapping[str, Any],
        unwanted_adapter_names: list[str],
    ) -> dict[str, Any]:
        if not state_dict:
            return {}  # as for other adapters: an export writes only the config this way
        encoder = f"prompt_encoder.{adapter_name}."
        of_encoder = [name for name in state_dict if name.startswith(encoder)]
        if of_encoder == [f"{encoder}embedding.weight"]:
            return {"prompt_embeddings": state_dict[of_encoder[0]]}
        options = accelerator_patch.current_config().options
        if "parameters" in options.strategy.shards:
            # A forward of the encoder on rank 0 fails under FSDP and hangs under ZeRO-3.
            whole = [name for name, it in STRATEGIES.items() if "parameters" not in it.shards]
            raise OptionError(
                f"peft computes the prompts of {config.peft_type.value} from several parameters,"
                f" which {options.backend} shards, so rank 0 cannot save them. Switch to one of"
                f" {', '.join(whole)}, such as `%nbdist switch {whole[0]}`, and save again."
            )
        saved: dict[str, Any] = original.__func__(
            cls, model, config, adapter_name, state_dict, unwanted_adapter_names
        )
        return saved

    return classmethod(_get_adapter_state_dict)
