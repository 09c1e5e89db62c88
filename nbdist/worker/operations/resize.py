"""Switch that needs new rank processes, for example for another world size; runs on both.

    old ranks   checking    check that everything can be rebuilt; changes nothing
                packing     pickle the namespace (`namespace_pickle`) and unpickle it as a test
                writing     each rank writes its own shards and its pickle
    (the kernel ends the old ranks and starts the new ones)
    new ranks   unpacking   unpickle the recipes of models and optimizers
                building    create and prepare accelerators, models, optimizers and loaders
                loading     each rank reads its shards
                verifying   compare the digest of each tensor with that of the old ranks
                binding     bind the user's variables; restore random generators last

The old ranks agree after each phase; a new rank raises at once. The old ranks stay unchanged
until everything is written, and the files are sufficient to rebuild them.

The pickle has these stages: the state of the process, functions and classes, the models and what
they need (`_RankBuildState`), schedulers and loaders, and the other variables.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler, get_sampler

from nbdist import checkpoint
from nbdist.errors import SwitchError
from nbdist.hardware import discovery
from nbdist.number_formatting import format_bytes
from nbdist.protocol.operations import RankSwitchReport, SaveRequest
from nbdist.rank_sets import describe_ranks
from nbdist.state import collectives, optimizer_recipes, reshard, shard_io, tensor_digest
from nbdist.state.shards import Shard, total_bytes
from nbdist.strategies import Options
from nbdist.worker.engines import accelerator_patch, trainer, wrap_policy
from nbdist.worker.memory import memory_probe
from nbdist.worker.operations import namespace_pickle, save, switch
from nbdist.worker.operations.collective_phases import CHECKING_PHASE, CollectivePhases
from nbdist.worker.operations.namespace_pickle import ExternalObject, PickleStage
from nbdist.worker.training import dataloader_state, prepared_models, rng_state
from nbdist.worker.training.model_recipe import ModelRecipe
from nbdist.worker.training.release_models import unchanged_lists
from nbdist.worker.training.training_state import ModelAndOptimizerState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.protocol.operations import ResizeLoadRequest, ResizeSaveRequest
    from nbdist.worker.operations import RankContext
    from nbdist.worker.training.dataloader_state import LoaderPosition
    from nbdist.worker.training.prepared_models import PreparedModel

CHECKPOINT_NAME = "state"
"""Name of the checkpoint within the folder."""
_PLAIN = (int, float, str, tuple, type, types.ModuleType, types.NoneType)
"""Types of predefined names that are not rank-local objects."""
_DEFINITIONS = (types.ModuleType, types.FunctionType, type)
"""Types of variables that are unpickled first because others may call them."""
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_ENGINES_OWN = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "NBDIST_", "OMP_", *_VISIBLE)
"""Prefixes of environment variables that are not carried."""


@dataclass(slots=True, kw_only=True)
class _RankBuildState:
    """State that a new rank needs before it can build anything."""

    random: rng_state.RngState
    next_step: int
    accelerators: list[tuple[bool, dict[str, Any], dict[str, Any]]]
    """Per Accelerator: whether it is the predefined one, its arguments, attributes to restore."""
    models: list[tuple[int, ModelRecipe]]
    """Index of the accelerator and recipe of each model."""
    forward_inputs: memory_probe.ForwardInputs
    """Last call of the last prepared model: the planner on the new ranks needs the batch."""


@dataclass(slots=True, kw_only=True)
class _LoaderState:
    accelerator: int
    given: Any
    """The user's loader."""
    position: LoaderPosition
    total_batch: int | None
    seed: int | None
    """Seed of Accelerate's SeedableRandomSampler, which would otherwise draw a new one."""


# -- on the old ranks


def save_for_resize(request: ResizeSaveRequest, context: RankContext) -> RankSwitchReport:
    """Write everything to the first folder with enough free space; changes nothing; a collective.

    Raises:
        SwitchError: a phase failed; raised on all ranks, and the state is unchanged.
    """
    return _ResizeSave(request, context).run()


