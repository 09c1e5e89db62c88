"""Changing the engine of living models, as one transaction; runs on a rank.

    checking    nothing is touched: can everything be made again, do all ranks agree
    keeping     a copy of this rank's share of the state in host memory, a digest of each tensor
    freeing     the old engine is emptied
    building    model, optimizers and schedulers are made and prepared under the new options
    loading     the kept state goes where the new engine has it, across ranks where it must
    verifying   the digest of each tensor is compared with the kept one
    binding     the user's variables; random generators come last, for all of this draws

The ranks agree before and after each phase. After a failure from `freeing` on, the old
options are built and loaded in the same way from the same copy.
"""

from __future__ import annotations

import gc
import os
import weakref
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from nbdist.errors import SwitchError
from nbdist.hardware import discovery
from nbdist.launcher import deepspeed_builds
from nbdist.state import collectives, layouts, meta_model, optimizer_recipes, shards
from nbdist.worker.engines import accelerator as accelerators
from nbdist.worker.engines import trainer, wrap_policy
from nbdist.worker.memory import memory_check, memory_probe
from nbdist.worker.operations.transaction import CHECKING, Phases
from nbdist.worker.training import model_cleanup, prepared_models, rebind, rng_state
from nbdist.worker.training.model_recipe import Mould
from nbdist.worker.training.model_state import Carried

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping, Sequence

    from accelerate import Accelerator

    from nbdist.state.shards import Shard
    from nbdist.strategies import Options
    from nbdist.worker.training.prepared_models import Trained, TrainedOptimizer


@dataclass(slots=True, kw_only=True, eq=False)
class Kept:
    """A model in training without its engine."""

    number: int
    """Of the session's models."""
    accelerator: Accelerator
    mould: Mould
    schedulers: list[Any]
    """Accelerate's wrappers; torch's own inside them go on with the new optimizer."""
    tensors: dict[str, Shard]
    """This rank's share, in host memory."""


@dataclass(slots=True, kw_only=True)
class Report:
    """What a switch did on this rank."""

    seconds: dict[str, float] = field(default_factory=dict)
    """By phase."""
    state_bytes: int = 0
    """Of this rank's share."""
    sent_bytes: int = 0
    """To other ranks."""
    verified: int = 0
    """Tensors whose digest is that of before."""
    bound: list[str] = field(default_factory=list)
    """The user's variables that were bound anew."""
    carried: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the user should know, in sentences."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for a message."""
        return asdict(self)


