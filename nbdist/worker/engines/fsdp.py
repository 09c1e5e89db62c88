"""What FSDP needs around Accelerate's own preparation; runs on a rank.

`worker.engines.accelerator` calls `plugin` when the engine is built and `prepare` for each call of
`Accelerator.prepare` under FSDP1 or FSDP2. Here: units by our own choice, one start for
all ranks, and model and optimizer in two separate calls.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.utils import fsdp_utils
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
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from nbdist.errors import OptionError
from nbdist.planner.tracing import wrap_units as module_units
from nbdist.worker.engines import wrap_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from accelerate import Accelerator

    from nbdist.strategies import Hardware, Options

_COMPUTE = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
_WITHOUT_PINNING: Mapping[type, object] = {
    CPUOffload: CPUOffload(offload_params=False),
    CPUOffloadPolicy: CPUOffloadPolicy(pin_memory=False),
}
_POLICIES: Mapping[int, type[MixedPrecision | MixedPrecisionPolicy]] = {
    1: MixedPrecision,
    2: MixedPrecisionPolicy,
}

_moved: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Whole parameter of a model under FSDP2 -> the shard that took its place."""


_cuts: WeakKeyDictionary[distributed.ProcessGroup, ParallelismConfig] = WeakKeyDictionary()
"""Group of all ranks -> how it is cut into replicas."""


def plugin(options: Options, hardware: Hardware, precision: str) -> FullyShardedDataParallelPlugin:
    """Return Accelerate's plugin for the session's options; the units come later."""
    kwargs = options.strategy.fsdp_kwargs(options)
    if precision in _COMPUTE:
        kwargs.setdefault("mixed_precision_policy", _precision(options, _COMPUTE[precision]))
    for ours in ("auto_wrap_policy", "transformer_cls_names_to_wrap", "min_num_params"):
        kwargs.pop(ours, None)
    made = FullyShardedDataParallelPlugin(**kwargs)
    if hardware.kind == "cpu":
        # All is on the CPU already, and torch 2.13 page-locks memory for a GPU only.
        made.cpu_offload = _WITHOUT_PINNING.get(type(made.cpu_offload), made.cpu_offload)
    _let_fsdp2_take_our_policy()
    return made


def parallelism(options: Options, hardware: Hardware) -> dict[str, ParallelismConfig]:
    """Return Accelerate's word for shards inside a node and replicas across nodes, or nothing.

    Its mesh makes process groups, a collective; an engine that is built again takes those of
    before, as long as the group of all ranks is the same.
    """
    sizes = options.strategy.parallelism_kwargs(options, hardware)
    if not sizes:
        return {}
    everyone = distributed.distributed_c10d._get_default_group()  # noqa: SLF001
    # accelerate 1.15 asks for the mesh of the shards in a way that torch 2.13 warns of.
    warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh", UserWarning)
    if everyone not in _cuts:
        _cuts[everyone] = ParallelismConfig(**sizes)
    return {"parallelism_config": _cuts[everyone]}


def _precision(options: Options, compute: torch.dtype) -> MixedPrecision | MixedPrecisionPolicy:
    """Compute in a small type, reduce gradients in fp32, leave buffers and outputs alone.

    accelerate 1.15's own policy also rounds the loss it returns (FSDP2) and the buffers,
    rotary frequencies among them (Fsdp1); the other engines do not.
    """
    policy = _POLICIES[options.strategy.level]
    return policy(param_dtype=compute, reduce_dtype=torch.float32)


def units(model: nn.Module, config: Mapping[str, Any]) -> list[nn.Module]:
    """Return the model's units by the user's --fsdp-config, or found by ourselves."""
    policy = str(config.get("auto_wrap_policy") or "").upper()
    if policy == "NO_WRAP":
        return []
    names = config.get("transformer_cls_names_to_wrap")
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
    smallest = config.get("min_num_params")
    by_size = policy == "SIZE_BASED_WRAP"
    return module_units.units(
        model,
        names=None if by_size else names,
        min_num_params=int(smallest or 0) or module_units.SMALLEST_UNIT if by_size else None,
    )


