"""From old ranks to new ones: a switch that needs new processes; runs on both.

    old ranks   checking    nothing is touched: can everything be made again, do all ranks agree
                packing     what can be pickled (`parcel`), tried at once
                writing     each rank its own share of weights and optimizer state, and its parcel
    (the kernel ends the old ranks and starts the new ones)
    new ranks   unpacking   what models and optimizers are made from
                building    accelerators, models and what belongs to them are made and prepared
                loading     each rank reads what its engine wants
                verifying   the digest of each tensor is compared with the one of before
                binding     the user's variables; random generators come last

The old ranks agree after each phase; of the new ones each says at once what fails. Nothing is
taken from the old ranks before all is written, and the files are enough to make them again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import sys
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler, get_sampler
from torch import distributed

from nbdist import checkpoint
from nbdist.errors import SwitchError
from nbdist.hardware import discovery
from nbdist.state import collectives, digest, optimizer_recipes, reshard, shard_io
from nbdist.state.shards import Shard, bytes_of
from nbdist.worker.engines import accelerator as accelerators
from nbdist.worker.engines import wrap_policy
from nbdist.worker.memory import memory_check, memory_probe
from nbdist.worker.operations import namespace_pickle, switch
from nbdist.worker.operations.transaction import CHECKING, Alone, Phases
from nbdist.worker.training import dataloader_state, model_cleanup, prepared_models, rng_state
from nbdist.worker.training.model_recipe import Mould
from nbdist.worker.training.model_state import Carried

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence
    from pathlib import Path

    from nbdist.checkpoint import FilePart, Manifest
    from nbdist.strategies import Options
    from nbdist.worker.namespace import Beginning
    from nbdist.worker.operations.namespace_pickle import Known
    from nbdist.worker.training.dataloader_state import Position
    from nbdist.worker.training.prepared_models import Trained

STATE = "state"
"""Name of the checkpoint in the folder."""
_PLAIN = (int, float, str, tuple, type, types.ModuleType, types.NoneType)
"""Of what a rank's namespace has from the start these are no objects of the rank's own."""
_DEFINITIONS = (types.ModuleType, types.FunctionType, type)
"""Variables that come first: what is unpacked after them may call them."""
_ENGINES_OWN = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "NBDIST_", "CUDA_VISIBLE_DEVICES", "OMP_")
"""Environment that is not the user's to carry."""


@dataclass(slots=True, kw_only=True)
class Report:
    """What one half of a handover did on this rank."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By phase."""
    folder: str = ""
    """Where the files are."""
    state_bytes: int = 0
    """Of this rank's share of weights and optimizer state."""
    sent_bytes: int = 0
    """Written into the folder."""
    verified: int = 0
    bound: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    not_carried: dict[str, str] = field(default_factory=dict)
    will_differ: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _First:
    """What a new rank needs before it can build anything."""

    world_size: int
    random: rng_state.State
    next_step: int
    accelerators: list[tuple[bool, dict[str, Any], dict[str, Any]]]
    """Of each: whether it is the rank's own, its arguments, and what outlives its engine."""
    models: list[tuple[int, Mould]]
    """Each with the number of its accelerator."""
    fed: memory_probe.Call
    """To the model that was prepared last: a plan for the new ranks asks for the batch."""


@dataclass(slots=True, kw_only=True)
class _Loader:
    """A prepared loader."""

    accelerator: int
    given: Any
    """The user's."""
    position: Position
    total_batch: int | None
    seed: int | None
    """Of Accelerate's SeedableRandomSampler, which would draw another one."""


