"""`Session`: ranks that live between cells. Runs in the notebook's kernel, without torch.

The magics are a thin layer over `Session`; scripts use it directly. The package's only global
state is the current session, see `current_session`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nbdist import rank_sets as rank_names
from nbdist.checkpoint import Url, location_with_password
from nbdist.cluster.local import LocalLauncherProvider
from nbdist.errors import CellInterrupted, PlanError, RankDied, SwitchError
from nbdist.operations import calibrate as operations_calibrate
from nbdist.operations import export as operations_export
from nbdist.operations import import_checkpoint, resize
from nbdist.operations import switch as operations_switch
from nbdist.operations.switch import SwitchReport
from nbdist.output.rank_log import RankLog
from nbdist.output.status_line import StatusLine
from nbdist.planner.validation import MeasuredMemory
from nbdist.protocol import messages
from nbdist.redaction import redact_secrets
from nbdist.session import checkpoints as session_checkpoints
from nbdist.session import lifecycle, panel_loader, planner, push_pull, stacks
from nbdist.session.cell import CellResult, check_code
from nbdist.session.config import SessionConfig
from nbdist.session.locking import exclusive_for_current_ranks
from nbdist.session.profiler import ProfileOptions, ProfileRun
from nbdist.session.training_events import TrainingEvent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.cluster.interfaces import LauncherProvider
    from nbdist.operations.calibrate import CalibrationReport
    from nbdist.operations.export import ExportReport
    from nbdist.operations.import_checkpoint import ForeignReport
    from nbdist.output.renderer import ShownRanks
    from nbdist.session.checkpoints import LoadReport, Save

TURN_S = 1.0
"""Timeout for the lock when an interrupt ended the ranks.

