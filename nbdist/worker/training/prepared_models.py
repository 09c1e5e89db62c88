"""What `prepare()` learned: the models in training, and how to make them for another engine.

Runs on a rank. `worker.engines.accelerator` calls `meet` before each preparation, when models and
optimizers are still bare, and `learn` after it. Nothing here keeps a prepared object alive:
a cell that is run again replaces what it made before.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nbdist.errors import SwitchError
from nbdist.state import meta_model, optimizer_recipes
from nbdist.state.layouts.base import inside_compiled, is_engine
from nbdist.worker.engines import fsdp
from nbdist.worker.interrupt.step_gate import gate
from nbdist.worker.memory import memory_accounting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accelerate import Accelerator

    from nbdist.state.meta_model import Skeleton
    from nbdist.state.optimizer_recipes import Recipe


Midway = Literal["", "forward", "backward"]


@dataclass(slots=True, kw_only=True, eq=False)
class TrainedOptimizer:
    """An optimizer of a model."""

    recipe: Recipe
    given: weakref.ref[Optimizer]
    """The user's; schedulers point to it. DeepSpeed may step one of its own instead."""
    wrapper: weakref.ref[AcceleratedOptimizer]
    """As `prepare()` returned it."""

    @property
    def raw(self) -> Optimizer:
        """Torch's own or DeepSpeed's, which has the state."""
        return innermost(self.wrapper())


@dataclass(slots=True, kw_only=True, eq=False)
class Trained:
    """A model that an engine has, with what belongs to it."""

    accelerator: weakref.ref[Accelerator]
    skeleton: Skeleton | None = None
    problem: str = ""
    """Why it cannot be made again."""
    bare: weakref.ref[nn.Module]
    """As it was given to `prepare()`; under FSDP2 the engine's as well."""
    wrapper: weakref.ref[nn.Module] | None = None
    """As `prepare()` returned it."""
    optimizers: list[TrainedOptimizer] = field(default_factory=list)
    schedulers: list[weakref.ref[Any]] = field(default_factory=list)
    """Wrappers of its schedulers, as `prepare()` returned them."""
    waiting: int = 0
    """Micro-batches whose gradients no step has used yet."""
    steps: int = 0
    """Optimizer steps since its training began, in whatever session."""
    midway: Midway = ""
    """Which pass through it was cut short: its engine may be left with half of the work."""

    @property
    def model(self) -> nn.Module:
        """The prepared model."""
        prepared = None if self.wrapper is None else self.wrapper()
        if prepared is None:
            message = "a prepared model is gone; run the cell that prepares it again."
            raise SwitchError(message)
        return prepared

    @property
    def owner(self) -> Accelerator:
        """The Accelerator that prepared it."""
        found = self.accelerator()
        if found is None:
            message = "the accelerator of a prepared model is gone; prepare the model again."
            raise SwitchError(message)
        return found

    @property
    def kept(self) -> Skeleton:
        """What it can be made from again."""
        if self.skeleton is None:
            raise SwitchError(self.problem)
        return self.skeleton

    @property
    def schedules(self) -> list[Any]:
        """Schedulers that are still in use, as `prepare()` returned them."""
        return [one for one in (known() for known in self.schedulers) if one is not None]

    @property
    def alive(self) -> bool:
        """Whether anything but an Accelerator may still use it."""
        return self.wrapper is not None and self.wrapper() is not None

    @property
    def living(self) -> list[TrainedOptimizer]:
        """Optimizers that are still in use."""
        return [one for one in self.optimizers if one.wrapper() is not None]


_trained: list[Trained] = []
_loaders: list[weakref.ref[DataLoader[Any]]] = []


def everything() -> list[Trained]:
    """All models in training, in the order in which they were prepared."""
    _trained[:] = [one for one in _trained if one.alive]
    return list(_trained)


