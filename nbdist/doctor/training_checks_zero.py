"""Symptoms of problems under DeepSpeed ZeRO, each with the DeepSpeed option that fixes it.

The options are those of DeepSpeedZeroConfig (deepspeed 0.19.8, deepspeed/runtime/zero/config.py),
of its offload sections (zero/offload_config.py) and of aio (runtime/swap_tensor/constants.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.display.units import format_bytes
from nbdist.doctor.evidence import (
    OUT_OF_MEMORY_ADVICE,
    OUT_OF_MEMORY_PATTERN,
    PINNED_MEMORY_PATTERN,
)
from nbdist.doctor.finding import note, problem
from nbdist.doctor.training_checks_fsdp import (
    GATHER_COLLECTIVES,
    MANY_MESSAGES,
    MIN_EXPOSED_SHARE,
    SMALL_MESSAGE_BYTES,
)

if TYPE_CHECKING:
    from nbdist.doctor.evidence import RunEvidence
    from nbdist.doctor.finding import Finding

REDUCE_COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter")
SHARDED_PARAMETERS_STAGE = 3
"""The ZeRO stage that shards parameters."""
_GATHERING = r"all_?gather|fetch_sub_module|partitioned_param|_allgather_params"
_PREFETCH, _PERSISTENT, _LIVE, _BUCKET = 50_000_000, 100_000, 1_000_000_000, 500_000_000
"""Defaults of zero/config.py, in elements."""
_SMALL_BUCKET = 5_000_000
_AIO_BLOCK, _AIO_DEPTH = 1 << 20, 8
"""Defaults of swap_tensor/constants.py."""
_STATE_BYTES = 16
"""Host memory per offloaded parameter: fp32 copy, two moments and gradient."""


def check_gather_out_of_memory(case: RunEvidence) -> Finding | None:
    """Report that gathered or prefetched parameters do not fit beside the rest."""
    error = case.find_error(OUT_OF_MEMORY_PATTERN, _GATHERING)
    if not error:
        return None
    if case.options.strategy.level == SHARDED_PARAMETERS_STAGE:
        # zero/partitioned_param_coordinator.py: prefetches below this number of live parameters
        line = case.zero_config_line(
            stage3_max_live_parameters=_less(case, "stage3_max_live_parameters", _LIVE // 10),
            stage3_max_reuse_distance=_less(case, "stage3_max_reuse_distance", _LIVE // 10),
            stage3_prefetch_bucket_size=_less(case, "stage3_prefetch_bucket_size", _PREFETCH // 5),
        )
    else:
        # zero/stage_1_and_2.py: updated weights are gathered in pieces of this many elements
        line = case.zero_config_line(
            allgather_bucket_size=_less(case, "allgather_bucket_size", _BUCKET // 10),
            reduce_bucket_size=_less(case, "reduce_bucket_size", _BUCKET // 10),
        )
    says = f"out of memory during the all-gather of parameters: {error}"
    return problem("all_gather", says, line or OUT_OF_MEMORY_ADVICE)


def check_small_parameters(case: RunEvidence) -> Finding | None:
    """Report small sharded parameters, whose all-gathers are bound by latency."""
    count, num_bytes = case.collective_messages(GATHER_COLLECTIVES)
    exposed = case.exposed_collective_share(GATHER_COLLECTIVES)
    sharded = case.options.strategy.level == SHARDED_PARAMETERS_STAGE
    if (
        not sharded
        or count < MANY_MESSAGES
        or num_bytes >= SMALL_MESSAGE_BYTES
        or exposed < MIN_EXPOSED_SHARE
    ):
        return None
    threshold = _number(case.zero_option("stage3_param_persistence_threshold"), _PERSISTENT)
    changed, reasons = _held_back(case)
    changed["stage3_param_persistence_threshold"] = max(10 * threshold, _PERSISTENT)
    sharded_alone = f"parameters above {threshold} elements are sharded and gathered one by one"
    return note(
        "small modules",
        f"{count:.0f} all_gathers of {format_bytes(num_bytes)} per step take {exposed:.0%} of it:"
        f" {', '.join([sharded_alone, *reasons])}",
        case.zero_config_line(**changed),
    )


def check_slow_gathers(case: RunEvidence) -> Finding | None:
    """Report that ZeRO-3 waits for parameters that it could prefetch."""
    exposed = case.exposed_collective_share(GATHER_COLLECTIVES)
    count, num_bytes = case.collective_messages(GATHER_COLLECTIVES)
    small = count >= MANY_MESSAGES and num_bytes < SMALL_MESSAGE_BYTES
    if (
        case.options.strategy.level != SHARDED_PARAMETERS_STAGE
        or exposed < 2 * MIN_EXPOSED_SHARE
        or small
    ):
        return None
    prefetch = _number(case.zero_option("stage3_prefetch_bucket_size"), _PREFETCH)
    largest = case.model.largest_unit if case.model is not None else 0
    changed, reasons = _held_back(case)
    changed["stage3_prefetch_bucket_size"] = max(4 * prefetch, largest, _PREFETCH)
    limit = f"at most {prefetch:,} parameters are prefetched"
    return note(
        "slow ZeRO-3",
        f"{exposed:.0%} of a step waits for all_gather:"
        f" {', '.join(dict.fromkeys([limit, *reasons]))}",
        case.zero_config_line(**changed),
    )


def _held_back(case: RunEvidence) -> tuple[dict[str, object], list[str]]:
    """Settings of the user's config that limit prefetching, reset to defaults; and the reasons."""
    changed: dict[str, object] = {}
    reasons = []
    prefetch = _number(case.zero_option("stage3_prefetch_bucket_size"), _PREFETCH)
    if prefetch < _PREFETCH // 10:
        changed["stage3_prefetch_bucket_size"] = _PREFETCH
        reasons.append(f"at most {prefetch:,} parameters are prefetched")
    if case.zero_option("overlap_comm") is False:  # zero/config.py: defaults to true under stage 3
        changed["overlap_comm"] = True
        reasons.append("overlap_comm is off")
    if _number(case.zero_option("stage3_max_live_parameters"), _LIVE) < _LIVE:
        changed |= {"stage3_max_live_parameters": _LIVE, "stage3_max_reuse_distance": _LIVE}
        reasons.append("parameters are released early (stage3_max_live_parameters)")
    return changed, reasons


