"""Registry of prepared models, with the information needed to rebuild them under another engine.

`worker.engines.accelerator_patch` creates a ``PrepareCall`` before each `prepare()`, while models
and optimizers are still unwrapped, and calls its ``record_result`` afterwards. Only weak references
are held, so that running a cell again frees the objects of its previous run.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from IPython import get_ipython
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nbdist.errors import OptionError, SwitchError
from nbdist.state import layouts, meta_model, optimizer_recipes
from nbdist.state.layouts.base import (
    innermost_optimizer,
    is_deepspeed_engine,
    unwrap_compiled,
)
from nbdist.state.optimizer_state_dict import optimizer_parameters
from nbdist.worker import process_group
from nbdist.worker.engines import fsdp
from nbdist.worker.engines.ddp import LocalGradients
from nbdist.worker.memory import memory_probe, tensor_categories
from nbdist.worker.optimizer_step_gate import optimizer_step_gate
from nbdist.worker.training import release_models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from accelerate import Accelerator

    from nbdist.state.meta_model import MetaModel
    from nbdist.state.optimizer_recipes import OptimizerRecipe


InterruptedPass = Literal["", "forward", "backward"]


@dataclass(slots=True, kw_only=True, eq=False)
class PreparedOptimizer:
    """A prepared optimizer."""

    recipe: OptimizerRecipe
    user_optimizer: weakref.ref[Optimizer]
    """The user's optimizer, which schedulers refer to. DeepSpeed may step another one."""
    wrapper: weakref.ref[AcceleratedOptimizer]

    @property
    def inner_optimizer(self) -> Optimizer:
        """The innermost optimizer, torch's or DeepSpeed's, which has the state."""
        return innermost_optimizer(self.wrapper())


@dataclass(slots=True, kw_only=True, eq=False)
class PreparedModel:
    """A prepared model with its accelerator, optimizers and schedulers."""

    accelerator: weakref.ref[Accelerator]
    meta_or_none: MetaModel | None = None
    rebuild_error: str = ""
    """Reason why it cannot be rebuilt."""
    user_model: weakref.ref[nn.Module]
    """The argument of `prepare()`; under FSDP2 the same object as the result."""
    wrapper: weakref.ref[nn.Module] | None = None
    optimizers: list[PreparedOptimizer] = field(default_factory=list)
    schedulers: list[weakref.ref[Any]] = field(default_factory=list)
    """Wrappers of its schedulers that `prepare()` returned."""
    num_pending_micro_batches: int = 0
    """Micro-batches whose gradients were not yet used in a step."""
    num_steps: int = 0
    """Optimizer steps since the start of training, across sessions."""
    interrupted_pass: InterruptedPass = ""
    """The interrupted pass, which may leave the engine in an inconsistent state."""
    has_cut_step: bool = False
    """True if the process groups were aborted during a step: the weights may be wrong."""
    has_forward: bool = False
    """There was a forward with gradients since the last optimizer step."""
    has_new_forward: bool = False
    """There was one since the last backward too."""
    frozen: list[weakref.ref[nn.Parameter]] = field(default_factory=list)
    """Parameters that an engine does not train if they are unfrozen after `prepare()`."""
    local_gradients: LocalGradients | None = None
    """Of a DDP model."""
    may_be_gathered: bool = False
    """There was a forward, which may leave parameters gathered, after the last backward."""
    is_whole: bool = False
    """It is inside of `nbdist.full_parameters`, where every rank has all parameters."""
    stays_gathered: bool = False
    """It is inside of `generate()`, which gathers the root unit of FSDP2 once for all tokens."""

    @property
    def model(self) -> nn.Module:
        """The prepared model."""
        prepared = None if self.wrapper is None else self.wrapper()
        if prepared is None:
            raise SwitchError(
                "A prepared model was deleted, or a cell built another one, and its optimizer is"
                " still used. A new model needs an optimizer of its own: build both, and use"
                " model, optimizer = accelerator.prepare(model, optimizer)."
            )
        return prepared

    @property
    def owner(self) -> Accelerator:
        """The Accelerator that prepared it."""
        accelerator = self.accelerator()
        if accelerator is None:
            raise SwitchError(
                f"The Trainer or Accelerator of `{self.variable}` was deleted. Give this model to a"
                " new one, or delete it too."
            )
        return accelerator

    @property
    def meta(self) -> MetaModel:
        """The meta model to rebuild it from; raises SwitchError if there is none."""
        if self.meta_or_none is None:
            raise SwitchError(self.rebuild_error)
        return self.meta_or_none

    @property
    def live_schedulers(self) -> list[Any]:
        """The prepared schedulers that still exist."""
        wrappers = (reference() for reference in self.schedulers)
        return [wrapper for wrapper in wrappers if wrapper is not None]

    @property
    def is_alive(self) -> bool:
        """True if the prepared model still exists, in a variable or with something to train it."""
        if self.wrapper is None or self.wrapper() is None:
            return False
        held = [self.accelerator, *(optimizer.wrapper for optimizer in self.optimizers)]
        return any(reference() is not None for reference in held) or self.variable is not None

    @property
    def variable(self) -> str | None:
        """Name of the user's variable that holds the prepared model; None if there is none."""
        return variable_of(self.model) or variable_of(self.user_model())

    @property
    def title(self) -> str:
        """Its variable and class in a sentence: "critic (Net)", or "the Net"."""
        kind = "model" if self.meta_or_none is None else type(self.meta_or_none.model).__name__
        return f"{self.variable} ({kind})" if self.variable else f"the {kind}"

    @property
    def live_optimizers(self) -> list[PreparedOptimizer]:
        """The prepared optimizers that still exist."""
        return [optimizer for optimizer in self.optimizers if optimizer.wrapper() is not None]


