"""Derives measured speeds from calibrations and from profiles of the user's loop.

A calibration (`worker.benchmarks.calibration`) replaces the stored speeds of these ranks. A
profile gives the time of collectives in real training and the compute speed of a training loop,
fitted so that `step_time` predicts the measured time.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from nbdist.display.units import format_bytes, format_seconds
from nbdist.errors import NbdistError
from nbdist.planner import cache, optimizers, step_time
from nbdist.planner.measurements import (
    COLLECTIVES,
    DTYPES,
    CommSpeed,
    ComputeSpeed,
    DiskSpeed,
    LoopEfficiency,
    slowest_curves,
)
from nbdist.planner.memory.training_setup import TrainingSetup, compute_mode
from nbdist.planner.model_spec import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.planner.cluster_spec import ClusterSpec
    from nbdist.planner.measurements import Collective
    from nbdist.planner.model_spec import ModelSpec
    from nbdist.strategies import Options

MIN_COLLECTIVE_BYTES = 1 << 18
"""Collectives of fewer bytes in a profile do not characterize the link."""
_WEIGHT_OF_NEW = 0.5
_STEPS = 40
_FACTORS = 1 / 30, 30.0
"""Range of plausible compute speeds, relative to the assumed speed."""
_TERA = 1e12


# ------------------------------------------------------------------------ calibration


def apply_calibration(figures: Sequence[Mapping[str, Any]], cluster: ClusterSpec) -> ClusterSpec:
    """Store the measurements of a calibration and return the cluster with them.

    Args:
        figures: results of `worker.benchmarks.calibration.calibrate` for each rank.
        cluster: the ranks, detected on this machine.
    """
    known = cluster.measurement_store
    if known is None:
        return cluster
    place, entry = cluster.describe(), {"day": cache.today(), "runs": 1}
    old = known.comm_speed(place)
    curves = slowest_curves([rank["curves"] for rank in figures])
    links = CommSpeed.from_json({"curves": curves, **_again(entry, old)})
    if links is not None:
        known.store_comm_speed(place, links)
    for place_of_rank, of_place in _by_place(figures, cluster).items():
        pace = _pace(of_place, known.compute_speed(place_of_rank), entry)
        if pace is not None:
            known.store_compute_speed(place_of_rank, pace)
    if disk := _disk(figures, entry):
        known.store_disk_speed(disk)
    known.save()
    return cluster.with_measurements(known)


def _again(note: dict[str, Any], old: CommSpeed | ComputeSpeed | None) -> dict[str, Any]:
    """Increment the number of runs."""
    return note | {"runs": 1 + (old.runs if old else 0)}


def _by_place(
    figures: Sequence[Mapping[str, Any]], cluster: ClusterSpec
) -> dict[str, list[Mapping[str, Any]]]:
    """Group the results of ranks by the key of their compute speed."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for rank in figures:
        place = cluster.describe() if cluster.kind == "cpu" else str(rank["device"])
        groups.setdefault(place, []).append(rank)
    return groups


def _pace(
    figures: Sequence[Mapping[str, Any]], old: ComputeSpeed | None, note: dict[str, Any]
) -> ComputeSpeed | None:
    """Return the compute speed of the slowest of these ranks."""
    kinds = [kind for kind in DTYPES if all(kind in rank["products"] for rank in figures)]
    copies = [rank["copies"]["to_device_pinned"] for rank in figures if "copies" in rank]
    products = {kind: min(rank["products"][kind] for rank in figures) for kind in kinds}
    kept = {} if old is None else {k: v for k, v in old.matmul_flops.items() if k not in products}
    return ComputeSpeed.from_json(
        {
            "products": kept | products,
            "memory": min(rank["memory"] for rank in figures),
            "host_link": min(copies, default=None),
            **_again(note, old),
        }
    )


def _disk(figures: Sequence[Mapping[str, Any]], note: dict[str, Any]) -> DiskSpeed | None:
    """Return the disk speed of all ranks together."""
    disks = [rank["disk"] for rank in figures if "disk" in rank]
    if not disks:
        return None
    total = {way: sum(disk[way] for disk in disks) for way in ("read", "write")}
    return DiskSpeed.from_json({**total, "filesystem": disks[0]["filesystem"], **note})


