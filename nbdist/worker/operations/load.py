"""Loading of a checkpoint into the prepared models, as one transaction; runs on a rank.

    checking     compare names, shapes, classes and parameter groups; changes nothing
    comparing    compare the checksums of all files, each rank a part of the files
    keeping      copy this rank's shards of the current state to host memory
    downloading  for a URL: download the files that this node's ranks need, with checksums
    reading      each rank reads its shards in place
    settling     engines update derived copies; restore options, schedules and loaders
    verifying    compare the digest of each tensor with the manifest

If a phase from `reading` on fails, the state is restored from the copy. Random generators are
restored last because the other phases may draw from them. A checkpoint contains no code.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from nbdist import checkpoint
from nbdist.checkpoint import CheckpointDownload, CheckpointReader, Url
from nbdist.checkpoint.names import printable
from nbdist.errors import CheckpointError
from nbdist.state import collectives, digest, optimizer_recipes, reshard, shard_io, shards
from nbdist.state.shards import Shard, total_bytes
from nbdist.worker.operations import save
from nbdist.worker.operations.transaction import CHECKING_PHASE, ByteProgress, Transaction
from nbdist.worker.training import (
    dataloader_state,
    model_recipe,
    prepared_models,
    rng_state,
    training_metadata,
)
from nbdist.worker.training.dataloader_state import LoaderPosition
from nbdist.worker.training.model_recipe import LossScale
from nbdist.worker.training.model_state import ModelState, whole_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from nbdist.checkpoint import Manifest, OptimizerMetadata, TensorMetadata
    from nbdist.worker.training.model_state import ScalarState
    from nbdist.worker.training.prepared_models import PreparedModel

_LISTED = 10
_GENERATOR_NUMBERS = 1 << 16
"""Maximum number of elements in the state of a random generator."""
_WEIGHTS_ONLY = "load with --weights-only (weights_only=True)"
_BAD_LOADERS = "Cannot read the loader positions in the checkpoint. Load another checkpoint."


@dataclass(slots=True, kw_only=True)
class RankLoadReport:
    """Result of a load on this rank."""

    step: int = 0
    backend: str = ""
    """Backend that wrote the checkpoint."""
    world_size: int = 0
    """Number of ranks that wrote the checkpoint."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds."""
    read_bytes: int = 0
    verified: int = 0
    """Number of tensors whose digest equals the saved one."""
    loaded: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Differences from the saved state, with the reason."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for a message."""
        return asdict(self)


@dataclass(slots=True, kw_only=True, eq=False)
class _StateBackup:
    """Copy of one model's state, made before the load."""

    tensors: dict[str, Shard]
    buffers: dict[str, torch.Tensor]
    counts: ScalarState
    options: list[list[optimizer_recipes.GroupOptions]]
    schedulers: list[dict[str, Any]]
    scale: LossScale | None
    steps: int


