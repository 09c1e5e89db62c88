"""Change of the prepared models' engine, as one transaction; runs on a rank.

    checking    check that everything can be rebuilt; changes nothing
    keeping     copy this rank's shards to host memory and digest each tensor
    freeing     free the old engine
    building    create and prepare models, optimizers and schedulers with the new options
    loading     reshard the copied state into the new engine
    verifying   compare the digest of each tensor with that of the copy
    binding     rebind the user's variables

Random generators are restored last because the other phases may draw from them. All ranks agree
on success before and after each phase. If a phase from `freeing` on fails, the engine is rebuilt
with the old options and loaded from the same copy.
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from nbdist.errors import SwitchError
from nbdist.hardware import discovery
from nbdist.launcher import offload_setup
from nbdist.number_formatting import format_bytes
from nbdist.planner.optimizers import refusal_of_class
from nbdist.protocol.operations import RankSwitchReport
from nbdist.state import (
    collectives,
    layouts,
    meta_model,
    optimizer_properties,
    optimizer_recipes,
    shards,
    tensor_digest,
)
from nbdist.state.layouts.base import bare_name, is_deepspeed_engine, unwrap_compiled
from nbdist.strategies import Options, Strategy
from nbdist.worker.engines import accelerator_patch, trainer, wrap_policy
from nbdist.worker.memory import memory_advice, memory_probe
from nbdist.worker.operations.collective_phases import CHECKING_PHASE, CollectivePhases
from nbdist.worker.training import (
    prepared_models,
    rebind_variables,
    release_models,
    rng_state,
    unprepared_optimizers,
)
from nbdist.worker.training.model_recipe import ModelRecipe
from nbdist.worker.training.release_models import unchanged_lists
from nbdist.worker.training.training_state import ModelAndOptimizerState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.protocol.operations import SwitchRequest
    from nbdist.state.layouts.base import Layout
    from nbdist.worker.operations import RankContext
    from nbdist.worker.training.prepared_models import PreparedModel, PreparedOptimizer


def switch(request: SwitchRequest, context: RankContext) -> RankSwitchReport:
    """Rebuild the prepared models under another engine; a collective.

    Raises:
        SwitchError: a phase failed; raised on all ranks with the phase, ranks and reasons.
    """
    options = Options(**request.options)
    change = EngineSwitch(options, context, reset_optimizer=request.reset_optimizer)
    return change.run()


class EngineSwitch:
    """Change of the engine of all prepared models.

    Args:
        reset_optimizer: drop the state of the optimizers.
        reason: error message of the replaced objects; default: that the engine was switched.
    """

    def __init__(
        self,
        new_options: Options,
        context: RankContext,
        *,
        reset_optimizer: bool = False,
        reason: str = "",
    ) -> None:
        self._old_options = accelerator_patch.current_config().options
        self._new_options = new_options
        self._context, self._reset = context, reset_optimizer
        self._reason = reason or stale_reason(self._old_options, new_options)
        self._replaced = rebind_variables.ReplacementMap()
        self._models: list[tuple[PreparedModel, ModelRecipe]] = []
        """Each model as it was prepared before the switch, and its recipe."""
        self._kept: list[object] = []
        """References to accelerators and schedulers, which continue with the new engine."""
        self._created: list[object] = []
        """References to prepared objects until the user's variables are rebound."""
        self._phase = CollectivePhases("Switch", context.on_phase, SwitchError)
        self.report = RankSwitchReport(seconds=self._phase.seconds)

    def run(self) -> RankSwitchReport:
        """Switch, or restore the old engine.

        Raises:
            SwitchError: a phase failed; raised on all ranks with the phase, ranks and reasons.
        """
        try:
            return self._run()
        finally:
            self._models.clear()
            self._kept.clear()
            shards.empty_pinned_cache()

    def _run(self) -> RankSwitchReport:
        generators, forward_inputs = rng_state.get_rng_state(), memory_probe.last_forward_inputs()
        with self._phase(CHECKING_PHASE):
            self.report.notes += check_models(
                self._new_options,
                collectives.group_size(),
                self._context.variables,
                reset_optimizer=self._reset,
            )
            ops = self._new_options.strategy.required_ops(self._new_options)
            offload_setup.build_missing_ops(ops, progress=self._context.on_phase)
        with self._phase("keeping"):
            for prepared in prepared_models.all_models():
                self._models.append((prepared, self._capture(prepared)))
                self._kept += [prepared.owner, *prepared.live_schedulers]
        try:
            with self._phase("freeing"):
                self._free_engines()
            self._build_engines(self._new_options)
        except SwitchError as error:
            self._restore_old_engine(error)
            raise
        finally:
            rng_state.set_rng_state(generators)
            memory_probe.restore_forward_inputs(forward_inputs)
        self._summarise()
        return self.report

    # -- the old engine

    def _capture(self, prepared: PreparedModel) -> ModelRecipe:
        # A method, so that no variable keeps the live tensors while the engine is freed.
        state = ModelAndOptimizerState(prepared)
        live = state.owned_shards(optimizers=not self._reset)
        needed = shards.total_bytes(live)
        check_host_memory(needed)
        self.report.state_bytes += needed
        copies = shards.copy_to_host(live)
        scalar_state = {} if self._reset else state.layout.scalar_state()
        recipe = ModelRecipe.capture(prepared, scalar_state, hooks=True)
        # Of the shards, not of the copies: a GPU is a hundred times faster at it.
        recipe.tensors, recipe.digests = copies, tensor_digest.global_digests(live)
        return recipe

    def _free_engines(self) -> None:
        """Free the memory of the current engines even if references to them remain."""
        variables = self._context.variables.values()
        trainers = trainer.find_trainers(rebind_variables.reachable(variables))
        for number, prepared in enumerate(prepared_models.all_models()):
            if any(each.accelerator is prepared.accelerator() for each in trainers):
                # The user has the bare model, which FSDP2 does not tell from the prepared one.
                self._replaced.add_old((number, "bare"), prepared.user_model())
            for key, part in replaceable_objects(number, prepared).items():
                self._replaced.add_old(key, part)
            optimizers = filter(None, (each.wrapper() for each in prepared.optimizers))
            layouts.free_model(prepared.model, optimizers)
        prepared_models.clear()
        self._created.clear()
        owners = {id(old.owner): old.owner for old, _ in self._models}
        for owner in owners.values():
            for prepared_objects in (owner._models, owner._optimizers, owner._schedulers):  # noqa: SLF001
                prepared_objects.clear()
            owner.deepspeed_engine_wrapped = None
        for modules in release_models.engine_registries():
            modules.clear()
        self._replaced.invalidate(self._reason)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        shards.empty_pinned_cache()  # pinned memory of an offload

    # -- the new engine

    def _build_engines(self, options: Options) -> None:
        """Build engines with these options, load the copied state and rebind the variables."""
        with self._phase("building"):
            accelerator_patch.set_options(options)
            for owner in accelerator_patch.built_accelerators():
                accelerator_patch.rebuild_in_place(owner)
            for number, (old, recipe) in enumerate(self._models):
                self._build(number, old, recipe)
        recipes = [recipe for _, recipe in self._models]
        rebuilt = list(zip(recipes, prepared_models.all_models(), strict=True))
        with self._phase("loading"):
            self.report.sent_bytes += sum(recipe.load_state(model) for recipe, model in rebuilt)
        with self._phase("verifying"):
            self.report.verified = sum(recipe.verify(model) for recipe, model in rebuilt)
        with self._phase("binding"):
            variables = self._context.variables
            self.report.bound = self._replaced.rebind_variables(variables)
            collators = [loader.collate_fn for loader in prepared_models.all_loaders()]
            held = list(rebind_variables.reachable([*variables.values(), *collators]))
            # isinstance() would access an object's __class__, which raises for some proxies.
            for scheduler in (each for each in held if issubclass(type(each), LRScheduler)):
                optimizer_recipes.rebind_scheduler(scheduler, self._replaced.replacements())
            self._replaced.rebind_inside(held)
            for found_trainer in trainer.find_trainers(held):
                trainer.update_trainer_engine(found_trainer)

    def _build(self, number: int, old: PreparedModel, recipe: ModelRecipe) -> None:
        model, raws = recipe.build()
        for place, raw in enumerate(raws):
            # A scheduler may refer to the prepared optimizer, too. prepare() needs the raw one.
            self._replaced.add_replacements(
                {(number, kind, place): raw for kind in ("raw", "given", "optimizer")}
            )
            # Schedulers refer to it from here on: needed to restore the old engine.
            self._replaced.add_old((number, "given", place), raw)
        wrappers = old.live_schedulers
        for wrapper in wrappers:
            optimizer_recipes.rebind_scheduler(wrapper.scheduler, self._replaced.replacements())
        keeping = contextlib.nullcontext() if recipe.is_kept else unchanged_lists(old.owner)
        with wrap_policy.defer_weights(), keeping:
            # Keep references: Accelerate keeps only the bare model of DDP, and no variable holds
            # the new objects yet.
            self._created += old.owner.prepare(
                model, *raws, *(wrapper.scheduler for wrapper in wrappers), None
            )
        prepared = prepared_models.all_models()[-1]
        # Variables refer to the old wrappers of the schedulers: put them in place of the new ones.
        for wrapper, new_wrapper in zip(wrappers, prepared.live_schedulers, strict=True):
            vars(wrapper).update(vars(new_wrapper))
            schedulers = prepared.owner._schedulers  # noqa: SLF001
            schedulers[:] = [
                wrapper if scheduler is new_wrapper else scheduler for scheduler in schedulers
            ]
        prepared.schedulers[:] = map(weakref.ref, wrappers)
        self._replaced.add_replacements(replaceable_objects(number, prepared))

    def _restore_old_engine(self, error: SwitchError) -> None:
        """Restore the engine with the old options.

        Raises:
            SwitchError: restoring failed too.
        """
        try:
            self._reason = stale_reason(self._new_options, self._old_options)
            with self._phase("freeing"):
                self._free_engines()
            self._build_engines(self._old_options)
        except SwitchError as second:
            raise SwitchError(
                f"{str(error).removesuffix('.')}. The previous state could not be restored either:"
                f" {str(second).removesuffix('.')}. Run %nbdist restart, run the cell with"
                " accelerator.prepare(...) and load the last checkpoint."
            ) from second

    def _summarise(self) -> None:
        items: list[str] = []
        for old, recipe in self._models:
            schedulers = [wrapper.scheduler for wrapper in old.live_schedulers]
            items += recipe.describe(schedulers, reset_optimizer=self._reset)
            scalars = recipe.scalar_state.values()
            steps = [count for counts in scalars for count in counts.values()]
            items += [f"step {max(steps):g}"] if steps else []
        loaders = len(prepared_models.all_loaders())
        items += [f"{loaders} loader{'s' * (loaders != 1)}"] if loaders else []
        self.report.carried = [*items, "random generators", "all variables"]