def shard_ready(accelerator: Accelerator, model: nn.Module, config: Mapping[str, Any]) -> None:
    """Give all ranks one start and tell Accelerate the units; before `prepare`."""
    if isinstance(model, (FSDPModule, Fsdp1)):
        return
    _check_not_inside(model)
    made = accelerator.state.fsdp_plugin
    if not made.cpu_ram_efficient_loading:
        wrap_policy.same_start(model)
    chosen = wrap_policy.with_checkpoint_wrappers(model, units(model, config))
    made.auto_wrap_policy = wrap_policy.UnitPolicy(chosen)


def prepare(
    accelerator: Accelerator, original: Callable[..., Any], args: Sequence[object], **kwargs: Any
) -> Any:
    """Prepare as Accelerate does; under FSDP2 model and optimizer may come one by one.

    A model that is prepared already stays as it is.
    """
    models = [one for one in args if isinstance(one, nn.Module)]
    optimizers = [one for one in args if isinstance(one, Optimizer)]
    if not accelerator.is_fsdp2:
        return original(accelerator, *args, **kwargs)
    if all(map(_is_sharded, models)) and (models or optimizers):
        # accelerate 1.15 would match parameters by address, and shards without rows share one.
        accelerator._models += [one for one in models if one not in accelerator._models]  # noqa: SLF001
        return _beside_the_model(accelerator, args, optimizers)
    with contextlib.ExitStack() as ends:
        for model in models:
            ends.enter_context(shared_ends_in_root(model))
        if optimizers or not models:
            return original(accelerator, *args, **kwargs)
        return _model_alone(accelerator, original, args, models[0])


@contextlib.contextmanager
def shared_ends_in_root(model: nn.Module) -> Iterator[None]:
    """Let FSDP2 leave input embedding and head in the root where the rest has a part of them.

    accelerate 1.15 makes groups of what the model's two methods name, and torch 2.13 refuses
    T5's embedding and BERT's head at the first forward: meanwhile those methods name nothing.
    Nor do they raise, as they do for a ResNet.
    """
    plain = getattr(model, "_orig_mod", model)
    silent = {module_units.EMBEDDING, module_units.HEAD} - module_units.own_ends(plain).keys()
    attributes = vars(plain)
    before = {name: attributes[name] for name in silent if name in attributes}
    attributes.update(dict.fromkeys(silent, lambda: None))
    try:
        yield
    finally:
        for name in silent:
            del attributes[name]
        attributes.update(before)


def moved() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Whole parameters of models under FSDP2, each with the shard that took its place."""
    yield from _moved.items()


def _is_sharded(model: nn.Module) -> bool:
    """Whether a model is prepared under FSDP2, compiled or not."""
    return isinstance(getattr(model, "_orig_mod", model), FSDPModule)


def _reshard(model: nn.Module) -> None:
    """Return to shards, and remember which shard each whole parameter came from.

    torch 2.13 leaves the outermost unit whole after a forward without a backward, so an
    optimizer that is built after an evaluation holds whole parameters.
    """
    before = dict(model.named_parameters())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for name, parameter in model.named_parameters():
        if before[name] is not parameter:
            _moved[before[name]] = parameter


def start_over(model: nn.Module) -> None:
    """Return a model under FSDP2 to where it is between two iterations, whatever cut one short.

    Each evaluated batch adds to the order in which a backward gathers ahead, and ranks that were
    stopped may have counted different ones.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()  # noqa: SLF001 - torch 2.13 has no public name
            if state._is_root:  # noqa: SLF001
                module.reset_iter_state()


def _check_not_inside(model: nn.Module) -> None:
    """Refuse the bare model of what FSDP1 has wrapped: it holds shards without their wrapper."""
    if any(isinstance(one, Fsdp1) for one in model.modules()):
        message = (
            f"this {type(model).__name__} was prepared already; use the model that "
            "accelerator.prepare() returned, or build it anew."
        )
        raise OptionError(message)


