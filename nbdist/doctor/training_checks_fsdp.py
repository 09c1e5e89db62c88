"""Symptoms of problems under FSDP, each with the FSDP option that fixes it.

The options are fields of FullyShardedDataParallelPlugin (accelerate 1.15,
accelerate/utils/dataclasses.py). Their effect is taken from the source files that the rules name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.display.units import format_bytes
from nbdist.doctor.evidence import (
    OUT_OF_MEMORY_ADVICE,
    OUT_OF_MEMORY_PATTERN,
    PINNED_MEMORY_PATTERN,
)
from nbdist.doctor.finding import note, problem

if TYPE_CHECKING:
    from nbdist.doctor.evidence import RunEvidence
    from nbdist.doctor.finding import Finding

GATHER_COLLECTIVES = ("all_gather",)
MIN_EXPOSED_SHARE = 0.05
"""Share of a step: a longer exposed wait is worth a change."""
MANY_MESSAGES = 16
SMALL_MESSAGE_BYTES = 1 << 20
"""Below this size latency dominates the time of a collective, not bandwidth."""
_GATHERING = r"all_?gather|unshard|foreach_all_gather"
_NEARLY_ALL = 0.8
_SMALLEST_UNIT, _UNITS_WANTED, _LARGEST_UNIT = 10_000, 8, 10_000_000
_LAYERS = 16
"""A wrapped unit is usually a transformer block, whose smallest layer is about a twelfth of it."""


def check_gather_out_of_memory(case: RunEvidence) -> Finding | None:
    """Report that the current and the next unit do not fit beside the rest."""
    error = case.find_error(OUT_OF_MEMORY_PATTERN, _GATHERING)
    if not error:
        return None
    changed: dict[str, object] = {}
    if not case.options.reshard_after_forward:
        # torch/distributed/fsdp/_fully_shard/_fully_shard.py: False keeps all units gathered
        # until backward. FSDP1 uses sharding_strategy instead, accelerate/accelerator.py.
        changed |= _RESHARDS[case.options.strategy.level]
    if case.options.strategy.level == 1:
        # torch/distributed/fsdp/_runtime_utils.py _unshard: without the limit the CPU runs ahead
        # and gathers more units than fit; a prefetch holds one more.
        changed |= {"limit_all_gathers": True, "backward_prefetch": "NO_PREFETCH"}
        changed |= {"forward_prefetch": False}
    changed |= _layers(case)
    return problem(
        "all_gather",
        f"out of memory during the all-gather of parameters: {error}",
        case.fsdp_config_line(**changed) or OUT_OF_MEMORY_ADVICE,
    )


def check_single_unit(case: RunEvidence) -> Finding | None:
    """Report that one unit holds nearly all parameters, so nothing overlaps with the all-gather."""
    model = case.model
    if model is None or model.params < 2 * _SMALLEST_UNIT:
        return None
    # accelerate 1.15 makes units of the ends (embedding, head) even under NO_WRAP
    if model.largest_unit < _NEARLY_ALL * model.params:
        return None
    changed, current = _eighths(case), int(case.fsdp_option("min_num_params") or 0)
    if 0 < current <= changed["min_num_params"]:  # the current limit still gives one unit
        changed["min_num_params"] = max(_SMALLEST_UNIT, current // 4)
    line = case.fsdp_config_line(**changed)
    if not line:
        return None
    return note(
        "FSDP units",
        f"one unit has {model.largest_unit / model.params:.0%} of the parameters: every rank"
        " gathers nearly the whole model before any computation starts",
        line,
    )


def check_small_units(case: RunEvidence) -> Finding | None:
    """Report many small units, whose all-gathers are bound by latency."""
    count, num_bytes = case.collective_messages(GATHER_COLLECTIVES)
    exposed = case.exposed_collective_share(GATHER_COLLECTIVES)
    if count < MANY_MESSAGES or num_bytes >= SMALL_MESSAGE_BYTES or exposed < MIN_EXPOSED_SHARE:
        return None
    # nbdist/planner/tracing/wrap_units.py cuts by size as accelerate/utils/fsdp_utils.py's policy
    # does.
    changed = _eighths(case)
    current = int(case.fsdp_option("min_num_params") or 0)
    return note(
        "FSDP units",
        f"{count:.0f} all_gathers of {format_bytes(num_bytes)} per step take {exposed:.0%} of it:"
        " the units are too small",
        case.fsdp_config_line(
            **changed | {"min_num_params": max(2 * current, changed["min_num_params"])}
        ),
    )


def check_missing_prefetch(case: RunEvidence) -> Finding | None:
    """Report missing prefetch: by default FSDP1 gathers a unit when it is needed."""
    exposed = case.exposed_collective_share(GATHER_COLLECTIVES)
    # accelerate/utils/dataclasses.py: the default of backward_prefetch is NO_PREFETCH.
    set_already = str(case.fsdp_option("backward_prefetch", "NO_PREFETCH")).upper() != "NO_PREFETCH"
    if case.options.strategy.level != 1 or exposed < 2 * MIN_EXPOSED_SHARE or set_already:
        return None
    return note(
        "prefetch",
        f"{exposed:.0%} of a step waits for all_gather because units are not prefetched",
        case.fsdp_config_line(backward_prefetch="BACKWARD_PRE", forward_prefetch=True),
    )


def check_checkpoint_layout(case: RunEvidence) -> Finding | None:
    """Report a checkpoint in another format than the state_dict_type of the engine."""
    # accelerate/utils/fsdp_utils.py load_fsdp_model: FULL reads pytorch_model_fsdp.bin and, under
    # FSDP1, refuses without sync_module_states; SHARDED reads a folder with .metadata.
    requested = str(case.fsdp_option("state_dict_type", "SHARDED_STATE_DICT")).upper()
    if error := case.find_error("sync_module_states"):
        line = case.fsdp_config_line(sync_module_states=True)
        # accelerate/utils/dataclasses.py rejects the flag without a GPU
        do = (
            line
            if case.hardware.kind == "cuda"
            else "%nbdist load PATH, which does not need the flag"
        )
        return problem("loading", f"cannot load the {requested} checkpoint: {error}", do)
    error = case.find_error(r"LOCAL_STATE_DICT|pytorch_model_fsdp|\.distcp|\.metadata")
    if not error:
        return None
    full = requested.startswith("FULL")
    other = {"state_dict_type": "SHARDED_STATE_DICT" if full else "FULL_STATE_DICT"}
    must_sync = not full and case.options.strategy.level == 1 and case.hardware.kind == "cuda"
    sync = {"sync_module_states": True} if must_sync else {}
    return problem(
        "loading",
        f"the engine expects {requested}, but the checkpoint has another format (%nbdist load PATH"
        f" reads both): {error}",
        case.fsdp_config_line(**other, **sync),
    )


def check_pinned_memory(case: RunEvidence) -> Finding | None:
    """Report exhausted pinned memory. FSDP pins what it offloads; accelerate cannot disable it."""
    error = case.find_error(PINNED_MEMORY_PATTERN) or case.find_error(
        OUT_OF_MEMORY_PATTERN, PINNED_MEMORY_PATTERN
    )
    if not error or case.options.offload_device == "none":
        return None
    # torch/distributed/fsdp/_fully_shard/_fsdp_api.py CPUOffloadPolicy(pin_memory=True); the plugin
    # creates it from a bool (accelerate/utils/dataclasses.py), so a config cannot change it.
    return problem(
        "pinned memory",
        f"cannot pin more host memory: {error}",
        "%nbdist switch zero3 --offload cpu --deepspeed-config"
        ' \'{"zero_optimization": {"offload_optimizer": {"pin_memory": false}}}\'',
    )


def _eighths(case: RunEvidence) -> dict[str, Any]:
    """Options for about eight units, none of them too large."""
    params = case.model.params if case.model is not None else _LARGEST_UNIT * _UNITS_WANTED
    smallest = max(_SMALLEST_UNIT, min(params // _UNITS_WANTED, _LARGEST_UNIT))
    return {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": smallest}


def _layers(case: RunEvidence) -> dict[str, object]:
    """Options for one unit per layer, smaller than the current units, which did not fit."""
    model, current = case.model, int(case.fsdp_option("min_num_params") or 0)
    upper_bounds = [_LARGEST_UNIT, current // 2] if current else [_LARGEST_UNIT]
    # without a profile: any layer is smaller than its block
    upper_bounds.append(model.largest_unit // _LAYERS if model is not None else 0)
    smallest = max(_SMALLEST_UNIT, min(upper_bounds))
    return {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": smallest}


_RESHARDS: dict[int, dict[str, object]] = {
    1: {"sharding_strategy": "FULL_SHARD"},
    2: {"reshard_after_forward": True},
}

FSDP_CHECKS = (
    check_gather_out_of_memory,
    check_checkpoint_layout,
    check_pinned_memory,
    check_single_unit,
    check_small_units,
    check_missing_prefetch,
)
