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
from typing import TYPE_CHECKING, Any

import torch

from nbdist import checkpoint, rank_python
from nbdist._version import __version__
from nbdist.checkpoint import Manifest, TensorMetadata, location_with_password, parse_location
from nbdist.checkpoint.name_validation import check_name
from nbdist.cluster.protocol import SHARED_FOLDER_HINT, SHARED_FOLDER_TIMEOUT_S
from nbdist.errors import CheckpointError
from nbdist.protocol import messages
from nbdist.protocol.operations import RankSaveReport, SaveRequest
from nbdist.state import base_model, collectives, layouts, shard_io, shards, tensor_digest
from nbdist.state.optimizer_state_dict import class_name
from nbdist.worker.engines import accelerator_patch
from nbdist.worker.operations.collective_phases import (
    call_on_all_ranks,
    error_text,
    try_call,
)
from nbdist.worker.optimizer_step_gate import optimizer_step_gate
from nbdist.worker.training import (
    dataloader_state,
    model_recipe,
    prepared_models,
    release_models,
    rng_state,
    training_metadata,
    unprepared_optimizers,
)
from nbdist.worker.training.training_state import ModelAndOptimizerState, whole_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence
    from pathlib import Path

    from nbdist.checkpoint import (
        CheckpointFile,
        OptimizerMetadata,
        PendingCheckpoint,
        RankWriteReport,
        Storage,
    )
    from nbdist.state.base_model import StoredByReference
    from nbdist.state.shards import Shard
    from nbdist.worker.operations import RankContext
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
    state_dicts: list[list[Any]] = field(default_factory=list)
    """Model -> state dicts of its optimizers that cannot be resharded, without tensors."""
    not_saved: list[str] = field(default_factory=list)
    """State that is not saved because the manifest cannot represent it."""


def save(request: SaveRequest, context: RankContext) -> RankSaveReport:
    """Copy the training state and start to write a checkpoint; a collective."""
    return RankSaveReport(id=context.begin_save(request))


