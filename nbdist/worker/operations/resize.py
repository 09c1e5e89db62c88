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
from torch import distributed

from nbdist import checkpoint
from nbdist.errors import SwitchError
from nbdist.hardware import discovery
from nbdist.protocol.operations import RankSwitchReport
from nbdist.state import collectives, digest, optimizer_recipes, reshard, shard_io
from nbdist.state.shards import Shard, total_bytes
from nbdist.strategies import Options
from nbdist.worker.engines import accelerator as accelerators
from nbdist.worker.engines import wrap_policy
from nbdist.worker.memory import memory_probe
from nbdist.worker.operations import namespace_pickle, switch
from nbdist.worker.operations.transaction import CHECKING_PHASE, Transaction
from nbdist.worker.training import dataloader_state, prepared_models, rng_state
from nbdist.worker.training.model_recipe import ModelRecipe
from nbdist.worker.training.model_state import ModelState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence

    from nbdist.checkpoint import CheckpointFile, Manifest
    from nbdist.protocol.operations import ResizeLoadRequest, ResizeSaveRequest
    from nbdist.worker.initial_namespace import InitialNamespace
    from nbdist.worker.operations import RankContext
    from nbdist.worker.operations.namespace_pickle import ExternalObject
    from nbdist.worker.training.dataloader_state import LoaderPosition
    from nbdist.worker.training.prepared_models import PreparedModel

CHECKPOINT_NAME = "state"
"""Name of the checkpoint within the folder."""
_PLAIN = (int, float, str, tuple, type, types.ModuleType, types.NoneType)
"""Types of predefined names that are not rank-local objects."""
_DEFINITIONS = (types.ModuleType, types.FunctionType, type)
"""Types of variables that are unpickled first because others may call them."""
_ENGINES_OWN = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "NBDIST_", "CUDA_VISIBLE_DEVICES", "OMP_")
"""Prefixes of environment variables that are not carried."""


@dataclass(slots=True, kw_only=True)
class _BuildPlan:
    """State that a new rank needs before it can build anything."""

    world_size: int
    random: rng_state.RngState
    next_step: int
    accelerators: list[tuple[bool, dict[str, Any], dict[str, Any]]]
    """Per Accelerator: whether it is the predefined one, its arguments, attributes to restore."""
    models: list[tuple[int, ModelRecipe]]
    """Index of the accelerator and recipe of each model."""
    fed: memory_probe.ForwardInputs
    """Last call of the last prepared model: the planner on the new ranks needs the batch."""


@dataclass(slots=True, kw_only=True)
class _LoaderState:
    """State of a prepared loader."""

    accelerator: int
    given: Any
    """The user's loader."""
    position: LoaderPosition
    total_batch: int | None
    seed: int | None
    """Seed of Accelerate's SeedableRandomSampler, which would otherwise draw a new one."""


def save_for_resize(request: ResizeSaveRequest, rank: RankContext) -> RankSwitchReport:
    """Save everything that the ranks after a resize need; collective."""
    return ResizeSave(
        Options.from_json(request.options),
        rank.variables,
        rank.initial_namespace,
        on_phase=rank.on_phase,
        world_size=request.world_size,
        reset_optimizer=request.reset_optimizer,
    ).run([Path(folder) for folder in request.folders])


def load_after_resize(request: ResizeLoadRequest, rank: RankContext) -> RankSwitchReport:
    """Restore what the ranks before a resize saved; collective."""
    return ResizeRestore(
        Path(request.folder),
        rank.variables,
        rank.initial_namespace,
        on_phase=rank.on_phase,
        old_world_size=request.world_size,
    ).run()


