"""Asynchronous saving of the training state during training; runs on a rank.

    main thread        all ranks: check, create the folder, copy the state to host memory
    background thread  each rank: write its files, then its report to the folder
    on rank 0 also     wait for all reports, write the manifest, rename the folder, remove old
                       checkpoints, notify the notebook

The background thread calls no collective, so that it cannot interfere with those of the training.
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
from nbdist.checkpoint import Manifest, TensorMetadata, location_with_password, parse_location
from nbdist.checkpoint.names import check_name
from nbdist.cluster.protocol import SHARED_FOLDER_HINT, SHARED_FOLDER_TIMEOUT_S
from nbdist.errors import CheckpointError
from nbdist.protocol import messages
from nbdist.state import collectives, digest, layouts, optimizer_recipes, shard_io, shards
from nbdist.worker.engines import accelerator as accelerators
from nbdist.worker.operations.consensus import (
    error_text,
    raise_if_any_failed,
    rank_errors_text,
    try_call,
)
from nbdist.worker.training import (
    dataloader_state,
    model_recipe,
    prepared_models,
    rng_state,
    training_metadata,
)
from nbdist.worker.training.model_state import ModelState, whole_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from nbdist.checkpoint import (
        CheckpointFile,
        OptimizerMetadata,
        PendingCheckpoint,
        RankReport,
        Storage,
    )
    from nbdist.state.shards import Shard
    from nbdist.worker.training.dataloader_state import LoaderPosition
    from nbdist.worker.training.prepared_models import PreparedModel

log = logging.getLogger(__name__)

POLL_S = 0.01
STALL_TIMEOUT_S = 600.0
"""A save fails if its folder has not grown for this time."""
NICENESS = 10
"""Niceness of the background thread: with all cores busy it gets about a tenth of a core."""

before_save_stage: list[Callable[[str], object]] = []
"""Called with "snapshot", "write" or "commit" before that stage; for fault injection in tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options of a save."""

    root: str = field(repr=False)
    """Folder or URL; a URL may contain a password."""
    name: str
    overwrite: bool = False
    keep: int | None = None
    folder: str = field(init=False)
    """Root for messages, without password."""

    def __post_init__(self) -> None:
        """Set `folder` to the root without password."""
        object.__setattr__(self, "folder", str(parse_location(self.root)))

    @property
    def storage(self) -> Storage:
        """Storage of the checkpoints."""
        return checkpoint.storage_for(parse_location(self.root))


@dataclass(slots=True, kw_only=True, eq=False)
class StateSnapshot:
    """Copy of this rank's training state in host memory."""

    shards_by_file_kind: dict[str, dict[str, Shard]] = field(default_factory=dict)
    """File kind -> its tensors."""
    digests: dict[str, int] = field(default_factory=dict)
    """Key -> digest, for tensors whose digest was computed on a GPU."""
    manifest: dict[str, Any] = field(default_factory=dict)
    """Manifest fields that are known before the files are written."""
    rng_metadata: dict[str, Any] = field(default_factory=dict)
    """State of this rank's random generators besides tensors."""
    not_saved: list[str] = field(default_factory=list)
    """State that is not saved because the manifest cannot represent it."""