class _ResizeSave:
    def __init__(self, request: ResizeSaveRequest, context: RankContext) -> None:
        self._request, self._context = request, context
        self._phase = CollectivePhases("Switch", context.on_phase, SwitchError)
        self.report = RankSwitchReport(seconds=self._phase.seconds)
        self._shards: dict[str, Shard] = {}

    def run(self) -> RankSwitchReport:
        generators = rng_state.get_rng_state()
        try:
            with self._phase(CHECKING_PHASE):
                self._check_trainers()
                self.report.notes += switch.check_models(
                    Options(**self._request.options),
                    self._request.world_size,
                    self._context.variables,
                    reset_optimizer=self._request.reset_optimizer,
                )
                self.report.notes += [
                    f"step hooks of {type(owned.inner_optimizer).__name__} are not carried;"
                    " register them again"
                    for prepared in prepared_models.all_models()
                    for owned in prepared.live_optimizers
                    if optimizer_recipes.step_hooks(owned.inner_optimizer)
                ]
            with self._phase("packing"):
                pickled = self._pickle(generators)
            with self._phase("making room"):
                blocks = pickled.hash_blocks()
                own_bytes = total_bytes(self._shards) + len(pickled.stream)
                folder = _choose_folder(self._request.folders, own_bytes, dict(blocks))
            self._write(pickled, [name for name, _ in blocks], folder)
        finally:
            rng_state.set_rng_state(generators)
        self.report.folder = str(folder)
        self.report.sent_bytes = own_bytes
        self._report_not_carried()
        return self.report

    def _check_trainers(self) -> None:
        """Raise SwitchError if the model of a Trainer, which stays behind, is in no variable."""
        variables = self._variables()
        held = prepared_models.models_in(variables)
        for name, value in variables.items():
            for found in trainer.find_trainers([value]):
                reference = prepared_models.find_model(found.model)
                if reference is not None and reference.prepared not in held:
                    raise SwitchError(
                        f"New ranks cannot get the Trainer {name}, and no variable holds its model."
                        f" Run `model = {name}.model` in a cell, then switch again."
                    )

    def _pickle(self, generators: rng_state.RngState) -> namespace_pickle.PickledNamespace:
        """Pickle this rank's state except model shards; record variables that cannot be pickled."""
        built, trained = accelerator_patch.built_accelerators(), prepared_models.all_models()
        plan = _RankBuildState(
            random=generators,
            next_step=self._context.reporter.next_step,
            accelerators=[
                (
                    accelerator is self._context.predefined["accelerator"],
                    dict(vars(accelerator).get("_nbdist_arguments", {})),
                    {
                        name: vars(accelerator)[name]
                        for name in ("step", "flag_tensor")
                        if name in vars(accelerator)
                    },
                )
                for accelerator in built
            ],
            models=[
                (
                    next(place for place, other in enumerate(built) if other is prepared.owner),
                    self._capture_recipe(prepared),
                )
                for prepared in trained
            ],
            forward_inputs=memory_probe.last_forward_inputs(),
        )
        schedulers = [
            [wrapper.scheduler for wrapper in prepared.live_schedulers] for prepared in trained
        ]
        loaders = [
            (loader, state)
            for loader in prepared_models.all_loaders()
            if (state := _loader_state(loader, built)) is not None
        ]
        external = _external_objects(
            self._context.predefined, built, trained, [loader for loader, _ in loaders]
        )
        training = schedulers, [state for _, state in loaders]
        variables = self._variables()
        pickled = self._pickle_variables(plan, training, variables, external)
        # What the report lists.
        items: list[str] = []
        for (_, recipe), own in zip(plan.models, schedulers, strict=True):
            items += recipe.describe(own, reset_optimizer=self._request.reset_optimizer)
            items += [f"step {recipe.num_steps}"] if recipe.num_steps else []
        items += [f"{len(loaders)} loader{'s' * (len(loaders) != 1)}"] if loaders else []
        count = len(variables) - len(self.report.not_carried)
        self.report.carried = [*items, f"{count} variable{'s' * (count != 1)}"]
        return pickled

    def _pickle_variables(
        self,
        plan: _RankBuildState,
        training: object,
        variables: dict[str, Any],
        external: list[ExternalObject],
    ) -> namespace_pickle.PickledNamespace:
        """Pickle and test, dropping variables that fail; they are recorded with the reason."""
        early = {name for name, value in variables.items() if isinstance(value, _DEFINITIONS)}
        process = _process_state(self._context.initial_environ)
        while True:
            carried = [name for name in variables if name not in self.report.not_carried]
            stages = [
                PickleStage(process, 0),
                *(PickleStage(variables[name], 0, name) for name in carried if name in early),
                PickleStage(plan, 1),
                PickleStage(training, 2),
                *(PickleStage(variables[name], 3, name) for name in carried if name not in early),
            ]
            try:
                pickled = namespace_pickle.pickle_stages(stages, external, self._context.variables)
                namespace_pickle.verify_unpickles(pickled, external, self._context.predefined)
            except namespace_pickle.PickleStageError as error:
                name = stages[error.stage_index].name
                if not name:
                    raise SwitchError(
                        f"The training state cannot be moved to the new ranks: {error}"
                    ) from error
                if error.is_too_early:
                    early.discard(name)
                else:
                    self.report.not_carried[name] = str(error)
            else:
                return pickled

    def _capture_recipe(self, prepared: PreparedModel) -> ModelRecipe:
        state, reset = ModelAndOptimizerState(prepared), self._request.reset_optimizer
        owned = state.owned_shards(optimizers=not reset)
        self.report.state_bytes += total_bytes(owned)
        self._shards |= owned
        self._shards |= state.buffers(owned=True)  # makes the files a complete checkpoint
        scalar_state = {} if reset else state.layout.scalar_state()
        recipe = ModelRecipe.capture(prepared, scalar_state, hooks=False)
        recipe.digests = tensor_digest.global_digests(owned)
        return recipe

    def _variables(self) -> dict[str, Any]:
        """Return the user's variables, without predefined names and IPython's history."""
        variables = {}
        for name, value in self._context.variables.items():
            numbered = name.lstrip("_").removeprefix("i").isdigit()  # _12 and _i12
            history = name.strip("_") in {"", "i", "ii", "iii"} or numbered
            if name.startswith("_") and history:
                continue
            if name not in self._context.predefined or self._context.predefined[name] is not value:
                variables[name] = value
        return variables

    def _write(
        self, pickled: namespace_pickle.PickledNamespace, digests: list[str], folder: Path
    ) -> None:
        rank, trained = collectives.rank(), prepared_models.all_models()
        draft: checkpoint.PendingCheckpoint | None = None
        with self._phase("opening files"):
            if trained:
                draft = save.begin_draft(SaveRequest(root=str(folder), name=CHECKPOINT_NAME), 0)
        with self._phase("writing"):
            namespace_pickle.write_namespace(pickled, digests, folder, rank)
            if draft is not None:
                save.write_rank_files(draft, rank, {"model": self._shards}, {})
        with self._phase("closing files"):
            if draft is None or rank != 0:
                return
            reports = save.wait_for_reports(draft, collectives.group_size())
            manifest = checkpoint.Manifest(
                backend=accelerator_patch.current_config().options.backend,
                world_size=collectives.group_size(),
                step=max(prepared.num_steps for prepared in trained),
                keys=checkpoint.merge_tensors(reports),
                files=tuple(file for report in reports for file in report.files),
            )
            draft.commit(CHECKPOINT_NAME, manifest, overwrite=False)

    def _report_not_carried(self) -> None:
        """Report the variables and generators of removed ranks; a collective."""
        by_rank = collectives.all_gather_values((set(self._variables()), self.report.not_carried))
        world_size = len(by_rank)
        lost: dict[str, str] = {}
        for name in dict.fromkeys(name for _, bad in by_rank for name in bad):
            ranks = [rank for rank, (_, bad) in enumerate(by_rank) if name in bad]
            reason = by_rank[ranks[0]][1][name]
            everywhere = len(ranks) == world_size
            lost[name] = reason if everywhere else f"{reason} ({describe_ranks(ranks)})"
        removed = range(self._request.world_size, world_size)
        carried_names = set().union(*(names for names, _ in by_rank[: self._request.world_size]))
        for name in sorted({name for rank in removed for name in by_rank[rank][0]} - carried_names):
            lost[name] = f"only {describe_ranks(removed)} had it"
        self.report.not_carried = lost
        if removed:
            end, their = ("ends", "its") if len(removed) == 1 else ("end", "their")
            self.report.will_differ.append(
                f"{describe_ranks(removed)} {end}; {their} random generators and {their} own values"
                " of variables are lost"
            )


