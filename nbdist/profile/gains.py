"""What a change would bring: measured parts, carried over by the planner's ratios; pure.

The planner costs the step that was measured and the step that a change would make, on a cluster
whose device and link are as slow or fast as they were measured. Each measured part is multiplied
by the ratio of the two; parts that the planner does not know follow the number of samples or of
micro-batches. Speeds are compared per sample, so that a larger batch is no gain by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from nbdist.errors import NbdistError, PlanError
from nbdist.plan import checked, choice, memory, optimizers
from nbdist.plan.devices import Cluster
from nbdist.plan.spec import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.plan.cost import Cost
    from nbdist.plan.devices import Collective, Device
    from nbdist.plan.optimizers import Optimizer
    from nbdist.plan.result import Row
    from nbdist.profile.figures import Loader, Part
    from nbdist.profile.result import Profile
    from nbdist.strategies import Options

_SURE = 0.25
"""Of each part that changes: how far its new length may be off. The planner states 20 to 40 % for
parts that it only predicts; here a ratio of two of its figures is used."""
_NEVER_FETCHED_AHEAD = 0.1
"""Of a batch's time: handing it over, and the first ones of an epoch."""
_MOST_WORKERS = 8
_PINNED = 0.5
"""Of a copy's time from pageable memory that one from page-locked memory takes."""
_LAUNCH_BOUND = 0.05
"""Of the step: a device that is idle for more waits for launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How much faster the same samples would be done."""

    faster: float
    """0.35: 35 % more samples a second."""
    low: float
    high: float

    @classmethod
    def of(cls, before_s: float, after_s: float, changed_s: float) -> Gain:
        """From seconds before and after for the same samples, and how many of them change."""
        unsure = _SURE * changed_s
        return cls(
            faster=before_s / after_s - 1,
            low=before_s / (after_s + unsure) - 1,
            high=before_s / max(after_s - unsure, _SURE * after_s) - 1,
        )


def without(profile: Profile, seconds: float) -> Gain:
    """The gain of taking so many seconds out of every step."""
    step = profile.step_s
    gone = min(seconds, 0.99 * step)
    return Gain.of(step, step - gone, gone)


# ------------------------------------------------------------------------ the data loader


def workers(profile: Profile) -> tuple[int, Gain] | None:
    """How many workers the loader needs, and what they bring; None where it has enough.

    While a step computes, W workers make W batches in the time of one. What they do not make
    during the rest of the step, R, is waited for: max(0, n f / W - R) for n batches of f
    seconds.
    """
    loader = profile.loader
    if loader is None:
        return None
    step, data = profile.step_s, profile.parts["data"]
    rest = step - data
    fetch = _fetch_s(profile, loader)
    found: list[tuple[int, Gain]] = []
    count = 2 * max(1, loader.num_workers)
    while count <= max(_MOST_WORKERS, 2 * loader.num_workers):
        left = max(0.0, fetch / count - rest) + _NEVER_FETCHED_AHEAD * fetch / count
        found.append((count, Gain.of(step, rest + min(data, left), max(0.0, data - left))))
        count *= 2
    best = max(gain.faster for _, gain in found)
    return next((count, gain) for count, gain in found if gain.faster >= _NEARLY * best)


_NEARLY = 0.9
"""Of the best gain: the smallest change that reaches so much of it is advised."""


def _fetch_s(profile: Profile, loader: Loader) -> float:
    """Seconds that one worker takes for the batches of a step."""
    if loader.fetch_s > 0:
        return loader.fetch_s * max(1.0, loader.batches)
    if loader.num_workers == 0:
        return profile.parts["data"]
    return profile.step_s * loader.num_workers  # it is them that the step waits for


def pinned(profile: Profile) -> Gain:
    """The gain of page-locked batches."""
    return without(profile, _PINNED * profile.parts["copies"])


# ------------------------------------------------------------------------------ the engine


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


class Planner:
    """The planner, calibrated by one profile.

    Raises:
        PlanError: the model, its optimizer or its micro-batch cannot be planned.
    """

    def __init__(self, profile: Profile) -> None:
        """Cost the step that was measured, and scale the cluster to it."""
        model = profile.model
        spec = profile.setting.spec
        if model is None or spec is None or model.samples < 1:
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
        self._cluster = profile.setting.cluster
        self.row = self._row(self._cluster, self.options, self.samples)
        self._base = _cost(self.row)
        self._as_measured = self._calibrated()
        self._base_measured = _cost(self._row(self._as_measured, self.options, self.samples))

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
            | {"devices": tuple(_sped_up(one, speed) for one in cluster.devices)},
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
        question = choice.Question(
            model=self._spec,
            cluster=cluster,
            batch_sizes=(samples,),
            seq_len=self._length,
            precision=options.precision or "no",
            optimizer=self._optimizer,
            fixed=fixed,
        )
        return choice.explored(question)

    def kept_gathered(self) -> Options | None:
        """These options with parameters gathered from forward to backward, if that is a choice."""
        if not self.options.reshard_after_forward:
            return None
        rows = self._rows(self._cluster, self.options, self.samples)
        return next((one.options for one in rows if not one.options.reshard_after_forward), None)

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
        parts = self._parts(_cost(raw), measured, more, micro)
        return Changed(raw, self._gain(parts, more))

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
            measured.exposed_communication_s,
            base.exposed_communication_s,
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

    def _gain(self, parts: Mapping[Part, float], more: float) -> Gain:
        """Compare two steps per sample."""
        before = self._profile.parts
        changed = sum(abs(parts[name] / more - before[name]) for name in parts)
        return Gain.of(sum(before.values()), sum(parts.values()) / more, changed)

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
    setup = memory.Setup(
        options=replace(profile.setting.options, precision=profile.precision),
        world_size=len(profile.ranks),
        optimizer=optimizers.lookup("adamw"),
        kind="cuda" if profile.kind == "cuda" else "cpu",
    )
    workload = Workload(
        batch_size=model.samples,
        seq_len=max(1, model.seq_len),
        compute=memory.compute_of(setup),
        kind=setup.kind,
    )
    try:
        return max(1, model.accumulate) * spec.flops(workload)
    except NbdistError:
        return None


def doublings(start: int, times: int = 3) -> Iterator[int]:
    """2, 4 and 8 times as many."""
    yield from (start * 2**power for power in range(1, times + 1))


def nearly_best(found: list[tuple[int, Changed]]) -> tuple[int, Changed] | None:
    """Of growing changes, the smallest that gains nearly as much as the best."""
    best = max((one.gain.faster for _, one in found), default=0.0)
    return next((one for one in found if one[1].gain.faster >= _NEARLY * best > 0), None)


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


def _sped_up(device: Device, speed: float) -> Device:
    """The same device, so many times as fast in computing."""
    return replace(
        device,
        flops=MappingProxyType({kind: speed * peak for kind, peak in device.flops.items()}),
        memory_bandwidth=speed * device.memory_bandwidth,
    )


def _optimizer(profile: Profile) -> Optimizer:
    """The planner's optimizer for the one that was seen; AdamW for one that it does not know."""
    kind: Any = profile.kind
    name = profile.model.optimizer if profile.model else ""
    try:
        return checked.optimizer_of({"class": name} if name else {}, kind)
    except NbdistError:
        return optimizers.for_kind(optimizers.lookup("adamw"), kind)
