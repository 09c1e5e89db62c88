"""Where each prepared loader stands, and how it goes on there; runs on a rank.

accelerate 1.15 forgets where an epoch was when its process ends. `install` counts the batches
that its loaders hand out and keeps the random generators of an epoch's start. From these, a
loader of another process deals out the rest of the epoch: the same permutation, the batches
that were used skipped without being read.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from torch import distributed

from nbdist.worker.training import rng_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_KEY = "_nbdist_position"
_SAMPLER = "sampler"
"""The generator that permutes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Position:
    """Between two batches of a loader."""

    epoch: int
    batches: int = 0
    """Of this rank, handed out in this epoch."""
    samples: int | None = 0
    """Of all ranks, in this epoch; None where the loader does not know its batches' size."""
    seen: int = 0
    """Samples of all ranks in all epochs, as far as known."""
    generators: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the loader itself, as they were when the epoch began."""
    random: rng_state.State | None = None
    """The rank's generators when the epoch began; None where it has not begun."""


@dataclass(slots=True, eq=False)
class _Running:
    """What is known of one loader."""

    at: Position = field(default_factory=lambda: Position(epoch=0))
    """Of the running epoch's start; its `batches` were handed out before this process."""
    batches: int = 0
    seen: int = 0
    begun: bool = False
    target: Position | None = None
    """Where the next batch shall come from."""
    turn: int = 0
    """Rises with each target."""
    iterator: object | None = None
    """Stands for the one that was begun last, as long as it exists and has batches."""


def install() -> None:
    """Count from now on; once in a process."""
    for cls in (DataLoaderShard, DataLoaderDispatcher):
        cls.__iter__ = _counting(cls.__iter__)


def now(loader: Any) -> Position:
    """Where a prepared loader stands."""
    running, total = _running(loader), batch_size(loader)
    if running.target is not None:
        return running.target
    if not running.begun or loader.end_of_dataloader:
        # The last batch is out: the next one is the first of the next epoch.
        epoch = loader.iteration + int(running.begun)
        return Position(epoch=epoch, seen=running.seen, generators=_states(loader))
    samples = None if total is None else running.batches * total
    return replace(running.at, batches=running.batches, samples=samples, seen=running.seen)


def is_at_work(loader: Any) -> bool:
    """Whether an iterator exists that is in the middle of its epoch."""
    return _running(loader).iterator is not None


def go_to(loader: Any, position: Position) -> None:
    """Let the next batch be the one after a position, also of an iterator that exists."""
    running = _running(loader)
    running.target, running.seen = position, position.seen
    running.turn += 1


def fitted(loader: Any, position: Position, world_size: int) -> tuple[Position, str]:
    """A position of as many samples for another number of ranks, and what is not equal.

    Args:
        loader: of now.
        position: of rank 0 then.
        world_size: of then.
    """
    total = batch_size(loader)
    fit, remarks = _with_permutation(position, world_size)
    if position.random is not None and (total is None or position.samples is None):
        fit = replace(position, batches=0, samples=0, random=None)
        remarks = ["a loader does not know its batches' size, and begins its epoch anew"]
    elif position.random is not None and total is not None and position.samples is not None:
        batches, more = divmod(position.samples, total)
        fit = replace(fit, batches=batches, samples=batches * total)
        if more:
            remarks.append(
                f"{more} samples of the epoch come once more: {position.samples} were used, and a"
                f" batch of all ranks is {total} now"
            )
    return fit, "; ".join(remarks)


def batch_size(loader: Any) -> int | None:
    """Samples of one batch of all ranks; None where it cannot be known."""
    try:
        found = loader.total_batch_size
    except (AttributeError, TypeError):
        return None
    return found if type(found) is int and found > 0 else None


def length(loader: Any) -> int | None:
    """Samples of its dataset; None for a stream."""
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None


def _running(loader: Any) -> _Running:
    found: _Running = vars(loader).setdefault(_KEY, _Running())
    return found