def stale_reason(before: Options, now: Options) -> str:
    """Return the error message of objects that were prepared with the previous options."""
    return (
        f"This object was prepared with {before.backend}, but the session has since switched to"
        f" {now.backend}. The variables with the model and optimizer were rebound. Use those"
        " variables instead."
    )


def check_models(
    new_options: Options,
    world_size: int,
    variables: Mapping[str, Any],
    *,
    reset_optimizer: bool,
) -> list[str]:
    """Check that all prepared models can be rebuilt with new options; changes none of them.

    Returns:
        Notes about memory, and about state that is not carried.

    Raises:
        SwitchError: a model cannot be switched. The message has the reason and the remedy.
    """
    release_models.release_unused_models()
    hardware = accelerator_patch.current_config().hardware
    notes: list[str] = []
    if problem := prepared_models.prepared_twice(prepared_models.models_in_use(variables)):
        raise SwitchError(problem)
    if names := unprepared_optimizers.names_in(variables):
        raise SwitchError(
            f"The optimizer `{names[0]}` trains a prepared model, but was not prepared: its state"
            f" would be lost. Use model, {names[0]} = accelerator.prepare(model, {names[0]}), or"
            " delete it."
        )
    for prepared in prepared_models.models_in_use(variables):
        _check_model(prepared, new_options, reset_optimizer=reset_optimizer)
        notes += memory_advice.check_memory(prepared, new_options, hardware, world_size=world_size)
        named = prepared.model.named_parameters()
        if hooked := [name for name, p in named if p._backward_hooks]:  # noqa: SLF001
            notes.append(
                f"gradient hooks of {len(hooked)} parameters ({meta_model.bare_name(hooked[0])})"
                " are not carried; register them again"
            )
        if modules := meta_model.modules_with_new_hooks(prepared.model, prepared.meta):
            notes.append(
                f"hooks that were registered after prepare() are not carried ({modules[0]});"
                " register them again"
            )
    return notes