class ResizeSave:
    """First half, on the old ranks: writes everything to files and changes nothing."""

    def __init__(
        self,
        new_options: Options,
        names: MutableMapping[str, Any],
        initial_namespace: InitialNamespace,
        *,
        on_phase: Callable[[str], object],
        world_size: int,
        reset_optimizer: bool = False,
    ) -> None:
        """Set up the first half of a resize.

        Args:
            new_options: validated options of the new ranks.
            names: the user's variables.
            initial_namespace: predefined names of this rank.
            on_phase: called with the name of each phase.
            world_size: number of new ranks.
            reset_optimizer: drop the state of the optimizers.
        """
        self._phase = Transaction("Switch", on_phase, SwitchError)
        self.report = RankSwitchReport(seconds=self._phase.seconds)
        self._then, self._names, self._initial_namespace = new_options, names, initial_namespace
        self._world_size, self._reset = world_size, reset_optimizer
        self._rank = distributed.get_rank()
        self._share: dict[str, Shard] = {}

    def run(self, folders: Sequence[Path]) -> RankSwitchReport:
        """Write everything to the first folder with enough free space.

        Raises:
            SwitchError: a phase failed; raised on all ranks, and the state is unchanged.
        """
        generators = rng_state.get_rng_state()
        try:
            with self._phase(CHECKING_PHASE):
                self.report.notes += switch.check_models(
                    self._then, self._world_size, reset_optimizer=self._reset
                )
                trained = prepared_models.all_models()
                for prepared in trained:
                    self.report.notes += _hooks_left(prepared)
            with self._phase("packing"):
                packed = self._packed(trained, generators)
            with self._phase("making room"):
                plan = namespace_pickle.plan_writes(
                    packed, self._rank, collectives.all_gather_values
                )
                folder = _with_room(folders, total_bytes(self._share) + plan.size_bytes)
            self._write(packed, plan, folder)
        finally:
            rng_state.set_rng_state(generators)
        self.report.folder = str(folder)
        self.report.sent_bytes = total_bytes(self._share) + plan.size_bytes
        self._report_removed_ranks()
        return self.report

    # -- packing

    def _packed(
        self, trained: list[PreparedModel], generators: rng_state.RngState
    ) -> namespace_pickle.PickledNamespace:
        """Pickle this rank's state except model shards; record variables that cannot be pickled."""
        built = accelerators.built_accelerators()
        first = _BuildPlan(
            world_size=distributed.get_world_size(),
            random=generators,
            next_step=self._initial_namespace.reporter.next_step,
            accelerators=[
                _made_from(accelerator, self._initial_namespace) for accelerator in built
            ],
            models=[
                (_place(trained_model.owner, built), self._capture_recipe(number, trained_model))
                for number, trained_model in enumerate(trained)
            ],
            fed=memory_probe.last_forward_inputs(),
        )
        schedules = [
            [wrapper.scheduler for wrapper in trained_model.live_schedulers]
            for trained_model in trained
        ]
        loaders = [(loader, _loader(loader, built)) for loader in prepared_models.all_loaders()]
        second = schedules, [recipe for _, recipe in loaders if recipe is not None]
        carried_loaders = [loader for loader, recipe in loaders if recipe is not None]
        external = _known(self._initial_namespace, built, trained, carried_loaders)
        variables = self._variables()
        packed = self._packed_with(first, second, variables, external)
        self._summarise(first, second, len(variables) - len(self.report.not_carried))
        return packed

    def _packed_with(
        self,
        first: _BuildPlan,
        second: object,
        variables: dict[str, Any],
        external: list[ExternalObject],
    ) -> namespace_pickle.PickledNamespace:
        """Pickle and test, dropping variables that fail; they are recorded with the reason."""
        early = {name for name, value in variables.items() if isinstance(value, _DEFINITIONS)}
        own_stages = [
            namespace_pickle.PickleStage(_process(self._initial_namespace.environ), 0),
            namespace_pickle.PickleStage(first, 1),
            namespace_pickle.PickleStage(second, 2),
        ]
        while True:
            remaining = [name for name in variables if name not in self.report.not_carried]
            stages = [
                own_stages[0],
                *(
                    namespace_pickle.PickleStage(variables[name], 0, name)
                    for name in remaining
                    if name in early
                ),
                *own_stages[1:],
                *(
                    namespace_pickle.PickleStage(variables[name], 3, name)
                    for name in remaining
                    if name not in early
                ),
            ]
            try:
                pickled = namespace_pickle.pickle_stages(stages, external, self._names)
                namespace_pickle.verify_unpickles(pickled, external, self._initial_namespace.names)
            except namespace_pickle.PickleStageError as error:
                name = stages[error.stage_index].name
                if not name:
                    message = f"The training state cannot be moved to the new ranks: {error}"
                    raise SwitchError(message) from error
                if error.is_too_early:
                    early.discard(name)
                else:
                    self.report.not_carried[name] = str(error)
            else:
                return pickled

    def _capture_recipe(self, number: int, prepared: PreparedModel) -> ModelRecipe:
        carried = ModelState(number, prepared)
        share = carried.owned_shards(optimizers=not self._reset)
        self._share |= share
        self.report.state_bytes += total_bytes(share)
        self._share |= carried.owned_buffers()  # makes the files a complete checkpoint
        return ModelRecipe.capture(
            prepared, carried, share, reset_optimizer=self._reset, hooks=False
        )

    def _variables(self) -> dict[str, Any]:
        """Return the user's variables, without predefined names and IPython's history."""
        predefined, missing = self._initial_namespace.names, object()
        return {
            name: value
            for name, value in self._names.items()
            if predefined.get(name, missing) is not value and not _is_ipythons(name)
        }

    # -- writing

    def _write(
        self,
        packed: namespace_pickle.PickledNamespace,
        plan: namespace_pickle.WritePlan,
        folder: Path,
    ) -> None:
        """Write the pickles, and the shards of all ranks as a checkpoint."""
        keys = reshard.gather_keys(self._share)
        digests = digest.global_digests(self._share)
        begun = parts = None
        with self._phase("opening files"):
            if keys and self._rank == 0:
                begun = checkpoint.create_draft(folder, CHECKPOINT_NAME)
        draft = collectives.all_gather_values(begun)[0]
        with self._phase("writing"):
            namespace_pickle.write_namespace(packed, plan, folder, self._rank)
            if draft is not None:
                parts = shard_io.write_shards(self._share, draft, self._rank, "model")
        everyones = collectives.all_gather_values(parts)
        with self._phase("closing files"):
            if begun is not None:
                manifest_keys = {
                    name: checkpoint.TensorMetadata(
                        shape=tuple(entry.shape),
                        dtype=str(entry.dtype).removeprefix("torch."),
                        digest=digests[name],
                    )
                    for name, entry in keys.items()
                }
                written = tuple(part for rank_parts in everyones for part in rank_parts)
                checkpoint.commit_draft(begun, CHECKPOINT_NAME, _manifest(manifest_keys, written))

    # -- the report

    def _summarise(self, first: _BuildPlan, second: Any, variables: int) -> None:
        items = [] if first.models else ["no model was prepared yet"]
        for (_, recipe), schedules in zip(first.models, second[0], strict=True):
            items += recipe.describe(reset_optimizer=self._reset)
            items += [type(schedule).__name__ for schedule in schedules]
            items += [f"step {recipe.num_steps}"] if recipe.num_steps else []
        count = len(second[1])
        items += [f"{count} loader{'s' * (count != 1)}"] if count else []
        items.append(f"{variables} variable{'s' * (variables != 1)}")
        self.report.carried = items

    def _report_removed_ranks(self) -> None:
        """Report the variables and generators of removed ranks; a collective."""
        everyones = collectives.all_gather_values((set(self._variables()), self.report.not_carried))
        world_size = len(everyones)
        lost: dict[str, str] = {}
        for name in dict.fromkeys(name for _, bad in everyones for name in bad):
            ranks = [rank for rank, (_, bad) in enumerate(everyones) if name in bad]
            reason = everyones[ranks[0]][1][name]
            lost[name] = reason if len(ranks) == world_size else f"{reason} ({_ranks(ranks)})"
        removed = range(self._world_size, world_size)
        staying = set().union(*(names for names, _ in everyones[: self._world_size]))
        for name in sorted({name for rank in removed for name in everyones[rank][0]} - staying):
            lost[name] = f"only {_ranks(removed)} had it"
        self.report.not_carried = lost
        if removed:
            self.report.will_differ.append(
                f"{_ranks(removed)} end{'s' * (len(removed) == 1)}; their random generators and"
                " their own values of variables are lost"
            )


