"""Adapts DeepSpeed so that a training cell behaves as under the other engines.

`worker.engines.accelerator_patch` calls ``init_deepspeed`` when the engine is built, `prepare`
for each call of `Accelerator.prepare`, and `clip_grad_norm` for `Accelerator.clip_grad_norm_`. With
accelerate 1.15, DeepSpeed steps inside `backward()`, before the cell can clip gradients: here
`backward()` only computes gradients and `optimizer.step()` steps.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import math
import os
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import GradientState
from accelerate.utils import recursively_apply

# accelerate 1.15 exports them from accelerate.utils only if DeepSpeed is installed
from accelerate.utils.deepspeed import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DummyOptim,
    HfDeepSpeedConfig,
)
from torch import nn
from torch.optim import Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nbdist.errors import OptionError
from nbdist.signal_handling import defer_interrupt
from nbdist.state import layouts
from nbdist.state.layouts.base import is_deepspeed_engine
from nbdist.state.layouts.deepspeed import update_masters
from nbdist.worker.engines import cpu_patches, deepspeed_patches, wrap_policy
from nbdist.worker.engines.deepspeed_patches import (
    are_reduced,
    drop_earlier_offloaded,
    drop_gradients,
    has_gradients,
)
from nbdist.worker.library_patches import patch, patched
from nbdist.worker.training import prepared_models
from nbdist.worker.training.rebind_variables import ReplacementMap, is_stale

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from accelerate import Accelerator, DeepSpeedPlugin

    from nbdist.strategies import Hardware, Options

log = logging.getLogger(__name__)

_HAVE_CPU_VERSION = (Adam, AdamW, Adagrad)
"""Optimizers that accelerate 1.15 replaces with DeepSpeed's CPU versions when offloading."""

_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Model -> the engine that wraps it."""

_SHOWN = "_nbdist_shown"
"""Attribute of a ZeRO-3 engine with the config that transformers' global refers to in a pass."""

_FIRST_CONFIG = "_nbdist_config"
"""Attribute of an Accelerator with its DeepSpeed config as it was before the first `prepare()`."""

_OF_ZERO3_MODULES = (
    "_external_params",
    "all_parameters",
    "applied_pre_backward_ref_cnt",
    "ds_external_parameters",
    "ds_grads_remaining",
    "ds_id",
    "ds_inflight_param_registry",
    "ds_recompute_parameters",
    "post_bwd_fn",
    "pre_bwd_fn",
)
"""Attributes that deepspeed 0.19.8 adds to each module under ZeRO-3, some with its engine."""

PARAMETER_STAGE = 3
"""The ZeRO stage that partitions parameters."""


_OWN_STATE = (
    "Under DeepSpeed optimizer.state_dict() would be one rank's part, and load_state_dict() does"
    " not take it. Use %nbdist save NAME and %nbdist load NAME, or accelerator.save_state(folder)"
    " and load_state(folder)."
)


