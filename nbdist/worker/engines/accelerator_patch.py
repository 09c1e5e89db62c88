"""Applies the session's strategy to every `Accelerator` on a rank.

`worker.main` calls ``patch_accelerator`` once, after the process group exists. From then on an
`Accelerator()` created by a cell or a Trainer uses the session's engine, unless it is given its
own plugin. The predefined `accelerator` is a ``LazyAccelerator``, which builds its engine at the
first `prepare()`, so that `--auto` can choose the engine for the model.

The methods of Accelerate's class are patched, not replaced by a subclass, because modules such
as transformers' Trainer import the class by name.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.optim import Optimizer

from nbdist.errors import OptionError, SessionError
from nbdist.planner.optimizers import refusal_of_class
from nbdist.planner.tracing import wrap_units
from nbdist.worker import process_group
from nbdist.worker.engines import cpu_patches, deepspeed, fsdp, sharded_load, wrap_policy
from nbdist.worker.library_patches import patch
from nbdist.worker.memory import memory_probe
from nbdist.worker.training import (
    dataloader_state,
    generation,
    prepared_models,
    release_models,
    whole_weights,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nbdist.hardware.discovery import SessionNode
    from nbdist.strategies import Hardware, Options
    from nbdist.worker.engines.auto_strategy import AutoStrategy

_OWN_ENGINE = frozenset(
    {
        "deepspeed_plugin",
        "deepspeed_plugins",
        "fsdp_plugin",
        "megatron_lm_plugin",
        "parallelism_config",
        "torch_tp_plugin",
    }
)
"""Arguments of `Accelerator(...)` with which a user selects an engine."""

_OWN_DEEPSPEED = frozenset({"deepspeed_plugin", "deepspeed_plugins"})

_UNDECIDED = (
    "--auto cannot decide for a new Accelerator(): it decides when the predefined `accelerator`"
    " prepares a model or a Trainer is created with one. Use one of these instead."
)

_ENGINE_VARIABLES = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_MIXED_PRECISION",
    "FSDP_CPU_RAM_EFFICIENT_LOADING",
)
"""Environment variables that accelerate 1.15's plugins set and its next Accelerator reads."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Configuration that this rank's engines are built from."""

    options: Options
    hardware: Hardware
    nodes: Sequence[SessionNode] = ()
    """Hardware of the nodes; empty if all ranks are on this machine."""
    auto_strategy: AutoStrategy | None = None
    """Set under --auto until it has decided; the options are provisional until then."""


_current: EngineConfig | None = None
_original_init = Accelerator.__init__
_original_prepare = Accelerator.prepare
_original_prepare_model = Accelerator.prepare_model
_original_clip = Accelerator.clip_grad_norm_
_original_free_memory = Accelerator.free_memory

_shared_states: dict[type, dict[str, Any]] = {}
"""Accelerate's state class -> its shared state after the last Accelerator was built."""