class ResizeRestore:
    """Second half, on the new ranks: restores everything from the files."""

    def __init__(
        self,
        folder: Path,
        names: MutableMapping[str, Any],
        initial_namespace: InitialNamespace,
        *,
        on_phase: Callable[[str], object],
        old_world_size: int,
    ) -> None:
        """Set up the second half of a resize.

        Args:
            folder: folder that the old ranks wrote.
            names: namespace for the user's variables.
            initial_namespace: predefined names of this rank.
            on_phase: called with the name of each phase.
            old_world_size: number of old ranks.
        """
        self._phase = Transaction("Switch", on_phase, SwitchError, coordinated=False)
        self.report = RankSwitchReport(seconds=self._phase.seconds)
        self._folder, self._names, self._initial_namespace = folder, names, initial_namespace
        self._old_world_size, self._rank = old_world_size, distributed.get_rank()
        self._from = self._rank if self._rank < old_world_size else 0
        self._built: list[Accelerator] = []
        self._made: list[Any] = []
        """References to prepared objects until the user's variables are bound."""

    def run(self) -> RankSwitchReport:
        """Restore everything.

        Raises:
            SwitchError: a phase failed on this rank; the new ranks are then unusable.
        """
        device: torch.device = self._initial_namespace.names["device"]
        with self._phase("unpacking"):
            arrived = namespace_pickle.NamespaceReader(self._folder, self._from, device)
            arrived.set_namespace(self._names)
            for name, value in self._initial_namespace.names.items():
                if not isinstance(value, _PLAIN):
                    arrived.known["name", name] = value
            first = self._first(arrived)
        with self._phase("building"):
            self._build(first, arrived)
        trained = prepared_models.all_models()
        with self._phase("loading"):
            as_written = [
                self._load(number, prepared, first) for number, prepared in enumerate(trained)
            ]
        with self._phase("verifying"):
            self.report.verified = sum(
                ModelState(number, prepared).verify(
                    recipe.digests, as_written[number], recipe.scalar_state
                )
                for number, (prepared, (_, recipe)) in enumerate(
                    zip(trained, first.models, strict=True)
                )
            )
        with self._phase("binding"):
            self.report.bound += arrived.bind_variables()
            # cloudpickle overwrites it in the globals of each function.
            self._names["__builtins__"] = self._initial_namespace.names["__builtins__"]
        self._made.clear()
        self._set_generators(first)
        return self.report

    def _first(self, arrived: namespace_pickle.NamespaceReader) -> _BuildPlan:
        """Restore the process state, then unpickle the build plan."""
        # First sys.path: the user's modules may be in folders that only the old ranks had in it.
        _restore(arrived.read_stage())
        self.report.bound += arrived.bind_variables()
        first: _BuildPlan = arrived.read_stage()
        self._initial_namespace.reporter.next_step = first.next_step
        return first

    def _build(self, first: _BuildPlan, arrived: namespace_pickle.NamespaceReader) -> None:
        """Create and prepare accelerators, models, optimizers, schedulers and loaders."""
        for place, (is_default, arguments, attributes) in enumerate(first.accelerators):
            accelerator = (
                self._initial_namespace.names["accelerator"]
                if is_default
                else Accelerator(**arguments)
            )
            if is_default:
                accelerator._build(())  # noqa: SLF001 - as the first prepare() does
            vars(accelerator).update(attributes)
            self._built.append(accelerator)
            arrived.known["accelerator", place] = accelerator
        cast = [recipe.build() for _, recipe in first.models]
        for number, (_, raws) in enumerate(cast):
            for place, raw in enumerate(raws):
                arrived.known[number, "given", place] = raw
        schedules, loaders = arrived.read_stage()
        for number, (model, raws) in enumerate(cast):
            owner = self._built[first.models[number][0]]
            self._prepare(owner, model, raws, schedules[number])
            replaceable = switch.replaceable_objects(number, prepared_models.all_models()[-1])
            arrived.known.update(replaceable)
            for place, raw in enumerate(raws):
                arrived.known[number, "given", place] = raw
            for place, wrapper in enumerate(prepared_models.all_models()[-1].live_schedulers):
                arrived.known["scheduler", number, place] = wrapper
        memory_probe.restore_forward_inputs(first.fed)
        for place, loader in enumerate(loaders):
            arrived.known["loader", place] = self._loader(loader)
        self._report_scheduler_steps()

    def _prepare(
        self,
        owner: Accelerator,
        bare: torch.nn.Module,
        raws: list[Any],
        schedules: list[Any],
    ) -> None:
        for schedule in schedules:
            for inner in optimizer_recipes.nested_schedulers(schedule):
                if hasattr(inner, "optimizer"):
                    # Without it torch 2.13 warns that the scheduler was stepped too early.
                    inner.optimizer._opt_called = True  # noqa: SLF001
        with wrap_policy.defer_weights():
            self._made += owner.prepare(bare, *raws, *schedules, None)
        self._made += [bare, raws]

    def _report_scheduler_steps(self) -> None:
        """Report a changed number of scheduler steps."""
        # accelerate 1.15 advances each scheduler once per rank at each optimizer step.
        world_size = distributed.get_world_size()
        counting = {
            type(wrapper.scheduler).__name__
            for prepared in prepared_models.all_models()
            for wrapper in prepared.live_schedulers
            if wrapper.step_with_optimizer and not wrapper.split_batches
        }
        if counting and world_size != self._old_world_size:
            self.report.will_differ.append(
                f"{', '.join(sorted(counting))}: {world_size} scheduler steps (before:"
                f" {self._old_world_size}) per optimizer step, so that the learning rate follows"
                " the number of samples with an unchanged batch size per rank"
            )

    def _loader(self, recipe: _LoaderState) -> Any:
        """Prepare a loader and resume it at its position."""
        loader = self._built[recipe.accelerator].prepare_data_loader(recipe.given)
        prepared_models.register_loader(loader, recipe.given)
        self._made.append(loader)
        sampler = get_sampler(loader)
        if isinstance(sampler, SeedableRandomSampler) and recipe.seed is not None:
            sampler.initial_seed = recipe.seed
        position, remark = dataloader_state.rescale_position(
            loader, recipe.position, self._old_world_size
        )
        loader.iteration = position.epoch
        dataloader_state.seek(loader, position)
        total = dataloader_state.global_batch_size(loader)
        if total != recipe.total_batch:
            self.report.will_differ.append(
                f"global batch size: {recipe.total_batch} -> {total} samples, with an unchanged"
                " batch size per rank"
            )
        if remark:
            self.report.will_differ.append(remark)
        return loader

    # -- state

    def _load(self, number: int, prepared: PreparedModel, first: _BuildPlan) -> dict[str, Shard]:
        """Load a model; return the shards whose dtype changed, in the dtype that was written."""
        _, recipe = first.models[number]
        carried = ModelState(number, prepared)
        path = self._folder / CHECKPOINT_NAME
        with checkpoint.CheckpointReader.open_folder(path) as opened:
            manifest = opened.manifest
        carried.allocate_optimizer_state(_described(manifest, recipe.digests))
        targets = carried.target_shards()
        absent = {key for key in targets if key.startswith("optim") and key not in manifest.keys}
        for key in absent:
            for piece in targets[key].pieces:
                piece.view.zero_()
        readable = {key: shard for key, shard in targets.items() if key not in absent}
        shard_io.read_shards(path, manifest, readable)
        carried.finalize_state(recipe.scalar_state)
        recipe.load_buffers(prepared)
        return _as_written(path, manifest, carried.owned_shards(), set(recipe.digests))

    def _set_generators(self, first: _BuildPlan) -> None:
        """Restore the generators of the old rank with this number, or seed new ones."""
        rng_state.set_rng_state(first.random)
        world_size = distributed.get_world_size()
        if world_size > self._old_world_size:
            added = range(self._old_world_size, world_size)
            self.report.will_differ.append(
                f"{_ranks(added)} {'are' if len(added) > 1 else 'is'} new: random generators start"
                " from seeds derived from rank 0, variables are copies of rank 0"
            )
        if self._rank < self._old_world_size:
            return
        octets = first.random.cpu.numpy().tobytes() + str(self._rank).encode()
        seed = int.from_bytes(hashlib.blake2b(octets, digest_size=4).digest(), "little")
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the one that users' code draws from
        torch.manual_seed(seed)


