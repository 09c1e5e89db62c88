"""What the planner takes from a calibration and from profiles of the user's own loop.

A calibration (`worker.benchmarks.communication`) replaces what was known of these ranks. A profile
says what
collectives took beside real work, and how fast a training loop really computes: the speeds are
found at which the model of `cost` takes the measured time.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from nbdist.display.units import seconds as time_words
from nbdist.display.units import size as size_words
from nbdist.errors import NbdistError
from nbdist.planner import cache, memory_model, optimizers, step_time
from nbdist.planner.measurements import COLLECTIVES, KINDS, Disk, Links, Loop, Pace, slowest_curves
from nbdist.planner.model_spec import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.planner.cluster_spec import Cluster
    from nbdist.planner.measurements import Collective
    from nbdist.planner.model_spec import ModelSpec
    from nbdist.strategies import Options

SMALLEST = 1 << 18
"""Bytes of a collective in a profile that says something of the link."""
_WEIGHT_OF_NEW = 0.5
_STEPS = 40
_FACTORS = 1 / 30, 30.0
"""Speeds beyond these, against what is assumed, are not the speeds of computing."""
_TERA = 1e12


# ------------------------------------------------------------------------ calibration


def calibrated(figures: Sequence[Mapping[str, Any]], cluster: Cluster) -> Cluster:
    """Keep what ranks have measured, and give the cluster with it.

    Args:
        figures: of each rank, as `worker.benchmarks.communication.measure` gives them.
        cluster: these ranks, found on this machine.
    """
    known = cluster.known
    if known is None:
        return cluster
    place, note = cluster.describe(), {"day": cache.today(), "runs": 1}
    old = known.links(place)
    curves = slowest_curves([one["curves"] for one in figures])
    links = Links.parsed({"curves": curves, **_again(note, old)})
    if links is not None:
        known.keep_links(place, links)
    for where, of_it in _by_place(figures, cluster).items():
        pace = _pace(of_it, known.pace(where), note)
        if pace is not None:
            known.keep_pace(where, pace)
    if disk := _disk(figures, note):
        known.keep_disk(disk)
    known.save()
    return cluster.informed(known)


def _again(note: dict[str, Any], old: Links | Pace | None) -> dict[str, Any]:
    """Day, and one run more than before."""
    return note | {"runs": 1 + (old.runs if old else 0)}


def _by_place(
    figures: Sequence[Mapping[str, Any]], cluster: Cluster
) -> dict[str, list[Mapping[str, Any]]]:
    """Figures of ranks that compute alike, by what they are kept under."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for one in figures:
        where = cluster.describe() if cluster.kind == "cpu" else str(one["device"])
        found.setdefault(where, []).append(one)
    return found


def _pace(
    figures: Sequence[Mapping[str, Any]], old: Pace | None, note: dict[str, Any]
) -> Pace | None:
    """What the slowest of these ranks computes."""
    kinds = [kind for kind in KINDS if all(kind in one["products"] for one in figures)]
    copies = [one["copies"]["to_device_pinned"] for one in figures if "copies" in one]
    products = {kind: min(one["products"][kind] for one in figures) for kind in kinds}
    kept = {} if old is None else {k: v for k, v in old.products.items() if k not in products}
    return Pace.parsed(
        {
            "products": kept | products,
            "memory": min(one["memory"] for one in figures),
            "host_link": min(copies, default=None),
            **_again(note, old),
        }
    )


def _disk(figures: Sequence[Mapping[str, Any]], note: dict[str, Any]) -> Disk | None:
    """What all ranks together reach."""
    disks = [one["disk"] for one in figures if "disk" in one]
    if not disks:
        return None
    total = {way: sum(one[way] for one in disks) for way in ("read", "write")}
    return Disk.parsed({**total, "filesystem": disks[0]["filesystem"], **note})


# ---------------------------------------------------------------------------- profiles


class Transfers(Protocol):
    """Collectives of one kind in a step, as `profiler.measurements.Traffic` has them."""

    @property
    def name(self) -> str:
        """As torch.distributed calls it."""

    @property
    def count(self) -> float:
        """In a step."""

    @property
    def bytes(self) -> int:
        """Of the full tensors."""

    @property
    def seconds(self) -> float:
        """From begin to end."""

    @property
    def waiting_s(self) -> float:
        """Of these, another rank was not there yet."""


class Trained(Protocol):
    """What the engine made of the model, as `profiler.measurements.Model` has it."""

    @property
    def samples(self) -> int:
        """Of a micro-batch."""

    @property
    def seq_len(self) -> int:
        """Tokens of each."""

    @property
    def accumulate(self) -> int:
        """Micro-batches of a step."""


class Figures(Protocol):
    """One rank's profile, as `profiler.measurements.RankFigures` has it."""

    @property
    def parts(self) -> Mapping[str, float]:
        """Seconds of a step by part: "forward", "backward", ..."""

    @property
    def traffic(self) -> Sequence[Transfers]:
        """Collectives by kind."""

    @property
    def model(self) -> Trained | None:
        """None where none was seen."""


