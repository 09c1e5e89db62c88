"""A checkpoint into the models that are prepared now, as one transaction; runs on a rank.

    checking     nothing is touched: names, shapes, classes, groups; all ranks agree
    comparing    every file's bytes with their checksum, each rank a share of the files
    keeping      a copy of this rank's share of the present state in host memory
    downloading  of a URL: the files that ranks of this machine want, with their checksums
    reading      each rank reads what it wants, in place
    settling     the engines renew their copies; options, schedules, loaders
    verifying    the digest of each tensor is compared with the manifest's

After a failure from `reading` on, the present state is put back from the copy. Random
generators come last, for all of this may draw. Nothing in a checkpoint is code.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from nbdist import checkpoint
from nbdist.checkpoint import Brought, Opened, Url
from nbdist.checkpoint.names import shown
from nbdist.errors import CheckpointError
from nbdist.state import collectives, digest, optimizer_recipes, reshard, shard_io, shards
from nbdist.state.shards import Shard, bytes_of
from nbdist.worker.operations import save
from nbdist.worker.operations.transaction import CHECKING, Phases, Told
from nbdist.worker.training import (
    dataloader_state,
    grad_scaler,
    prepared_models,
    rng_state,
    training_metadata,
)
from nbdist.worker.training.dataloader_state import Position
from nbdist.worker.training.grad_scaler import Scale
from nbdist.worker.training.model_state import Carried, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from nbdist.checkpoint import Key, Manifest, Optimizer
    from nbdist.worker.training.model_state import Counts
    from nbdist.worker.training.prepared_models import Trained

_LISTED = 10
_GENERATOR_NUMBERS = 1 << 16
"""Of a random generator's state, at most."""
_WEIGHTS_ONLY = "load with --weights-only (weights_only=True)"


@dataclass(slots=True, kw_only=True)
class Report:
    """What a load did on this rank."""

    step: int = 0
    backend: str = ""
    """That wrote it."""
    world_size: int = 0
    """That wrote it."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase."""
    read_bytes: int = 0
    verified: int = 0
    """Tensors whose digest is the saved one."""
    loaded: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is not as it was saved, and why."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for a message."""
        return asdict(self)


@dataclass(slots=True, kw_only=True, eq=False)
class _Before:
    """One model's state before the load."""

    tensors: dict[str, Shard]
    buffers: dict[str, torch.Tensor]
    counts: Counts
    options: list[list[optimizer_recipes.Options]]
    schedulers: list[dict[str, Any]]
    scale: Scale | None
    steps: int