# Objects of a rank


def _hooks_left(prepared: PreparedModel) -> list[str]:
    """Return notes on step hooks that are not carried."""
    hooked = [
        type(owned.inner_optimizer).__name__
        for owned in prepared.live_optimizers
        if optimizer_recipes.step_hooks(owned.inner_optimizer)
    ]
    return [f"step hooks of {name} are not carried; register them again" for name in hooked]


def _known(
    initial_namespace: InitialNamespace,
    built: list[Accelerator],
    trained: list[PreparedModel],
    prepared: list[Any],
) -> list[ExternalObject]:
    """Return the objects that a new rank creates itself, which are pickled by key."""
    external = [
        namespace_pickle.ExternalObject(value, ("name", name), 0)
        for name, value in initial_namespace.names.items()
        if not isinstance(value, _PLAIN)
    ]
    external += [
        namespace_pickle.ExternalObject(accelerator, ("accelerator", place), 2)
        for place, accelerator in enumerate(built)
    ]
    for number, prepared_model in enumerate(trained):
        for place, owned in enumerate(prepared_model.live_optimizers):
            if (user_optimizer := owned.user_optimizer()) is not None:
                external.append(
                    namespace_pickle.ExternalObject(user_optimizer, (number, "given", place), 2)
                )
        for key, part in switch.replaceable_objects(number, prepared_model).items():
            external.append(namespace_pickle.ExternalObject(part, key, 3))
        for place, wrapper in enumerate(prepared_model.live_schedulers):
            external.append(
                namespace_pickle.ExternalObject(wrapper, ("scheduler", number, place), 3)
            )
    external += [
        namespace_pickle.ExternalObject(loader, ("loader", place), 3)
        for place, loader in enumerate(prepared)
    ]
    return external


