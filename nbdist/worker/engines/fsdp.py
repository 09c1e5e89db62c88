"""Extends Accelerate's FSDP1 and FSDP2 support.

`worker.engines.accelerator_patch` calls ``build_plugin`` when the engine is built and `prepare` for
each call of `Accelerator.prepare`. This module selects the FSDP units, broadcasts rank 0's weights,
and supports preparing model and optimizer in separate calls.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from torch import distributed, nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
)
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from nbdist.checkpoint.name_validation import list_first
from nbdist.errors import OptionError
from nbdist.planner.tracing import wrap_units
from nbdist.state.layouts.base import fsdp2_parameters, fsdp2_units, unwrap_compiled
from nbdist.state.layouts.fsdp import reset_iteration
from nbdist.worker.engines import wrap_policy
from nbdist.worker.library_patches import patch
from nbdist.worker.training.rebind_variables import is_stale

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from accelerate import Accelerator

    from nbdist.strategies import Hardware, Options

_COMPUTE = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
_WITHOUT_PINNING: Mapping[type, object] = {
    CPUOffload: CPUOffload(offload_params=False),
    CPUOffloadPolicy: CPUOffloadPolicy(pin_memory=False),
}

shard_of_original: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Original parameter of a model under FSDP2 -> the shard that replaced it."""

_sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models under FSDP2."""

_cuts: WeakKeyDictionary[distributed.ProcessGroup, ParallelismConfig] = WeakKeyDictionary()
"""Default process group -> its parallelism config."""


def build_plugin(
    options: Options, hardware: Hardware, precision: str
) -> FullyShardedDataParallelPlugin:
    """Return Accelerate's plugin for the session's options; units are set in `prepare`."""
    kwargs = options.strategy.fsdp_kwargs(options)
    if precision in _COMPUTE:
        # Compute in low precision, reduce gradients in fp32. accelerate 1.15's own policy also
        # casts the returned loss (FSDP2) and buffers such as rotary frequencies (FSDP1), which the
        # other engines do not.
        policy = MixedPrecision if options.strategy.level == 1 else MixedPrecisionPolicy
        kwargs.setdefault(
            "mixed_precision_policy",
            policy(param_dtype=_COMPUTE[precision], reduce_dtype=torch.float32),
        )
    for name in ("auto_wrap_policy", "transformer_cls_names_to_wrap", "min_num_params"):
        kwargs.pop(name, None)
    fsdp_plugin = FullyShardedDataParallelPlugin(**kwargs)
    if hardware.kind == "cpu":
        # Everything is on the CPU already, and torch 2.13 pins memory only with a GPU.
        offload = fsdp_plugin.cpu_offload
        fsdp_plugin.cpu_offload = _WITHOUT_PINNING.get(type(offload), offload)

    def accept_units(original: Callable[..., Any]) -> Callable[..., Any]:
        def policy(fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> Any:
            ours = fsdp2_plugin.auto_wrap_policy
            has_units = isinstance(ours, wrap_policy.UnitWrapPolicy)
            return ours if has_units else original(fsdp2_plugin, model)

        return policy

    # accelerate 1.15 accepts only its two named policies for FSDP2, and the size-based one would
    # wrap ModuleLists, which torch does not allow.
    patch("accelerate.utils.fsdp_utils:fsdp2_prepare_auto_wrap_policy", accept_units)
    patch(
        "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._register_pre_backward_hook",
        _find_hidden_outputs,
    )
    patch(
        "torch.distributed.fsdp._runtime_utils:_register_pre_backward_hooks", _find_hidden_outputs
    )
    patch("torch.nn.modules.module:Module.zero_grad", _drop_gradients_too)
    patch("torch.optim.optimizer:Optimizer.add_param_group", _add_shards)
    patch("torch.distributed.tensor:DTensor.data", _copy_assigned_data)
    patch(
        "torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers",
        lambda handlers: handlers | {torch.ops.aten._local_scalar_dense.default: _whole_number},  # noqa: SLF001
    )
    return fsdp_plugin


def build_parallelism_config(options: Options, hardware: Hardware) -> dict[str, ParallelismConfig]:
    """Return Accelerate's config for hybrid sharding: shards within a node, replicas across nodes.

    Its mesh creates process groups, which is collective; a rebuilt engine reuses them as long as
    the default process group is the same. Returns {} if no hybrid sharding is configured.
    """
    sizes = options.strategy.parallelism_kwargs(options, hardware)
    if not sizes:
        return {}
    world = distributed.distributed_c10d._get_default_group()  # noqa: SLF001
    # accelerate 1.15 slices the mesh in a way that torch 2.13 warns about.
    warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh", UserWarning)
    if world not in _cuts:
        _cuts[world] = ParallelismConfig(**sizes)
    return {"parallelism_config": _cuts[world]}


def find_units(model: nn.Module, config: Mapping[str, Any]) -> list[nn.Module]:
    """Return the model's FSDP units, from the user's --fsdp-config or found automatically."""
    policy = str(config.get("auto_wrap_policy") or "").upper()
    if policy == "NO_WRAP":
        return []
    names = config.get("transformer_cls_names_to_wrap")
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
    smallest = config.get("min_num_params")
    by_size = policy == "SIZE_BASED_WRAP"
    return wrap_units.find_wrap_units(
        model,
        names=None if by_size else names,
        min_num_params=int(smallest or 0) or wrap_units.MIN_UNIT_PARAMS if by_size else None,
    )


def refuse_sharded_parts(model: nn.Module) -> None:
    """Raise if a model that is not sharded contains one that is, as an adapter around it does."""
    if not is_sharded(model) and any(map(is_sharded, model.modules())):
        raise OptionError(
            f"This {type(model).__name__} contains a model that FSDP has sharded already. Save that"
            " model, load it again, and prepare it."
        )


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Raise if a parameter has a hook of `register_hook()`, which neither FSDP calls."""
    named = model.named_parameters()
    if hooked := [name for name, each in named if each._backward_hooks]:  # noqa: SLF001
        raise OptionError(
            f"FSDP does not call the gradient hook of {list_first(hooked)}. Use ddp or ZeRO, or"
            " remove it and change the gradient before optimizer.step() or, under fsdp2, in a hook"
            " of register_post_accumulate_grad_hook() after accelerator.prepare()."
        )


