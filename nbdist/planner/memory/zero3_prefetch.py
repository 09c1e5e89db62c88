"""Which parameters ZeRO-3 has gathered while a micro-batch goes forward and backward.

DeepSpeed 0.19.8 (runtime/zero/partitioned_param_coordinator.py) replays the trace of the
steps before: at each module it gathers what the module lacks, prefetches what comes next, a
bucket at a time and up to `max_live`, and lets go of what is not needed within `reuse`
elements. Its own rules are followed here parameter by parameter, in elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from nbdist.planner.memory import partitioning
from nbdist.planner.memory.timeline import records

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.model_spec import Group

Where = tuple[Literal["forward", "backward"], int, int]
"""Phase, group, index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The numbers that DeepSpeed's config sets, in elements."""

    prefetch: int = 50_000_000
    max_live: int = 1_000_000_000
    reuse: int = 1_000_000_000
    persist: int = 100_000
    """Parameters up to this size are never cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Elements on a rank besides its partition."""

    persistent: int
    """All the time."""
    most: Mapping[Where, int]
    """While a group is at work, the flat tensors of its gathers included."""
    least: Mapping[Where, int]
    """When a group has all it needs."""
    loss: int
    """Between forward and backward."""
    fullest: tuple[tuple[int, int], ...]
    """Group and index where, in one direction, more is gathered than at all later ones of it."""


@dataclass(frozen=True, slots=True)
class _Use:
    """A parameter at the moment a module uses it."""

    parameter: int
    size: int
    where: Where


@lru_cache(maxsize=64)
def gathered(groups: tuple[Group, ...], *, tied: bool, recompute: bool, rules: Rules) -> Gathered:
    """Return what is gathered when, from the third step on.

    Args:
        groups: the model's.
        tied: the largest parameter of the last group is used by the first one too.
        recompute: blocks go forward again before they go backward.
        rules: what DeepSpeed was told.
    """
    sizes = [(*partitioning.sizes(group), *partitioning.frozen_sizes(group)) for group in groups]
    small = [sum(size for size in of_one if size <= rules.persist) for of_one in sizes]
    uses = _uses(groups, sizes, tied=tied, recompute=recompute, persist=rules.persist)
    replay = _Replay(uses, rules)
    loss = replay.run()
    return Gathered(
        persistent=sum(group.count * of_one for group, of_one in zip(groups, small, strict=True)),
        most=replay.most,
        least=replay.least,
        loss=loss,
        fullest=tuple(_fullest(groups, replay.most)),
    )


def _fullest(groups: tuple[Group, ...], most: Mapping[Where, int]) -> list[tuple[int, int]]:
    """Group and index where more is gathered than at all later ones of the group."""
    late = [
        (number, nth) for number, one in enumerate(groups) for nth in reversed(range(one.count))
    ]
    ways: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")
    return records(
        ((way, number), (most.get((way, number, nth), 0),), (number, nth))
        for way in ways
        for number, nth in late
    )


def _uses(
    groups: tuple[Group, ...],
    sizes: list[tuple[int, ...]],
    *,
    tied: bool,
    recompute: bool,
    persist: int,
) -> list[_Use]:
    """Every use of a cut parameter, in the order of one micro-batch."""
    numbers: dict[tuple[int, int, int], int] = {}

    def of_one(phase: Literal["forward", "backward"], group: int, index: int) -> list[_Use]:
        return [
            _Use(
                numbers.setdefault((group, index, position), len(numbers)),
                size,
                (phase, group, index),
            )
            for position, size in enumerate(sizes[group])
            if size > persist
        ]

    order = [(number, index) for number, one in enumerate(groups) for index in range(one.count)]
    uses = [use for place in order for use in of_one("forward", *place)]
    head = max(of_one("forward", len(groups) - 1, 0), key=lambda use: use.size, default=None)
    for number, index in reversed(order):
        if recompute and groups[number].role == "block":
            again = of_one("backward", number, index)
            uses += again
        uses += reversed(of_one("backward", number, index))
    if tied and head is not None:
        uses.insert(0, _Use(head.parameter, head.size, ("forward", 0, 0)))
        uses.append(_Use(head.parameter, head.size, ("backward", 0, 0)))
    return uses


