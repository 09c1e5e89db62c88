"""Saving the training state while training goes on; runs on a rank.

    main thread     all ranks: is a step complete, make the folder, copy the state to host memory
    background      each rank by itself: write its files, say so in the folder
    rank 0's        wait for what the others say; manifest, rename, old ones; tell the notebook

The background takes part in no collective, so that it never meets those of the training.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from nbdist import checkpoint
from nbdist.checkpoint import Key, Manifest, full, located
from nbdist.checkpoint.names import checked
from nbdist.cluster.protocol import SHARE_IT, SHARED_S
from nbdist.errors import CheckpointError
from nbdist.protocol import messages
from nbdist.state import collectives, digest, layouts, optimizer_recipes, shard_io, shards
from nbdist.worker.engines import accelerator as accelerators
from nbdist.worker.operations.consensus import agree, attempt, said, words
from nbdist.worker.training import (
    dataloader_state,
    grad_scaler,
    prepared_models,
    rng_state,
    training_metadata,
)
from nbdist.worker.training.model_state import Carried, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from nbdist.checkpoint import Draft, FilePart, Optimizer, Place, Told
    from nbdist.state.shards import Shard
    from nbdist.worker.training.dataloader_state import Position
    from nbdist.worker.training.prepared_models import Trained

log = logging.getLogger(__name__)

POLL_S = 0.01
STALLED_S = 600.0
"""Without a byte more in the folder for so long, a save has failed."""
NICENESS = 10
"""Of what goes on in the background: it takes what training leaves, and a tenth of a core else."""

before_step: list[Callable[[str], object]] = []
"""Called with "snapshot", "write" and "commit" before each; tests let them fail or wait here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be saved, and where."""

    root: str = field(repr=False)
    """A folder, or a URL that may have a password."""
    name: str
    overwrite: bool = False
    keep: int | None = None
    folder: str = field(init=False)
    """For messages."""

    def __post_init__(self) -> None:
        """Leave out what is secret."""
        object.__setattr__(self, "folder", str(located(self.root)))

    @property
    def place(self) -> Place:
        """Where checkpoints go."""
        return checkpoint.place(located(self.root))


@dataclass(slots=True, kw_only=True, eq=False)
class Snapshot:
    """The state of one moment, of this rank, in host memory."""

    kinds: dict[str, dict[str, Shard]] = field(default_factory=dict)
    """Kind of file -> its tensors."""
    digests: dict[str, int] = field(default_factory=dict)
    """Of those that a GPU has digested already."""
    manifest: dict[str, Any] = field(default_factory=dict)
    """Fields that are known before the files are."""
    rng: dict[str, Any] = field(default_factory=dict)
    """Plain part of this rank's generators."""
    left_out: list[str] = field(default_factory=list)
    """What is not saved, since a manifest could not keep it."""


class Saver:
    """The user's `save`, and what it does in the background."""

    def __init__(
        self,
        root: str,
        cwd: Path,
        publish: Callable[[messages.Saved], object],
        complain: Callable[[], Any],
    ) -> None:
        """Know where checkpoints go.

        Args:
            root: as `go_to` takes it; the same on all ranks.
            cwd: from which the paths of others are.
            publish: tells the notebook of a save, from any thread.
            complain: called in a cell, gives what writes to its stderr later, from any thread.
        """
        self._cwd, self._publish, self._complain = cwd, publish, complain
        self._thread: threading.Thread | None = None
        self.go_to(root)

    def go_to(self, root: str) -> None:
        """Know where checkpoints go where no other folder is given; "": beside the notebook."""
        self._root = located(root or "checkpoints", self._cwd)

    def save(
        self,
        name: str,
        overwrite: bool = False,  # noqa: FBT001, FBT002 - the contract
        keep: int | None = None,
        *,
        folder: str | Path | None = None,
    ) -> None:
        """Save the state of this moment; every rank has to call it, with the same arguments.

        Blocks for a copy to host memory, and for an earlier save that still runs; the files
        are written while training goes on. `nbdist.session().checkpoints` says when it is done.

        Args:
            name: 1 to 64 letters, digits, dots, dashes and underscores.
            overwrite: replace a checkpoint of this name; it stays until the new one is whole.
            keep: remove the oldest checkpoints beyond so many, once this one is whole.
            folder: of all checkpoints, or a URL that fsspec knows. Default: that of the session.

        Raises:
            CheckpointError: on all ranks alike; nothing was written.
        """
        root = self._root if folder is None else located(folder, self._cwd)
        self.begin(Order(root=full(root), name=name, overwrite=overwrite, keep=keep))

    def begin(self, order: Order) -> str:
        """Take the state and begin to write it; returns an id that is the same on all ranks.

        Raises:
            CheckpointError: on all ranks alike; nothing was written.
        """
        began = time.perf_counter()
        complain = self._complain()
        self.join()
        trained, size = _agreed(order)
        draft, total = _draft(order, size)
        try:
            agree(attempt(lambda: _see(draft, order))[1])
            snapshot, error = attempt(lambda: _snapshot(trained))
            agree(error)
            rng = collectives.everyones(snapshot.rng)
        except BaseException as error:
            draft.failed(_rank(), words(error) or "")
            if _rank() == 0:
                draft.abort()
            raise
        if _rank() == 0:
            snapshot.manifest["rng"] = tuple(rng)
        job = _Job(order, draft, snapshot, began, self._publish, complain)
        job.tell(messages.Saved(state="running", size_bytes=total))
        self._thread = threading.Thread(target=job.run, name="nbdist-save", daemon=True)
        self._thread.start()
        return draft.id

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the save that runs; False: the time is up."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True