class CheckpointSaver:
    """Implementation of the user's `save`, with its background thread."""

    def __init__(
        self,
        root: str,
        cwd: Path,
        publish: Callable[[messages.SaveStatus], object],
        complain: Callable[[], Any],
    ) -> None:
        """Set up saving.

        Args:
            root: default folder, as for ``set_root``; the same on all ranks.
            cwd: folder that relative paths are relative to.
            publish: sends the progress of a save to the notebook; called from any thread.
            complain: called in a cell; returns a function that writes to that cell's stderr and
                may be called later from any thread.
        """
        self._cwd, self._publish, self._complain = cwd, publish, complain
        self._thread: threading.Thread | None = None
        self.set_root(root)

    def set_root(self, root: str) -> None:
        """Set the default folder of checkpoints; "" is `checkpoints` beside the notebook."""
        self._root = parse_location(root or "checkpoints", self._cwd)

    def save(
        self,
        name: str,
        overwrite: bool = False,  # noqa: FBT001, FBT002 - the contract
        keep: int | None = None,
        *,
        folder: str | Path | None = None,
    ) -> None:
        """Save the current training state; all ranks must call it with the same arguments.

        Blocks until an earlier save is finished and the state is copied to host memory. The
        files are written while training continues; `nbdist.session().checkpoints` shows when
        the save is complete.

        Args:
            name: 1 to 64 letters, digits, dots, dashes and underscores.
            overwrite: replace a checkpoint of this name when the new one is complete.
            keep: number of checkpoints to keep; older ones are removed when the save is complete.
            folder: folder of the checkpoints, or a URL for fsspec. Default: the session's folder.

        Raises:
            CheckpointError: the save could not start; raised on all ranks, nothing was written.
        """
        root = self._root if folder is None else parse_location(folder, self._cwd)
        self.begin(
            SaveOptions(
                root=location_with_password(root), name=name, overwrite=overwrite, keep=keep
            )
        )

    def begin(self, order: SaveOptions) -> str:
        """Copy the state and start to write it; return an id that is the same on all ranks.

        Raises:
            CheckpointError: the save could not start; raised on all ranks, nothing was written.
        """
        began = time.perf_counter()
        complain = self._complain()
        self.wait()
        trained, size = _agreed(order)
        draft, total = _draft(order, size)
        try:
            raise_if_any_failed(try_call(lambda: _see(draft, order))[1])
            snapshot, error = try_call(lambda: _snapshot(trained))
            raise_if_any_failed(error)
            rng = collectives.all_gather_values(snapshot.rng_metadata)
        except BaseException as error:
            draft.write_failure(_rank(), error_text(error) or "")
            if _rank() == 0:
                draft.abort()
            raise
        if _rank() == 0:
            snapshot.manifest["rng"] = tuple(rng)
        job = _BackgroundSave(order, draft, snapshot, began, self._publish, complain)
        job.tell(messages.SaveStatus(state="running", size_bytes=total))
        self._thread = threading.Thread(target=job.run, name="nbdist-save", daemon=True)
        self._thread.start()
        return draft.id

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the running save; return False on timeout."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True


