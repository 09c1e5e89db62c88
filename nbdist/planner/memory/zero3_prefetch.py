"""Simulates which parameters ZeRO-3 has gathered during a micro-batch.

DeepSpeed 0.19.8 (runtime/zero/partitioned_param_coordinator.py) replays the trace of earlier steps:
at each module it gathers missing parameters, prefetches the next ones, a bucket at a time and up to
``max_live_parameters``, and releases those not used again within ``max_reuse_distance`` elements.
This module applies the same rules parameter by parameter, in elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from nbdist.planner.memory import partitioning
from nbdist.planner.memory.timeline import running_maxima

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.model_spec import LayerGroup

GatherPoint = tuple[Literal["forward", "backward"], int, int]
"""Phase, group, index of the instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchLimits:
    """Limits from DeepSpeed's config, in elements."""

    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    param_persistence_threshold: int = 100_000
    """Parameters up to this size are never partitioned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredParameters:
    """Elements on a rank in addition to its partition."""

    num_persistent: int
    """Elements that are always gathered."""
    max_at: Mapping[GatherPoint, int]
    """Peak while a group runs, including the flat tensors of its gathers."""
    min_at: Mapping[GatherPoint, int]
    """Elements when a group has everything it needs."""
    num_at_loss: int
    """Elements between forward and backward."""
    peak_blocks: tuple[tuple[int, int], ...]
    """Group and index where more is gathered than at all later ones in the same direction."""


@dataclass(frozen=True, slots=True)
class _ParameterUse:
    """A parameter when a module uses it."""

    parameter: int
    size: int
    where: GatherPoint


@lru_cache(maxsize=64)
def simulate_prefetch(
    groups: tuple[LayerGroup, ...], *, tied: bool, recompute: bool, rules: PrefetchLimits
) -> GatheredParameters:
    """Return the gathered parameters over a micro-batch, from the third step on.

    Args:
        groups: groups of the model.
        tied: True if the first group also uses the largest parameter of the last one.
        recompute: True if the forward of blocks is recomputed before their backward.
        rules: limits from DeepSpeed's config.
    """
    sizes = [
        (*partitioning.trainable_param_sizes(group), *partitioning.frozen_param_sizes(group))
        for group in groups
    ]
    small = [
        sum(size for size in of_group if size <= rules.param_persistence_threshold)
        for of_group in sizes
    ]
    uses = _uses(
        groups, sizes, tied=tied, recompute=recompute, persist=rules.param_persistence_threshold
    )
    replay = _CoordinatorReplay(uses, rules)
    loss = replay.run()
    return GatheredParameters(
        num_persistent=sum(
            group.count * of_group for group, of_group in zip(groups, small, strict=True)
        ),
        max_at=replay.most,
        min_at=replay.least,
        num_at_loss=loss,
        peak_blocks=tuple(_fullest(groups, replay.most)),
    )


def _fullest(
    groups: tuple[LayerGroup, ...], most: Mapping[GatherPoint, int]
) -> list[tuple[int, int]]:
    """Group and index where more is gathered than at all later ones of the group."""
    late = [
        (number, nth) for number, group in enumerate(groups) for nth in reversed(range(group.count))
    ]
    ways: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")
    return running_maxima(
        ((way, number), (most.get((way, number, nth), 0),), (number, nth))
        for way in ways
        for number, nth in late
    )


def _uses(
    groups: tuple[LayerGroup, ...],
    sizes: list[tuple[int, ...]],
    *,
    tied: bool,
    recompute: bool,
    persist: int,
) -> list[_ParameterUse]:
    """Every use of a partitioned parameter, in the order of one micro-batch."""
    numbers: dict[tuple[int, int, int], int] = {}

    def of_one(
        phase: Literal["forward", "backward"], group: int, index: int
    ) -> list[_ParameterUse]:
        return [
            _ParameterUse(
                numbers.setdefault((group, index, position), len(numbers)),
                size,
                (phase, group, index),
            )
            for position, size in enumerate(sizes[group])
            if size > persist
        ]

    order = [(number, index) for number, group in enumerate(groups) for index in range(group.count)]
    uses = [use for position in order for use in of_one("forward", *position)]
    head = max(of_one("forward", len(groups) - 1, 0), key=lambda use: use.size, default=None)
    for number, index in reversed(order):
        if recompute and groups[number].role == "block":
            uses += of_one("backward", number, index)
        uses += reversed(of_one("backward", number, index))
    if tied and head is not None:
        uses.insert(0, _ParameterUse(head.parameter, head.size, ("forward", 0, 0)))
        uses.append(_ParameterUse(head.parameter, head.size, ("backward", 0, 0)))
    return uses


class _GatherMessage:
    """Parameters gathered in one message, into one flat tensor."""

    __slots__ = ("copied", "size", "waiting")

    def __init__(self, parameters: set[int], size: int) -> None:
        self.waiting, self.size, self.copied = parameters, size, False


class _CoordinatorReplay:
    """One micro-batch of DeepSpeed's coordinator with a complete trace."""

    def __init__(self, uses: list[_ParameterUse], rules: PrefetchLimits) -> None:
        self.most: dict[GatherPoint, int] = {}
        self.least: dict[GatherPoint, int] = {}
        self._uses, self._rules = uses, rules
        self._before = [0, *accumulate(use.size for use in uses)]
        self._next = _next_uses(uses)
        self._sizes = {use.parameter: use.size for use in uses}
        self._seen_until: dict[int, int] = {}
        self._bunches: dict[int, _GatherMessage] = {}
        self._there: set[int] = set()
        self._available = 0
        """Elements gathered or in flight, as DeepSpeed counts them."""
        self._held = 0
        """Elements of flat tensors and of the copies made from them."""
        self._queue = 0

    def run(self) -> int:
        """Simulate all uses; return the elements between forward and backward."""
        loss = 0
        self._look_ahead()  # in the model's own hook, before any of its modules
        for step, use in enumerate(self._uses):
            if use.where not in self.most:
                self._look_ahead()  # in the block's hook
            peak = self._fetch(use)
            self._pass(step, use)
            self._look_ahead()
            self.most[use.where] = max(self.most.get(use.where, 0), peak, self._held)
            self.least[use.where] = self._held
            self._release(step, use)
            if use.where[0] == "forward":
                loss = self._held
        return loss

    def _fetch(self, use: _ParameterUse) -> int:
        """Gather missing parameters and wait for them; return the peak meanwhile."""
        if use.parameter not in self._there:
            self._gather({use.parameter})
        message = self._bunches.pop(use.parameter, None)
        if message is None:
            return self._held
        if not message.copied:
            # Each parameter is copied out of the flat tensor.
            message.copied = True
            self._held += message.size
        peak = self._held
        message.waiting.discard(use.parameter)
        if not message.waiting:
            # DeepSpeed keeps the flat tensor until the last of its parameters is fetched.
            self._held -= message.size
        return peak

    def _gather(self, parameters: set[int]) -> None:
        size = sum(self._sizes[parameter] for parameter in parameters)
        self._there |= parameters
        self._bunches |= dict.fromkeys(parameters, _GatherMessage(set(parameters), size))
        self._available += size
        self._held += size

    def _pass(self, step: int, use: _ParameterUse) -> None:
        """Take a use from the queue, unless the prefetch did."""
        if self._seen_until.get(use.parameter, -1) < step:
            self._seen_until[use.parameter] = step
            self._queue = step + 1

    def _look_ahead(self) -> None:
        """Prefetch; parameters that are already gathered are skipped and count as fetched."""
        room = min(
            self._rules.max_live_parameters - self._available, self._rules.prefetch_bucket_size
        )
        parameters: set[int] = set()
        size = 0
        while self._queue < len(self._uses) and size < room:
            ahead = self._uses[self._queue]
            self._seen_until[ahead.parameter] = self._queue
            self._queue += 1
            if ahead.parameter not in self._there and ahead.parameter not in parameters:
                parameters.add(ahead.parameter)
                size += ahead.size
        if parameters:
            self._gather(parameters)

    def _release(self, step: int, use: _ParameterUse) -> None:
        """Release a parameter, unless its next use is near or was counted as fetched."""
        if self._seen_until[use.parameter] > step:
            return
        later = self._next[step]
        if (
            later is not None
            and self._before[later] - self._before[step + 1] < self._rules.max_reuse_distance
        ):
            return
        self._there.discard(use.parameter)
        self._available -= use.size
        self._held -= use.size


def _next_uses(uses: list[_ParameterUse]) -> list[int | None]:
    """For each use, the index of the same parameter's next use."""
    upcoming: dict[int, int] = {}
    next_uses: list[int | None] = []
    for step in range(len(uses) - 1, -1, -1):
        next_uses.append(upcoming.get(uses[step].parameter))
        upcoming[uses[step].parameter] = step
    return next_uses[::-1]