class CheckpointLoad:
    """Load of one checkpoint."""

    def __init__(
        self,
        path: Path | Url,
        checkpoint_id: str,
        *,
        folder: Path,
        on_phase: Callable[[str], None],
        weights_only: bool = False,
    ) -> None:
        """Set up a load.

        Args:
            path: location of the checkpoint.
            checkpoint_id: id in the manifest that the notebook read there.
            folder: private folder of this node's ranks, for downloads from a URL.
            on_phase: called with the name of each phase and with progress texts.
            weights_only: leave optimizers, schedulers, generators and loaders unchanged.
        """
        self._place, self._id, self._tell = path, checkpoint_id, on_phase
        self._folder = folder / f"load-{checkpoint_id}"
        self._download: CheckpointDownload | None = None
        self._weights_only = weights_only
        self._trained: list[PreparedModel] = []
        self._carried: list[ModelState] = []
        self._before: list[_StateBackup] = []
        self._places: list[tuple[Any, LoaderPosition]] = []
        self._random: rng_state.RngState | None = None
        self._phase = Transaction("Load", on_phase, CheckpointError)
        self.report = RankLoadReport(seconds=self._phase.seconds)

    def run(self) -> RankLoadReport:
        """Load the checkpoint, or leave the state unchanged.

        Raises:
            CheckpointError: the checkpoint does not match, or a phase failed; raised on all ranks.
        """
        try:
            return self._run()
        finally:
            self._before.clear()
            shards.give_back()
            if self._download is not None:
                self._download.remove()

    def _run(self) -> RankLoadReport:
        generators = rng_state.get_rng_state()
        with self._phase(CHECKING_PHASE):
            self._path = self._local_folder()
            self._manifest = self._open_manifest()
            self._trained = prepared_models.all_models()
            self._check_models()
        with self._phase(CHECKING_PHASE):
            self._carried = [
                ModelState(number, prepared) for number, prepared in enumerate(self._trained)
            ]
            self._check_tensors()
            if not self._weights_only:
                self._check_training()
        if self._download is None:
            self._compare()
        with self._phase("keeping"):
            live = [
                carried.owned_shards(optimizers=not self._weights_only) for carried in self._carried
            ]
            counts = [carried.scalar_state() for carried in self._carried]
        with self._phase("keeping"):
            for shares, scalars, (carried, prepared) in zip(
                live, counts, self._pairs(), strict=True
            ):
                self._before.append(_kept(carried, prepared, shares, scalars))
            places = [
                dataloader_state.position_of(loader) for loader in prepared_models.all_loaders()
            ]
        try:
            with self._phase("reading"):
                targets = [self._target(carried) for carried in self._carried]
            if self._download is not None:
                with self._phase("downloading"):
                    self._fetch_files(
                        {key: shard for target in targets for key, shard in target.items()}
                    )
            with self._phase("reading"):
                for target in targets:
                    progress = ByteProgress(self._tell, "reading", total_bytes(target))
                    self.report.read_bytes += shard_io.read_shards(
                        self._path, self._manifest, target, progress
                    )
            with self._phase("settling"):
                self._settle()
            with self._phase("verifying"):
                self._verify()
        except CheckpointError as error:
            self._restore_all(error, places)
            raise
        finally:
            rng_state.set_rng_state(generators)
        if self._random is not None:
            rng_state.set_rng_state(self._random)
        self._summarise()
        return self.report

    def _pairs(self) -> list[tuple[ModelState, PreparedModel]]:
        return list(zip(self._carried, self._trained, strict=True))

    def _compare(self) -> None:
        """Compare all files with their checksums; each rank reads a part of the files."""
        with self._phase("comparing"):
            share = checkpoint.files_for_rank(
                self._manifest, collectives.rank(), collectives.group_size()
            )
            sizes = {file.name: file.size_bytes for file in self._manifest.files}
            total = sum(sizes[name] for name in share)
            progress = ByteProgress(self._tell, "comparing", total)
            checkpoint.verify_files(self._path, files=share, on_progress=progress)

    # -- at a URL

    def _local_folder(self) -> Path:
        """Return the folder to read from; for a URL it has only manifest and headers at first."""
        if not isinstance(self._place, Url):
            return self._place
        self._download = CheckpointDownload(self._place, self._folder)
        return self._folder

    def _fetch_files(self, target: Mapping[str, Shard]) -> None:
        """Download the files that the target needs, unless the checkpoint is local."""
        if self._download is None or not target:
            return
        names = shard_io.files_to_read(self._path, self._manifest, target)
        total = sum(file.size_bytes for file in self._manifest.files if file.name in names)
        progress = ByteProgress(self._tell, "downloading", total)
        self._download.fetch(
            names, progress, first=collectives.rank() * len(names) // collectives.group_size()
        )

    # -- checking

    def _open_manifest(self) -> Manifest:
        with CheckpointReader.open_folder(self._path) as opened:
            if opened.manifest.id != self._id:
                raise CheckpointError(f"{self._path} was replaced by a newer save. Load it again.")
            return opened.manifest

    def _check_models(self) -> None:
        if not self._trained:
            raise CheckpointError(
                "No model is prepared to load into. Run the cell with accelerator.prepare(model,"
                " optimizer, ...) first, with any backend."
            )
        for prepared in self._trained:
            save.check_savable(prepared, optimizers=not self._weights_only)

    def _check_tensors(self) -> None:
        """Compare names and shapes of all weights and buffers; a collective under FSDP1."""
        shapes = {
            key: shard.shape
            for carried in self._carried
            for key, shard in {
                **carried.target_shards(optimizers=False),
                **carried.target_buffers(),
            }.items()
        }
        aliases = {key: to for carried in self._carried for key, to in carried.aliases().items()}
        check_keys(self._manifest, shapes, aliases)

    def _check_training(self) -> None:
        """Compare classes and groups of optimizers and schedulers, and shapes of their state."""
        for number, (carried, prepared) in enumerate(self._pairs()):
            training_metadata.check_optimizers(self._optimizers(carried), prepared)
            training_metadata.check_schedulers(self._schedulers(number), prepared)
            self._check_state(carried, prepared)
            if prepared.live_schedulers and self._manifest.world_size != collectives.group_size():
                self.report.notes.append(
                    f"Accelerate advances schedulers once per rank: {collectives.group_size()}"
                    f" times per optimizer step, compared with {self._manifest.world_size} when"
                    " saved"
                )
        self._places = self._find_places()
        self._random = self._find_random()

    def _check_state(self, model_state: ModelState, prepared: PreparedModel) -> None:
        shapes = {
            key: shard.shape for key, shard in model_state.target_shards(optimizers=False).items()
        }
        stepped = {
            name
            for owned in prepared.live_optimizers
            for group in owned.recipe.param_group_names
            for name in group
        }
        for key, saved in self._state_keys(model_state).items():
            name = key.removeprefix(f"{model_state.optimizer_prefix}.state.").rpartition(".")[0]
            if name not in stepped or shapes.get(model_state.model_prefix + name) != saved.shape:
                raise CheckpointError(
                    f"The checkpoint has optimizer state {printable(key)} of shape {saved.shape},"
                    f" which matches no prepared optimizer. To skip it, {_WEIGHTS_ONLY}."
                )

    def _optimizers(self, model_state: ModelState) -> list[OptimizerMetadata]:
        return [
            optimizer
            for optimizer in self._manifest.optimizers
            if optimizer.prefix == model_state.optimizer_prefix
        ]

    def _schedulers(self, number: int) -> list[Any]:
        saved = self._manifest.schedulers
        return [
            scheduler
            for scheduler in saved
            if isinstance(scheduler, dict) and scheduler.get("model") == number
        ]

    def _state_keys(self, model_state: ModelState) -> dict[str, TensorMetadata]:
        prefix = f"{model_state.optimizer_prefix}.state."
        return {
            key: tensor for key, tensor in self._manifest.keys.items() if key.startswith(prefix)
        }

    # -- restore after a failure

    def _restore_all(self, error: CheckpointError, places: Sequence[LoaderPosition]) -> None:
        """Restore the state from before the load.

        Raises:
            CheckpointError: restoring failed too.
        """
        try:
            with self._phase("going back"):
                for (carried, prepared), before in zip(self._pairs(), self._before, strict=True):
                    _restore_model(carried, prepared, before, optimizers=not self._weights_only)
                for loader, place in zip(prepared_models.all_loaders(), places, strict=False):
                    dataloader_state.seek(loader, place)
        except CheckpointError as second:
            raise CheckpointError(
                f"{str(error).removesuffix('.')}. The previous state could not be restored either:"
                f" {str(second).removesuffix('.')}. Run %nbdist restart, run the cell with"
                " accelerator.prepare(...) and load a checkpoint."
            ) from second

    # -- the state of the checkpoint

    def _target(self, model_state: ModelState) -> dict[str, Shard]:
        """Return the live shards to read for one model; a collective under FSDP1."""
        keys = {} if self._weights_only else self._state_keys(model_state)
        model_state.allocate_optimizer_state(
            {key: _empty_shard(key, saved) for key, saved in keys.items()}
        )
        targets = model_state.target_shards(optimizers=not self._weights_only)
        prefix = f"{model_state.optimizer_prefix}.state."
        not_saved = {
            key: shard
            for key, shard in targets.items()
            if key.startswith(prefix) and key not in keys
        }
        _clear(not_saved)
        readable = {key: shard for key, shard in targets.items() if key not in not_saved}
        return readable | model_state.target_buffers()

    def _settle(self) -> None:
        """Update what engines derive from the loaded tensors and set the state besides tensors."""
        for number, (carried, prepared) in enumerate(self._pairs()):
            if self._weights_only:
                carried.finalize_state({})
                continue
            counts = training_metadata.initial_scalar_state(carried.scalar_state())
            for saved in self._optimizers(carried):
                counts |= {name: dict(scalars) for name, scalars in saved.counts.items()}
            carried.finalize_state(counts)
            for saved, owned in zip(
                self._optimizers(carried), prepared.live_optimizers, strict=True
            ):
                training_metadata.set_options(owned, training_metadata.group_options(saved, owned))
            for entry, wrapper in zip(
                self._schedulers(number), prepared.live_schedulers, strict=True
            ):
                training_metadata.set_scheduler(wrapper.scheduler, entry["state"])
            self._set_rest(number, prepared)
        for loader, place in self._places:
            dataloader_state.seek(loader, place)

    def _set_rest(self, number: int, prepared: PreparedModel) -> None:
        """Set the step count and the loss scale."""
        models = self._manifest.extra.get("models")
        entry = models[number] if isinstance(models, list) and number < len(models) else {}
        fields = entry if isinstance(entry, dict) else {}
        steps, scale = fields.get("steps"), fields.get("scale")
        prepared.num_steps = steps if type(steps) is int else self._manifest.step
        prepared.owner.step = 0
        if isinstance(scale, list) and len(scale) == 2:  # noqa: PLR2004
            model_recipe.set_loss_scale(
                prepared, LossScale(scale=float(str(scale[0])), good_steps=int(str(scale[1])))
            )

    def _verify(self) -> None:
        """Compare digests with the manifest; a collective."""
        saved = self._manifest.keys
        live: dict[str, Shard] = {}
        for carried in self._carried:
            live |= carried.owned_shards(optimizers=not self._weights_only)
            live |= carried.owned_buffers()
        aliases = self._manifest.aliases
        expected = {
            key: saved[aliases.get(key, key)] for key in live if _is_saved(key, saved, aliases)
        }
        same_dtype = {key for key, tensor in expected.items() if tensor.dtype == _dtype(live[key])}
        actual = digest.global_digests({key: live[key] for key in sorted(same_dtype)})
        wrong = [key for key, value in actual.items() if expected[key].digest != value]
        if wrong:
            raise CheckpointError(
                f"Digest mismatch in {len(wrong)} of {len(actual)} tensors, for example"
                f" {printable(wrong[0])}. The load was undone. Load another checkpoint."
            )
        self.report.verified = len(actual)
        if cast := sorted(expected.keys() - same_dtype):
            dtype = _dtype(live[cast[0]])
            self.report.notes.append(
                f"{len(cast)} tensors were saved as {expected[cast[0]].dtype} and are now {dtype},"
                f" for example {cast[0]}"
            )

    # -- generators and loaders

    def _tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """Read the tensors of random generators, by key without the prefix."""
        keys = {
            key: tensor for key, tensor in self._manifest.keys.items() if key.startswith(prefix)
        }
        tensors = {}
        for key, tensor in keys.items():
            if tensor.numel > _GENERATOR_NUMBERS or tensor.dtype not in {"uint8", "int64"}:
                raise CheckpointError(
                    f"{printable(key)} is not the state of a random generator."
                    " Load another checkpoint."
                )
            tensors[key] = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        target = {key: whole_shard(tensor) for key, tensor in tensors.items()}
        self._fetch_files(target)
        self.report.read_bytes += (
            shard_io.read_shards(self._path, self._manifest, target) if target else 0
        )
        return {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}

    def _plain(self, rank: int) -> Mapping[str, Any]:
        """Return the saved state of a rank's generators besides tensors."""
        entry = self._manifest.rng[rank] if rank < len(self._manifest.rng) else None
        return entry if isinstance(entry, dict) else {}

    def _find_random(self) -> rng_state.RngState | None:
        """Return this rank's generator state; None if the world size differs."""
        if self._manifest.world_size != collectives.group_size():
            self.report.notes.append(
                f"random generators are unchanged: saved by {self._manifest.world_size} ranks, now"
                f" {collectives.group_size()}; dropout masks will differ"
            )
            return None
        rank = collectives.rank()
        return _state(self._tensors(f"rng.{rank:05d}."), self._plain(rank))

    def _find_places(self) -> list[tuple[Any, LoaderPosition]]:
        """Return the position for each loader; the loaders prepared last match the saved ones."""
        loaders, saved = prepared_models.all_loaders(), list(enumerate(self._manifest.positions))
        pairs = list(zip(reversed(loaders), reversed(saved), strict=False))
        if len(loaders) != len(saved):
            self.report.notes.append(
                f"{len(saved)} loaders were saved and {len(loaders)} are prepared; the last"
                f" {len(pairs)} resume at the saved positions"
            )
        places = []
        for loader, (number, place) in reversed(pairs):
            if not isinstance(place, dict):
                raise CheckpointError(_BAD_LOADERS)
            if place.get("length") != dataloader_state.num_samples(loader):
                self.report.notes.append(
                    f"loader {number} had {place.get('length')} samples and now has"
                    f" {dataloader_state.num_samples(loader)}; it starts from the beginning"
                )
                continue
            places.append((loader, self._fitted(loader, number, place)))
        return places

    def _fitted(self, loader: Any, number: int, place: Mapping[str, Any]) -> LoaderPosition:
        same_world_size = self._manifest.world_size == collectives.group_size()
        # All ranks draw the same permutation: use that of rank 0.
        rank = collectives.rank() if same_world_size else 0
        position = self._position(rank, number, place)
        if same_world_size and place.get("batch_size") == dataloader_state.global_batch_size(
            loader
        ):
            return position
        fit, note = dataloader_state.rescale_position(loader, position, self._manifest.world_size)
        if note:
            self.report.notes.append(note)
        return fit

    def _position(self, rank: int, number: int, place: Mapping[str, Any]) -> LoaderPosition:
        tensors: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for key, tensor in self._tensors(f"position.{rank:05d}.{number}.").items():
            kind, _, name = key.partition(".")
            tensors[kind][name] = tensor
        rests = self._plain(rank).get("positions")
        metadata = rests[number] if isinstance(rests, list) and number < len(rests) else None
        counted = {name: _count(place, name) for name in ("epoch", "batches", "seen")}
        samples = None if place.get("samples") is None else _count(place, "samples")
        return LoaderPosition(
            **counted,
            samples=samples,
            generators=dict(tensors["generator"]),
            rng=None if metadata is None else _state(tensors["random"], metadata),
        )

    # -- report

    def _summarise(self) -> None:
        report, manifest = self.report, self._manifest
        report.step, report.backend = manifest.step, manifest.backend
        report.world_size = manifest.world_size
        for prepared in self._trained:
            model, names = type(prepared.meta.model).__name__, prepared.meta.names
            report.loaded.append(f"{model} ({len(names)} parameters)")
            if not self._weights_only:
                report.loaded += [
                    owned.recipe.optimizer_class.__name__ for owned in prepared.live_optimizers
                ]
                report.loaded += [
                    type(wrapper.scheduler).__name__ for wrapper in prepared.live_schedulers
                ]
        if self._weights_only:
            report.notes.append("weights only, as requested")
            return
        report.loaded.append(f"step {manifest.step}")
        if self._random is not None:
            report.loaded.append("random generators")
        for _, place in self._places:
            report.loaded.append(f"loader at batch {place.batches} of epoch {place.epoch}")
        not_saved = manifest.extra.get("left_out")
        for name in not_saved if isinstance(not_saved, list) else ():
            report.notes.append(f"not in the checkpoint: {name}")


