"""What would make the step faster: at most three changes with what they gain; pure.

A change is proposed only where it shortens what the verdict blames, or the computing itself,
and each one's gain comes from `gains`. What cannot gain `CHEAP` is not worth a line.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nbdist import strategies
from nbdist.plan.words import size
from nbdist.profile import gains
from nbdist.profile.verdict import unhidden_unit
from nbdist.profile.words import faster, source, time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from collections.abc import Set as AbstractSet

    from nbdist.profile.gains import Gain, Planner
    from nbdist.profile.remark import Remark
    from nbdist.profile.result import Profile
    from nbdist.profile.verdict import Blame, Kind
    from nbdist.strategies import Options

MOST = 3
CHEAP = 0.05
"""Predicted gain below which nothing is advised: repeated runs differ by as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One change."""

    title: str
    """In a few words: "num_workers=4", "switch to zero2"."""
    why: str
    """One sentence."""
    line: str
    """To paste."""
    gain: Gain
    change: dict[str, Any] = field(default_factory=dict)
    """What will be different in the next profile: {"options": {...}}, {"micro_batch": 8},
    {"num_workers": 4}, {"pin_memory": True}, {"units": 2}, {"line": "..."}, {"straggler": 1}."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Arguments of `Session.switch` that do it; empty where the cell itself must change."""
    saves_bytes: int = 0
    """Of the peak of memory."""

    @property
    def text(self) -> str:
        """The change, its gain with its uncertainty, and why."""
        return f"{self.title}: {self.gain_words}. {self.why}"

    @property
    def gain_words(self) -> str:
        """As "about 35 % faster (28 to 43 %)"."""
        if self.gain.faster < CHEAP:
            return f"frees {size(self.saves_bytes)} of the peak"
        low, high = (faster(bound).removesuffix(" faster") for bound in self._bounds)
        return f"about {faster(self.gain.faster)} ({low} to {high})"

    @property
    def _bounds(self) -> tuple[float, float]:
        return max(0.0, self.gain.low), self.gain.high

    def to_json(self) -> dict[str, Any]:
        """Return the fields, and the words made of them."""
        return {**asdict(self), "text": self.text}


def best(profile: Profile) -> list[Advice]:
    """At most three changes, the one that gains most first."""
    kinds = {blame.kind for blame in profile.blamed}
    found: list[Advice] = []
    for blame in profile.blamed:
        found += _OF_CELL.get(blame.kind, _nothing)(profile, blame)
    planner = profile.planner
    if planner is not None:
        found += _of_engine(profile, planner, kinds)
    worth = [one for one in found if one.gain.faster >= CHEAP or _frees_much(profile, one)]
    return sorted(worth, key=lambda one: -one.gain.faster)[:MOST]


def _frees_much(profile: Profile, one: Advice) -> bool:
    memories = [rank.memory for rank in profile.ranks if rank.memory]
    peak = max((sum(memory.parts.values()) for memory in memories), default=0)
    return one.saves_bytes > CHEAP * peak > 0


# ------------------------------------------------------------------- changes of the cell


def _nothing(_profile: Profile, _blame: Blame) -> Iterator[Advice]:
    yield from ()


def _input(profile: Profile, blame: Blame) -> Iterator[Advice]:
    """More workers, or page-locked batches."""
    loader = profile.loader
    if "copies" in blame.parts:
        if profile.kind == "cuda" and loader is not None and not loader.pin_memory:
            yield Advice(
                title="pin_memory=True",
                why="Copies from page-locked memory take about half as long.",
                line="DataLoader(..., pin_memory=True)",
                gain=gains.pinned(profile),
                change={"pin_memory": True},
            )
        return
    found = gains.workers(profile)
    if loader is None or found is None:
        return
    count, gain = found
    now = f"{loader.num_workers} workers" if loader.num_workers else "the main thread"
    yield Advice(
        title=f"num_workers={count}",
        why=(
            f"Batches are made by {now} and a step waits {time(profile.parts['data'])} for them;"
            f" {count} workers make them while the ranks compute{_at(profile, 'num_workers')}."
        ),
        line=f"DataLoader(..., num_workers={count}, persistent_workers=True)",
        gain=gain,
        change={"num_workers": count},
    )


def _straggler(profile: Profile, blame: Blame) -> Iterator[Advice]:
    """Make the slow rank as fast as the others."""
    slow = profile.slowest
    if slow is None:
        return
    yield Advice(
        title=f"rank {slow.rank}",
        why=(
            f"It takes {time(slow.lost_s)} longer than the others, most of it in {slow.where}; see"
            " what else runs on its device, and whether its batches are larger."
        ),
        line="%nbdist doctor",
        gain=gains.without(profile, min(slow.lost_s, blame.share * profile.step_s)),
        change={"straggler": slow.rank},
    )