def _counting(original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """Wrap `__iter__` of a loader of accelerate's."""

    @functools.wraps(original)
    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807 - that is what it replaces
        running = _running(self)
        mine = running.iterator = object()
        try:
            yield from _batches(self, running, original)
        finally:
            if running.iterator is mine:
                running.iterator = None

    return __iter__


def _batches(
    loader: Any, running: _Running, original: Callable[[Any], Iterator[Any]]
) -> Iterator[Any]:
    """All batches of an epoch, or of the rest of one."""
    while True:
        turn, total = running.turn, batch_size(loader) or 0
        for batch in _begin(loader, running, original):
            running.batches += 1
            running.seen += total
            yield batch
            if running.turn != turn and running.target is not None:
                break  # a checkpoint was loaded meanwhile: go on where that one stands
        else:
            running.begun = False
            return


def _begin(
    loader: Any, running: _Running, original: Callable[[Any], Iterator[Any]]
) -> Iterator[Any]:
    """Begin an epoch, or go on in the middle of one."""
    target, running.target = running.target, None
    here = rng_state.state()
    if target is not None:
        loader.set_epoch(target.epoch)
        _set_states(loader, target.generators)
    at = target or Position(epoch=loader.iteration, generators=_states(loader))
    running.at = replace(at, random=at.random or here)
    running.batches, running.begun = at.batches, True
    if at.random is None:
        return original(loader)
    rng_state.restore(at.random)
    try:
        return _without(loader, at.batches, original)
    finally:
        rng_state.restore(here)


def _without(loader: Any, count: int, original: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
    """The batches of an epoch but for its first; the next one is read already, as before."""
    batches = original(loader)
    base = loader.base_dataloader
    inner = base.batch_sampler
    if inner is None or isinstance(loader, DataLoaderDispatcher):
        used = sum(1 for _ in itertools.islice(batches, count))
        return batches if used == count else iter(())
    if getattr(base, "_iterator", None) is not None:
        base._iterator = None  # noqa: SLF001 - persistent processes know the sampler of before
    skipping = _Skipping(inner, count)
    vars(base)["batch_sampler"] = skipping  # torch refuses to set it in the open
    try:
        first = list(itertools.islice(batches, 1))
    finally:
        vars(base)["batch_sampler"] = inner
        skipping.count = 0
    return itertools.chain(first, batches)


class _Skipping:
    """A batch sampler without its first batches, once."""

    def __init__(self, inner: Any, count: int) -> None:
        self._inner, self.count = inner, count

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(self._inner, self.count, None)

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _sampler(loader: Any) -> Any:
    """What permutes, inside of what makes batches and deals them out to ranks."""
    base = loader.base_dataloader
    found = base.sampler if base.batch_sampler is None else base.batch_sampler
    for name in ("batch_sampler", "sampler"):
        found = getattr(found, name, found)
    return found


def _generators(loader: Any) -> dict[str, torch.Generator]:
    """Generators of a loader, by what has them."""
    owners = {
        _SAMPLER: _sampler(loader),
        "loader": loader.base_dataloader,
        "dataset": loader.dataset,
    }
    found = {name: getattr(owner, "generator", None) for name, owner in owners.items()}
    return {name: one for name, one in found.items() if isinstance(one, torch.Generator)}


def _states(loader: Any) -> dict[str, torch.Tensor]:
    return {name: one.get_state() for name, one in _generators(loader).items()}


def _set_states(loader: Any, states: dict[str, torch.Tensor]) -> None:
    """Set a loader's generators; a sampler without one (of a single rank) gets one."""
    there = _generators(loader)
    sampler = _sampler(loader)
    if _SAMPLER in states and _SAMPLER not in there and hasattr(sampler, "generator"):
        sampler.generator = there[_SAMPLER] = torch.Generator()
    for name, state in states.items():
        if name in there:
            there[name].set_state(state)


def _with_permutation(position: Position, world_size: int) -> tuple[Position, list[str]]:
    """Give several ranks the permutation that a single one drew from its own generator.

    torch 2.13: an epoch draws the seed of its processes first, then that of the permutation.
    """
    random = position.random
    alone = world_size == 1 and distributed.get_world_size() > 1
    if not alone or _SAMPLER in position.generators:
        return position, []
    remark = "if it shuffles, a loader's next epochs are others: one rank drew them by itself"
    if random is None:
        return position, [remark]
    drawn = torch.Generator()
    drawn.set_state(random.cpu)
    seeds = [int(torch.empty((), dtype=torch.int64).random_(generator=drawn)) for _ in range(2)]
    state = torch.Generator().manual_seed(seeds[1]).get_state()
    return replace(position, generators={**position.generators, _SAMPLER: state}), [remark]