A thread that waits for those ranks holds the lock, and starts new ones itself.
"""


class Session(lifecycle.SessionLifecycle):
    """Ranks on this machine, or on nodes of a cluster, that run cells and keep their variables.

    A context manager. Ranks are started on entry, by `start()`, or by the first `run()`.

    Args:
        nproc: number of ranks. Default: one per visible GPU; without a GPU, 2 CPU ranks.
        backend: ddp (the default), fsdp (= fsdp2), fsdp1, zero1, zero2 or zero3.
        precision: no, fp16, bf16, fp8. Default: bf16 if the hardware supports it, else no.
        offload: where the optimizer state is offloaded to: none, cpu or nvme:PATH.
        devices: GPU indices, "0,2" or a sequence.
        auto: choose the backend, offload and activation checkpointing at the first
            `accelerator.prepare()`, from the model and the machine; options given here are kept.
        engine: provider of launchers. Default: this machine.
        options: any other option of `%%distribute`, with underscores: see docs/options.md and
            `%%distribute -h`. Also checkpoints: where they are saved, a folder shared by all ranks
            or an fsspec URL ("s3://bucket/run"). Default: "checkpoints" in the working directory.

    Raises:
        OptionError: a value that is not allowed, or that the backend does not support.
        StartError: the cluster is not reachable or too small.
        CheckpointError: a URL that fsspec does not support, or whose package is missing.
    """

    def __init__(
        self,
        nproc: int | None = None,
        backend: str | None = None,
        precision: str | None = None,
        offload: str | None = None,
        devices: str | Sequence[int] | None = None,
        *,
        auto: bool = False,
        engine: LauncherProvider | None = None,
        **options: Any,
    ) -> None:
        named = {"backend": backend, "precision": precision, "offload": offload}
        given = {name: value for name, value in named.items() if value is not None}
        checkpoint_root = options.pop("checkpoints", None)
        requested = {"nproc": nproc, "devices": devices, "auto": auto, **given, **options}
        super().__init__(engine or LocalLauncherProvider(), checkpoint_root, requested)
        self.panel_model: object = None
        """Model of the panel, owned by `nbdist.panel`."""

    # -- cells

    @exclusive_for_current_ranks
    def run(
        self,
        code: str,
        ranks: str | Sequence[int] | None = None,
        background: bool = False,  # noqa: FBT001, FBT002 - the contract
        *,
        output: str | Sequence[int] = "all",
        count: int | None = None,
        profile: bool | Mapping[str, Any] = False,
    ) -> CellResult:
        """Run `code` on the ranks as a notebook cell.

        Blocks until every rank has finished it, unless `background`. Output is shown as it
        arrives, labelled by rank; equal output of several ranks is shown once.

        Args:
            code: cell source; magics, `!shell` and top-level await work.
            ranks: run on these ranks only, "0,2-3" or a sequence. Default: all.
            background: return at once; `wait()` waits for the cell.
            output: ranks whose output is shown: "all", "none" or ranks.
            count: number of the cell in tracebacks. Default: counts the session's cells.
            profile: True, or the arguments of `profile()`, to profile this cell.

        Raises:
            SyntaxError: the code is empty or not valid Python; nothing was sent.
            OptionError: `profile` is none of the above.
            CellError: the code raised on a rank.
            CellInterrupted: the cell was interrupted; the ranks keep their variables.
            RankDied: a rank ended; the message contains the cause.
            SessionBusy: a background cell is still running.
        """
        check_code(code)
        options = ProfileOptions.parse(profile)
        chosen = rank_names.resolve_ranks(ranks, self.world_size)
        shown: ShownRanks = "none" if output == "none" else "all"
        if output not in ("all", "none"):
            shown = frozenset(rank_names.resolve_ranks(output, self.world_size, option="--output"))
        self._ensure_free()
        self.start()
        if options is not None:
            self._profiler.arm(options)
        cell = self._cells.run(
            code,
            chosen,
            background=background,
            shown=shown,
            logs={rank: self.logs[rank] for rank in chosen},
            count=count,
            checkpoints=self._saves.root_for_ranks,
        )
        return CellResult(cell)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the running cell or the last background cell; return False on timeout.

        Raises:
            CellError: the cell raised on a rank; raised once.
            CellInterrupted: the wait was interrupted; the cell keeps running.
        """
        return self._cells.wait(timeout_s)

    def interrupt(self) -> bool:
        """Raise KeyboardInterrupt in the running cell on all ranks; variables are kept.

        A running save, load, switch or export is interrupted too and rolled back.

        A second call aborts the process groups, which releases ranks blocked in C code, and
        returns the prompt if a cell or command blocks it. A third call ends the ranks and
        starts new ones. Interrupts from the notebook and the panel count as calls.

        Returns:
            True if there was anything to interrupt.
        """
        request = self._workers.collective_request
        if self._death is not None:
            stopped = False
        elif request is not None:
            request.interrupt()
            stopped = True
        else:
            stopped = self._cells.escalate_interrupt()
        # If no thread waits for the ranks, none would start new ones.
        if self._ended_by_stop and self.lock.acquire(timeout=TURN_S):
            try:
                if replaced := self.replace_stopped_ranks():
                    with StatusLine() as line:
                        line.show(f"nbdist: {replaced}")
            finally:
                self.lock.release()
        return stopped

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
        return push_pull.push_variables(values, range(self.world_size), self._workers)

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
        (chosen,) = rank_names.resolve_ranks([rank], self.world_size, option="rank")
        self._ensure_free()
        self.start()
        everyone = range(self.world_size)
        values = push_pull.pull_variables(
            names,
            chosen,
            self._workers,
            as_numpy=as_numpy,
            gather=lambda name, folders: operations_export.gather_model(
                name, folders, everyone, self._workers, self._listen
            ),
        )
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
        wished = {"backend": backend, **changes} if backend is not None else changes
        requested = self._with(wished)
        then = self._choice.merge_auto_decision(SessionConfig.from_options(requested, self._where))
        differing = self._choice.diff(then)
        if self.state in {"new", "stopped"} or not differing:
            if self.state == "new":
                self._configure(requested)
            return SwitchReport.nothing(self._choice.describe())
        self._ensure_free()
        doing = f"{self.backend} -> {then.options.backend}"
        with self.operation.track("switching", doing):
            report = self._switch(then, requested, reset_optimizer=reset)
        self.events.add(
            TrainingEvent(
                self.metrics.last_step,
                "switch",
                operations_switch.describe_change(report.before, report.after),
            )
        )
        return report

    def _switch(
        self, new_config: SessionConfig, requested: dict[str, Any], *, reset_optimizer: bool
    ) -> SwitchReport:
        if resize.needs_new_ranks(self._choice, new_config):
            report = self._hand_over(new_config, reset_optimizer=reset_optimizer)
            self._requested_options = requested
            return report
        with StatusLine() as line:
            request = operations_switch.BackendSwitch(
                before=self._choice,
                after=new_config,
                reset_optimizer=reset_optimizer,
                status_line=line,
            )

            def switched() -> None:
                self._requested_options, self._choice = requested, new_config
                self._mark_ready()

            try:
                report = request.run(self._workers, self._listen)
            except CellInterrupted:
                if (collective_request := self._workers.collective_request) is not None:
                    collective_request.late = (
                        switched  # the prompt returns while the switch continues
                    )
                raise
        switched()
        return report

    def _hand_over(self, new_config: SessionConfig, *, reset_optimizer: bool) -> SwitchReport:
        """Replace the ranks by new ones; on failure restart with the old options."""
        self._saves.wait_for_running()
        self._cells.fail_all(
            RankDied("The ranks were replaced; output that was still pending is lost.")
        )
        with StatusLine() as line:
            change = resize.RankResize(
                worker_group=self._workers,
                before=self._choice,
                after=new_config,
                reset_optimizer=reset_optimizer,
                status_line=line,
                subscribe_progress=self._listen,
                start_ranks=self._start_ranks,
            )
            try:
                report = change.run()
            except SwitchError as error:
                if change.are_ranks_lost:
                    self.state, self._death = "dead", RankDied(str(error))
                    self._ended_by_stop = False
                else:
                    self._mark_ready()
                raise
        self._choice = new_config.with_node_hardware(self._where)
        self._mark_ready()
        self.metrics.world_size = self.world_size
        self.logs |= {rank: RankLog() for rank in range(self.world_size) if rank not in self.logs}
        return report

    # -- checkpoints

    def save_to(self, folder: str | os.PathLike[str] | None) -> None:
        """Change where checkpoints are saved; `save()` in cells uses it from the next cell on.

        Args:
            folder: root folder of checkpoints, or a URL. None: "checkpoints" beside the notebook.

        Raises:
            CheckpointError: a URL that fsspec does not support, or whose package is missing.
        """
        self._saves.set_root(folder)
        if self.state in {"ready", "running"}:
            self._look_at_checkpoints(new=True)

    @exclusive_for_current_ranks
    def save(
        self,
        name: str,
        overwrite: bool = False,  # noqa: FBT001, FBT002 - the contract
        keep: int | None = None,
        wait: bool = False,  # noqa: FBT001, FBT002
        *,
        folder: str | os.PathLike[str] | None = None,
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
        request = messages.SaveRequest(
            root=location_with_password(root), name=name, overwrite=overwrite, keep=keep
        )
        with self.operation.track("saving", f"copying the state for checkpoint {name}"):
            save = self._saves.start_save(request, range(self.world_size), self._workers)
            if wait:
                save.wait_shown()
        return save

    @exclusive_for_current_ranks
    def load(
        self,
        name: str,
        *,
        weights_only: bool = False,
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
            folder: root folder of checkpoints, or a URL. Default: the session's.
            trust: as for `load_foreign`.

        Raises:
            CheckpointError: the checkpoint does not fit, is damaged, or loading failed; the models
                are unchanged.
            SessionBusy: a cell is still running.
        """
        root, last = self._folder(folder), name
        if os.sep in name:
            path = self._folder(name)
            root, last = path.parent, path.name
            if isinstance(path, Path) and session_checkpoints.is_not_checkpoint_folder(path):
                return self.load_foreign(path, trust=trust)
        self._ensure_free()
        self.start()
        ranks = range(self.world_size)
        with self.operation.track("loading", f"loading {last}"):
            report = session_checkpoints.load_checkpoint(
                last, root, ranks, self._workers, self._listen, weights_only=weights_only
            )
        self.events.add(TrainingEvent(self.metrics.last_step, "load", last))
        return report

    def _folder(self, given: str | os.PathLike[str] | None) -> Path | Url:
        """Return the root of checkpoints as an absolute path: ranks may run elsewhere."""
        return self.checkpoints.root if given is None else session_checkpoints.parse_root(given)

    # -- export and import

    @exclusive_for_current_ranks
    def export(
        self,
        folder: str | os.PathLike[str],
        dtype: object = None,
        *,
        model: str | None = None,
        max_shard_size: str | int = operations_export.MAX_SHARD_SIZE,
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
        content = operations_export.make_export_request(
            folder, dtype, model=model, max_shard_size=max_shard_size, overwrite=overwrite
        )
        self._ensure_free()
        self.start()
        self._workers.launcher_group.check_shared_folder(Path(content["folder"]).parent)
        with self.operation.track("exporting", f"exporting to {folder}"):
            return operations_export.export(
                content, range(self.world_size), self._workers, self._listen
            )

    @exclusive_for_current_ranks
    def load_foreign(
        self, path: str | os.PathLike[str], *, trust: bool = False, model: str | None = None
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

        Raises:
            CheckpointError: unknown format, needs `trust`, or belongs to another model; the model
                is unchanged.
            SessionBusy: a cell is still running.
        """
        self._ensure_free()
        self.start()
        ranks = range(self.world_size)
        with self.operation.track("loading", f"loading {path}"):
            return import_checkpoint.import_checkpoint(
                path, ranks, self._workers, self._listen, trust=trust, model=model
            )

    # -- the profiler

    def profile(
        self,
        steps: int | None = None,
        trace: str | os.PathLike[str] | None = None,
        *,
        memory: bool = True,
    ) -> ProfileRun:
        """Profile the running cell, or else the next one; return at once.

        The result is shown below that cell and appended to `profiles`. Callable from any thread.

        Args:
            steps: optimizer steps to record after warm-up. Default: until the figures are stable,
                at most 30 s.
            trace: folder for a trace of each rank.
            memory: break down the peak memory.

        Raises:
            OptionError: a value that is not allowed, or a folder that is not writable.
            ProfileError: another profile is in progress.
            SessionError: the session was stopped, or its ranks have ended.
        """
        options = ProfileOptions.create(steps, trace, memory)
        self._ensure_alive()
        cell = self.running
        profiling = self._profiler.arm(options)
        if cell is not None and cell.running:
            profiling.sources = self._cells.cell_sources(cell)
            self._profiler.start_recording(cell.running, cell)
        return profiling

    @property
    def profiling(self) -> ProfileRun | None:
        """The profile that is armed or in progress, or None."""
        return self._profiler.current_run

    def why_no_profile(self) -> str:
        """Return why no profile can be started now; "" if one can."""
        if self.state == "stopped":
            return "the session was stopped."
        if self._death is not None:
            return self._death.headline
        return self._profiler.busy_reason()

    # -- the planner

    def measured(self) -> dict[int, MeasuredMemory | None]:
        """Return the memory that each rank measured in its third optimizer step; None before that.

        Ranks measure automatically, once for each `prepare()`. Works while a cell runs.
        """
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
            quick: use the closed form only; no child process.

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

    @exclusive_for_current_ranks
    def calibrate(
        self, disk: str | os.PathLike[str] | Literal[True] | None = None
    ) -> CalibrationReport:
        """Measure links, devices and a disk for the planner; takes seconds, leaves models alone.

        Afterwards `nbdist.plan` and `%nbdist plan` use these figures for this machine and
        world size, and label them "measured here".

        Args:
            disk: a folder whose disk is measured too, for NVMe offload; True: the temp folder.
                The disk that the session offloads to is always measured.

        Raises:
            SessionError: the measurement failed; nothing was stored.
            SessionBusy: a cell is still running.
        """
        self._ensure_free()
        self.start()
        with self.operation.track("calibrating", "measuring links and devices"):
            return operations_calibrate.calibrate(
                self._workers,
                self._listen,
                options=self.options,
                world_size=self.world_size,
                hardware=self.hardware,
                cluster=planner.cluster_spec(self),
                disk=disk,
            )

    def log(self, rank: int | None = None, *, lines: int = 100) -> str:
        """Return the last lines of a rank's output, or without a rank the launcher's log.

        Secrets are redacted.
        """
        if rank is None:
            return self._workers.log_tail()
        (chosen,) = rank_names.resolve_ranks([rank], self.world_size, option="rank")
        return redact_secrets(self.logs[chosen].tail(lines))

    def stacks(self) -> dict[int, str]:
        """Return the current stack of every thread, by rank; works while a cell runs.

        Takes at most four seconds. For a rank that is stopped or does not reply the text is an
        explanation.
        """
        self._ensure_alive()
        return stacks.rank_stacks(self._workers, self._cells.cell_numbers_by_file())

    def panel(self, face: str = "auto") -> None:
        """Show the panel below this cell: predicted and live memory, curves, and buttons.

        Args:
            face: widget, html or text; auto chooses the best available.

        Raises:
            OptionError: an unknown face, or one that is not available here.
        """
        panel_loader[0]().show_panel(self, face)

    def saves_running(self) -> list[Save]:
        """Return the saves that run in the background."""
        return self._saves.running_saves()

    def __repr__(self) -> str:
        """Return state, ranks and strategy on one line."""
        return f"Session({self.state}: {self.describe()})"

    def _ipython_display_(self) -> None:
        """Show the panel if the session is a cell's last expression."""
        self.panel()

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return panel_loader[0]().static_mime_bundle(self)


def current_session() -> Session | None:
    """Return the session that was started last and not stopped, or None."""
    session = lifecycle.current[0]
    return session if isinstance(session, Session) else None