def _host(profile: Profile, blame: Blame) -> Iterator[Advice]:
    """Do a line less often."""
    line = blame.line
    if line is None:
        return
    told = _remark(profile, "sync", line.cell, line.line)
    lost = min(line.seconds, blame.share * profile.step_s)
    yield Advice(
        title=f"{line.cell}, line {line.line}",
        why=(
            told.reason
            if told
            else f"`{source(line)}` takes {time(line.seconds)} of every step; do it less often."
        ),
        line=told.change if told else f"if step % 50 == 0: {source(line)}",
        gain=gains.without(profile, lost),
        change={"line": line.source.strip()},
    )


_OF_CELL: dict[str, Callable[[Profile, Blame], Iterator[Advice]]] = {
    "input": _input,
    "straggler": _straggler,
    "host": _host,
}


def _at(profile: Profile, kind: str) -> str:
    """Where the cell's text has it."""
    told = next((one for one in profile.remarks if one.kind == kind), None)
    return f" ({told.cell}, line {told.line})" if told else ""


def _remark(profile: Profile, kind: str, cell: str, line: int) -> Remark | None:
    """What the lint says of a line."""
    return next(
        (one for one in profile.remarks if (one.kind, one.cell, one.line) == (kind, cell, line)),
        None,
    )


# ----------------------------------------------------------------- changes of the engine

_BACKENDS = {"communication", "offload", "optimizer"}
"""What another backend may shorten."""
_LARGER = {"communication", "offload", "optimizer", "host"}
"""What costs the same for a larger batch."""


def _of_engine(profile: Profile, planner: Planner, kinds: AbstractSet[Kind]) -> Iterator[Advice]:
    """Changes that the planner knows."""
    now = planner.options
    if kinds & _BACKENDS:
        yield from _best_of(_backends(planner))
    if "communication" in kinds:
        kept = planner.kept_gathered()
        yield from _switched(planner, kept, "parameters stay gathered from forward to backward")
        if unhidden_unit(profile):
            yield from _units(profile, planner)
    if kinds & _LARGER:
        yield from _best_of([*_accumulated(planner), *_larger(planner)])
    if now.offload != "none":
        kept = replace(now, offload="none", offload_params=False)
        yield from _switched(planner, kept, "it fits without the offload")
    if now.activation_checkpointing:
        plain = replace(now, activation_checkpointing=False)
        yield from _switched(planner, plain, "it fits without computing activations twice")
    if "memory" in kinds or ("host" in kinds and profile.kind == "cuda" and not now.compile):
        compiled = replace(now, compile=True)
        yield from _switched(planner, compiled, "fused kernels are fewer and go once over memory")
    if profile.kind == "cuda" and now.precision == "no" and profile.setting.cluster.slowest.bf16:
        half = replace(now, precision="bf16")
        yield from _switched(planner, half, "this device multiplies bf16 several times as fast")


def _best_of(several: Iterable[Advice]) -> Iterator[Advice]:
    """The one that gains most: alternatives for one thing."""
    found = sorted(several, key=lambda one: -one.gain.faster)
    yield from found[:1]


def _backends(planner: Planner) -> Iterator[Advice]:
    """Other engines with the same options."""
    for name, strategy in strategies.STRATEGIES.items():
        now = planner.options
        if name == now.backend or strategy.older:
            continue
        if now.offload_device not in strategy.offloads:
            continue
        other = replace(now, backend=name, fsdp_config=None, deepspeed_config=None)
        yield from _switched(planner, other, "it moves or updates less on each rank")


def _switched(planner: Planner, options: Options | None, why: str) -> Iterator[Advice]:
    """Other options of the engine."""
    if options is None:
        return
    found = planner.changed(options)
    if found is None:
        return
    different = _different(planner.options, found.row.options)
    yield Advice(
        title=_title(different),
        why=f"By the planner {why}.",
        line=_line(different),
        gain=found.gain,
        change={"options": different},
        changes=different,
        saves_bytes=max(0, planner.row.device_bytes - found.row.device_bytes),
    )


def _accumulated(planner: Planner) -> Iterator[Advice]:
    """More micro-batches in an optimizer step."""
    found = [
        (count, made)
        for count in gains.doublings(planner.options.accumulate)
        if (made := planner.changed(replace(planner.options, accumulate=count)))
    ]
    if best_one := gains.nearly_best(found):
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