class _BackgroundSave:
    """A save in the background thread."""

    def __init__(
        self,
        order: SaveOptions,
        draft: PendingCheckpoint,
        snapshot: StateSnapshot,
        began: float,
        publish: Callable[[messages.SaveStatus], object],
        complain: Callable[[str], object],
    ) -> None:
        self._order, self._draft, self._snapshot, self._began = order, draft, snapshot, began
        self._publish, self._complain = publish, complain
        self._pause_s = time.perf_counter() - began
        # The thread outlives process groups: during a recovery there is none for a moment.
        self._rank, self._world_size = collectives.rank(), collectives.group_size()

    def run(self) -> None:
        """Write this rank's files; on rank 0 also complete the checkpoint."""
        # Linux: setpriority() of a thread id affects this thread and those that it starts.
        # Lowering the niceness would be refused.
        thread_id = threading.get_native_id()
        niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread_id))
        os.setpriority(os.PRIO_PROCESS, thread_id, niceness)
        _, error = try_call(self._write)
        if error is not None:
            log.error("a save failed", exc_info=error)
            try_call(lambda: self._draft.write_failure(self._rank, error_text(error) or ""))
        if self._rank == 0:
            self._finish()
        self._snapshot, error = StateSnapshot(), None  # its traceback refers to tensors
        shards.give_back()

    def _write(self) -> None:
        _announce("write")
        parts: list[CheckpointFile] = []
        keys: dict[str, TensorMetadata] = {}
        for kind, tensors in self._snapshot.shards_by_file_kind.items():
            parts += shard_io.write_shards(tensors, self._draft, self._rank, kind)
            undigested = {
                key: shard for key, shard in tensors.items() if key not in self._snapshot.digests
            }
            sums = digest.local_digests(undigested) | self._snapshot.digests
            keys |= {key: _key(shard, sums[key]) for key, shard in tensors.items()}
        self._draft.write_report(self._rank, parts, keys)

    def _finish(self) -> None:
        """Complete the save and notify the notebook; on rank 0."""
        done, error = try_call(self._commit)
        if error is None:
            self.tell(done)
            return
        try_call(self._draft.abort)  # a failure is ignored: the next save removes what remains
        reason = error_text(error) or ""
        self.tell(messages.SaveStatus(state="failed", error=reason))
        self._complain(f"nbdist: checkpoint {self._order.name} was not saved: {reason}\n")

    def _commit(self) -> messages.SaveStatus:
        """Wait for the reports of all ranks, write the manifest and rename the folder."""
        reports = self._everyone()
        if errors := {rank: report.error for rank, report in reports.items() if report.error}:
            raise CheckpointError(_rank_errors(errors))
        _announce("commit")
        order, reports_in_order = self._order, [reports[rank] for rank in range(self._world_size)]
        manifest = Manifest(
            files=tuple(file for report in reports_in_order for file in report.files),
            keys=checkpoint.merge_tensors(reports_in_order),
            **self._snapshot.manifest,
        )
        path = self._draft.commit(order.name, manifest, overwrite=order.overwrite)
        removed: list[str] = []
        error: Exception | None = None
        if order.keep is not None:
            name, count = order.name, order.keep
            removed, error = try_call(lambda: order.storage.remove_oldest(count, written=name))
        notes = [f"not saved: {item}" for item in dict.fromkeys(self._snapshot.not_saved)]
        notes += [error_text(error) or ""] if error is not None else []
        return messages.SaveStatus(
            state="done",
            path=location_with_password(path),
            step=manifest.step,
            size_bytes=manifest.size_bytes,
            backend=manifest.backend,
            removed=removed or [],
            notes=notes,
        )

    def _everyone(self) -> dict[int, RankReport]:
        """Wait for the reports of all ranks and return them."""
        reports: dict[int, RankReport] = {}
        size_bytes, since = -1, time.monotonic()
        while True:
            reports |= self._draft.read_reports(set(range(self._world_size)) - reports.keys())
            if len(reports) == self._world_size:
                return reports
            written = self._draft.written_bytes()
            if written is None or written != size_bytes:
                size_bytes, since = written or 0, time.monotonic()
            elif time.monotonic() - since > STALL_TIMEOUT_S:
                missing = ", ".join(map(str, sorted(set(range(self._world_size)) - reports.keys())))
                raise CheckpointError(
                    f"rank {missing} wrote nothing for {STALL_TIMEOUT_S:.0f} s. Check the disk and"
                    " save again."
                )
            time.sleep(self._draft.poll_s)

    def tell(self, content: messages.SaveStatus) -> None:
        """Send the progress of the save to the notebook; only rank 0 does."""
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


def _agreed(order: SaveOptions) -> tuple[list[PreparedModel], int]:
    """Return the models and this rank's bytes of them; all ranks check and compare options.

    Raises:
        CheckpointError: a rank cannot save or the options differ; raised on all ranks.
    """
    trained, error = try_call(lambda: _checked(order))
    outcomes = collectives.all_gather_values((order, error_text(error)))
    orders = list(dict.fromkeys(requested for requested, _ in outcomes))
    if len(orders) > 1:
        raise CheckpointError(
            f"The ranks called save with different arguments: {orders[0]} and {orders[1]}. Use the"
            " same arguments on all ranks."
        )
    if errors := {rank: reason for rank, (_, reason) in enumerate(outcomes) if reason is not None}:
        raise CheckpointError(rank_errors_text(errors, len(outcomes))) from error
    size = sum(
        shards.total_bytes(ModelState(number, prepared).owned_shards())
        for number, prepared in enumerate(trained)
    )
    return trained, size


def _checked(order: SaveOptions) -> list[PreparedModel]:
    """Check the options and all models; return the models."""
    check_name(order.name)
    if order.keep is not None and (type(order.keep) is not int or order.keep < 1):
        raise CheckpointError(f"keep must be an integer >= 1 or None, got {order.keep!r}.")
    trained = prepared_models.all_models()
    if not trained:
        raise CheckpointError(
            "No model is prepared, so there is nothing to save. Run the cell with"
            " accelerator.prepare(model, optimizer, ...) first."
        )
    for prepared in trained:
        check_savable(prepared)
    return trained