# ---------------------------------------------------------------------------- profiles


class CollectiveStatsLike(Protocol):
    """Collectives of one kind in a step; see `profiler.measurements.CollectiveStats`."""

    @property
    def name(self) -> str:
        """Name in torch.distributed."""

    @property
    def count(self) -> float:
        """Calls per step."""

    @property
    def bytes(self) -> int:
        """Bytes of the full tensors."""

    @property
    def seconds(self) -> float:
        """Seconds from begin to end."""

    @property
    def waiting_s(self) -> float:
        """Seconds of these spent waiting for another rank to enter the collective."""


class ProfiledModelLike(Protocol):
    """The prepared model; see `profiler.measurements.ProfiledModel`."""

    @property
    def samples(self) -> int:
        """Samples per micro-batch."""

    @property
    def seq_len(self) -> int:
        """Tokens per sample."""

    @property
    def accumulate(self) -> int:
        """Micro-batches per step."""


class RankProfileLike(Protocol):
    """One rank's profile; see `profiler.measurements.RankProfile`."""

    @property
    def parts(self) -> Mapping[str, float]:
        """Seconds per step by part: "forward", "backward", ..."""

    @property
    def traffic(self) -> Sequence[CollectiveStatsLike]:
        """Collectives by kind."""

    @property
    def model(self) -> ProfiledModelLike | None:
        """The profiled model, or None if there was none."""


def learn_from_profile(
    figures: Sequence[RankProfileLike], *, spec: ModelSpec, options: Options, cluster: ClusterSpec
) -> list[str]:
    """Store what a profile of the user's loop shows: compute speed and times of collectives.

    Unreliable data is skipped: small messages, models whose kernels are too small to reach the
    device's speed, implausible times.

    Args:
        figures: profiles of all ranks, with waiting time separated.
        spec: spec of the prepared model.
        options: options that it was trained with.
        cluster: the ranks, detected on this machine.

    Returns:
        One sentence for each stored measurement.
    """
    if cluster.measurement_store is None or not figures:
        return []
    # With replicas, collectives run within a node or between one rank of each node.
    links = _learn_links(figures, cluster) if options.replicate_across == "none" else ()
    messages = [*links, *_learn_loop(figures, spec, options, cluster)]
    if messages:
        cluster.measurement_store.save()
    return messages


def _learn_links(figures: Sequence[RankProfileLike], cluster: ClusterSpec) -> Iterator[str]:
    """Store one point per kind of collective: its average size and time."""
    known, place = cluster.measurement_store, cluster.describe()
    for name in COLLECTIVES:
        calls = [stats for rank in figures for stats in _of_kind(rank.traffic, name)]
        if known is None or not calls:
            continue
        size = int(statistics.median([stats.bytes / stats.count for stats in calls]))
        taken = statistics.median(
            [(stats.seconds - stats.waiting_s) / stats.count for stats in calls]
        )
        if size < MIN_COLLECTIVE_BYTES or taken <= 0:
            continue
        old = known.comm_speed(place) or CommSpeed(curves=MappingProxyType({}), day="", runs=0)
        new = old.with_measurement(name, size, taken, cache.today())
        plain = {"curves": new.curves, "day": new.day, "runs": new.runs}
        if CommSpeed.from_json(plain) is not None:
            known.store_comm_speed(place, new)
            yield f"{name} of {format_bytes(size)} takes {format_seconds(taken)} here"


def _of_kind(
    traffic: Sequence[CollectiveStatsLike], name: Collective
) -> Iterator[CollectiveStatsLike]:
    """Filter by kind: "all_gather_into_tensor" and "_allgather_base" are all_gather."""
    wanted = name.replace("_", "")
    for stats in traffic:
        name_in_torch = stats.name.replace("_", "")
        if name_in_torch.startswith(wanted) and stats.count > 0 and stats.bytes > 0:
            yield stats


