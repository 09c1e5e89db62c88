"""What DeepSpeed needs so that a cell means the same under it; runs on a rank.

`worker.engines.accelerator` calls `plugin` when the engine is built, `prepare` for each call of
`Accelerator.prepare`, and `clip_grad_norm` for `Accelerator.clip_grad_norm_`. Accelerate
1.15 steps inside `backward()`, so a cell's clipping would come too late: here `backward()`
goes backward and `optimizer.step()` steps.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import math
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import accelerate.accelerator as accelerate_module
import torch
from accelerate import DeepSpeedPlugin
from accelerate.utils import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, DummyOptim
from torch import nn
from torch.optim import Adagrad, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader

from nbdist.errors import OptionError
from nbdist.signals import unstopped
from nbdist.worker import device_visibility
from nbdist.worker.engines import cpu, wrap_policy
from nbdist.worker.training import model_cleanup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accelerate import Accelerator

    from nbdist.strategies import Hardware, Options

log = logging.getLogger(__name__)

_HAVE_CPU_VERSION = (Adam, AdamW, Adagrad)
"""Optimizers that accelerate 1.15 replaces by DeepSpeed's own ones for an offload."""

_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Model -> the engine that was built around it."""

_CUTS_PARAMETERS = 3
"""The ZeRO stage that does."""


class BackwardOnly(DeepSpeedEngineWrapper):  # type: ignore[misc]
    """Accelerate's wrapper of an engine, without the step."""

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:  # noqa: FBT001, FBT002
        """Accumulate gradients; reduce them over the ranks where a step follows."""
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)


class StepsItself(DeepSpeedOptimizerWrapper):  # type: ignore[misc]
    """Accelerate's wrapper of a ZeRO optimizer, whose `step()` does step.

    `zero_grad()` stays without an effect: the engine clears gradients when it steps.
    """

    engine: Any = None

    def step(self, closure: Callable[[], object] | None = None) -> None:
        """Step where Accelerate says that gradients are complete, as all optimizers do."""
        if closure is not None:
            message = "DeepSpeed takes no closure in optimizer.step(); compute the loss before it."
            raise OptionError(message)
        if self.engine is None or not self.gradient_state.sync_gradients:
            return
        try:
            self.engine.step()
        finally:
            self.optimizer.clip_grad = self.engine.gradient_clipping()


def install() -> None:
    """Make every Accelerator of this rank step in `optimizer.step()`."""
    accelerate_module.DeepSpeedEngineWrapper = BackwardOnly
    accelerate_module.DeepSpeedOptimizerWrapper = StepsItself


def plugin(options: Options, hardware: Hardware) -> DeepSpeedPlugin:
    """Return Accelerate's plugin for the session's options.

    `zero3_init_flag` is off: a model is built in full before it is cut, as under FSDP.
    """
    config = options.strategy.deepspeed_config(options, hardware)
    return DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)


def start(hardware: Hardware) -> None:
    """Let DeepSpeed adopt the process group, quietly; after the first call nothing."""
    with unstopped():  # an import that is cut in two leaves modules that no later one repairs
        import deepspeed

        model_cleanup.let_engines_go()
    if hardware.kind == "cpu":
        cpu.skip_shared_memory_op()
    else:
        device_visibility.open_nvml()
    # deepspeed 0.19 uses names that torch 2.13 deprecates, and each collective would say so.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        deepspeed.init_distributed(
            dist_backend=torch.distributed.get_backend(),
            auto_mpi_discovery=False,
            verbose=False,
        )
    log.debug("deepspeed: %s", said.getvalue())


def forget_globals(made: DeepSpeedPlugin) -> None:
    """Undo transformers' process-wide ZeRO-3 switch, which a plugin sets.

    With it `from_pretrained` would give cut parameters (of one dimension each) in the
    second run of a cell but not in the first.
    """
    from transformers.integrations.deepspeed import (
        unset_hf_deepspeed_config,
    )

    made.dschf = None
    unset_hf_deepspeed_config()