def refuse_unreduced_gradients(model: nn.Module) -> None:
    """Raise if a backward of FSDP2 began in no output, so that no shard has a gradient."""
    for parameter in fsdp2_parameters(model):
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is not None and whole.grad is not None:
            raise OptionError(
                f"The gradients of this {type(model).__name__} were not reduced, and the step would"
                " not train it: FSDP found no tensor of the loss in what forward() returned."
                " Return tensors, in containers or objects, and not functions that hold them."
            )


def _refuse_scalars(model: nn.Module) -> None:
    """Raise if a parameter has no dimension, which neither FSDP shards."""
    scalars = [name for name, parameter in model.named_parameters() if not parameter.dim()]
    if scalars:
        parent, _, name = scalars[0].rpartition(".")
        scalar = f"model.get_submodule({parent!r}).{name}" if parent else f"model.{name}"
        line = f"{scalar} = torch.nn.Parameter({scalar}.detach().reshape(1))"
        raise OptionError(
            f"FSDP does not shard scalar parameters, and the model has {list_first(scalars)}. Use"
            f" ddp or ZeRO, or give it a dimension before the optimizer is created: {line}."
        )


def sync_and_set_units(
    accelerator: Accelerator, model: nn.Module, config: Mapping[str, Any]
) -> None:
    """Broadcast rank 0's weights and set the FSDP units; call it before `prepare`."""
    if isinstance(model, (FSDPModule, Fsdp1)):
        return
    refuse_gradient_hooks(model)
    _refuse_scalars(model)
    fsdp_plugin = accelerator.state.fsdp_plugin
    units = find_units(model, config)
    _check_quantized(model, units, is_fsdp2=accelerator.is_fsdp2)
    if not fsdp_plugin.cpu_ram_efficient_loading:
        wrap_policy.broadcast_from_rank_0(model)
    modules = wrap_policy.with_checkpoint_wrappers(model, units)
    fsdp_plugin.auto_wrap_policy = wrap_policy.UnitWrapPolicy(modules)


def _check_quantized(model: nn.Module, units: Sequence[nn.Module], *, is_fsdp2: bool) -> None:
    if is_fsdp2:
        # bitsandbytes 0.50: the scales are attributes of the parameter, which torch 2.13 replaces.
        if any(type(parameter).__name__ == "Int8Params" for parameter in model.parameters()):
            raise OptionError(
                "fsdp2 cannot shard 8-bit weights of bitsandbytes: they lose their scales. Use"
                " load_in_4bit=True, or the backend zero2, zero3 or ddp."
            )
        return
    for unit in units:
        dtypes = {parameter.dtype for parameter in unit.parameters()}
        if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
            names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise OptionError(
                f"fsdp1 flattens the parameters of each {type(unit).__name__}, which have to be of"
                f" one floating-point dtype, not {names}. Use the backend fsdp2."
            )