def check_keys(
    manifest: Manifest, wanted: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str]
) -> None:
    """Refuse a checkpoint of another model before reading any tensor.

    Args:
        manifest: manifest of the checkpoint.
        wanted: key -> shape of the prepared models' weights and buffers.
        aliases: additional keys of tied weights -> a key in `wanted`.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape. The message has
            the number and the first ten of each.
    """
    keys = {key for key in manifest.keys if re.match(r"model\d*\.", key)}
    stored = {key: manifest.aliases.get(key, key) for key in wanted}
    missing = [key for key, to in stored.items() if to not in keys]
    used = {*stored.values(), *(key for key in keys if key in aliases)}
    unexpected = sorted(keys - used)
    mismatched = [
        f"{printable(key)[1:-1]} {tuple(wanted[key])} (saved {manifest.keys[to].shape})"
        for key, to in stored.items()
        if to in keys and tuple(wanted[key]) != manifest.keys[to].shape
    ]
    problems = [
        _listed("are missing", [printable(key)[1:-1] for key in missing]),
        _listed("are unexpected", [printable(key)[1:-1] for key in unexpected]),
        _listed("have a different shape", mismatched),
    ]
    if any(problems):
        raise CheckpointError(
            f"The checkpoint does not match the prepared model: of {len(wanted)} tensors"
            f" {'; '.join(filter(None, problems))}. Prepare the model that was saved."
        )


