"""The session's `accelerator`, and every other one, under the session's strategy.

Runs on a rank. `worker.main` calls `install` once, after the process group exists. From then
on an `Accelerator()` that a cell or a Trainer makes takes the session's engine, unless it
is given a plugin of its own. The `accelerator` of a rank's namespace is a
`LateAccelerator`: it builds its engine at the first `prepare()`, so that the choice of the
engine can wait for the model.

The hooks sit on Accelerate's class itself, because modules that are imported already
(Trainer's) hold the class by name.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch import nn

from nbdist.errors import OptionError, SessionError
from nbdist.worker import process_group_lifetime
from nbdist.worker.engines import cpu, deepspeed, fsdp, wrap_policy
from nbdist.worker.interrupt.step_gate import gate
from nbdist.worker.memory import memory_probe
from nbdist.worker.profiling import optimizer_hooks
from nbdist.worker.training import dataloader_state, model_cleanup, prepared_models

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.hardware.discovery import Node
    from nbdist.strategies import Hardware, Options
    from nbdist.worker.engines.auto_strategy import Chooser

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
"""Arguments of `Accelerator(...)` by which a user brings an engine."""

_OWN_DEEPSPEED = frozenset({"deepspeed_plugin", "deepspeed_plugins"})

_UNDECIDED = (
    "--auto decides when the rank's own `accelerator` prepares a model, or a Trainer is made with"
    " one; use that instead of a new Accelerator()."
)

_LEFT_BEHIND = (
    "ACCELERATE_USE_FSDP",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_MIXED_PRECISION",
    "FSDP_CPU_RAM_EFFICIENT_LOADING",
)
"""Environment that accelerate 1.15's plugins set and its next Accelerator would read."""


@dataclass(frozen=True, slots=True)
class Session:
    """What this rank's engines are built from."""

    options: Options
    hardware: Hardware
    nodes: Sequence[Node] = ()
    """What the nodes have; none: all ranks are on this machine."""
    chooser: Chooser | None = None
    """Under --auto, until it has decided; the options hold no longer than that."""


_current: Session | None = None
_original_init = Accelerator.__init__
_original_prepare = Accelerator.prepare
_original_prepare_model = Accelerator.prepare_model
_original_clip = Accelerator.clip_grad_norm_
_original_free_memory = Accelerator.free_memory

_shared_states: dict[type, dict[str, Any]] = {}
"""By class of accelerate, what all its instances share: as the last Accelerator was built."""

