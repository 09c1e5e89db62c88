"""Measurements of all ranks in one profiling window, compared; pure, in the notebook's kernel."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from nbdist import rank_sets
from nbdist.profiler import rank_comparison
from nbdist.profiler.measurements import STEP_PARTS

if TYPE_CHECKING:
    from nbdist.planner.cluster_spec import ClusterSpec
    from nbdist.planner.model_spec import ModelSpec
    from nbdist.profiler.dataloader_call import DataLoaderCall
    from nbdist.profiler.lint import LintFinding
    from nbdist.profiler.measurements import (
        CollectiveStats,
        DataLoaderStats,
        ProfiledModel,
        RankProfile,
        StepPart,
    )
    from nbdist.profiler.rank_comparison import Straggler
    from nbdist.strategies import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledConfig:
    """Configuration of the profiled session."""

    options: Options
    """Validated options of the session."""
    cluster: ClusterSpec
    """Devices of the ranks and the links between them."""
    model_spec: ModelSpec | None = None
    """Model for the planner. None if the planner does not support it; then no change of the
    backend is recommended."""


@dataclass(frozen=True, kw_only=True)
class ProfileData:
    """Measurements of a profile. All times are seconds per optimizer step."""

    ranks: tuple[RankProfile, ...]
    """Measurements ordered by rank, with waiting separated from communication."""
    setting: ProfiledConfig
    remarks: tuple[LintFinding, ...] = ()
    loader_text: DataLoaderCall | None = None
    """Source of the call that created the loop's DataLoader, if known."""
    told: tuple[str, ...] = ()
    """Notes of the kernel and of the comparison of ranks."""

    # ------------------------------------------------------------------------ measurements

    @property
    def num_steps(self) -> int:
        """Number of steps in the window."""
        return min(len(rank.steps) for rank in self.ranks)

    @cached_property
    def step_s(self) -> float:
        """Mean step time over all ranks and steps."""
        return statistics.fmean(rank.step_s for rank in self.ranks)

    @property
    def p50_s(self) -> float:
        """Median step time."""
        return self._quantile(0.5)

    @property
    def p90_s(self) -> float:
        """90th percentile of the step time."""
        return self._quantile(0.9)

    def _quantile(self, fraction: float) -> float:
        steps = sorted(seconds for rank in self.ranks for seconds in rank.steps)
        return steps[math.ceil(fraction * len(steps)) - 1] if steps else 0.0

    @cached_property
    def parts(self) -> dict[StepPart, float]:
        """Mean time of each part of the step over all ranks."""
        return {
            name: statistics.fmean(rank.parts.get(name, 0.0) for rank in self.ranks)
            for name in STEP_PARTS
        }

    def share(self, *names: StepPart) -> float:
        """Return the share of these parts in the step."""
        return sum(self.parts[name] for name in names) / self.step_s if self.step_s > 0 else 0.0

    @property
    def hidden_s(self) -> float:
        """Mean communication time that overlaps with computation."""
        return statistics.fmean(rank.hidden_s for rank in self.ranks)

    @cached_property
    def traffic(self) -> tuple[CollectiveStats, ...]:
        """Collectives by kind, averaged over the ranks, longest exposed communication first."""
        return tuple(rank_comparison.mean_collective_stats(self.ranks))

    @property
    def model(self) -> ProfiledModel | None:
        """The prepared model and its workload; None if unknown."""
        return next((rank.model for rank in self.ranks if rank.model is not None), None)

    @property
    def loader(self) -> DataLoaderStats | None:
        """The DataLoader that provided the most batches."""
        loaders = (self.reader or self.ranks[0]).loaders
        return max(loaders, key=lambda loader: loader.batches, default=None)

    @property
    def reader(self) -> RankProfile | None:
        """The rank that reads batches for all, as Accelerate does with an IterableDataset."""
        reading = [rank for rank in self.ranks if rank.loaders]
        return reading[0] if len(reading) == 1 < len(self.ranks) else None

    @property
    def data_s(self) -> float:
        """Time per step spent waiting for batches; that of `reader`, if there is one."""
        return self.reader.parts.get("data", 0.0) if self.reader else self.parts["data"]

    @property
    def kind(self) -> str:
        """Kind of the devices: cuda or cpu."""
        return self.ranks[0].kind

    # ------------------------------------------------------------------------- throughput

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks together; 0 if the micro-batch size is unknown."""
        samples = (
            rank.model.samples * rank.model.accumulate if rank.model else 0 for rank in self.ranks
        )
        return sum(samples) / self.step_s if self.step_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks together; samples if the model takes no tokens."""
        length = max(1, self.model.seq_len) if self.model else 1
        return self.samples_per_s * length

    @property
    def peak_flops(self) -> float | None:
        """Specified peak FLOP/s of the device; None on CPU ranks."""
        if self.kind == "cpu":
            return None
        return self.setting.cluster.slowest_device.peak_flops(self.precision)

    @property
    def precision(self) -> str:
        """Precision of the computation: no, fp16, bf16 or fp8."""
        return (self.model and self.model.precision) or self.setting.options.precision or "no"

    @cached_property
    def straggler_details(self) -> Straggler | None:
        """The straggler that the other ranks wait for, if there is one."""
        slow, reader = rank_comparison.find_straggler(self.ranks), self.reader
        # If one rank reads for all, its data time is caused by the loader and not by the rank.
        if slow and reader and (slow.rank, slow.slowest_part) == (reader.rank, "data"):
            return None
        return slow

    @property
    def straggler(self) -> int | None:
        """Rank of the straggler, if there is one."""
        return self.straggler_details.rank if self.straggler_details else None

    @property
    def options(self) -> Options:
        """Options of the session, with the measured gradient accumulation and precision."""
        accumulate = self.model.accumulate if self.model else self.setting.options.accumulate
        return replace(self.setting.options, accumulate=accumulate, precision=self.precision)

    @property
    def notes(self) -> list[str]:
        """Notes for the user, such as what could not be measured and on which ranks."""
        by_note: dict[str, list[int]] = {}
        for rank in self.ranks:
            for note in rank.notes:
                by_note.setdefault(note, []).append(rank.rank)
        num_ranks = len(self.ranks)
        noted = [
            note if len(ranks) == num_ranks else f"{rank_sets.describe_ranks(ranks)}: {note}"
            for note, ranks in by_note.items()
        ]
        return [*self.told, *noted]