def _made_from(
    accelerator: Accelerator, initial_namespace: InitialNamespace
) -> tuple[bool, dict[str, Any], dict[str, Any]]:
    """Return whether an Accelerator is the predefined one, its arguments and its attributes."""
    attributes = {
        name: vars(accelerator)[name]
        for name in ("step", "flag_tensor")
        if name in vars(accelerator)
    }
    is_default = accelerator is initial_namespace.names["accelerator"]
    return is_default, dict(vars(accelerator).get("_nbdist_arguments", {})), attributes


def _place(accelerator: Accelerator, built: list[Accelerator]) -> int:
    return next(place for place, other in enumerate(built) if other is accelerator)


def _loader(value: Any, built: list[Accelerator]) -> _LoaderState | None:
    """Return the state of a prepared loader; None if it or its Accelerator is unknown."""
    user_loader = prepared_models.user_loader(value)
    owners = [
        place
        for place, owner in enumerate(built)
        if any(loader is value for loader in owner._dataloaders)  # noqa: SLF001
    ]
    if user_loader is None or not owners:
        return None
    sampler = get_sampler(value)
    return _LoaderState(
        accelerator=owners[0],
        given=user_loader,
        position=_position(value),
        total_batch=dataloader_state.global_batch_size(value),
        seed=sampler.initial_seed if isinstance(sampler, SeedableRandomSampler) else None,
    )