class CheckpointSaver:
    """Implementation of the user's `save`, with its background thread.

    Args:
        root: default folder, as for ``set_root``; the same on all ranks.
        cwd: folder that relative paths are relative to.
        publish: sends the progress of a save to the notebook; called from any thread.
        on_warning: called in a cell; returns a function that writes to that cell's stderr and
            may be called later from any thread.
    """

    def __init__(
        self,
        root: str,
        cwd: Path,
        publish: Callable[[messages.SaveStatus], object],
        on_warning: Callable[[], Any],
    ) -> None:
        self._cwd, self._publish, self._on_warning = cwd, publish, on_warning
        self._thread: threading.Thread | None = None
        optimizer_step_gate.capture_state = _generators_and_positions
        self.set_root(root)

    def set_root(self, root: str) -> None:
        """Set the default folder of checkpoints; "" is `checkpoints` next to the notebook."""
        self._root = parse_location(root or "checkpoints", self._cwd)

    def save(
        self,
        name: str,
        overwrite: bool = False,  # noqa: FBT001, FBT002 - the contract
        keep: int | None = None,
        *,
        folder: str | Path | None = None,
        full: bool = False,
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
            full: also store frozen parameters that are unchanged since `from_pretrained`, which
                are stored by reference otherwise.

        Raises:
            CheckpointError: the save could not start; raised on all ranks, nothing was written.
        """
        root = self._root if folder is None else parse_location(folder, self._cwd)
        self.begin(
            SaveRequest(
                root=location_with_password(root),
                name=name,
                overwrite=overwrite,
                keep=keep,
                full=full,
            )
        )

    def begin(self, request: SaveRequest) -> str:
        """Copy the state and start to write it; return an id that is the same on all ranks.

        Raises:
            CheckpointError: the save could not start; raised on all ranks, nothing was written.
        """
        start_time = time.perf_counter()
        on_warning = self._on_warning()
        self.wait()
        trained = _check_request(request)
        states = [ModelAndOptimizerState(prepared) for prepared in trained]
        frozen = {
            key: shard
            for state in (() if request.full else states)
            for key, shard in state.frozen_shards().items()
        }
        stored = base_model.find_references(frozen, base_models(trained))
        size_bytes = sum(
            shards.total_bytes(_exclude(state.owned_shards(), stored.keys)) for state in states
        )
        total_bytes = sum(collectives.all_gather_values(size_bytes))
        draft = begin_draft(request, total_bytes)
        try:
            call_on_all_ranks(lambda: _wait_until_visible(draft, request))
            snapshot = call_on_all_ranks(
                lambda: _take_snapshot(states, stored, ended=request.ended)
            )
            metadata = collectives.all_gather_values((snapshot.rng_metadata, snapshot.state_dicts))
        except BaseException as error:
            draft.write_failure(collectives.rank(), error_text(error) or "")
            if collectives.rank() == 0:
                draft.abort()
            raise
        snapshot.manifest["rng"] = tuple(rng for rng, _ in metadata)
        snapshot.manifest["state_dicts"] = tuple(saved for _, saved in metadata if any(saved))
        job = _BackgroundSave(
            request, draft, snapshot, stored, start_time, self._publish, on_warning
        )
        job.publish_status(messages.SaveStatus(state="running", size_bytes=total_bytes))
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
    def __init__(
        self,
        request: SaveRequest,
        draft: PendingCheckpoint,
        snapshot: StateSnapshot,
        stored: StoredByReference,
        start_time: float,
        publish: Callable[[messages.SaveStatus], object],
        on_warning: Callable[[str], object],
    ) -> None:
        self._request, self._draft, self._snapshot = request, draft, snapshot
        self._stored = stored
        self._publish, self._on_warning = publish, on_warning
        self._began, self._pause_s = start_time, time.perf_counter() - start_time
        # The thread outlives process groups: during a recovery there is none for a moment.
        self._rank, self._world_size = collectives.rank(), collectives.group_size()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run(self) -> None:
        """Write this rank's files; on rank 0 also complete the checkpoint."""
        if self._device is not None:
            # A thread begins on GPU 0, and freeing pinned memory would create a context there.
            torch.cuda.set_device(self._device)
        # Linux: setpriority() of a thread id affects this thread and those that it starts.
        # Lowering the niceness would be refused.
        if not self._request.ended:  # else training does not continue
            thread_id = threading.get_native_id()
            niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread_id))
            os.setpriority(os.PRIO_PROCESS, thread_id, niceness)
        _, error = try_call(self._write)
        if error is not None:
            log.error("a save failed", exc_info=error)
            try_call(lambda: self._draft.write_failure(self._rank, error_text(error) or ""))
        if self._rank == 0:
            done, error = try_call(self._commit)
            if error is None:
                self.publish_status(done)
            else:
                try_call(self._draft.abort)  # after a failure the next save removes what remains
                reason = error_text(error) or ""
                self.publish_status(messages.SaveStatus(state="failed", error=reason))
                name = self._request.name
                self._on_warning(f"nbdist: checkpoint {name} was not saved: {reason}\n")
        self._snapshot, error = StateSnapshot(), None  # its traceback refers to tensors
        shards.empty_pinned_cache()

    def _write(self) -> None:
        _run_hooks("write")
        snapshot = self._snapshot
        write_rank_files(self._draft, self._rank, snapshot.shards_by_file_kind, snapshot.digests)

    def _commit(self) -> messages.SaveStatus:
        """Wait for the reports of all ranks, write the manifest and rename the folder."""
        reports = wait_for_reports(self._draft, self._world_size)
        _run_hooks("commit")
        name, keep = self._request.name, self._request.keep
        manifest = Manifest(
            files=tuple(file for report in reports for file in report.files),
            keys=checkpoint.merge_tensors(reports) | self._stored.keys,
            bases=self._stored.bases,
            **self._snapshot.manifest,
        )
        path = self._draft.commit(name, manifest, overwrite=self._request.overwrite)
        notes = [f"not saved: {item}" for item in dict.fromkeys(self._snapshot.not_saved)]
        notes += self._stored.notes
        removed: list[str] | None = []
        if keep is not None:
            storage = _storage(self._request)
            removed, error = try_call(lambda: storage.remove_oldest(keep, written=name))
            notes += [error_text(error) or ""] if error is not None else []
        return messages.SaveStatus(
            state="done",
            path=location_with_password(path),
            step=manifest.step,
            size_bytes=manifest.size_bytes,
            backend=manifest.backend,
            ended=self._request.ended,
            removed=removed or [],
            notes=notes,
        )

    def publish_status(self, content: messages.SaveStatus) -> None:
        """Send the progress of the save to the notebook; only rank 0 does."""
        if self._rank == 0:
            self._publish(
                {
                    **content,
                    "id": self._draft.id,
                    "root": self._request.root,
                    "name": self._request.name,
                    "seconds": time.perf_counter() - self._began,
                    "pause_s": self._pause_s,
                }
            )