_evaluated: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models prepared with `evaluation_mode=True`."""

_ENGINE_NAMES = frozenset(_original_init.__code__.co_names)
"""Names used in `Accelerator.__init__`, among them the attributes that it sets."""


def current_config() -> EngineConfig:
    """Return the engine configuration of this rank.

    Raises:
        SessionError: this process is not a rank.
    """
    if _current is None:
        raise SessionError(
            "This process is not a rank of a session. Call this in a %%distribute cell."
        )
    return _current


def decide_options(choice: Callable[[AutoStrategy], Options]) -> EngineConfig:
    """Return the configuration with final options; under --auto `choice` makes the decision."""
    global _current  # noqa: PLW0603 - the decision holds for the whole rank
    session = current_config()
    if session.auto_strategy is not None:
        _current = session = replace(
            session, options=choice(session.auto_strategy), auto_strategy=None
        )
    return session


def set_options(options: Options) -> None:
    """Set the options of every Accelerator that is built later."""
    global _current  # noqa: PLW0603 - it holds for the whole rank
    _current = replace(current_config(), options=options, auto_strategy=None)


@contextlib.contextmanager
def temporary_options(options: Options) -> Iterator[None]:
    """Build the Accelerators of this context with other options."""
    global _current  # noqa: PLW0603 - restored below
    before = current_config()
    _current = replace(before, options=options)
    try:
        yield
    finally:
        _current = before


def patch_accelerator(
    options: Options,
    hardware: Hardware,
    *,
    nodes: Sequence[SessionNode] = (),
    chooser: AutoStrategy | None = None,
) -> Accelerator:
    """Patch Accelerate to use the session's strategy and return the predefined `accelerator`.

    Call it once per process, after the default process group was created.

    Args:
        options: the session's validated options.
        nodes: hardware of the nodes; empty if all ranks are on this machine.
        chooser: if given, decides the options at the first `prepare()`.
    """
    global _current  # noqa: PLW0603 - a rank has one session in its life
    _current = EngineConfig(options, hardware, nodes, chooser)
    process_group.protect_groups()
    if hardware.kind == "cpu":
        cpu_patches.patch_accelerate()
    if hardware.deepspeed:
        deepspeed.patch_accelerate()
    lazy = LazyAccelerator()
    _keep_shared_states()
    memory_probe.current_probe.device = lazy.device
    dataloader_state.patch_dataloaders()
    sharded_load.install(lambda: sharded_load.is_sharded(current_config().options))
    own = "accelerate.accelerator:Accelerator"
    patch(f"{own}.__init__", lambda _: _init)
    patch(f"{own}.prepare", lambda _: _prepare)
    patch(f"{own}.prepare_model", lambda _: _prepare_model)
    patch(f"{own}.clip_grad_norm_", lambda _: _clip_grad_norm)
    patch(f"{own}.free_memory", lambda _: _free_memory)
    patch(f"{own}.backward", lambda f: prepared_models.wrap_backward(_release_before(f)))
    patch(f"{own}.save_state", _release_before)
    patch(f"{own}.load_state", _release_before)
    patch("torch:save", whole_weights.refuse_shards)
    for name in ("save", "save_file", "save_model"):
        patch(f"safetensors.torch:{name}", whole_weights.refuse_shards_in_safetensors)
    patch("torch.nn.modules.module:Module.state_dict", whole_weights.refuse_empty_tensors)
    patch("torch.nn.modules.module:Module.load_state_dict", whole_weights.load_whole_tensors)
    optimizer = "accelerate.optimizer:AcceleratedOptimizer"
    patch(f"{optimizer}.step", prepared_models.wrap_step)
    patch(f"{optimizer}.zero_grad", prepared_models.wrap_zero_grad)
    return lazy


class LazyAccelerator(Accelerator):  # type: ignore[misc]
    """Accelerator that is built at the first `prepare()`.

    Before that, everything that needs no engine works: device, process_index, num_processes,
    is_main_process, print, wait_for_everyone, gather, reduce. Any other attribute builds it.
    """

    def __init__(self) -> None:
        self._built = False
        self.state = PartialState()

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Build the engine if there is none, then prepare as Accelerate does."""
        if not self._built:
            self._build(args)
        return super().prepare(*args, device_placement=device_placement)

    def end_training(self) -> None:
        """End the trackers."""
        if self._built:  # otherwise there are no trackers, and --auto may not have decided yet
            super().end_training()

    @property
    def distributed_type(self) -> DistributedType:
        """Accelerate's name of the engine; reading it builds the engine."""
        if not self._built:
            self._build(())
        return self.state.distributed_type

    def __repr__(self) -> str:
        if current_config().auto_strategy is not None:
            return "<accelerator: auto (decided at the first prepare())>"
        state = "built" if self._built else "built at the first prepare()"
        return f"<accelerator: {current_config().options.strategy.title} ({state})>"

    def __getattr__(self, name: str) -> Any:
        """Build the engine for attributes that exist only after it is built."""
        of_engine = name in _ENGINE_NAMES or name in vars(Accelerator)
        if self.__dict__.get("_built", True) or not of_engine:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._build(())
        return getattr(self, name)

    def _build(self, objects: Sequence[object]) -> None:
        """Decide the options, then initialize as an ordinary Accelerator."""
        decide_options(lambda chooser: chooser(objects))
        self._built = True
        try:
            super().__init__()
        except BaseException:
            self.__init__()  # type: ignore[misc]
            raise