def check_small_buckets(case: RunEvidence) -> Finding | None:
    """Report small gradient buckets set by the config."""
    bucket_size = case.zero_option("reduce_bucket_size")
    count, num_bytes = case.collective_messages(REDUCE_COLLECTIVES)
    # accelerate/accelerator.py makes "auto" the square of hidden_size: small for small models
    is_small = bucket_size is not None and _number(bucket_size, 0) < _SMALL_BUCKET
    if (
        not is_small
        or count < 2  # noqa: PLR2004 - a single message cannot be merged with another
        or case.exposed_collective_share(REDUCE_COLLECTIVES) < MIN_EXPOSED_SHARE
    ):
        return None
    return note(
        "small buckets",
        f"gradients are reduced in {count:.0f} messages of {format_bytes(num_bytes)} per step,"
        f" which take {case.exposed_collective_share(REDUCE_COLLECTIVES):.0%} of it:"
        f" reduce_bucket_size is {bucket_size}",
        case.zero_config_line(reduce_bucket_size=_BUCKET),
    )


def check_checkpoint_layout(case: RunEvidence) -> Finding | None:
    """Report a checkpoint saved with another number of ranks or another parameter alignment."""
    # runtime/engine.py _load_zero_checkpoint raises it; checkpoint.load_universal of
    # runtime/constants.py reads what deepspeed/checkpoint/ds_to_universal.py has written.
    if error := case.find_error(r"world size of \d+ but the|DP world size"):
        line = case.deepspeed_config_line({"checkpoint": {"load_universal": True}})
        return problem(
            "loading",
            "the checkpoint was saved with another number of ranks. %nbdist load PATH reads it;"
            f" DeepSpeed reads it after a conversion with its ds_to_universal.py: {error}",
            line,
        )
    # zero/stage_1_and_2.py _load_global_state compares it with zero/config.py parameter_alignment
    if error := case.find_error("parameter-alignment layout"):
        line = case.zero_config_line(
            parameter_alignment=case.zero_option("parameter_alignment") is not True
        )
        return problem(
            "loading", f"the checkpoint was saved with another parameter alignment: {error}", line
        )
    return None