def write_rank_files(
    draft: PendingCheckpoint,
    rank: int,
    shards_by_file_kind: Mapping[str, Mapping[str, Shard]],
    known_digests: Mapping[str, int],
) -> None:
    """Write this rank's files of a checkpoint, then its report; not a collective."""
    parts: list[CheckpointFile] = []
    keys: dict[str, TensorMetadata] = {}
    for kind, tensors in shards_by_file_kind.items():
        parts += shard_io.write_shards(tensors, draft, rank, kind)
        digests = dict(known_digests) | tensor_digest.local_digests(
            {key: shard for key, shard in tensors.items() if key not in known_digests}
        )
        for key, shard in tensors.items():
            dtype = str(shard.dtype).removeprefix("torch.")
            keys[key] = TensorMetadata(shape=shard.shape, dtype=dtype, digest=digests[key])
    draft.write_report(rank, parts, keys)


def wait_for_reports(draft: PendingCheckpoint, world_size: int) -> list[RankWriteReport]:
    """Wait until all ranks have written their files; return their reports by rank.

    Raises:
        CheckpointError: ranks have failed, or stopped writing.
    """
    reports: dict[int, RankWriteReport] = {}
    size_bytes, since = -1, time.monotonic()
    while missing := set(range(world_size)) - reports.keys():
        reports |= draft.read_reports(missing)
        if missing <= reports.keys():
            break
        written = draft.written_bytes()
        if written is None or written != size_bytes:
            size_bytes, since = written or 0, time.monotonic()
        elif time.monotonic() - since > STALL_TIMEOUT_S:
            raise CheckpointError(
                f"Nothing was written to {draft.location} for {STALL_TIMEOUT_S:.0f} s; missing:"
                f" rank {', '.join(map(str, sorted(missing)))}. Check its free space and its"
                " connection, then save again."
            )
        time.sleep(draft.poll_s)
    errors = [
        report.error if report.error.startswith("rank ") else f"rank {rank}: {report.error}"
        for rank, report in reports.items()
        if report.error
    ]
    if errors:
        raise CheckpointError(" / ".join(errors))
    return [reports[rank] for rank in range(world_size)]


# -- before anything is written


def _storage(request: SaveRequest) -> Storage:
    return checkpoint.storage_for(parse_location(request.root))


def _check_request(request: SaveRequest) -> list[PreparedModel]:
    """Check the arguments and all models, and that the ranks agree; return the models.

    Raises:
        CheckpointError: a rank cannot save or the arguments differ; raised on all ranks.
    """

    def check() -> list[PreparedModel]:
        check_name(request.name)
        keep = request.keep
        if keep is not None and (type(keep) is not int or keep < 1):
            raise CheckpointError(f"keep must be an integer >= 1 or None, got {keep!r}.")
        release_models.release_remaining()
        trained = prepared_models.models_in_use(prepared_models.user_variables())
        if not trained:
            raise CheckpointError(
                "No model is prepared, so there is nothing to save. Run the cell with"
                " accelerator.prepare(model, optimizer, ...) first."
            )
        for prepared in trained:
            # Gradients of an incomplete step are lost with a run that is ended from outside.
            check_savable(prepared, micro_batches=not request.ended)
        return trained

    requests = list(dict.fromkeys(collectives.all_gather_values(request)))
    if len(requests) > 1:
        calls = [
            f"save({other.name!r}, overwrite={other.overwrite}, keep={other.keep},"
            f" folder={str(parse_location(other.root))!r}, full={other.full})"
            for other in requests[:2]
        ]
        raise CheckpointError(
            f"The ranks called save with different arguments: {' and '.join(calls)}. Use the"
            " same arguments on all ranks."
        )
    checked: list[PreparedModel] = call_on_all_ranks(check)
    return checked