class Leaving:
    """The old ranks' half: everything into files; nothing is changed."""

    def __init__(
        self,
        then: Options,
        names: MutableMapping[str, Any],
        beginning: Beginning,
        *,
        tell: Callable[[str], object],
        world_size: int,
        reset_optimizer: bool = False,
    ) -> None:
        """Know what is to come.

        Args:
            then: checked options of the new ranks.
            names: the user's variables.
            beginning: of this rank.
            tell: told of each phase.
            world_size: number of the new ranks.
            reset_optimizer: leave the state of the optimizers behind.
        """
        self._phase = Phases("the switch", tell, SwitchError)
        self.report = Report(seconds=self._phase.seconds)
        self._then, self._names, self._beginning = then, names, beginning
        self._world_size, self._reset = world_size, reset_optimizer
        self._rank = distributed.get_rank()
        self._share: dict[str, Shard] = {}

    def run(self, folders: Sequence[Path]) -> Report:
        """Write everything into the first of the folders with room.

        Raises:
            SwitchError: on all ranks alike; all is as it was.
        """
        generators = rng_state.state()
        try:
            with self._phase(CHECKING):
                model_cleanup.let_go()
                trained = prepared_models.everything()
                for one in trained:
                    switch.check(one, self._then, reset_optimizer=self._reset)
                    hardware = accelerators.current().hardware
                    self.report.notes += [
                        *memory_check.check(one, self._then, hardware, world_size=self._world_size),
                        *switch.left_behind(one),
                        *_hooks_left(one),
                    ]
            with self._phase("packing"):
                packed = self._packed(trained, generators)
            with self._phase("making room"):
                plan = namespace_pickle.planned(packed, self._rank, collectives.everyones)
                folder = _with_room(folders, bytes_of(self._share) + plan.size_bytes)
            self._write(packed, plan, folder)
        finally:
            rng_state.restore(generators)
        self.report.folder = str(folder)
        self.report.sent_bytes = bytes_of(self._share) + plan.size_bytes
        self._say_who_is_gone()
        return self.report

    # -- packing

    def _packed(
        self, trained: list[Trained], generators: rng_state.State
    ) -> namespace_pickle.Parcel:
        """Pack this rank but for the shares of its models; note what cannot be."""
        built = accelerators.built()
        first = _First(
            world_size=distributed.get_world_size(),
            random=generators,
            next_step=self._beginning.reporter.next_step,
            accelerators=[_made_from(one, self._beginning) for one in built],
            models=[
                (_place(one.owner, built), self._mould(number, one))
                for number, one in enumerate(trained)
            ],
            fed=memory_probe.fed(),
        )
        schedules = [[one.scheduler for one in trained_.schedules] for trained_ in trained]
        loaders = [(one, _loader(one, built)) for one in prepared_models.loaders()]
        second = schedules, [recipe for _, recipe in loaders if recipe is not None]
        prepared = [one for one, recipe in loaders if recipe is not None]
        known = _known(self._beginning, built, trained, prepared)
        mine = self._variables()
        packed = self._packed_with(first, second, mine, known)
        self._summarise(first, second, len(mine) - len(self.report.not_carried))
        return packed

    def _packed_with(
        self, first: _First, second: object, mine: dict[str, Any], known: list[Known]
    ) -> namespace_pickle.Parcel:
        """Pack and try, without the variables that cannot be: they are noted with the reason."""
        early = {name for name, value in mine.items() if isinstance(value, _DEFINITIONS)}
        own = [
            namespace_pickle.Stage(_process(self._beginning.environ), 0),
            namespace_pickle.Stage(first, 1),
            namespace_pickle.Stage(second, 2),
        ]
        while True:
            left = [name for name in mine if name not in self.report.not_carried]
            stages = [
                own[0],
                *(namespace_pickle.Stage(mine[name], 0, name) for name in left if name in early),
                *own[1:],
                *(
                    namespace_pickle.Stage(mine[name], 3, name)
                    for name in left
                    if name not in early
                ),
            ]
            try:
                made = namespace_pickle.pack(stages, known, self._names)
                namespace_pickle.tried(made, known, self._beginning.names)
            except namespace_pickle.StageError as error:
                name = stages[error.place].name
                if not name:
                    message = f"what the training is made of cannot be carried: {error}"
                    raise SwitchError(message) from error
                if error.too_early:
                    early.discard(name)
                else:
                    self.report.not_carried[name] = str(error)
            else:
                return made

    def _mould(self, number: int, one: Trained) -> Mould:
        carried = Carried(number, one)
        share = carried.share(optimizers=not self._reset)
        self._share |= share
        self.report.state_bytes += bytes_of(share)
        self._share |= carried.share_of_buffers()  # so that the files are a whole checkpoint
        return Mould.of(one, carried, share, reset_optimizer=self._reset, hooks=False)

    def _variables(self) -> dict[str, Any]:
        """The user's own: not what every rank has from its start, nor what IPython keeps."""
        own, nothing = self._beginning.names, object()
        return {
            name: value
            for name, value in self._names.items()
            if own.get(name, nothing) is not value and not _is_ipythons(name)
        }

    # -- writing

    def _write(
        self, packed: namespace_pickle.Parcel, plan: namespace_pickle.Plan, folder: Path
    ) -> None:
        """Write the parcels, and the shares of all ranks as a checkpoint."""
        keys = reshard.catalogue(self._share)
        digests = digest.agreed(self._share)
        begun = parts = None
        with self._phase("opening files"):
            if keys and self._rank == 0:
                begun = checkpoint.begin(folder, STATE)
        draft = collectives.everyones(begun)[0]
        with self._phase("writing"):
            namespace_pickle.write(packed, plan, folder, self._rank)
            if draft is not None:
                parts = shard_io.write(self._share, draft, self._rank, "model")
        everyones = collectives.everyones(parts)
        with self._phase("closing files"):
            if begun is not None:
                made = {
                    name: checkpoint.Key(
                        shape=tuple(one.shape),
                        dtype=str(one.dtype).removeprefix("torch."),
                        digest=digests[name],
                    )
                    for name, one in keys.items()
                }
                written = tuple(part for theirs in everyones for part in theirs)
                checkpoint.commit(begun, STATE, _manifest(made, written))

    # -- the report

    def _summarise(self, first: _First, second: Any, variables: int) -> None:
        words = [] if first.models else ["no model was prepared yet"]
        for (_, mould), schedules in zip(first.models, second[0], strict=True):
            words += mould.words(reset_optimizer=self._reset)
            words += [type(one).__name__ for one in schedules]
            words += [f"step {mould.steps}"] if mould.steps else []
        count = len(second[1])
        words += [f"{count} loader{'s' * (count != 1)}"] if count else []
        words.append(f"{variables} variable{'s' * (variables != 1)}")
        self.report.carried = words

    def _say_who_is_gone(self) -> None:
        """Say what only ranks have that will be no more; a collective."""
        everyones = collectives.everyones((set(self._variables()), self.report.not_carried))
        world_size = len(everyones)
        lost: dict[str, str] = {}
        for name in dict.fromkeys(name for _, bad in everyones for name in bad):
            whose = [rank for rank, (_, bad) in enumerate(everyones) if name in bad]
            reason = everyones[whose[0]][1][name]
            lost[name] = reason if len(whose) == world_size else f"{reason} ({_ranks(whose)})"
        gone = range(self._world_size, world_size)
        staying = set().union(*(names for names, _ in everyones[: self._world_size]))
        for name in sorted({name for rank in gone for name in everyones[rank][0]} - staying):
            lost[name] = f"only {_ranks(gone)} had it"
        self.report.not_carried = lost
        if gone:
            self.report.will_differ.append(
                f"{_ranks(gone)} end{'s' * (len(gone) == 1)} with random generators and values of"
                " variables of their own"
            )