def loaders() -> list[DataLoader[Any]]:
    """All prepared loaders that are still in use, in the order in which they were prepared."""
    _loaders[:] = [known for known in _loaders if known() is not None]
    return [one for one in (known() for known in _loaders) if one is not None]


def know_loader(prepared: Any, given: object) -> None:
    """Remember a prepared loader, and the user's that it was made from."""
    vars(prepared)[_GIVEN] = given
    _loaders.append(weakref.ref(prepared))


def given_loader(prepared: Any) -> object:
    """The user's loader that a prepared one was made from; None where it is not known."""
    return vars(prepared).get(_GIVEN)


_GIVEN = "_nbdist_given"


class Meeting:
    """What is known of the arguments of one `prepare()` before it."""

    def __init__(self, accelerator: Accelerator, args: Sequence[object]) -> None:
        """Look at models and optimizers while they are bare."""
        self._args = list(args)
        self._new = {
            id(one): _meet(accelerator, one)
            for one in args
            if isinstance(one, nn.Module) and not any(one is old.model for old in everything())
        }
        known = [*everything(), *self._new.values()]
        owners = {identity: one for one in known for identity in _names(one)}
        self._recipes: dict[int, tuple[Trained, Recipe]] = {}
        for one in args:
            if isinstance(one, Optimizer) and not isinstance(one, AcceleratedOptimizer):
                self._take_down(one, owners)

    @property
    def twin(self) -> nn.Module | None:
        """The last new model without its data; None where it cannot be copied."""
        kept = [one.skeleton for one in self._new.values()]
        return kept[-1].model if kept and kept[-1] is not None else None

    def _take_down(self, optimizer: Optimizer, owners: dict[int, Trained]) -> None:
        held = [id(one) for one in parameters(optimizer)]
        found = {id(owners[one]): owners[one] for one in held if one in owners}
        for owner in found.values():
            if len(found) > 1:
                owner.problem = owner.problem or (
                    "one optimizer holds parameters of several models; give each model its own."
                )
        if len(found) != 1:
            return  # the engine will say what it cannot take
        (owner,) = found.values()
        try:
            self._recipes[id(optimizer)] = owner, optimizer_recipes.recipe(optimizer, _names(owner))
        except SwitchError as error:
            owner.problem = owner.problem or str(error)

    def learn(self, result: object) -> list[Trained]:
        """Remember what came of it; returns the models that are new."""
        made = result if len(self._args) > 1 and isinstance(result, (list, tuple)) else [result]
        pairs = list(zip(self._args, made, strict=False))
        for before, after in pairs:
            if id(before) in self._new and isinstance(after, nn.Module):
                one = self._new[id(before)]
                one.wrapper = weakref.ref(after)
                _trained.append(one)
            elif isinstance(after, DataLoader) and not any(after is one for one in loaders()):
                know_loader(after, before)
        for before, after in pairs:
            if not isinstance(before, Optimizer) or not isinstance(after, AcceleratedOptimizer):
                continue
            if id(before) in self._recipes:
                owner, recipe = self._recipes[id(before)]
                owner.optimizers.append(
                    TrainedOptimizer(
                        recipe=recipe, given=weakref.ref(before), wrapper=weakref.ref(after)
                    )
                )
        for before, after in pairs:
            if isinstance(before, LRScheduler) and isinstance(after, AcceleratedScheduler):
                for owner in _owners(before):
                    owner.schedulers.append(weakref.ref(after))
        return [one for one in self._new.values() if one.alive]


def bring_up_to_date(one: Trained) -> None:
    """Take down parameter groups that were added since `prepare()`.

    Raises:
        SwitchError: one has parameters that are not this model's.
    """
    if is_engine(inside_compiled(one.model)):
        return  # DeepSpeed steps flat tensors of its own, and takes no further groups
    names = _names(one)
    for owned in one.living:
        flat = any(isinstance(p, FlatParameter) for p in parameters(owned.raw))
        if not flat:
            groups = optimizer_recipes.groups(owned.raw, names)
            owned.recipe = replace(owned.recipe, groups=groups)