def learn(
    figures: Sequence[Figures], *, spec: ModelSpec, options: Options, cluster: Cluster
) -> list[str]:
    """Take in a profile of the user's loop: how fast it computed, and what collectives took.

    What it cannot trust it leaves: small messages, a model whose kernels are too small to
    show a device's speed, times beyond belief.

    Args:
        figures: of all ranks, with their waiting told apart.
        spec: of the prepared model.
        options: that it was trained with.
        cluster: these ranks, found on this machine.

    Returns:
        Sentences: what was learned.
    """
    if cluster.known is None or not figures:
        return []
    # With replicas collectives are of a node's ranks, or of one rank of each node.
    links = _learn_links(figures, cluster) if options.replicate_across == "none" else ()
    said = [*links, *_learn_loop(figures, spec, options, cluster)]
    if said:
        cluster.known.save()
    return said


def _learn_links(figures: Sequence[Figures], cluster: Cluster) -> Iterator[str]:
    """Points of the curves, from what each kind of collective took on average."""
    known, place = cluster.known, cluster.describe()
    for name in COLLECTIVES:
        found = [one for rank in figures for one in _of_kind(rank.traffic, name)]
        if known is None or not found:
            continue
        size = int(statistics.median([one.bytes / one.count for one in found]))
        taken = statistics.median([(one.seconds - one.waiting_s) / one.count for one in found])
        if size < SMALLEST or taken <= 0:
            continue
        old = known.links(place) or Links(curves=MappingProxyType({}), day="", runs=0)
        new = old.with_point(name, size, taken, cache.today())
        plain = {"curves": new.curves, "day": new.day, "runs": new.runs}
        if Links.parsed(plain) is not None:
            known.keep_links(place, new)
            yield f"{name} of {size_words(size)} takes {time_words(taken)} here"


def _of_kind(traffic: Sequence[Transfers], name: Collective) -> Iterator[Transfers]:
    """Traffic of one kind: "all_gather_into_tensor" and "_allgather_base" are all_gather."""
    wanted = name.replace("_", "")
    for one in traffic:
        if one.name.replace("_", "").startswith(wanted) and one.count > 0 and one.bytes > 0:
            yield one


def _learn_loop(
    figures: Sequence[Figures], spec: ModelSpec, options: Options, cluster: Cluster
) -> Iterator[str]:
    """Speeds at which the model of `cost` computes for as long as the ranks did."""
    trained, kind = figures[0].model, _kind(options)
    taken = statistics.median([_computing(one) for one in figures])
    if trained is None or taken <= 0 or cluster.known is None:
        return
    try:
        factor, plain = _factor(taken, trained, spec, options, cluster)
    except NbdistError:  # a model or an engine that the planner does not know
        return
    if factor is None or plain.pace is None:
        return
    place = cluster.place_of(cluster.slowest)
    start = plain.pace.loops[kind]
    old = None if cluster.slowest.pace is None else cluster.slowest.pace.loops.get(kind)
    made = replace(start, flops=factor * start.flops, memory=factor * start.memory)
    if old is not None:
        weight = _WEIGHT_OF_NEW
        made = replace(
            made,
            flops=old.flops + weight * (made.flops - old.flops),
            memory=old.memory + weight * (made.memory - old.memory),
            runs=old.runs + 1,
        )
    cluster.known.keep_loop(place, kind, made)
    yield f"a loop in {kind} computes {made.flops / _TERA:.3g} TFLOP/s on a rank here"


def _computing(figures: Figures) -> float:
    """Seconds of a step in the model's forward and backward."""
    return figures.parts.get("forward", 0.0) + figures.parts.get("backward", 0.0)


def _kind(options: Options) -> str:
    """The type that products are computed in."""
    precision = options.precision or "no"
    return {"no": "fp32", "fp8": "bf16"}.get(precision, precision)


def _factor(
    taken: float, trained: Trained, spec: ModelSpec, options: Options, cluster: Cluster
) -> tuple[float | None, Any]:
    """By how much a rank computes faster than is assumed without loops, and that device.

    None where no speed explains the time: launches bind, or more was measured than computing.

    Raises:
        NbdistError: the model cannot be planned.
    """
    asked = replace(options, accumulate=trained.accumulate)
    setup = memory_model.Setup(
        options=asked,
        world_size=cluster.world_size,
        optimizer=optimizers.for_kind(optimizers.lookup("adamw"), cluster.kind),
        kind=cluster.kind,
        nodes=cluster.nodes,
    )
    workload = Workload(
        batch_size=trained.samples,
        seq_len=trained.seq_len,
        compute=memory_model.compute_of(setup),
        activation_checkpointing=asked.activation_checkpointing,
        kind=cluster.kind,
    )
    kind, device = _kind(options), cluster.slowest
    bare = replace(device, pace=device.pace and replace(device.pace, loops={}))
    base = Loop(
        flops=bare.reached(kind if kind != "fp32" else "no"),
        memory=bare.memory_reached(kind),
        model=spec.name,
        day=cache.today(),
    )

    def at(factor: float) -> Any:
        loop = replace(base, flops=factor * base.flops, memory=factor * base.memory)
        return replace(bare, pace=Pace(loops={kind: loop}))

    def seconds(factor: float) -> float:
        many = replace(cluster, devices=(at(factor),) * cluster.world_size)
        return step_time.Costs(spec, setup, many).of(workload).compute_s

    low, high = _FACTORS
    if not seconds(high) < taken < seconds(low):
        return None, bare
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seconds(middle) > taken else (low, middle)
    faster = seconds(2 * low)
    if faster > _BINDS * taken:
        return None, bare  # launches take most of it: speeds would explain nothing
    return low, at(1.0)


_BINDS = 0.75
"""Of the time left at twice the speed: more, and computing is not what takes it."""
