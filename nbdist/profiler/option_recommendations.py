"""Recommendations of other options: backend, batch size, and the engine's own configuration."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbdist import strategies
from nbdist.number_formatting import format_bytes, format_duration, format_percent
from nbdist.profiler.advice import Advice, Speedup, speedup_without
from nbdist.profiler.bottleneck import is_gather_bound, is_single_unit_exposed, typical_share
from nbdist.profiler.dataloader_call import loader_code
from nbdist.profiler.profile_data import STEP_PART_LABELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from nbdist.profiler.bottleneck import BottleneckKind
    from nbdist.profiler.profile_data import ProfileData
    from nbdist.profiler.what_if import CalibratedPlanner, StepPrediction
    from nbdist.strategies import Options

NEARLY_BEST = 0.9
"""Share of the best speedup: the smallest or simplest change that reaches it is recommended."""
_NEARLY_BEST_BATCH = 0.7
"""The same for batch sizes. A larger batch changes the training."""
_MIN_CPU_GAIN = 0.2
"""Minimum lower bound of the speedup for another backend on CPU ranks, where the Python overhead of
the backends is significant and differs between machines."""
_TINY = 0.40
"""Share of the step with a cost independent of the batch size from which a larger batch is
recommended, even if no part alone exceeds its threshold. Noisy control runs had at most 38 %,
including communication."""
_TINY_OPTIMIZER = 0.22
"""Share of the optimizer from which `_WITH_OPTIMIZER` applies instead of `_TINY`. Noise hardly
changes it (at most 20 % in the control runs)."""
_WITH_OPTIMIZER = 0.30
"""Like `_TINY`, if the optimizer alone has `_TINY_OPTIMIZER`."""


def switch_line(changes: Mapping[str, Any]) -> str:
    """Return the `%nbdist switch` line that applies options."""
    words = ["%nbdist switch"]
    for name, value in changes.items():
        flag = name.replace("_", "-")
        if name == "backend":
            words.insert(1, str(value))
        elif isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict):
            words.append(f"--{flag} {shlex.quote(json.dumps(value, default=str))}")
        else:
            words.append(f"--{flag} {value}")
    return " ".join(words)


def merged_config(base: Mapping[str, Any] | None, changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return an engine config updated with `changed`, merging nested mappings."""
    merged = strategies.merge_configs(base or {}, changed)
    if isinstance(zero := merged.get("zero_optimization"), dict):
        # The backend determines the stage.
        merged["zero_optimization"] = {key: zero[key] for key in zero if key != "stage"}
    return merged


# --------------------------------------------------------------- options that the planner knows


def recommend_options(
    profile: ProfileData, planner: CalibratedPlanner, kinds: AbstractSet[BottleneckKind]
) -> Iterator[Advice]:
    """Yield all changes that the planner predicts to fit.

    Args:
        profile: the profile.
        planner: the planner, calibrated to the profile.
        kinds: the bottlenecks that were found.
    """
    now = planner.options
    # Bottlenecks that another backend may reduce, and those whose cost per step does not grow
    # with the batch size.
    if kinds & {"communication", "offload", "optimizer"}:
        yield from _other_backend(planner)
    if "communication" in kinds:
        yield from _switch(planner, planner.options_without_resharding())
        yield from _switch(planner, planner.options_with_node_replicas())
    is_shared = bool(kinds & {"communication", "offload", "optimizer", "host"})
    is_shared = is_shared or is_gather_bound(profile)
    # --accumulate has no effect on a loop that accumulates manually.
    if is_shared and now.accumulate == profile.setting.options.accumulate:
        yield from _accumulate(planner)
    fixed = typical_share(profile, "optimizer", "communication", "python", "idle")
    has_optimizer = typical_share(profile, "optimizer") >= _TINY_OPTIMIZER
    if is_shared or fixed >= (_WITH_OPTIMIZER if has_optimizer else _TINY):
        yield from _larger_batch(profile, planner)
    if now.offload != "none":
        yield from _switch(planner, replace(now, offload="none", offload_params=False))
    if now.activation_checkpointing:
        yield from _switch(planner, replace(now, activation_checkpointing=False))
    if profile.kind == "cuda":
        if kinds & {"memory", "host"} and not now.is_compiled:
            yield from _switch(planner, replace(now, compile=True))
        if now.precision == "no" and profile.setting.cluster.slowest_device.has_bf16:
            yield from _switch(planner, replace(now, precision="bf16"))


