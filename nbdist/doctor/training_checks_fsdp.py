"""What goes wrong under FSDP, and the option of its own that mends it.

The options are fields of FullyShardedDataParallelPlugin (accelerate 1.15,
accelerate/utils/dataclasses.py); what they do is read in the files that the rules name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.doctor.evidence import LESS_MEMORY, NO_MEMORY, PINNING
from nbdist.doctor.finding import note, problem, size

if TYPE_CHECKING:
    from nbdist.doctor.evidence import Case
    from nbdist.doctor.finding import Finding

GATHERS = ("all_gather",)
WAITS = 0.05
"""Of a step: a wait that is worth a change."""
MANY = 16
SMALL_BYTES = 1 << 20
"""Below it a collective's time is that of its messages, not of its bytes."""
_GATHERING = r"all_?gather|unshard|foreach_all_gather"
_NEARLY_ALL = 0.8
_SMALLEST_UNIT, _UNITS_WANTED, _LARGEST_UNIT = 10_000, 8, 10_000_000
_LAYERS = 16
"""Of a block of a transformer, which as a rule is a unit: its smallest layer is a twelfth of it."""


def gathered_out_of_memory(case: Case) -> Finding | None:
    """A whole unit and the next one do not fit beside the rest."""
    said = case.error(NO_MEMORY, _GATHERING)
    if not said:
        return None
    changed: dict[str, object] = {}
    if not case.options.reshard_after_forward:
        # torch/distributed/fsdp/_fully_shard/_fully_shard.py: False keeps all units gathered
        # until backward; under FSDP1 sharding_strategy says it, accelerate/accelerator.py.
        changed |= _RESHARDS[case.options.strategy.level]
    if case.options.strategy.level == 1:
        # torch/distributed/fsdp/_runtime_utils.py _unshard: without the limit the CPU runs ahead
        # and gathers more units than fit; a prefetch holds one more.
        changed |= {"limit_all_gathers": True, "backward_prefetch": "NO_PREFETCH"}
        changed |= {"forward_prefetch": False}
    changed |= _layers(case)
    return problem(
        "all_gather",
        f"out of memory while parameters were gathered: {said}",
        case.fsdp_line(**changed) or LESS_MEMORY,
    )