class Arriving:
    """The new ranks' half: everything out of the files."""

    def __init__(
        self,
        folder: Path,
        names: MutableMapping[str, Any],
        beginning: Beginning,
        *,
        tell: Callable[[str], object],
        old_world_size: int,
    ) -> None:
        """Know where the files are.

        Args:
            folder: that the old ranks have written.
            names: the user's variables to be.
            beginning: of this rank.
            tell: told of each phase.
            old_world_size: number of the old ranks.
        """
        self._phase = Alone("the switch", tell, SwitchError)
        self.report = Report(seconds=self._phase.seconds)
        self._folder, self._names, self._beginning = folder, names, beginning
        self._old_world_size, self._rank = old_world_size, distributed.get_rank()
        self._from = self._rank if self._rank < old_world_size else 0
        self._built: list[Accelerator] = []
        self._made: list[Any] = []
        """Holds what was prepared until the user's variables do."""

    def run(self) -> Report:
        """Make everything again.

        Raises:
            SwitchError: on this rank; the new ranks are of no use then.
        """
        device: torch.device = self._beginning.names["device"]
        with self._phase("unpacking"):
            arrived = namespace_pickle.Arrived(self._folder, self._from, device)
            arrived.namespace(self._names)
            for name, one in self._beginning.names.items():
                if not isinstance(one, _PLAIN):
                    arrived.known["name", name] = one
            first = self._first(arrived)
        with self._phase("building"):
            self._build(first, arrived)
        trained = prepared_models.everything()
        with self._phase("loading"):
            kept = [self._load(n, one, first) for n, one in enumerate(trained)]
        with self._phase("verifying"):
            self.report.verified = sum(
                Carried(number, one).verify(mould.digests, kept[number], mould.counts)
                for number, (one, (_, mould)) in enumerate(zip(trained, first.models, strict=True))
            )
        with self._phase("binding"):
            self.report.bound += arrived.bind()
            # cloudpickle sets it in the globals of each function.
            self._names["__builtins__"] = self._beginning.names["__builtins__"]
        self._made.clear()
        self._set_generators(first)
        return self.report

    def _first(self, arrived: namespace_pickle.Arrived) -> _First:
        """Unpack what comes first, and set what belongs to the process."""
        # Modules of the user's own may lie where only the old ranks looked for them.
        _restore(arrived.next())
        self.report.bound += arrived.bind()
        first: _First = arrived.next()
        self._beginning.reporter.next_step = first.next_step
        return first

    def _build(self, first: _First, arrived: namespace_pickle.Arrived) -> None:
        """Make and prepare everything."""
        for place, (own, given, kept) in enumerate(first.accelerators):
            made = self._beginning.names["accelerator"] if own else Accelerator(**given)
            if own:
                made._build(())  # noqa: SLF001 - as the first prepare() does
            vars(made).update(kept)
            self._built.append(made)
            arrived.known["accelerator", place] = made
        cast = [mould.cast() for _, mould in first.models]
        for number, (_, raws) in enumerate(cast):
            for place, raw in enumerate(raws):
                arrived.known[number, "given", place] = raw
        schedules, loaders = arrived.next()
        for number, (model, raws) in enumerate(cast):
            owner = self._built[first.models[number][0]]
            self._prepare(owner, model, raws, schedules[number])
            known = switch.parts(number, prepared_models.everything()[-1])
            arrived.known.update(known)
            for place, raw in enumerate(raws):
                arrived.known[number, "given", place] = raw
            for place, wrapper in enumerate(prepared_models.everything()[-1].schedules):
                arrived.known["scheduler", number, place] = wrapper
        memory_probe.fed_like(first.fed)
        for place, loader in enumerate(loaders):
            arrived.known["loader", place] = self._loader(loader)
        self._say_how_rates_go_on()

    def _prepare(
        self,
        owner: Accelerator,
        bare: torch.nn.Module,
        raws: list[Any],
        schedules: list[Any],
    ) -> None:
        for schedule in schedules:
            for one in optimizer_recipes.schedules(schedule):
                if hasattr(one, "optimizer"):
                    # torch 2.13 would warn that its first step came too early.
                    one.optimizer._opt_called = True  # noqa: SLF001
        with wrap_policy.filled_later():
            self._made += owner.prepare(bare, *raws, *schedules, None)
        self._made += [bare, raws]

    def _say_how_rates_go_on(self) -> None:
        """Say by what schedulers count: accelerate 1.15 steps them once for each rank."""
        now = distributed.get_world_size()
        counting = {
            type(wrapper.scheduler).__name__
            for one in prepared_models.everything()
            for wrapper in one.schedules
            if wrapper.step_with_optimizer and not wrapper.split_batches
        }
        if counting and now != self._old_world_size:
            self.report.will_differ.append(
                f"{', '.join(sorted(counting))}: {now} steps of the schedule (before:"
                f" {self._old_world_size}) at each optimizer step, so that the rate goes on by"
                " samples while the batch of each rank stays"
            )

    def _loader(self, recipe: _Loader) -> Any:
        """Prepare a loader, and let it go on where it was."""
        made = self._built[recipe.accelerator].prepare_data_loader(recipe.given)
        prepared_models.know_loader(made, recipe.given)
        self._made.append(made)
        sampler = get_sampler(made)
        if isinstance(sampler, SeedableRandomSampler) and recipe.seed is not None:
            sampler.initial_seed = recipe.seed
        position, remark = dataloader_state.fitted(made, recipe.position, self._old_world_size)
        made.iteration = position.epoch
        dataloader_state.go_to(made, position)
        total = dataloader_state.batch_size(made)
        if total != recipe.total_batch:
            self.report.will_differ.append(
                f"the batch of all ranks together: {recipe.total_batch} -> {total} samples, as"
                " each rank's stays"
            )
        if remark:
            self.report.will_differ.append(remark)
        return made

    # -- state

    def _load(self, number: int, one: Trained, first: _First) -> dict[str, Shard]:
        """Fill a model; returns what was written in another type, as it was written."""
        _, mould = first.models[number]
        carried = Carried(number, one)
        path = self._folder / STATE
        with checkpoint.Opened.at(path) as opened:
            manifest = opened.manifest
        carried.allocate(_described(manifest, mould.digests))
        wanted = carried.wanted()
        absent = {key for key in wanted if key.startswith("optim") and key not in manifest.keys}
        for key in absent:
            for piece in wanted[key].pieces:
                piece.view.zero_()
        there = {key: shard for key, shard in wanted.items() if key not in absent}
        shard_io.read(path, manifest, there)
        carried.settle(mould.counts)
        mould.fill(one)
        return _as_written(path, manifest, carried.share(), set(mould.digests))

    def _set_generators(self, first: _First) -> None:
        """Go on with the generators of the old rank of this number, or with derived ones."""
        rng_state.restore(first.random)
        world_size = distributed.get_world_size()
        if world_size > self._old_world_size:
            new = range(self._old_world_size, world_size)
            self.report.will_differ.append(
                f"{_ranks(new)} {'are' if len(new) > 1 else 'is'} new: random generators begin"
                " with seeds derived from rank 0's, variables are those of rank 0"
            )
        if self._rank < self._old_world_size:
            return
        octets = first.random.cpu.numpy().tobytes() + str(self._rank).encode()
        seed = int.from_bytes(hashlib.blake2b(octets, digest_size=4).digest(), "little")
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the one that users' code draws from
        torch.manual_seed(seed)