class _Job:
    """One save in the background."""

    def __init__(
        self,
        order: Order,
        draft: Draft,
        snapshot: Snapshot,
        began: float,
        publish: Callable[[messages.Saved], object],
        complain: Callable[[str], object],
    ) -> None:
        self._order, self._draft, self._snapshot, self._began = order, draft, snapshot, began
        self._publish, self._complain = publish, complain
        self._pause_s = time.perf_counter() - began
        # The thread outlives process groups: a renewal has none for a moment.
        self._rank, self._world_size = collectives.rank(), collectives.size()

    def run(self) -> None:
        """Write this rank's part; on rank 0 finish the checkpoint."""
        # Linux: of this thread alone, and of those that it starts; one below the present is refused
        own = threading.get_native_id()
        niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, own))
        os.setpriority(os.PRIO_PROCESS, own, niceness)
        _, error = attempt(self._write)
        if error is not None:
            log.error("a save failed", exc_info=error)
            attempt(lambda: self._draft.failed(self._rank, words(error) or ""))
        if self._rank == 0:
            self._finish()
        self._snapshot, error = Snapshot(), None  # its traceback refers to tensors
        shards.give_back()

    def _write(self) -> None:
        _announce("write")
        parts: list[FilePart] = []
        keys: dict[str, Key] = {}
        for kind, tensors in self._snapshot.kinds.items():
            parts += shard_io.write(tensors, self._draft.folder, self._rank, kind, self._draft.new)
            rest = {key: one for key, one in tensors.items() if key not in self._snapshot.digests}
            sums = digest.digests(rest) | self._snapshot.digests
            keys |= {key: _key(shard, sums[key]) for key, shard in tensors.items()}
        self._draft.report(self._rank, parts, keys)

    def _finish(self) -> None:
        """On rank 0: end the save, and tell the notebook how."""
        done, error = attempt(self._commit)
        if error is None:
            self.tell(done)
            return
        attempt(self._draft.abort)  # what is left is removed by the next save; the notebook waits
        why = words(error) or ""
        self.tell(messages.Saved(state="failed", error=why))
        self._complain(f"nbdist: checkpoint {self._order.name} was not saved: {why}\n")

    def _commit(self) -> messages.Saved:
        """Wait for the others, then give the folder its name."""
        everyone = self._everyone()
        if errors := {rank: one.error for rank, one in everyone.items() if one.error}:
            raise CheckpointError(_blamed(errors))
        _announce("commit")
        order, told = self._order, [everyone[rank] for rank in range(self._world_size)]
        manifest = Manifest(
            files=tuple(file for one in told for file in one.files),
            keys=checkpoint.keys(told),
            **self._snapshot.manifest,
        )
        path = self._draft.commit(order.name, manifest, overwrite=order.overwrite)
        removed: list[str] = []
        error: Exception | None = None
        if order.keep is not None:
            name, count = order.name, order.keep
            removed, error = attempt(lambda: order.place.keep(count, written=name))
        notes = [f"not saved: {one}" for one in dict.fromkeys(self._snapshot.left_out)]
        notes += [words(error) or ""] if error is not None else []
        return messages.Saved(
            state="done",
            path=full(path),
            step=manifest.step,
            size_bytes=manifest.size_bytes,
            backend=manifest.backend,
            removed=removed or [],
            notes=notes,
        )

    def _everyone(self) -> dict[int, Told]:
        """What each rank says, once all have."""
        found: dict[int, Told] = {}
        size_bytes, since = -1, time.monotonic()
        while True:
            found |= self._draft.heard(set(range(self._world_size)) - found.keys())
            if len(found) == self._world_size:
                return found
            now = self._draft.size_bytes()
            if now is None or now != size_bytes:
                size_bytes, since = now or 0, time.monotonic()
            elif time.monotonic() - since > STALLED_S:
                missing = ", ".join(map(str, sorted(set(range(self._world_size)) - found.keys())))
                raise CheckpointError(
                    f"rank {missing} has written nothing for {STALLED_S:.0f} s; look at the disk,"
                    " and save again."
                )
            time.sleep(self._draft.poll_s)

    def tell(self, content: messages.Saved) -> None:
        """Tell the notebook; one rank speaks for all."""
        if self._rank == 0:
            self._publish(
                {
                    **content,
                    "id": self._draft.id,
                    "root": self._order.root,
                    "name": self._order.name,
                    "seconds": time.perf_counter() - self._began,
                    "pause_s": self._pause_s,
                }
            )