_trained: list[PreparedModel] = []
_by_model: weakref.WeakKeyDictionary[nn.Module, PreparedModel] = weakref.WeakKeyDictionary()
"""By prepared model, if its Trainer is gone too; by user's model if its engine was freed."""
_loaders: list[weakref.ref[DataLoader[Any]]] = []


def all_models() -> list[PreparedModel]:
    """Return all prepared models, in the order of preparation."""
    _trained[:] = [model for model in _trained if model.is_alive]
    return list(_trained)


def order_models(variables: Sequence[str]) -> None:
    """Move the models in these variables to the positions of their names; others keep their order.

    Has no effect if the number of models differs.
    """
    models: dict[object, PreparedModel] = {
        name: model for model in all_models() if (name := model.variable) in variables
    }
    others = iter([model for model in _trained if model not in models.values()])
    if len(variables) == len(_trained):
        _trained[:] = [models.pop(name) if name in models else next(others) for name in variables]


def unprepared_schedulers(variables: Mapping[str, Any]) -> list[str]:
    """Describe the variables with a scheduler of a prepared optimizer that was not prepared."""
    wrappers = [wrapper for model in all_models() for wrapper in model.live_schedulers]
    prepared = {
        id(part)
        for wrapper in wrappers
        for part in optimizer_recipes.nested_schedulers(wrapper.scheduler)
    }
    return [
        f"the scheduler {name}: {type(value).__name__} that accelerator.prepare() did not get"
        for name, value in variables.items()
        # isinstance() would read `__class__`, which an object of the user may compute.
        if issubclass(type(value), LRScheduler)
        and id(value) not in prepared
        and any(_owners(value))
    ]


def user_variables() -> Mapping[str, Any]:
    """Return the variables of the rank's namespace; none outside of IPython."""
    shell = get_ipython()
    return {} if shell is None else shell.user_ns