def _check_model(prepared: PreparedModel, new_options: Options, *, reset_optimizer: bool) -> None:
    if prepared.rebuild_error:
        raise SwitchError(prepared.rebuild_error)
    if problem := prepared_models.pending_gradients(prepared):
        raise SwitchError(problem)
    if accelerator_patch.has_user_plugin(prepared.owner):
        raise SwitchError(
            "The model was prepared by an Accelerator with its own plugin. Prepare it with the"
            " predefined `accelerator` to switch it."
        )
    layouts.layout_for(prepared.model)  # reshards what an interrupted pass has left gathered
    _check_parameters(prepared)
    layouts.check_layout(prepared.model)
    prepared_models.refresh_param_groups(prepared)
    # An engine of DeepSpeed holds the optimizer's state, and cannot be restored without it.
    is_from_deepspeed = is_deepspeed_engine(unwrap_compiled(prepared.model))
    is_deepspeed = is_from_deepspeed or new_options.strategy.engine == "deepspeed"
    if is_deepspeed and len(prepared.live_optimizers) != 1:
        raise SwitchError(
            f"{prepared.title} has {len(prepared.live_optimizers)} optimizers, but DeepSpeed"
            " supports exactly one per model."
            + (
                " Keep its optimizer in a variable, or delete the model."
                if is_from_deepspeed
                else " Use ddp, fsdp2 or fsdp1, or delete the model if its training is over."
            )
        )
    if new_options.strategy.engine == "deepspeed":
        _check_frozen(prepared, new_options.strategy)
    for owned in prepared.live_optimizers:
        recipe = owned.recipe
        if problem := optimizer_recipes.why_not_rebuildable(owned.inner_optimizer, recipe):
            raise SwitchError(problem)
        if not reset_optimizer:
            _check_optimizer(owned, prepared, new_options)
        if reason := refusal_of_class(owned.recipe.optimizer_class, new_options.backend):
            raise SwitchError(reason)


