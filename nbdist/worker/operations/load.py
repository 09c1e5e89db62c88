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
from typing import TYPE_CHECKING, Any

import torch

from nbdist import checkpoint
from nbdist.checkpoint import CheckpointDownload, CheckpointReader, Url, parse_location
from nbdist.checkpoint.name_validation import printable
from nbdist.errors import CheckpointError
from nbdist.protocol.operations import LoadRequest, RankLoadReport
from nbdist.state import (
    base_model,
    collectives,
    reshard,
    shard_io,
    shards,
    tensor_digest,
)
from nbdist.state.shards import Shard, total_bytes
from nbdist.state.tensor_index import TensorIndex, check_shapes
from nbdist.worker.engines import accelerator_patch
from nbdist.worker.operations import save
from nbdist.worker.operations.collective_phases import (
    CHECKING_PHASE,
    ByteProgress,
    CollectivePhases,
)
from nbdist.worker.optimizer_step_gate import optimizer_step_gate
from nbdist.worker.training import (
    dataloader_state,
    model_recipe,
    prepared_models,
    release_models,
    rng_state,
    training_metadata,
)
from nbdist.worker.training.dataloader_state import LoaderPosition
from nbdist.worker.training.model_recipe import LossScale, ModelRecipe
from nbdist.worker.training.training_state import ModelAndOptimizerState, whole_shard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from nbdist.checkpoint import OptimizerMetadata, TensorMetadata
    from nbdist.worker.operations import RankContext
    from nbdist.worker.training.prepared_models import PreparedModel

_GENERATOR_NUMBERS = 1 << 16
"""Maximum number of elements in the state of a random generator."""
_BAD_LOADERS = "Cannot read the loader positions in the checkpoint. Load another checkpoint."


def load(request: LoadRequest, context: RankContext) -> RankLoadReport:
    """Load a checkpoint, or leave the state unchanged; a collective.

    Raises:
        CheckpointError: the checkpoint does not match, or a phase failed; raised on all ranks.
    """
    return _CheckpointLoad(request, context).run()


def load_in_cell(
    location: Path | Url, context: RankContext, *, only: Mapping[int, PreparedModel] | None = None
) -> None:
    """Load a checkpoint in the code of a cell or script, which all ranks run.

    Args:
        only: number of a saved model and the model to load it into, without loader positions.
            Default: all models.
    """
    with checkpoint.storage_for(location.parent).open_checkpoint(location.name) as opened:
        path, manifest = opened
        request = LoadRequest(
            path=checkpoint.location_with_password(path), id=manifest.id, weights_only=False
        )
        _CheckpointLoad(request, context, only).run()


