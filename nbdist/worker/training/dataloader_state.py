"""Saves and restores the positions of prepared data loaders.

accelerate 1.15 does not save the position within an epoch. ``patch_dataloaders`` counts the batches
that its loaders yield and keeps the state of the random generators at the start of an epoch. With
these, a loader in another process yields the rest of the epoch: the same permutation, with the
used batches skipped without reading them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, SkipBatchSampler
from torch import distributed

from nbdist.worker.library_patches import patch
from nbdist.worker.training import rng_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_KEY = "_nbdist_position"
_SAMPLER = "sampler"
"""Name of the generator that draws the permutation."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoaderPosition:
    """Position of a loader between two batches."""

    epoch: int
    batches: int = 0
    """Batches yielded on this rank in this epoch."""
    samples: int | None = 0
    """Samples of all ranks in this epoch; None if the batch size is unknown."""
    seen: int = 0
    """Samples of all ranks in all epochs, as far as known."""
    generators: dict[str, torch.Tensor] = field(default_factory=dict)
    """States of the loader's generators at the start of the epoch."""
    rng: rng_state.RngState | None = None
    """State of the rank's generators at the start of the epoch; None if it has not started."""


@dataclass(slots=True, eq=False)
class _LoaderState:
    at: LoaderPosition = field(default_factory=lambda: LoaderPosition(epoch=0))
    """Start of the current epoch; its `batches` were yielded in an earlier process."""
    batches: int = 0
    seen: int = 0
    begun: bool = False
    target: LoaderPosition | None = None
    """Position to continue from at the next batch."""
    turn: int = 0
    """Incremented with each target."""
    iterator: object | None = None
    """Token of the iterator created last, while it exists and is not exhausted."""


def patch_dataloaders() -> None:
    """Patch Accelerate's loaders to count batches; call it once per process."""
    for name in ("DataLoaderShard", "DataLoaderDispatcher"):
        patch(f"accelerate.data_loader:{name}.__iter__", _count_batches)


def position_of(loader: Any) -> LoaderPosition:
    """Return the position of a prepared loader."""
    running, total = _get_state(loader), global_batch_size(loader)
    if running.target is not None:
        return running.target
    if not running.begun or loader.end_of_dataloader:
        # The last batch was yielded: the next one is the first of the next epoch.
        epoch = loader.iteration + int(running.begun)
        return LoaderPosition(epoch=epoch, seen=running.seen, generators=_states(loader))
    samples = None if total is None else running.batches * total
    return replace(running.at, batches=running.batches, samples=samples, seen=running.seen)


def is_iterating(loader: Any) -> bool:
    """Return whether an iterator of the loader is in the middle of an epoch."""
    return _get_state(loader).iterator is not None


def seek(loader: Any, position: LoaderPosition) -> None:
    """Continue from a position at the next batch; also affects an existing iterator."""
    running = _get_state(loader)
    running.target, running.seen = position, position.seen
    running.turn += 1


def rescale_position(
    loader: Any, position: LoaderPosition, world_size: int
) -> tuple[LoaderPosition, str]:
    """Convert a position to another world size.

    Args:
        position: position of rank 0 when it was saved.
        world_size: world size when it was saved.

    Returns:
        A position with as many samples, and a note about differences, or "".
    """
    total = global_batch_size(loader)
    fit, remarks = _with_permutation(position, world_size)
    if position.rng is not None and (total is None or position.samples is None):
        fit = replace(position, batches=0, samples=0, rng=None)
        remarks = ["the batch size of a loader is unknown, so it restarts its epoch"]
    elif position.rng is not None and total is not None and position.samples is not None:
        batches, extra = divmod(position.samples, total)
        fit = replace(fit, batches=batches, samples=batches * total)
        if extra:
            remarks.append(
                f"{extra} samples of the epoch are repeated: {position.samples} were used, and the"
                f" global batch size is now {total}"
            )
    return fit, "; ".join(remarks)


def global_batch_size(loader: Any) -> int | None:
    """Return the global batch size (of all ranks); None if it is unknown."""
    try:
        total = loader.total_batch_size
    except (AttributeError, TypeError):
        return None
    return total if type(total) is int and total > 0 else None


def num_samples(loader: Any) -> int | None:
    """Return the number of samples in the data set; None for an iterable data set."""
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None


def _get_state(loader: Any) -> _LoaderState:
    state: _LoaderState = vars(loader).setdefault(_KEY, _LoaderState())
    return state