class Load:
    """One load."""

    def __init__(
        self,
        path: Path | Url,
        checkpoint_id: str,
        *,
        folder: Path,
        tell: Callable[[str], None],
        weights_only: bool = False,
    ) -> None:
        """Know what is to come.

        Args:
            path: of the checkpoint.
            checkpoint_id: of the manifest that the notebook has seen there.
            folder: private, of this machine's ranks: for what has to come from a URL.
            tell: told of each phase.
            weights_only: leave optimizers, schedulers, generators and loaders as they are.
        """
        self._place, self._id, self._tell = path, checkpoint_id, tell
        self._folder = folder / f"load-{checkpoint_id}"
        self._brought: Brought | None = None
        self._weights_only = weights_only
        self._trained: list[Trained] = []
        self._carried: list[Carried] = []
        self._before: list[_Before] = []
        self._places: list[tuple[Any, Position]] = []
        self._random: rng_state.State | None = None
        self._phase = Phases("the load", tell, CheckpointError)
        self.report = Report(seconds=self._phase.seconds)

    def run(self) -> Report:
        """Load, or leave everything as it was.

        Raises:
            CheckpointError: on all ranks alike: what does not fit, or which phase failed.
        """
        try:
            return self._run()
        finally:
            self._before.clear()
            shards.give_back()
            if self._brought is not None:
                self._brought.remove()

    def _run(self) -> Report:
        generators = rng_state.state()
        with self._phase(CHECKING):
            self._path = self._here()
            self._manifest = self._opened()
            self._trained = prepared_models.everything()
            self._check_models()
        with self._phase(CHECKING):
            self._carried = [Carried(number, one) for number, one in enumerate(self._trained)]
            self._check_tensors()
            if not self._weights_only:
                self._check_training()
        if self._brought is None:
            self._compare()
        with self._phase("keeping"):
            live = [one.share(optimizers=not self._weights_only) for one in self._carried]
            counts = [one.counts() for one in self._carried]
        with self._phase("keeping"):
            for shares, scalars, (carried, one) in zip(live, counts, self._pairs(), strict=True):
                self._before.append(_kept(carried, one, shares, scalars))
            places = [dataloader_state.now(loader) for loader in prepared_models.loaders()]
        try:
            with self._phase("reading"):
                targets = [self._target(carried) for carried in self._carried]
            if self._brought is not None:
                with self._phase("downloading"):
                    self._bring({key: one for target in targets for key, one in target.items()})
            with self._phase("reading"):
                for target in targets:
                    told = Told(self._tell, "reading", bytes_of(target))
                    self.report.read_bytes += shard_io.read(
                        self._path, self._manifest, target, told
                    )
            with self._phase("settling"):
                self._settle()
            with self._phase("verifying"):
                self._verify()
        except CheckpointError as error:
            self._go_back(error, places)
            raise
        finally:
            rng_state.restore(generators)
        if self._random is not None:
            rng_state.restore(self._random)
        self._summarise()
        return self.report

    def _pairs(self) -> list[tuple[Carried, Trained]]:
        return list(zip(self._carried, self._trained, strict=True))

    def _compare(self) -> None:
        """Compare all files with their checksums, each rank its share."""
        with self._phase("comparing"):
            share = checkpoint.share(self._manifest, collectives.rank(), collectives.size())
            sizes = {one.name: one.size_bytes for one in self._manifest.files}
            total = sum(sizes[name] for name in share)
            told = Told(self._tell, "comparing", total)
            checkpoint.verify(self._path, files=share, told=told)

    # -- at a URL

    def _here(self) -> Path:
        """The folder to read from; of a URL only what tells where everything lies, so far."""
        if not isinstance(self._place, Url):
            return self._place
        self._brought = Brought(self._place, self._folder)
        return self._folder

    def _bring(self, target: Mapping[str, Shard]) -> None:
        """Have the files here that are wanted, where they are not."""
        if self._brought is None or not target:
            return
        names = shard_io.wanted(self._path, self._manifest, target)
        total = sum(one.size_bytes for one in self._manifest.files if one.name in names)
        told = Told(self._tell, "downloading", total)
        self._brought.bring(
            names, told, first=collectives.rank() * len(names) // collectives.size()
        )

    # -- checking

    def _opened(self) -> Manifest:
        with Opened.at(self._path) as opened:
            if opened.manifest.id != self._id:
                raise CheckpointError(f"{self._path} was replaced by a newer save; load it again.")
            return opened.manifest

    def _check_models(self) -> None:
        if not self._trained:
            raise CheckpointError(
                "no model is prepared to load into; run the cell with accelerator.prepare(model,"
                " optimizer, ...) first, under any backend."
            )
        for one in self._trained:
            save.check(one, optimizers=not self._weights_only)

    def _check_tensors(self) -> None:
        """Compare names and shapes of all weights and buffers; a collective under FSDP1."""
        wanted = {
            key: shard.shape
            for one in self._carried
            for key, shard in {**one.wanted(optimizers=False), **one.wanted_buffers()}.items()
        }
        aliases = {key: to for one in self._carried for key, to in one.aliases().items()}
        check_keys(self._manifest, wanted, aliases)

    def _check_training(self) -> None:
        """Compare classes and groups of optimizers and schedulers, and shapes of their state."""
        for number, (carried, one) in enumerate(self._pairs()):
            training_metadata.check_optimizers(self._optimizers(carried), one)
            training_metadata.check_schedulers(self._schedulers(number), one)
            self._check_state(carried, one)
            if one.schedules and self._manifest.world_size != collectives.size():
                self.report.notes.append(
                    f"Accelerate advances a schedule once a rank: {collectives.size()} at a step,"
                    " and"
                    f" {self._manifest.world_size} then"
                )
        self._places = self._find_places()
        self._random = self._find_random()

    def _check_state(self, carried: Carried, one: Trained) -> None:
        shapes = {key: shard.shape for key, shard in carried.wanted(optimizers=False).items()}
        stepped = {name for owned in one.living for group in owned.recipe.groups for name in group}
        for key, saved in self._state_keys(carried).items():
            name = key.removeprefix(f"{carried.optim}.state.").rpartition(".")[0]
            if name not in stepped or shapes.get(carried.model + name) != saved.shape:
                raise CheckpointError(
                    f"the checkpoint has optimizer state {shown(key)} of shape {saved.shape}, which"
                    f" no prepared optimizer has; {_WEIGHTS_ONLY}."
                )

    def _optimizers(self, carried: Carried) -> list[Optimizer]:
        return [one for one in self._manifest.optimizers if one.prefix == carried.optim]

    def _schedulers(self, number: int) -> list[Any]:
        saved = self._manifest.schedulers
        return [one for one in saved if isinstance(one, dict) and one.get("model") == number]

    def _state_keys(self, carried: Carried) -> dict[str, Key]:
        prefix = f"{carried.optim}.state."
        return {key: one for key, one in self._manifest.keys.items() if key.startswith(prefix)}

    # -- the state of before

    def _go_back(self, error: CheckpointError, places: Sequence[Position]) -> None:
        """Put the state of before back.

        Raises:
            CheckpointError: that failed as well.
        """
        try:
            with self._phase("going back"):
                for (carried, one), before in zip(self._pairs(), self._before, strict=True):
                    _put_back(carried, one, before, optimizers=not self._weights_only)
                for loader, place in zip(prepared_models.loaders(), places, strict=False):
                    dataloader_state.go_to(loader, place)
        except CheckpointError as second:
            raise CheckpointError(
                f"{str(error).removesuffix('.')}. The state before could not be put back either:"
                f" {str(second).removesuffix('.')}. Use %nbdist"
                " restart, run the preparing cell and load a checkpoint."
            ) from second

    # -- the state of the checkpoint

    def _target(self, carried: Carried) -> dict[str, Shard]:
        """All that this rank reads of one model, in place; a collective under FSDP1."""
        keys = {} if self._weights_only else self._state_keys(carried)
        carried.allocate({key: _nothing_of(key, saved) for key, saved in keys.items()})
        found = carried.wanted(optimizers=not self._weights_only)
        prefix = f"{carried.optim}.state."
        new = {key: one for key, one in found.items() if key.startswith(prefix) and key not in keys}
        _clear(new)
        wanted = {key: one for key, one in found.items() if key not in new}
        return wanted | carried.wanted_buffers()

    def _settle(self) -> None:
        """Let the engines take over what was filled, and set all that is no tensor."""
        for number, (carried, one) in enumerate(self._pairs()):
            if self._weights_only:
                carried.settle({})
                continue
            counts = training_metadata.first_counts(carried.counts())
            for saved in self._optimizers(carried):
                counts |= {name: dict(scalars) for name, scalars in saved.counts.items()}
            carried.settle(counts)
            for saved, owned in zip(self._optimizers(carried), one.living, strict=True):
                training_metadata.set_options(owned, training_metadata.group_options(saved, owned))
            for kept, wrapper in zip(self._schedulers(number), one.schedules, strict=True):
                training_metadata.set_scheduler(wrapper.scheduler, kept["state"])
            self._set_rest(number, one)
        for loader, place in self._places:
            dataloader_state.go_to(loader, place)

    def _set_rest(self, number: int, one: Trained) -> None:
        """Steps taken, and the loss scale."""
        models = self._manifest.extra.get("models")
        found = models[number] if isinstance(models, list) and number < len(models) else {}
        known = found if isinstance(found, dict) else {}
        taken, scale = known.get("steps"), known.get("scale")
        one.steps = taken if type(taken) is int else self._manifest.step
        one.owner.step = 0
        if isinstance(scale, list) and len(scale) == 2:  # noqa: PLR2004
            grad_scaler.give(one, Scale(scale=float(str(scale[0])), good_steps=int(str(scale[1]))))

    def _verify(self) -> None:
        """Compare digests with the manifest's; a collective."""
        saved = self._manifest.keys
        live: dict[str, Shard] = {}
        for carried in self._carried:
            live |= carried.share(optimizers=not self._weights_only)
            live |= carried.share_of_buffers()
        aliases = self._manifest.aliases
        expected = {
            key: saved[aliases.get(key, key)] for key in live if _known(key, saved, aliases)
        }
        same = {key for key, one in expected.items() if one.dtype == _dtype(live[key])}
        found = digest.agreed({key: live[key] for key in sorted(same)})
        wrong = [key for key, one in found.items() if expected[key].digest != one]
        if wrong:
            raise CheckpointError(
                f"{len(wrong)} of {len(found)} tensors are not as they were saved,"
                f" {shown(wrong[0])} among them; nothing was kept of the load."
            )
        self.report.verified = len(found)
        if cast := sorted(expected.keys() - same):
            now = _dtype(live[cast[0]])
            self.report.notes.append(
                f"{len(cast)} tensors were saved as {expected[cast[0]].dtype} and are {now} now,"
                f" {cast[0]} among them"
            )

    # -- generators and loaders

    def _tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """Numbers of generators by the rest of their names."""
        keys = {key: one for key, one in self._manifest.keys.items() if key.startswith(prefix)}
        made = {}
        for key, one in keys.items():
            if one.numel > _GENERATOR_NUMBERS or one.dtype not in {"uint8", "int64"}:
                raise CheckpointError(
                    f"{shown(key)} is no random generator; take another checkpoint."
                )
            made[key] = torch.empty(one.shape, dtype=getattr(torch, one.dtype))
        target = {key: whole(one) for key, one in made.items()}
        self._bring(target)
        self.report.read_bytes += shard_io.read(self._path, self._manifest, target) if target else 0
        return {key.removeprefix(prefix): one for key, one in made.items()}

    def _plain(self, rank: int) -> Mapping[str, Any]:
        """What is saved of a rank's generators besides tensors."""
        found = self._manifest.rng[rank] if rank < len(self._manifest.rng) else None
        return found if isinstance(found, dict) else {}

    def _find_random(self) -> rng_state.State | None:
        """This rank's generators, where there are as many ranks as then."""
        if self._manifest.world_size != collectives.size():
            self.report.notes.append(
                f"random generators stay as they are: {self._manifest.world_size} ranks saved"
                f" theirs, and there are {collectives.size()}; dropout draws otherwise"
            )
            return None
        rank = collectives.rank()
        return _state(self._tensors(f"rng.{rank:05d}."), self._plain(rank))

    def _find_places(self) -> list[tuple[Any, Position]]:
        """Where each loader shall go on; those prepared last are the saved ones' successors."""
        loaders, saved = prepared_models.loaders(), list(enumerate(self._manifest.positions))
        pairs = list(zip(reversed(loaders), reversed(saved), strict=False))
        if len(loaders) != len(saved):
            self.report.notes.append(
                f"{len(saved)} loaders were saved and {len(loaders)} are prepared; the last"
                f" {len(pairs)} go on where those were"
            )
        found = []
        for loader, (number, place) in reversed(pairs):
            if not isinstance(place, dict):
                raise CheckpointError("the checkpoint's loaders cannot be read; take another one.")
            if place.get("length") != dataloader_state.length(loader):
                self.report.notes.append(
                    f"loader {number} was over {place.get('length')} samples and is over"
                    f" {dataloader_state.length(loader)} now; it begins anew"
                )
                continue
            found.append((loader, self._fitted(loader, number, place)))
        return found

    def _fitted(self, loader: Any, number: int, place: Mapping[str, Any]) -> Position:
        same = self._manifest.world_size == collectives.size()
        # Ranks draw one permutation: that of rank 0.
        rank = collectives.rank() if same else 0
        position = self._position(rank, number, place)
        if same and place.get("batch_size") == dataloader_state.batch_size(loader):
            return position
        fit, note = dataloader_state.fitted(loader, position, self._manifest.world_size)
        if note:
            self.report.notes.append(note)
        return fit

    def _position(self, rank: int, number: int, place: Mapping[str, Any]) -> Position:
        tensors: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for key, one in self._tensors(f"position.{rank:05d}.{number}.").items():
            kind, _, name = key.partition(".")
            tensors[kind][name] = one
        rests = self._plain(rank).get("positions")
        rest = rests[number] if isinstance(rests, list) and number < len(rests) else None
        counted = {name: _count(place, name) for name in ("epoch", "batches", "seen")}
        samples = None if place.get("samples") is None else _count(place, "samples")
        return Position(
            **counted,
            samples=samples,
            generators=dict(tensors["generator"]),
            random=None if rest is None else _state(tensors["random"], rest),
        )

    # -- what to say

    def _summarise(self) -> None:
        report, manifest = self.report, self._manifest
        report.step, report.backend = manifest.step, manifest.backend
        report.world_size = manifest.world_size
        for one in self._trained:
            model, names = type(one.kept.model).__name__, one.kept.names
            report.loaded.append(f"{model} ({len(names)} parameters)")
            if not self._weights_only:
                report.loaded += [owned.recipe.cls.__name__ for owned in one.living]
                report.loaded += [type(each.scheduler).__name__ for each in one.schedules]
        if self._weights_only:
            report.notes.append("weights alone, as asked for")
            return
        report.loaded.append(f"step {manifest.step}")
        if self._random is not None:
            report.loaded.append("random generators")
        for _, place in self._places:
            report.loaded.append(f"a loader at batch {place.batches} of epoch {place.epoch}")
        left = manifest.extra.get("left_out")
        for name in left if isinstance(left, list) else ():
            report.notes.append(f"not in the checkpoint: {name}")