def _external_objects(
    predefined: Mapping[str, Any],
    built: list[Accelerator],
    trained: list[PreparedModel],
    loaders: list[Any],
) -> list[ExternalObject]:
    """Return the objects that a new rank creates itself, which are pickled by key."""
    external = [
        ExternalObject(value, ("name", name), 0)
        for name, value in predefined.items()
        if not isinstance(value, _PLAIN)
    ]
    external += [
        ExternalObject(accelerator, ("accelerator", place), 2)
        for place, accelerator in enumerate(built)
    ]
    for number, prepared in enumerate(trained):
        for place, owned in enumerate(prepared.live_optimizers):
            if (user_optimizer := owned.user_optimizer()) is not None:
                external.append(ExternalObject(user_optimizer, (number, "given", place), 2))
        for key, part in switch.replaceable_objects(number, prepared).items():
            external.append(ExternalObject(part, key, 3))
        for place, wrapper in enumerate(prepared.live_schedulers):
            external.append(ExternalObject(wrapper, ("scheduler", number, place), 3))
    external += [
        ExternalObject(loader, ("loader", place), 3) for place, loader in enumerate(loaders)
    ]
    return external


def _loader_state(loader: Any, built: list[Accelerator]) -> _LoaderState | None:
    """Return the state of a prepared loader; None if it or its Accelerator is unknown."""
    user_loader = prepared_models.user_loader(loader)
    owners = [
        place
        for place, owner in enumerate(built)
        if any(other is loader for other in owner._dataloaders)  # noqa: SLF001
    ]
    if user_loader is None or not owners:
        return None
    sampler = get_sampler(loader)
    position = dataloader_state.position_of(loader)
    if position.batches and not dataloader_state.is_iterating(loader):
        # Its iterator is gone: the next one begins an epoch.
        position = dataloader_state.LoaderPosition(epoch=loader.iteration, seen=position.seen)
    return _LoaderState(
        accelerator=owners[0],
        given=user_loader,
        position=position,
        total_batch=dataloader_state.global_batch_size(loader),
        seed=sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None,
    )