def models_in_use(variables: Mapping[str, Any]) -> list[PreparedModel]:
    """Forget models of earlier runs of the cell that prepares the model; return the others.

    One that is in no variable may only be in a reference cycle. One that lost its optimizers is
    not in use: under FSDP and DeepSpeed, the graph of the last loss holds its engine.
    """
    models = all_models()
    if len(models) > 1 and not set(models).issubset(models_in(variables)):
        release_models.release_unused_models()
        models = all_models()
    untrained = {model for model in models if model.optimizers and not model.live_optimizers}
    if untrained:
        untrained.difference_update(models_in(variables))
        _trained[:] = [model for model in models if model not in untrained]
    return list(_trained)


def models_in(variables: Mapping[str, Any]) -> list[PreparedModel]:
    """Return the models that variables, or lists and dicts in variables, hold."""
    values = list(variables.values())
    for value in variables.values():
        if type(value) in (list, tuple, dict):
            values += value.values() if type(value) is dict else value
    references = [reference for reference in map(find_model, values) if reference is not None]
    whole = (reference.prepared for reference in references if not reference.prefix)
    return list(dict.fromkeys(whole))


def all_loaders() -> list[DataLoader[Any]]:
    """Return all prepared loaders that still exist, in the order of preparation."""
    _loaders[:] = [reference for reference in _loaders if reference() is not None]
    return [loader for loader in (reference() for reference in _loaders) if loader is not None]


def register_loader(prepared: Any, loader: object) -> None:
    """Register a prepared loader and the user's loader that it was made from."""
    vars(prepared)[_USER_LOADER] = loader
    _loaders.append(weakref.ref(prepared))


def user_loader(prepared: Any) -> object:
    """Return the user's loader that a prepared one was made from; None if unknown."""
    return vars(prepared).get(_USER_LOADER)


def variable_of(value: object) -> str | None:
    """Return the name of a user's variable that holds an object; None if there is none."""
    variables = user_variables()
    names = (name for name, held in variables.items() if held is value and name[:1] != "_")
    return next(names, None)


_USER_LOADER = "_nbdist_given"