def _position(value: Any) -> LoaderPosition:
    """Return the position of a running iterator, otherwise the start of an epoch."""
    position = dataloader_state.position_of(value)
    if position.batches and not dataloader_state.is_iterating(value):
        return dataloader_state.LoaderPosition(epoch=value.iteration, seen=position.seen)
    return position


def _is_ipythons(name: str) -> bool:
    """Return whether a name belongs to IPython's history."""
    digits = name.lstrip("_").removeprefix("i")
    return name.startswith("_") and (name.strip("_") in {"", "i", "ii", "iii"} or digits.isdigit())


# The process


def _process(before: Mapping[str, str]) -> dict[str, Any]:
    """Return the process state that the user may have changed, besides variables."""
    changed = {
        name: value
        for name, value in os.environ.items()
        if before.get(name) != value and not name.startswith(_ENGINES_OWN)
    }
    return {
        "cwd": os.getcwd(),  # noqa: PTH109 - a str
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
    """Return the first folder with enough free space for all ranks; a collective.

    Raises:
        SwitchError: no folder has enough free space.
    """
    total = sum(collectives.all_gather_values(needed))
    checked = []
    for folder in folders:
        free = shutil.disk_usage(folder).free
        if folder.is_relative_to("/dev/shm"):  # noqa: S108 - its files are in host memory
            free = min(free, discovery.host_free_memory_bytes())
        # Rank 0 decides: other ranks may already see less free space.
        free = collectives.all_gather_values(free)[0]
        if free > total:
            return folder
        checked.append(f"{folder.parent} has {free / 2**30:.1f} GiB free")
    message = (
        f"State and variables need {total / 2**30:.1f} GiB of temporary space for the new ranks,"
        f" but {', '.join(checked)}. Free space in one of them,"
        " or set TMPDIR to a folder with enough"
        " space."
    )
    raise SwitchError(message)


def _manifest(
    keys: dict[str, checkpoint.TensorMetadata], written: tuple[CheckpointFile, ...]
) -> Manifest:
    return checkpoint.Manifest(
        backend=accelerators.current_config().options.backend,
        world_size=distributed.get_world_size(),
        step=max((prepared.num_steps for prepared in prepared_models.all_models()), default=0),
        keys=keys,
        files=written,
    )


def _described(manifest: Manifest, keys: Mapping[str, object]) -> dict[str, Shard]:
    """Return shards without pieces: shapes and dtypes of the written tensors."""
    return {
        name: Shard(shape=key.shape, dtype=getattr(torch, key.dtype))
        for name, key in manifest.keys.items()
        if name in keys
    }


def _as_written(
    path: Path, manifest: Manifest, share: Mapping[str, Shard], keys: set[str]
) -> dict[str, Shard]:
    """Read this rank's shards of tensors whose dtype differs in the new engine."""
    shards = {}
    for name, shard in share.items():
        dtype = getattr(torch, manifest.keys[name].dtype) if name in keys else shard.dtype
        if dtype != shard.dtype:
            pieces = tuple(
                piece._replace(view=torch.empty(piece.stop - piece.start, dtype=dtype))
                for piece in shard.pieces
            )
            shards[name] = Shard(shape=shard.shape, dtype=dtype, pieces=pieces)
    shard_io.read_shards(path, manifest, shards)
    return shards


def _ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 2-3"."""
    first, last = ranks[0], ranks[-1]
    if len(ranks) == 1:
        return f"rank {first}"
    joined = list(ranks) == list(range(first, last + 1))
    return f"ranks {first}-{last}" if joined else f"ranks {', '.join(map(str, ranks))}"