def _init(self: Accelerator, *args: Any, **kwargs: Any) -> None:
    """Build an Accelerator with the session's engine, unless the arguments select one."""
    arguments = inspect.signature(_original_init).bind_partial(self, *args, **kwargs).arguments
    named = {key: value for key, value in arguments.items() if key != "self" and value is not None}
    session = current_config()
    own = not _OWN_ENGINE.isdisjoint(named)
    if session.auto_strategy is not None and not own:
        raise OptionError(_UNDECIDED)
    # Otherwise accelerate 1.15 silently keeps the first engine of the process.
    for variable in _ENGINE_VARIABLES:
        os.environ.pop(variable, None)
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001
    PartialState()
    if not _OWN_DEEPSPEED.isdisjoint(named):
        deepspeed.init_deepspeed(session.hardware)
    arguments = dict(named)
    if not own:
        named = _session_arguments(session, named)
    with process_group.owned_by_engines():
        _original_init(self, **named)
    _keep_shared_states()
    self._nbdist_arguments = arguments
    self._nbdist_session = None if own else session
    self._nbdist_clipped = set()
    release_models.add_accelerator(self)
    for variable in _ENGINE_VARIABLES:
        os.environ.pop(variable, None)
    if self.distributed_type == DistributedType.DEEPSPEED:
        deepspeed.reset_zero3_globals(self.state.deepspeed_plugin)


def rebuild_in_place(accelerator: Accelerator) -> None:
    """Rebuild an Accelerator in place with the session's current options.

    Its loaders, trackers and hooks are kept, so a loop over a prepared loader can continue. If
    the rebuild fails or is interrupted, the previous state is restored.
    """
    attributes = vars(accelerator)
    before = dict(attributes)
    attributes.clear()
    if (built := before.get("_built")) is not None:
        accelerator._built = built  # noqa: SLF001
    steps = GradientState().num_steps
    try:
        Accelerator.__init__(accelerator, **before["_nbdist_arguments"])
    except BaseException:
        attributes.clear()
        attributes.update(before)
        raise
    is_same = before["_nbdist_session"].options.accumulate == current_config().options.accumulate
    if is_same and "gradient_accumulation_plugin" not in before["_nbdist_arguments"]:
        accelerator.gradient_accumulation_steps = steps  # a cell may have set it
    attributes.update({name: before[name] for name in _KEPT_ATTRIBUTES if name in before})


_KEPT_ATTRIBUTES = (
    "_custom_objects",
    "_dataloaders",
    "_load_model_state_pre_hook",
    "_save_model_state_pre_hook",
    "flag_tensor",
    "step",
    "trackers",
    "log_with",
)
"""Attributes of accelerate 1.15's Accelerator that do not depend on the engine."""


def built_accelerators() -> list[Accelerator]:
    """Return the built Accelerators that use the session's engine, in the order of creation.

    The one that is rebuilt last sets the precision, so the order has to be the same on all ranks.
    """
    created = list(release_models.accelerators.values())
    return [accelerator for accelerator in created if not has_user_plugin(accelerator)]


def has_user_plugin(accelerator: Accelerator) -> bool:
    """Return whether the user gave the Accelerator its own engine."""
    return vars(accelerator).get("_nbdist_session") is None


def _keep_shared_states() -> None:
    for cls in (PartialState, AcceleratorState, GradientState):
        _shared_states[cls] = dict(cls._shared_state)


def restore_shared_states() -> None:
    """Restore the shared state that a cell has reset, which accelerators of other cells use.

    Called after each cell, so that within a cell accelerate's `_reset_state()`, which
    TrainingArguments of transformers 5.23 also calls, behaves as in a script. A cell that ends
    within `accumulate()` leaves a state in which `optimizer.step()` does nothing.
    """
    for cls, state in _shared_states.items():
        if not cls._shared_state:  # type: ignore[attr-defined]
            cls._shared_state.update(state)  # type: ignore[attr-defined]
    if GradientState._shared_state:  # noqa: SLF001
        GradientState().sync_gradients = True