def check_keys(
    manifest: Manifest, wanted: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str]
) -> None:
    """Refuse a checkpoint of another model, before anything of it is read.

    Args:
        manifest: of the checkpoint.
        wanted: shapes of the prepared models' weights and buffers.
        aliases: further keys of tied weights -> one of `wanted`.

    Raises:
        CheckpointError: how many tensors are missing, unexpected or of another shape, and the
            first ten of each.
    """
    keys = {key for key in manifest.keys if re.match(r"model\d*\.", key)}
    stored = {key: manifest.aliases.get(key, key) for key in wanted}
    missing = [key for key, to in stored.items() if to not in keys]
    used = {*stored.values(), *(key for key in keys if key in aliases)}
    unexpected = sorted(keys - used)
    other = [
        f"{shown(key)[1:-1]} {tuple(wanted[key])} (saved {manifest.keys[to].shape})"
        for key, to in stored.items()
        if to in keys and tuple(wanted[key]) != manifest.keys[to].shape
    ]
    found = [
        _listed("are missing", [shown(one)[1:-1] for one in missing]),
        _listed("are unexpected", [shown(one)[1:-1] for one in unexpected]),
        _listed("have another shape", other),
    ]
    if any(found):
        raise CheckpointError(
            f"the checkpoint is of another model: of {len(wanted)} tensors"
            f" {'; '.join(filter(None, found))}. Prepare the model that it is of."
        )