def _listed(what: str, names: list[str]) -> str:
    more = ", ..." if len(names) > _LISTED else ""
    return f"{len(names)} {what}: {', '.join(names[:_LISTED])}{more}" if names else ""


def _kept(
    model_state: ModelState, prepared: PreparedModel, live: Mapping[str, Shard], counts: ScalarState
) -> _StateBackup:
    """Copy one model's state, so that it can be restored."""
    return _StateBackup(
        tensors=shards.copy_to_host(live),
        buffers={key: tensor.detach().clone() for key, tensor in model_state.buffers().items()},
        counts=counts,
        options=[
            optimizer_recipes.group_options(owned.inner_optimizer)
            for owned in prepared.live_optimizers
        ],
        schedulers=[wrapper.scheduler.state_dict() for wrapper in prepared.live_schedulers],
        scale=model_recipe.get_loss_scale(prepared),
        steps=prepared.num_steps,
    )


def _restore_model(
    model_state: ModelState, prepared: PreparedModel, before: _StateBackup, *, optimizers: bool
) -> None:
    """Restore one model's state from the copy; a collective."""
    with torch.no_grad():
        for key, live in model_state.buffers().items():
            live.copy_(before.buffers[key])
    if not optimizers:
        reshard.reshard(before.tensors, model_state.target_shards(optimizers=False))
        model_state.finalize_state({})
        return
    _clear(
        {
            key: shard
            for key, shard in model_state.target_shards().items()
            if key not in before.tensors
        }
    )
    model_state.load_from(
        before.tensors,
        training_metadata.initial_scalar_state(model_state.scalar_state()) | before.counts,
    )
    for owned, options in zip(prepared.live_optimizers, before.options, strict=True):
        for group, saved in zip(owned.inner_optimizer.param_groups, options, strict=True):
            group.update(saved)
    for wrapper, state in zip(prepared.live_schedulers, before.schedulers, strict=True):
        wrapper.scheduler.load_state_dict(state)
    model_recipe.set_loss_scale(prepared, before.scale)
    prepared.num_steps = before.steps


