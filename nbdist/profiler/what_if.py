"""The planner and a profile: the predicted speedup of changes, and the speeds that later plans use.

The planner predicts the measured and the changed step on a cluster with the measured speed of
device and link. Each measured part of the step is multiplied by the ratio of the two predictions.
Parts that the planner does not model scale with the number of samples or micro-batches.

For later plans a profile gives the time of collectives in real training and the compute speed of a
training loop, fitted so that `step_time` predicts the measured time; both are averaged with earlier
ones.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from nbdist.errors import NbdistError, PlanError
from nbdist.planner import measurement_store, optimizers, search, step_time
from nbdist.planner.measurement_store import COLLECTIVES, Measurement
from nbdist.planner.memory.timeline import TrainingSetup, compute_mode
from nbdist.planner.model_spec import Workload
from nbdist.planner.plan_types import PlanInput
from nbdist.profiler.advice import Speedup, speedup_without

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.planner.cluster_spec import ClusterSpec
    from nbdist.planner.measurement_store import MeasurementStore
    from nbdist.planner.model_spec import ModelSpec
    from nbdist.planner.plan_types import PlanRow
    from nbdist.planner.step_time import StepCost
    from nbdist.profiler.measurements import ProfiledModel, RankProfile, StepPart
    from nbdist.profiler.profile_data import ProfileData
    from nbdist.strategies import Options

_MAX_OVERLAP = 0.6
"""Share of the shorter of computation and communication that engines can overlap. DDP overlaps
only with the backward; the first all-gather and the last reduction are always exposed."""
_UNSUPPORTED = "The planner does not support the profiled model."
_BACKWARD_WORK = 2
"""Work of the backward relative to the forward, without recomputation."""
_LAUNCH_BOUND = 0.05
"""Share of idle time in the step from which a GPU is limited by kernel launches."""
MIN_COLLECTIVE_BYTES = 1 << 18
"""Collectives of fewer bytes in a profile do not characterize the link."""
_BISECTIONS = 40
_FACTORS = 1 / 30, 30.0
"""Range of plausible compute speeds, relative to the assumed speed."""
_LAUNCHES_DOMINATE = 0.6
"""Maximum time at twice the speed, relative to the measured time, if compute dominates."""


class StepPrediction(NamedTuple):
    """Prediction for other options or another micro-batch size."""

    row: PlanRow
    gain: Speedup
    parts: dict[StepPart, float]
    """Seconds of each part, for the number of samples of a measured step."""


class CalibratedPlanner:
    """The planner, calibrated to a profile.

    Raises:
        PlanError: the planner does not support the model, its optimizer or its micro-batch.
    """

    def __init__(self, profile: ProfileData) -> None:
        model, spec = profile.model, profile.setting.model_spec
        if model is None or spec is None or model.samples < 1 or profile.step_s <= 0:
            raise PlanError(_UNSUPPORTED)
        self.profile, self._spec = profile, spec
        self._length = max(1, model.seq_len)
        self.options = replace(
            profile.setting.options,
            accumulate=max(1, model.accumulate),
            precision=profile.precision,
        )
        self.samples = model.samples
        device_kind: Any = profile.kind
        try:
            named = {"class": model.optimizer} if model.optimizer else {}
            self._optimizer = optimizers.optimizer_from_torch(named, device_kind)
        except NbdistError:  # unknown to the planner
            adamw = optimizers.find_optimizer("adamw")
            self._optimizer = optimizers.optimizer_for_device(adamw, device_kind)

        # Ignore calibrated bandwidth curves, which may be outdated. A factor on the catalog's
        # bandwidth also applies to collectives that this loop does not use.
        self._cluster: ClusterSpec = replace(profile.setting.cluster, comm_speed=None)
        self.row = self._row(self._cluster, self.options, self.samples)
        self._base = _cost(self.row)

        # The cluster with the measured speed of device and link.
        computing = profile.parts["forward"] + profile.parts["backward"]
        speed = _ratio(self._base.compute_s, computing) or 1.0
        moving = sum(max(0.0, kind.seconds - kind.waiting_s) for kind in profile.traffic)
        self._as_measured = replace(
            self._cluster,
            devices=tuple(device.scaled(speed) for device in self._cluster.devices),
            comm_slowdown=_ratio(moving, self._base.communication_s) or 1.0,
        )
        self._base_measured = _cost(self._row(self._as_measured, self.options, self.samples))

        # The measured overlap, relative to the overlap that is possible.
        able = _MAX_OVERLAP * min(self._base_measured.communication_s, computing)
        self._overlap = min(1.0, _ratio(profile.hidden_s, able))

    def _row(self, cluster: ClusterSpec, options: Options, samples: int) -> PlanRow:
        rows = self._rows(cluster, options, samples)
        wanted = options.reshard_after_forward
        row = next((row for row in rows if row.options.reshard_after_forward == wanted), None)
        if row is None or row.cost is None:
            raise PlanError(_UNSUPPORTED)
        return row

    def _rows(self, cluster: ClusterSpec, options: Options, samples: int) -> list[PlanRow]:
        """Return the plan's rows for these options, with and without resharding if possible."""
        fixed = {
            name: value
            for name, value in options.to_json().items()
            if name != "precision" and value is not None
        }
        question = PlanInput(
            model=self._spec,
            cluster=cluster,
            batch_sizes=(samples,),
            seq_len=self._length,
            precision=options.precision or "no",
            optimizer=self._optimizer,
            fixed_options=fixed,
        )
        return search.evaluate_rows(question)

    def options_without_resharding(self) -> Options | None:
        """Return the options with `reshard_after_forward=False`, if the backend supports it."""
        if not self.options.reshard_after_forward:
            return None
        rows = self._rows(self._cluster, self.options, self.samples)
        return next((row.options for row in rows if not row.options.reshard_after_forward), None)

    def options_with_node_replicas(self) -> Options | None:
        """Return the options with sharding only within each node, if the backend supports it."""
        if self.options.replicate_across != "none" or self._cluster.num_nodes == 1:
            return None
        other = replace(self.options, replicate_across="nodes")
        return other if other.strategy.can_replicate else None

    def predict_change(
        self, options: Options | None = None, samples: int | None = None
    ) -> StepPrediction | None:
        """Predict the step with other options or another micro-batch size.

        Returns:
            None if the model does not fit or the planner does not support the options.
        """
        options, samples = options or self.options, samples or self.samples
        try:
            raw = self._row(self._cluster, options, samples)
            measured = _cost(self._row(self._as_measured, options, samples))
        except NbdistError:
            return None
        if not raw.fits:
            return None
        sample_ratio = samples * options.accumulate / (self.samples * self.options.accumulate)
        micro = options.accumulate / self.options.accumulate
        whole = self._parts(_cost(raw), measured, sample_ratio, micro)
        parts = {name: seconds / sample_ratio for name, seconds in whole.items()}
        before = self.profile.parts
        changed = sum(abs(seconds - before[name]) for name, seconds in parts.items())
        gain = Speedup.from_times(
            self.profile.kind, sum(before.values()), sum(parts.values()), changed
        )
        return StepPrediction(raw, gain, parts)

    def _parts(
        self, raw: StepCost, measured: StepCost, sample_ratio: float, micro: float
    ) -> dict[StepPart, float]:
        """Predict the parts of the changed step.

        Args:
            raw: predicted cost of the changed step on the original cluster.
            measured: the same on the calibrated cluster.
            sample_ratio: ratio of the number of samples.
            micro: ratio of the number of micro-batches.
        """
        before, base = self.profile.parts, self._base_measured
        computing = _ratio(measured.compute_s, base.compute_s)
        idle = micro * before["idle"]
        busy = before["forward"] + before["backward"]
        if self.profile.kind == "cuda" and before["idle"] > _LAUNCH_BOUND * self.profile.step_s:
            # Launching larger kernels takes the same time, and they fill the idle time.
            if sample_ratio != micro:
                computing = sample_ratio
            idle = max(0.0, micro * (busy + before["idle"]) - computing * busy)
        on_cpu = self.profile.kind == "cpu"
        copying = 0.0
        if on_cpu:
            # A slow CPU also launches kernels slowly, so the measured speed applies to all of it.
            computing = _ratio(raw.compute_s, self._base.compute_s)
            # What takes longer than computing the gradients copies them: the same for any batch.
            work = _BACKWARD_WORK + self.options.activation_checkpointing
            copying = max(0.0, before["backward"] - work * before["forward"])
        copied = micro if sample_ratio != micro else computing
        optimizing = _ratio(raw.optimizer_s, self._base.optimizer_s)
        if on_cpu and sample_ratio == 1:
            # The optimizer runs on the same CPU, offloaded or not.
            optimizing = min(1.0, optimizing)
        offload_s = _scale_measured(before["offload"], raw.offload_s, self._base.offload_s)
        exposed = _scale_measured(
            before["communication"],
            self._exposed(measured),
            self._exposed(base),
        )
        return {
            "data": sample_ratio * before["data"],
            "copies": sample_ratio * before["copies"],
            "forward": computing * before["forward"],
            "backward": computing * (before["backward"] - copying) + copied * copying,
            "optimizer": optimizing * before["optimizer"],
            "communication": exposed,
            "waiting": computing * before["waiting"],
            "offload": offload_s,
            "python": micro * before["python"],
            "idle": idle,
        }

    def _exposed(self, cost: StepCost) -> float:
        """Return the exposed communication, with the measured instead of the ideal overlap."""
        base = max(cost.exposed_communication_s, cost.communication_s)
        return base - self._overlap * (base - cost.exposed_communication_s)

    def unit_wrapping_speedup(self) -> Speedup:
        """Return the speedup by several FSDP units for a model that is one unit."""
        base = self._base_measured
        # The planner assumes several units, so its exposed share of communication is what remains.
        left = min(1.0, _ratio(base.exposed_communication_s, base.communication_s))
        return speedup_without(self.profile, (1 - left) * self.profile.parts["communication"])