def _larger(planner: Planner) -> Iterator[Advice]:
    """Larger micro-batches, as far as they fit."""
    found = [
        (count, made)
        for count in gains.doublings(planner.samples)
        if (made := planner.changed(samples=count))
    ]
    if best_one := gains.nearly_best(found):
        count, made = best_one
        yield Advice(
            title=f"micro-batch {count}",
            why=(
                f"It fits by the planner ({size(made.row.device_bytes)} of a device), and what a"
                " step costs whatever its batch is shared by more samples."
            ),
            line=f"DataLoader(..., batch_size={count})",
            gain=made.gain,
            change={"micro_batch": count},
        )


def _units(profile: Profile, planner: Planner) -> Iterator[Advice]:
    """Cut the model into units, so that the next is gathered while one computes."""
    model = profile.model
    if model is None:
        return
    smallest = max(1, model.params // 8)
    config = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": smallest}
    element = 4 if planner.options.precision == "no" else 2
    on_gpu = profile.kind == "cuda"
    # gloo gathers in the thread that computes, so that on CPU ranks only memory is gained
    gain = planner.cut_into_units() if on_gpu else gains.without(profile, 0.0)
    yield Advice(
        title="FSDP units",
        why=(
            "The model is one unit, so all of it is gathered at once and nothing computes"
            " meanwhile; units of an eighth are gathered one ahead"
            f"{'' if on_gpu else ', which on GPUs hides most of it'}."
        ),
        line=f"%nbdist switch --fsdp-config '{json.dumps(config)}'",
        gain=gain,
        change={"units": 2},
        changes={"fsdp_config": config},
        saves_bytes=element * (model.largest_unit - smallest),
    )


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


# -------------------------------------------------------------------- what it has gained


def gained(before: Profile, now: Profile) -> str:
    """What advice of the profile before was taken, what it promised and what it brought."""
    taken = [one for one in before.advice if _taken(one, before, now)]
    was, is_now = _speed(before), _speed(now)
    if not taken or was <= 0:
        return ""
    predicted = 1.0
    for one in taken:
        predicted *= 1 + one.gain.faster
    together = " together" if len(taken) > 1 else ""
    titles = " and ".join(one.title for one in taken)
    promised, measured = faster(predicted - 1), faster(is_now / was - 1)
    if promised.endswith(" faster") and measured.endswith(" faster"):
        measured = measured.removesuffix(" faster")
    return f"{titles}{together}: predicted {promised}, measured {measured}"


def _speed(profile: Profile) -> float:
    """Samples a second, or steps where samples are not known."""
    return profile.samples_per_s or 1 / profile.step_s


def _taken(one: Advice, before: Profile, now: Profile) -> bool:
    """Whether the profile now shows the change."""
    return any(_RECOGNISED[name](value, before, now) for name, value in one.change.items())


def _options_taken(wanted: dict[str, Any], _before: Profile, now: Profile) -> bool:
    options = now.options.to_json()
    return all(options[name] == value for name, value in wanted.items())


def _micro_batch_taken(wanted: int, _before: Profile, now: Profile) -> bool:
    return now.model is not None and now.model.samples == wanted


def _workers_taken(_wanted: int, before: Profile, now: Profile) -> bool:
    return (
        before.loader is not None
        and now.loader is not None
        and now.loader.num_workers > before.loader.num_workers
    )


def _pinning_taken(_wanted: bool, _before: Profile, now: Profile) -> bool:  # noqa: FBT001 - a value of `change`
    return now.loader is not None and now.loader.pin_memory


def _units_taken(wanted: int, _before: Profile, now: Profile) -> bool:
    return now.model is not None and now.model.units >= wanted


def _line_taken(wanted: str, before: Profile, now: Profile) -> bool:
    def on_it(profile: Profile) -> float:
        return sum(line.seconds for line in profile.ranks[0].lines if line.source.strip() == wanted)

    return on_it(now) < on_it(before) / 2


def _straggler_gone(wanted: int, _before: Profile, now: Profile) -> bool:
    return now.straggler != wanted


_RECOGNISED: dict[str, Callable[[Any, Profile, Profile], bool]] = {
    "options": _options_taken,
    "micro_batch": _micro_batch_taken,
    "num_workers": _workers_taken,
    "pin_memory": _pinning_taken,
    "units": _units_taken,
    "line": _line_taken,
    "straggler": _straggler_gone,
}
"""Key of `Advice.change` -> whether the profile after shows it."""