def _other_backend(planner: CalibratedPlanner) -> list[Advice]:
    """Return the first of the other backends whose speedup is close to that of the best."""
    found: list[Advice] = []
    now, is_cpu = planner.options, planner.profile.kind == "cpu"
    min_speedup = _MIN_CPU_GAIN if is_cpu else 0.0
    for name, strategy in strategies.STRATEGIES.items():
        if name == now.backend or strategy.is_legacy or now.offload_device not in strategy.offloads:
            continue
        other = replace(
            now, backend=name, replicate_across="none", fsdp_config=None, deepspeed_config=None
        )
        found += [
            advice for advice in _switch(planner, other) if advice.gain.at_least >= min_speedup
        ]
    best = max((advice.gain.faster for advice in found), default=0.0)
    return [advice for advice in found if advice.gain.faster >= NEARLY_BEST * best > 0][:1]


def _switch(planner: CalibratedPlanner, options: Options | None) -> Iterator[Advice]:
    prediction = planner.predict_change(options) if options else None
    if prediction is None:
        return
    current, other = planner.options.to_json(), prediction.row.options.to_json()
    different = {
        name: value for name, value in other.items() if value != current[name] and value is not None
    }
    before = planner.profile.parts
    part = max(prediction.parts, key=lambda name: before[name] - prediction.parts[name])
    yield Advice(
        title=", ".join(_title(name, value) for name, value in different.items()),
        why=(
            f"The planner predicts that {STEP_PART_LABELS[part]} takes"
            f" {format_duration(prediction.parts[part])} of a step instead of"
            f" {format_duration(before[part])}, and that it fits."
        ),
        line=switch_line(different),
        gain=prediction.gain,
        change={"options": different},
        changes=different,
        saves_bytes=max(0, planner.row.device_bytes - prediction.row.device_bytes),
    )


def _title(name: str, value: object) -> str:
    """Return a title such as "zero2" or "activation checkpointing off"."""
    plain = name.replace("_", " ")
    if isinstance(value, bool):
        return plain if value else f"{plain} off"
    if name in {"backend", "precision"}:
        return str(value)
    return "no resharding after forward" if name == "fsdp_config" else f"{plain} {value}"


def _accumulate(planner: CalibratedPlanner) -> Iterator[Advice]:
    start = planner.options.accumulate
    predictions = {
        count: planner.predict_change(replace(planner.options, accumulate=count))
        for count in (2 * start, 4 * start, 8 * start)
    }
    for count, prediction in _smallest_sufficient(predictions):
        yield Advice(
            title=f"accumulate {count}",
            why=(
                f"Gradients are reduced and applied once per {count} micro-batches. The loop must"
                " use `accelerator.accumulate(model)`; the effective batch size grows accordingly."
            ),
            line=switch_line({"accumulate": count}),
            gain=prediction.gain,
            change={"options": {"accumulate": count}},
            changes={"accumulate": count},
        )


def _larger_batch(profile: ProfileData, planner: CalibratedPlanner) -> Iterator[Advice]:
    start = planner.samples
    predictions = {
        count: planner.predict_change(samples=count) for count in (2 * start, 4 * start, 8 * start)
    }
    for count, prediction in _smallest_sufficient(predictions):
        yield Advice(
            title=f"micro-batch {count}",
            why=(
                f"The planner predicts that it fits ({format_bytes(prediction.row.device_bytes)}"
                " per device). The fixed cost of a step is shared by more samples."
            ),
            line=loader_code(profile.loader_text, batch_size=count),
            gain=prediction.gain,
            change={"micro_batch": count},
        )


def _smallest_sufficient(
    predictions: Mapping[int, StepPrediction | None],
) -> list[tuple[int, StepPrediction]]:
    """Return the smallest batch size that reaches most of the best speedup, if any is faster."""
    fitting = [(count, made) for count, made in predictions.items() if made is not None]
    best = max((made.gain.faster for _, made in fitting), default=0.0)
    return [item for item in fitting if item[1].gain.faster >= _NEARLY_BEST_BATCH * best > 0][:1]


# ------------------------------------------------- options of the engine's own configuration

# Options of FSDP are fields of FullyShardedDataParallelPlugin (accelerate 1.15,
# accelerate/utils/dataclasses.py); those of ZeRO are keys of DeepSpeedZeroConfig (deepspeed 0.19.8,
# deepspeed/runtime/zero/config.py) and of aio (runtime/swap_tensor/constants.py).
_MANY_MESSAGES = 16
_SMALL_MESSAGE_BYTES = 1 << 20
"""Below this size latency dominates the time of a collective, not bandwidth."""
_GATHERS = ("all_gather",)
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
MIN_UNIT, MAX_UNIT = 10_000, 10_000_000
"""Parameters of an FSDP unit that is wrapped by size."""
PREFETCH, PERSISTENT, LIVE, BUCKET = 50_000_000, 100_000, 1_000_000_000, 500_000_000
"""Defaults of zero/config.py, in elements."""
_SMALL_BUCKET = 5_000_000
_AIO_BLOCK, _AIO_DEPTH = 1 << 20, 8
"""Defaults of swap_tensor/constants.py."""


