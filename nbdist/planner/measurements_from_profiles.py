"""Turns calibrations and profiles of the user's loop into measurements of this machine.

A calibration (`worker.operations.calibrate`) replaces the stored speeds of these ranks. A
profile gives the time of collectives in real training and the compute speed of a training loop,
fitted so that `step_time` predicts the measured time; it is averaged with earlier ones.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from nbdist.errors import NbdistError
from nbdist.number_formatting import format_bytes, format_seconds
from nbdist.planner import optimizers, step_time, user_cache
from nbdist.planner.measurement_store import COLLECTIVES, DTYPES, Measurement, is_memory_filesystem
from nbdist.planner.memory.timeline import TrainingSetup, compute_mode
from nbdist.planner.model_spec import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.planner.cluster_spec import ClusterSpec
    from nbdist.planner.measurement_store import MeasurementStore
    from nbdist.planner.model_spec import ModelSpec
    from nbdist.strategies import Options

MIN_COLLECTIVE_BYTES = 1 << 18
"""Collectives of fewer bytes in a profile do not characterize the link."""
_BISECTIONS = 40
_FACTORS = 1 / 30, 30.0
"""Range of plausible compute speeds, relative to the assumed speed."""
_LAUNCH_BOUND = 0.75
"""Maximum time at twice the speed, relative to the measured time, if compute dominates."""
_TERA = 1e12


# ------------------------------------------------------------------------ calibration


def apply_calibration(figures: Sequence[Mapping[str, Any]], cluster: ClusterSpec) -> ClusterSpec:
    """Store the measurements of a calibration and return the cluster with them.

    Args:
        figures: results of `worker.operations.calibrate.calibrate` for each rank.
        cluster: the ranks, detected on this machine.
    """
    store = cluster.measurement_store
    if store is None:
        return cluster
    for name in COLLECTIVES:
        # For each size, the slowest rank's time.
        curve: dict[str, float] = {}
        for rank in figures:
            for size, seconds in rank["curves"].get(name, ()):
                curve[str(size)] = max(seconds, curve.get(str(size), 0.0))
        store.record("collective", f"{name}, {cluster.describe()}", curve, average=False)
    by_place: dict[str, list[Mapping[str, Any]]] = {}
    for rank in figures:
        place = cluster.describe() if cluster.kind == "cpu" else str(rank["device"])
        by_place.setdefault(place, []).append(rank)
    for place, ranks in by_place.items():
        _store_compute_speed(store, place, ranks)
    disks = [rank["disk"] for rank in figures if "disk" in rank]
    if disks and not is_memory_filesystem(disks[0]["filesystem"]):
        total = {
            direction: sum(disk[direction] for disk in disks) for direction in ("read", "write")
        }
        store.record("disk", str(disks[0]["filesystem"])[:200], total, average=False)
    store.save()
    return cluster.with_measurements(store)


def _store_compute_speed(
    store: MeasurementStore, place: str, figures: Sequence[Mapping[str, Any]]
) -> None:
    """Store the slowest of these ranks; data types that were not measured now are kept."""
    old = store.get("compute", place)
    values = {kind: old.values[kind] for kind in DTYPES if old and kind in old.values}
    for kind in DTYPES:
        if all(kind in rank["products"] for rank in figures):
            values[kind] = min(rank["products"][kind] for rank in figures)
    values["memory"] = min(rank["memory"] for rank in figures)
    copies = [rank["copies"]["to_device_pinned"] for rank in figures if "copies" in rank]
    if copies:
        values["host_link"] = min(copies)
    store.record("compute", place, values, average=False)


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
    store = cluster.measurement_store
    if store is None or not figures:
        return []
    messages: list[str] = []
    # With replicas, collectives run within a node or between one rank of each node.
    if options.replicate_across == "none":
        messages += _learn_collectives(figures, cluster, store)
    messages += _learn_loop(figures, spec, options, cluster, store)
    if messages:
        store.save()
    return messages


def _learn_collectives(
    figures: Sequence[RankProfileLike], cluster: ClusterSpec, store: MeasurementStore
) -> Iterator[str]:
    """Store one point per kind of collective: its average size and time."""
    for name in COLLECTIVES:
        # "all_gather_into_tensor" and "_allgather_base" are all_gather.
        calls = [
            stats
            for rank in figures
            for stats in rank.traffic
            if stats.name.replace("_", "").startswith(name.replace("_", ""))
            and stats.count > 0
            and stats.bytes > 0
        ]
        if not calls:
            continue
        size = int(statistics.median([stats.bytes / stats.count for stats in calls]))
        median_s = statistics.median(
            [(stats.seconds - stats.waiting_s) / stats.count for stats in calls]
        )
        if size < MIN_COLLECTIVE_BYTES:
            continue
        place = f"{name}, {cluster.describe()}"
        if store.record("collective", place, {str(size): median_s}) is not None:
            yield f"{name} of {format_bytes(size)} takes {format_seconds(median_s)} here"


def _learn_loop(
    figures: Sequence[RankProfileLike],
    spec: ModelSpec,
    options: Options,
    cluster: ClusterSpec,
    store: MeasurementStore,
) -> Iterator[str]:
    """Store the speed at which `step_time` predicts the compute time of the ranks."""
    trained = figures[0].model
    median_s = statistics.median(
        [rank.parts.get("forward", 0.0) + rank.parts.get("backward", 0.0) for rank in figures]
    )
    if trained is None or median_s <= 0:
        return
    precision = options.precision or "no"
    kind = {"no": "fp32", "fp8": "bf16"}.get(precision, precision)
    try:
        values = _fit_speed(median_s, trained, spec, options, cluster, kind)
    except NbdistError:  # a model or an optimizer unknown to the planner
        return
    if values is None:
        return
    place = cluster.compute_speed_key(cluster.slowest_device)
    stored = store.record("loop", f"{place}, {kind}", values)
    if stored is not None:
        reached = stored.values["flops"] / _TERA
        yield f"a training loop in {kind} reaches {reached:.3g} TFLOP/s per rank here"


def _fit_speed(
    measured_s: float,
    trained: ProfiledModelLike,
    spec: ModelSpec,
    options: Options,
    cluster: ClusterSpec,
    kind: str,
) -> dict[str, float] | None:
    """Return the compute speed at which the predicted compute time is the measured one.

    None if no speed explains the time: kernel launches dominate, or the measurement contains more
    than compute.

    Raises:
        NbdistError: the model cannot be planned.
    """
    setup = TrainingSetup(
        options=replace(options, accumulate=trained.accumulate),
        world_size=cluster.world_size,
        optimizer=optimizers.optimizer_for_device(optimizers.find_optimizer("adamw"), cluster.kind),
        kind=cluster.kind,
        num_nodes=cluster.num_nodes,
    )
    workload = Workload(
        batch_size=trained.samples,
        seq_len=trained.seq_len,
        compute=compute_mode(setup),
        activation_checkpointing=setup.options.activation_checkpointing,
        kind=cluster.kind,
    )
    assumed = replace(cluster.slowest_device, loop_speeds={})
    flops = assumed.sustained_flops(kind if kind != "fp32" else "no")
    memory = assumed.sustained_memory_bandwidth(kind)

    def speeds(factor: float) -> dict[str, float]:
        return {"flops": factor * flops, "memory": factor * memory}

    def seconds(factor: float) -> float:
        loop = Measurement(values=speeds(factor), day=user_cache.today())
        device = replace(assumed, loop_speeds={kind: loop})
        devices = (device,) * cluster.world_size
        model = step_time.StepCostModel(spec, setup, replace(cluster, devices=devices))
        return model.cost_for(workload).compute_s

    low, high = _FACTORS
    if not seconds(high) < measured_s < seconds(low):
        return None
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seconds(middle) > measured_s else (low, middle)
    if seconds(2 * low) > _LAUNCH_BOUND * measured_s:
        return None  # kernel launches dominate: speeds would explain nothing
    return speeds(low)