class PrepareCall:
    """One call of `prepare()`: information about its arguments, recorded before the call."""

    def __init__(self, accelerator: Accelerator, args: Sequence[object], *, shards: bool) -> None:
        """Record models and optimizers while they are unwrapped.

        Args:
            shards: the engine shards the optimizer, so all its parameters must be of the model.

        Raises:
            OptionError: some are not.
        """
        self._args = list(args)
        self._new: dict[int, PreparedModel] = {}
        for arg in args:
            if not isinstance(arg, nn.Module):
                continue
            known = _by_model.get(arg)
            if known is not None and known.wrapper is not None and known.wrapper() is arg:
                # A second Trainer with the same model: the first one may be gone.
                known.accelerator = weakref.ref(accelerator)
                if known not in _trained:
                    _trained.append(known)
                continue
            record = PreparedModel(
                accelerator=weakref.ref(accelerator), user_model=weakref.ref(arg)
            )
            try:
                record.meta_or_none = meta_model.capture_meta_model(
                    arg, before_engine=known.meta_or_none if known else None
                )
            except SwitchError as error:
                record.rebuild_error = str(error)
            self._new[id(arg)] = record
        models = [*all_models(), *self._new.values()]
        owners = {identity: model for model in models for identity in _names(model)}
        self._recipes: dict[int, tuple[PreparedModel, OptimizerRecipe]] = {}
        for arg in args:
            if isinstance(arg, Optimizer) and not isinstance(arg, AcceleratedOptimizer):
                self._capture_optimizer(arg, owners, shards=shards)

    @property
    def meta_copy(self) -> nn.Module | None:
        """Meta copy of the last new model; None if it cannot be copied."""
        metas = [model.meta_or_none for model in self._new.values()]
        return metas[-1].model if metas and metas[-1] is not None else None

    def _capture_optimizer(
        self, optimizer: Optimizer, owners: dict[int, PreparedModel], *, shards: bool
    ) -> None:
        ids = [id(parameter) for parameter in optimizer_parameters(optimizer)]
        models = {id(owners[identity]): owners[identity] for identity in ids if identity in owners}
        for owner in models.values():
            if len(models) > 1:
                owner.rebuild_error = owner.rebuild_error or (
                    "An optimizer holds parameters of several models. Give each model its own"
                    " optimizer."
                )
        if len(models) != 1:
            return  # the engine raises the error if it does not support this
        (owner,) = models.values()
        try:
            self._recipes[id(optimizer)] = (
                owner,
                optimizer_recipes.capture_recipe(optimizer, _names(owner)),
            )
        except SwitchError as error:
            if shards:  # DDP trains with it
                raise OptionError(str(error)) from None
            owner.rebuild_error = owner.rebuild_error or str(error)

    def record_result(self, result: object) -> list[PreparedModel]:
        """Register the result of the call; return the models that are new."""
        results = result if len(self._args) > 1 and isinstance(result, (list, tuple)) else [result]
        pairs = list(zip(self._args, results, strict=False))
        for before, after in pairs:
            if id(before) in self._new and isinstance(after, nn.Module):
                model = self._new[id(before)]
                model.wrapper = weakref.ref(after)
                _by_model[after] = model
                _trained.append(model)
                model.frozen = _frozen_for_good(after)
            elif isinstance(after, DataLoader) and not any(
                after is known for known in all_loaders()
            ):
                register_loader(after, before)
        for before, after in pairs:
            if not isinstance(before, Optimizer) or not isinstance(after, AcceleratedOptimizer):
                continue
            if id(before) in self._recipes:
                owner, recipe = self._recipes[id(before)]
                owner.optimizers.append(
                    PreparedOptimizer(
                        recipe=recipe,
                        user_optimizer=weakref.ref(before),
                        wrapper=weakref.ref(after),
                    )
                )
        for before, after in pairs:
            if isinstance(before, LRScheduler) and isinstance(after, AcceleratedScheduler):
                for owner in _owners(before):
                    owner.schedulers.append(weakref.ref(after))
        return [model for model in self._new.values() if model.is_alive]


def _frozen_for_good(model: nn.Module) -> list[weakref.ref[nn.Parameter]]:
    engine = unwrap_compiled(model)
    if isinstance(engine, DistributedDataParallel) or is_deepspeed_engine(engine):
        return [weakref.ref(each) for each in model.parameters() if not each.requires_grad]
    return []


class ModelReference(NamedTuple):
    """Reference to a prepared model or one of its modules."""

    prepared: PreparedModel
    prefix: str
    """Prefix of the module's parameters: "" or "transformer.h."."""


def find_model(value: object) -> ModelReference | None:
    """Find the prepared model that a value is or is a module of."""
    # isinstance() would access the value's __class__, which raises for a dead weakref.proxy.
    for prepared in all_models() if issubclass(type(value), nn.Module) else ():
        if value is prepared.user_model() or value is prepared.model:
            return ModelReference(prepared, "")
        for name, module in meta_model.named_modules(prepared.model):
            if module is value:
                return ModelReference(prepared, f"{name}." if name else "")
    return None


def refresh_param_groups(prepared: PreparedModel) -> None:
    """Record parameter groups that were added after `prepare()`.

    Raises:
        SwitchError: a group has parameters that are not this model's.
    """
    if is_deepspeed_engine(unwrap_compiled(prepared.model)):
        return  # DeepSpeed steps its own flat tensors and does not support additional groups
    names = _names(prepared)
    for owned in prepared.live_optimizers:
        flat = any(
            isinstance(p, FlatParameter) for p in optimizer_parameters(owned.inner_optimizer)
        )
        if not flat:
            groups = optimizer_recipes.get_param_group_names(owned.inner_optimizer, names)
            owned.recipe = replace(owned.recipe, param_group_names=groups)


