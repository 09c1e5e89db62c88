"""Recommendations whose cost the planner can predict: backend, batch size and options."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbdist import strategies
from nbdist.display.units import format_bytes, format_duration
from nbdist.profiler.advice import Advice
from nbdist.profiler.bottleneck import is_gather_bound, is_single_unit_exposed, typical_share
from nbdist.profiler.dataloader_calls import rebuild_instruction
from nbdist.profiler.rank_comparison import STEP_PART_LABELS
from nbdist.profiler.speedup import NEARLY_BEST_FRACTION, speedup_without
from nbdist.profiler.what_if import doublings, smallest_sufficient_batch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Set as AbstractSet

    from nbdist.profiler.bottleneck import BottleneckKind
    from nbdist.profiler.profile_data import ProfileData
    from nbdist.profiler.speedup import Speedup
    from nbdist.profiler.what_if import CalibratedPlanner, ChangedStep
    from nbdist.strategies import Options

_BACKENDS = {"communication", "offload", "optimizer"}
"""Bottlenecks that another backend may reduce."""
_SURELY = 0.2
"""Minimum lower bound of the speedup for another backend on CPU ranks. The planner does not model
the Python overhead of the backends, which is significant there."""
_LARGER = {"communication", "offload", "optimizer", "host"}
"""Bottlenecks whose cost per step does not grow with the batch size."""
_TINY = 0.40
"""Share of the step with a cost independent of the batch size from which a larger batch is
recommended, even if no part alone exceeds its threshold. Noisy control runs had at most 38 %,
including communication."""
_TINY_OPTIMIZER = 0.22
"""Share of the optimizer from which `_WITH_OPTIMIZER` applies instead of `_TINY`. Noise hardly
changes it (at most 20 % in the control runs)."""
_WITH_OPTIMIZER = 0.30
"""Like `_TINY`, if the optimizer alone has `_TINY_OPTIMIZER`."""


def recommend_backend_changes(
    profile: ProfileData, planner: CalibratedPlanner, kinds: AbstractSet[BottleneckKind]
) -> Iterator[Advice]:
    """Yield all changes that the planner predicts to fit.

    Args:
        profile: the profile.
        planner: the planner, calibrated to the profile.
        kinds: the bottlenecks that were found.
    """
    now = planner.options
    if kinds & _BACKENDS:
        yield from _simplest(_backends(planner))
    if "communication" in kinds:
        yield from _switched(planner, planner.options_without_resharding())
        yield from _switched(planner, planner.options_with_node_replicas())
        if is_single_unit_exposed(profile):
            yield from _units(profile, planner)
    gathers = is_gather_bound(profile)
    by_hand = now.accumulate != profile.setting.options.accumulate
    # --accumulate has no effect on a loop that accumulates manually.
    if (kinds & _LARGER or gathers) and not by_hand:
        yield from _accumulated(planner)
    if kinds & _LARGER or gathers or _tiny(profile):
        yield from _larger(profile, planner)
    if now.offload != "none":
        yield from _switched(planner, replace(now, offload="none", offload_params=False))
    if now.activation_checkpointing:
        yield from _switched(planner, replace(now, activation_checkpointing=False))
    if profile.kind == "cuda":
        yield from _of_gpus(profile, planner, kinds)


def _tiny(profile: ProfileData) -> bool:
    """Return whether a large share of the step is independent of the batch size."""
    shared = typical_share(profile, "optimizer", "communication", "python", "idle")
    clear = typical_share(profile, "optimizer") >= _TINY_OPTIMIZER
    return shared >= (_WITH_OPTIMIZER if clear else _TINY)


def _of_gpus(
    profile: ProfileData, planner: CalibratedPlanner, kinds: AbstractSet[BottleneckKind]
) -> Iterator[Advice]:
    """Recommend torch.compile if bound by memory or kernel launches, and bf16 for tensor cores."""
    now = planner.options
    if kinds & {"memory", "host"} and not now.compile:
        yield from _switched(planner, replace(now, compile=True))
    if now.precision == "no" and profile.setting.cluster.slowest_device.has_bf16:
        yield from _switched(planner, replace(now, precision="bf16"))


def _simplest(several: Iterable[Advice]) -> Iterator[Advice]:
    """Yield the first of the alternatives whose speedup is close to that of the best."""
    alternatives = list(several)
    best = max((advice.gain.faster for advice in alternatives), default=0.0)
    yield from [
        advice for advice in alternatives if advice.gain.faster >= NEARLY_BEST_FRACTION * best > 0
    ][:1]


def _backends(planner: CalibratedPlanner) -> Iterator[Advice]:
    """Recommend other backends with the same options."""
    min_speedup = _SURELY if planner.kind == "cpu" else 0.0
    for name, strategy in strategies.STRATEGIES.items():
        now = planner.options
        if name == now.backend or strategy.is_legacy:
            continue
        if now.offload_device not in strategy.offloads:
            continue
        other = replace(
            now, backend=name, replicate_across="none", fsdp_config=None, deepspeed_config=None
        )
        yield from (
            advice for advice in _switched(planner, other) if advice.gain.low >= min_speedup
        )


def _switched(planner: CalibratedPlanner, options: Options | None) -> Iterator[Advice]:
    """Recommend other options if the model fits with them."""
    if options is None:
        return
    prediction = planner.predict_change(options)
    if prediction is None:
        return
    different = _different(planner.options, prediction.row.options)
    yield Advice(
        title=_title(different),
        why=_why(planner, prediction),
        line=_line(different),
        gain=prediction.gain,
        change={"options": different},
        changes=different,
        saves_bytes=max(0, planner.row.device_bytes - prediction.row.device_bytes),
    )


def _why(planner: CalibratedPlanner, found: ChangedStep) -> str:
    """Describe the part of the step that becomes shorter."""
    before = planner.parts
    part = max(found.parts, key=lambda name: before[name] - found.parts[name])
    return (
        f"The planner predicts that {STEP_PART_LABELS[part]} takes"
        f" {format_duration(found.parts[part])} of a step instead of"
        f" {format_duration(before[part])}, and that it fits."
    )


def _accumulated(planner: CalibratedPlanner) -> Iterator[Advice]:
    """Recommend more gradient accumulation steps."""
    predictions = [
        (count, made)
        for count in doublings(planner.options.accumulate)
        if (made := planner.predict_change(replace(planner.options, accumulate=count)))
    ]
    if smallest := smallest_sufficient_batch(predictions):
        count, made = smallest
        yield Advice(
            title=f"accumulate {count}",
            why=(
                f"Gradients are reduced and applied once per {count} micro-batches. The loop must"
                " use `accelerator.accumulate(model)`; the effective batch size grows accordingly."
            ),
            line=f"%nbdist switch --accumulate {count}",
            gain=made.gain,
            change={"options": {"accumulate": count}},
            changes={"accumulate": count},
        )


def _larger(profile: ProfileData, planner: CalibratedPlanner) -> Iterator[Advice]:
    """Recommend larger micro-batches that fit."""
    predictions = [
        (count, made)
        for count in doublings(planner.samples)
        if (made := planner.predict_change(samples=count))
    ]
    if smallest := smallest_sufficient_batch(predictions):
        count, made = smallest
        yield Advice(
            title=f"micro-batch {count}",
            why=(
                f"The planner predicts that it fits ({format_bytes(made.row.device_bytes)} per"
                " device). The fixed cost of a step is shared by more samples."
            ),
            line=rebuild_instruction(profile.loader_text, batch_size=count),
            gain=made.gain,
            change={"micro_batch": count},
        )


def _units(profile: ProfileData, planner: CalibratedPlanner) -> Iterator[Advice]:
    """Recommend several FSDP units, so that the all-gather overlaps with computation."""
    model = profile.model
    if model is None:
        return
    smallest = max(1, model.params // 8)
    config = dict(planner.options.fsdp_config or {})
    config.pop("transformer_cls_names_to_wrap", None)
    config |= {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": smallest}
    element = 4 if planner.options.precision == "no" else 2
    on_gpu = profile.kind == "cuda"
    gain = planner.unit_wrapping_speedup() if on_gpu else _gathered_again(profile)
    yield Advice(
        title="FSDP units",
        why=(
            "The whole model is gathered at once, with no overlapping computation. Units of an"
            " eighth of the model are prefetched"
            f"{'' if on_gpu else ', which on GPUs hides most of the communication'}."
        ),
        line=f"%nbdist switch --fsdp-config '{json.dumps(config)}'",
        gain=gain,
        change={"largest_unit": model.largest_unit // 2},
        changes={"fsdp_config": config},
        saves_bytes=element * (model.largest_unit - smallest),
    )


def _gathered_again(profile: ProfileData) -> Speedup:
    """Estimate the slowdown by FSDP units of an eighth of the model on CPU ranks."""
    gathers = [stats for stats in profile.traffic if stats.name == "all_gather"]
    once = sum(stats.exposed_s - stats.waiting_s for stats in gathers)
    # gloo gathers in the thread that computes, so prefetching hides nothing. In torch 2.13 the
    # root unit stays gathered from forward to backward; the other seven are gathered twice.
    return speedup_without(profile, -7 / 8 * once)


def _different(now: Options, other: Options) -> dict[str, Any]:
    """Return the options of `other` that differ from `now`."""
    current, changed = now.to_json(), other.to_json()
    return {
        name: value
        for name, value in changed.items()
        if value != current[name] and value is not None
    }


def _title(different: dict[str, Any]) -> str:
    """Return a title such as "zero2" or "activation checkpointing off"."""
    words = []
    for name, value in different.items():
        plain = name.replace("_", " ")
        switched = {True: plain, False: f"{plain} off"}
        if isinstance(value, bool):
            words.append(switched[value])
        elif name in {"backend", "precision"}:
            words.append(str(value))
        elif name == "fsdp_config":
            words.append("no resharding after forward")
        else:
            words.append(f"{plain} {value}")
    return ", ".join(words)


def _line(different: dict[str, Any]) -> str:
    """Return the `%nbdist switch` line that applies the options."""
    words = ["%nbdist switch"]
    for name, value in different.items():
        flag = name.replace("_", "-")
        if name == "backend":
            words.insert(1, str(value))
        elif isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict):
            words.append(f"--{flag} '{json.dumps(value)}'")
        else:
            words.append(f"--{flag} {value}")
    return " ".join(words)