# -- before anything is written


def _agreed(order: Order) -> tuple[list[Trained], int]:
    """The models, and this rank's bytes of them, once all ranks want the same and can do it.

    Raises:
        CheckpointError: on all ranks alike.
    """
    trained, error = attempt(lambda: _checked(order))
    everyone = collectives.everyones((order, words(error)))
    wanted = list(dict.fromkeys(one for one, _ in everyone))
    if len(wanted) > 1:
        raise CheckpointError(
            f"the ranks save differently: {wanted[0]} and {wanted[1]}; give the same arguments"
            " on all ranks."
        )
    if errors := {rank: why for rank, (_, why) in enumerate(everyone) if why is not None}:
        raise CheckpointError(said(errors, len(everyone))) from error
    size = sum(shards.bytes_of(Carried(number, one).share()) for number, one in enumerate(trained))
    return trained, size


def _checked(order: Order) -> list[Trained]:
    """Refuse what cannot be saved now, or not under this name."""
    checked(order.name)
    if order.keep is not None and (type(order.keep) is not int or order.keep < 1):
        raise CheckpointError(
            f"keep={order.keep!r} is not allowed; give 1 or more, or leave it out."
        )
    trained = prepared_models.everything()
    if not trained:
        raise CheckpointError(
            "no model is prepared, so there is nothing to save; run the cell with"
            " accelerator.prepare(model, optimizer, ...) first."
        )
    for one in trained:
        check(one)
    return trained


def check(one: Trained, *, optimizers: bool = True) -> None:
    """Refuse a model whose state is not whole, or not known.

    Args:
        one: the model.
        optimizers: whether their state counts.

    Raises:
        CheckpointError: one sentence.
    """
    if one.problem:
        raise CheckpointError(one.problem)
    if waiting := prepared_models.waiting(one):
        raise CheckpointError(
            f"the gradients of {waiting} micro-batches wait for an optimizer step; save or load"
            " after the step, or drop them with optimizer.zero_grad()."
        )
    layouts.check(one.model)
    prepared_models.bring_up_to_date(one)
    for owned in one.living if optimizers else ():
        if refusal := optimizer_recipes.refusal(owned.recipe.cls):
            raise CheckpointError(
                f"{refusal}; %nbdist export writes the weights, %nbdist load --weights-only reads"
                " those of a checkpoint."
            )


def _draft(order: Order, size: int) -> tuple[Draft, int]:
    """Make what all ranks write into, and add up their bytes; a collective.

    Raises:
        CheckpointError: on all ranks alike.
    """
    sizes = collectives.everyones(size)
    begun, error = None, None
    if _rank() == 0:
        begun, error = attempt(
            lambda: order.place.begin(order.name, overwrite=order.overwrite, size_bytes=sum(sizes))
        )
    try:
        number, why = collectives.everyones((begun and begun.id, words(error)))[0]
    except BaseException:
        if begun is not None:
            begun.abort()
        raise
    if why is not None:
        raise CheckpointError(why) from error
    return begun or order.place.draft(order.name, number), sum(sizes)


def _see(draft: Draft, order: Order) -> None:
    """Make sure that this rank can write where rank 0 has begun.

    Raises:
        CheckpointError: it cannot, also after a while: a network's file system is late.
    """
    deadline = time.monotonic() + SHARED_S
    while not draft.seen():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{order.folder} is another folder on {socket.gethostname()} than where rank 0"
                f" runs, or none. {SHARE_IT}."
            )
        time.sleep(POLL_S)


# -- the state of one moment