def pending_gradients(prepared: PreparedModel) -> str:
    """Return a sentence if gradients of micro-batches were not yet used in a step."""
    # `Accelerator.backward` counts for all models that ran forward, because it does not know which
    # one the loss is from: a model without gradients was not part of it.
    has_gradients = is_deepspeed_engine(unwrap_compiled(prepared.model)) or any(
        gradient is not None for gradient in tensor_categories.gradients(prepared.model)
    )
    count = prepared.num_pending_micro_batches if has_gradients else 0
    if not count:
        return ""
    return (
        f"The gradients of {count} micro-batch{'es' * (count > 1)} are waiting for an optimizer"
        f" step of {prepared.title}. Run the code up to the step, or drop them"
        " with zero_grad() of its optimizer."
    )


def prepared_twice(models: Sequence[PreparedModel]) -> str:
    """Return a sentence if models train the same parameter, or optimizers of one model do.

    Optimizers of different classes whose state has different names are allowed.
    """
    for is_released in (False, True):
        alive = [model for model in models if model.is_alive]
        trained = Counter(
            id(each) for model in alive for each in model.model.parameters() if each.requires_grad
        )
        states = Counter(
            (number, id(each), name)
            for number, model in enumerate(alive)
            for optimizer in [owned.inner_optimizer for owned in model.live_optimizers]
            for each in optimizer_parameters(optimizer)
            for name in {type(optimizer).__name__, *optimizer.state.get(each, ())}
        )
        if max([*trained.values(), *states.values()], default=0) <= 1:
            return ""
        if not is_released:  # a Trainer that was deleted is in a reference cycle
            release_models.release_unused_models()
    return (
        "A model was prepared twice, or two optimizers have the state of one parameter. Delete the"
        " Trainer, prepared model, optimizer or scheduler that is no longer needed, such as"
        " `del trainer`, and repeat."
    )


def interrupted_pass() -> InterruptedPass:
    """Return the interrupted pass of any model; a backward takes precedence over a forward."""
    interrupted = {model.interrupted_pass for model in _trained}
    return (
        "backward" if "backward" in interrupted else "forward" if "forward" in interrupted else ""
    )


def hook_forward(prepared: PreparedModel) -> None:
    """Register hooks that allow an interrupt before a forward and detect an interrupted one.

    They also refuse a forward with collectives in a cell that runs on some ranks only.
    """
    model = unwrap_compiled(prepared.model)
    # The engine all-gathers parameters in a forward, and an interrupt leaves them unsharded.
    gathers = layouts.kind_of(model).shards_parameters

    def require_all_ranks(*_: object) -> None:
        if gathers:
            process_group.require_all_ranks("The forward of a model with sharded parameters")
        elif isinstance(model, DistributedDataParallel) and model.will_sync_module_buffers():
            process_group.require_all_ranks(
                "The forward of a DDP model with buffers",
                ", or call accelerator.unwrap_model(model) instead",
            )

    def before_forward(*_: object) -> None:
        require_all_ranks()
        optimizer_step_gate.end_iteration(is_training=torch.is_grad_enabled())
        prepared.has_forward |= torch.is_grad_enabled()
        prepared.has_new_forward |= torch.is_grad_enabled()
        prepared.interrupted_pass = "forward" if gathers else ""

    def after_forward(*_: object) -> None:
        prepared.interrupted_pass = ""
        prepared.may_be_gathered = gathers
        if not (torch.is_grad_enabled() or prepared.is_whole or prepared.stays_gathered):
            # FSDP keeps the root whole until the next backward, which drops what is written to it.
            fsdp.reshard(prepared.model)

    # first, because FSDP2 all-gathers in such a hook
    prepared.model.register_forward_pre_hook(before_forward, prepend=True)
    prepared.model.register_forward_hook(after_forward)
    is_wrapper = is_deepspeed_engine(model) or isinstance(model, FullyShardedDataParallel)
    inner = model.module if gathers and is_wrapper else None
    if isinstance(inner, nn.Module):  # as accelerator.unwrap_model() returns it
        # The hook also keeps the wrapper, without which the module's parameters are of no use.
        inner.register_forward_pre_hook(require_all_ranks, prepend=True)
    if isinstance(model, DistributedDataParallel):
        prepared.local_gradients = LocalGradients(model, prepared.model)
        if hasattr(model.module, "generate"):
            # The wrappers of the other engines pass on the attributes of the model.
            vars(prepared.model)["generate"] = model.module.generate