def _check_frozen(prepared: PreparedModel, new_strategy: Strategy) -> None:
    """Raise if DeepSpeed would get a frozen parameter group, or one with state that it drops.

    deepspeed 0.19.8 supports such a group under ZeRO-3 only, and without state.
    """
    trained, trained_before = (
        {
            meta_model.bare_name(name)
            for name, each in model.named_parameters()
            if each.requires_grad
        }
        for model in (prepared.model, prepared.meta.model)
    )
    for owned in prepared.live_optimizers:
        for names in owned.recipe.param_group_names:
            has_state = not trained_before.isdisjoint(names)
            is_supported = "parameters" in new_strategy.shards and not has_state
            if names and trained.isdisjoint(names) and not is_supported:
                raise SwitchError(
                    f"All parameters in a group of {owned.recipe.optimizer_class.__name__} are"
                    f" frozen, such as {names[0]}, which {new_strategy.name} does not support."
                    " Unfreeze them, or create the optimizer without them (PEFT:"
                    " model.set_adapter(NAME) selects the adapter that is trained)."
                )


def _check_parameters(prepared: PreparedModel) -> None:
    """Raise if a model does not have the parameters that it was prepared with, by their names."""
    engine: Any = unwrap_compiled(prepared.model)
    is_wrapped = is_deepspeed_engine(engine) or isinstance(engine, DistributedDataParallel)
    parameters = (engine.module if is_wrapped else engine).named_parameters()
    names = {bare_name(name) for name, _ in parameters}
    if changed := names.symmetric_difference(prepared.meta.names):
        raise SwitchError(
            f"{type(prepared.meta.model).__name__} got or lost {len(changed)} parameters after"
            f" accelerator.prepare(), such as {min(changed)}. Create it with the parameters that it"
            " has now, prepare that, then switch."
        )
    if prepared.live_optimizers and not is_wrapped and any(n.startswith("module.") for n in names):
        raise SwitchError(
            f"{type(prepared.meta.model).__name__} has a submodule called `module`, which a switch"
            " from FSDP would take for a wrapper. Rename it."
        )