def _listed(what: str, names: list[str]) -> str:
    more = ", ..." if len(names) > _LISTED else ""
    return f"{len(names)} {what}: {', '.join(names[:_LISTED])}{more}" if names else ""


def _kept(carried: Carried, one: Trained, live: Mapping[str, Shard], counts: Counts) -> _Before:
    """Copy one model's state."""
    return _Before(
        tensors=shards.snapshot(live),
        buffers={key: tensor.detach().clone() for key, tensor in carried.buffers().items()},
        counts=counts,
        options=[optimizer_recipes.options(owned.raw) for owned in one.living],
        schedulers=[wrapper.scheduler.state_dict() for wrapper in one.schedules],
        scale=grad_scaler.scale_of(one),
        steps=one.steps,
    )


def _put_back(carried: Carried, one: Trained, before: _Before, *, optimizers: bool) -> None:
    """Put one model's state of before back; a collective."""
    with torch.no_grad():
        for key, live in carried.buffers().items():
            live.copy_(before.buffers[key])
    if not optimizers:
        reshard.move(before.tensors, carried.wanted(optimizers=False))
        carried.settle({})
        return
    _clear({key: shard for key, shard in carried.wanted().items() if key not in before.tensors})
    carried.take(before.tensors, training_metadata.first_counts(carried.counts()) | before.counts)
    for owned, options in zip(one.living, before.options, strict=True):
        for group, kept in zip(owned.raw.param_groups, options, strict=True):
            group.update(kept)
    for wrapper, state in zip(one.schedules, before.schedulers, strict=True):
        wrapper.scheduler.load_state_dict(state)
    grad_scaler.give(one, before.scale)
    one.steps = before.steps


