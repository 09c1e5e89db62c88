"""Predicts which strategies fit on which devices, how fast a step is, and which one to use.

Pure arithmetic on a model's shape, in any process. Read in this order: `spec` (a model as the
planner sees it) from `closed` (formulas) or `traced`; `memory` with the stories of the engines
`ddp`, `fsdp`, `zero`; `cost` on `devices`; `choice`; `result` and `show`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.planner.cluster_spec import Cluster
    from nbdist.planner.result import Plan


def plan(  # noqa: PLR0913 - the contract, and the input that a plain module needs
    model: object,
    devices: str | Cluster | None = None,
    world_size: int | None = None,
    batch_size: int | Sequence[int] = 1,
    seq_len: int | None = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    *,
    inputs: object = None,
    **fixed: Any,
) -> Plan:
    """Say what every strategy needs for a model on these devices, and which one to take.

    Downloads nothing, runs no code of the model's author, needs no GPU; imports torch for an
    `nn.Module` only, where it is imported already.

    Args:
        model: a transformers config, a folder with config.json or the file, an `nn.Module`, or
            a size such as "7b".
        devices: "8xH100-80GB,nvlink", "2x24GB,pcie", on several machines
            "2x(8xH100-80GB,nvlink),400Gb/s"; default: the GPUs found here, or CPU ranks.
        world_size: number of ranks; default: one for each device.
        batch_size: samples of one rank's micro-batch, or several sizes to compare.
        seq_len: tokens of a sample; default: what the model takes, 2048 at most.
        precision: no, fp16, bf16 or fp8.
        optimizer: adamw, adamw_fused, adamw_8bit, sgd, adafactor, ..., or the name of its class.
        inputs: example input for a module that is no transformers model: a tensor, or a tuple
            or dict of its arguments.
        fixed: options of `%%distribute` that are not to be searched, as offload="cpu",
            activation_checkpointing=True, accumulate=4.

    Raises:
        PlanError: one sentence: what was given, what is allowed, what to do.
        OptionError: an option that does not exist, or a value that it does not take.
    """
    from nbdist.planner import load_model, local_devices, optimizers, search

    batch_sizes = _batch_sizes(batch_size)
    cluster = local_devices.cluster(devices, _maybe("world_size", world_size))
    settled = search.checked(fixed, precision, cluster)
    spec, length = load_model.model_spec(
        model,
        batch_size=batch_sizes[0],
        seq_len=_maybe("seq_len", seq_len),
        kind=cluster.kind,
        precision=settled["precision"],
        inputs=inputs,
        progress=local_devices.say,
    )
    return search.search(
        search.Question(
            model=spec,
            cluster=cluster,
            batch_sizes=batch_sizes,
            seq_len=length,
            precision=settled.pop("precision"),
            optimizer=optimizers.for_kind(optimizers.lookup(optimizer), cluster.kind),
            fixed=settled,
        )
    )


_MOST = 10**7
"""Samples, tokens or ranks; beyond it a number is a slip of the hand."""


def _batch_sizes(given: int | Sequence[int]) -> tuple[int, ...]:
    several = given if isinstance(given, (list, tuple, range)) else [given]
    sizes = tuple(_whole("batch_size", one) for one in several)
    return sizes or (_whole("batch_size", given),)


def _maybe(name: str, given: object) -> int | None:
    return None if given is None else _whole(name, given)


def _whole(name: str, given: object) -> int:
    """Read a whole number from 1.

    Raises:
        PlanError: anything else, NaN and booleans included.
    """
    from nbdist.errors import PlanError

    number = given if isinstance(given, (int, float)) and not isinstance(given, bool) else math.nan
    if not (math.isfinite(number) and number == int(number) and 1 <= number <= _MOST):
        message = f"{name} {given!r} is not possible; use a whole number from 1 to {_MOST:,}."
        raise PlanError(message)
    return int(number)