def _session_arguments(session: EngineConfig, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the user's arguments of an Accelerator, completed from the session's options."""
    options, hardware = session.options, session.hardware
    kwargs = options.strategy.accelerator_kwargs(options)
    if "gradient_accumulation_plugin" in arguments:
        kwargs.pop("gradient_accumulation_steps")
    kwargs |= arguments
    plugin = arguments.get("dynamo_plugin")
    if plugin is not None and options.compile_model:
        # A Trainer always passes one, which compiles nothing unless it has torch_compile=True.
        is_off = plugin.backend == DynamoBackend.NO
        kwargs.pop("dynamo_plugin" if is_off else "dynamo_backend", None)
    if options.strategy.engine == "fsdp":
        precision = str(kwargs["mixed_precision"])
        kwargs["fsdp_plugin"] = fsdp.build_plugin(options, hardware, precision)
        kwargs |= fsdp.build_parallelism_config(options, hardware)
    elif options.strategy.engine == "deepspeed":
        deepspeed.init_deepspeed(hardware)
        kwargs["deepspeed_plugin"] = _deepspeed_plugin(session)
    return kwargs  # Accelerate uses DDP without a plugin


def _deepspeed_plugin(session: EngineConfig) -> DeepSpeedPlugin:
    config = session.options.strategy.deepspeed_config(session.options, session.hardware)
    # Without zero3_init_flag a full model is built before it is partitioned, as under FSDP.
    return DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)


def renew_deepspeed_plugin(state: AcceleratorState) -> None:
    """Replace the shared DeepSpeed plugin, whose "auto" values were filled for another model."""
    plugin = _deepspeed_plugin(current_config())
    plugin.set_mixed_precision(state.mixed_precision)
    plugin.select(_from_accelerator_state=True)
    state.deepspeed_plugins = plugin


def _prepare(self: Accelerator, *args: Any, device_placement: list[bool] | None = None) -> Any:
    args = _allow_second_prepare(self, args)
    models = [arg for arg in args if isinstance(arg, nn.Module)]
    for model in _evaluated.intersection(models):
        # accelerate 1.15 treats a model prepared for evaluation as prepared: with DDP, a Trainer
        # that evaluated before `train()` would silently train each rank without gradient
        # synchronization.
        _evaluated.discard(model)
        self._models[:] = [other for other in self._models if other is not model]
        vars(model).pop("_is_accelerate_prepared", None)
        if "_original_forward" in vars(model):
            model.forward = vars(model).pop("_original_forward")
    new = [model for model in models if not getattr(model, "_is_accelerate_prepared", False)]
    if args and all(arg is None for arg in args):
        # transformers 5.23: a Trainer that evaluated under FSDP1 has no optimizer
        raise OptionError(
            "accelerator.prepare() got only None. If a Trainer without train_dataset has evaluated,"
            " create a new model and Trainer for train(), or use backend fsdp2."
        )
    options = self._nbdist_session and self._nbdist_session.options
    unread = sharded_load.UnreadWeights(new, options)
    for model in new:
        generation.warn_of_large_tokenizer(model)
        wrap_policy.warn_of_half_weights(model, options, self.mixed_precision)
        wrap_policy.keep_4bit_layout(model)
    for arg in args:
        if isinstance(arg, Optimizer) and not isinstance(arg, AcceleratedOptimizer):
            if options and (reason := refusal_of_class(type(arg), options.backend)):
                raise OptionError(reason)
            wrap_policy.warn_of_flattened_parameters(arg, options)
            # Between steps the groups of a prepared optimizer of ZeRO-3 are empty (deepspeed
            # 0.19.8).
            _remove_empty_groups(arg)
    shards = bool(options and options.strategy.shards)
    call = prepared_models.PrepareCall(self, args, shards=shards)
    memory_probe.reset_for_prepare(new, args, call.meta_copy)
    if new and wrap_policy.has_weights():  # a switch has already released the unused models
        release_models.release_unused_models()
    with process_group.owned_by_engines(), unread.deferred(self):
        result = _prepare_with_engine(self, args, new, device_placement)
    for record in call.record_result(result):
        unread.read_shards(record)
        prepared_models.hook_forward(record)
    generation.patch_generate()
    memory_probe.start_probe(self, result, options)
    return result


def _allow_second_prepare(self: Accelerator, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return what to prepare instead of models and optimizers that were prepared before."""
    args = tuple(map(prepared_models.prepared_form, map(wrap_policy.compile_in_place, args)))
    if self.distributed_type == DistributedType.DEEPSPEED:
        return deepspeed.release_earlier_engines(args)
    if self.distributed_type == DistributedType.FSDP:
        for model in [arg for arg in args if isinstance(arg, nn.Module)]:
            fsdp.refuse_sharded_parts(model)
    return args


def _remove_empty_groups(optimizer: Optimizer) -> None:
    """Remove groups without parameters, as deepspeed 0.19.8 does, so that all engines agree.

    With LoRA, transformers 5.23 creates one for biases and norms. A scheduler that exists already
    has a learning rate for each group.
    """
    if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def _prepare_with_engine(
    self: Accelerator,
    args: Sequence[Any],
    new: Sequence[nn.Module],
    device_placement: list[bool] | None,
) -> Any:
    session: EngineConfig | None = self._nbdist_session
    options = session.options if session else None
    kind = self.distributed_type
    num_models = sum(isinstance(arg, nn.Module) for arg in args)
    if num_models > 1 and (self.is_fsdp2 or kind == DistributedType.DEEPSPEED):
        raise OptionError(
            f"accelerator.prepare() got {num_models} models, and FSDP2 and DeepSpeed take one in a"
            " call. Call it once for each model and its optimizer."
        )
    if options is not None:
        config = options.fsdp_config or {}
        for model in new:
            wrap_policy.check_weight_types(model)
            if options.activation_checkpointing and not wrap_units.add_activation_checkpointing(
                model, fsdp.find_units(model, config)
            ):
                raise OptionError(
                    f"Activation checkpointing found no repeated block in {type(model).__name__}."
                    " Group its layers into modules, or remove the option."
                )
            if options.compile and not options.compile_model:
                wrap_policy.compile_units(model, fsdp.find_units(model, config))
            if kind == DistributedType.FSDP:
                fsdp.sync_and_set_units(self, model, config)
    if kind == DistributedType.DEEPSPEED:
        return deepspeed.prepare(self, _original_prepare, args, options=options)
    if kind == DistributedType.FSDP:
        result = fsdp.prepare(self, _original_prepare, args)
    else:
        result = _original_prepare(self, *args, device_placement=device_placement)
    if options is not None and options.clip is not None:
        _clip_before_steps(self, options.clip)
    return result


def _release_before(original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        release_models.release_remaining()
        return original(self, *args, **kwargs)

    return method


def _free_memory(self: Accelerator, *objects: Any) -> Any:
    """Drop references to the prepared objects; those still in use elsewhere survive."""
    if "deepspeed_engine_wrapped" in vars(self):
        # accelerate 1.15 would destroy DeepSpeed's engine, and a Trainer calls this at the start
        # of every train(): the second one would have neither model nor optimizer.
        self.deepspeed_engine_wrapped = None
    return _original_free_memory(self, *objects)


def _prepare_model(self: Accelerator, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Prepare one model; register it if it is prepared for evaluation only."""
    prepared = _original_prepare_model(self, model, *args, **kwargs)
    if kwargs.get("evaluation_mode"):
        _evaluated.add(prepared)
    return prepared


def _clip_before_steps(accelerator: Accelerator, max_norm: float) -> None:
    """Clip before each real step of the prepared optimizers, unless the cell has clipped.

    DeepSpeed has this option built in; the hook adds it to the other engines.
    """
    for prepared in accelerator._optimizers:  # noqa: SLF001
        optimizer = prepared.optimizer
        if not getattr(optimizer, "_nbdist_clips", False):
            optimizer._nbdist_clips = True  # noqa: SLF001
            optimizer.register_step_pre_hook(
                functools.partial(_clip_step, accelerator, max_norm=max_norm)
            )


def _clip_step(
    accelerator: Accelerator,
    optimizer: Optimizer,
    args: tuple[Any, ...],  # noqa: ARG001 - torch's signature of a hook
    kwargs: dict[str, Any],  # noqa: ARG001
    *,
    max_norm: float,
) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids = set(map(id, parameters))
    if ids & accelerator._nbdist_clipped:  # noqa: SLF001
        accelerator._nbdist_clipped -= ids  # noqa: SLF001
        return
    # A GradScaler has already unscaled the gradients, except for a fused optimizer (torch 2.13),
    # which does it in its kernel: scale the limit instead.
    if (scale := getattr(optimizer, "grad_scale", None)) is not None:
        max_norm *= float(scale)
    owners = [m for m in accelerator._models if ids & set(map(id, m.parameters()))]  # noqa: SLF001
    if owners and isinstance(owners[-1], Fsdp1):
        owners[-1].clip_grad_norm_(max_norm)  # reduces the norm over the ranks
    else:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def _clip_grad_norm(
    self: Accelerator,
    parameters: Any,
    max_norm: float,
    norm_type: float = 2,
) -> Any:
    """Clip now, or under DeepSpeed at the next step; return the norm before clipping."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if math.isfinite(max_norm):
        self._nbdist_clipped |= set(map(id, parameters))
    if self.distributed_type == DistributedType.DEEPSPEED and self.deepspeed_engine_wrapped:
        return deepspeed.clip_grad_norm(self, parameters, max_norm, norm_type)
    if self.distributed_type == DistributedType.FSDP:
        return fsdp.clip_grad_norm(self, parameters, max_norm, norm_type)
    if self.sync_gradients:
        own = [each for each in prepared_models.all_models() if each.accelerator() is self]
        prepared_models.average_gradients(own)
    return _original_clip(self, parameters, max_norm, norm_type)