def one_unit(case: Case) -> Finding | None:
    """All parameters are gathered at once, and nothing computes meanwhile."""
    model = case.model
    if model is None or model.params < 2 * _SMALLEST_UNIT:
        return None
    # accelerate 1.15 makes units of the ends (embedding, head) even under NO_WRAP
    if model.largest_unit < _NEARLY_ALL * model.params:
        return None
    changed, now = _eighths(case), int(case.fsdp("min_num_params") or 0)
    if 0 < now <= changed["min_num_params"]:  # and one unit nevertheless
        changed["min_num_params"] = max(_SMALLEST_UNIT, now // 4)
    line = case.fsdp_line(**changed)
    if not line:
        return None
    return note(
        "FSDP units",
        f"one unit has {model.largest_unit / model.params:.0%} of the parameters: every rank"
        " gathers nearly all of the model at once, before it computes anything",
        line,
    )


def small_units(case: Case) -> Finding | None:
    """Many units of few bytes: each gather costs its messages."""
    count, num_bytes = case.messages(GATHERS)
    waits = case.exposed(GATHERS)
    if count < MANY or num_bytes >= SMALL_BYTES or waits < WAITS:
        return None
    # nbdist/planner/tracing/wrap_units.py cuts by size as accelerate/utils/fsdp_utils.py's policy
    # does.
    changed = _eighths(case)
    now = int(case.fsdp("min_num_params") or 0)
    return note(
        "FSDP units",
        f"{count:.0f} all_gathers of {size(num_bytes)} in a step take {waits:.0%} of it: the units"
        " are too small",
        case.fsdp_line(**changed | {"min_num_params": max(2 * now, changed["min_num_params"])}),
    )


def no_prefetch(case: Case) -> Finding | None:
    """FSDP1 gathers a unit when it is needed, unless it is told to be early."""
    waits = case.exposed(GATHERS)
    # accelerate/utils/dataclasses.py: backward_prefetch is NO_PREFETCH where nothing is said.
    set_already = str(case.fsdp("backward_prefetch", "NO_PREFETCH")).upper() != "NO_PREFETCH"
    if case.options.strategy.level != 1 or waits < 2 * WAITS or set_already:
        return None
    return note(
        "prefetch",
        f"{waits:.0%} of a step waits for all_gather, and no unit is gathered ahead of its use",
        case.fsdp_line(backward_prefetch="BACKWARD_PRE", forward_prefetch=True),
    )


def loads(case: Case) -> Finding | None:
    """A checkpoint in another layout than the engine asks for."""
    # accelerate/utils/fsdp_utils.py load_fsdp_model: FULL reads pytorch_model_fsdp.bin and, under
    # FSDP1, refuses without sync_module_states; SHARDED reads a folder with .metadata.
    asked = str(case.fsdp("state_dict_type", "SHARDED_STATE_DICT")).upper()
    if said := case.error("sync_module_states"):
        line = case.fsdp_line(sync_module_states=True)
        # accelerate/utils/dataclasses.py refuses the flag where there is no GPU
        do = line if case.hardware.kind == "cuda" else "%nbdist load PATH, which needs no flag"
        return problem("loading", f"{asked} cannot be read: {said}", do)
    said = case.error(r"LOCAL_STATE_DICT|pytorch_model_fsdp|\.distcp|\.metadata")
    if not said:
        return None
    full = asked.startswith("FULL")
    other = {"state_dict_type": "SHARDED_STATE_DICT" if full else "FULL_STATE_DICT"}
    sends = not full and case.options.strategy.level == 1 and case.hardware.kind == "cuda"
    sync = {"sync_module_states": True} if sends else {}
    return problem(
        "loading",
        f"the engine reads {asked} (%nbdist load PATH reads both), the checkpoint is another:"
        f" {said}",
        case.fsdp_line(**other, **sync),
    )


def pinned(case: Case) -> Finding | None:
    """FSDP page-locks what it offloads, and accelerate 1.15 has no option against it."""
    said = case.error(PINNING) or case.error(NO_MEMORY, PINNING)
    if not said or case.options.offload_device == "none":
        return None
    # torch/distributed/fsdp/_fully_shard/_fsdp_api.py CPUOffloadPolicy(pin_memory=True); the plugin
    # makes it from a truth (accelerate/utils/dataclasses.py), so a config cannot say otherwise.
    return problem(
        "pinned memory",
        f"no more host memory can be page-locked: {said}",
        "%nbdist switch zero3 --offload cpu --deepspeed-config"
        ' \'{"zero_optimization": {"offload_optimizer": {"pin_memory": false}}}\'',
    )


def _eighths(case: Case) -> dict[str, Any]:
    """About eight units, and not too large ones."""
    params = case.model.params if case.model is not None else _LARGEST_UNIT * _UNITS_WANTED
    smallest = max(_SMALLEST_UNIT, min(params // _UNITS_WANTED, _LARGEST_UNIT))
    return {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": smallest}


def _layers(case: Case) -> dict[str, object]:
    """Each layer a unit of its own, and never larger units than now: they did not fit."""
    model, said = case.model, int(case.fsdp("min_num_params") or 0)
    known = [_LARGEST_UNIT, said // 2] if said else [_LARGEST_UNIT]
    # without a profile any layer is smaller than the block that it is in
    known.append(model.largest_unit // _LAYERS if model is not None else 0)
    smallest = max(_SMALLEST_UNIT, min(known))
    return {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": smallest}


_RESHARDS: dict[int, dict[str, object]] = {
    1: {"sharding_strategy": "FULL_SHARD"},
    2: {"reshard_after_forward": True},
}

RULES = (gathered_out_of_memory, loads, pinned, one_unit, small_units, no_prefetch)