@torch.no_grad()
def _clear(found: Mapping[str, Shard]) -> None:
    """Set state that was not saved to what it is before the first step."""
    for shard in found.values():
        for piece in shard.pieces:
            piece.view.zero_()


def _nothing_of(key: str, saved: Key) -> Shard:
    if not saved.dtype.startswith(("float", "bfloat", "int", "uint", "bool")):
        raise CheckpointError(f"{shown(key)} is of {saved.dtype}, which no optimizer keeps.")
    return Shard(shape=saved.shape, dtype=getattr(torch, saved.dtype))


def _state(tensors: Mapping[str, torch.Tensor], rest: Any) -> rng_state.State:
    try:
        return rng_state.put_together(dict(tensors), rest)
    except ValueError as error:
        raise CheckpointError(f"{error}; take another checkpoint.") from error


def _known(key: str, saved: Mapping[str, Key], aliases: Mapping[str, str]) -> bool:
    return aliases.get(key, key) in saved


def _dtype(shard: Shard) -> str:
    return str(shard.dtype).removeprefix("torch.")


def _count(place: Mapping[str, Any], name: str) -> int:
    found = place.get(name)
    if type(found) is not int or found < 0:
        raise CheckpointError("the checkpoint's loaders cannot be read; take another checkpoint.")
    return found