def check_savable(
    prepared: PreparedModel, *, optimizers: bool = True, micro_batches: bool = True
) -> None:
    """Raise if the state of a model is incomplete or cannot be resharded.

    Args:
        optimizers: check the optimizers too.
        micro_batches: refuse a model in the middle of gradient accumulation.

    Raises:
        CheckpointError: the model cannot be saved or loaded into. The message has the reason.
    """
    if prepared.rebuild_error:
        raise CheckpointError(prepared.rebuild_error)
    if micro_batches and (problem := prepared_models.pending_gradients(prepared)):
        raise CheckpointError(problem)
    if optimizers and (problem := prepared_models.prepared_twice([prepared])):
        raise CheckpointError(problem)
    layouts.check_layout(prepared.model)
    prepared_models.refresh_param_groups(prepared)
    if optimizers:
        ModelAndOptimizerState(prepared).state_dicts()  # raises if one cannot be stored


def base_models(trained: Sequence[PreparedModel]) -> list[str]:
    """Return the base models of all prepared models."""
    return [name for prepared in trained for name in base_model.bases_of(prepared.meta.model)]


def _exclude(tensors: Mapping[str, Shard], keys: Container[str]) -> dict[str, Shard]:
    return {key: shard for key, shard in tensors.items() if key not in keys}


def begin_draft(request: SaveRequest, size_bytes: int) -> PendingCheckpoint:
    """Create the pending checkpoint on rank 0 and attach the others to it; a collective.

    Raises:
        CheckpointError: rank 0 could not create it; raised on all ranks.
    """
    draft: PendingCheckpoint | None = None
    error = None
    if collectives.rank() == 0:
        draft, error = try_call(
            lambda: _storage(request).begin(
                request.name, overwrite=request.overwrite, size_bytes=size_bytes
            )
        )
    try:
        number, reason = collectives.all_gather_values((draft and draft.id, error_text(error)))[0]
    except BaseException:
        if draft is not None:
            draft.abort()
        raise
    if reason is not None:
        raise CheckpointError(reason) from error
    return draft or _storage(request).attach(request.name, number)


def _wait_until_visible(draft: PendingCheckpoint, request: SaveRequest) -> None:
    """Wait until this rank sees the folder that rank 0 created: NFS may show it late.

    Raises:
        CheckpointError: the folder is not visible after `SHARED_FOLDER_TIMEOUT_S` seconds.
    """
    deadline = time.monotonic() + SHARED_FOLDER_TIMEOUT_S
    while not draft.is_visible():
        if time.monotonic() > deadline:
            folder = parse_location(request.root)
            raise CheckpointError(
                f"{folder} on {socket.gethostname()} is missing or not the folder that rank 0"
                f" uses. {SHARED_FOLDER_HINT}."
            )
        time.sleep(POLL_S)


# -- snapshot


