"""Profile of a training window: measurements of all ranks, the verdict and the advice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from nbdist.display import profile
from nbdist.profiler import rank_comparison
from nbdist.profiler.analysis import ProfileAnalysis

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nbdist.profiler.dataloader_call import DataLoaderCall
    from nbdist.profiler.lint import LintFinding
    from nbdist.profiler.measurements import RankProfile
    from nbdist.profiler.profile_data import ProfiledConfig


@dataclass(frozen=True, kw_only=True)
class Profile(ProfileAnalysis):
    """Time breakdown of a training step, and changes that would make it faster.

    Created with `Profile.of`. All times are seconds per optimizer step.
    """

    @classmethod
    def of(
        cls,
        figures: Iterable[RankProfile],
        setting: ProfiledConfig,
        *,
        remarks: Sequence[LintFinding] = (),
        loader_text: DataLoaderCall | None = None,
        before: Profile | None = None,
        notes: Sequence[str] = (),
    ) -> Self:
        """Create a profile from the measurements of the ranks.

        Args:
            figures: measurements of at least one rank.
            setting: configuration of the profiled session.
            remarks: lint findings, confirmed by these measurements.
            loader_text: source of the call that created the loop's DataLoader, if known.
            before: previous profile of the session.
            notes: notes for the user, such as ranks that did not take part and why.

        Raises:
            ValueError: `figures` is empty.
        """
        ranks, unknown = rank_comparison.compare_ranks(list(figures))
        if not ranks:
            raise ValueError("A profile needs the measurements of at least one rank.")
        return cls(
            ranks=ranks,
            setting=setting,
            remarks=tuple(remarks),
            loader_text=loader_text,
            # Without its own previous profile: profiles do not form a chain.
            before=before and replace(before, before=None),
            told=(*notes, *unknown),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the profile as JSON values."""
        return {
            "verdict": self.verdict,
            "bound": self.bound,
            "advice": [advice.to_json() for advice in self.advice],
            "gained": self.advice_outcome,
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
            "ranks": [rank.to_json() for rank in self.ranks],
        }

    def __str__(self) -> str:
        return profile.render_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the profile as HTML without scripts, with a stacked bar per rank."""
        return str(profile.render_html(self))
