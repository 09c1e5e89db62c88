"""The planner, calibrated by one profile: what a change of the engine brings; pure.

It costs the step that was measured and the step that a change would make, on a cluster whose
device and link are as fast as they were measured. Each measured part is multiplied by the ratio
of the two; parts that the planner does not know follow the number of samples or micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from nbdist.errors import NbdistError, PlanError
from nbdist.planner import memory_model, optimizers, search, validation
from nbdist.planner.cluster_spec import Cluster
from nbdist.planner.model_spec import Workload
from nbdist.profiler.speedup import Gain, without

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.planner.measurements import Collective
    from nbdist.planner.optimizers import Optimizer
    from nbdist.planner.result import Row
    from nbdist.planner.step_time import Cost
    from nbdist.profiler.measurements import Part
    from nbdist.profiler.report import Profile
    from nbdist.strategies import Options

_ABLE_TO_HIDE = 0.6
"""Of the shorter of computing and communication, what engines that overlap hide: DDP begins with
the backward, and the first gather and the last reduction are never hidden."""
_ENOUGH = 0.7
"""Of the gain of eight times the batch: a larger batch changes the training, so no more of it
than is needed."""
_LAUNCH_BOUND = 0.05
"""Of the step: a device that is idle for more waits for launches."""


@dataclass(frozen=True, kw_only=True)
class _Scaled(Cluster):
    """A cluster whose collectives take `factor` times as long, whatever their size."""

    factor: float

    def link_bytes_per_s(self, collective: Collective) -> float:
        """Bus bandwidth as it was measured."""
        return super().link_bytes_per_s(collective) / self.factor

    @property
    def latency_s(self) -> float:
        """Latency as it was measured."""
        return super().latency_s * self.factor

    @property
    def ramp_s(self) -> float:
        """The same of the transfer that a collective doubles."""
        return super().ramp_s * self.factor


class Changed(NamedTuple):
    """A step with other options or another micro-batch."""

    row: Row
    gain: Gain
    parts: dict[Part, float]
    """Seconds of a step of the same samples."""


class Planner:
    """The planner, calibrated by one profile.

    Raises:
        PlanError: the model, its optimizer or its micro-batch cannot be planned.
    """

    def __init__(self, profile: Profile) -> None:
        """Cost the step that was measured, and scale the cluster to it."""
        model = profile.model
        spec = profile.setting.spec
        if model is None or spec is None or model.samples < 1 or profile.step_s <= 0:
            raise _unplanned()
        self._profile, self._spec = profile, spec
        self._length = max(1, model.seq_len)
        self._optimizer = _optimizer(profile)
        self.options = replace(
            profile.setting.options,
            accumulate=max(1, model.accumulate),
            precision=profile.precision,
        )
        self.samples = model.samples
        # Curves of a calibration are of another day; one factor over the catalogue's link is as
        # true for a collective that this loop had as for one that another engine would have.
        self._cluster = replace(profile.setting.cluster, links=None)
        self.row = self._row(self._cluster, self.options, self.samples)
        self._base = _cost(self.row)
        self._as_measured = self._calibrated()
        self._base_measured = _cost(self._row(self._as_measured, self.options, self.samples))
        self._overlap = self._overlapped()

    @property
    def kind(self) -> str:
        """Of the ranks: cuda or cpu."""
        return self._profile.kind

    @property
    def parts(self) -> Mapping[Part, float]:
        """What was measured, in seconds of a step."""
        return self._profile.parts

    def _overlapped(self) -> float:
        """How much of what the planner hides behind computing is hidden here, from 0 to 1."""
        computing = self._profile.parts["forward"] + self._profile.parts["backward"]
        able = _ABLE_TO_HIDE * min(self._base_measured.communication_s, computing)
        return min(1.0, self._profile.hidden_s / able) if able > 0 else 1.0

    def _exposed(self, cost: Cost) -> float:
        """Communication that nothing hides, where no more is hidden than was measured."""
        base = max(cost.exposed_communication_s, cost.communication_s)
        return base - self._overlap * (base - cost.exposed_communication_s)

    def _calibrated(self) -> Cluster:
        """The cluster with the device's and the link's speed as they were measured."""
        profile, base = self._profile, self._base
        computing = profile.parts["forward"] + profile.parts["backward"]
        speed = base.compute_s / computing if computing > 0 and base.compute_s > 0 else 1.0
        moved = sum(one.seconds - one.waiting_s for one in profile.traffic)
        told = moved > 0 and base.communication_s > 0
        cluster = self._cluster
        return _Scaled(
            **{name: getattr(cluster, name) for name in Cluster.__dataclass_fields__}
            | {"devices": tuple(one.faster(speed) for one in cluster.devices)},
            factor=moved / base.communication_s if told else 1.0,
        )

    def _row(self, cluster: Cluster, options: Options, samples: int) -> Row:
        """The plan's row of these options.

        Raises:
            PlanError: the model cannot be planned so.
        """
        rows = self._rows(cluster, options, samples)
        wanted = options.reshard_after_forward
        row = next((one for one in rows if one.options.reshard_after_forward == wanted), None)
        if row is None or row.cost is None:
            raise _unplanned()
        return row

    def _rows(self, cluster: Cluster, options: Options, samples: int) -> list[Row]:
        """The same, with the variant that keeps parameters gathered where that is a choice."""
        fixed = {
            name: value
            for name, value in options.to_json().items()
            if name != "precision" and value is not None
        }
        question = search.Question(
            model=self._spec,
            cluster=cluster,
            batch_sizes=(samples,),
            seq_len=self._length,
            precision=options.precision or "no",
            optimizer=self._optimizer,
            fixed=fixed,
        )
        return search.explored(question)

    def kept_gathered(self) -> Options | None:
        """These options with parameters gathered from forward to backward, if that is a choice."""
        if not self.options.reshard_after_forward:
            return None
        rows = self._rows(self._cluster, self.options, self.samples)
        return next((one.options for one in rows if not one.options.reshard_after_forward), None)

    def replicated(self) -> Options | None:
        """These options with shards inside each node alone, if that is a choice."""
        if self.options.replicate_across != "none" or self._cluster.nodes == 1:
            return None
        other = replace(self.options, replicate_across="nodes")
        return other if other.strategy.may_replicate else None

    def changed(self, options: Options | None = None, samples: int | None = None) -> Changed | None:
        """What other options or another micro-batch bring; None where they do not fit."""
        options, samples = options or self.options, samples or self.samples
        try:
            raw = self._row(self._cluster, options, samples)
            measured = _cost(self._row(self._as_measured, options, samples))
        except NbdistError:
            return None
        if not raw.fits:
            return None
        more = samples * options.accumulate / (self.samples * self.options.accumulate)
        micro = options.accumulate / self.options.accumulate
        whole = self._parts(_cost(raw), measured, more, micro)
        parts = {name: seconds / more for name, seconds in whole.items()}
        return Changed(raw, self._gain(parts), parts)

    def _parts(self, raw: Cost, measured: Cost, more: float, micro: float) -> dict[Part, float]:
        """The changed step: `more` times the samples in `micro` times the micro-batches."""
        before, base = self._profile.parts, self._base_measured
        computing = _ratio(measured.compute_s, base.compute_s)
        idle = micro * before["idle"]
        busy = before["forward"] + before["backward"]
        if self._profile.kind == "cuda" and before["idle"] > _LAUNCH_BOUND * self._profile.step_s:
            # launches take the same time for larger kernels, which fill what was idle
            if more != micro:
                computing = more
            idle = max(0.0, micro * (busy + before["idle"]) - computing * busy)
        on_cpu = self._profile.kind == "cpu"
        optimizing = _ratio(raw.optimizer_s, self._base.optimizer_s)
        if on_cpu and more == 1:
            # the same processor, offloaded or not
            optimizing = min(1.0, optimizing)
        moved = _carried(before["offload"], raw.offload_s, self._base.offload_s)
        exposed = _carried(
            before["communication"],
            self._exposed(measured),
            self._exposed(base),
        )
        return {
            "data": more * before["data"],
            "copies": more * before["copies"],
            "forward": computing * before["forward"],
            "backward": computing * before["backward"],
            "optimizer": optimizing * before["optimizer"],
            "communication": exposed,
            "waiting": computing * before["waiting"],
            "offload": moved,
            "python": micro * before["python"],
            "idle": idle,
        }

    def _gain(self, parts: Mapping[Part, float]) -> Gain:
        """Compare two steps of the same samples."""
        before = self._profile.parts
        changed = sum(abs(seconds - before[name]) for name, seconds in parts.items())
        return Gain.of(sum(before.values()), sum(parts.values()), changed)

    def cut_into_units(self) -> Gain:
        """The gain of FSDP units for a model that is gathered at once.

        The planner's model of FSDP has units, so its exposed share of all communication is what
        is left of what was measured.
        """
        base = self._base_measured
        left = min(1.0, _ratio(base.exposed_communication_s, base.communication_s))
        return without(self._profile, (1 - left) * self._profile.parts["communication"])


def _unplanned() -> PlanError:
    return PlanError("the model that was profiled cannot be planned")


def planner(profile: Profile) -> Planner | None:
    """The calibrated planner; None where the model cannot be planned."""
    try:
        return Planner(profile)
    except NbdistError:
        return None


def model_flops(profile: Profile) -> float | None:
    """FLOPs of one rank's step, without recomputation."""
    model, spec = profile.model, profile.setting.spec
    if model is None or spec is None or model.samples < 1:
        return None
    setup = memory_model.Setup(
        options=replace(profile.setting.options, precision=profile.precision),
        world_size=len(profile.ranks),
        optimizer=optimizers.lookup("adamw"),
        kind="cuda" if profile.kind == "cuda" else "cpu",
    )
    workload = Workload(
        batch_size=model.samples,
        seq_len=max(1, model.seq_len),
        compute=memory_model.compute_of(setup),
        kind=setup.kind,
    )
    try:
        return max(1, model.accumulate) * spec.flops(workload)
    except NbdistError:
        return None