def _count_batches(original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """Wrap `__iter__` of one of Accelerate's loaders."""

    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807 - the name of the replaced method
        running = _get_state(self)
        token = running.iterator = object()
        try:
            yield from _batches(self, running, original)
        finally:
            if running.iterator is token:
                running.iterator = None

    return __iter__


def _batches(
    loader: Any, running: _LoaderState, original: Callable[[Any], Iterator[Any]]
) -> Iterator[Any]:
    """Yield the batches of an epoch, or of its rest."""
    while True:
        turn, total = running.turn, global_batch_size(loader) or 0
        for batch in _begin(loader, running, original):
            running.batches += 1
            running.seen += total
            yield batch
            if running.turn != turn and running.target is not None:
                break  # a checkpoint was loaded meanwhile: continue at its position
        else:
            running.begun = False
            return


def _begin(
    loader: Any, running: _LoaderState, original: Callable[[Any], Iterator[Any]]
) -> Iterator[Any]:
    """Start an epoch, or continue in the middle of one."""
    target, running.target = running.target, None
    current = rng_state.get_rng_state()
    if target is not None:
        loader.set_epoch(target.epoch)
        generators, sampler = _generators(loader), _sampler(loader)
        is_saved = _SAMPLER in target.generators
        if is_saved and _SAMPLER not in generators and hasattr(sampler, "generator"):
            # With world size 1 the sampler has no generator.
            sampler.generator = generators[_SAMPLER] = torch.Generator()
        for name in target.generators.keys() & generators.keys():
            generators[name].set_state(target.generators[name])
    start = target or LoaderPosition(epoch=loader.iteration, generators=_states(loader))
    running.at = replace(start, rng=start.rng or current)
    running.batches, running.begun = start.batches, True
    if start.rng is None:
        return original(loader)
    rng_state.set_rng_state(start.rng)
    try:
        return _skip_batches(loader, start.batches, original)
    finally:
        rng_state.set_rng_state(current)


def _skip_batches(
    loader: Any, count: int, original: Callable[[Any], Iterator[Any]]
) -> Iterator[Any]:
    """Return an epoch's batches after the first `count`; reads one batch ahead, as usual."""
    batches = original(loader)
    base = loader.base_dataloader
    inner = base.batch_sampler
    if inner is None or isinstance(loader, DataLoaderDispatcher):
        used = sum(1 for _ in itertools.islice(batches, count))
        return batches if used == count else iter(())
    if getattr(base, "_iterator", None) is not None:
        base._iterator = None  # noqa: SLF001 - persistent workers use the previous sampler
    skipping = _SkipFirstBatches(inner, count)
    vars(base)["batch_sampler"] = skipping  # DataLoader.__setattr__ does not allow it
    try:
        first = list(itertools.islice(batches, 1))
    finally:
        vars(base)["batch_sampler"] = inner
        skipping.skip_batches = 0
    return itertools.chain(first, batches)


class _SkipFirstBatches(SkipBatchSampler):  # type: ignore[misc]
    """Accelerate's sampler, with the attributes of the one inside of it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batch_sampler, name)


def _sampler(loader: Any) -> Any:
    """Return the innermost sampler, inside batch samplers and Accelerate's shards."""
    base = loader.base_dataloader
    sampler = base.sampler if base.batch_sampler is None else base.batch_sampler
    for name in ("batch_sampler", "sampler"):
        sampler = getattr(sampler, name, sampler)
    return sampler


def _generators(loader: Any) -> dict[str, torch.Generator]:
    owners = {
        _SAMPLER: _sampler(loader),
        "loader": loader.base_dataloader,
        "dataset": loader.dataset,
    }
    generators = {name: getattr(owner, "generator", None) for name, owner in owners.items()}
    return {
        name: generator
        for name, generator in generators.items()
        if isinstance(generator, torch.Generator)
    }


def _states(loader: Any) -> dict[str, torch.Tensor]:
    return {name: generator.get_state() for name, generator in _generators(loader).items()}


def _with_permutation(
    position: LoaderPosition, world_size: int
) -> tuple[LoaderPosition, list[str]]:
    """Give several ranks the permutation that a single rank drew from its own generator."""
    random = position.rng
    from_one_rank = world_size == 1 and distributed.get_world_size() > 1
    if not from_one_rank or _SAMPLER in position.generators:
        return position, []
    remark = (
        "if a loader shuffles, its next epochs are in another order, because a single rank drew"
        " the order from its own generator"
    )
    if random is None:
        return position, [remark]
    generator = torch.Generator()
    generator.set_state(random.cpu)
    # torch 2.13 draws the seed of the workers first, then that of the permutation.
    seeds = [int(torch.empty((), dtype=torch.int64).random_(generator=generator)) for _ in range(2)]
    state = torch.Generator().manual_seed(seeds[1]).get_state()
    return replace(position, generators={**position.generators, _SAMPLER: state}), [remark]
