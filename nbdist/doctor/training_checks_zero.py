"""What goes wrong under DeepSpeed ZeRO, and the option of its own that mends it.

The options are those of DeepSpeedZeroConfig (deepspeed 0.19.8, deepspeed/runtime/zero/config.py),
of its offload sections (zero/offload_config.py) and of aio (runtime/swap_tensor/constants.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.doctor.evidence import LESS_MEMORY, NO_MEMORY, PINNING
from nbdist.doctor.finding import note, problem, size
from nbdist.doctor.training_checks_fsdp import GATHERS, MANY, SMALL_BYTES, WAITS

if TYPE_CHECKING:
    from nbdist.doctor.evidence import Case
    from nbdist.doctor.finding import Finding

REDUCES = ("all_reduce", "reduce", "reduce_scatter")
SHARDED = 3
"""The stage that shards parameters."""
_GATHERING = r"all_?gather|fetch_sub_module|partitioned_param|_allgather_params"
_PREFETCH, _PERSISTENT, _LIVE, _BUCKET = 50_000_000, 100_000, 1_000_000_000, 500_000_000
"""Defaults of zero/config.py, in elements."""
_SMALL_BUCKET = 5_000_000
_AIO_BLOCK, _AIO_DEPTH = 1 << 20, 8
"""Defaults of swap_tensor/constants.py."""
_STATE_BYTES = 16
"""A parameter's, in host memory, offloaded: fp32 copy, two moments, gradient."""