def doublings(start: int, times: int = 3) -> Iterator[int]:
    """2, 4 and 8 times as many."""
    yield from (start * 2**power for power in range(1, times + 1))


def enough(found: list[tuple[int, Changed]]) -> tuple[int, Changed] | None:
    """Of growing batches, the smallest that gains most of what the largest does."""
    best = max((one.gain.faster for _, one in found), default=0.0)
    return next((one for one in found if one[1].gain.faster >= _ENOUGH * best > 0), None)


def _cost(row: Row) -> Cost:
    assert row.cost is not None  # `_row` gives no other  # noqa: S101
    return row.cost


def _ratio(after: float, before: float) -> float:
    return after / before if before > 0 else 1.0


def _carried(measured: float, after: float, before: float) -> float:
    """A measured part after a change; where the planner had none before, what it adds."""
    if before > 0 and measured > 0:
        return measured * after / before
    return measured + after - before


def _optimizer(profile: Profile) -> Optimizer:
    """The planner's optimizer for the one that was seen; AdamW for one that it does not know."""
    kind: Any = profile.kind
    name = profile.model.optimizer if profile.model else ""
    try:
        return validation.optimizer_of({"class": name} if name else {}, kind)
    except NbdistError:
        return optimizers.for_kind(optimizers.lookup("adamw"), kind)