def recommend_fsdp_config(
    profile: ProfileData,
    planner: CalibratedPlanner | None,
    kinds: AbstractSet[BottleneckKind],
) -> Iterator[Advice]:
    """Yield options of FSDP for collectives that take long; arguments as above.

    The planner is None if it does not support the model.
    """
    options, model = profile.setting.options, profile.model
    current = options.fsdp_config or {}
    on_gpu = profile.kind == "cuda"
    count, num_bytes, exposed = _messages(profile, _GATHERS)
    limit = int(current.get("min_num_params") or 0)
    if model is not None and "communication" in kinds and is_single_unit_exposed(profile):
        unit = max(MIN_UNIT, model.params // 8)
        if 0 < limit <= unit:  # the current limit still gives one unit
            unit = max(MIN_UNIT, limit // 4)
        if not on_gpu:
            # gloo gathers in the thread that computes, so prefetching hides nothing. In torch 2.13
            # the root unit stays gathered from forward to backward; the other seven are gathered
            # twice.
            gain = speedup_without(profile, -7 / 8 * exposed)
        else:
            gain = (
                planner.unit_wrapping_speedup() if planner else _speedup_if_halved(profile, exposed)
            )
        element = 4 if profile.precision == "no" else 2
        yield from _config_advice(
            profile,
            "FSDP units",
            "The whole model is gathered at once, with no overlapping computation. Units of an"
            " eighth of the model are prefetched"
            f"{', which on GPUs hides most of the communication' if on_gpu else ''}.",
            {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": unit},
            gain,
            change={"largest_unit": model.largest_unit // 2},
            saves_bytes=element * (model.largest_unit - unit),
        )
    elif model is not None and count >= _MANY_MESSAGES and num_bytes < _SMALL_MESSAGE_BYTES:
        unit = max(MIN_UNIT, 2 * limit, min(model.params // 8, MAX_UNIT))
        yield from _config_advice(
            profile,
            "FSDP units",
            f"{_described(profile, count, num_bytes, exposed, 'all_gathers')}: the units are too"
            " small.",
            {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": unit},
            _speedup_if_halved(profile, exposed),
        )
    # accelerate/utils/dataclasses.py: the default of backward_prefetch is NO_PREFETCH. FSDP2
    # always prefetches.
    prefetches = str(current.get("backward_prefetch", "NO_PREFETCH")).upper() != "NO_PREFETCH"
    if on_gpu and options.strategy.level == 1 and not prefetches:
        yield from _config_advice(
            profile,
            "prefetch",
            f"{_percent(profile, exposed)} of a step waits for all_gather because units are not"
            " prefetched.",
            {"backward_prefetch": "BACKWARD_PRE", "forward_prefetch": True},
            _speedup_if_halved(profile, exposed),
        )


def recommend_zero_config(profile: ProfileData) -> Iterator[Advice]:
    """Yield options of DeepSpeed for collectives and transfers that take long."""
    options, model = profile.setting.options, profile.model
    zero = (options.deepspeed_config or {}).get("zero_optimization") or {}
    count, num_bytes, exposed = _messages(profile, _GATHERS)
    if options.strategy.level == 3:  # noqa: PLR2004 - the stage that shards parameters
        prefetch = config_number(zero.get("stage3_prefetch_bucket_size"), PREFETCH)
        changed: dict[str, Any] = {}
        reasons = []
        if prefetch < PREFETCH // 10:
            changed["stage3_prefetch_bucket_size"] = PREFETCH
            reasons.append(f"at most {prefetch:,} parameters are prefetched")
        if zero.get("overlap_comm") is False:  # zero/config.py: defaults to true under stage 3
            changed["overlap_comm"] = True
            reasons.append("overlap_comm is off")
        if config_number(zero.get("stage3_max_live_parameters"), LIVE) < LIVE:
            changed |= {"stage3_max_live_parameters": LIVE, "stage3_max_reuse_distance": LIVE}
            reasons.append("parameters are released early (stage3_max_live_parameters)")
        if count >= _MANY_MESSAGES and num_bytes < _SMALL_MESSAGE_BYTES:
            threshold = config_number(zero.get("stage3_param_persistence_threshold"), PERSISTENT)
            changed["stage3_param_persistence_threshold"] = max(10 * threshold, PERSISTENT)
            alone = f"parameters above {threshold} elements are sharded and gathered one by one"
            yield from _config_advice(
                profile,
                "small modules",
                f"{_described(profile, count, num_bytes, exposed, 'all_gathers')}:"
                f" {', '.join([alone, *reasons])}.",
                {"zero_optimization": changed},
                _speedup_if_halved(profile, exposed),
            )
        elif profile.kind == "cuda":  # gloo gathers in the thread that computes
            largest = model.largest_unit if model is not None else 0
            changed["stage3_prefetch_bucket_size"] = max(4 * prefetch, largest, PREFETCH)
            reasons = [f"at most {prefetch:,} parameters are prefetched", *reasons]
            yield from _config_advice(
                profile,
                "slow ZeRO-3",
                f"{_percent(profile, exposed)} of a step waits for all_gather:"
                f" {', '.join(dict.fromkeys(reasons))}.",
                {"zero_optimization": changed},
                _speedup_if_halved(profile, exposed),
            )
    bucket = zero.get("reduce_bucket_size")
    count, num_bytes, exposed = _messages(profile, _REDUCTIONS)
    # accelerate/accelerator.py makes "auto" the square of hidden_size: small for small models.
    if bucket is not None and config_number(bucket, 0) < _SMALL_BUCKET and count > 1:
        yield from _config_advice(
            profile,
            "small buckets",
            f"{_described(profile, count, num_bytes, exposed, 'reductions of gradients')}:"
            f" reduce_bucket_size is {bucket}.",
            {"zero_optimization": {"reduce_bucket_size": BUCKET}},
            _speedup_if_halved(profile, exposed),
        )
    if options.offload_device == "nvme":
        moving = profile.parts["offload"]
        aio = (options.deepspeed_config or {}).get("aio") or {}
        block = config_number(aio.get("block_size"), _AIO_BLOCK)
        depth = config_number(aio.get("queue_depth"), _AIO_DEPTH)
        # zero/offload_config.py: reads and writes of the next tile overlap with the computation.
        pipelined = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 5}
        yield from _config_advice(
            profile,
            "NVMe",
            f"{_percent(profile, moving)} of a step moves state to and from the disk, in blocks of"
            f" {format_bytes(block)}, {depth} at a time.",
            {
                "aio": {
                    "block_size": max(8 * _AIO_BLOCK, block),
                    "queue_depth": max(4 * _AIO_DEPTH, depth),
                },
                "zero_optimization": {"offload_optimizer": pipelined},
            },
            _speedup_if_halved(profile, moving),
        )


def config_number(value: object, default: int) -> int:
    """Return a number of elements; the default for "auto" and None."""
    return int(value) if isinstance(value, (int, float)) else default


def _messages(profile: ProfileData, names: tuple[str, ...]) -> tuple[float, float, float]:
    """Return the number of collectives per step, their mean bytes, and their exposed seconds.

    Waiting for slower ranks does not count.
    """
    kinds = [kind for kind in profile.traffic if kind.name in names]
    count = sum(kind.count for kind in kinds)
    num_bytes = sum(kind.bytes for kind in kinds) / count if count else 0.0
    return count, num_bytes, sum(kind.exposed_s - kind.waiting_s for kind in kinds)


def _percent(profile: ProfileData, seconds: float) -> str:
    return format_percent(seconds / profile.step_s if profile.step_s > 0 else 0.0)


def _described(
    profile: ProfileData, count: float, num_bytes: float, exposed: float, collectives: str
) -> str:
    return (
        f"{count:.0f} {collectives} of {format_bytes(num_bytes)} per step take"
        f" {_percent(profile, exposed)} of it"
    )


def _speedup_if_halved(profile: ProfileData, seconds: float) -> Speedup:
    """Return the speedup if a part of the step takes half as long.

    An estimate, not a measurement: the range is from a quarter to three quarters.
    """
    step = profile.step_s
    return Speedup.from_times(profile.kind, step, step - seconds / 2, seconds)


def _config_advice(
    profile: ProfileData,
    title: str,
    reason: str,
    changed: dict[str, Any],
    gain: Speedup,
    **fields: Any,
) -> Iterator[Advice]:
    """Recommend keys of the engine's config, merged into the user's, unless they are set."""
    options = profile.setting.options
    name = "fsdp_config" if options.strategy.engine == "fsdp" else "deepspeed_config"
    present = getattr(options, name) or {}
    config = merged_config(present, changed)
    if "auto_wrap_policy" in changed:
        config.pop("transformer_cls_names_to_wrap", None)
    if config != present:
        yield Advice(
            title=title,
            why=reason,
            line=switch_line({name: config}),
            gain=gain,
            changes={name: config},
            **({"change": {"options": {name: config}}} | fields),
        )