def gathered_out_of_memory(case: Case) -> Finding | None:
    """What ZeRO keeps gathered, or fetches ahead, does not fit beside the rest."""
    said = case.error(NO_MEMORY, _GATHERING)
    if not said:
        return None
    if case.options.strategy.level == SHARDED:
        # zero/partitioned_param_coordinator.py: fetches ahead while fewer are live than allowed
        line = case.zero_line(
            stage3_max_live_parameters=_less(case, "stage3_max_live_parameters", _LIVE // 10),
            stage3_max_reuse_distance=_less(case, "stage3_max_reuse_distance", _LIVE // 10),
            stage3_prefetch_bucket_size=_less(case, "stage3_prefetch_bucket_size", _PREFETCH // 5),
        )
    else:
        # zero/stage_1_and_2.py: updated weights are gathered in pieces of this many elements
        line = case.zero_line(
            allgather_bucket_size=_less(case, "allgather_bucket_size", _BUCKET // 10),
            reduce_bucket_size=_less(case, "reduce_bucket_size", _BUCKET // 10),
        )
    says = f"out of memory while parameters were gathered: {said}"
    return problem("all_gather", says, line or LESS_MEMORY)


def small_parameters(case: Case) -> Finding | None:
    """Parameters below a threshold stay whole on each rank; a low one costs a message each."""
    count, num_bytes = case.messages(GATHERS)
    waits = case.exposed(GATHERS)
    sharded = case.options.strategy.level == SHARDED
    if not sharded or count < MANY or num_bytes >= SMALL_BYTES or waits < WAITS:
        return None
    now = _number(case.zero("stage3_param_persistence_threshold"), _PERSISTENT)
    changed, why = _held_back(case)
    changed["stage3_param_persistence_threshold"] = max(10 * now, _PERSISTENT)
    return note(
        "small modules",
        f"{count:.0f} all_gathers of {size(num_bytes)} in a step take {waits:.0%} of it:"
        f" {', '.join([f'parameters above {now} elements are shared out one by one', *why])}",
        case.zero_line(**changed),
    )


def slow_gathers(case: Case) -> Finding | None:
    """ZeRO-3 waits for parameters although it could fetch them ahead."""
    waits = case.exposed(GATHERS)
    count, num_bytes = case.messages(GATHERS)
    small = count >= MANY and num_bytes < SMALL_BYTES
    if case.options.strategy.level != SHARDED or waits < 2 * WAITS or small:
        return None
    prefetch = _number(case.zero("stage3_prefetch_bucket_size"), _PREFETCH)
    largest = case.model.largest_unit if case.model is not None else 0
    changed, why = _held_back(case)
    changed["stage3_prefetch_bucket_size"] = max(4 * prefetch, largest, _PREFETCH)
    ahead = f"at most {prefetch:,} parameters are fetched ahead"
    return note(
        "slow ZeRO-3",
        f"{waits:.0%} of a step waits for all_gather: {', '.join(dict.fromkeys([ahead, *why]))}",
        case.zero_line(**changed),
    )


def _held_back(case: Case) -> tuple[dict[str, object], list[str]]:
    """What the user's config takes from the fetching ahead, given back; and why."""
    changed: dict[str, object] = {}
    why = []
    prefetch = _number(case.zero("stage3_prefetch_bucket_size"), _PREFETCH)
    if prefetch < _PREFETCH // 10:
        changed["stage3_prefetch_bucket_size"] = _PREFETCH
        why.append(f"at most {prefetch:,} parameters are fetched ahead")
    if case.zero("overlap_comm") is False:  # zero/config.py: true under stage 3 unless said
        changed["overlap_comm"] = True
        why.append("overlap_comm is off")
    if _number(case.zero("stage3_max_live_parameters"), _LIVE) < _LIVE:
        changed |= {"stage3_max_live_parameters": _LIVE, "stage3_max_reuse_distance": _LIVE}
        why.append("parameters are given up early (stage3_max_live_parameters)")
    return changed, why


def small_buckets(case: Case) -> Finding | None:
    """Gradients leave in many small messages because the config says so."""
    said = case.zero("reduce_bucket_size")
    count, num_bytes = case.messages(REDUCES)
    # accelerate/accelerator.py makes "auto" the square of hidden_size: small for small models
    little = said is not None and _number(said, 0) < _SMALL_BUCKET
    if not little or count < 2 or case.exposed(REDUCES) < WAITS:  # noqa: PLR2004 - one is the least
        return None
    return note(
        "small buckets",
        f"gradients are reduced in {count:.0f} messages of {size(num_bytes)} a step, which take"
        f" {case.exposed(REDUCES):.0%} of it: reduce_bucket_size is {said}",
        case.zero_line(reduce_bucket_size=_BUCKET),
    )


def loads(case: Case) -> Finding | None:
    """A checkpoint of another number of ranks, or with its parameters laid out otherwise."""
    # runtime/engine.py _load_zero_checkpoint raises it; checkpoint.load_universal of
    # runtime/constants.py reads what deepspeed/checkpoint/ds_to_universal.py has written.
    if said := case.error(r"world size of \d+ but the|DP world size"):
        line = case.deepspeed_line({"checkpoint": {"load_universal": True}})
        return problem(
            "loading",
            "the checkpoint is of another number of ranks; %nbdist load PATH reads it, DeepSpeed"
            f" itself once its ds_to_universal.py has made it universal: {said}",
            line,
        )
    # zero/stage_1_and_2.py _load_global_state compares it with zero/config.py parameter_alignment
    if said := case.error("parameter-alignment layout"):
        line = case.zero_line(parameter_alignment=case.zero("parameter_alignment") is not True)
        return problem("loading", f"the checkpoint was written with the other layout: {said}", line)
    return None


def pinned(case: Case) -> Finding | None:
    """Host memory that is page-locked cannot be swapped, and there is only so much."""
    if case.options.offload_device == "none":
        return None
    changed: dict[str, object] = {"offload_optimizer": {"pin_memory": False}}
    if case.options.offload_params:
        changed["offload_param"] = {"pin_memory": False}
    said = case.error(PINNING) or case.error(NO_MEMORY, PINNING)
    if said:  # zero/offload_config.py: "Disable only on hosts with tight memlock limits"
        says = f"no more host memory can be page-locked: {said}"
        return problem("pinned memory", says, case.zero_line(**changed) or LESS_MEMORY)
    on_host = case.options.offload_device == "cpu" and case.hardware.kind == "cuda"
    pins = _section(case, "offload_optimizer").get("pin_memory", True)
    need = _STATE_BYTES * case.model.params if case.model is not None else 0
    if not on_host or not pins or not case.host_bytes or need < case.host_bytes // 2:
        return None
    says = f"the offload page-locks about {size(need)} of {size(case.host_bytes)} host memory"
    return note("pinned memory", says, case.zero_line(**changed))


def nvme(case: Case) -> Finding | None:
    """The disk is asked for too little at a time."""
    waits = case.share("offload")
    if case.options.offload_device != "nvme" or waits < 2 * WAITS:
        return None
    aio = (case.options.deepspeed_config or {}).get("aio") or {}
    block = _number(aio.get("block_size"), _AIO_BLOCK)
    depth = _number(aio.get("queue_depth"), _AIO_DEPTH)
    # zero/offload_config.py: reads and writes of the next tile run beside the computing
    pipelined = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 5}
    line = case.deepspeed_line(
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
        f"{waits:.0%} of a step moves state to and from the disk, in blocks of {size(block)},"
        f" {depth} at a time",
        line or "the disk is the limit: --offload cpu, where host memory holds it",
    )


def _section(case: Case, name: str) -> dict[str, object]:
    section = case.zero(name)
    return section if isinstance(section, dict) else {}


def _number(value: object, default: int) -> int:
    """A number of elements; "auto" and what is not said are the default."""
    return int(value) if isinstance(value, (int, float)) else default


def _less(case: Case, key: str, wanted: int) -> int:
    """So many elements, and at the most half of what the config in force has."""
    return min(wanted, _number(case.zero(key), 2 * wanted) // 2)


RULES = (
    gathered_out_of_memory,
    loads,
    pinned,
    small_parameters,
    slow_gathers,
    small_buckets,
    nvme,
)