class _Bunch:
    """Parameters that are gathered in one message, into one flat tensor."""

    __slots__ = ("copied", "size", "waiting")

    def __init__(self, parameters: set[int], size: int) -> None:
        self.waiting, self.size, self.copied = parameters, size, False


class _Replay:
    """One micro-batch of DeepSpeed's coordinator, its trace complete."""

    def __init__(self, uses: list[_Use], rules: Rules) -> None:
        self.most: dict[Where, int] = {}
        self.least: dict[Where, int] = {}
        self._uses, self._rules = uses, rules
        self._before = [0, *accumulate(use.size for use in uses)]
        self._next = _next_uses(uses)
        self._sizes = {use.parameter: use.size for use in uses}
        self._seen_until: dict[int, int] = {}
        self._bunches: dict[int, _Bunch] = {}
        self._there: set[int] = set()
        self._available = 0
        """Elements gathered or under way, as DeepSpeed counts them."""
        self._held = 0
        """Elements of flat tensors and of the copies made out of them."""
        self._queue = 0

    def run(self) -> int:
        """Go through all uses; return the elements between forward and backward."""
        loss = 0
        self._look_ahead()  # at the model's own hook, before any of its modules
        for step, use in enumerate(self._uses):
            if use.where not in self.most:
                self._look_ahead()  # at the block's
            peak = self._fetch(use)
            self._pass(step, use)
            self._look_ahead()
            self.most[use.where] = max(self.most.get(use.where, 0), peak, self._held)
            self.least[use.where] = self._held
            self._release(step, use)
            if use.where[0] == "forward":
                loss = self._held
        return loss

    def _fetch(self, use: _Use) -> int:
        """Gather what is not there, wait for it; return the most elements meanwhile."""
        if use.parameter not in self._there:
            self._gather({use.parameter})
        bunch = self._bunches.pop(use.parameter, None)
        if bunch is None:
            return self._held
        if not bunch.copied:
            # Each parameter is copied out of the flat tensor.
            bunch.copied = True
            self._held += bunch.size
        peak = self._held
        bunch.waiting.discard(use.parameter)
        if not bunch.waiting:
            # DeepSpeed keeps the flat tensor until the last of its parameters was asked for.
            self._held -= bunch.size
        return peak

    def _gather(self, parameters: set[int]) -> None:
        size = sum(self._sizes[parameter] for parameter in parameters)
        self._there |= parameters
        self._bunches |= dict.fromkeys(parameters, _Bunch(set(parameters), size))
        self._available += size
        self._held += size

    def _pass(self, step: int, use: _Use) -> None:
        """Take a use from the queue, unless looking ahead did."""
        if self._seen_until.get(use.parameter, -1) < step:
            self._seen_until[use.parameter] = step
            self._queue = step + 1

    def _look_ahead(self) -> None:
        """Prefetch; what is there already is passed over, and counts as fetched."""
        room = min(self._rules.max_live - self._available, self._rules.prefetch)
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

    def _release(self, step: int, use: _Use) -> None:
        """Let go of a parameter, unless its next use is near or was counted as fetched."""
        if self._seen_until[use.parameter] > step:
            return
        later = self._next[step]
        if later is not None and self._before[later] - self._before[step + 1] < self._rules.reuse:
            return
        self._there.discard(use.parameter)
        self._available -= use.size
        self._held -= use.size


def _next_uses(uses: list[_Use]) -> list[int | None]:
    """For each use, the index of the same parameter's next one."""
    upcoming: dict[int, int] = {}
    found: list[int | None] = []
    for step in range(len(uses) - 1, -1, -1):
        found.append(upcoming.get(uses[step].parameter))
        upcoming[uses[step].parameter] = step
    return found[::-1]