_evaluated: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that were prepared for evaluation only."""

_ENGINE_NAMES = frozenset(_original_init.__code__.co_names)
"""Attributes that a built Accelerator has and an unbuilt one has not, among other names."""


def current() -> Session:
    """Return the session of this rank.

    Raises:
        SessionError: this process is not a rank.
    """
    if _current is None:
        message = "this is not a rank of a session; call it in a %%distribute cell."
        raise SessionError(message)
    return _current


def decide(choice: Callable[[Chooser], Options]) -> Session:
    """Return the session with its options decided; under --auto `choice` asks the chooser."""
    global _current  # noqa: PLW0603 - the decision holds for the whole rank
    session = current()
    if session.chooser is not None:
        _current = session = replace(session, options=choice(session.chooser), chooser=None)
    return session


def adopt(options: Options) -> Session:
    """Let every Accelerator that is built from now on take these options."""
    global _current  # noqa: PLW0603 - it holds for the whole rank
    _current = replace(current(), options=options, chooser=None)
    return _current


def install(
    options: Options,
    hardware: Hardware,
    *,
    nodes: Sequence[Node] = (),
    chooser: Chooser | None = None,
) -> Accelerator:
    """Put the session's strategy under every Accelerator of this rank and return the late one.

    To be called once, with checked options, after the default process group was made.

    Args:
        options: the session's, checked.
        hardware: what the ranks run on.
        nodes: what they have; none: all ranks are on this machine.
        chooser: where given, decides the options at the first `prepare()` of the late one.
    """
    global _current  # noqa: PLW0603 - a rank has one session in its life
    _current = Session(options, hardware, nodes, chooser)
    process_group_lifetime.install()
    if hardware.kind == "cpu":
        cpu.install()
    deepspeed.install()
    late = LateAccelerator()
    _keep_shared_states()
    memory_probe.install(late.device)
    dataloader_state.install()
    Accelerator.__init__ = _init
    Accelerator.prepare = _prepare
    Accelerator.prepare_model = _prepare_model
    Accelerator.clip_grad_norm_ = _clip_grad_norm
    Accelerator.free_memory = Accelerator.clear = _free_memory
    for name in ("backward", "save_state", "load_state"):
        setattr(Accelerator, name, _after_letting_go(getattr(Accelerator, name)))
    Accelerator.backward = prepared_models.counting_backward(Accelerator.backward)
    for cls in (AcceleratedOptimizer, deepspeed.StepsItself):
        for name in ("step", "zero_grad"):
            setattr(cls, name, prepared_models.using_gradients(getattr(cls, name)))
        step = optimizer_hooks.around_step(gate.around_step(cls.step))
        setattr(cls, "step", step)  # noqa: B010 - no plain attribute to mypy
    return late


class LateAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator that is built at the first `prepare()`.

    Before it, what needs no engine works: device, process_index, num_processes,
    is_main_process, print, wait_for_everyone, gather, reduce. Anything else builds it.
    """

    def __init__(self) -> None:
        """Know the ranks, and nothing of the engine."""
        self._built = False
        self.state = PartialState()

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Build the engine where there is none, then prepare as Accelerate does."""
        if not self._built:
            self._build(args)
        return super().prepare(*args, device_placement=device_placement)

    def end_training(self) -> None:
        """End trackers; where nothing was prepared there are none, and --auto has not decided."""
        if self._built:
            super().end_training()

    @property
    def distributed_type(self) -> DistributedType:
        """The engine, as Accelerate names it; asking builds it."""
        if not self._built:
            self._build(())
        return self.state.distributed_type

    def __repr__(self) -> str:
        """Say which strategy, and whether it is built."""
        if current().chooser is not None:
            return "<accelerator: auto (decided at the first prepare())>"
        state = "built" if self._built else "built at the first prepare()"
        return f"<accelerator: {current().options.strategy.title} ({state})>"

    def __getattr__(self, name: str) -> Any:
        """Build the engine for what an Accelerator has only with one."""
        of_engine = name in _ENGINE_NAMES or name in vars(Accelerator)
        if self.__dict__.get("_built", True) or not of_engine:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(message)
        self._build(())
        return getattr(self, name)

    def _build(self, objects: Sequence[object]) -> None:
        """Decide the options, then become an ordinary Accelerator."""
        decide(lambda chooser: chooser(objects))
        self._built = True
        try:
            super().__init__()
        except BaseException:
            self.__init__()  # type: ignore[misc]
            raise


@functools.wraps(_original_init)
def _init(self: Accelerator, *args: Any, **kwargs: Any) -> None:
    """Build an Accelerator; its engine is the session's where none is given."""
    given = inspect.signature(_original_init).bind_partial(self, *args, **kwargs).arguments
    named = {key: value for key, value in given.items() if key != "self" and value is not None}
    session = current()
    own = not _OWN_ENGINE.isdisjoint(named)
    if session.chooser is not None and not own:
        raise OptionError(_UNDECIDED)
    _forget_engine()
    if not _OWN_DEEPSPEED.isdisjoint(named):
        deepspeed.start(session.hardware)
    asked = dict(named)
    if not own:
        named = _with_session(session, named)
    with process_group_lifetime.owned_by_engines():
        _original_init(self, **named)
    _keep_shared_states()
    self._nbdist_asked = asked
    self._nbdist_session = None if own else session
    self._nbdist_clipped = False
    model_cleanup.know(self)
    for variable in _LEFT_BEHIND:
        os.environ.pop(variable, None)
    if self.distributed_type == DistributedType.DEEPSPEED:
        deepspeed.forget_globals(self.state.deepspeed_plugin)


def take_apart(accelerator: Accelerator) -> None:
    """Let an Accelerator forget the models, optimizers and schedulers that it prepared."""
    for kept in (accelerator._models, accelerator._optimizers, accelerator._schedulers):  # noqa: SLF001
        kept.clear()
    accelerator.deepspeed_engine_wrapped = None


def renew(accelerator: Accelerator) -> None:
    """Build an Accelerator again, in place, under the session's options of now.

    Its loaders, trackers and hooks stay: a loop over a prepared loader goes on where it is. Where
    that fails or is stopped, it is as before.
    """
    now = vars(accelerator)
    before = dict(now)
    now.clear()
    if (built := before.get("_built")) is not None:
        accelerator._built = built  # noqa: SLF001
    try:
        Accelerator.__init__(accelerator, **before["_nbdist_asked"])
    except BaseException:
        now.clear()
        now.update(before)
        raise
    now.update({name: before[name] for name in _OUTLIVE_THE_ENGINE if name in before})


_OUTLIVE_THE_ENGINE = (
    "_custom_objects",
    "_dataloaders",
    "_load_model_state_pre_hook",
    "_save_model_state_pre_hook",
    "flag_tensor",
    "step",
    "trackers",
    "log_with",
)
"""Attributes of an Accelerator of accelerate 1.15 that no engine has a part in."""