def prepared_form(value: object) -> object:
    """Return what `prepare()` returned for a value if FSDP1 or DeepSpeed cannot prepare it again.

    Any other value is returned as it is.
    """
    for prepared in all_models() if isinstance(value, (nn.Module, Optimizer)) else ():
        model: Any = prepared.model
        is_engine = is_deepspeed_engine(model)
        is_wrapper = is_engine or isinstance(model, FullyShardedDataParallel)
        if is_wrapper and model.module is value:
            return model
        for owned in prepared.live_optimizers if is_engine else ():
            if owned.user_optimizer() is value:
                return owned.wrapper()
    return value


def forget(model: nn.Module) -> list[object]:
    """Remove a prepared model and its optimizers from the registry; return these objects."""
    removed: list[object] = [model]
    for record in [each for each in all_models() if each.model is model]:
        _trained.remove(record)
        removed += [each.wrapper() for each in record.live_optimizers]
        if (user_model := record.user_model()) is not None:
            _by_model[user_model] = record
        if (accelerator := record.accelerator()) is not None:
            gone = set(map(id, removed))
            for prepared in (accelerator._models, accelerator._optimizers):  # noqa: SLF001
                prepared[:] = [each for each in prepared if id(each) not in gone]
    return removed


def clear() -> None:
    """Clear the registry of models, before they are prepared again."""
    _trained.clear()


def wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Accelerator.backward` to count micro-batches since the last step."""

    def backward(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        optimizer_step_gate.end_iteration()
        models = [model for model in _trained if model.accelerator() is self and model.is_alive]
        # Hooks do not see a forward of an inner module.
        models = [model for model in models if model.has_forward] or models
        if models:
            process_group.require_all_ranks(
                "accelerator.backward()",
                ", or call loss.backward() for a model of this cell",
            )
            engines = [is_deepspeed_engine(unwrap_compiled(each.model)) for each in models]
            if all(engines) and not any(each.optimizers for each in models):
                raise OptionError(
                    "The model was prepared without an optimizer, and DeepSpeed cannot train it."
                    " Build both again, and use model, optimizer = accelerator.prepare(model,"
                    " optimizer)."
                )
        for model in models:
            model.interrupted_pass = "backward"  # noqa: S105
        result = original(self, *args, **kwargs)
        for model in models:
            model.interrupted_pass, model.may_be_gathered = "", False
            model.num_pending_micro_batches += 1
            model.has_new_forward = False
            if model.local_gradients is not None:
                model.local_gradients.check_used()
        return result

    return backward


def wrap_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `step()` of prepared optimizers: for interrupts, profiles, memory and the step count."""

    @functools.wraps(original)
    def step(self: AcceleratedOptimizer, *args: Any, **kwargs: Any) -> Any:
        if not self.gradient_state.sync_gradients:  # gradient accumulation
            return original(self, *args, **kwargs)
        for model in _models_of(self):
            frozen = [parameter for each in model.frozen if (parameter := each()) is not None]
            if any(parameter.requires_grad for parameter in frozen):
                raise OptionError(
                    "Parameters that were frozen at accelerator.prepare() have been unfrozen. DDP"
                    " would not average their gradients, and DeepSpeed would not train them."
                    " Unfreeze them before accelerator.prepare(), or use fsdp or fsdp1. A model"
                    " that was prepared already is prepared again as"
                    " accelerator.unwrap_model(model), with a new optimizer."
                )
            if is_deepspeed_engine(unwrap_compiled(model.model)) and len(frozen) < sum(
                not parameter.requires_grad for parameter in model.model.parameters()
            ):
                raise OptionError(
                    "Parameters that DeepSpeed trains have been frozen, and momentum and weight"
                    " decay would still change them. Freeze them before accelerator.prepare(), or"
                    " use fsdp or fsdp1."
                )
            if fsdp.is_sharded(model.model):
                fsdp.refuse_gradient_hooks(model.model)
                fsdp.refuse_unreduced_gradients(model.model)
            if model.may_be_gathered:
                # torch 2.13: units that stay gathered after an evaluation between backward and
                # step would be used in the next forward as they were before the step.
                layouts.layout_for(model.model)
                model.may_be_gathered = False
        average_gradients(_models_of(self))
        process_group.finish_backward()
        with optimizer_step_gate.step(self):
            with memory_probe.step(self):
                result = original(self, *args, **kwargs)
            process_group.record_step()
            for model in _models_of(self):
                model.num_pending_micro_batches = 0
                model.has_forward = model.has_new_forward = False
                # Only its first optimizer counts the steps of a model with several.
                model.num_steps += int(model.live_optimizers[0].wrapper() is self)
        return result

    return step


def average_gradients(models: Iterable[PreparedModel]) -> None:
    """Average the gradients that DDP has not averaged."""
    for model in models:
        if model.local_gradients is not None:
            model.local_gradients.average()


def wrap_zero_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `zero_grad()` of prepared optimizers: it also resets the micro-batch count."""

    @functools.wraps(original)
    def zero_grad(self: AcceleratedOptimizer, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if self.gradient_state.sync_gradients:
            own = {id(parameter) for parameter in optimizer_parameters(self)}
            for model in _models_of(self):
                _drop_micro_batches(model)
                fsdp.drop_gradients(model.model, own)
        return result

    return zero_grad


def reset_micro_batches(model: nn.Module) -> None:
    """Reset the micro-batch count of a prepared model whose gradients were dropped."""
    for prepared in all_models():
        if unwrap_compiled(prepared.model) is model:
            _drop_micro_batches(prepared)


def _drop_micro_batches(model: PreparedModel) -> None:
    # `loss = ...; optimizer.zero_grad(); loss.backward()`: the forward is that of the next backward
    model.num_pending_micro_batches, model.has_forward = 0, model.has_new_forward


def _models_of(wrapper: AcceleratedOptimizer) -> list[PreparedModel]:
    return [
        model
        for model in _trained
        if any(optimizer.wrapper() is wrapper for optimizer in model.optimizers)
    ]


def _names(prepared: PreparedModel) -> dict[int, str]:
    """Return id -> name of a model's parameters, including originals that FSDP2 replaced."""
    model = prepared.model if prepared.is_alive else prepared.user_model()
    if model is None:
        return {}
    named = {id(p): meta_model.bare_name(name) for name, p in model.named_parameters()}
    return named | {
        id(old): named[id(new)] for old, new in fsdp.shard_of_original.items() if id(new) in named
    }


def _owners(scheduler: LRScheduler) -> Iterator[PreparedModel]:
    """Yield the models whose optimizers a scheduler controls."""
    parts = optimizer_recipes.nested_schedulers(scheduler)
    ids = {id(getattr(part, "optimizer", None)) for part in parts}
    for model in all_models():
        for owned in model.live_optimizers:
            own_ids = {id(owned.user_optimizer())}
            optimizer: Any = owned.wrapper()
            while optimizer is not None:  # Accelerate's wrapper, ZeRO's, torch's
                own_ids.add(id(optimizer))
                optimizer = getattr(optimizer, "optimizer", None)
            if ids & own_ids:
                yield model