def _take_snapshot(
    states: list[ModelAndOptimizerState], stored: StoredByReference, *, ended: str
) -> StateSnapshot:
    """Copy this rank's shards and the other training state; a collective under FSDP1."""
    _run_hooks("snapshot")
    snapshot = StateSnapshot(shards_by_file_kind={"model": {}, "optim": {}, "rng": {}})
    schedules: list[dict[str, Any]] = []
    optimizers: list[OptimizerMetadata] = []
    aliases: dict[str, str] = {}
    models: list[dict[str, Any]] = []
    live = [
        _exclude(state.owned_shards(), stored.keys) | state.buffers(owned=True) for state in states
    ]
    scalars = [state.layout.scalar_state() for state in states]
    for number, state in enumerate(states):  # no collective from here on
        prepared, counts = state.prepared, scalars[number]
        trees, parts = state.state_dicts()
        if state.state_dict_rank == collectives.rank():
            live[number] |= {key: whole_shard(tensor) for key, tensor in parts.items()}
            snapshot.state_dicts.append(trees)
        for kind in ("model", "optim"):
            tensors = {key: shard for key, shard in live[number].items() if key.startswith(kind)}
            snapshot.shards_by_file_kind[kind] |= shards.copy_to_host(tensors)
            # On a GPU a digest takes milliseconds; on the CPU the background thread computes it.
            snapshot.digests |= tensor_digest.local_digests(
                {
                    key: shard
                    for key, shard in tensors.items()
                    if any(piece.view.is_cuda for piece in shard.pieces)
                }
            )
        scale = model_recipe.get_loss_scale(prepared)
        optimizers += training_metadata.optimizer_metadata(
            state.optimizer_prefix, prepared, counts, snapshot.not_saved
        )
        schedules += [
            {"model": number, **scheduler}
            for scheduler in training_metadata.scheduler_states(prepared, snapshot.not_saved)
        ]
        aliases |= state.aliases()
        steps = [int(values.get("step", 0)) for values in counts.values()]
        models.append(
            {
                "class": class_name(type(prepared.meta.model)),
                "variable": prepared.variable,
                "trainer": training_metadata.trainer_state_of(prepared, snapshot.not_saved),
                "steps": max(prepared.num_steps, *steps) if steps else prepared.num_steps,
                "scale": None if scale is None else [scale.scale, scale.good_steps],
            }
        )
    variables = prepared_models.user_variables()
    snapshot.not_saved += prepared_models.unprepared_schedulers(variables)
    snapshot.not_saved += [
        f"the optimizer {name}, which accelerator.prepare() did not get"
        for name in unprepared_optimizers.names_in(variables)
    ]
    places = _copy_generators(snapshot, collectives.rank())
    options = accelerator_patch.current_config().options
    libraries = ("torch", "accelerate", "deepspeed", "transformers")
    installed = {name: rank_python.KERNEL_PYTHON.version_of(name) for name in libraries}
    snapshot.manifest = {
        "backend": options.backend,
        "world_size": collectives.group_size(),
        "step": max(model["steps"] for model in models),
        "samples": max((place["seen"] for place in places), default=0),
        "options": training_metadata.to_json_mapping(options.to_json(), "options", []),
        "versions": {"nbdist": __version__, **{k: v for k, v in installed.items() if v}},
        "aliases": aliases,
        "optimizers": tuple(optimizers),
        "schedulers": tuple(schedules),
        "positions": tuple(places),
        "extra": {
            "models": models,
            "left_out": list(dict.fromkeys(snapshot.not_saved)),
            **({"ended": ended} if ended else {}),
        },
    }
    return snapshot


def _generators_and_positions() -> tuple[rng_state.RngState, list[LoaderPosition]]:
    positions = [dataloader_state.position_of(loader) for loader in prepared_models.all_loaders()]
    return rng_state.get_rng_state(), positions


def _copy_generators(snapshot: StateSnapshot, rank: int) -> list[dict[str, Any]]:
    """Copy the random generators and the loaders' generators; return the loaders' positions.

    After an interrupt as they were after the last step: the loop may have read a batch since.
    """
    state, positions = optimizer_step_gate.last_step_state or _generators_and_positions()
    if len(positions) != len(prepared_models.all_loaders()):  # the cell dropped one at its end
        positions = _generators_and_positions()[1]
    own_tensors, metadata = rng_state.to_tensors_and_json(state)
    tensors = {f"rng.{rank:05d}.{name}": tensor for name, tensor in own_tensors.items()}
    metadata["positions"], places = [], []
    for number, (loader, position) in enumerate(
        zip(prepared_models.all_loaders(), positions, strict=True)
    ):
        prefix = f"position.{rank:05d}.{number}."
        tensors |= {
            f"{prefix}generator.{name}": tensor for name, tensor in position.generators.items()
        }
        if position.rng is None:
            metadata["positions"].append(None)
        else:
            random, rest = rng_state.to_tensors_and_json(position.rng)
            tensors |= {f"{prefix}random.{name}": tensor for name, tensor in random.items()}
            metadata["positions"].append(rest)
        places.append(
            {
                "epoch": position.epoch,
                "batches": position.batches,
                "samples": position.samples,
                "seen": position.seen,
                "batch_size": dataloader_state.global_batch_size(loader),
                "length": dataloader_state.num_samples(loader),
                "variable": prepared_models.variable_of(loader),
                "generators": list(position.generators),
            }
        )
    snapshot.rng_metadata = metadata
    snapshot.shards_by_file_kind["rng"] = {
        key: whole_shard(tensor.clone()) for key, tensor in tensors.items()
    }
    return places


def _run_hooks(stage: str) -> None:
    for hook in before_save_stage:
        hook(stage)