def built() -> list[Accelerator]:
    """Accelerators that are built and have the session's engine."""
    found = [one for one in model_cleanup.known() if vars(one).get("_nbdist_session") is not None]
    return sorted(found, key=id)


def brings_its_own(accelerator: Accelerator) -> bool:
    """Whether the user gave it an engine."""
    return vars(accelerator).get("_nbdist_session") is None


def _forget_engine() -> None:
    """Take the engine of an earlier Accelerator out of Accelerate's shared state.

    Without it accelerate 1.15 silently stays with the first engine of a process.
    """
    for variable in _LEFT_BEHIND:
        os.environ.pop(variable, None)
    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001
    PartialState()


def _keep_shared_states() -> None:
    for cls in (PartialState, AcceleratorState, GradientState):
        _shared_states[cls] = dict(cls._shared_state)


def restore_shared_states() -> None:
    """Give back what a cell has reset: the accelerators of other cells share it.

    Called when a cell has ended, so that within a cell accelerate's `_reset_state()`, which
    TrainingArguments of transformers 5.23 calls as well, does what it does in a script.
    """
    for cls, kept in _shared_states.items():
        if not cls._shared_state:  # type: ignore[attr-defined]
            cls._shared_state.update(kept)  # type: ignore[attr-defined]


def _with_session(session: Session, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an Accelerator, the session's where the user gave none."""
    options, hardware = session.options, session.hardware
    kwargs = options.strategy.accelerator_kwargs(options)
    if "gradient_accumulation_plugin" in given:
        kwargs.pop("gradient_accumulation_steps")
    if "dynamo_plugin" in given:
        kwargs.pop("dynamo_backend", None)
    kwargs |= given
    engine = _ENGINE_KWARGS[options.strategy.engine]
    return kwargs | engine(options, hardware, str(kwargs["mixed_precision"]))


def _ddp_kwargs(_: Options, __: Hardware, ___: str) -> dict[str, Any]:
    """DDP is what Accelerate does without a plugin."""
    return {}


def _fsdp_kwargs(options: Options, hardware: Hardware, precision: str) -> dict[str, Any]:
    """Return the FSDP plugin, and over which ranks it cuts where that is not all."""
    plugin = {"fsdp_plugin": fsdp.plugin(options, hardware, precision)}
    return plugin | fsdp.parallelism(options, hardware)


def _zero_kwargs(options: Options, hardware: Hardware, _: str) -> dict[str, Any]:
    """Return the DeepSpeed plugin, its communication started."""
    deepspeed.start(hardware)
    return {"deepspeed_plugin": deepspeed.plugin(options, hardware)}


_ENGINE_KWARGS = {"ddp": _ddp_kwargs, "fsdp": _fsdp_kwargs, "deepspeed": _zero_kwargs}


@functools.wraps(_original_prepare)
def _prepare(self: Accelerator, *args: Any, device_placement: list[bool] | None = None) -> Any:
    """Prepare under any engine, and measure what comes of it."""
    for model in _evaluated.intersection(one for one in args if isinstance(one, nn.Module)):
        _take_back(self, model)
    new = [one for one in args if isinstance(one, nn.Module) and not _is_prepared(one)]
    _check_something(args)
    meeting = prepared_models.Meeting(self, args)
    memory_probe.meet(new, args, meeting.twin)
    if new and wrap_policy.have_values():  # else a switch, which let go of everything before
        model_cleanup.let_go()
    with process_group_lifetime.owned_by_engines():
        result = _prepared(self, args, new, device_placement)
    for one in meeting.learn(result):
        prepared_models.watch_forward(one, gathers=_cuts_parameters(self))
    memory_probe.watch(self, result, self._nbdist_session and self._nbdist_session.options)
    return result


def _cuts_parameters(accelerator: Accelerator) -> bool:
    """Whether the engine cuts the parameters of its models."""
    session: Session | None = accelerator._nbdist_session  # noqa: SLF001
    return session is not None and "parameters" in session.options.strategy.shards


def _prepared(
    self: Accelerator,
    args: Sequence[Any],
    new: Sequence[nn.Module],
    device_placement: list[bool] | None,
) -> Any:
    """Prepare under any engine; adds activation checkpointing, units and clipping."""
    session: Session | None = self._nbdist_session
    options = session.options if session else None
    kind = self.distributed_type
    if options is not None:
        config = options.fsdp_config or {}
        for model in new:
            if options.activation_checkpointing:
                _checkpoint_activations(model, config)
            if kind == DistributedType.FSDP:
                fsdp.shard_ready(self, model, config)
    if kind == DistributedType.DEEPSPEED:
        return deepspeed.prepare(self, _original_prepare, args, options=options)
    if kind == DistributedType.FSDP:
        result = fsdp.prepare(self, _original_prepare, args)
    else:
        result = _original_prepare(self, *args, device_placement=device_placement)
    if options is not None and options.clip is not None:
        _clip_before_steps(self, options.clip)
    return result


def _check_something(args: Sequence[object]) -> None:
    """Refuse a call with nothing but None, which a Trainer makes.

    transformers 5.23: `evaluate()` under FSDP1 takes the wrapped model for `model` alone, and
    `train()` after it goes on without an optimizer.
    """
    if args and all(one is None for one in args):
        message = (
            "there is nothing to prepare, only None; if this is Trainer.train() after "
            "Trainer.evaluate() under fsdp1, make a new model and Trainer for train(), call "
            "train() first, or use backend fsdp2."
        )
        raise OptionError(message)


def _after_letting_go(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that uses what was prepared."""

    @functools.wraps(original)
    def method(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        model_cleanup.let_go_of_the_rest()
        return original(self, *args, **kwargs)

    return method


@functools.wraps(_original_free_memory)
def _free_memory(self: Accelerator, *objects: Any) -> Any:
    """Forget what was prepared; what something else still uses lives on.

    accelerate 1.15 destroys DeepSpeed's engine here, and a Trainer calls this first in each
    `train()`: the second one would have neither model nor optimizer.
    """
    if "deepspeed_engine_wrapped" in vars(self):
        self.deepspeed_engine_wrapped = None
    return _original_free_memory(self, *objects)


@functools.wraps(_original_prepare_model)
def _prepare_model(self: Accelerator, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Prepare one model; remember the one that is prepared for evaluation only."""
    made = _original_prepare_model(self, model, *args, **kwargs)
    if kwargs.get("evaluation_mode"):
        _evaluated.add(made)
    return made


def _take_back(accelerator: Accelerator, model: nn.Module) -> None:
    """Undo a preparation for evaluation, so that the model can be prepared for training.

    accelerate 1.15 takes it for prepared: a Trainer that evaluated before `train()` would
    train each rank alone under DDP, without a word.
    """
    _evaluated.discard(model)
    accelerator._models[:] = [one for one in accelerator._models if one is not model]  # noqa: SLF001
    vars(model).pop("_is_accelerate_prepared", None)
    if "_original_forward" in vars(model):
        model.forward = vars(model).pop("_original_forward")


def _is_prepared(model: nn.Module) -> bool:
    """Whether a model went through `prepare()` already."""
    return bool(getattr(model, "_is_accelerate_prepared", False))


def _checkpoint_activations(model: nn.Module, config: Any) -> None:
    """Recompute activations, or say that the model offers no block to recompute."""
    if not wrap_policy.checkpoint_activations(model, fsdp.units(model, config)):
        message = (
            f"activation checkpointing found no block in {type(model).__name__}; build the model "
            "of larger modules or leave the option out."
        )
        raise OptionError(message)


def _clip_before_steps(accelerator: Accelerator, max_norm: float) -> None:
    """Clip before each real step of the prepared optimizers, unless the cell has clipped.

    DeepSpeed clips by itself; this gives the other engines the same.
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
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],  # noqa: ARG001 - torch's signature of a hook
    kwargs: dict[str, Any],  # noqa: ARG001
    *,
    max_norm: float,
) -> None:
    """Clip the gradients that an optimizer is about to use.

    A GradScaler has unscaled them by now, but for a fused optimizer, whose kernel does it
    (torch 2.13): there the limit is scaled instead.
    """
    if accelerator._nbdist_clipped:  # noqa: SLF001
        accelerator._nbdist_clipped = False  # noqa: SLF001
        return
    if (scale := getattr(optimizer, "grad_scale", None)) is not None:
        max_norm *= float(scale)
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    held = set(map(id, parameters))
    owners = [m for m in accelerator._models if held & set(map(id, m.parameters()))]  # noqa: SLF001
    if owners:
        fsdp.clip(owners[-1], parameters, max_norm)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)


@functools.wraps(_original_clip)
def _clip_grad_norm(
    self: Accelerator,
    parameters: Any,
    max_norm: float,
    norm_type: float = 2,
) -> Any:
    """Clip now, or under DeepSpeed at the coming step; returns the norm before."""
    self._nbdist_clipped = math.isfinite(max_norm)
    if self.distributed_type == DistributedType.DEEPSPEED and self.deepspeed_engine_wrapped:
        return deepspeed.clip_grad_norm(self, max_norm, norm_type)
    if self.distributed_type == DistributedType.FSDP:
        return fsdp.clip_grad_norm(self, parameters, max_norm, norm_type)
    return _original_clip(self, parameters, max_norm, norm_type)