# What a rank is made of


def _hooks_left(one: Trained) -> list[str]:
    """Say which hooks stay in their process."""
    hooked = [
        type(owned.raw).__name__ for owned in one.living if optimizer_recipes.hooks(owned.raw)
    ]
    return [f"step hooks of {name} are not carried; register them again" for name in hooked]


def _known(
    beginning: Beginning,
    built: list[Accelerator],
    trained: list[Trained],
    prepared: list[Any],
) -> list[Known]:
    """Objects that a new rank makes by itself."""
    found = [
        namespace_pickle.Known(one, ("name", name), 0)
        for name, one in beginning.names.items()
        if not isinstance(one, _PLAIN)
    ]
    found += [
        namespace_pickle.Known(one, ("accelerator", place), 2) for place, one in enumerate(built)
    ]
    for number, one in enumerate(trained):
        for place, owned in enumerate(one.living):
            if (given := owned.given()) is not None:
                found.append(namespace_pickle.Known(given, (number, "given", place), 2))
        for key, part in switch.parts(number, one).items():
            found.append(namespace_pickle.Known(part, key, 3))
        for place, wrapper in enumerate(one.schedules):
            found.append(namespace_pickle.Known(wrapper, ("scheduler", number, place), 3))
    found += [
        namespace_pickle.Known(one, ("loader", place), 3) for place, one in enumerate(prepared)
    ]
    return found


