"""`Session`: ranks that live between cells. Runs in the notebook's kernel, without torch.

The magics are a thin layer over `Session`; scripts use it directly. The package's only global
state is the current session, see `current_session`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal

from nbdist import rank_sets
from nbdist.cluster.local_launcher import LocalLauncherProvider
from nbdist.errors import CellInterrupted, SessionError
from nbdist.output.sink import finished_cell
from nbdist.output.tracebacks import group_errors
from nbdist.redaction import redact_secrets
from nbdist.session import lifecycle, planner, rank_activity
from nbdist.session.cell import CellResult, check_code
from nbdist.session.model_operations import ModelOperations
from nbdist.session.profiler import ProfileOptions, ProfileRun
from nbdist.session.progress import StatusLine, exclusive_for_current_ranks
from nbdist.session.prompts import has_keyboard
from nbdist.session.save_on_termination import parse_deadline

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from nbdist.cluster.node_group import LauncherProvider
    from nbdist.operations.calibrate import CalibrationReport
    from nbdist.output.renderer import ShownRanks
    from nbdist.session.checkpoints import Save

LOCK_TIMEOUT_S = 1.0
"""Timeout for the lock when an interrupt ended the ranks.

A thread that waits for those ranks holds the lock, and starts new ones itself.
"""


class Session(ModelOperations):
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
            And deadline: as for `set_deadline`; and track: an experiment tracker that gets the
            metrics, such as "tensorboard:runs".

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
        options_given = {name: value for name, value in named.items() if value is not None}
        checkpoint_root, tracker = options.pop("checkpoints", None), options.pop("track", None)
        deadline = options.pop("deadline", None)
        at = deadline and parse_deadline(deadline)
        requested = {"nproc": nproc, "devices": devices, "auto": auto, **options_given, **options}
        super().__init__(engine or LocalLauncherProvider(), checkpoint_root, requested, tracker)
        self._profiler.build_profile = lambda run: planner.build_profile(self, self._workers, run)
        self._termination.deadline = at
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

        Blocks until every rank has finished the cell, unless `background`. Output is shown as it
        arrives, labelled by rank; equal output of several ranks is shown once.

        Args:
            code: cell source; magics, `!shell` and top-level await work.
            ranks: run on these ranks only, "0,2-3" or a sequence. Default: all.
            background: return at once; `wait()` waits for the cell.
            output: ranks whose output is shown: "all", "none" or ranks.
            count: number of the cell in tracebacks. Default: counts the session's cells.
            profile: True, or the arguments of `profile()`, to profile this cell.

        Raises:
            SyntaxError: the code is not valid Python; nothing was sent.
            OptionError: the code is empty, or an argument is none of the above.
            CellError: the code raised on a rank.
            CellInterrupted: the cell was interrupted; the ranks keep their variables.
            RankDied: a rank ended; the message contains the cause.
            SessionBusy: a background cell is still running.
        """
        check_code(code)
        options = ProfileOptions.parse(profile)
        chosen = rank_sets.resolve_ranks(ranks, self.world_size)
        shown: ShownRanks = "none" if output == "none" else "all"
        if output not in ("all", "none"):
            shown = frozenset(rank_sets.resolve_ranks(output, self.world_size, option="--output"))
        self._ensure_free()
        self.start()
        if options is not None:
            self._profiler.arm(options)
        with (
            self._termination.save_after_cell(),
            self.history.record_code(code, chosen, self.world_size, count) as ran,
        ):
            cell = self._cells.run(
                code,
                chosen,
                background=background,
                shown=shown,
                logs={rank: self.logs[rank] for rank in chosen},
                count=count,
                checkpoints=self._saves.root_for_ranks,
            )
        result = CellResult(cell)
        ran.result = result if background else None
        return result

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the running cell or the last background cell; return False on timeout.

        Raises:
            CellError: the cell raised on a rank; raised once.
            CellInterrupted: the wait was interrupted; the cell keeps running.
        """
        cell = self.running or self._cells.background_cell
        try:
            return cell is None or cell.joined or CellResult(cell).wait(timeout_s)
        except KeyboardInterrupt:
            raise CellInterrupted(
                "Stopped waiting. The cell keeps running in the background; use"
                " %nbdist interrupt to interrupt it."
            ) from None

    @exclusive_for_current_ranks
    def debug(self, rank: int | None = None) -> None:
        """Open IPython's debugger where the last cell failed.

        The frames of the error are kept until the next cell starts, except after an out-of-memory
        error.

        Args:
            rank: the rank to debug. Default: the one whose error came first.

        Raises:
            SessionError: the last cell did not fail on the rank, or no user can answer prompts.
        """
        self._ensure_free()
        errors = self.last.errors if self.last is not None else {}
        # an interrupt releases the frames
        failed = {key: error for key, error in errors.items() if error.ename != "KeyboardInterrupt"}
        if not failed:
            raise SessionError(
                "The last cell did not fail on any rank, so there is nothing to debug."
            )
        first = group_errors(list(failed.values()))[0].error.rank
        rank = first if rank is None else rank
        if rank not in failed:
            ranks = rank_sets.describe_ranks(failed)
            raise SessionError(f"Rank {rank} did not fail in the last cell, but {ranks} did.")
        if not has_keyboard():
            raise SessionError("The debugger needs a front end with input, such as JupyterLab.")
        self._cells.run(
            "%debug",
            [rank],
            logs={rank: self.logs[rank]},
            checkpoints=self._saves.root_for_ranks,
            debugs_error=True,
        )

    def inspect(
        self, expression: str, ranks: str | Sequence[int] | None = None, *, timeout_s: float = 10.0
    ) -> dict[int, str]:
        """Return the text of an expression's value by rank; works while a cell runs.

        A rank evaluates it before its next optimizer step, at a prompt in the selected frame, or
        when no cell runs. Callable from any thread.

        Args:
            expression: what to evaluate. It must not call a collective: ranks may be a step apart.
            ranks: ranks that evaluate it, "0,2-3" or a sequence. Default: all.
            timeout_s: time to wait; later replies are dropped.

        Raises:
            OptionError: not a Python expression.
            SessionError: a rank did not reply in time.
        """
        self._ensure_alive()
        self.start()
        chosen = rank_sets.resolve_ranks(ranks, self.world_size)
        return rank_activity.inspect(self._workers, expression, chosen, timeout_s=timeout_s)

    def complete(self, code: str, cursor: int) -> tuple[list[str], int]:
        """Return what completes the code at the cursor on rank 0, and where it begins.

        Nothing while the ranks are in use.
        """
        if self.state != "ready" or not self.lock.acquire(blocking=False):
            return [], cursor
        try:
            return rank_activity.complete(self._workers, code, cursor)
        finally:
            self.lock.release()

    def replay(self) -> None:
        """Show the output of the running or the last cell again, below the current cell.

        For a notebook whose page was closed while the cell ran. Progress bars are shown in their
        last state. A cell that runs in the background continues its output here.

        Raises:
            SessionError: no cell has run on these ranks.
        """
        cell = self.running or self.last
        if cell is None:
            raise SessionError(
                "No cell has run on these ranks yet, so there is no output to show again."
            )
        cell.replay(finished_cell())

    def interrupt(self) -> bool:
        """Raise KeyboardInterrupt in the running cell on all ranks; variables are kept.

        A running save, load, switch or export is interrupted too and rolled back.

        A second call aborts the process groups, which releases ranks blocked in C code, and
        returns the prompt if a cell or command blocks it. A third call ends the ranks and
        starts new ones. Interrupts from the notebook and the panel count as calls.

        Returns:
            True if there was anything to interrupt.
        """
        request = self._collective_request
        if self._death is not None:
            stopped = False
        elif request is not None:
            request.escalation.escalate()
            stopped = True
        else:
            stopped = self._cells.escalate_interrupt()
        # If no thread waits for the ranks, none would start new ones.
        if self._ended_by_stop and self.lock.acquire(timeout=LOCK_TIMEOUT_S):
            try:
                if replaced := self.replace_stopped_ranks():
                    with StatusLine() as line:
                        line.show(replaced)
            finally:
                self.lock.release()
        return stopped

    def set_deadline(self, deadline: str | float | None) -> None:
        """Set the time at which the session will be terminated from outside; None if unknown.

        Shortly before it the ranks stop after the same optimizer step and save a checkpoint,
        which `resume` loads in the next session.

        Args:
            deadline: a time since the start of this process such as "8h50m", a clock time such as
                "17:30", a date and time such as "2026-11-24T17:30", or a Unix time.

        Raises:
            OptionError: none of these, or in the past.
        """
        self._termination.deadline = None if deadline is None else parse_deadline(deadline)

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
        # The planner is not needed to run cells.
        from nbdist.operations import calibrate as operations_calibrate

        self._ensure_free()
        self.start()
        with self.operation.track("calibrating", "measuring links and devices"):
            return operations_calibrate.calibrate(
                self._workers,
                options=self.options,
                hardware=self.hardware,
                cluster=planner.cluster_spec(self),
                disk=disk,
            )

    # -- what the ranks do

    def log(self, rank: int | None = None, *, lines: int = 100) -> str:
        """Return the last lines of a rank's output, or without a rank the launcher's log.

        Secrets are redacted.
        """
        if rank is None:
            return self._workers.log_tail()
        (chosen,) = rank_sets.resolve_ranks([rank], self.world_size, option="rank")
        return redact_secrets(self.logs[chosen].tail(lines))

    def stacks(self) -> dict[int, str]:
        """Return the current stack of every thread, by rank; works while a cell runs.

        Takes at most four seconds. For a rank that is stopped or does not reply the text is an
        explanation.
        """
        self._ensure_alive()
        return rank_activity.rank_stacks(self._workers, self._cells.cell_numbers_by_file())

    def panel(self, face: str = "auto") -> None:
        """Show the panel below this cell: predicted and live memory, curves, and buttons.

        Args:
            face: widget, html or text; auto chooses the best available.

        Raises:
            OptionError: an unknown face, or one that is not available here.
        """
        _load_panel().show_panel(self, face)

    def saves_running(self) -> list[Save]:
        """Return the saves that run in the background."""
        return self._saves.running_saves()

    def __repr__(self) -> str:
        return f"Session({self.state}: {self.describe()})"

    def _ipython_display_(self) -> None:
        """Show the panel if the session is a cell's last expression."""
        self.panel()

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        bundle: dict[str, str] = _load_panel().static_mime_bundle(self)
        return bundle


def _load_panel() -> Any:
    """Import the panel, which imports this module, at its first use."""
    return importlib.import_module("nbdist.panel")


def current_session() -> Session | None:
    """Return the session that was started last and not stopped, or None."""
    session = lifecycle.current[0]
    return session if isinstance(session, Session) else None


def apply_options(session: Session, options: Mapping[str, Any]) -> str:
    """Switch to the options that differ, and return what happened; "" if none differs."""
    differing = session.differing(**options)
    if "auto" in differing:  # auto is set up when the ranks start
        session.restart(**options)
        words = ", ".join(f"{name} {now} -> {then}" for name, (now, then) in differing.items())
        return f"nbdist: {words}: started new ranks; variables of the old ranks are lost"
    return str(session.switch(**options)) if differing else ""
