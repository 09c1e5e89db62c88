"""`Session`: ranks that live between cells. Runs in the notebook's kernel, without torch.

The magics are a thin layer over `Session`; scripts use it directly. The package's only global
state is the current session, see `current_session`.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from nbdist import rank_sets as rank_names
from nbdist import strategies
from nbdist.checkpoint import Url, location_with_password
from nbdist.cluster.local import LocalLauncherProvider
from nbdist.cluster.orphan_cleanup import kernel_descendants
from nbdist.errors import (
    CellInterrupted,
    OptionError,
    PlanError,
    RankDied,
    SessionBusy,
    SessionError,
    StartError,
    SwitchError,
)
from nbdist.hardware import discovery
from nbdist.operations import calibrate as operations_calibrate
from nbdist.operations import export as operations_export
from nbdist.operations import import_checkpoint, resize
from nbdist.operations import load as operations_load
from nbdist.operations import switch as operations_switch
from nbdist.operations.switch import SwitchReport
from nbdist.output.rank_log import RankLog
from nbdist.output.renderer import OutputRenderer
from nbdist.output.sink import FinishedCellSink, RunningCellSink
from nbdist.planner.validation import MeasuredMemory
from nbdist.protocol import messages
from nbdist.protocol.operations import SaveRequest
from nbdist.redaction import redact_secrets
from nbdist.session import (
    cell_source,
    config,
    failure_causes,
    panel_hook,
    planner,
    profile_builder,
    push_pull,
    stacks,
    startup,
)
from nbdist.session import checkpoints as session_checkpoints
from nbdist.session.cell import Cell, CellResult
from nbdist.session.cell_runner import CellRunner
from nbdist.session.cluster_options import FIXED_OPTIONS, OPTION_NAMES, ClusterOptions
from nbdist.session.config import SessionConfig
from nbdist.session.locking import exclusive, exclusive_for_current_ranks, show_wait_reason
from nbdist.session.metrics import Metrics
from nbdist.session.placement import check_usable, mixed_gpus_warning
from nbdist.session.profiler import ProfileOptions, ProfileRun, SessionProfiler
from nbdist.session.progress import CurrentOperation, StatusLine
from nbdist.session.rank_polling import PreparedModelPoller, RankActivityPoller
from nbdist.session.training_events import TrainingEvent, TrainingEvents
from nbdist.session.worker_group import WorkerGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from nbdist.cluster.interfaces import LauncherProvider
    from nbdist.cluster.rank_channels import Message
    from nbdist.hardware.discovery import SessionNode
    from nbdist.hardware.telemetry import UsageSnapshot
    from nbdist.operations.calibrate import CalibrationReport
    from nbdist.operations.export import ExportReport
    from nbdist.operations.import_checkpoint import ForeignReport
    from nbdist.operations.load import LoadReport
    from nbdist.output.renderer import ShownRanks
    from nbdist.profiler.report import Profile
    from nbdist.session.checkpoints import Checkpoints, Save
    from nbdist.session.failure_causes import WorkerFailure
    from nbdist.session.placement import Placement

SessionState = Literal["new", "ready", "running", "dead", "stopped"]
NEWEST_S = 1.0
"""Timeout for listing checkpoints after ranks have died: the file system may hang."""
TURN_S = 1.0
"""Timeout for the lock when an interrupt ended the ranks.