def _choose_folder(folders: Sequence[str], own_bytes: int, blocks: dict[str, int]) -> Path:
    """Return the first folder with enough free space for all ranks; a collective.

    Args:
        folders: candidates, best first.
        own_bytes: bytes that this rank writes besides blocks.
        blocks: digest -> size in bytes; equal blocks of several ranks are written once.

    Raises:
        SwitchError: no folder has enough free space.
    """
    total = 0
    all_blocks: dict[str, int] = {}
    for rank_bytes, rank_blocks in collectives.all_gather_values((own_bytes, blocks)):
        total += rank_bytes
        all_blocks |= rank_blocks
    total += sum(all_blocks.values())
    checked = []
    for folder in map(Path, folders):
        free = shutil.disk_usage(folder).free
        if folder.is_relative_to("/dev/shm"):  # noqa: S108 - its files are in host memory
            free = min(free, discovery.host_free_memory_bytes())
        # Rank 0 decides: other ranks may already see less free space.
        free = collectives.all_gather_values(free)[0]
        if free > total:
            return folder
        checked.append(f"{folder.parent} has {format_bytes(free)} free")
    raise SwitchError(
        f"State and variables need {format_bytes(total)} of temporary space for the new ranks,"
        f" but {', '.join(checked)}. Free space in one of them, or set TMPDIR to a folder with"
        " enough space."
    )


# -- on the new ranks


def load_after_resize(request: ResizeLoadRequest, context: RankContext) -> RankSwitchReport:
    """Restore what the old ranks wrote.

    Raises:
        SwitchError: a phase failed on this rank; the new ranks are then unusable.
    """
    return _ResizeLoad(request, context).run()


