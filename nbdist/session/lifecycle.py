"""Life of a session's ranks: options, start, restart, stop, and their unexpected end.

Runs in the notebook's kernel, on the thread that uses the ranks; the worker group calls the last
methods on its reader thread. `Session` adds what users do with running ranks.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from nbdist import strategies
from nbdist._version import __version__
from nbdist.cluster.allocation import RankDistribution
from nbdist.cluster.node_group import ClusterLauncherProvider
from nbdist.cluster.run_dir import kernel_descendants
from nbdist.errors import (
    CellInterrupted,
    OptionError,
    RankDied,
    SessionBusy,
    SessionError,
    StartError,
)
from nbdist.hardware import discovery
from nbdist.output.replay import RankLogTail
from nbdist.output.sink import finished_cell, get_shell
from nbdist.protocol import messages
from nbdist.session import checkpoints, config, failure_causes, push_pull, startup
from nbdist.session.cell_history import CellHistory
from nbdist.session.cell_runner import CellRunner
from nbdist.session.collective_request import CollectiveRequest
from nbdist.session.config import FIXED_OPTIONS, SessionCluster, SessionConfig
from nbdist.session.device_placement import check_usable, mixed_gpus_warning
from nbdist.session.metrics import Metrics, TrainingEvent, TrainingEvents
from nbdist.session.profiler import SessionProfiler
from nbdist.session.progress import CurrentOperation, StatusLine, show_wait_reason
from nbdist.session.rank_activity import PreparedModelPoller, RankActivityPoller
from nbdist.session.save_on_termination import RunTermination
from nbdist.session.tracking import TrackedRun, Tracker
from nbdist.session.worker_group import WorkerGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.cluster.node_group import LauncherProvider
    from nbdist.cluster.rank_channels import Message
    from nbdist.hardware.discovery import SessionNode
    from nbdist.hardware.telemetry import NodeUsage
    from nbdist.profiler.profile import Profile
    from nbdist.session.cell import Cell
    from nbdist.session.checkpoints import Checkpoints
    from nbdist.session.device_placement import DevicePlacement
    from nbdist.session.failure_causes import WorkerFailure

SessionState = Literal["new", "ready", "running", "dead", "stopped"]
SETTLE_S = 0.3
"""Time for the launcher to report that a rank has exited."""
LIST_S = 1.0
"""Timeout for listing checkpoints after ranks have died: the file system may hang."""


current: list[SessionLifecycle | None] = [None]
"""The session that was started last and not stopped."""


class SessionLifecycle:
    """Ranks of a session, from their options to their end.

    Args:
        provider: provider of launchers on this machine.
        checkpoint_root: where checkpoints are saved; None for the default folder.
        requested: the given options of `strategies.SessionOptions`.
        tracker: experiment tracker that gets the metrics, such as "tensorboard:runs".

    Raises:
        OptionError: a value that is not allowed, or that the backend does not support.
        StartError: the cluster is not reachable or too small.
        CheckpointError: a URL that fsspec does not support, or whose package is missing.
    """

    def __init__(
        self,
        provider: LauncherProvider,
        checkpoint_root: str | os.PathLike[str] | None,
        requested: Mapping[str, Any],
        tracker: str | None = None,
    ) -> None:
        requested = config.expand_config_file(requested)
        self.lock = threading.RLock()
        """Held by the thread that uses the ranks; `interrupt` and `status` do not need it."""
        self.num_restarts = 0
        """Number of restarts; written while holding `lock`."""
        self.operation = CurrentOperation()
        """The current long operation besides cells, and its progress."""
        self.events = TrainingEvents()
        self.history = CellHistory()
        self.started_at: float | None = None
        """Unix time of the first start, in seconds."""
        self.sent_values: dict[str, Any] = {}
        """Values of send(), by name."""
        self.state = "new"
        self._death: RankDied | None = None
        self._ended_by_stop = False
        """True if the ranks were ended by an interrupt."""
        self._terminated_generation: int | None = None
        """Generation of the ranks that were asked to end last."""
        self._pid = os.getpid()
        self._at_stop: list[Callable[[], object]] = []
        self._saves = checkpoints.BackgroundSaves(checkpoint_root)
        self._tracker = None if tracker is None else Tracker.parse(tracker)
        self._run: TrackedRun | None = None
        self._saving: dict[str, TrainingEvent] = {}
        """Events of saves that are not finished."""
        self._where = SessionCluster(requested)
        cluster = self._where.cluster
        self._workers = WorkerGroup(
            provider if cluster is None else ClusterLauncherProvider(cluster),
            on_message=self._receive,
            on_idle=self._on_idle,
            on_death=self._record_death,
            on_notice=lambda line: self._cells.print_line(line),  # noqa: PLW0108 - made below
            on_termination=self._on_termination,
        )
        self.rank_activity = RankActivityPoller(self._workers)
        self.model_query = PreparedModelPoller(self._workers)
        self._profiler = SessionProfiler(self._workers)
        self._cells = CellRunner(
            self._workers, self.rank_activity, self._profiler, on_send=self._bind_sent_value
        )
        self._termination = RunTermination(self._workers, self._cells, self._saves, self.lock)
        try:
            self._configure(
                {name: value for name, value in requested.items() if name not in FIXED_OPTIONS}
            )
        except BaseException:
            self._where.close()
            raise

    # -- options

    def _configure(self, options: Mapping[str, Any]) -> None:
        self._requested_options = dict(options)
        self._choice = SessionConfig.from_options(options, self._where)
        self.metrics = Metrics(self.world_size)
        self.logs = {rank: RankLogTail() for rank in range(self.world_size)}

    def _options_with(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the requested options with changes applied; the location cannot change."""
        changes = config.expand_config_file(changes)
        self._where.check_changes(changes)
        stays = {name: value for name, value in changes.items() if name not in FIXED_OPTIONS}
        return config.merge_options(self._requested_options, stays)

    def differing(self, **changes: Any) -> dict[str, tuple[object, object]]:
        """Return the options that would change: name -> (current, new).

        Raises:
            OptionError: a value that is not allowed.
        """
        if not changes:
            return {}
        return self._choice.diff(
            SessionConfig.from_options(self._options_with(changes), self._where)
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._choice.placement.nproc

    @property
    def on(self) -> str:
        """Where the ranks run: "local", "ray", "ray://HOST:PORT", "slurm"."""
        return self._where.on

    @property
    def python(self) -> str:
        """Python interpreter of ranks on this machine."""
        return self._where.python.executable

    @property
    def place(self) -> str:
        """Ranks and devices, such as "2 CPU ranks (no GPU found)"."""
        return self._choice.describe_devices

    @property
    def placement(self) -> DevicePlacement:
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

    # -- state

    @property
    def state(self) -> SessionState:
        """State of the ranks; "running" while a cell runs on them."""
        return "running" if self._state == "ready" and self.running is not None else self._state

    @state.setter
    def state(self, state: SessionState) -> None:
        self._state = state
        self._state_since = time.time()

    @property
    def state_since(self) -> float:
        """Unix time of the last state change, in seconds."""
        return max(self._state_since, self._cells.changed_at)

    @property
    def running(self) -> Cell | None:
        """The running cell, or None."""
        return self._cells.running_cell

    @property
    def last(self) -> Cell | None:
        """The cell that finished last, or None."""
        return self._cells.last_cell

    @property
    def _collective_request(self) -> CollectiveRequest[Any, Any] | None:
        """The request that all ranks are working on, or None."""
        request = self._workers.collective_request
        return request if isinstance(request, CollectiveRequest) else None

    @property
    def standstill(self) -> str:
        """Which ranks block others and which do not respond; "" if there are none."""
        work = self.running or self._collective_request
        return "" if work is None else work.notice

    @property
    def death(self) -> RankDied | None:
        """The error with which the ranks ended, or None."""
        return self._death

    @property
    def nodes(self) -> list[SessionNode]:
        """Cluster nodes of the ranks with their hardware; empty locally."""
        return self._workers.nodes

    def nodes_now(self, within_s: float = 1.0) -> dict[str, NodeUsage]:
        """Return the current usage of each node, by name.

        Works while a cell runs. Nodes that do not reply within `within_s` seconds are left out.
        """
        return self._workers.node_usage(within_s)

    def status(self) -> dict[str, Any]:
        """Return the state of session and ranks as plain values."""
        exited = self._workers.exited_ranks()
        members = [
            {
                "rank": rank,
                "pid": member.pid,
                "device": member.device,
                "node": self._workers.node_of(rank),
                "alive": rank not in exited,
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

    @property
    def profiles(self) -> list[Profile]:
        """Profiles of this session, newest last."""
        return self._profiler.profiles

    @property
    def checkpoints(self) -> Checkpoints:
        """Complete checkpoints in the session's folder or URL, newest last.

        Includes those of earlier sessions. Index by position or name:
        `checkpoints["base"].state_dict()`.
        """
        return self._saves.checkpoints

    def describe(self) -> str:
        """Return ranks and strategy in a few words: "2 CPU ranks (no GPU found), ddp"."""
        return self._choice.describe()

    def _ensure_alive(self) -> None:
        if os.getpid() != self._pid:
            raise SessionError(
                "The session cannot be used in a forked process. Use it in the process that"
                " created it."
            )
        if self.state == "stopped":
            raise SessionError("The session was stopped. Call start() to start new ranks.")
        if self._death is not None:
            raise self._death

    def _ensure_free(self) -> None:
        self._ensure_alive()
        if self.running is not None:
            raise SessionBusy(
                "A cell is still running on the ranks. Wait for it with %nbdist wait, interrupt it"
                " with %nbdist interrupt, or start new ranks with %nbdist restart."
            )
        while (request := self._collective_request) is not None:
            if not request.finished.is_set():
                raise SessionBusy(request.busy_message())
            request.conclude()
        self._termination.finish_saved_deadline()
        if cause := self._termination.cause:
            raise SessionError(f"{cause}: the ranks were stopped, and a checkpoint is being saved.")
        # A background cell may have left the ranks out of sync.
        self._cells.resync_ranks()

    # -- life

    def start(self) -> Self:
        """Start the ranks; return when every rank has replied and passed a barrier.

        Raises:
            StartError: launcher or ranks failed to start; no process is left.
        """
        if self.state in {"ready", "running"}:
            return self
        show_wait_reason(self.operation)
        with self.lock:
            if self.state not in {"ready", "running"}:  # another thread may have started them
                self._start()
        return self

    def _start(self) -> None:
        started, choice = time.monotonic(), self._choice
        notes: list[str] = []
        if not choice.placement.is_remote:
            own = kernel_descendants() if choice.placement.devices else ()
            notes += check_usable(choice.placement, discovery.discover_machine(), own=own)
        self._saves.use_working_folder()
        starting = f"starting {self.describe()}"
        with self.operation.track("starting", starting), StatusLine() as line:
            line.show(starting)
            try:
                self._choice = self._start_ranks(choice, line.show)
            except KeyboardInterrupt:
                line.show("start interrupted")
                msg = "Interrupted while ranks were starting. Run a cell to start them again."
                raise CellInterrupted(msg) from None
            ready = f"{self.describe()}, ready in {time.monotonic() - started:.1f} s"
            notes += filter(None, [self._where.python.describe_difference()])
            notes += [warning for node in self.nodes for warning in node.machine.warnings]
            if self.started_at is None:
                newest = self.checkpoints.newest(within_s=LIST_S)
                notes += [checkpoints.resume_hint(newest)]
            notes.append(choice.options.unplanned_note)
            line.show(". ".join(filter(None, (ready, mixed_gpus_warning(self.nodes), *notes))))
        self._mark_ready()
        self._termination.start()
        self._start_tracked_run()
        self.started_at = self.started_at or time.time()
        current[0] = self

    def _mark_ready(self) -> None:
        self.state, self._death, self._ended_by_stop = "ready", None, False

    def _start_ranks(self, choice: SessionConfig, progress: Callable[[str], None]) -> SessionConfig:
        """Start ranks; return the choice, updated with the GPUs found on cluster nodes."""
        placement = choice.placement
        if (cluster := self._where.cluster) is not None:
            each = placement.nproc // placement.num_nodes
            cluster.distribution = RankDistribution(placement.kind, placement.num_nodes, each)
        self._workers.acquire_launchers(
            placement.kind, placement.nproc, progress, self._where.python
        )
        self._where.nodes = self._workers.nodes
        try:
            choice = choice.with_node_hardware(self._where)
            checkpoint_root = self._saves.root_for_ranks
            self._workers.launch(choice, checkpoints=checkpoint_root, progress=progress)
            ready = startup.wait_until_ready(self._workers, placement.nproc, progress)
            self._workers.mark_ready(ready)
        except OptionError as error:
            self._workers.close()
            raise StartError(str(error)) from None
        except BaseException:
            self._workers.close()
            raise
        self._check_checkpoint_root_async(new=self.started_at is None)
        return choice

    def track_to(self, tracker: str | None) -> None:
        """Write what `report()` sends to a new run of an experiment tracker.

        Args:
            tracker: tensorboard:DIR, trackio:PROJECT, wandb:PROJECT or mlflow:EXPERIMENT. None:
                finish the run.

        Raises:
            OptionError: another value, or the tracker's package is not installed.
        """
        self._tracker = None if tracker is None else Tracker.parse(tracker)
        if self.state in {"ready", "running"}:
            self._start_tracked_run()

    def _start_tracked_run(self) -> None:
        """Finish the run of earlier ranks and start one, if metrics are tracked."""
        if self._run is not None:
            self._run.close(wait=False)
        self._run = (
            None
            if self._tracker is None
            else TrackedRun(self._tracker, self.metrics, self.events, self._tracked_config)
        )

    def _tracked_config(self) -> dict[str, Any] | None:
        if self.undecided:
            return None
        ranks = {"ranks": self.world_size, "devices": self.place}
        return {"nbdist": __version__, **ranks, **self.options.to_json()}

    def _check_checkpoint_root_async(self, *, new: bool) -> None:
        """Check in the background that checkpoints can be saved; warn below the cell if not."""
        root, screen = self.checkpoints.root, finished_cell()

        def on_warning(reason: str) -> None:
            screen.write("stderr", f"nbdist: save() would fail: {reason}\n")
            screen.flush()

        if isinstance(root, Path):
            self._workers.launcher_group.check_shared_folder_async(root, on_warning)
        elif new:
            checkpoints.check_writable_async(root, on_warning)

    def stop(self) -> None:
        """End ranks and launcher and remove the session's files.

        Waits up to a minute for a running save, and for a running command of the panel; an
        interrupt ends the wait for that command.
        """
        self._end_others()
        show_wait_reason(self.operation)
        with self.lock:
            self._saves.wait_for_running()
            self._profiler.abort("the session was stopped.")
            self._cells.fail_all(
                RankDied("The session was stopped. Run a %%distribute cell to start a new one.")
            )
            self._termination.close()
            self._workers.close()
            if self._run is not None:
                self._run.close()
                self._run = None
            self._fail_running_saves("the session was stopped")
            self._where.close()
            self.state = "stopped"
            if current[0] is self:
                current[0] = None
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
        # Raises before the old ranks are ended.
        SessionConfig.from_options(self._options_with(changes), self._where)
        self._end_others()
        show_wait_reason(self.operation)
        with self.lock:
            self.num_restarts += 1
            self._saves.wait_for_running()
            self.abandon()
            self._termination.close()
            self._workers.stop_ranks()
            self._configure(self._options_with(changes))
            self._fail_running_saves("the ranks were restarted")
            self.state, self._cells.last_cell = "new", None
            self._saving.clear()
            self.history.clear()
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
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _record_death(self, death: WorkerFailure) -> RankDied:
        """Record why the ranks ended; return the error with their last output and checkpoint."""
        self._death = death.to_error(
            log=self.logs[death.rank].tail(failure_causes.MAX_LOG_LINES)
            if death.rank is not None
            else "",
            checkpoint_hint=checkpoints.checkpoint_hint(self.checkpoints.newest(within_s=LIST_S)),
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
        return f"{death.headline.partition(';')[0]}; all ranks were replaced by new ones."

    def _on_termination(self, notice: messages.TerminationNotice) -> None:
        """Save and end the ranks, because one of their processes was asked to end."""
        generation = self._workers.generation
        if self._terminated_generation == generation:
            return  # by the notice of another rank
        self._terminated_generation = generation
        arguments = (notice, generation)
        threading.Thread(target=self._end_terminated, args=arguments, daemon=True).start()

    def _end_terminated(self, notice: messages.TerminationNotice, generation: int) -> None:
        time.sleep(SETTLE_S)
        if self._workers.rank_exits or self._workers.generation != generation:
            return  # torch elastic sends SIGTERM to the peers of a rank that has exited
        grace_s = notice.grace_s or messages.TERMINATION_GRACE_S
        self._termination.end(notice.cause, grace_s=grace_s)
        if self._workers.generation == generation:  # else a restart has replaced them meanwhile
            self._workers.end("", notice.cause, by_stop=False)
        with self.lock:
            if self._workers.generation == generation:
                if self._death is not None:
                    self._workers.close()
                self._termination.close()
            self._termination.finish()

    def _fail_running_saves(self, reason: str) -> None:
        """Fail running saves after the ranks have ended, and remove their partial files."""
        self._saves.fail_running(f"{reason} while it was written.")
        self._saves.remove_partial_saves()

    # -- messages, on the reader thread

    def _receive(self, rank: int, message: Message) -> None:
        content = message["content"]
        if message["header"]["msg_type"] == messages.METRICS_REPORT:
            self.metrics.add_rows(rank, content["rows"])
        elif message["header"]["msg_type"] == messages.AUTO_DECISION:
            chosen = strategies.Options(**content["options"])
            self._choice = self._choice.with_auto_decision(chosen)
        elif message["header"]["msg_type"] == messages.SAVE_STATUS:
            self._on_save_status(content)
        elif message["header"]["msg_type"] == messages.TERMINATION:
            self._on_termination(messages.TerminationNotice(f"SIGTERM to rank {rank}"))
        elif message["header"]["msg_type"] == messages.DEBUG_EVENT:
            self._cells.visual_debugger.on_event(rank, content)
        elif message["header"]["msg_type"] == messages.PROFILE_RESULT:
            self._profiler.add_rank_measurements(rank, content)
        elif message["header"]["msg_type"] == messages.PROGRESS:
            request = self._collective_request
            show = self._profiler.update_progress if request is None else request.show_progress
            show(content["text"])

    def _on_save_status(self, content: messages.SaveStatus) -> None:
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
        if (request := self._collective_request) is not None and self._death is None:
            request.escalation.tick()
        self._profiler.tick()
        return self._cells.render_background_output()

    def _bind_sent_value(self, rank: int, name: str, path: str) -> None:
        """Bind a value of send() in the notebook while the cell is running."""
        value = push_pull.read_payload_file(rank, path, self._workers)[name]
        self.sent_values[name] = value
        if (shell := get_shell()) is not None:  # not in a script
            shell.push({name: value})
