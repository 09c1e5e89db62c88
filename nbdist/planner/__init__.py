"""Predicts which strategies fit on which devices, how fast a step is, and which one to use.

Pure arithmetic on a model's shape, in any process. Reading order: `model_spec` (the planner's view
of a model), built by `models.analytic` (formulas of decoders) or `models.traced` (all others);
`memory` with a timeline per engine; `step_time` on a `cluster_spec`; `search`; `result`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.planner.cluster_spec import ClusterSpec
    from nbdist.planner.result import MachinePlan, Plan

ANY_DEVICES = "any"
"""Devices of a plan that asks which machine is enough."""


@overload
def plan(
    model: object,
    devices: Literal["any"],
    *,
    max_nodes: int | None = None,
    only: str | Sequence[str] | None = None,
    **arguments: Any,
) -> MachinePlan: ...


@overload
def plan(model: object, devices: str | ClusterSpec | None = None, *_: Any, **__: Any) -> Plan: ...


def plan(  # noqa: PLR0913 - public API, plus the inputs that a plain module needs
    model: object,
    devices: str | ClusterSpec | None = None,
    world_size: int | None = None,
    batch_size: int | Sequence[int] | None = None,
    seq_len: int | None = None,
    precision: str | None = None,
    optimizer: str = "adamw",
    *,
    inputs: object = None,
    lora: int | None = None,
    target_modules: str | Sequence[str] | None = None,
    quantize: str | None = None,
    keep_outputs: bool = True,
    max_nodes: int | None = None,
    only: str | Sequence[str] | None = None,
    **fixed: Any,
) -> Plan | MachinePlan:
    """Predict memory and speed of every strategy on these devices, and pick one.

    Downloads nothing, does not run the model author's code and needs no GPU. torch is used only
    for an `nn.Module`, in which case it is already imported.

    Args:
        model: a transformers config, a folder with config.json or the file itself, an
            `nn.Module`, or a size such as "7b".
        devices: "8xH100-80GB,nvlink", "2x24GB,pcie", or for several machines
            "2x(8xH100-80GB,nvlink),400Gb/s". Default: the GPUs of this machine, or CPU ranks.
            "any" searches the smallest number of each common GPU on which the model fits.
        world_size: number of ranks. Default: one per device.
        batch_size: samples per rank and micro-batch, or several sizes to compare. Default: that
            of a `deepspeed_config`, or 1.
        seq_len: tokens per sample. Default: the model's maximum, at most 2048.
        precision: no, fp16, bf16 or fp8. Default: that of a `deepspeed_config`, or bf16.
        optimizer: adamw, adamw_fused, adamw_8bit, sgd, adafactor, muon, ..., or a class name.
        inputs: example input of a module that is not a transformers model: a tensor, or a tuple
            or dict of its arguments.
        lora: rank of PEFT's adapters, which then are all that trains. A PEFT model needs no rank:
            it is planned as it is.
        target_modules: linear layers with an adapter, as in PEFT's `LoraConfig`: names,
            one regular expression, or "all-linear". Default: PEFT's for the model's type.
        quantize: bitsandbytes' storage of the frozen weights, "nf4" (with double quantization),
            "nf4-bf16" (the same with bnb_4bit_quant_storage=torch.bfloat16, which FSDP2 shards) or
            "int8"; needs lora.
        keep_outputs: True if the loop holds the model's output across the step, as
            `outputs = model(**batch)` does; False if it keeps only the loss.
        max_nodes: with devices="any", the largest number of nodes of eight GPUs. Default: 4.
        only: with devices="any", the GPUs to search, such as "T4,L4,A10".
        fixed: options of `%%distribute` to hold fixed instead of searching, such as
            offload="cpu", activation_checkpointing=True, accumulate=4.

    Raises:
        PlanError: the model, the devices or a number is invalid.
        OptionError: an unknown option, or an invalid value.
    """
    from nbdist import strategies
    from nbdist.errors import PlanError
    from nbdist.planner import build_model_spec, machines, optimizers, search
    from nbdist.planner.plan_types import PlanInput
    from nbdist.planner.target_devices import print_progress, resolve_cluster

    nodes = _optional_positive_int("max_nodes", max_nodes) or machines.DEFAULT_MAX_NODES
    if keep_outputs not in (True, False):
        raise PlanError(f"keep_outputs must be True or False, not {keep_outputs!r}.")
    is_any = devices == ANY_DEVICES
    if is_any and world_size is not None:
        raise PlanError('world_size is searched with devices="any". Omit it, or name the devices.')
    if not is_any and (max_nodes, only) != (None, None):
        raise PlanError('max_nodes and only need devices="any".')
    cluster = resolve_cluster(
        machines.DEFAULT_DEVICE if is_any else devices,
        _optional_positive_int("world_size", world_size),
    )
    _optional_positive_int("accumulate", fixed.get("accumulate"))
    config = fixed.get("deepspeed_config")
    if is_any and isinstance(config, dict):  # the batch of a step depends on the number of ranks
        fixed["deepspeed_config"] = {k: v for k, v in config.items() if k != "train_batch_size"}
    settled = search.validate_options(fixed, precision, cluster)
    if batch_size is None:
        filed = settled.get("deepspeed_config") or {}, settled.get("accumulate", 1)
        batch_size = strategies.micro_batch_size(*filed, cluster.world_size) or 1
    several = batch_size if isinstance(batch_size, (list, tuple, range)) else [batch_size]
    batch_sizes = tuple(dict.fromkeys(_positive_int("batch_size", size) for size in several))
    batch_sizes = batch_sizes or (_positive_int("batch_size", batch_size),)
    rank = _optional_positive_int("lora", lora)
    spec, length = build_model_spec.load_model_spec(
        model,
        batch_size=batch_sizes[0],
        seq_len=_optional_positive_int("seq_len", seq_len),
        kind=cluster.kind,
        precision=settled["precision"],
        inputs=inputs,
        lora=rank,
        progress=print_progress,
    )
    spec = build_model_spec.adapt(spec, rank, target_modules, quantize)
    request = PlanInput(
        model=spec,
        cluster=cluster,
        batch_sizes=batch_sizes,
        seq_len=length,
        precision=settled.pop("precision"),
        optimizer=optimizers.optimizer_for_device(
            optimizers.find_optimizer(optimizer), cluster.kind
        ),
        fixed_options=settled,
        keep_outputs=keep_outputs,
    )
    if is_any:
        return machines.find_machines(request, nodes, only)
    return search.search_plan(request)


_MAX_COUNT = 10**7
"""Upper limit of samples, tokens or ranks; a larger number is a typing error."""


def _optional_positive_int(name: str, value: object) -> int | None:
    return None if value is None else _positive_int(name, value)


def _positive_int(name: str, value: object) -> int:
    """Validate an integer >= 1."""
    from nbdist.errors import PlanError

    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and number == int(number) and 1 <= number <= _MAX_COUNT):
        raise PlanError(f"{name} must be an integer from 1 to {_MAX_COUNT:,}, got {value!r}.")
    return int(number)