class BackwardOnlyEngineWrapper(DeepSpeedEngineWrapper):  # type: ignore[misc]
    """Accelerate's engine wrapper, without the step in `backward()`."""

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:  # noqa: FBT001, FBT002
        """Accumulate gradients, and reduce them across ranks if a step follows."""
        for engine in {self.engine, *_living_engines()}:  # the loss may be of several models
            if engine.optimizer is not None:
                engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
            if getattr(engine.optimizer, "_epilogue_ran_this_backward", False):
                # A second backward() after one forward: stage 3 would replace the gradients.
                engine.optimizer.clear_backward_seen_flag()
        engine = self._engine_of_loss(loss)
        if kwargs.pop("scale_wrt_gas", True):  # a Trainer has divided the loss itself
            loss = loss / GradientState().num_steps
        _show_zero3(vars(engine).get(_SHOWN))
        try:
            engine.backward(loss, **kwargs)
        finally:
            _show_zero3(None)

    def _engine_of_loss(self, loss: torch.Tensor) -> Any:
        """Return an engine with parameters in the graph of a loss, if there are several engines."""
        engines = _living_engines()
        if len(engines) < 2:  # noqa: PLR2004
            return self.engine
        owners = {id(each): engine for engine in engines for each in engine.module.parameters()}
        nodes, seen = [loss.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if (owner := owners.get(id(getattr(node, "variable", None)))) is not None:
                return owner
            nodes += [following for following, _ in node.next_functions]
        return self.engine


class SteppingOptimizerWrapper(DeepSpeedOptimizerWrapper):  # type: ignore[misc]
    """Accelerate's wrapper of a ZeRO optimizer, with a `step()` and a `zero_grad()` that work."""

    engine: Any = None

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the user's optimizer, which schedulers such as OneCycleLR read."""
        defaults: dict[str, Any] = self.optimizer.optimizer.defaults
        return defaults

    @prepared_models.wrap_zero_grad
    def zero_grad(self, set_to_none: bool | None = None) -> None:  # noqa: ARG002, FBT001
        """Drop the gradients that the engine keeps for the next step."""
        if self.gradient_state.sync_gradients:
            drop_gradients(self.optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002
        """Raise OptionError: the engine has flattened the groups already."""
        raise OptionError(
            "DeepSpeed cannot add a parameter group after accelerator.prepare(). Give the optimizer"
            " all groups before; those that are trained later can begin with lr=0."
        )

    def state_dict(self) -> dict[str, Any]:
        """Raise OptionError: it would be the part of this rank, in a form of its own."""
        raise OptionError(_OWN_STATE)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Raise OptionError: DeepSpeed loads a list with the parts of all ranks."""
        raise OptionError(_OWN_STATE)

    @prepared_models.wrap_step
    def step(self, closure: Callable[[], object] | None = None) -> None:
        """Step if there are gradients and they are complete, as under the other engines."""
        if closure is not None:
            raise OptionError(
                "DeepSpeed does not support a closure in optimizer.step()."
                " Compute the loss before the step."
            )
        if self.engine is None or not self.gradient_state.sync_gradients:
            return
        if not (has_gradients(self.optimizer) and are_reduced(self.optimizer)):
            if any(each.grad is not None for each in self.engine.module.parameters()):
                raise OptionError(
                    "DeepSpeed steps with the gradients of accelerator.backward() only, and there"
                    " are none: gradients that are written to parameter.grad are not used. Use"
                    " ddp, or compute a loss whose gradients they are."
                )
            return
        drop_earlier_offloaded(self.optimizer)
        update_masters(self.optimizer)
        try:
            self.engine.step()
        finally:
            self.optimizer.clip_grad = self.engine.gradient_clipping()
            if hasattr(self.optimizer, "grad_partitions_flat_buffer"):
                # Stage 3 would step again with the gradient of a parameter that is not used next.
                self.optimizer.grad_partitions_flat_buffer.zero_()


def patch_accelerate() -> None:
    """Patch Accelerate's wrappers so that `optimizer.step()` steps."""
    module = "accelerate.accelerator"
    patch(f"{module}:DeepSpeedEngineWrapper", lambda _: BackwardOnlyEngineWrapper)
    patch(f"{module}:DeepSpeedOptimizerWrapper", lambda _: SteppingOptimizerWrapper)


def _living_engines() -> list[Any]:
    engines = [reference() for reference in _engines.values()]
    return [each for each in engines if each is not None and not is_stale(each)]


def _check_clipping(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        owned = {id(each) for engine in _living_engines() for each in engine.module.parameters()}
        if any(each.grad is None and id(each) in owned for each in given):
            raise OptionError(
                f"torch.nn.utils.{original.__name__} cannot clip gradients that a DeepSpeed engine"
                " keeps. Use accelerator.clip_grad_norm_(model.parameters(), max_norm)."
            )
        return original(given, *args, **kwargs)

    return clip


def init_deepspeed(hardware: Hardware) -> None:
    """Initialize DeepSpeed's communication on the existing process group; idempotent."""
    with defer_interrupt():  # an interrupted import would leave broken modules in sys.modules
        import deepspeed
        from deepspeed.accelerator import cuda_accelerator, get_accelerator

        deepspeed_patches.apply()
    patch("torch.nn.utils:clip_grad_norm_", _check_clipping)
    patch("torch.nn.utils:clip_grad_value_", _check_clipping)
    patch("torch.nn.utils:clip_grads_with_norm_", _check_clipping)
    if hardware.kind == "cpu":
        cpu_patches.skip_shared_memory_op()
    elif not all(map(str.isdecimal, os.environ["CUDA_VISIBLE_DEVICES"].split(","))):
        # Without NVML DeepSpeed gets the free memory from torch.
        patch("deepspeed.accelerator.cuda_accelerator:pynvml", lambda _: None)
    elif cuda_accelerator.pynvml is None:  # the launcher has shut it down
        get_accelerator()._init_pynvml()  # noqa: SLF001
    # deepspeed 0.19 uses names that torch 2.13 deprecates, with a warning for each collective.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        deepspeed.init_distributed(
            dist_backend=torch.distributed.get_backend(),
            auto_mpi_discovery=False,
            verbose=False,
        )
    log.debug("deepspeed: %s", output.getvalue())


def reset_zero3_globals(plugin: DeepSpeedPlugin) -> None:
    """Reset transformers' global ZeRO-3 config, which a plugin sets.

    Otherwise `from_pretrained` would return partitioned (1-D) parameters when a cell is run a
    second time, but not the first time.
    """
    plugin.dschf = None
    _show_zero3(None)


def _show_zero3(config: HfDeepSpeedConfig | None) -> None:
    """Set or, with None, reset transformers' global ZeRO-3 config."""
    from transformers.integrations import deepspeed as integration

    if config is None:
        integration.unset_hf_deepspeed_config()
    else:
        integration.set_hf_deepspeed_config(config)


def _show_zero3_in_passes(engine: Any) -> None:
    """Set transformers' global ZeRO-3 config in each forward and backward of an engine.

    Models and losses read it there: the layerdrop of transformers 5.23 runs the same layers on all
    ranks, and TRL 1.16 gathers the weight of the fused LM head for the backward. Without it, the
    gradients of a step were zero.
    """
    config = HfDeepSpeedConfig(engine.config)
    vars(engine)[_SHOWN] = config  # transformers holds a weak reference
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    coordinator = offload.get_param_coordinator()
    was_training = trace_is_of_training = True

    def before_forward(*_: object) -> None:
        nonlocal was_training, trace_is_of_training
        _show_zero3(config)
        if coordinator.is_record_trace():  # of the previous pass
            trace_is_of_training = was_training
        was_training = torch.is_grad_enabled()
        is_other = was_training and not trace_is_of_training
        if is_other and not coordinator.is_invalid_trace():
            # deepspeed 0.19.8 would notice it in the backward, and release parameters in use.
            coordinator._invalidate_trace()  # noqa: SLF001

    engine.module.register_forward_pre_hook(before_forward, prepend=True)
    engine.module.register_forward_hook(lambda *_: _show_zero3(None), always_call=True)


def _detach_fragments(engine: Any) -> None:
    """Break a reference cycle through autograd nodes, which leaked engines with offload.

    In deepspeed 0.19.8 each parameter of ZeRO-1 and 2 refers to a differentiable view of itself.
    """
    for parameter in engine.module.parameters():
        if (fragment := getattr(parameter, "_hp_mapping", None)) is not None:
            fragment.lp_fragment = fragment.lp_fragment.detach()


def _cast_inputs(engine: Any) -> None:
    """Cast floating-point inputs of an engine's forward to the dtype that it computes in.

    FSDP2 does, and autocast under DDP; deepspeed 0.19.8 does only with its fp16 `auto_cast`.
    """
    if not (engine.bfloat16_enabled() or engine.fp16_enabled()):
        return
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float16

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def before_forward(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return recursively_apply(cast, (args, kwargs))

    engine.register_forward_pre_hook(before_forward, with_kwargs=True)


def release_earlier_engines(args: Sequence[object]) -> tuple[object, ...]:
    """Free the engines of models that get a new optimizer, and return the args with bare models.

    A second Trainer with the same model does this. The new engine starts from the weights in the
    dtype of the earlier one, as without nbdist.

    Raises:
        OptionError: the optimizer has no parameters, or the earlier engine has them on NVMe.
    """
    bare: list[Any] = list(args)
    optimizers = [arg for arg in args if isinstance(arg, (Optimizer, DummyOptim))]
    if not optimizers or any(isinstance(each, DeepSpeedOptimizerWrapper) for each in optimizers):
        return tuple(bare)
    groups = [each.param_groups for each in optimizers if isinstance(each, Optimizer)]
    if groups and not any(group["params"] for each in groups for group in each):
        raise OptionError(
            "The optimizer has no parameters. If the model is frozen, as after peft's"
            " merge_and_unload(), call model.requires_grad_(True) before the optimizer is created."
        )
    for position, model in enumerate(bare):
        for engine in _living_engines() if isinstance(model, nn.Module) else ():
            module: nn.Module = engine.module
            # Also an adapter around the model, or the base of an adapter that was merged.
            if module in set(model.modules()) or model in set(module.modules()):
                if model is engine:
                    bare[position] = module
                _release(engine)
    return tuple(bare)


def _release(engine: Any) -> None:
    """Free an engine and its optimizer; its module keeps the parameters, which may be partitioned.

    A Trainer may still hold them, so they are made to raise when they are used.
    """
    module = engine.module
    if getattr(engine.optimizer, "params_in_nvme_and_cpu", False):
        raise OptionError(
            f"This {type(module).__name__} is already in a DeepSpeed engine with its weights on"
            " NVMe. Create it again for another optimizer or Trainer."
        )
    _engines.pop(module, None)
    replaced = ReplacementMap()
    for number, part in enumerate(prepared_models.forget(engine)):
        replaced.add_old(number, part)
    layouts.free_engine(engine)
    replaced.invalidate(
        "The model of this object was given to another Trainer or optimizer. Use that one, or"
        " create this one again with the model."
    )
    for part in module.modules():
        attributes = vars(part)
        if attributes.pop("_original_parameters", None) is not None:
            attributes["_parameters"] = dict(attributes["_parameters"])
        for name in _OF_ZERO3_MODULES:
            attributes.pop(name, None)
        for hooks in (attributes["_forward_hooks"], attributes["_forward_pre_hooks"]):
            # deepspeed 0.19.8 leaves those of the engine
            for key in [key for key, hook in hooks.items() if _is_of_engine(hook)]:
                del hooks[key]


def _is_of_engine(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(("deepspeed.", "nbdist."))


def prepare(
    accelerator: Accelerator,
    original: Callable[..., Any],
    args: Sequence[object],
    *,
    options: Options | None,
) -> Any:
    """Prepare as Accelerate does, but support several models, one after the other.

    Args:
        original: Accelerate's own `prepare`.
        options: None for a user's own plugin, whose config is not changed.
    """
    model = next((arg for arg in args if isinstance(arg, nn.Module)), None)
    optimizers = [arg for arg in args if isinstance(arg, (Optimizer, DummyOptim))]
    optimizer = next(iter(optimizers), None)
    if model is None:
        # A Trainer's second train() passes only its prepared optimizer.
        model = getattr(optimizer, "engine", None)
    used = accelerator.state.deepspeed_plugin
    if options is not None:
        _match_accumulation(accelerator, used.deepspeed_config)
    if (earlier := find_engine(model)) is not None:
        return _prepare_for_engine(accelerator, original, args, earlier)
    _check_supported(used.zero_stage, model, optimizers)
    if model is None:
        # accelerate 1.15 returns schedulers without a model as they are: with N ranks they would
        # be N times too slow.
        result = original(accelerator, *args)
        prepared = [
            accelerator.prepare_scheduler(each) if isinstance(each, LRScheduler) else each
            for each in (result if len(args) > 1 else [result])
        ]
        return tuple(prepared) if len(args) > 1 else prepared[0]
    before = accelerator.deepspeed_engine_wrapped
    exchange = contextlib.nullcontext() if wrap_policy.has_weights() else _skip_weight_broadcast()
    with _new_engine(accelerator):
        if options is not None:
            _fill_auto_values(accelerator, args, model, optimizer)
        # deepspeed 0.19.8 formats all parameters for a debug log, 5 ms each.
        with exchange, torch._tensor_str.printoptions(threshold=1, edgeitems=1):  # noqa: SLF001
            result = original(accelerator, *args)
    engine = accelerator.deepspeed_engine_wrapped.engine
    _engines[model] = weakref.ref(engine)
    # With more micro-batches per step, deepspeed 0.19.8 divides all gradients by their number.
    engine.set_train_batch_size(engine.train_micro_batch_size_per_gpu() * engine.dp_world_size)
    _cast_inputs(engine)
    _detach_fragments(engine)
    if used.zero_stage == PARAMETER_STAGE:
        _show_zero3_in_passes(engine)
    _restore_adagrad_groups(engine.optimizer, optimizer)
    for wrapper in accelerator._optimizers:  # noqa: SLF001
        if isinstance(wrapper, SteppingOptimizerWrapper) and wrapper.optimizer is engine.optimizer:
            wrapper.engine = engine
    if optimizer is None and before is not None:
        accelerator.deepspeed_engine_wrapped = before
    return result


@contextlib.contextmanager
def _new_engine(accelerator: Accelerator) -> Iterator[None]:
    """Use the engine that is prepared in this context for `backward()`; on an error the old one.

    accelerate 1.15 would keep the first engine when a second one is prepared.
    """
    before, accelerator.deepspeed_engine_wrapped = accelerator.deepspeed_engine_wrapped, None
    try:
        yield
    except BaseException:
        accelerator.deepspeed_engine_wrapped = before
        raise


def _match_accumulation(accelerator: Accelerator, config: dict[str, Any]) -> None:
    """Give the Accelerator and DeepSpeed's config one number of accumulation steps.

    accelerate 1.15 would warn and take the config's, which is that of the first `prepare()`.
    """
    key = "gradient_accumulation_steps"
    first = accelerator.__dict__.setdefault(_FIRST_CONFIG, copy.deepcopy(config))
    if first[key] == "auto":
        config[key] = accelerator.gradient_accumulation_steps
    else:  # of the user's file, or of a Trainer, which counts by itself and keeps 1 here
        accelerator.gradient_accumulation_steps = first[key]


@contextlib.contextmanager
def _skip_weight_broadcast() -> Iterator[None]:
    """Make DeepSpeed skip the broadcast of weights that a model does not have yet.

    deepspeed 0.19.8 broadcasts each parameter from rank 0, as bytes, when it partitions it, and
    all-gathers each partitioned parameter again to register a hook on it.
    """

    def without_bytes(broadcast: Callable[..., Any]) -> Callable[..., Any]:
        def broadcast_others(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return None if tensor.dtype == torch.uint8 else broadcast(tensor, *args, **kwargs)

        return broadcast_others

    with (
        patched("deepspeed.comm:broadcast", without_bytes),
        patched(
            "deepspeed.runtime.zero.partition_parameters:Init._all_gather",
            lambda _: lambda *_args, **_kwargs: None,
        ),
    ):
        yield


def find_engine(model: nn.Module | None) -> Any:
    """Return the engine that a model is or is wrapped in; None if there is none."""
    if model is None or is_deepspeed_engine(model):
        return model
    reference = _engines.get(model)
    return reference and reference()


def _prepare_for_engine(
    accelerator: Accelerator, original: Callable[..., Any], args: Sequence[object], engine: Any
) -> Any:
    """Prepare the remaining objects for an existing engine and its optimizer."""
    accelerator.deepspeed_engine_wrapped = BackwardOnlyEngineWrapper(engine)
    if all(known is not engine for known in accelerator._models):  # noqa: SLF001
        # A Trainer's train() has freed the list, and would prepare the model for an evaluation.
        accelerator._models.append(engine)  # noqa: SLF001
    kept = {id(arg): arg for arg in args if isinstance(arg, DeepSpeedOptimizerWrapper)}
    kept |= {id(arg): engine for arg in args if isinstance(arg, nn.Module)}
    rest = [arg for arg in args if id(arg) not in kept]
    prepared = original(accelerator, *rest) if rest else ()
    remaining = iter(prepared if len(rest) > 1 else [prepared])
    result = [kept[id(arg)] if id(arg) in kept else next(remaining) for arg in args]
    return tuple(result) if len(result) > 1 else result[0]


def _check_supported(stage: int, model: nn.Module | None, optimizers: Sequence[object]) -> None:
    """Raise OptionError unless a model and one optimizer are prepared in one call.

    accelerate 1.15 would use the last of several optimizers, and not train what the others have.
    ZeRO-3 accepts a model without an optimizer, for inference with partitioned parameters.
    """
    if len(optimizers) > 1:
        raise OptionError(
            f"accelerator.prepare() got {len(optimizers)} optimizers. DeepSpeed supports one per"
            " model, which may have several parameter groups. Use one, or ddp, fsdp or fsdp1."
        )
    alone = "optimizer" if optimizers else "model"
    if (model is None) != bool(optimizers) or (model is not None and stage == PARAMETER_STAGE):
        return
    advice = "" if model is None else " For a model that is not trained, use model.to(device)."
    raise OptionError(
        f"accelerator.prepare() got only the {alone}. Under DeepSpeed ZeRO-{stage} use one call"
        f" for both: model, optimizer = accelerator.prepare(model, optimizer).{advice}"
    )


@torch.no_grad()
def clip_grad_norm(
    accelerator: Accelerator,
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
) -> torch.Tensor:
    """Return the norm of all gradients of the parameters' engine, and clip at the next step.

    An infinite `max_norm` only measures. The norm is inf if it is not finite.
    """
    from deepspeed.runtime.utils import combine_grad_norm_groups

    if norm_type != 2:  # noqa: PLR2004
        raise OptionError(f"norm_type must be 2 under DeepSpeed, got {norm_type}.")
    given = {id(each) for each in parameters if each.requires_grad}  # two adapters share a base
    owners = [e for e in _living_engines() if given.intersection(map(id, e.module.parameters()))]
    if len(owners) > 1:
        raise OptionError(
            f"accelerator.clip_grad_norm_() got parameters of {len(owners)} models. Under DeepSpeed"
            " call it once for each model."
        )
    engine = owners[0] if owners else accelerator.deepspeed_engine_wrapped.engine
    zero = engine.optimizer
    if not accelerator.sync_gradients or not are_reduced(zero):
        return torch.as_tensor(engine.get_global_grad_norm() or 0.0)
    if math.isfinite(max_norm):
        zero.clip_grad = float(max_norm)
    if hasattr(zero, "scaled_global_norm"):
        norm = zero.scaled_global_norm()
    else:
        norm = combine_grad_norm_groups(zero._get_norm_groups())  # noqa: SLF001
    norm = torch.as_tensor(norm)
    # deepspeed 0.19 returns -1 if the norm is not finite.
    return torch.where(norm < 0, torch.inf, norm / zero.loss_scale)


def _fill_auto_values(
    accelerator: Accelerator, args: Sequence[object], model: nn.Module, optimizer: object
) -> None:
    """Set the "auto" values of the session's config that Accelerate cannot set."""
    ds_plugin = accelerator.state.deepspeed_plugin
    config = ds_plugin.deepspeed_config
    if ds_plugin.is_auto("gradient_clipping"):
        # accelerate 1.15 would set 1.0, while the other engines do not clip.
        config["gradient_clipping"] = 0.0
    first = vars(accelerator)[_FIRST_CONFIG]
    is_set = ds_plugin.is_auto("train_batch_size") is False
    if "train_micro_batch_size_per_gpu" in config and is_set:
        # A second model: reset the values that were set for the first one.
        for key in ("train_micro_batch_size_per_gpu", "train_batch_size"):
            config[key] = first.get(key)
    # Accelerate reads the batch size from a loader, if it has one.
    has_batch_size = any(
        isinstance(arg, DataLoader) and isinstance(arg.batch_size, int) for arg in args
    )
    if ds_plugin.is_auto("train_micro_batch_size_per_gpu") and not has_batch_size:
        config["train_micro_batch_size_per_gpu"] = 1
        config["train_batch_size"] = accelerator.num_processes * int(
            accelerator.gradient_accumulation_steps
        )
    zero = config["zero_optimization"]
    offloaded = zero.get("offload_optimizer", {}).get("device", "none") != "none"
    if offloaded and optimizer is not None and not isinstance(optimizer, _HAVE_CPU_VERSION):
        # accelerate 1.15 would replace any other optimizer with an Adam.
        config["zero_force_ds_cpu_optimizer"] = False
    section = zero.get("offload_param", {})
    if section.get("device") == "nvme" and "buffer_size" not in section:
        # The largest parameter must fit; the default is 1e8.
        section["buffer_size"] = max((p.numel() for p in model.parameters()), default=1)


def _restore_adagrad_groups(created: Any, original: object) -> None:
    """Give DeepSpeed's Adagrad the parameter groups of the user's Adagrad.

    deepspeed 0.19.8 recreates it with one group and default options (stage_1_and_2.py:947,
    stage3.py:1358): the options of the groups would be lost, and a scheduler would change an
    optimizer that is not used.
    """
    inner = getattr(created, "optimizer", None)
    if isinstance(inner, Adagrad) and isinstance(original, Adagrad) and inner is not original:
        inner.param_groups = original.param_groups
        if hasattr(created, "_link_all_hp_params"):
            created._link_all_hp_params()  # noqa: SLF001 - stages 1 and 2 need it at the first step