def prepare(
    accelerator: Accelerator,
    original: Callable[..., Any],
    args: Sequence[object],
    *,
    options: Options | None,
    **kwargs: Any,
) -> Any:
    """Prepare as Accelerate does; a cell may be run again with a new model.

    `options` are None for a user's own plugin, whose config is left as it is.
    """
    model = next((one for one in args if isinstance(one, nn.Module)), None)
    optimizer = next((one for one in args if isinstance(one, (Optimizer, DummyOptim))), None)
    if model is None:
        # A Trainer's second train() brings its prepared optimizer alone.
        model = getattr(optimizer, "engine", None)
    if engine_of(model) is not None:
        return _again(accelerator, original, args, model, optimizer)
    used = accelerator.state.deepspeed_plugin
    _check_together(used.zero_stage, model, optimizer)
    steps = used.deepspeed_config["gradient_accumulation_steps"]
    if isinstance(steps, int) and options is not None:
        # A Trainer counts by itself and keeps 1 here; accelerate 1.15 would warn and do this.
        accelerator.gradient_accumulation_steps = steps
    if model is None:
        return original(accelerator, *args, **kwargs)
    before = accelerator.deepspeed_engine_wrapped
    # accelerate 1.15 keeps the first engine for backward() when a second one is prepared.
    accelerator.deepspeed_engine_wrapped = None
    if options is not None:
        _fill(accelerator, args, model, optimizer)
    exchange = contextlib.nullcontext() if wrap_policy.have_values() else _nothing_exchanged()
    # deepspeed 0.19.8 makes a text of all parameters, for a log that nobody reads: 5 ms each.
    with exchange, torch._tensor_str.printoptions(threshold=1, edgeitems=1):  # noqa: SLF001
        result = original(accelerator, *args, **kwargs)
    engine = accelerator.deepspeed_engine_wrapped.engine
    _engines[model] = weakref.ref(engine)
    _keep_gradients_in_memory(engine.optimizer)
    _give_groups_back(engine.optimizer, optimizer)
    for one in accelerator._optimizers:  # noqa: SLF001
        if isinstance(one, StepsItself) and one.optimizer is engine.optimizer:
            one.engine = engine
    if optimizer is None and before is not None:
        accelerator.deepspeed_engine_wrapped = before
    return result