def _made_from(
    one: Accelerator, beginning: Beginning
) -> tuple[bool, dict[str, Any], dict[str, Any]]:
    """How an Accelerator is made again."""
    kept = {name: vars(one)[name] for name in ("step", "flag_tensor") if name in vars(one)}
    own = one is beginning.names["accelerator"]
    return own, dict(vars(one).get("_nbdist_asked", {})), kept


def _place(one: Accelerator, built: list[Accelerator]) -> int:
    return next(place for place, other in enumerate(built) if other is one)


def _loader(one: Any, built: list[Accelerator]) -> _Loader | None:
    """How a prepared loader is made again; None where its Accelerator is gone or the user's."""
    given = prepared_models.given_loader(one)
    owners = [
        place
        for place, owner in enumerate(built)
        if any(other is one for other in owner._dataloaders)  # noqa: SLF001
    ]
    if given is None or not owners:
        return None
    sampler = get_sampler(one)
    return _Loader(
        accelerator=owners[0],
        given=given,
        position=_position(one),
        total_batch=dataloader_state.batch_size(one),
        seed=sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None,
    )


def _position(one: Any) -> Position:
    """Where a loader goes on: behind its iterator at work, else at the begin of an epoch."""
    at = dataloader_state.now(one)
    if at.batches and not dataloader_state.is_at_work(one):
        return dataloader_state.Position(epoch=one.iteration, seen=at.seen)
    return at