def prepare(accelerator: Accelerator, original: Callable[..., Any], args: Sequence[object]) -> Any:
    """Prepare as Accelerate does; under FSDP2, also model and optimizer in separate calls.

    A model that is already prepared is returned unchanged.
    """
    models = [arg for arg in args if isinstance(arg, nn.Module)]
    optimizers = [arg for arg in args if isinstance(arg, Optimizer)]
    if not accelerator.is_fsdp2:
        return original(accelerator, *args)
    if all(map(is_sharded, models)) and (models or optimizers):
        # accelerate 1.15 would match parameters by data pointer, which empty shards share.
        known = accelerator._models  # noqa: SLF001
        known += [model for model in models if model not in known]
        return _prepare_without_model(accelerator, args, optimizers)
    _sharded.update(models)
    with contextlib.ExitStack() as stack:
        for model in models:
            stack.enter_context(keep_tied_embeddings_in_root(model))
        if optimizers or not models:
            return original(accelerator, *args)
        return _prepare_model_only(accelerator, original, args, models[0])


@contextlib.contextmanager
def keep_tied_embeddings_in_root(model: nn.Module) -> Iterator[None]:
    """Keep input embedding and head in the root unit if other modules share their parameters.

    accelerate 1.15 makes separate units of the results of the model's get_input_embeddings() and
    get_output_embeddings(), and torch 2.13 raises at the first forward for T5's embedding and
    BERT's head. Within this context these methods return None, also for models such as ResNet
    where they raise.
    """
    plain = getattr(model, "_orig_mod", model)
    methods = {
        wrap_units.GET_EMBEDDING_METHOD,
        wrap_units.GET_HEAD_METHOD,
    } - wrap_units.separable_embedding_and_head(plain).keys()
    attributes = vars(plain)
    before = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(dict.fromkeys(methods, lambda: None))
    try:
        yield
    finally:
        for name in methods:
            del attributes[name]
        attributes.update(before)


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model is under FSDP1 or FSDP2."""
    # torch_compile of a Trainer shards the compiled model; torch.compile() may be outside of it.
    kinds = (FSDPModule, Fsdp1)
    return isinstance(model, kinds) or isinstance(unwrap_compiled(model), kinds)


def reset_iteration_state(model: nn.Module) -> None:
    """Reset a model under FSDP2 to its state between iterations, after an interrupted one.

    Each forward adds to the order in which a backward prefetches all-gathers, and the order of
    interrupted ranks may differ.
    """
    for unit in fsdp2_units(model):
        if unit._get_fsdp_state()._is_root:  # noqa: SLF001 - torch 2.13 has no public name
            reset_iteration(unit)


def drop_gradients(model: nn.Module, shards: Collection[int] | None = None) -> None:
    """Drop gradients that FSDP2 keeps where `zero_grad()` does not see them.

    These are gradients of shards between a forward and its backward, when the whole parameters are
    registered, and those of micro-batches that were not reduced.

    Args:
        model: a prepared model.
        shards: ids of the parameters whose gradients are dropped; all if None.
    """
    for parameter in fsdp2_parameters(model):
        if shards is None or id(parameter.sharded_param) in shards:
            parameter.sharded_param.grad = parameter.unsharded_accumulated_grad = None
            if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                whole.grad = None


def _find_hidden_outputs(register: Callable[..., Any]) -> Callable[..., Any]:
    """Begin the backward of a unit also at tensors in the attributes of an output.

    torch 2.13 finds tensors in containers and dataclasses only. A model that returns an object of
    `torch.distributions`, as policies do, was not trained under FSDP2, and failed under FSDP1.
    """

    def register_hooks(*args: Any) -> Any:
        result = register(*args)
        output = next(arg for arg in args[1:] if not isinstance(arg, nn.Module))
        hidden = list(_hidden_tensors(output, set())) if torch.is_grad_enabled() else []
        if hidden:
            # Views in an object are not changed in place, about which torch warns.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                register(*(hidden if arg is output else arg for arg in args))
        return result

    return register_hooks


def _hidden_tensors(output: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors in attributes of objects in an output, also of nested ones."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor | nn.Module | type) or id(leaf) in seen:
            continue
        seen.add(id(leaf))
        for value in getattr(leaf, "__dict__", {}).values():
            if isinstance(value, torch.Tensor):
                yield value
            else:
                yield from _hidden_tensors(value, seen)


def _add_shards(add: Callable[..., None]) -> Callable[..., None]:
    """Give optimizers the shards of parameters that are whole at the moment.

    torch 2.13 leaves the root unit whole after a forward without a backward. The steps of an
    optimizer that is built then, or gets a group, would not change the model.
    """

    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        add(self, param_group)
        parameters = self.param_groups[-1]["params"]
        for model in itertools.filterfalse(is_stale, _sharded):
            shards = {
                id(getattr(each, "_unsharded_param", None)): each.sharded_param
                for each in fsdp2_parameters(model)
            }
            if not shards.keys().isdisjoint(map(id, parameters)):
                parameters[:] = [shards.get(id(each), each) for each in parameters]
                reshard(model)

    return add_param_group


def _drop_gradients_too(zero_grad: Callable[..., None]) -> Callable[..., None]:
    def drop(self: nn.Module, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002
        zero_grad(self, set_to_none)
        if isinstance(self, FSDPModule):
            drop_gradients(self)

    return drop


def _copy_assigned_data(data: Any) -> property:
    def assign(self: DTensor, value: torch.Tensor) -> None:
        data.__get__(self).copy_(value)

    return property(data.__get__, assign)


def _whole_number(_operation: object, args: tuple[DTensor], _kwargs: object) -> Any:
    return args[0].full_tensor().item()


def clip_grad_norm(
    accelerator: Accelerator,
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
) -> Any:
    """Clip as Accelerate does, for any number of models.

    accelerate 1.15 compares lists of tensors by value, which raises if there are two models.
    """
    accelerator.unscale_gradients()
    clipped = list(parameters)
    for model in accelerator._models:  # noqa: SLF001
        if isinstance(model, Fsdp1) and list(map(id, clipped)) == list(map(id, model.parameters())):
            return model.clip_grad_norm_(max_norm, norm_type)
    return accelerator._clip_grad_norm_dtensor_aware(clipped, max_norm, norm_type=norm_type)  # noqa: SLF001


def _prepare_model_only(
    accelerator: Accelerator,
    original: Callable[..., Any],
    args: Sequence[object],
    model: nn.Module,
) -> Any:
    # The prefix of torch.compile may be inside the one of FSDP2 or around it. Weak references, so
    # that a unit's whole parameters are freed on the GPU once they are sharded.
    before = {
        name.replace("_orig_mod.", ""): weakref.ref(parameter)
        for name, parameter in model.named_parameters()
    }
    # accelerate 1.15 requires an optimizer, whose parameters it replaces with the shards.
    placeholder = torch.optim.SGD(model.parameters(), lr=0.0)
    *result, prepared = original(accelerator, *args, placeholder)
    accelerator._optimizers.remove(prepared)  # noqa: SLF001
    wrapped = next(item for item in result if isinstance(item, nn.Module))
    for name, parameter in wrapped.named_parameters():
        if (original_parameter := before[name.replace("_orig_mod.", "")]()) is not None:
            shard_of_original[original_parameter] = parameter
    return tuple(result) if len(result) > 1 else result[0]


def reshard(model: nn.Module) -> None:
    """Reshard a model, so that its parameters are the shards, as in its optimizer."""
    for unit in fsdp2_units(model):
        unit.reshard()
    for unit in Fsdp1.fsdp_modules(model) if isinstance(model, Fsdp1) else ():
        if (handle := unit._handle) is not None and handle.uses_sharded_strategy:  # noqa: SLF001
            handle.reshard(True)  # noqa: FBT003 - frees what the next forward would use


def _prepare_without_model(
    accelerator: Accelerator, args: Sequence[object], optimizers: Sequence[Optimizer]
) -> Any:
    """Prepare optimizers, loaders and schedulers of a model that is already prepared."""
    for model in filter(is_sharded, accelerator._models):  # noqa: SLF001
        reshard(model)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [shard_of_original.get(old, old) for old in group["params"]]
            if not all(isinstance(parameter, DTensor) for parameter in group["params"]):
                raise OptionError(
                    "The optimizer's parameters are not those of a prepared model. Under fsdp2 "
                    "build both and use model, optimizer = accelerator.prepare(model, optimizer), "
                    "or build the optimizer from the prepared model."
                )
    prepare_one: Callable[..., Any] = accelerator._prepare_one  # noqa: SLF001
    result = [
        arg if isinstance(arg, nn.Module) else prepare_one(arg, first_pass=True) for arg in args
    ]
    # Schedulers need the prepared optimizers.
    result = [prepare_one(arg) if isinstance(arg, LRScheduler) else arg for arg in result]
    for arg, prepared in zip(args, result, strict=True):
        if prepared is not arg:  # as accelerate 1.15 does, so that it is not wrapped twice
            prepared._is_accelerate_prepared = True  # noqa: SLF001
    return tuple(result) if len(result) > 1 else result[0]