def waiting(one: Trained) -> int:
    """Micro-batches whose gradients wait for a step.

    `Accelerator.backward` does not say which of its models it was for: those of another one
    are seen by there being none here.
    """
    found = is_engine(inside_compiled(one.model)) or any(
        gradient is not None for gradient in memory_accounting.gradients(one.model)
    )
    return one.waiting if found else 0


def midway() -> Midway:
    """Which pass through any model was cut short; a backward says more than a forward."""
    cut = {one.midway for one in _trained}
    return "backward" if "backward" in cut else "forward" if "forward" in cut else ""


def watch_forward(one: Trained, *, gathers: bool) -> None:
    """Let Stop come before a forward, and notice one that is cut short.

    Args:
        one: a prepared model.
        gathers: its engine gathers parameters for a forward, and leaves them so when it is cut.
    """

    def begins(*_: object) -> None:
        gate.pause()
        one.midway = "forward" if gathers else ""

    def ends(*_: object) -> None:
        one.midway = ""

    one.model.register_forward_pre_hook(begins, prepend=True)  # FSDP2 gathers in such a hook
    one.model.register_forward_hook(ends)


def parameters(optimizer: Optimizer) -> Iterator[Any]:
    """What an optimizer steps."""
    for group in optimizer.param_groups:
        yield from group["params"]


def forget() -> None:
    """Forget all models; what prepares them anew says so again."""
    _trained.clear()


def counting_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Accelerator.backward`: gradients wait for a step from now on."""

    @functools.wraps(original)
    def backward(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        gate.pause()
        mine = [one for one in _trained if one.accelerator() is self]
        for one in mine:
            one.midway = "backward"
        result = original(self, *args, **kwargs)
        for one in mine:
            one.midway = ""
            one.waiting += 1
        return result

    return backward


def using_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `step()` or `zero_grad()` of a prepared optimizer: no gradients wait after it."""

    @functools.wraps(original)
    def method(self: AcceleratedOptimizer, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if self.gradient_state.sync_gradients:
            for one in _trained:
                if any(owned.wrapper() is self for owned in one.optimizers):
                    one.waiting = 0
                    first = one.optimizers[0].wrapper() is self
                    one.steps += int(first and original.__name__ == "step")
        return result

    return method


def _meet(accelerator: Accelerator, model: nn.Module) -> Trained:
    """Look at a bare model; a module that is prepared already keeps its record."""
    one = Trained(accelerator=weakref.ref(accelerator), bare=weakref.ref(model))
    try:
        one.skeleton = meta_model.skeleton(model)
    except SwitchError as error:
        one.problem = str(error)
    return one


def _names(one: Trained) -> dict[int, str]:
    """Id of a parameter -> its plain name; of what took its place under FSDP2 too."""
    model = one.model if one.alive else one.bare()
    if model is None:
        return {}
    named = {id(p): meta_model.plain(name) for name, p in model.named_parameters()}
    return named | {id(old): named[id(new)] for old, new in fsdp.moved() if id(new) in named}


def _owners(scheduler: LRScheduler) -> Iterator[Trained]:
    """The model whose optimizer a scheduler is for."""
    meant = {id(getattr(one, "optimizer", None)) for one in optimizer_recipes.schedules(scheduler)}
    for one in everything():
        for owned in one.living:
            if meant & {id(owned.given()), *map(id, layers(owned.wrapper()))}:
                yield one


def layers(optimizer: Any) -> Iterator[Any]:
    """An optimizer and those inside it: Accelerate's wrapper, ZeRO's, torch's own."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)


def innermost(optimizer: Any) -> Optimizer:
    """Torch's own optimizer inside Accelerate's and DeepSpeed's."""
    found: Optimizer = list(layers(optimizer))[-1]
    return found