def check_host_memory(needed: int) -> None:
    """Raise if the host does not have enough memory for the copies.

    Raises:
        SwitchError: the copies of all ranks on this host exceed its free memory.
    """
    shards.empty_pinned_cache()
    needed_on_host = needed * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = discovery.host_free_memory_bytes()
    if needed_on_host > free:
        raise SwitchError(
            f"A copy of the state needs {format_bytes(needed_on_host)} of host memory, but only"
            f" {format_bytes(free)} are free. Free some memory, or save, restart and load."
        )


def _check_optimizer(
    owned: PreparedOptimizer, prepared: PreparedModel, new_options: Options
) -> None:
    refusal = optimizer_properties.why_not_reshardable(owned.inner_optimizer)
    if refusal:
        raise SwitchError(
            f"{refusal}. Keep this backend and number of ranks, or use --reset-optimizer to switch"
            " with a new optimizer state."
        )
    layout = ModelAndOptimizerState(prepared).layout
    if not type(owned.inner_optimizer).__module__.startswith(("torch.optim.", "deepspeed.")):
        _check_foreign_state(owned, layout, new_options)
    if new_options.strategy.engine != "deepspeed":
        return
    counts = layout.scalar_state()
    for names in owned.recipe.param_group_names:
        # Compare "step" only: NAdam's other scalars are derived from it.
        steps = {counts[name]["step"] for name in names if "step" in counts.get(name, {})}
        if len(steps) > 1:
            raise SwitchError(
                f"Parameters of one group were stepped {min(steps):g} to {max(steps):g} times, but"
                " DeepSpeed keeps one step count per group. Use ddp, fsdp2 or fsdp1, or"
                " --reset-optimizer."
            )


def _check_foreign_state(owned: PreparedOptimizer, layout: Layout, new_options: Options) -> None:
    """Raise if state of an optimizer that torch does not define would not be carried exactly."""
    optimizer, problem = owned.inner_optimizer, ""
    if attributes := optimizer_recipes.tensor_attributes(optimizer):
        problem = f"keeps tensors in its attribute {attributes[0]}, not in its state"
    for stepped, state in optimizer.state.items():
        for name, value in state.items():
            is_own = isinstance(value, torch.Tensor) and value.shape == stepped.shape
            if is_own and value.is_floating_point() and value.dtype != stepped.dtype:
                problem = f"keeps {name} in {value.dtype} for parameters in {stepped.dtype}"
    current = accelerator_patch.current_config().options.strategy
    if new_options.strategy.steps_flat_parameters and not current.steps_flat_parameters:
        trained = {name for name, value in layout.named_parameters() if value.requires_grad}
        states = layout.optimizer_state(owned=False)
        for names in owned.recipe.param_group_names:
            # One flat tensor of state begins with zeros for them, perhaps not their first values.
            without = [name for name in names if name in trained and name not in states]
            if without and states.keys() & {*names}:
                problem = f"has no state of {without[0]} yet, which {new_options.backend} needs"
    if problem:
        raise SwitchError(
            f"{type(optimizer).__name__} {problem}: a switch would change it. Keep this backend and"
            " number of ranks, or use --reset-optimizer."
        )


def replaceable_objects(number: int, prepared: PreparedModel) -> dict[object, object]:
    """Return the objects of a prepared model that variables may hold, by key."""
    replaceable: dict[object, object] = {}
    for name, module in meta_model.named_modules(prepared.model):
        # A wrapper comes before the wrapped module, and both have the same plain name.
        replaceable.setdefault((number, "module", name), module)
        replaceable[number, "inside", name] = module
    for name, parameter in prepared.model.named_parameters():
        replaceable[number, "parameter", meta_model.bare_name(name)] = parameter
    for name, buffer in prepared.model.named_buffers():
        replaceable[number, "buffer", meta_model.bare_name(name)] = buffer
    if (user_model := prepared.user_model()) is not None:
        replaceable[number, "bare"] = user_model
    replaceable[number, "prepared"] = prepared.model
    for place, owned in enumerate(prepared.live_optimizers):
        replaceable[number, "optimizer", place] = owned.wrapper()
        replaceable[number, "raw", place] = owned.inner_optimizer
        if (user_optimizer := owned.user_optimizer()) is not None:
            replaceable[number, "given", place] = user_optimizer
    return replaceable