def model_flops(profile: ProfileData) -> float | None:
    """Return the FLOPs of one rank per step, without recomputation; None if unknown."""
    model, spec = profile.model, profile.setting.model_spec
    if model is None or spec is None or model.samples < 1:
        return None
    workload = Workload(
        batch_size=model.samples,
        seq_len=max(1, model.seq_len),
        compute=compute_mode(replace(profile.setting.options, precision=profile.precision)),
        kind=profile.ranks[0].kind,
    )
    try:
        return max(1, model.accumulate) * spec.flops(workload)
    except NbdistError:
        return None


def _cost(row: PlanRow) -> StepCost:
    assert row.cost is not None  # checked in `_row`  # noqa: S101
    return row.cost


def _ratio(after: float, before: float) -> float:
    return after / before if before > 0 else 1.0


def _scale_measured(measured: float, after: float, before: float) -> float:
    """Scale a measured part by the predicted ratio, or add the difference if there is none."""
    if before > 0 and measured > 0:
        return measured * after / before
    return measured + after - before


# -- speeds for later plans ------------------------------------------------------------------


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
    workload = setup.workload(spec, trained.samples, trained.seq_len, keep_outputs=True)
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
    if seconds(2 * low) > _LAUNCHES_DOMINATE * measured_s:
        return None  # kernel launches dominate: speeds would explain nothing
    return speeds(low)