def check_savable(prepared: PreparedModel, *, optimizers: bool = True) -> None:
    """Raise if the state of a model is incomplete or cannot be resharded.

    Args:
        prepared: the model.
        optimizers: check the optimizers too.

    Raises:
        CheckpointError: the model cannot be saved or loaded into. The message has the reason.
    """
    if prepared.rebuild_error:
        raise CheckpointError(prepared.rebuild_error)
    if waiting := prepared_models.count_pending_micro_batches(prepared):
        raise CheckpointError(
            f"The gradients of {waiting} micro-batches are waiting for an optimizer step. Save or"
            " load after the step, or drop them with optimizer.zero_grad()."
        )
    layouts.check_layout(prepared.model)
    prepared_models.refresh_param_groups(prepared)
    for owned in prepared.live_optimizers if optimizers else ():
        if refusal := optimizer_recipes.why_not_reshardable(owned.recipe.optimizer_class):
            raise CheckpointError(
                f"{refusal}. To save the weights use %nbdist export, to load those of a checkpoint"
                " %nbdist load --weights-only."
            )


def _draft(order: SaveOptions, size: int) -> tuple[PendingCheckpoint, int]:
    """Create the pending checkpoint and sum up the bytes of all ranks; a collective.

    Raises:
        CheckpointError: rank 0 could not create it; raised on all ranks.
    """
    sizes = collectives.all_gather_values(size)
    begun, error = None, None
    if _rank() == 0:
        begun, error = try_call(
            lambda: order.storage.begin(
                order.name, overwrite=order.overwrite, size_bytes=sum(sizes)
            )
        )
    try:
        number, reason = collectives.all_gather_values((begun and begun.id, error_text(error)))[0]
    except BaseException:
        if begun is not None:
            begun.abort()
        raise
    if reason is not None:
        raise CheckpointError(reason) from error
    return begun or order.storage.attach(order.name, number), sum(sizes)


def _see(draft: PendingCheckpoint, order: SaveOptions) -> None:
    """Wait until this rank sees the folder that rank 0 created: NFS may show it late.

    Raises:
        CheckpointError: the folder is not visible after `SHARED_FOLDER_TIMEOUT_S` seconds.
    """
    deadline = time.monotonic() + SHARED_FOLDER_TIMEOUT_S
    while not draft.is_visible():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{order.folder} on {socket.gethostname()} is missing or not the folder that rank 0"
                f" uses. {SHARED_FOLDER_HINT}."
            )
        time.sleep(POLL_S)


# -- snapshot


def _snapshot(trained: list[PreparedModel]) -> StateSnapshot:
    """Copy this rank's shards and the other training state; a collective under FSDP1."""
    _announce("snapshot")
    snapshot = StateSnapshot(shards_by_file_kind={"model": {}, "optim": {}, "rng": {}})
    schedules: list[dict[str, Any]] = []
    optimizers: list[OptimizerMetadata] = []
    aliases: dict[str, str] = {}
    models: list[dict[str, Any]] = []
    everything = [ModelState(number, prepared) for number, prepared in enumerate(trained)]
    shares = [carried.owned_shards() | carried.owned_buffers() for carried in everything]
    scalars = [carried.scalar_state() for carried in everything]
    for number, prepared in enumerate(trained):  # no collective from here on
        carried, live, counts = everything[number], shares[number], scalars[number]
        for kind in ("model", "optim"):
            of_kind = {key: shard for key, shard in live.items() if key.startswith(kind)}
            snapshot.shards_by_file_kind[kind] |= shards.copy_to_host(of_kind)
            snapshot.digests |= digest.local_digests(
                {k: v for k, v in of_kind.items() if _on_gpu(v)}
            )
        scale = model_recipe.get_loss_scale(prepared)
        optimizers += training_metadata.optimizer_metadata(
            carried.optimizer_prefix, prepared, counts, snapshot.not_saved
        )
        schedules += [
            {"model": number, **scheduler}
            for scheduler in training_metadata.scheduler_states(prepared, snapshot.not_saved)
        ]
        aliases |= carried.aliases()
        models.append(
            {
                "class": training_metadata.class_name(prepared.meta.model),
                "steps": count_steps(prepared, counts),
                "scale": None if scale is None else [scale.scale, scale.good_steps],
            }
        )
    snapshot.shards_by_file_kind["rng"], snapshot.rng_metadata, places = _generators(_rank())
    options = accelerators.current_config().options
    snapshot.manifest = {
        "backend": options.backend,
        "world_size": collectives.group_size(),
        "step": max(model["steps"] for model in models),
        "samples": max((place["seen"] for place in places), default=0),
        "options": training_metadata.to_json_mapping(options.to_json(), "options", []),
        "versions": library_versions(),
        "aliases": aliases,
        "optimizers": tuple(optimizers),
        "schedulers": tuple(schedules),
        "positions": tuple(places),
        "extra": {"models": models, "left_out": list(dict.fromkeys(snapshot.not_saved))},
    }
    return snapshot