A thread that waits for those ranks holds the lock, and starts new ones itself.
"""


class Session:
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
        options: other fields of `strategies.Options`: offload_params, replicate_across,
            activation_checkpointing, compile, accumulate, clip, fsdp_config,
            deepspeed_config. Where the ranks run: on ("local", "ray", "ray://HOST:PORT",
            "slurm"), nodes, gpus_per_node, interface; for Slurm also partition, time, account.
            Where checkpoints are saved: checkpoints, a folder shared by all ranks or an fsspec
            URL ("s3://bucket/run"). Default: "checkpoints" in the working directory.

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
        self.lock = threading.RLock()
        """Held by the thread that uses the ranks; `interrupt` and `status` do not need it."""
        self.num_restarts = 0
        """Number of restarts; written while holding `lock`."""
        self.operation = CurrentOperation()
        """The current long operation besides cells, and its progress."""
        self.events = TrainingEvents()
        self.state = "new"
        self.started_at: float | None = None
        """Unix time of the first start, in seconds."""
        self.panel_model: object = None
        """Model of the panel, owned by `nbdist.panel`."""
        self._at_stop: list[Callable[[], object]] = []
        self._saves = session_checkpoints.BackgroundSaves(options.pop("checkpoints", None))
        self._saving: dict[str, TrainingEvent] = {}
        """Events of saves that are not finished."""
        self._pid = os.getpid()
        self.sent_values: dict[str, Any] = {}
        """Values of send(), by name."""
        self._death: RankDied | None = None
        self._ended_by_stop = False
        """True if the ranks were ended by an interrupt."""
        self._where = ClusterOptions(
            {name: options.pop(name) for name in OPTION_NAMES if name in options}
        )
        self._workers = WorkerGroup(
            self._where.make_launcher_provider() or engine or LocalLauncherProvider(),
            on_message=self._receive,
            on_idle=self._on_idle,
            on_death=self._die,
            on_notice=self._notice,
            wait_ready=startup.wait_ready,
        )
        self.rank_activity = RankActivityPoller(self._workers)
        self._cells = CellRunner(self._workers, self.rank_activity)
        self.model_query = PreparedModelPoller(self._workers)
        self._profiler = SessionProfiler(
            self._workers, lambda run: profile_builder.build_profile(self, self._workers, run)
        )
        named = {"backend": backend, "precision": precision, "offload": offload}
        given = {name: value for name, value in named.items() if value is not None}
        requested = {
            "nproc": nproc,
            "devices": devices,
            "auto": auto,
            **self._where.distribution_options,
        }
        try:
            self._configure(requested | given | options)
        except BaseException:
            self._where.close()
            raise

    # -- options

    def _configure(self, options: Mapping[str, Any]) -> None:
        self._requested_options = dict(options)
        self._choice = SessionConfig.from_options(options, self._where)
        self.metrics = Metrics(self.world_size)
        self.logs = {rank: RankLog() for rank in range(self.world_size)}

    @property
    def state(self) -> SessionState:
        """State of the ranks."""
        return self._state

    @state.setter
    def state(self, state: SessionState) -> None:
        self._state: SessionState = state
        self.state_since = time.time()
        """Unix time of the last state change, in seconds."""

    @property
    def running(self) -> Cell | None:
        """The running cell, or None."""
        return self._cells.running_cell

    @property
    def last(self) -> Cell | None:
        """The cell that finished last, or None."""
        return self._cells.last_cell

    @property
    def standstill(self) -> str:
        """Which ranks block others and which do not respond; "" if there are none."""
        work = self.running or self._workers.collective_request
        return "" if work is None else work.notice

    @property
    def death(self) -> RankDied | None:
        """The error with which the ranks ended, or None."""
        return self._death

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._choice.placement.nproc

    @property
    def on(self) -> str:
        """Where the ranks run: "local", "ray", "ray://HOST:PORT", "slurm"."""
        return self._where.on

    @property
    def place(self) -> str:
        """Ranks and devices, such as "2 CPU ranks (no GPU found)"."""
        return self._choice.describe_devices

    @property
    def placement(self) -> Placement:
        """Devices of the ranks."""
        return self._choice.placement

    @property
    def backend(self) -> str:
        """Canonical name of the strategy: "fsdp2", never "fsdp"."""
        return self._choice.options.backend

    @property
    def options(self) -> strategies.Options:
        """Options of the backend; under auto, before the first prepare(), a placeholder."""
        return self._choice.options

    @property
    def hardware(self) -> strategies.Hardware:
        """Hardware of the ranks, as the strategies see it."""
        return self._choice.hardware

    @property
    def undecided(self) -> bool:
        """True if auto has not chosen yet: it chooses at the first `accelerator.prepare()`."""
        return self._choice.is_auto_pending

    def differing(self, **changes: Any) -> dict[str, tuple[object, object]]:
        """Return the options that would change: name -> (current, new).

        Raises:
            OptionError: a value that is not allowed.
        """
        if not changes:
            return {}
        return self._choice.diff(SessionConfig.from_options(self._with(changes), self._where))

    def _with(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the requested options with changes applied; the location cannot change."""
        self._where.check_changes(changes)
        stays = {name: value for name, value in changes.items() if name not in FIXED_OPTIONS}
        return config.merge_options(self._requested_options, stays)

    # -- life

    def start(self) -> Self:
        """Start the ranks; return when every rank has replied and passed a barrier.

        Raises:
            StartError: launcher or ranks failed to start; no process is left.
        """
        return self if self.state in {"ready", "running"} else self._start()

    @exclusive
    def _start(self) -> Self:
        if self.state in {"ready", "running"}:  # another thread started them meanwhile
            return self
        started, choice = time.monotonic(), self._choice
        notes = self._look_at_gpus(choice)
        self._saves.use_working_folder()
        starting = f"starting {self.describe()}"
        with self.operation.track("starting", starting), StatusLine() as line:
            line.show(f"nbdist: {starting}")
            try:
                self._choice = self._start_ranks(choice, lambda text: line.show(f"nbdist: {text}"))
            except KeyboardInterrupt:
                line.show("nbdist: start interrupted")
                msg = "Interrupted while ranks were starting. Run a cell to start them again."
                raise CellInterrupted(msg) from None
            ready = f"nbdist: {self.describe()}, ready in {time.monotonic() - started:.1f} s"
            notes += [warning for node in self.nodes for warning in node.machine.warnings]
            line.show(". ".join(filter(None, (ready, mixed_gpus_warning(self.nodes), *notes))))
        self._mark_ready()
        self.started_at = self.started_at or time.time()
        _set_current(self)
        return self

    def _look_at_gpus(self, choice: SessionConfig) -> list[str]:
        """Return warnings about this machine's GPUs; raise StartError if ranks cannot use one."""
        if choice.placement.is_remote:
            return []
        own = kernel_descendants() if choice.placement.devices else ()
        return check_usable(choice.placement, discovery.discover_machine(), own=own)

    def _start_ranks(self, choice: SessionConfig, progress: Callable[[str], None]) -> SessionConfig:
        """Start ranks; return the choice, updated with the GPUs found on cluster nodes."""
        placement = choice.placement
        self._where.set_distribution(placement)
        self._workers.acquire_launchers(placement.kind, placement.nproc, progress)
        self._where.nodes = self._workers.nodes
        try:
            choice = choice.with_node_hardware(self._where)
        except OptionError as error:
            self._workers.close()
            raise StartError(str(error)) from None
        self._workers.start(
            world_size=placement.nproc,
            devices=choice.visible_devices,
            options=choice.options.to_json(),
            auto=choice.auto if choice.is_auto_pending else None,
            hardware=choice.hardware.to_json(),
            checkpoints=self._saves.root_for_ranks,
            progress=progress,
        )
        self._look_at_checkpoints(new=self.started_at is None)
        return choice

    def _look_at_checkpoints(self, *, new: bool) -> None:
        """Check in the background that checkpoints can be saved; warn below the cell if not."""
        root, complain = self.checkpoints.root, session_checkpoints.make_async_warning()
        if isinstance(root, Path):
            self._workers.launcher_group.check_shared_folder_async(root, complain)
        elif new:
            session_checkpoints.check_writable_async(root, complain)

    def stop(self) -> None:
        """End ranks and launcher and remove the session's files.

        Waits up to a minute for a running save, and for a running command of the panel; an
        interrupt ends the wait for that command.
        """
        self._end_others()
        self._stop()

    @exclusive
    def _stop(self) -> None:
        self._saves.wait_for_running()
        self._profiler.abort("the session was stopped.")
        self._cells.fail_all(
            RankDied("The session was stopped. Run a %%distribute cell to start a new one.")
        )
        self._workers.close()
        self._no_more_saves("the session was stopped")
        self._where.close()
        self.state = "stopped"
        if current_session() is self:
            _set_current(None)
        callbacks, self._at_stop = self._at_stop, []
        for callback in callbacks:
            callback()

    def at_stop(self, callback: Callable[[], object]) -> None:
        """Call `callback` once, when the session has been stopped."""
        self._at_stop.append(callback)

    def restart(self, *, wait: bool = False, **changes: Any) -> Self:
        """Start new ranks, with changed options if given; variables of the old ranks are lost.

        Waits for a running command of the panel; an interrupt ends that wait. After a node failure
        the ranks start on the remaining nodes with a smaller world size; with `wait`, they start
        once as many nodes as before are available.

        Raises:
            OptionError: a value that is not allowed; the old ranks keep running.
            StartError: the new ranks failed to start.
        """
        if self._death is not None and not wait:
            changes = self._where.options_for_remaining_nodes(self.placement) | changes
        SessionConfig.from_options(
            self._with(changes), self._where
        )  # raises before the old ranks are ended
        self._end_others()
        return self._restart(**changes)

    @exclusive
    def _restart(self, **changes: Any) -> Self:
        self.num_restarts += 1
        self._configure(self._with(changes))
        self._saves.wait_for_running()
        self.abandon()
        self._workers.stop_ranks()
        self._no_more_saves("the ranks were restarted")
        self.state, self._cells.last_cell = "new", None
        self._saving.clear()
        self.events.reset(TrainingEvent(0, "restart", f"new ranks: {self.describe()}"))
        return self.start()

    def abandon(self) -> None:
        """Fail the running cell, because its ranks are about to be restarted.

        Callable from any thread, so that a restart is possible while a cell blocks.
        """
        self._profiler.abort("the ranks were restarted.")
        self._cells.fail_all(RankDied("The ranks were restarted; their variables are lost."))

    def give_up(self) -> None:
        """Cancel all waiting for the ranks, because they are about to be ended.

        Callable from any thread, so that ranks which hang in a command of the panel can be ended.
        """
        self.abandon()
        self._workers.cancel_waits()

    def _end_others(self) -> None:
        """Wait until other threads stop using the ranks; on an interrupt cancel their waiting."""
        show_wait_reason(self.operation, "; interrupt to end it")
        try:
            with self.lock:
                return
        except KeyboardInterrupt:
            self.give_up()

    def __enter__(self) -> Self:
        """Start the ranks."""
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the ranks."""
        self.stop()

    def _die(self, death: WorkerFailure) -> RankDied:
        """Record why the ranks ended; return the error with their last output and checkpoint."""
        self._death = death.to_error(
            log=self.logs[death.rank].tail(failure_causes.MAX_LOG_LINES)
            if death.rank is not None
            else "",
            checkpoint_hint=session_checkpoints.checkpoint_hint(
                self.checkpoints.newest(within_s=NEWEST_S)
            ),
            cells=self._cells.cell_numbers_by_file(),
        )
        self._ended_by_stop = death.by_stop
        self.state = "dead"
        self._saves.fail_running(self._death.headline)
        self._profiler.abort(self._death.headline)
        self._cells.fail_all(self._death)
        return self._death

    def replace_stopped_ranks(self) -> str:
        """Start new ranks if an interrupt ended the old ones; the caller holds `lock`.

        Returns:
            A description of what happened; "" if no interrupt ended the ranks.
        """
        death = self._death
        if death is None or not self._ended_by_stop:
            return ""
        self.restart()
        return f"{death.headline.partition(';')[0]}; all ranks were ended and new ranks started."

    def _notice(self, line: str) -> None:
        self._cells.print_line(line)

    def _no_more_saves(self, why: str) -> None:
        """Fail running saves after the ranks have ended, and remove their partial files."""
        self._saves.fail_running(f"{why} while it was written.")
        self._saves.remove_partial_saves()

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
        cell_source.check_code(code)
        options = ProfileOptions.parse(profile)
        chosen = rank_names.resolve_ranks(ranks, self.world_size)
        shown = self._shown(output)
        self._ensure_free()
        self.start()
        if options is not None:
            self._profiler.arm(options)
        pinned = FinishedCellSink()  # output stays below this notebook cell, also while others run
        screen = pinned if background else RunningCellSink()
        logs = {rank: self.logs[rank] for rank in chosen}
        renderer = OutputRenderer(screen, ranks=chosen, show=shown, logs=logs)
        cell = self._send_cell(code, chosen, renderer, count)
        if background:
            self._cells.background_cell = cell
            cell.detach(pinned)
        else:
            self._join(cell, pinned)
            cell.raise_errors()
        return CellResult(cell)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the running cell or the last background cell; return False on timeout.

        Raises:
            CellError: the cell raised on a rank; raised once.
            CellInterrupted: the wait was interrupted; the cell keeps running.
        """
        cell = self._cells.running_cell or self._cells.background_cell
        try:
            return cell is None or cell.joined or CellResult(cell).wait(timeout_s)
        except KeyboardInterrupt:
            msg = (
                "Stopped waiting. The cell keeps running in the background; use"
                " %nbdist interrupt to interrupt it."
            )
            raise CellInterrupted(msg) from None

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

    def _shown(self, output: str | Sequence[int]) -> ShownRanks:
        """Return the ranks whose output is displayed."""
        if output == "all":
            return "all"
        if output == "none":
            return "none"
        return frozenset(rank_names.resolve_ranks(output, self.world_size, option="--output"))

    def _send_cell(
        self, code: str, ranks: Sequence[int], renderer: OutputRenderer, count: int | None
    ) -> Cell:
        profiling = self._profiler.start_recording(ranks, None)
        cell = Cell(ranks, renderer, on_send=self._take_sent, on_done=self._cell_done)
        cell.code, cell.count = code, self._cells.next_cell_number(count)
        if profiling is not None:
            profiling.cell, profiling.sources = cell, self._cells.cell_sources(cell)
        self.state = "running"
        self._cells.send(cell, world_size=self.world_size, checkpoints=self._saves.root_for_ranks)
        return cell

    def _join(self, cell: Cell, afterwards: FinishedCellSink) -> None:
        """Show the cell's output until it has finished, then resynchronize the ranks if needed."""
        self._cells.join(cell, afterwards, owed=self._profiler.show_pending)
        problem = self._settle()
        if cell.is_interrupted:  # possibly by another thread
            words = f"but {problem}" if problem else "all variables are kept"
            raise CellInterrupted(f"Interrupted on all ranks; {words}.") from None

    def _settle(self) -> str:
        return self._cells.resync_ranks(world_size=self.world_size)

    def _ensure_alive(self) -> None:
        if os.getpid() != self._pid:
            msg = (
                "The session cannot be used in a forked process. Use it in the process that"
                " created it."
            )
            raise SessionError(msg)
        if self.state == "stopped":
            msg = "The session was stopped. Call start() to start new ranks."
            raise SessionError(msg)
        if self._death is not None:
            raise self._death

    def _ensure_free(self) -> None:
        self._ensure_alive()
        if self.running is not None:
            msg = (
                "A cell is still running on the ranks. Wait for it with %nbdist wait, interrupt it"
                " with %nbdist interrupt, or start new ranks with %nbdist restart."
            )
            raise SessionBusy(msg)
        while (request := self._workers.collective_request) is not None:
            if not request.finished.is_set():
                raise SessionBusy(request.busy_message())
            request.conclude()
        self._settle()  # a background cell may have left the ranks out of sync

    def _cell_done(self, cell: Cell) -> None:
        if self._cells.mark_done(cell) and self.state == "running":
            self.state = "ready"

    # -- messages, on the reader thread

    def _receive(self, rank: int, message: Message) -> None:
        content = message["content"]
        if message["header"]["msg_type"] == messages.METRICS_REPORT:
            self.metrics.add_rows(rank, content["rows"])
        elif message["header"]["msg_type"] == messages.AUTO_DECISION:
            chosen = strategies.Options.from_json(content["options"])
            self._choice = self._choice.with_auto_decision(chosen)
        elif message["header"]["msg_type"] == messages.SAVE_STATUS:
            self._take_saved(content)
        elif message["header"]["msg_type"] == messages.PROFILE_RESULT:
            self._profiler.add_rank_measurements(rank, content)
        elif message["header"]["msg_type"] == messages.PROGRESS:
            request = self._workers.collective_request
            show = self._profiler.update_progress if request is None else request.show_progress
            show(content["text"])

    def _take_saved(self, content: messages.SaveStatus) -> None:
        self._saves.update_status(content)
        if content["state"] == "running":  # the ranks have just copied their state
            self._saving[content["id"]] = TrainingEvent(
                self.metrics.last_step, "save", content["name"]
            )
            return
        mark = self._saving.pop(content["id"], None)
        if content["state"] == "done" and mark is not None:
            self.events.add(mark)

    def _on_idle(self) -> bool:
        """Watch running work; show output of background cells and late output of earlier ones."""
        self._cells.tick()
        if (request := self._workers.collective_request) is not None and self._death is None:
            request.tick()
        self._profiler.tick()
        return self._cells.render_background_output()

    def _take_sent(self, rank: int, name: str, path: str) -> None:
        """Bind a value of send() in the notebook while the cell is running."""
        value = push_pull.read_payload_file(rank, path, self._workers)[name]
        self.sent_values[name] = value
        cell_source.bind_variable(name, value)

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
        values = push_pull.pull_variables(
            names, chosen, self._workers, world_size=self.world_size, as_numpy=as_numpy
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

        def switched() -> None:
            self._requested_options, self._choice = requested, new_config
            self._mark_ready()

        report = operations_switch.switch_backend(
            self._workers,
            self._choice,
            new_config,
            reset_optimizer=reset_optimizer,
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
        with StatusLine() as line:
            change = resize.RankResize(
                workers=self._workers,
                before=self._choice,
                after=new_config,
                reset_optimizer=reset_optimizer,
                status_line=line,
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
        self.logs |= {rank: RankLog() for rank in range(self.world_size) if rank not in self.logs}
        return report

    def _mark_ready(self) -> None:
        self.state, self._death, self._ended_by_stop = "ready", None, False

    # -- checkpoints

    @property
    def checkpoints(self) -> Checkpoints:
        """Complete checkpoints in the session's folder or URL, newest last.

        Includes those of earlier sessions. Index by position or name:
        `checkpoints["base"].state_dict()`.
        """
        return self._saves.checkpoints

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
        request = SaveRequest(
            root=location_with_password(root), name=name, overwrite=overwrite, keep=keep
        )
        with self.operation.track("saving", f"copying the state for checkpoint {name}"):
            save = self._saves.start_save(request, self._workers, self.world_size)
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
        with self.operation.track("loading", f"loading {last}"):
            report = operations_load.load_checkpoint(
                self._workers, self.world_size, last, root, weights_only=weights_only
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
        request = operations_export.make_export_request(
            folder, dtype, model=model, max_shard_size=max_shard_size, overwrite=overwrite
        )
        self._ensure_free()
        self.start()
        self._workers.launcher_group.check_shared_folder(Path(request.folder).parent)
        with self.operation.track("exporting", f"exporting to {folder}"):
            return operations_export.export(self._workers, self.world_size, request)

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
        with self.operation.track("loading", f"loading {path}"):
            return import_checkpoint.import_checkpoint(
                self._workers, self.world_size, path, trust=trust, model=model
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

    @property
    def profiles(self) -> list[Profile]:
        """Profiles of this session, newest last."""
        return self._profiler.profiles

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
                self.world_size,
                options=self.options,
                hardware=self.hardware,
                cluster=planner.cluster_spec(self),
                disk=disk,
            )

    # -- state

    @property
    def nodes(self) -> list[SessionNode]:
        """Cluster nodes of the ranks with their hardware; empty locally."""
        return self._workers.nodes

    def nodes_now(self, within_s: float = 1.0) -> dict[str, UsageSnapshot]:
        """Return the current usage of each node, by name.

        Works while a cell runs. Nodes that do not reply within `within_s` seconds are left out.
        """
        return self._workers.node_usage(within_s)

    def status(self) -> dict[str, Any]:
        """Return the state of session and ranks as plain values."""
        gone = self._workers.exited_ranks()
        members = [
            {
                "rank": rank,
                "pid": member.pid,
                "device": member.device,
                "node": self._workers.node_of(rank),
                "alive": rank not in gone,
                "unresponsive": self._workers.stopped_process_watch.describe(f"rank {rank}"),
            }
            for rank, member in enumerate(self._workers.rank_processes)
        ]
        launchers = self._workers.launcher_states
        return {
            "state": self.state,
            "standstill": self.standstill,
            "world_size": self.world_size,
            "options": self.options.to_json(),
            "launcher": launchers[0] if launchers else None,
            "launchers": launchers,
            "ranks": members,
        }

    def describe(self) -> str:
        """Return ranks and strategy in a few words: "2 CPU ranks (no GPU found), ddp"."""
        return self._choice.describe()

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
        panel_hook.panel().show_panel(self, face)

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
        return panel_hook.panel().static_mime_bundle(self)


_current: list[Session | None] = [None]


def current_session() -> Session | None:
    """Return the session that was started last and not stopped, or None."""
    return _current[0]


def _set_current(session: Session | None) -> None:
    _current[0] = session
