"""Changes of the engine that the planner can cost: another backend, batch or option; pure."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbdist import strategies
from nbdist.display.profile_units import time
from nbdist.display.units import size
from nbdist.profiler.advice import Advice
from nbdist.profiler.bottleneck import gathers_much, unhidden_unit, usual
from nbdist.profiler.dataloader_calls import made_anew
from nbdist.profiler.rank_comparison import NAMES
from nbdist.profiler.speedup import NEARLY, without
from nbdist.profiler.what_if import doublings, enough

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Set as AbstractSet

    from nbdist.profiler.bottleneck import Kind
    from nbdist.profiler.report import Profile
    from nbdist.profiler.speedup import Gain
    from nbdist.profiler.what_if import Changed, Planner
    from nbdist.strategies import Options

_BACKENDS = {"communication", "offload", "optimizer"}
"""What another backend may shorten."""
_SURELY = 0.2
"""Gain, at the least, for which CPU ranks are to change their engine: what the engines' own Python
takes there the planner does not know."""
_LARGER = {"communication", "offload", "optimizer", "host"}
"""What costs the same for a larger batch."""
_TINY = 0.40
"""Of the step, for all that a larger batch shares: no part alone is blamed then, but they are
together. Control runs with noise had 38 % at the most, communication among it."""
_TINY_OPTIMIZER = 0.22
"""The optimizer's share, which noise hardly changes (20 % at the most there): from here on less of
the others is enough."""
_WITH_OPTIMIZER = 0.30


def changes(profile: Profile, planner: Planner, kinds: AbstractSet[Kind]) -> Iterator[Advice]:
    """Changes that the planner knows."""
    now = planner.options
    if kinds & _BACKENDS:
        yield from _simplest(_backends(planner))
    if "communication" in kinds:
        yield from _switched(planner, planner.kept_gathered())
        yield from _switched(planner, planner.replicated())
        if unhidden_unit(profile):
            yield from _units(profile, planner)
    often = gathers_much(profile)
    by_hand = now.accumulate != profile.setting.options.accumulate
    if (kinds & _LARGER or often) and not by_hand:  # the loop would not notice
        yield from _accumulated(planner)
    if kinds & _LARGER or often or _tiny(profile):
        yield from _larger(profile, planner)
    if now.offload != "none":
        yield from _switched(planner, replace(now, offload="none", offload_params=False))
    if now.activation_checkpointing:
        yield from _switched(planner, replace(now, activation_checkpointing=False))
    if profile.kind == "cuda":
        yield from _of_gpus(profile, planner, kinds)


def _tiny(profile: Profile) -> bool:
    """Whether what a step costs whatever its batch is a large part of it."""
    shared = usual(profile, "optimizer", "communication", "python", "idle")
    clear = usual(profile, "optimizer") >= _TINY_OPTIMIZER
    return shared >= (_WITH_OPTIMIZER if clear else _TINY)


def _of_gpus(profile: Profile, planner: Planner, kinds: AbstractSet[Kind]) -> Iterator[Advice]:
    """Fused kernels where launches or memory bind, and tensor cores."""
    now = planner.options
    if kinds & {"memory", "host"} and not now.compile:
        yield from _switched(planner, replace(now, compile=True))
    if now.precision == "no" and profile.setting.cluster.slowest.bf16:
        yield from _switched(planner, replace(now, precision="bf16"))


def _simplest(several: Iterable[Advice]) -> Iterator[Advice]:
    """Of alternatives in their order, the first that gains nearly as much as the best."""
    found = list(several)
    best = max((one.gain.faster for one in found), default=0.0)
    yield from [one for one in found if one.gain.faster >= NEARLY * best > 0][:1]


def _backends(planner: Planner) -> Iterator[Advice]:
    """Other engines with the same options."""
    surely = _SURELY if planner.kind == "cpu" else 0.0
    for name, strategy in strategies.STRATEGIES.items():
        now = planner.options
        if name == now.backend or strategy.older:
            continue
        if now.offload_device not in strategy.offloads:
            continue
        other = replace(
            now, backend=name, replicate_across="none", fsdp_config=None, deepspeed_config=None
        )
        yield from (one for one in _switched(planner, other) if one.gain.low >= surely)


def _switched(planner: Planner, options: Options | None) -> Iterator[Advice]:
    """Other options of the engine, where they fit."""
    if options is None:
        return
    found = planner.changed(options)
    if found is None:
        return
    different = _different(planner.options, found.row.options)
    yield Advice(
        title=_title(different),
        why=_why(planner, found),
        line=_line(different),
        gain=found.gain,
        change={"options": different},
        changes=different,
        saves_bytes=max(0, planner.row.device_bytes - found.row.device_bytes),
    )


def _why(planner: Planner, found: Changed) -> str:
    """What becomes shorter."""
    before = planner.parts
    part = max(found.parts, key=lambda name: before[name] - found.parts[name])
    return (
        f"By the planner {NAMES[part]} takes {time(found.parts[part])} of a step instead"
        f" of {time(before[part])}, and it fits."
    )


def _accumulated(planner: Planner) -> Iterator[Advice]:
    """More micro-batches in an optimizer step."""
    found = [
        (count, made)
        for count in doublings(planner.options.accumulate)
        if (made := planner.changed(replace(planner.options, accumulate=count)))
    ]
    if best_one := enough(found):
        count, made = best_one
        yield Advice(
            title=f"accumulate {count}",
            why=(
                f"Gradients are reduced and applied once in {count} micro-batches, for a loop with"
                " `accelerator.accumulate(model)`; the batch of a step grows as much."
            ),
            line=f"%nbdist switch --accumulate {count}",
            gain=made.gain,
            change={"options": {"accumulate": count}},
            changes={"accumulate": count},
        )


def _larger(profile: Profile, planner: Planner) -> Iterator[Advice]:
    """Larger micro-batches, as far as they fit."""
    found = [
        (count, made)
        for count in doublings(planner.samples)
        if (made := planner.changed(samples=count))
    ]
    if best_one := enough(found):
        count, made = best_one
        yield Advice(
            title=f"micro-batch {count}",
            why=(
                f"It fits by the planner ({size(made.row.device_bytes)} of a device), and what a"
                " step costs whatever its batch is shared by more samples."
            ),
            line=made_anew(profile.loader_text, batch_size=count),
            gain=made.gain,
            change={"micro_batch": count},
        )


def _units(profile: Profile, planner: Planner) -> Iterator[Advice]:
    """Cut the model into units, so that the next is gathered while one computes."""
    model = profile.model
    if model is None:
        return
    smallest = max(1, model.params // 8)
    config = dict(planner.options.fsdp_config or {})
    config.pop("transformer_cls_names_to_wrap", None)
    config |= {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": smallest}
    element = 4 if planner.options.precision == "no" else 2
    on_gpu = profile.kind == "cuda"
    gain = planner.cut_into_units() if on_gpu else _gathered_again(profile)
    yield Advice(
        title="FSDP units",
        why=(
            "The model is gathered at once, and nothing computes meanwhile; units of an eighth are"
            " gathered one ahead"
            f"{'' if on_gpu else ', which on GPUs hides most of it'}."
        ),
        line=f"%nbdist switch --fsdp-config '{json.dumps(config)}'",
        gain=gain,
        change={"largest_unit": model.largest_unit // 2},
        changes={"fsdp_config": config},
        saves_bytes=element * (model.largest_unit - smallest),
    )


def _gathered_again(profile: Profile) -> Gain:
    """What units of an eighth cost CPU ranks, where gloo gathers in the thread that computes.

    FSDP's root stays gathered from forward to backward, and the other seven are gathered twice
    (torch 2.13).
    """
    gathers = [one for one in profile.traffic if one.name == "all_gather"]
    once = sum(one.exposed_s - one.waiting_s for one in gathers)
    return without(profile, -7 / 8 * once)


def _different(now: Options, other: Options) -> dict[str, Any]:
    """Options that another set has otherwise."""
    mine, theirs = now.to_json(), other.to_json()
    return {
        name: value for name, value in theirs.items() if value != mine[name] and value is not None
    }


def _title(different: dict[str, Any]) -> str:
    """As "zero2", "activation checkpointing off"."""
    words = []
    for name, value in different.items():
        plain = name.replace("_", " ")
        switched = {True: plain, False: f"{plain} off"}
        if isinstance(value, bool):
            words.append(switched[value])
        elif name in {"backend", "precision"}:
            words.append(str(value))
        elif name == "fsdp_config":
            words.append("parameters kept gathered")
        else:
            words.append(f"{plain} {value}")
    return ", ".join(words)


def _line(different: dict[str, Any]) -> str:
    """The line that switches."""
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