def count_steps(prepared: PreparedModel, counts: Mapping[str, Mapping[str, float]]) -> int:
    """Return the number of optimizer steps that a model has taken."""
    counted = [int(scalars.get("step", 0)) for scalars in counts.values()]
    return max(prepared.num_steps, *counted) if counted else prepared.num_steps


def _generators(rank: int) -> tuple[dict[str, Shard], dict[str, Any], list[dict[str, Any]]]:
    """Return the random generators and loader positions of a rank: tensors, metadata, positions."""
    state = rng_state.get_rng_state()
    named = {
        f"rng.{rank:05d}.{name}": tensor for name, tensor in rng_state.to_tensors(state).items()
    }
    metadata: dict[str, Any] = rng_state.to_json(state)
    metadata["positions"], places = [], []
    for number, loader in enumerate(prepared_models.all_loaders()):
        position = dataloader_state.position_of(loader)
        prefix = f"position.{rank:05d}.{number}."
        named |= {
            f"{prefix}generator.{name}": tensor for name, tensor in position.generators.items()
        }
        if position.rng is not None:
            tensors = rng_state.to_tensors(position.rng)
            named |= {f"{prefix}random.{name}": tensor for name, tensor in tensors.items()}
        metadata["positions"].append(
            None if position.rng is None else rng_state.to_json(position.rng)
        )
        places.append(_place(loader, position))
    return {key: whole_shard(tensor.clone()) for key, tensor in named.items()}, metadata, places


def _place(loader: Any, at: LoaderPosition) -> dict[str, Any]:
    """Return the position of a loader and its sizes, for the manifest."""
    return {
        "epoch": at.epoch,
        "batches": at.batches,
        "samples": at.samples,
        "seen": at.seen,
        "batch_size": dataloader_state.global_batch_size(loader),
        "length": dataloader_state.num_samples(loader),
        "generators": list(at.generators),
    }


def library_versions() -> dict[str, str]:
    """Return package -> version, for the manifest."""
    names = ("nbdist", "torch", "accelerate", "deepspeed", "transformers")
    return {name: version(name) for name in names}


# -- helpers


def _on_gpu(shard: Shard) -> bool:
    return any(piece.view.is_cuda for piece in shard.pieces)


def _key(shard: Shard, sum_of_part: int) -> TensorMetadata:
    return TensorMetadata(
        shape=shard.shape, dtype=str(shard.dtype).removeprefix("torch."), digest=sum_of_part
    )


def _rank_errors(errors: Mapping[int, str]) -> str:
    """Return the errors of ranks as one text, each with its rank."""
    named = [
        reason if reason.startswith("rank ") else f"rank {rank}: {reason}"
        for rank, reason in errors.items()
    ]
    return " / ".join(named)


def _announce(step: str) -> None:
    for hook in before_save_stage:
        hook(step)


def _rank() -> int:
    return collectives.rank()