@torch.no_grad()
def _clear(found: Mapping[str, Shard]) -> None:
    """Set optimizer state that was not saved to zero, its value before the first step."""
    for shard in found.values():
        for piece in shard.pieces:
            piece.view.zero_()


def _empty_shard(key: str, saved: TensorMetadata) -> Shard:
    if not saved.dtype.startswith(("float", "bfloat", "int", "uint", "bool")):
        raise CheckpointError(
            f"{printable(key)} has dtype {saved.dtype}, which optimizer state cannot have."
        )
    return Shard(shape=saved.shape, dtype=getattr(torch, saved.dtype))


def _state(tensors: Mapping[str, torch.Tensor], rest: Any) -> rng_state.RngState:
    try:
        return rng_state.from_tensors_and_json(dict(tensors), rest)
    except ValueError as error:
        raise CheckpointError(f"{error}. Load another checkpoint.") from error


def _is_saved(key: str, saved: Mapping[str, TensorMetadata], aliases: Mapping[str, str]) -> bool:
    return aliases.get(key, key) in saved


def _dtype(shard: Shard) -> str:
    return str(shard.dtype).removeprefix("torch.")


def _count(place: Mapping[str, Any], name: str) -> int:
    value = place.get(name)
    if type(value) is not int or value < 0:
        raise CheckpointError(_BAD_LOADERS)
    return value