class _CheckpointLoad:
    def __init__(
        self,
        request: LoadRequest,
        context: RankContext,
        only: Mapping[int, PreparedModel] | None = None,
    ) -> None:
        self._id, self._weights_only = request.id, request.weights_only
        self._only = only
        """The only model to load, by its number in the checkpoint; None for all."""
        self._reset = request.reset_optimizer
        self._on_phase, self._variables = context.on_phase, context.variables
        self._location = parse_location(request.path)
        self._download_folder = context.folder / f"load-{request.id}"
        self._download: CheckpointDownload | None = None
        """Download of a checkpoint at a URL: at first only of its manifest and headers."""
        self._models: list[ModelAndOptimizerState] = []
        self._backups: list[ModelRecipe] = []
        self._referenced: set[str] = set()
        """Keys of tensors that are stored by reference."""
        self._base = TensorIndex()
        """Those of them whose live values differ, in the files of the base model."""
        self._state_dict_tensors: dict[str, torch.Tensor] = {}
        """Tensors of this rank's state dicts, in host memory."""
        self._positions: list[tuple[Any, LoaderPosition]] = []
        """Prepared loaders and their saved positions."""
        self._rng: rng_state.RngState | None = None
        self._phase = CollectivePhases("Load", context.on_phase, CheckpointError)
        self.report = RankLoadReport(seconds=self._phase.seconds)

    def run(self) -> RankLoadReport:
        """Load the checkpoint, or leave the state unchanged."""
        try:
            return self._run()
        finally:
            self._backups.clear()
            shards.empty_pinned_cache()
            if self._download is not None:
                self._download.remove()

    def _run(self) -> RankLoadReport:
        generators = rng_state.get_rng_state()
        # What may fail on one rank and what is a collective (under FSDP1) are separate phases.
        with self._phase(CHECKING_PHASE):
            trained = self._open()
        with self._phase(CHECKING_PHASE):
            self._models = [ModelAndOptimizerState(trained[key], key) for key in trained]
            self._check_tensors([*trained.values()])
            if not self._weights_only:
                self._check_training()
        with self._phase(CHECKING_PHASE):
            weights = {
                key: shard
                for state in self._models
                for key, shard in state.owned_shards(optimizers=False).items()
            }
            differing = base_model.different_from(self._manifest, weights)
        with self._phase(CHECKING_PHASE):
            self._referenced = {
                key for key in weights if self._stored(key) in self._manifest.referenced
            }
            self._base = base_model.open_references(
                self._manifest, differing, save.base_models([*trained.values()])
            )
        if self._download is None:
            self._compare_checksums()
        with self._phase("keeping"):
            live = [
                (state.owned_shards(optimizers=not self._weights_only), state.layout.scalar_state())
                for state in self._models
            ]
        with self._phase("keeping"):
            for state, (tensors, counts) in zip(self._models, live, strict=True):
                self._backups.append(ModelRecipe.back_up(state, tensors, counts))
            loaders = [
                (loader, dataloader_state.position_of(loader))
                for loader in prepared_models.all_loaders()
            ]
        try:
            with self._phase("reading"):
                targets = [self._readable_target(state) for state in self._models]
            if self._download is not None:
                with self._phase("downloading"):
                    self._fetch_files(
                        {
                            key: shard
                            for target in targets
                            for key, shard in target.items()
                            if key not in self._referenced
                        }
                    )
            with self._phase("reading"):
                for target in targets:
                    base = {
                        stored: shard
                        for key, shard in target.items()
                        if (stored := self._stored(key)) in self._base.keys
                    }
                    for key in self._referenced & target.keys():
                        del target[key]
                    progress = ByteProgress(self._on_phase, "reading", total_bytes(target))
                    self.report.read_bytes += self._base.read_into(base) + shard_io.read_shards(
                        self._path, self._manifest, target, progress
                    )
            with self._phase("settling"):
                self._restore_derived_state()
            with self._phase("verifying"):
                self._verify()
        except CheckpointError as error:
            self._roll_back(error, loaders)
            raise
        finally:
            rng_state.set_rng_state(generators)
        if self._rng is not None:
            rng_state.set_rng_state(self._rng)
        optimizer_step_gate.last_step_state = None
        self._summarise()
        return self.report

    # -- the files

    def _open(self) -> Mapping[int, PreparedModel]:
        """Read the manifest; return the models to load by their numbers in the checkpoint."""
        if isinstance(self._location, Url):
            self._download = CheckpointDownload(self._location, self._download_folder)
            self._path = self._download_folder
        else:
            self._path = self._location
        with CheckpointReader.open_folder(self._path) as opened:
            self._manifest = opened.manifest
        if self._manifest.id != self._id:
            raise CheckpointError(f"{self._path} was replaced by a newer save. Load it again.")
        release_models.release_remaining()
        if not prepared_models.models_in_use(self._variables):
            raise CheckpointError(
                "No model is prepared to load into. Run the cell with accelerator.prepare(model,"
                " optimizer, ...) first, with any backend. A Trainer loads it by itself:"
                f" trainer.train(resume_from_checkpoint={str(self._location)!r})."
            )
        prepared_models.order_models([str(entry.get("variable")) for entry in self._entries()])
        trained = self._only or dict(enumerate(prepared_models.all_models()))
        for prepared in trained.values():
            save.check_savable(prepared, optimizers=not self._weights_only)
        return trained

    def _compare_checksums(self) -> None:
        """Compare all files with their checksums; each rank reads a part of the files."""
        with self._phase("comparing"):
            share = checkpoint.files_for_rank(
                self._manifest, collectives.rank(), collectives.group_size()
            )
            sizes = {file.name: file.size_bytes for file in self._manifest.files}
            total = sum(sizes[name] for name in share)
            progress = ByteProgress(self._on_phase, "comparing", total)
            checkpoint.verify_files(self._path, files=share, on_progress=progress)

    def _fetch_files(self, target: Mapping[str, Shard]) -> None:
        """Download the files that the target needs, unless the checkpoint is local."""
        if self._download is None or not target:
            return
        names = shard_io.files_to_read(self._path, self._manifest, target)
        total = sum(file.size_bytes for file in self._manifest.files if file.name in names)
        progress = ByteProgress(self._on_phase, "downloading", total)
        self._download.fetch(
            names, progress, first=collectives.rank() * len(names) // collectives.group_size()
        )

    def _entries(self) -> list[Mapping[str, Any]]:
        """Return the entries of the saved models."""
        models = self._manifest.extra.get("models")
        entries = models if isinstance(models, list) else []
        return [entry if isinstance(entry, dict) else {} for entry in entries]

    # -- checking

    def _stored(self, key: str) -> str:
        """Return the key under which the checkpoint stores a tensor."""
        return self._manifest.aliases.get(key, key)

    def _check_tensors(self, trained: Sequence[PreparedModel]) -> None:
        """Compare names and shapes of all weights and buffers; a collective under FSDP1."""
        shapes: dict[str, tuple[int, ...]] = {}
        aliases: dict[str, str] = {}
        for state in self._models:
            targets = state.target_shards(optimizers=False) | state.buffers(owned=False)
            shapes |= {key: shard.shape for key, shard in targets.items()}
            aliases |= state.aliases()
        prefixes = tuple(state.model_prefix for state in self._models)
        saved = {
            key: tensor.shape
            for key, tensor in self._manifest.keys.items()
            if re.match(r"model\d*\.", key) and (self._only is None or key.startswith(prefixes))
        }
        stored = {key: self._stored(key) for key in shapes}
        try:
            check_shapes(
                shapes,
                {key: saved[to] for key, to in stored.items() if to in saved},
                sorted(saved.keys() - stored.values() - aliases.keys()),
            )
        except CheckpointError:
            problem = "their tensors have other names or shapes"
            base_model.check_names(self._manifest, save.base_models(trained), problem)
            raise

    def _check_training(self) -> None:
        """Compare classes and groups of optimizers and schedulers, and shapes of their state."""
        world_size = collectives.group_size()
        for state in self._models:
            prepared = state.prepared
            if not self._reset:
                training_metadata.check_optimizers(self._optimizers(state), prepared)
                self._check_optimizer_state(state)
            training_metadata.check_schedulers(self._schedulers(state.number), prepared)
            if prepared.live_schedulers and self._manifest.world_size != world_size:
                self.report.notes.append(
                    f"Accelerate advances schedulers once per rank: {world_size} times per"
                    f" optimizer step, compared with {self._manifest.world_size} when saved"
                )
        if self._only is None:
            self._positions = self._match_loaders()
        if self._manifest.world_size == world_size:
            rank = collectives.rank()
            tensors = self._read_generators(f"rng.{rank:05d}.")
            self._rng = _rng_state(tensors, self._rng_metadata(rank))
        else:
            self.report.notes.append(
                f"random generators are unchanged: saved by {self._manifest.world_size} ranks, now"
                f" {world_size}; dropout masks will differ"
            )

    def _check_optimizer_state(self, state: ModelAndOptimizerState) -> None:
        saved_by = self._manifest.backend, self._manifest.world_size
        backend = accelerator_patch.current_config().options.backend
        if self._manifest.state_dicts and saved_by != (backend, collectives.group_size()):
            classes = [optimizer.kind.rpartition(".")[2] for optimizer in self._optimizers(state)]
            raise CheckpointError(
                f"The state of {' and '.join(map(printable, classes))} cannot be resharded. Load it"
                f" with backend {saved_by[0]} on {saved_by[1]} ranks, as saved, or with new"
                " optimizer state by --reset-optimizer (reset_optimizer=True)."
            )
        shapes = {key: shard.shape for key, shard in state.target_shards(optimizers=False).items()}
        stepped = {
            name
            for owned in state.prepared.live_optimizers
            for group in owned.recipe.param_group_names
            for name in group
        }
        for key, saved in self._state_keys(state).items():
            name = key.removeprefix(state.element_prefix).rpartition(".")[0]
            if name not in stepped or shapes.get(state.model_prefix + name) != saved.shape:
                raise CheckpointError(
                    f"The checkpoint has optimizer state {printable(key)} of shape {saved.shape},"
                    " which matches no prepared optimizer. To skip it, load with"
                    " --reset-optimizer (reset_optimizer=True)."
                )

    def _optimizers(self, state: ModelAndOptimizerState) -> list[OptimizerMetadata]:
        return [
            optimizer
            for optimizer in self._manifest.optimizers
            if optimizer.prefix == state.optimizer_prefix
        ]

    def _schedulers(self, number: int) -> list[Any]:
        return [
            scheduler
            for scheduler in self._manifest.schedulers
            if isinstance(scheduler, dict) and scheduler.get("model") == number
        ]

    def _state_keys(self, state: ModelAndOptimizerState) -> dict[str, TensorMetadata]:
        return {
            key: tensor
            for key, tensor in self._manifest.keys.items()
            if key.startswith(state.element_prefix)
        }

    # -- the state of the checkpoint

    def _readable_target(self, state: ModelAndOptimizerState) -> dict[str, Shard]:
        """Return the live shards to read for one model; a collective under FSDP1."""
        if self._weights_only:
            return state.target_shards(optimizers=False) | state.buffers(owned=False)
        keys = {} if self._reset else self._state_keys(state)
        for key, saved in keys.items():
            if not saved.dtype.startswith(("float", "bfloat", "int", "uint", "bool")):
                raise CheckpointError(
                    f"Optimizer state {printable(key)} of this checkpoint has dtype {saved.dtype}."
                    " Supported: floating point, integer and bool. Load without the optimizer"
                    " state with --weights-only."
                )
        state.allocate_optimizer_state(
            {key: getattr(torch, saved.dtype) for key, saved in keys.items()}
        )
        targets = state.target_shards()
        reshard.zero_unsaved(targets, keys)
        return targets | state.buffers(owned=False) | self._state_dict_target(state)

    def _state_dict_target(self, state: ModelAndOptimizerState) -> dict[str, Shard]:
        """Return host memory for the tensors of this rank's state dicts."""
        keys = self._manifest.keys
        saved = {key: keys[key] for key in keys if key.startswith(state.state_dict_prefix)}
        dtypes = {key: getattr(torch, tensor.dtype) for key, tensor in saved.items()}
        needed = sum(tensor.numel * dtypes[key].itemsize for key, tensor in saved.items())
        if self._reset or not saved:
            return {}
        if needed > self._manifest.size_bytes:
            raise CheckpointError(
                f"The optimizer state has {needed} bytes, more than the files of the checkpoint."
                " Load another checkpoint."
            )
        tensors = {key: torch.empty(saved[key].shape, dtype=dtypes[key]) for key in saved}
        self._state_dict_tensors |= tensors
        return {key: whole_shard(tensor) for key, tensor in tensors.items()}

    def _restore_derived_state(self) -> None:
        """Update what engines derive from the loaded tensors and set the state besides tensors."""
        for state in self._models:
            prepared, number = state.prepared, state.number
            if self._weights_only:
                state.layout.finalize_state({})
                continue
            if self._reset:
                state.reset_state_dicts()
            elif by_rank := self._manifest.state_dicts:
                trees = by_rank[state.state_dict_rank if len(by_rank) > 1 else 0]
                if not isinstance(trees, list) or len(trees) <= number:
                    raise CheckpointError(
                        "Cannot read the optimizer state. Load another checkpoint."
                    )
                state.load_state_dicts(trees[number], self._state_dict_tensors)
            counts = training_metadata.initial_scalar_state(state.layout.scalar_state())
            optimizers = [] if self._reset else self._optimizers(state)
            for saved in optimizers:
                counts |= {name: dict(scalars) for name, scalars in saved.counts.items()}
            state.layout.finalize_state(counts)
            # none after a reset, where the prepared groups keep their options but a schedule's rate
            for saved, owned in zip(optimizers, prepared.live_optimizers, strict=not self._reset):
                training_metadata.set_options(owned, training_metadata.group_options(saved, owned))
            for entry, wrapper in zip(
                self._schedulers(number), prepared.live_schedulers, strict=True
            ):
                training_metadata.set_scheduler(
                    wrapper.scheduler, entry["state"], rates=self._reset
                )
            self._set_counters(number, prepared)
        for loader, position in self._positions:
            dataloader_state.seek(loader, position)

    def _set_counters(self, number: int, prepared: PreparedModel) -> None:
        entries = self._entries()
        fields = entries[number] if number < len(entries) else {}
        steps, scale = fields.get("steps"), fields.get("scale")
        prepared.num_steps = steps if type(steps) is int else self._manifest.step
        prepared.owner.step = 0
        if isinstance(scale, list) and len(scale) == 2:  # noqa: PLR2004
            model_recipe.set_loss_scale(
                prepared, LossScale(scale=float(str(scale[0])), good_steps=int(str(scale[1])))
            )

    def _verify(self) -> None:
        """Compare digests with the manifest; a collective."""
        live: dict[str, Shard] = {}
        optimizers = not (self._weights_only or self._reset)
        for state in self._models:
            live |= state.owned_shards(optimizers=optimizers)
            live |= state.buffers(owned=True)
            if optimizers and state.state_dict_rank == collectives.rank():
                _, tensors = state.state_dicts()
                live |= {key: whole_shard(tensor) for key, tensor in tensors.items()}
        keys = self._manifest.keys
        expected = {key: keys[stored] for key in live if (stored := self._stored(key)) in keys}
        same_dtype = {key for key, tensor in expected.items() if tensor.dtype == _dtype(live[key])}
        actual = tensor_digest.global_digests({key: live[key] for key in sorted(same_dtype)})
        # Other ranks verify the tensors of their own state dicts.
        wrong = [key for key in same_dtype if expected[key].digest != actual[key]]
        if wrong:
            raise CheckpointError(
                f"Digest mismatch in {len(wrong)} of {len(actual)} tensors, for example"
                f" {printable(min(wrong))}. The load was undone. Load another checkpoint."
            )
        self.report.verified = len(actual)
        if cast := sorted(expected.keys() - same_dtype):
            dtype = _dtype(live[cast[0]])
            self.report.notes.append(
                f"{len(cast)} tensors were saved as {expected[cast[0]].dtype} and are now {dtype},"
                f" for example {cast[0]}"
            )

    # -- generators and loaders

    def _read_generators(self, prefix: str) -> dict[str, torch.Tensor]:
        """Read the tensors of random generators, by key without the prefix."""
        tensors: dict[str, torch.Tensor] = {}
        for key, tensor in self._manifest.keys.items():
            if not key.startswith(prefix):
                continue
            if tensor.numel > _GENERATOR_NUMBERS or tensor.dtype not in {"uint8", "int64"}:
                raise CheckpointError(
                    f"{printable(key)} is not the state of a random generator."
                    " Load another checkpoint."
                )
            tensors[key] = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        target = {key: whole_shard(tensor) for key, tensor in tensors.items()}
        if target:
            self._fetch_files(target)
            self.report.read_bytes += shard_io.read_shards(self._path, self._manifest, target)
        return {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}

    def _rng_metadata(self, rank: int) -> Mapping[str, Any]:
        """Return the saved state of a rank's generators besides tensors."""
        entry = self._manifest.rng[rank] if rank < len(self._manifest.rng) else None
        return entry if isinstance(entry, dict) else {}

    def _match_loaders(self) -> list[tuple[Any, LoaderPosition]]:
        """Return a loader for each saved position, with as many samples as the saved one had.

        That of the same variable comes first, then the one that was prepared last.
        """
        loaders = [
            (each, prepared_models.variable_of(each)) for each in prepared_models.all_loaders()
        ]
        saved = list(reversed(list(enumerate(self._manifest.positions))))
        if not all(isinstance(entry, dict) for _, entry in saved):
            raise CheckpointError(_BAD_LOADERS)
        names = [name for _, name in loaders if name]
        positions = {}
        for number, entry in sorted(saved, key=lambda each: each[1].get("variable") not in names):
            length, variable = entry.get("length"), entry.get("variable")
            same = [each for each in loaders if dataloader_state.num_samples(each[0]) == length]
            if not same:
                which = f"the loader {printable(variable)}" if variable else "a loader"
                self.report.notes.append(
                    f"the position of {which} was not restored: no other prepared loader has as"
                    f" many samples ({printable(length)})"
                )
                continue
            found = ([each for each in same if variable and each[1] == variable] or same)[-1]
            loaders.remove(found)
            positions[number] = (found[0], self._position(found[0], number, entry))
        return [positions[number] for number in sorted(positions)]

    def _position(self, loader: Any, number: int, entry: Mapping[str, Any]) -> LoaderPosition:
        """Return the saved position of a loader, rescaled if its global batch size differs."""
        same_world_size = self._manifest.world_size == collectives.group_size()
        # All ranks draw the same permutation: use that of rank 0.
        rank = collectives.rank() if same_world_size else 0
        tensors: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for key, tensor in self._read_generators(f"position.{rank:05d}.{number}.").items():
            kind, _, name = key.partition(".")
            tensors[kind][name] = tensor
        metadata = self._rng_metadata(rank).get("positions")
        random = metadata[number] if isinstance(metadata, list) and number < len(metadata) else None
        position = LoaderPosition(
            epoch=_count(entry, "epoch"),
            batches=_count(entry, "batches"),
            seen=_count(entry, "seen"),
            samples=None if entry.get("samples") is None else _count(entry, "samples"),
            generators=dict(tensors["generator"]),
            rng=None if random is None else _rng_state(tensors["random"], random),
        )
        batch_size = dataloader_state.global_batch_size(loader)
        if same_world_size and entry.get("batch_size") == batch_size:
            return position
        fit, note = dataloader_state.rescale_position(loader, position, self._manifest.world_size)
        if note:
            self.report.notes.append(note)
        return fit

    # -- after a failure

    def _roll_back(
        self, error: CheckpointError, loaders: Sequence[tuple[Any, LoaderPosition]]
    ) -> None:
        """Restore the state from before the load.

        Raises:
            CheckpointError: restoring failed too.
        """
        try:
            with self._phase("going back"):
                for state, backup in zip(self._models, self._backups, strict=True):
                    backup.restore(state, optimizers=not self._weights_only)
                for loader, position in loaders:
                    dataloader_state.seek(loader, position)
        except CheckpointError as second:
            raise CheckpointError(
                f"{str(error).removesuffix('.')}. The previous state could not be restored either:"
                f" {str(second).removesuffix('.')}. Run %nbdist restart, run the cell with"
                " accelerator.prepare(...) and load a checkpoint."
            ) from second

    # -- report

    def _summarise(self) -> None:
        report, manifest = self.report, self._manifest
        report.step, report.backend = manifest.step, manifest.backend
        report.world_size = manifest.world_size
        for prepared in (state.prepared for state in self._models):
            model, names = type(prepared.meta.model).__name__, prepared.meta.names
            report.loaded.append(f"{model} ({len(names)} parameters)")
            if not self._weights_only:
                classes = [owned.recipe.optimizer_class for owned in prepared.live_optimizers]
                classes += [type(wrapper.scheduler) for wrapper in prepared.live_schedulers]
                report.loaded += [cls.__name__ for cls in classes]
        if self._weights_only:
            report.notes.append("weights only, as requested")
            return
        if self._reset:
            report.notes.append("the optimizers begin with new state, as requested")
        report.loaded.append(f"step {manifest.step}")
        if self._only is None and training_metadata.trainer_states(manifest):
            report.notes.append(
                "the Trainer begins at step 0; to continue its run, use"
                f" trainer.train(resume_from_checkpoint={str(self._location)!r})"
            )
        if self._rng is not None:
            report.loaded.append("random generators")
        for _, position in self._positions:
            report.loaded.append(f"loader at batch {position.batches} of epoch {position.epoch}")
        not_saved = manifest.extra.get("left_out")
        for name in not_saved if isinstance(not_saved, list) else ():
            report.notes.append(f"not in the checkpoint: {name}")


def _rng_state(tensors: Mapping[str, torch.Tensor], metadata: Any) -> rng_state.RngState:
    try:
        return rng_state.from_tensors_and_json(dict(tensors), metadata)
    except ValueError as error:
        raise CheckpointError(f"{error}. Load another checkpoint.") from error


def _dtype(shard: Shard) -> str:
    return str(shard.dtype).removeprefix("torch.")


def _count(entry: Mapping[str, Any], name: str) -> int:
    value = entry.get(name)
    if type(value) is not int or value < 0:
        raise CheckpointError(_BAD_LOADERS)
    return value