class Switch:
    """One change of the engine."""

    def __init__(
        self,
        then: Options,
        names: MutableMapping[str, Any],
        *,
        tell: Callable[[str], None],
        reset_optimizer: bool = False,
        reason: str = "",
    ) -> None:
        """Know what is to come.

        Args:
            then: checked options.
            names: the user's variables.
            tell: told of each phase.
            reset_optimizer: leave the state of the optimizers behind.
            reason: why what was prepared before is of no use; default: the switch.
        """
        self._now, self._then = accelerators.current().options, then
        self._names, self._tell, self._reset = names, tell, reset_optimizer
        self._reason = reason or outdated(self._now, then)
        self._renewed = rebind.Renewed()
        self._kept: list[Kept] = []
        self._made: list[object] = []
        """What was prepared and is not bound yet."""
        self._phase = Phases("the switch", tell, SwitchError)
        self.report = Report(seconds=self._phase.seconds)

    def run(self) -> Report:
        """Switch, or leave everything as it was.

        Raises:
            SwitchError: on all ranks alike: which phase failed, on which ranks, and why.
        """
        try:
            return self._run()
        finally:
            self._kept.clear()
            shards.give_back()

    def _run(self) -> Report:
        generators, fed = rng_state.state(), memory_probe.fed()
        with self._phase(CHECKING):
            model_cleanup.let_go()
            trained = prepared_models.everything()
            self._check(trained)
            hardware = accelerators.current().hardware
            ops = self._then.strategy.extensions(self._then, hardware)
            deepspeed_builds.ensure(ops, progress=self._tell)
        with self._phase("keeping"):
            self._kept = [self._keep(number, one) for number, one in enumerate(trained)]
        try:
            with self._phase("freeing"):
                self._free(trained)
            self._establish(self._then)
        except SwitchError as error:
            self._go_back(error)
            raise
        finally:
            rng_state.restore(generators)
            memory_probe.fed_like(fed)
        self._summarise()
        return self.report

    # -- the old engine

    def _check(self, trained: Sequence[Trained]) -> None:
        """Refuse what cannot be carried, before anything moves."""
        for one in trained:
            check(one, self._then, reset_optimizer=self._reset)
            hardware = accelerators.current().hardware
            self.report.notes += [
                *memory_check.check(one, self._then, hardware, world_size=collectives.size()),
                *left_behind(one),
            ]

    def _keep(self, number: int, one: Trained) -> Kept:
        """Copy this rank's share to host memory."""
        carried = Carried(number, one)
        live = carried.share(optimizers=not self._reset)
        needed = sum(piece.view.nbytes for shard in live.values() for piece in shard.pieces)
        check_room(needed)
        self.report.state_bytes += needed
        share = shards.snapshot(live)
        return Kept(
            number=number,
            accelerator=one.owner,
            mould=Mould.of(one, carried, share, reset_optimizer=self._reset, hooks=True),
            schedulers=one.schedules,
            tensors=share,
        )

    def _free(self, trained: Sequence[Trained]) -> None:
        """Empty the engines of now, whoever still refers to them."""
        for number, one in enumerate(trained):
            for key, part in parts(number, one).items():
                self._renewed.old(key, part)
            layouts.free(one.model)
        prepared_models.forget()
        self._made.clear()
        for owner in self._owners():
            accelerators.take_apart(owner)
        model_cleanup.forget_engines()
        rebind.empty(self._renewed.unbound(), self._reason)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        shards.give_back()  # what an offload had

    # -- the new engine

    def _establish(self, options: Options) -> None:
        """Build engines under these options, bring the kept state into them, bind them."""
        with self._phase("building"):
            accelerators.adopt(options)
            for owner in accelerators.built():
                accelerators.renew(owner)
            for kept in self._kept:
                self._build(kept)
        trained = prepared_models.everything()
        with self._phase("loading"):
            for kept, one in zip(self._kept, trained, strict=True):
                carried = Carried(kept.number, one)
                self.report.sent_bytes += carried.take(kept.tensors, kept.mould.counts)
                kept.mould.fill(one)
        with self._phase("verifying"):
            self.report.verified = sum(
                Carried(kept.number, one).verify(
                    kept.mould.digests, kept.tensors, kept.mould.counts
                )
                for kept, one in zip(self._kept, trained, strict=True)
            )
        with self._phase("binding"):
            self.report.bound = self._renewed.bind(self._names)
            for value in list(self._names.values()):
                # One that prepare() was not given. isinstance() would ask the object itself, which
                # may raise: a weakref.proxy whose object is gone does.
                if issubclass(type(value), LRScheduler):
                    optimizer_recipes.repoint(value, self._renewed.successors())
            for one in trainer.found(self._names):
                self._renewed.bind(vars(one))
                self._renewed.bind(vars(one.callback_handler))
                trainer.follow(one)

    def _build(self, kept: Kept) -> None:
        """Make a model and what belongs to it, and prepare it."""
        model, raws = kept.mould.cast()
        for place, raw in enumerate(raws):
            self._renewed.new({(kept.number, kind, place): raw for kind in ("raw", "given")})
            # Schedulers point to it from here on, should there be a way back.
            self._renewed.old((kept.number, "given", place), raw)
        for wrapper in kept.schedulers:
            optimizer_recipes.repoint(wrapper.scheduler, self._renewed.successors())
        with wrap_policy.filled_later():
            # Accelerate keeps DDP's bare model only, and no variable has the new one yet.
            self._made += kept.accelerator.prepare(
                model, *raws, *(wrapper.scheduler for wrapper in kept.schedulers), None
            )
        one = prepared_models.everything()[-1]
        _go_on_with(one, kept.schedulers)
        self._renewed.new(parts(kept.number, one))

    def _go_back(self, error: SwitchError) -> None:
        """Return to the old options.

        Raises:
            SwitchError: that failed as well.
        """
        try:
            self._reason = outdated(self._then, self._now)
            with self._phase("freeing"):
                self._free(prepared_models.everything())
            self._establish(self._now)
        except SwitchError as second:
            message = (
                f"{str(error).removesuffix('.')}. The state before could not be restored either:"
                f" {str(second).removesuffix('.')}. Use %nbdist"
                " restart, run the preparing cell and load the last checkpoint."
            )
            raise SwitchError(message) from second

    def _owners(self) -> list[Accelerator]:
        return list({id(kept.accelerator): kept.accelerator for kept in self._kept}.values())

    def _summarise(self) -> None:
        """Say what was carried, in words."""
        words = [] if self._kept else ["no model was prepared yet"]
        for kept in self._kept:
            words += kept.mould.words(reset_optimizer=self._reset)
            words += [type(one.scheduler).__name__ for one in kept.schedulers]
            steps = [count for one in kept.mould.counts.values() for count in one.values()]
            words += [f"step {max(steps):g}"] if steps else []
        loaders = len(prepared_models.loaders())
        words += [f"{loaders} loader{'s' * (loaders != 1)}"] if loaders else []
        self.report.carried = [*words, "random generators", "all variables"]