def check_pinned_memory(case: RunEvidence) -> Finding | None:
    """Report exhausted or extensive pinned memory, which is limited and cannot be swapped."""
    if case.options.offload_device == "none":
        return None
    changed: dict[str, object] = {"offload_optimizer": {"pin_memory": False}}
    if case.options.offload_params:
        changed["offload_param"] = {"pin_memory": False}
    error = case.find_error(PINNED_MEMORY_PATTERN) or case.find_error(
        OUT_OF_MEMORY_PATTERN, PINNED_MEMORY_PATTERN
    )
    if error:  # zero/offload_config.py: "Disable only on hosts with tight memlock limits"
        says = f"cannot pin more host memory: {error}"
        return problem(
            "pinned memory", says, case.zero_config_line(**changed) or OUT_OF_MEMORY_ADVICE
        )
    to_cpu = case.options.offload_device == "cpu" and case.hardware.kind == "cuda"
    pins = _section(case, "offload_optimizer").get("pin_memory", True)
    need = _STATE_BYTES * case.model.params if case.model is not None else 0
    if not to_cpu or not pins or not case.host_bytes or need < case.host_bytes // 2:
        return None
    total = format_bytes(case.host_bytes)
    says = f"the offload pins about {format_bytes(need)} of {total} host memory"
    return note("pinned memory", says, case.zero_config_line(**changed))


def check_nvme_io(case: RunEvidence) -> Finding | None:
    """Report NVMe reads and writes with too small blocks or too few requests."""
    share = case.step_share("offload")
    if case.options.offload_device != "nvme" or share < 2 * MIN_EXPOSED_SHARE:
        return None
    aio = (case.options.deepspeed_config or {}).get("aio") or {}
    block = _number(aio.get("block_size"), _AIO_BLOCK)
    depth = _number(aio.get("queue_depth"), _AIO_DEPTH)
    # zero/offload_config.py: reads and writes of the next tile overlap with the computation
    pipelined = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 5}
    line = case.deepspeed_config_line(
        {
            "aio": {
                "block_size": max(8 * _AIO_BLOCK, block),
                "queue_depth": max(4 * _AIO_DEPTH, depth),
            },
            "zero_optimization": {"offload_optimizer": pipelined},
        }
    )
    return note(
        "NVMe",
        f"{share:.0%} of a step moves state to and from the disk, in blocks of"
        f" {format_bytes(block)}, {depth} at a time",
        line or "the disk is the bottleneck: use --offload cpu if host memory is large enough",
    )


def _section(case: RunEvidence, name: str) -> dict[str, object]:
    section = case.zero_option(name)
    return section if isinstance(section, dict) else {}


def _number(value: object, default: int) -> int:
    """Number of elements; the default for "auto" and None."""
    return int(value) if isinstance(value, (int, float)) else default


def _less(case: RunEvidence, key: str, wanted: int) -> int:
    """The wanted number of elements, but at most half of the current value."""
    return min(wanted, _number(case.zero_option(key), 2 * wanted) // 2)


ZERO_CHECKS = (
    check_gather_out_of_memory,
    check_checkpoint_layout,
    check_pinned_memory,
    check_small_parameters,
    check_slow_gathers,
    check_small_buckets,
    check_nvme_io,
)