def clip_grad_norm(
    accelerator: Accelerator,
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
) -> Any:
    """Clip as Accelerate does, with any number of models.

    accelerate 1.15 compares lists of tensors by value, which raises for a second model.
    """
    accelerator.unscale_gradients()
    clipped = list(parameters)
    for model in accelerator._models:  # noqa: SLF001
        if isinstance(model, Fsdp1) and list(map(id, clipped)) == list(map(id, model.parameters())):
            return model.clip_grad_norm_(max_norm, norm_type)
    return accelerator._clip_grad_norm_dtensor_aware(clipped, max_norm, norm_type=norm_type)  # noqa: SLF001


def clip(model: nn.Module, parameters: Iterable[torch.Tensor], max_norm: float) -> None:
    """Clip the gradients of a model under FSDP1, whose norm needs all ranks."""
    if isinstance(model, Fsdp1):
        model.clip_grad_norm_(max_norm)
    else:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def _let_fsdp2_take_our_policy() -> None:
    """Make Accelerate's FSDP2 use a `UnitPolicy` as it stands.

    accelerate 1.15 knows its two named policies alone and its one by size would cut
    ModuleLists, which torch refuses.
    """
    original = fsdp_utils.fsdp2_prepare_auto_wrap_policy
    if hasattr(original, "__wrapped__"):
        return

    def policy(fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> Any:
        ours = fsdp2_plugin.auto_wrap_policy
        return ours if isinstance(ours, wrap_policy.UnitPolicy) else original(fsdp2_plugin, model)

    policy.__wrapped__ = original  # type: ignore[attr-defined]
    fsdp_utils.fsdp2_prepare_auto_wrap_policy = policy


def _plain(name: str) -> str:
    """Return a parameter's name without what torch.compile adds."""
    return name.replace("_orig_mod.", "")


def _model_alone(
    accelerator: Accelerator,
    original: Callable[..., Any],
    args: Sequence[object],
    model: nn.Module,
) -> Any:
    """Prepare a model whose optimizer comes later, or never.

    accelerate 1.15 insists on an optimizer to move to the shards: a stand-in is given.
    """
    before = {_plain(name): parameter for name, parameter in model.named_parameters()}
    stand_in = torch.optim.SGD(model.parameters(), lr=0.0)
    *result, prepared = original(accelerator, *args, stand_in)
    accelerator._optimizers.remove(prepared)  # noqa: SLF001
    wrapped = next(one for one in result if isinstance(one, nn.Module))
    for name, parameter in wrapped.named_parameters():
        _moved[before[_plain(name)]] = parameter
    return tuple(result) if len(result) > 1 else result[0]


def _beside_the_model(
    accelerator: Accelerator, args: Sequence[object], optimizers: Sequence[Optimizer]
) -> Any:
    """Prepare optimizers, loaders and schedulers; their model is prepared already."""
    for model in filter(_is_sharded, accelerator._models):  # noqa: SLF001
        _reshard(model)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [_moved.get(old, old) for old in group["params"]]
            if not all(isinstance(one, DTensor) for one in group["params"]):
                message = (
                    "the optimizer holds parameters that are not those of a prepared model; under "
                    "fsdp2 use model, optimizer = accelerator.prepare(model, optimizer) with both "
                    "newly built, or build the optimizer from the prepared model."
                )
                raise OptionError(message)
    result = [_prepared(accelerator, one) for one in args]
    result = [_scheduler(accelerator, one) for one in result]
    return tuple(result) if len(result) > 1 else result[0]


def _prepared(accelerator: Accelerator, one: object) -> object:
    """Prepare an optimizer or a data loader."""
    if isinstance(one, Optimizer):
        return accelerator.prepare_optimizer(one)
    return accelerator.prepare_data_loader(one) if isinstance(one, DataLoader) else one


def _scheduler(accelerator: Accelerator, one: object) -> object:
    """Prepare a scheduler; after all optimizers."""
    schedules = isinstance(one, torch.optim.lr_scheduler.LRScheduler)
    return accelerator.prepare_scheduler(one) if schedules else one