def _is_ipythons(name: str) -> bool:
    """Whether a variable holds IPython's history."""
    digits = name.lstrip("_").removeprefix("i")
    return name.startswith("_") and (name.strip("_") in {"", "i", "ii", "iii"} or digits.isdigit())


# The process


def _process(before: Mapping[str, str]) -> dict[str, Any]:
    """What the user may have set in the process, besides variables."""
    changed = {
        name: value
        for name, value in os.environ.items()
        if before.get(name) != value and not name.startswith(_ENGINES_OWN)
    }
    return {
        "cwd": os.getcwd(),  # noqa: PTH109 - plain
        "path": list(sys.path),
        "environ": changed,
        "unset": [name for name in before if name not in os.environ],
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "grad": torch.is_grad_enabled(),
    }


def _restore(process: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.chdir(process["cwd"])
    sys.path[:] = process["path"]
    os.environ.update(process["environ"])
    for name in process["unset"]:
        os.environ.pop(name, None)
    torch.set_default_dtype(process["dtype"])
    torch.set_float32_matmul_precision(process["matmul"])
    torch.use_deterministic_algorithms(process["deterministic"])
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = process["cudnn"]
    torch.set_grad_enabled(process["grad"])


# Files


def _with_room(folders: Sequence[Path], needed: int) -> Path:
    """The first folder with room for what all ranks write; a collective.

    Raises:
        SwitchError: none has.
    """
    total = sum(collectives.everyones(needed))
    said = []
    for folder in folders:
        free = shutil.disk_usage(folder).free
        if folder.is_relative_to("/dev/shm"):  # noqa: S108 - its files take the host's memory
            free = min(free, discovery.host_free_bytes())
        # rank 0 decides: the others may see the room shrink already
        free = collectives.everyones(free)[0]
        if free > total:
            return folder
        said.append(f"{folder.parent} has {free / 2**30:.1f} GiB free")
    message = (
        f"state and variables take {total / 2**30:.1f} GiB on their way to new ranks, and"
        f" {', '.join(said)}; free room there, or set TMPDIR to a folder with room."
    )
    raise SwitchError(message)


def _manifest(keys: dict[str, checkpoint.Key], written: tuple[FilePart, ...]) -> Manifest:
    return checkpoint.Manifest(
        backend=accelerators.current().options.backend,
        world_size=distributed.get_world_size(),
        step=max((one.steps for one in prepared_models.everything()), default=0),
        keys=keys,
        files=written,
    )


def _described(manifest: Manifest, keys: Mapping[str, object]) -> dict[str, Shard]:
    """What is written, without anything of it."""
    return {
        name: Shard(shape=key.shape, dtype=getattr(torch, key.dtype))
        for name, key in manifest.keys.items()
        if name in keys
    }


def _as_written(
    path: Path, manifest: Manifest, share: Mapping[str, Shard], keys: set[str]
) -> dict[str, Shard]:
    """Read this rank's share of what the new engine keeps in another type than the old one."""
    found = {}
    for name, shard in share.items():
        dtype = getattr(torch, manifest.keys[name].dtype) if name in keys else shard.dtype
        if dtype != shard.dtype:
            pieces = tuple(
                piece._replace(view=torch.empty(piece.stop - piece.start, dtype=dtype))
                for piece in shard.pieces
            )
            found[name] = Shard(shape=shard.shape, dtype=dtype, pieces=pieces)
    shard_io.read(path, manifest, found)
    return found


def _ranks(ranks: Sequence[int]) -> str:
    """Say "rank 1" or "ranks 2-3"."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) == 1:
        return f"rank {first}"
    joined = list(ranks) == list(range(first, last + 1))
    return f"ranks {first}-{last}" if joined else f"ranks {', '.join(map(str, ranks))}"
