"""Operations of a session on models and variables of its ranks: push, switch, save, load, plan.

Runs in the notebook's kernel. The methods check their arguments and the state of the session; the
work is in `operations` and in `session.checkpoints`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nbdist import rank_sets
from nbdist.checkpoint import Url, location_with_password
from nbdist.checkpoint.name_validation import MANIFEST_NAME
from nbdist.errors import CheckpointError, PlanError, RankDied, SwitchError
from nbdist.operations import model_files
from nbdist.operations import switch as operations_switch
from nbdist.operations.switch import SwitchReport
from nbdist.output.replay import RankLogTail
from nbdist.protocol import messages
from nbdist.protocol.operations import SaveRequest
from nbdist.session import checkpoints as session_checkpoints
from nbdist.session import lifecycle, push_pull
from nbdist.session.config import SessionConfig
from nbdist.session.metrics import TrainingEvent
from nbdist.session.progress import exclusive_for_current_ranks
from nbdist.session.script import WrittenScript, write_script

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.operations.model_files import ExportReport, ForeignReport, LoadReport
    from nbdist.planner.measured_comparison import MeasuredMemory
    from nbdist.session.checkpoints import Save


class ModelOperations(lifecycle.SessionLifecycle):
    """Methods of `Session` for prepared models, checkpoints and variables."""

    # -- values

    @exclusive_for_current_ranks
    def push(self, **values: object) -> int:
        """Bind values on all ranks; return the number of bytes moved through shared memory.

        Tensors keep dtype and shape and arrive on the CPU.

        Raises:
            PayloadError: a value that cannot be moved; the message contains its location and a fix.
        """
        self._ensure_free()
        self.start()
        moved = push_pull.push_variables(values, range(self.world_size), self._workers)
        self.history.add_pushes(values)
        return moved

    @exclusive_for_current_ranks
    def pull(self, *names: str, rank: int = 0, as_numpy: bool = False) -> Any:
        """Fetch variables of one rank: one value for one name, else a list.

        A model is returned as its state dict. For a prepared model all ranks contribute their
        shards, and weights are fp32 if the backend keeps fp32 masters. Tied tensors stay tied.

        Tensors are CPU torch tensors (which imports torch), or with `as_numpy` NumPy arrays.

        Raises:
            PayloadError: no such variable, or one that cannot be moved.
            CheckpointError: a prepared model that the ranks cannot gather.
        """
        (chosen,) = rank_sets.resolve_ranks([rank], self.world_size, option="rank")
        self._ensure_free()
        self.start()
        values = push_pull.pull_variables(names, chosen, self._workers, as_numpy=as_numpy)
        return values[names[0]] if len(names) == 1 else [values[name] for name in names]

    # -- switching the backend

    @exclusive_for_current_ranks
    def switch(self, backend: str | None = None, **changes: Any) -> SwitchReport:
        """Switch the prepared models to another backend; the training state is kept.

        Weights, optimizer state, scheduler, random generators, data loaders within an epoch and
        all variables are carried over. A variable bound to a prepared object is rebound to its
        replacement.

        A different number of ranks, different devices or an NVMe offload need new processes:
        the state is passed through shared memory. Variables that cannot be pickled (open
        files, generators) are not carried over; the report lists them.

        Args:
            backend: ddp, fsdp (= fsdp2), fsdp1, zero1, zero2 or zero3. Default: unchanged.
            changes: nproc, devices, precision, offload, activation_checkpointing and other
                arguments of `Session`; `reset_optimizer=True` discards the optimizer state.

        Raises:
            OptionError: a value that is not allowed; nothing was changed.
            SwitchError: the failed phase, ranks and cause; everything was rolled back.
            SessionBusy: a cell is still running.
        """
        reset = bool(changes.pop("reset_optimizer", False))
        with_backend = {"backend": backend, **changes} if backend is not None else changes
        requested = self._options_with(with_backend)
        then = self._choice.merge_auto_decision(SessionConfig.from_options(requested, self._where))
        differing = self._choice.diff(then)
        if self.state == "new":
            self._configure(requested)
        if self.state == "new" or not (differing or reset):
            return SwitchReport.nothing(self._choice.describe())
        self._ensure_free()
        change = operations_switch.describe_change(self._choice.describe(), then.describe())

        def record() -> None:
            self.events.add(TrainingEvent(self.metrics.last_step, "switch", change))
            self.history.add_command("switch", change.removeprefix(f"{self.place}: "))

        def switched() -> None:
            self._requested_options, self._choice = requested, then
            self._mark_ready()
            record()

        # The launcher creates and removes an offload folder when ranks start and end.
        needs_new_ranks = (
            self.placement != then.placement
            or self.options.offload_path != then.options.offload_path
        )
        doing = f"{self.options.describe()} -> {then.options.describe()}"
        with self.operation.track("switching", doing):
            if needs_new_ranks:
                report = self._hand_over(then, reset_optimizer=reset)
                self._requested_options = requested
                record()
            else:
                report = operations_switch.switch_backend(
                    self._workers,
                    self._choice,
                    then,
                    reset_optimizer=reset,
                    on_late_success=switched,
                )
                switched()
        return report

    def _hand_over(self, new_config: SessionConfig, *, reset_optimizer: bool) -> SwitchReport:
        """Replace the ranks by new ones; on failure restart with the old options."""
        self._saves.wait_for_running()
        self._cells.fail_all(
            RankDied("The ranks were replaced; output that was still pending is lost.")
        )
        change = operations_switch.RankReplacement(
            workers=self._workers,
            before=self._choice,
            after=new_config,
            reset_optimizer=reset_optimizer,
            start_ranks=self._start_ranks,
        )
        try:
            report = change.run()
        except SwitchError as error:
            if change.kept_folder is not None:
                self.state, self._death = "dead", RankDied(str(error))
                self._ended_by_stop = False
            else:
                self._mark_ready()
            raise
        self._choice = new_config.with_node_hardware(self._where)
        self._mark_ready()
        self.metrics.world_size = self.world_size
        self.logs |= {
            rank: RankLogTail() for rank in range(self.world_size) if rank not in self.logs
        }
        return report

    # -- checkpoints

    def save_to(self, folder: str | os.PathLike[str] | None) -> None:
        """Change where checkpoints are saved; `save()` in cells uses it from the next cell on.

        Args:
            folder: root folder of checkpoints, or a URL. None: "checkpoints" next to the notebook.

        Raises:
            CheckpointError: a URL that fsspec does not support, or whose package is missing.
        """
        self._saves.set_root(folder)
        if self.state in {"ready", "running"}:
            self._check_checkpoint_root_async(new=True)

    @exclusive_for_current_ranks
    def save(
        self,
        name: str,
        overwrite: bool = False,  # noqa: FBT001, FBT002 - the contract
        keep: int | None = None,
        wait: bool = False,  # noqa: FBT001, FBT002
        *,
        folder: str | os.PathLike[str] | None = None,
        full: bool = False,
    ) -> Save:
        """Save the current training state, crash-safe; loads under any backend and world size.

        Waits for an earlier save, then returns once the ranks have copied their state to host
        memory; they write it while the next cell runs. In a cell, `save(name)` does the same.

        Args:
            name: 1 to 64 letters, digits, dots, dashes and underscores.
            overwrite: replace a checkpoint of this name once the new one is complete.
            keep: keep only this many checkpoints, newest first, once this one is complete.
            wait: return when the checkpoint is on disk.
            folder: root folder of checkpoints, or an fsspec URL. Default: the session's.
            full: also store frozen parameters that are unchanged since `from_pretrained`, which
                are stored by reference otherwise.

        Raises:
            CheckpointError: no model, no space, name taken, or an optimizer step is incomplete
                (gradient accumulation); with `wait` also a failed write. Nothing was written.
            SessionBusy: a cell is still running.
        """
        self._ensure_free()
        self.start()
        root = self._folder(folder)
        if isinstance(root, Path):
            self._workers.launcher_group.check_shared_folder(root)
        request = SaveRequest(
            root=location_with_password(root),
            name=name,
            overwrite=overwrite,
            keep=keep,
            full=full,
        )
        with self.operation.track("saving", f"copying the state for checkpoint {name}"):
            save = self._saves.start_save(request, self._workers)
            if wait:
                save.wait_shown()
        # A script may run again, also after a requeue.
        self.history.add_command("save", name, overwrite=True, keep=keep)
        return save

    @exclusive_for_current_ranks
    def load(
        self,
        name: str | os.PathLike[str],
        *,
        weights_only: bool = False,
        reset_optimizer: bool = False,
        folder: str | os.PathLike[str] | None = None,
        trust: bool = False,
    ) -> LoadReport | ForeignReport:
        """Load a checkpoint into the prepared models, under any backend and world size.

        Run the cell that prepares them first. Restores weights, optimizer, scheduler, random
        generators, and data loaders within their epoch.

        Args:
            name: name of a checkpoint, or path of its folder; a path to files of another tool
                is passed to `load_foreign`.
            weights_only: load only weights and buffers.
            reset_optimizer: start with new optimizer state, and load everything else.
            folder: root folder of checkpoints, or a URL. Default: the session's.
            trust: as for `load_foreign`.

        Raises:
            CheckpointError: the checkpoint does not fit, is damaged, or loading failed; the models
                are unchanged.
            SessionBusy: a cell is still running.
        """
        root, last = self._folder(folder), os.fspath(name)
        if os.sep in last or not isinstance(name, str):
            path = self._folder(name)
            root, last = path.parent, path.name
            if isinstance(path, Path) and path.exists() and not (path / MANIFEST_NAME).exists():
                if reset_optimizer:
                    raise CheckpointError(
                        f"{path} is a checkpoint of another tool, which --reset-optimizer does not"
                        " apply to. Use --weights-only (weights_only=True)."
                    )
                return self.load_foreign(path, trust=trust, weights_only=weights_only)
        self._ensure_free()
        self.start()
        self._saves.wait_for_running()
        failed = [save for save in self.checkpoints.failed_saves if save.name == last]
        if failed and last not in [item.name for item in self.checkpoints]:
            raise CheckpointError(f"{failed[-1]}")
        with self.operation.track("loading", f"loading {last}"):
            report = model_files.load_checkpoint(
                self._workers,
                last,
                root,
                weights_only=weights_only,
                reset_optimizer=reset_optimizer,
            )
        self.events.add(TrainingEvent(self.metrics.last_step, "load", last))
        self.history.add_command("load", last)
        return report

    def resume(self) -> LoadReport | ForeignReport:
        """Load the newest checkpoint of a run that was terminated from outside, as `load` does.

        Raises:
            CheckpointError: there is none, or `load` failed; the models are unchanged.
            SessionBusy: a cell is still running.
        """
        ended = [item.name for item in self.checkpoints if item.ended]
        if not ended:
            raise CheckpointError(
                f"{self.checkpoints.root} has no checkpoint of a run that was ended by a signal or"
                " a deadline. Use %nbdist load NAME; %nbdist checkpoints lists the names."
            )
        try:
            return self.load(ended[-1])
        except CheckpointError as error:
            raise CheckpointError(f"Cannot resume from {ended[-1]}: {error}") from error

    def _folder(self, folder: str | os.PathLike[str] | None) -> Path | Url:
        """Return the root of checkpoints as an absolute path: ranks may run elsewhere."""
        return self.checkpoints.root if folder is None else session_checkpoints.parse_root(folder)

    # -- export and import

    @exclusive_for_current_ranks
    def export(
        self,
        folder: str | os.PathLike[str],
        dtype: object = None,
        *,
        model: str | None = None,
        max_shard_size: str | int = model_files.MAX_SHARD_SIZE,
        overwrite: bool = False,
    ) -> ExportReport:
        """Write the prepared model as `save_pretrained` would, under any backend.

        Each rank writes its share of each tensor; the model is never gathered on one rank. The
        folder is renamed into place when complete.

        Args:
            folder: a new or empty folder.
            dtype: bf16, fp16 or fp32, for floating-point tensors. Default: as trained; the fp32
                masters if the backend has them.
            model: variable of the model. Default: the only prepared one.
            max_shard_size: largest size of one file, such as "5GB".
            overwrite: replace the model in a folder that is not empty; other files in it stay.

        Raises:
            OptionError: a dtype that is not allowed.
            CheckpointError: no model, no space, folder not empty, or a rank failed; no files are
                left.
            SessionBusy: a cell is still running.
        """
        request = model_files.make_export_request(
            folder, dtype, model=model, max_shard_size=max_shard_size, overwrite=overwrite
        )
        self._ensure_free()
        self.start()
        self._workers.launcher_group.check_shared_folder(Path(request.folder).parent)
        with self.operation.track("exporting", f"exporting to {folder}"):
            report = model_files.export(self._workers, request)
        self.history.add_command("export", os.fspath(folder), model=model, dtype=dtype)
        return report

    @exclusive_for_current_ranks
    def load_foreign(
        self,
        path: str | os.PathLike[str],
        *,
        trust: bool = False,
        model: str | None = None,
        weights_only: bool = False,
    ) -> ForeignReport:
        """Load files of another tool into the prepared model, under any backend and world size.

        Supported: Hugging Face safetensors (weights), Accelerate's `save_state` under DDP and
        FSDP, DeepSpeed ZeRO 1, 2 and 3 folders (weights and optimizer state). Code in the files
        is not executed.

        Args:
            path: a folder or a file.
            trust: unpickle files that contain more than tensors and plain values; this can
                execute arbitrary code.
            model: variable of the model. Default: the only prepared one.
            weights_only: load only weights and buffers.

        Raises:
            CheckpointError: unknown format, needs `trust`, or belongs to another model; the model
                is unchanged.
            SessionBusy: a cell is still running.
        """
        self._ensure_free()
        self.start()
        with self.operation.track("loading", f"loading {path}"):
            report = model_files.import_checkpoint(
                self._workers, path, trust=trust, model=model, weights_only=weights_only
            )
        self.events.add(TrainingEvent(self.metrics.last_step, "load", Path(path).name))
        self.history.add_command("load", str(path))
        return report

    def script(
        self,
        folder: str | os.PathLike[str],
        *,
        cells: str | int | Sequence[int] | None = None,
        tag: str | None = None,
        overwrite: bool = False,
        with_nbdist: bool = False,
    ) -> WrittenScript:
        """Write the cells that ran as a script, with its launcher config and a Slurm job.

        The folder has train.py, accelerate.yaml, ds_config.json for DeepSpeed, requirements.txt,
        submit.sbatch, and README.md with the commands. A cell that ran several times appears once,
        with its latest code, where it first ran; cells that failed or were deleted are left
        out. Comments in train.py list what differs from the notebook.

        Args:
            folder: a new or empty folder.
            cells: numbers of the cells, "3,5-7" or a sequence. Default: all since the ranks were
                started.
            tag: only cells with this tag, in front ends that send tags, such as JupyterLab.
            overwrite: replace files in a folder that is not empty; others stay.
            with_nbdist: the script uses nbdist's engines and checkpoints; it does so anyway if a
                cell imports nbdist.

        Raises:
            OptionError: a folder that is not empty, or cells that cannot be written.
        """
        return write_script(
            self,
            folder,
            cells=cells,
            tag=tag,
            overwrite=overwrite,
            with_nbdist=with_nbdist,
        )

    # -- the planner

    def measured(self) -> dict[int, MeasuredMemory | None]:
        """Return the memory that each rank measured in its third optimizer step; None before that.

        Ranks measure automatically, once for each `prepare()`. Works while a cell runs.
        """
        from nbdist.planner.measured_comparison import MeasuredMemory

        self._ensure_alive()
        self.start()
        ranks = range(self.world_size)
        replies = self._workers.request_all(ranks, messages.MEASURED_MEMORY, {}, channel="control")
        figures = {rank: replies[rank]["figures"] for rank in ranks}
        return {
            rank: MeasuredMemory.from_json(figure) if figure else None
            for rank, figure in figures.items()
        }

    @exclusive_for_current_ranks
    def model_spec(
        self,
        name: str | None = None,
        *,
        batch_size: int | None = None,
        seq_len: int | None = None,
        kind: Literal["cuda", "cpu"] = "cuda",
        quick: bool = False,
    ) -> messages.ModelReply:
        """Describe a model of rank 0 for the planner; traces it in a child process.

        Args:
            name: a variable that holds an nn.Module, unwrapped or the one prepared last. Default:
                the one prepared last.
            batch_size: micro-batch size. Default: that of the last forward pass.
            seq_len: tokens per sample. Default: those of the last forward pass, or the model's
                maximum.
            kind: device type to plan for.
            quick: use the closed form or a cached trace; no child process.

        Raises:
            PlanError: no such model, or one that cannot be described.
        """
        self._ensure_free()
        self.start()
        request = messages.ModelRequest(
            name=name, batch_size=batch_size, seq_len=seq_len, kind=kind, quick=quick
        )
        reply: messages.ModelReply = self._workers.request_all(
            [0], messages.MODEL, request, raises=PlanError
        )[0]
        return reply
