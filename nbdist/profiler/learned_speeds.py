"""Speeds of this machine that a profile of the user's loop shows, stored for later plans.

A profile gives the time of collectives in real training and the compute speed of a training loop,
fitted so that `step_time` predicts the measured time; both are averaged with earlier ones.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

from nbdist.errors import NbdistError
from nbdist.planner import measurement_store, optimizers, step_time
from nbdist.planner.measurement_store import COLLECTIVES, Measurement
from nbdist.planner.memory.timeline import TrainingSetup, compute_mode
from nbdist.planner.model_spec import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.planner.cluster_spec import ClusterSpec
    from nbdist.planner.measurement_store import MeasurementStore
    from nbdist.planner.model_spec import ModelSpec
    from nbdist.profiler.measurements import ProfiledModel, RankProfile
    from nbdist.strategies import Options

MIN_COLLECTIVE_BYTES = 1 << 18
"""Collectives of fewer bytes in a profile do not characterize the link."""
_BISECTIONS = 40
_FACTORS = 1 / 30, 30.0
"""Range of plausible compute speeds, relative to the assumed speed."""
_LAUNCH_BOUND = 0.75
"""Maximum time at twice the speed, relative to the measured time, if compute dominates."""


def learn_from_profile(
    figures: Sequence[RankProfile], *, spec: ModelSpec, options: Options, cluster: ClusterSpec
) -> None:
    """Store what a profile of the user's loop shows: compute speed and times of collectives.

    Unreliable data is skipped: small messages, models whose kernels are too small to reach the
    device's speed, implausible times.

    Args:
        figures: profiles of all ranks, with waiting time separated.
        spec: spec of the prepared model.
        options: options that it was trained with.
        cluster: the ranks, detected on this machine.
    """
    store = cluster.measurement_store
    if store is None or not figures:
        return
    learned = _learn_loop(figures, spec, options, cluster, store)
    # With replicas, collectives run within a node or between one rank of each node.
    if options.replicate_across == "none":
        learned = _learn_collectives(figures, cluster, store) or learned
    if learned:
        store.save()


def _learn_collectives(
    figures: Sequence[RankProfile], cluster: ClusterSpec, store: MeasurementStore
) -> bool:
    """Store one point per kind of collective, its average size and time; return if any was."""
    learned = False
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
            learned = True
    return learned


def _learn_loop(
    figures: Sequence[RankProfile],
    spec: ModelSpec,
    options: Options,
    cluster: ClusterSpec,
    store: MeasurementStore,
) -> bool:
    """Store the speed at which `step_time` predicts the ranks' compute time; return if it was."""
    trained = figures[0].model
    median_s = statistics.median(
        [rank.parts.get("forward", 0.0) + rank.parts.get("backward", 0.0) for rank in figures]
    )
    if trained is None or median_s <= 0:
        return False
    precision = options.precision or "no"
    kind = {"no": "fp32", "fp8": "bf16"}.get(precision, precision)
    try:
        values = _fit_speed(median_s, trained, spec, options, cluster, kind)
    except NbdistError:  # a model or an optimizer unknown to the planner
        return False
    if values is None:
        return False
    place = cluster.compute_speed_key(cluster.slowest_device)
    return store.record("loop", f"{place}, {kind}", values) is not None


def _fit_speed(
    measured_s: float,
    trained: ProfiledModel,
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
        loop = Measurement(values=speeds(factor), day=measurement_store.today())
        device = replace(assumed, loop_speeds={kind: loop})
        devices = (device,) * cluster.world_size
        scaled = replace(cluster, devices=devices)
        return step_time.step_cost(spec, setup, scaled, workload).compute_s

    low, high = _FACTORS
    if not seconds(high) < measured_s < seconds(low):
        return None
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seconds(middle) > measured_s else (low, middle)
    if seconds(2 * low) > _LAUNCH_BOUND * measured_s:
        return None  # kernel launches dominate: speeds would explain nothing
    return speeds(low)