def outdated(before: Options, now: Options) -> str:
    """Say why what was prepared under other options is of no use."""
    return (
        f"this was prepared under {before.backend}, and the session has switched to"
        f" {now.backend} since; the variables model and optimizer were bound anew, so take"
        " what you need from them again."
    )


def check(one: Trained, then: Options, *, reset_optimizer: bool) -> None:
    """Refuse a model that cannot be carried to another engine.

    Raises:
        SwitchError: one sentence: what cannot be carried, and what to do.
    """
    if one.problem:
        raise SwitchError(one.problem)
    if waiting := prepared_models.waiting(one):
        message = (
            f"the gradients of {waiting} micro-batches wait for an optimizer step; run a cell"
            " up to the step, or drop them with optimizer.zero_grad()."
        )
        raise SwitchError(message)
    if accelerators.brings_its_own(one.owner):
        message = (
            "the model was prepared by an Accelerator with a plugin of its own; prepare it with"
            " the rank's accelerator to switch it."
        )
        raise SwitchError(message)
    layouts.check(one.model)
    prepared_models.bring_up_to_date(one)
    if then.strategy.engine == "deepspeed" and len(one.living) != 1:
        message = (
            f"{type(one.kept.model).__name__} has {len(one.living)} optimizers and DeepSpeed takes"
            " a model with one; use ddp, fsdp2 or fsdp1."
        )
        raise SwitchError(message)
    for owned in one.living:
        if not reset_optimizer:
            _check_optimizer(owned, one, then)
        if why := optimizer_recipes.cannot_step(owned.recipe.cls, then.backend):
            raise SwitchError(f"{why}, or another optimizer.")


def left_behind(one: Trained) -> list[str]:
    """Say what of a model in training stays behind."""
    hooked = [name for name, p in one.model.named_parameters() if p._backward_hooks]  # noqa: SLF001
    if not hooked:
        return []
    note = (
        f"gradient hooks of {len(hooked)} parameters ({meta_model.plain(hooked[0])}) are not"
        " carried;"
        " register them again"
    )
    return [note]


def check_room(needed: int) -> None:
    """Refuse a copy that the host has no room for.

    Args:
        needed: bytes of this rank's share.

    Raises:
        SwitchError: the host's free memory is less than all its ranks' copies.
    """
    shards.give_back()
    everyone = needed * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = discovery.host_free_bytes()
    if everyone > free:
        message = (
            f"a copy of the state takes {everyone / 2**30:.1f} GiB of the host's memory and"
            f" {free / 2**30:.1f} GiB are free; free some, or save, restart and load."
        )
        raise SwitchError(message)


def _check_optimizer(owned: TrainedOptimizer, one: Trained, then: Options) -> None:
    """Refuse optimizer state that means nothing elsewhere, or has no room there."""
    refusal = optimizer_recipes.refusal(owned.recipe.cls)
    if refusal:
        message = f"{refusal}; --reset-optimizer switches without it, and it begins anew."
        raise SwitchError(message)
    if then.strategy.engine != "deepspeed":
        return
    counts = Carried(0, one).counts()
    for names in owned.recipe.groups:
        # NAdam keeps other numbers beside the step, which follow from it.
        steps = {counts[name]["step"] for name in names if "step" in counts.get(name, {})}
        if len(steps) > 1:
            message = (
                f"parameters of one group were stepped {min(steps):g} to {max(steps):g} times, and"
                " DeepSpeed keeps one count for a group; use ddp, fsdp2 or fsdp1, or"
                " --reset-optimizer."
            )
            raise SwitchError(message)


def parts(number: int, one: Trained) -> dict[object, object]:
    """What a variable may hold of a model in training, by key."""
    found = rebind.parts(number, one.model, one.bare())
    for place, owned in enumerate(one.living):
        found[number, "optimizer", place] = owned.wrapper()
        found[number, "raw", place] = owned.raw
        if (given := owned.given()) is not None:
            found[number, "given", place] = given
    return found


def _go_on_with(one: Trained, wrappers: Sequence[Any]) -> None:
    """Let the old wrappers of schedulers take the place of those that were just made."""
    for wrapper, made in zip(wrappers, one.schedules, strict=True):
        vars(wrapper).update(vars(made))
        kept = one.owner._schedulers  # noqa: SLF001
        kept[:] = [wrapper if scheduler is made else scheduler for scheduler in kept]
    one.schedulers[:] = map(weakref.ref, wrappers)
