"""A profile: all ranks' figures compared, the verdict first; pure, in the notebook's kernel."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from nbdist import rank_sets as words_for_ranks
from nbdist.display import profile
from nbdist.profiler import advice_followup, bottleneck, rank_comparison, recommendations, what_if
from nbdist.profiler.measurements import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nbdist.planner.cluster_spec import Cluster
    from nbdist.planner.model_spec import ModelSpec
    from nbdist.planner.result import Row
    from nbdist.profiler.advice import Advice
    from nbdist.profiler.bottleneck import Blame
    from nbdist.profiler.dataloader_calls import LoaderText
    from nbdist.profiler.lint_finding import Remark
    from nbdist.profiler.measurements import Loader, Model, Part, RankFigures, Traffic
    from nbdist.profiler.rank_comparison import Straggler
    from nbdist.profiler.what_if import Planner
    from nbdist.strategies import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What was profiled, as the kernel knows it."""

    options: Options
    """Of the session, checked."""
    cluster: Cluster
    """The ranks' devices, and what is between them."""
    spec: ModelSpec | None = None
    """The model as the planner sees it; None where it cannot, and then no change of the engine
    is advised."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the step goes, and what would make it faster.

    Made by `Profile.of`. All times are seconds of one optimizer step.
    """

    ranks: tuple[RankFigures, ...]
    """Ascending; waiting told apart from communication."""
    setting: Setting
    remarks: tuple[Remark, ...] = ()
    """On the text of the cell."""
    loader_text: LoaderText | None = None
    """The call that made the loop's loader, where the cells show it."""
    before: Profile | None = field(default=None, repr=False)
    """The profile before this one, whose advice may have been taken."""
    told: tuple[str, ...] = ()
    """Sentences of the kernel, and on what could not be compared."""

    @classmethod
    def of(
        cls,
        figures: Iterable[RankFigures],
        setting: Setting,
        *,
        remarks: Sequence[Remark] = (),
        loader_text: LoaderText | None = None,
        before: Profile | None = None,
        notes: Sequence[str] = (),
    ) -> Self:
        """Compare what the ranks have measured.

        Args:
            figures: of each rank that took part; at least one.
            setting: what was profiled.
            remarks: on the text of the cell, confirmed by these figures.
            loader_text: the call that made the loop's loader, where the cells show it.
            before: the session's profile before this one.
            notes: sentences that a reader must know: who did not take part, and why.

        Raises:
            ValueError: no figures.
        """
        ranks, unknown = rank_comparison.compared(list(figures))
        if not ranks:
            message = "a profile needs the figures of one rank at least"
            raise ValueError(message)
        return cls(
            ranks=ranks,
            setting=setting,
            remarks=tuple(remarks),
            loader_text=loader_text,
            before=before and before.alone(),
            told=(*notes, *unknown),
        )

    def alone(self) -> Profile:
        """The same without the one before, so that a session's profiles are no chain."""
        return Profile(
            ranks=self.ranks,
            setting=self.setting,
            remarks=self.remarks,
            loader_text=self.loader_text,
            told=self.told,
        )

    # ------------------------------------------------------------------------ the figures

    @property
    def num_steps(self) -> int:
        """Steps of the window."""
        return min(len(one.steps) for one in self.ranks)

    @cached_property
    def step_s(self) -> float:
        """Mean step, over ranks and steps."""
        return statistics.fmean(one.step_s for one in self.ranks)

    @property
    def p50_s(self) -> float:
        """The middle step."""
        return self._quantile(0.5)

    @property
    def p90_s(self) -> float:
        """A step that nine of ten are not longer than."""
        return self._quantile(0.9)

    def _quantile(self, share: float) -> float:
        steps = sorted(seconds for one in self.ranks for seconds in one.steps)
        return steps[math.ceil(share * len(steps)) - 1] if steps else 0.0

    @cached_property
    def parts(self) -> dict[Part, float]:
        """Seconds of each part, in the mean of the ranks."""
        return {
            name: statistics.fmean(one.parts.get(name, 0.0) for one in self.ranks) for name in PARTS
        }

    def share(self, *names: Part) -> float:
        """Parts as a share of the step."""
        return sum(self.parts[name] for name in names) / self.step_s if self.step_s > 0 else 0.0

    @property
    def hidden_s(self) -> float:
        """Communication beside computing, in the mean of the ranks."""
        return statistics.fmean(one.hidden_s for one in self.ranks)

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """Collectives by kind, in the mean of the ranks, the longest first."""
        return tuple(rank_comparison.mean_traffic(self.ranks))

    @property
    def model(self) -> Model | None:
        """What the engine made of the model; None where no rank could tell."""
        return next((one.model for one in self.ranks if one.model is not None), None)

    @property
    def loader(self) -> Loader | None:
        """The loader that the loop took the most batches from."""
        loaders = (self.reader or self.ranks[0]).loaders
        return max(loaders, key=lambda one: one.batches, default=None)

    @property
    def reader(self) -> RankFigures | None:
        """The rank that takes batches for all, as accelerate does with an IterableDataset."""
        reading = [one for one in self.ranks if one.loaders]
        return reading[0] if len(reading) == 1 < len(self.ranks) else None

    @property
    def data_s(self) -> float:
        """Seconds that a step waits for batches: all ranks wait for one that reads alone."""
        return self.reader.parts.get("data", 0.0) if self.reader else self.parts["data"]

    @property
    def kind(self) -> str:
        """Of the devices: cuda or cpu."""
        return self.ranks[0].kind

    # ------------------------------------------------------------------------- the speed

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks together; 0 where no rank knows its micro-batch."""
        counted = (
            one.model.samples * one.model.accumulate if one.model else 0 for one in self.ranks
        )
        return sum(counted) / self.step_s if self.step_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks together; samples for a model that takes no tokens."""
        length = max(1, self.model.seq_len) if self.model else 1
        return self.samples_per_s * length

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s that the catalogue states for the device; None on CPU ranks."""
        if self.kind == "cpu":
            return None
        return self.setting.cluster.slowest.peak(self.precision)

    @property
    def precision(self) -> str:
        """Of the computing: no, fp16, bf16 or fp8."""
        return (self.model and self.model.precision) or self.setting.options.precision or "no"

    @cached_property
    def model_flops(self) -> float | None:
        """FLOPs of one rank's step, without recomputation; None where they are not known."""
        return what_if.model_flops(self)

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s as a share of the stated peak; None where one of them is not known."""
        if not self.peak_flops or self.model_flops is None or self.step_s <= 0:
            return None
        return self.model_flops / self.step_s / self.peak_flops

    # ----------------------------------------------------------------------- the judgement

    @cached_property
    def slowest(self) -> Straggler | None:
        """The rank that the others wait for, and why; None where there is none.

        Who reads for all is slow in it for all: that is the loader's fault, not the rank's.
        """
        slow, reader = rank_comparison.straggler(self.ranks), self.reader
        if slow and reader and (slow.rank, slow.part) == (reader.rank, "data"):
            return None
        return slow

    @property
    def straggler(self) -> int | None:
        """Its number."""
        return self.slowest.rank if self.slowest else None

    @cached_property
    def blamed(self) -> tuple[Blame, ...]:
        """What costs more than it should, gravest first; empty where nothing does."""
        return tuple(bottleneck.blamed(self))

    @property
    def bound(self) -> str:
        """What the step is bound by, in a word: a `verdict.Kind`, "compute", or "mixed"."""
        return bottleneck.bound(self)

    @cached_property
    def verdict(self) -> str:
        """One sentence: what the step is bound by."""
        return bottleneck.sentence(self)

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """At most three changes, the one that gains most first."""
        return tuple(recommendations.best(self))

    @cached_property
    def gained(self) -> str:
        """What the advice of the profile before has gained; empty where none was taken."""
        return advice_followup.gained(self.before, self) if self.before else ""

    @cached_property
    def planner(self) -> Planner | None:
        """The planner, calibrated by these figures; None where the model cannot be planned."""
        return what_if.planner(self)

    @property
    def predicted(self) -> Row | None:
        """The plan's row for what was profiled; None where it cannot be planned."""
        return self.planner.row if self.planner else None

    @property
    def options(self) -> Options:
        """The session's, with the accumulation and the precision that the ranks saw."""
        accumulate = self.model.accumulate if self.model else self.setting.options.accumulate
        return replace(self.setting.options, accumulate=accumulate, precision=self.precision)

    @property
    def notes(self) -> list[str]:
        """What a reader must know: what could not be measured, and where."""
        saying: dict[str, list[int]] = {}
        for one in self.ranks:
            for note in one.notes:
                saying.setdefault(note, []).append(one.rank)
        everywhere = len(self.ranks)
        noted = [
            note if len(where) == everywhere else f"{words_for_ranks.words(where)}: {note}"
            for note, where in saying.items()
        ]
        return [*self.told, *noted]

    # --------------------------------------------------------------------------- to show

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain fields."""
        return {
            "verdict": self.verdict,
            "bound": self.bound,
            "advice": [one.to_json() for one in self.advice],
            "gained": self.gained,
            "step_s": self.step_s,
            "p50_s": self.p50_s,
            "p90_s": self.p90_s,
            "parts": dict(self.parts),
            "hidden_s": self.hidden_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "peak_flops": self.peak_flops,
            "straggler": self.straggler,
            "notes": self.notes,
            "ranks": [one.to_json() for one in self.ranks],
        }

    def __str__(self) -> str:
        """The verdict, the advice, and tables for a terminal."""
        return profile.text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The same with one stacked bar for each rank; no script."""
        return profile.html(self)
