"""Analysis of a profile: bottlenecks, verdict and advice; pure, in the notebook's kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from nbdist.errors import NbdistError
from nbdist.profiler import advice, bottleneck, select_recommendations, what_if
from nbdist.profiler.profile_data import ProfileData

if TYPE_CHECKING:
    from nbdist.planner.plan_types import PlanRow
    from nbdist.profiler.advice import Advice
    from nbdist.profiler.bottleneck import Bottleneck
    from nbdist.profiler.what_if import CalibratedPlanner


@dataclass(frozen=True, kw_only=True)
class ProfileAnalysis(ProfileData):
    """Bottlenecks of a training step, and changes that would make it faster."""

    before: ProfileAnalysis | None = field(default=None, repr=False)
    """Previous profile, whose advice may have been followed."""

    @cached_property
    def model_flops(self) -> float | None:
        """FLOPs of one rank per step, without recomputation; None if unknown."""
        return what_if.model_flops(self)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: model FLOP/s as a share of `peak_flops`; None if unknown."""
        if not self.peak_flops or self.model_flops is None or self.step_s <= 0:
            return None
        return self.model_flops / self.step_s / self.peak_flops

    @cached_property
    def bottlenecks(self) -> tuple[Bottleneck, ...]:
        """Bottlenecks above their thresholds, largest first."""
        return tuple(bottleneck.find_bottlenecks(self, self.mfu))

    @property
    def bound(self) -> str:
        """Kind of the largest bottleneck: a ``BottleneckKind``, "compute" or "mixed"."""
        if self.bottlenecks:
            return self.bottlenecks[0].kind
        computing = self.share(*bottleneck.COMPUTING)
        return "compute" if computing >= bottleneck.HALF else "mixed"

    @cached_property
    def verdict(self) -> str:
        """Summary of the largest bottleneck in one sentence."""
        return bottleneck.bottleneck_summary(
            self, self.bottlenecks, self.advice, planned=self.calibrated_planner is not None
        )

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """At most three recommendations, largest speedup first."""
        return tuple(
            select_recommendations.best_recommendations(
                self, self.bottlenecks, self.calibrated_planner
            )
        )

    @cached_property
    def advice_outcome(self) -> str:
        """Speedup by followed advice of the previous profile; empty if none was followed."""
        return advice.advice_outcome(self.before.advice, self.before, self) if self.before else ""

    @cached_property
    def calibrated_planner(self) -> CalibratedPlanner | None:
        """The planner, calibrated to this profile; None if it does not support the model."""
        try:
            return what_if.CalibratedPlanner(self)
        except NbdistError:
            return None

    @property
    def predicted(self) -> PlanRow | None:
        """The planner's prediction for the profiled configuration, if there is one."""
        return self.calibrated_planner.row if self.calibrated_planner else None