class _ResizeLoad:
    def __init__(self, request: ResizeLoadRequest, context: RankContext) -> None:
        self._phase = CollectivePhases("Switch", context.on_phase, SwitchError, coordinated=False)
        self.report = RankSwitchReport(seconds=self._phase.seconds)
        self._folder, self._variables = Path(request.folder), context.variables
        self._context = context
        self._old_world_size = request.world_size
        self._rank, self._world_size = collectives.rank(), collectives.group_size()
        self._built: list[Accelerator] = []
        self._made: list[Any] = []
        """References to prepared objects until the user's variables are bound."""

    def run(self) -> RankSwitchReport:
        predefined = self._context.predefined
        with self._phase("unpacking"):
            old_rank = self._rank if self._rank < self._old_world_size else 0
            reader = namespace_pickle.NamespaceReader(
                self._folder, old_rank, predefined["device"], self._variables
            )
            for name, value in predefined.items():
                if not isinstance(value, _PLAIN):
                    reader.known["name", name] = value
            # First sys.path: the user's modules may be in folders that only the old ranks had.
            _restore_process_state(reader.read_stage())
            self.report.bound += reader.bind_variables()
            plan: _RankBuildState = reader.read_stage()
            self._context.reporter.next_step = plan.next_step
        with self._phase("building"):
            self._build(plan, reader)
        models = list(
            zip(prepared_models.all_models(), (recipe for _, recipe in plan.models), strict=True)
        )
        with self._phase("loading"):
            for prepared, recipe in models:
                self._load(prepared, recipe)
        with self._phase("verifying"):
            self.report.verified = sum(recipe.verify(prepared) for prepared, recipe in models)
        with self._phase("binding"):
            self.report.bound += reader.bind_variables()
            # cloudpickle overwrites it in the globals of each function.
            self._variables["__builtins__"] = predefined["__builtins__"]
        self._made.clear()
        self._restore_generators(plan)
        return self.report

    def _build(self, plan: _RankBuildState, reader: namespace_pickle.NamespaceReader) -> None:
        for place, (is_predefined, arguments, attributes) in enumerate(plan.accelerators):
            if is_predefined:
                accelerator: Accelerator = self._context.predefined["accelerator"]
                accelerator._build(())  # noqa: SLF001 - as the first prepare() does
            else:
                accelerator = Accelerator(**arguments)
            vars(accelerator).update(attributes)
            self._built.append(accelerator)
            reader.known["accelerator", place] = accelerator
        unprepared = [recipe.build() for _, recipe in plan.models]
        for number, (_, optimizers) in enumerate(unprepared):
            for place, optimizer in enumerate(optimizers):
                reader.known[number, "given", place] = optimizer
        schedulers, loaders = reader.read_stage()
        for number, (model, optimizers) in enumerate(unprepared):
            place, recipe = plan.models[number]
            prepared = self._prepare_model(
                self._built[place], model, optimizers, schedulers[number], is_kept=recipe.is_kept
            )
            reader.known.update(switch.replaceable_objects(number, prepared))
            for place, optimizer in enumerate(optimizers):
                reader.known[number, "given", place] = optimizer
            for place, wrapper in enumerate(prepared.live_schedulers):
                reader.known["scheduler", number, place] = wrapper
        memory_probe.restore_forward_inputs(plan.forward_inputs)
        for place, state in enumerate(loaders):
            reader.known["loader", place] = self._prepare_loader(state)
        # accelerate 1.15 advances each scheduler once per rank at each optimizer step.
        counting = {
            type(wrapper.scheduler).__name__
            for prepared in prepared_models.all_models()
            for wrapper in prepared.live_schedulers
            if wrapper.step_with_optimizer and not wrapper.split_batches
        }
        if counting and self._world_size != self._old_world_size:
            self.report.will_differ.append(
                f"{', '.join(sorted(counting))}: {self._world_size} scheduler steps (before:"
                f" {self._old_world_size}) per optimizer step, so that the learning rate follows"
                " the number of samples with an unchanged batch size per rank"
            )

    def _prepare_model(
        self,
        owner: Accelerator,
        model: torch.nn.Module,
        optimizers: list[Any],
        schedulers: list[Any],
        *,
        is_kept: bool,
    ) -> PreparedModel:
        own = {id(optimizer): optimizer for optimizer in optimizers}
        for scheduler in schedulers:  # marks them too, so that torch 2.13 does not warn
            optimizer_recipes.rebind_scheduler(scheduler, own)
        keeping = contextlib.nullcontext() if is_kept else unchanged_lists(owner)
        with wrap_policy.defer_weights(), keeping:
            self._made += owner.prepare(model, *optimizers, *schedulers, None)
        self._made += [model, optimizers]
        return prepared_models.all_models()[-1]

    def _prepare_loader(self, state: _LoaderState) -> Any:
        loader = self._built[state.accelerator].prepare_data_loader(state.given)
        prepared_models.register_loader(loader, state.given)
        self._made.append(loader)
        sampler = get_sampler(loader)
        if isinstance(sampler, SeedableRandomSampler) and state.seed is not None:
            sampler.initial_seed = state.seed
        position, remark = dataloader_state.rescale_position(
            loader, state.position, self._old_world_size
        )
        loader.iteration = position.epoch
        dataloader_state.seek(loader, position)
        total = dataloader_state.global_batch_size(loader)
        if total != state.total_batch:
            self.report.will_differ.append(
                f"global batch size: {state.total_batch} -> {total} samples, with an unchanged"
                " batch size per rank"
            )
        if remark:
            self.report.will_differ.append(remark)
        return loader

    def _load(self, prepared: PreparedModel, recipe: ModelRecipe) -> None:
        """Load a model; add shards whose dtype changed to its recipe, as they were written."""
        state, path = ModelAndOptimizerState(prepared), self._folder / CHECKPOINT_NAME
        with checkpoint.CheckpointReader.open_folder(path) as opened:
            manifest = opened.manifest
        dtypes = {name: getattr(torch, manifest.keys[name].dtype) for name in recipe.digests}
        state.allocate_optimizer_state(dtypes)
        targets = state.target_shards()
        reshard.zero_unsaved(targets, manifest.keys)
        shard_io.read_shards(path, manifest, targets)
        state.layout.finalize_state(recipe.scalar_state)
        recipe.load_buffers(prepared)
        for name, shard in state.owned_shards().items():
            if name not in recipe.digests:
                continue
            dtype = dtypes[name]
            if dtype != shard.dtype:
                pieces = tuple(
                    piece._replace(view=torch.empty(piece.stop - piece.start, dtype=dtype))
                    for piece in shard.pieces
                )
                recipe.tensors[name] = Shard(shape=shard.shape, dtype=dtype, pieces=pieces)
        shard_io.read_shards(path, manifest, recipe.tensors)

    def _restore_generators(self, plan: _RankBuildState) -> None:
        """Restore the generators of the old rank with this number, or seed new ones."""
        rng_state.set_rng_state(plan.random)
        if self._world_size > self._old_world_size:
            added = range(self._old_world_size, self._world_size)
            self.report.will_differ.append(
                f"{describe_ranks(added)} {'are' if len(added) > 1 else 'is'} new: random"
                " generators start from seeds derived from rank 0, variables are copies of rank 0"
            )
        if self._rank >= self._old_world_size:
            octets = plan.random.cpu.numpy().tobytes() + str(self._rank).encode()
            seed = int.from_bytes(hashlib.blake2b(octets, digest_size=4).digest(), "little")
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002 - the one that users' code draws from
            torch.manual_seed(seed)


# -- the process


def _process_state(before: Mapping[str, str]) -> dict[str, Any]:
    """Return the process state that the user may have changed, besides variables."""
    return {
        "cwd": os.getcwd(),  # noqa: PTH109 - a str
        "path": list(sys.path),
        "environ": {
            name: value
            for name, value in os.environ.items()
            if before.get(name) != value and not name.startswith(_ENGINES_OWN)
        },
        "unset": [name for name in before if name not in os.environ],
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "grad": torch.is_grad_enabled(),
    }


def _restore_process_state(process: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the folder may be gone
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