def _learn_loop(
    figures: Sequence[RankProfileLike], spec: ModelSpec, options: Options, cluster: ClusterSpec
) -> Iterator[str]:
    """Store the speed at which `step_time` predicts the compute time of the ranks."""
    trained, kind = figures[0].model, _kind(options)
    taken = statistics.median([_computing(rank) for rank in figures])
    if trained is None or taken <= 0 or cluster.measurement_store is None:
        return
    try:
        factor, plain = _factor(taken, trained, spec, options, cluster)
    except NbdistError:  # a model or an optimizer unknown to the planner
        return
    if factor is None or plain.compute_speed is None:
        return
    place = cluster.compute_speed_key(cluster.slowest_device)
    start = plain.compute_speed.loop_efficiency[kind]
    old = (
        None
        if cluster.slowest_device.compute_speed is None
        else cluster.slowest_device.compute_speed.loop_efficiency.get(kind)
    )
    loop = replace(start, flops=factor * start.flops, memory=factor * start.memory)
    if old is not None:
        weight = _WEIGHT_OF_NEW
        loop = replace(
            loop,
            flops=old.flops + weight * (loop.flops - old.flops),
            memory=old.memory + weight * (loop.memory - old.memory),
            runs=old.runs + 1,
        )
    cluster.measurement_store.store_loop_efficiency(place, kind, loop)
    yield f"a training loop in {kind} reaches {loop.flops / _TERA:.3g} TFLOP/s per rank here"


def _computing(figures: RankProfileLike) -> float:
    """Seconds per step in the model's forward and backward."""
    return figures.parts.get("forward", 0.0) + figures.parts.get("backward", 0.0)


def _kind(options: Options) -> str:
    """Data type of the matrix products."""
    precision = options.precision or "no"
    return {"no": "fp32", "fp8": "bf16"}.get(precision, precision)


def _factor(
    taken: float,
    trained: ProfiledModelLike,
    spec: ModelSpec,
    options: Options,
    cluster: ClusterSpec,
) -> tuple[float | None, Any]:
    """Return the measured compute speed relative to the assumed one, and the assumed device.

    The factor is None if no speed explains the time: kernel launches dominate, or the
    measurement contains more than compute.

    Raises:
        NbdistError: the model cannot be planned.
    """
    trained_with = replace(options, accumulate=trained.accumulate)
    setup = TrainingSetup(
        options=trained_with,
        world_size=cluster.world_size,
        optimizer=optimizers.optimizer_for_device(optimizers.find_optimizer("adamw"), cluster.kind),
        kind=cluster.kind,
        num_nodes=cluster.num_nodes,
    )
    workload = Workload(
        batch_size=trained.samples,
        seq_len=trained.seq_len,
        compute=compute_mode(setup),
        activation_checkpointing=trained_with.activation_checkpointing,
        kind=cluster.kind,
    )
    kind, device = _kind(options), cluster.slowest_device
    bare = replace(
        device,
        compute_speed=device.compute_speed and replace(device.compute_speed, loop_efficiency={}),
    )
    base = LoopEfficiency(
        flops=bare.sustained_flops(kind if kind != "fp32" else "no"),
        memory=bare.sustained_memory_bandwidth(kind),
        model=spec.name,
        day=cache.today(),
    )

    def at(factor: float) -> Any:
        loop = replace(base, flops=factor * base.flops, memory=factor * base.memory)
        return replace(bare, compute_speed=ComputeSpeed(loop_efficiency={kind: loop}))

    def seconds(factor: float) -> float:
        many = replace(cluster, devices=(at(factor),) * cluster.world_size)
        return step_time.StepCostModel(spec, setup, many).cost_for(workload).compute_s

    low, high = _FACTORS
    if not seconds(high) < taken < seconds(low):
        return None, bare
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seconds(middle) > taken else (low, middle)
    faster = seconds(2 * low)
    if faster > _BINDS * taken:
        return None, bare  # launches dominate: speeds would explain nothing
    return low, at(1.0)


_BINDS = 0.75
"""Maximum time at twice the speed, relative to the measured time, if compute dominates."""