def _snapshot(trained: list[Trained]) -> Snapshot:
    """Copy this rank's share of everything; a collective under FSDP1."""
    _announce("snapshot")
    made = Snapshot(kinds={"model": {}, "optim": {}, "rng": {}})
    schedules: list[dict[str, Any]] = []
    optimizers: list[Optimizer] = []
    aliases: dict[str, str] = {}
    models: list[dict[str, Any]] = []
    everything = [Carried(number, one) for number, one in enumerate(trained)]
    shares = [carried.share() | carried.share_of_buffers() for carried in everything]
    scalars = [carried.counts() for carried in everything]
    for number, one in enumerate(trained):  # no collective from here on
        carried, live, counts = everything[number], shares[number], scalars[number]
        for kind in ("model", "optim"):
            of_kind = {key: shard for key, shard in live.items() if key.startswith(kind)}
            made.kinds[kind] |= shards.snapshot(of_kind)
            made.digests |= digest.digests({k: v for k, v in of_kind.items() if _on_gpu(v)})
        scale = grad_scaler.scale_of(one)
        optimizers += training_metadata.optimizers(carried.optim, one, counts, made.left_out)
        schedules += [
            {"model": number, **each} for each in training_metadata.schedulers(one, made.left_out)
        ]
        aliases |= carried.aliases()
        models.append(
            {
                "class": training_metadata.class_name(one.kept.model),
                "steps": steps(one, counts),
                "scale": None if scale is None else [scale.scale, scale.good_steps],
            }
        )
    made.kinds["rng"], made.rng, places = _generators(_rank())
    options = accelerators.current().options
    made.manifest = {
        "backend": options.backend,
        "world_size": collectives.size(),
        "step": max(one["steps"] for one in models),
        "samples": max((one["seen"] for one in places), default=0),
        "options": training_metadata.plain(options.to_json(), "options", []),
        "versions": versions(),
        "aliases": aliases,
        "optimizers": tuple(optimizers),
        "schedulers": tuple(schedules),
        "positions": tuple(places),
        "extra": {"models": models, "left_out": list(dict.fromkeys(made.left_out))},
    }
    return made


def steps(one: Trained, counts: Mapping[str, Mapping[str, float]]) -> int:
    """Optimizer steps that a model has taken."""
    known = [int(scalars.get("step", 0)) for scalars in counts.values()]
    return max(one.steps, *known) if known else one.steps


def _generators(rank: int) -> tuple[dict[str, Shard], dict[str, Any], list[dict[str, Any]]]:
    """Random generators of a rank and positions of its loaders: tensors, plain parts, places."""
    here = rng_state.state()
    found = {f"rng.{rank:05d}.{name}": one for name, one in rng_state.tensors(here).items()}
    rest: dict[str, Any] = rng_state.plain(here)
    rest["positions"], places = [], []
    for number, loader in enumerate(prepared_models.loaders()):
        at = dataloader_state.now(loader)
        prefix = f"position.{rank:05d}.{number}."
        found |= {f"{prefix}generator.{name}": one for name, one in at.generators.items()}
        if at.random is not None:
            tensors = rng_state.tensors(at.random)
            found |= {f"{prefix}random.{name}": one for name, one in tensors.items()}
        rest["positions"].append(None if at.random is None else rng_state.plain(at.random))
        places.append(_place(loader, at))
    return {key: whole(one.clone()) for key, one in found.items()}, rest, places


def _place(loader: Any, at: Position) -> dict[str, Any]:
    """A loader and where it stands, as plain values."""
    return {
        "epoch": at.epoch,
        "batches": at.batches,
        "samples": at.samples,
        "seen": at.seen,
        "batch_size": dataloader_state.batch_size(loader),
        "length": dataloader_state.length(loader),
        "generators": list(at.generators),
    }


def versions() -> dict[str, str]:
    """Of what wrote a checkpoint."""
    names = ("nbdist", "torch", "accelerate", "deepspeed", "transformers")
    return {name: version(name) for name in names}


# -- small things


def _on_gpu(shard: Shard) -> bool:
    return any(piece.view.is_cuda for piece in shard.pieces)


def _key(shard: Shard, sum_of_part: int) -> Key:
    return Key(shape=shard.shape, dtype=str(shard.dtype).removeprefix("torch."), digest=sum_of_part)


def _blamed(errors: Mapping[int, str]) -> str:
    """Errors of ranks, each with its rank."""
    named = [
        why if why.startswith("rank ") else f"rank {rank}: {why}" for rank, why in errors.items()
    ]
    return " / ".join(named)


def _announce(step: str) -> None:
    for hook in before_step:
        hook(step)


def _rank() -> int:
    return collectives.rank()