@contextlib.contextmanager
def _nothing_exchanged() -> Iterator[None]:
    """Let DeepSpeed skip the exchange of values that a model does not have yet.

    deepspeed 0.19.8 sends each parameter, as bytes, from rank 0 to all others when it is cut,
    and gathers each cut one again to put a hook on it.
    """
    from deepspeed import comm
    from deepspeed.runtime.zero.partition_parameters import Init

    broadcast, gather = comm.broadcast, Init._all_gather  # noqa: SLF001

    def no_bytes(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return None if tensor.dtype == torch.uint8 else broadcast(tensor, *args, **kwargs)

    comm.broadcast = no_bytes
    Init._all_gather = lambda *_args, **_kwargs: None  # noqa: SLF001
    try:
        yield
    finally:
        comm.broadcast = broadcast
        Init._all_gather = gather  # noqa: SLF001


def engine_of(model: nn.Module | None) -> Any:
    """Return the living engine that a model is, or is in; else None."""
    if model is None or hasattr(model, "set_gradient_accumulation_boundary"):
        return model
    found = _engines.get(model)
    return found and found()


def _again(
    accelerator: Accelerator,
    original: Callable[..., Any],
    args: Sequence[object],
    model: nn.Module | None,
    optimizer: object,
) -> Any:
    """Return an engine with its own optimizer as they are, the rest prepared; refuse others."""
    engine = engine_of(model)
    if model is not engine or getattr(optimizer, "engine", engine) is not engine:
        message = (
            f"this {type(getattr(engine, 'module', engine)).__name__} is in a DeepSpeed engine "
            "already; build the model anew and use one call for both: "
            "model, optimizer = accelerator.prepare(model, optimizer)."
        )
        raise OptionError(message)
    accelerator.deepspeed_engine_wrapped = BackwardOnly(engine)
    rest = [one for one in args if one is not engine and one is not optimizer]
    made = original(accelerator, *rest) if rest else ()
    left = iter(made if len(rest) > 1 else [made])
    result = [one if one is engine or one is optimizer else next(left) for one in args]
    return tuple(result) if len(result) > 1 else result[0]


def _check_together(stage: int, model: nn.Module | None, optimizer: object) -> None:
    """Refuse an optimizer without its model, and a model without one where ZeRO needs it.

    ZeRO-3 takes a model alone, to compute with cut parameters.
    """
    alone = "model" if optimizer is None else "optimizer"
    if (model is None) == (optimizer is None) or (model is not None and stage == _CUTS_PARAMETERS):
        return
    advice = (
        "or model.to(device) for a model that is not trained"
        if model is not None
        else "and for a Trainer that evaluated before train() make a new one with a new model"
    )
    message = (
        f"the {alone} came to accelerator.prepare() alone; under DeepSpeed ZeRO-{stage} use one "
        f"call for both: model, optimizer = accelerator.prepare(model, optimizer), {advice}."
    )
    raise OptionError(message)


def clip_grad_norm(accelerator: Accelerator, max_norm: float, norm_type: float) -> torch.Tensor:
    """Return the norm of all gradients now, and clip by it at the coming step.

    All parameters of the engine count. An infinite `max_norm` only measures.
    """
    if norm_type != 2:  # noqa: PLR2004
        message = f"norm_type is {norm_type}; DeepSpeed clips by the 2-norm only."
        raise OptionError(message)
    engine = accelerator.deepspeed_engine_wrapped.engine
    zero = engine.optimizer
    if not accelerator.sync_gradients:
        return torch.as_tensor(engine.get_global_grad_norm() or 0.0)
    if math.isfinite(max_norm):
        zero.clip_grad = float(max_norm)
    return _norm(zero)


@torch.no_grad()
def _norm(zero: Any) -> torch.Tensor:
    """Return the norm of a ZeRO optimizer's gradients; inf where one is not finite."""
    from deepspeed.runtime.utils import combine_grad_norm_groups

    if hasattr(zero, "scaled_global_norm"):
        norm = zero.scaled_global_norm()
    else:
        norm = combine_grad_norm_groups(zero._get_norm_groups())  # noqa: SLF001
    norm = torch.as_tensor(norm)
    # deepspeed 0.19 says -1 for a norm that is not finite.
    return torch.where(norm < 0, torch.inf, norm / zero.loss_scale)


def _fill(
    accelerator: Accelerator, args: Sequence[object], model: nn.Module, optimizer: object
) -> None:
    """Fill those "auto" values of the session's config that Accelerate would refuse."""
    made = accelerator.state.deepspeed_plugin
    config = made.deepspeed_config
    if made.is_auto("gradient_clipping"):
        # accelerate 1.15 fills in 1.0, while the other engines do not clip.
        config["gradient_clipping"] = 0.0
    fresh = accelerator.__dict__.setdefault("_nbdist_config", copy.deepcopy(config))
    if "train_micro_batch_size_per_gpu" in config and made.is_auto("train_batch_size") is False:
        # A second model: what the first one filled in must not stay.
        for key in ("train_micro_batch_size_per_gpu", "train_batch_size"):
            config[key] = copy.deepcopy(fresh.get(key))
    if made.is_auto("train_micro_batch_size_per_gpu") and not any(map(_sized, args)):
        config["train_micro_batch_size_per_gpu"] = 1
        config["train_batch_size"] = accelerator.num_processes * int(
            accelerator.gradient_accumulation_steps
        )
    zero = config["zero_optimization"]
    offloaded = zero.get("offload_optimizer", {}).get("device", "none") != "none"
    if offloaded and optimizer is not None and not isinstance(optimizer, _HAVE_CPU_VERSION):
        # accelerate 1.15 would make an Adam of any other optimizer.
        config["zero_force_ds_cpu_optimizer"] = False
    _size_buffers(zero, model)


def _give_groups_back(made: Any, given: object) -> None:
    """Let DeepSpeed's own Adagrad have the groups of the user's.

    deepspeed 0.19.8 makes it anew with one group and the class's defaults
    (stage_1_and_2.py:947, stage3.py:1358): the options of groups would be lost, and a scheduler
    would steer an optimizer that nothing uses.
    """
    inner = getattr(made, "optimizer", None)
    if isinstance(inner, Adagrad) and isinstance(given, Adagrad) and inner is not given:
        inner.param_groups = given.param_groups
        if hasattr(made, "_link_all_hp_params"):
            made._link_all_hp_params()  # noqa: SLF001 - stages 1 and 2 need it at the first step


def _keep_gradients_in_memory(made: Any) -> None:
    """Let an NVMe offload swap optimizer state and parameters, not gradients.

    Measured with deepspeed 0.19.8 and gradients above `aio.block_size` on NVMe: about half of
    the elements of such a weight moved in the wrong direction at the first step, without a
    word; with gradients kept they move as without an offload. Where in DeepSpeed it goes wrong
    is not known. They stay in host memory: 4 bytes a parameter divided by the ranks.
    """
    swapper = getattr(made, "optimizer_swapper", None)
    if swapper is None:
        return
    original = swapper._adjust_for_misaligned_lengths  # noqa: SLF001

    def adjusted(*, tensors: Any, offsets: Any) -> Any:
        pieces, places = original(tensors=tensors, offsets=offsets)
        kept = [piece.clone() for piece in pieces]
        for piece in kept:
            piece.swappable = False
        return kept, places

    swapper._adjust_for_misaligned_lengths = adjusted  # noqa: SLF001


def _sized(one: object) -> bool:
    """Whether Accelerate can read a batch size from it."""
    return isinstance(one, DataLoader) and isinstance(one.batch_size, int)


def _size_buffers(zero: dict[str, Any], model: nn.Module) -> None:
    """Size the buffers of a parameter offload to NVMe by the model, not by 1e8 elements."""
    section = zero.get("offload_param", {})
    if section.get("device") == "nvme" and "buffer_size" not in section:
        section["buffer_size"] = max((p.numel() for p in model.parameters()), default=1)
