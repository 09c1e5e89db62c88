"""The processes of a session, seen from the kernel: launcher, channels, ranks.

A worker group, as in torch elastic: ranks start and end together. Starts, ends and watches them,
and routes requests to ranks and their replies back.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

import psutil

from nbdist import rank_python
from nbdist.cluster.launcher_process import (
    EXITED,
    STOPPED_STATUSES,
    CrashArtifacts,
    remove_launch_variables,
)
from nbdist.cluster.local_launcher import LAUNCHER_GONE
from nbdist.errors import RankDied, SessionError, StartError
from nbdist.hardware import discovery
from nbdist.protocol import messages
from nbdist.protocol.signing import KEY_BYTES
from nbdist.redaction import redact_secrets
from nbdist.session import failure_causes
from nbdist.session.failure_causes import OomKillCounter, StoppedProcessWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from nbdist.cluster.allocation import DeviceType
    from nbdist.cluster.launcher_process import RankProcess
    from nbdist.cluster.node_group import LauncherGroup, LauncherProvider
    from nbdist.cluster.rank_channels import Channel, Message, RankChannels
    from nbdist.errors import NbdistError
    from nbdist.hardware.discovery import SessionNode
    from nbdist.hardware.telemetry import NodeUsage
    from nbdist.rank_python import RankPython
    from nbdist.session.config import SessionConfig
    from nbdist.session.failure_causes import WorkerFailure

STOP_TIMEOUT_S = 15.0
REQUEST_TIMEOUT_S = 600.0
"""Timeout for a reply or progress message of a request.

A rank may copy many gigabytes before it replies to push or pull."""
LIVENESS_INTERVAL_S = 0.7
"""Interval at which the ranks' processes are checked."""
REPORT_S = 0.8
"""Timeout for the launcher's report of an exited rank."""
SETTLE_S = 0.3
"""Delay after the first exit, to collect its last output and further exits."""


State = Literal["stopped", "running", "sleeping", ""]
"""State of a process that does not reply; "" if unknown, as on another node."""


class WorkerGroup:
    """Ranks that start and end together.

    Args:
        launcher_provider: provider of launchers.
        on_message: called with messages that belong to no request (report, late output).
        on_idle: called on the reader thread periodically; returns True to be called more often.
        on_death: called once when ranks or launcher end unexpectedly; returns the error.
        on_notice: called with a line when a process stops replying, and when it replies again.
        on_termination: called when a launcher or agent received SIGTERM.
    """

    def __init__(
        self,
        launcher_provider: LauncherProvider,
        *,
        on_message: Callable[[int, Message], None],
        on_idle: Callable[[], bool],
        on_death: Callable[[WorkerFailure], RankDied],
        on_notice: Callable[[str], None],
        on_termination: Callable[[messages.TerminationNotice], None],
    ) -> None:
        self.rank_processes: list[RankProcess] = []
        self.pids: dict[int, int] = {}
        """Process id of each rank, including ranks that are still starting."""
        self.nodes: list[SessionNode] = []
        """Cluster nodes of the last start; empty locally."""
        self.stopped_process_watch = StoppedProcessWatch()
        self._launcher_provider = launcher_provider
        self._on_notice, self._on_termination = on_notice, on_termination
        self._on_message, self._on_idle, self._on_death = on_message, on_idle, on_death
        self._launcher_group: LauncherGroup | None = None
        self._channels: RankChannels | None = None
        self.generation = 0
        """Number of the last start."""
        self._routes: dict[str, tuple[Any, bool]] = {}
        """By id of a request: what is called with replies, and whether once for equal ones."""
        self.startup_events: SimpleQueue[Any] = SimpleQueue()
        """Messages of launcher and ranks while they start."""
        self._lock = threading.Lock()
        self._ended: messages.AllRanksExited | None = None
        """The last exit that the launcher reported, of any generation."""
        self._is_running = self._is_ending = False
        self._end_known = threading.Event()
        """Set when the cause of the ranks' end is known."""
        self.collective_request: object = None
        """The current `session.collective_request.CollectiveRequest`, which sets it, or None."""
        self._end_error: RankDied | None = None
        self.rank_exits: list[messages.RankExited] = []
        """Exits of ranks of this generation, in order."""
        self._first_end_at = 0.0
        self._missing_since: float | None = None
        self._watch_due = 0.0
        self._last_progress_at = 0.0
        """Time of the last progress message of a long request."""

    # -- life

    def launch(
        self, config: SessionConfig, *, checkpoints: str, progress: Callable[[str], None]
    ) -> None:
        """Have the acquired launchers fork the ranks; `session.startup` waits for them.

        Raises:
            StartError: a launcher has exited.
        """
        self._oom = OomKillCounter()
        launchers = self.launcher_group
        if not launchers.is_warm:
            progress("the launcher is warming up")
        self.generation += 1
        self._end_error = self._missing_since = None
        self.startup_events, self.rank_exits, self.pids = SimpleQueue(), [], {}
        self.stopped_process_watch = StoppedProcessWatch()
        launchers.listener = self._from_launcher
        placement, auto = config.placement, config.auto if config.is_auto_pending else None
        launch = messages.LaunchRanksRequest(
            generation=self.generation,
            world_size=placement.nproc,
            devices=None if placement.devices is None else list(placement.visible_devices),
            options=config.options.to_json(),
            auto=None if auto is None else dict(auto),
            hardware=config.hardware.to_json(),
            machines=discovery.nodes_to_json(self.nodes),
            run_dir="",
            bulk_dir="",
            env=remove_launch_variables(os.environ),
            cwd=os.getcwd(),  # noqa: PTH109 - a plain string for the wire
            path=sys.path,
            checkpoints=checkpoints,
        )
        self._channels = launchers.launch(launch, secrets.token_hex(KEY_BYTES), self)

    def mark_ready(self, processes: list[RankProcess]) -> None:
        """Set the processes of the launched ranks, all of which are ready; watch them."""
        self.rank_processes, self._is_running = processes, True

    def acquire_launchers(
        self,
        kind: DeviceType,
        world_size: int,
        progress: Callable[[str], None],
        python: RankPython = rank_python.KERNEL_PYTHON,
    ) -> LauncherGroup:
        """Acquire launchers for this many ranks; sets `nodes`.

        Raises:
            StartError: not enough resources; no process is left.
        """
        if self._launcher_group is None or not self._launcher_group.can_start(kind, world_size):
            self.close()
            self._launcher_group = self._launcher_provider.acquire_launchers(
                kind, world_size, progress, python
            )
        self.nodes = self._launcher_group.nodes_for(world_size)
        return self._launcher_group

    def stop_ranks(self) -> None:
        """End the ranks and wait until they have exited; the launcher stays warm."""
        self._is_running = False
        self._close_channels()
        launchers = self._launcher_group
        if launchers is None or not launchers.is_alive:
            return
        exit_messages: SimpleQueue[messages.LauncherMessage] = SimpleQueue()
        launchers.listener = exit_messages.put
        launchers.resume_stopped()
        if self._ended is not None and self._ended.generation == self.generation:
            return  # already exited: the launcher will not report again
        try:
            launchers.send(messages.StopRanksRequest())
            while not isinstance(
                message := exit_messages.get(timeout=STOP_TIMEOUT_S), messages.AllRanksExited
            ):
                pass
            self._ended = message
            if message.generation == LAUNCHER_GONE:
                self.close()  # it ended with its ranks, or could not end them all
        except (Empty, StartError):
            self.close()  # it does not reply or has exited: end it with its ranks

    def cancel_waits(self) -> None:
        """Cancel all waiting for replies, on any thread; the ranks are ended next."""
        self._is_running = False

    def end(self, process_name: str, cause: str, *, by_stop: bool = True) -> None:
        """End ranks as a failure; callable from any thread.

        Args:
            process_name: what did not stop, or was terminated.
            cause: what it did.
            by_stop: an interrupt ended them, so that new ranks are started.
        """
        self._report_death(
            None,
            failure_causes.WorkerFailure(
                process_name=process_name, exit_description=cause, by_stop=by_stop
            ),
        )

    def close(self) -> None:
        """End ranks and launcher and remove their files."""
        self._is_running = False
        self._close_channels()
        if self._launcher_group is not None:
            self._launcher_group.close()
            self._launcher_group = None

    def _close_channels(self) -> None:
        if self._channels is not None:
            self._channels.close()
            self._channels = None
        self._routes.clear()
        self.rank_processes = []
        self.collective_request = None

    def set_folder_cleanup(self, folder: Path, *, remove: bool = True) -> None:
        """Set whether the launcher removes a folder when this kernel exits."""
        if self._launcher_group is not None and self._launcher_group.is_alive:
            self._launcher_group.send(messages.CleanupFolderRequest(str(folder), remove))

    # -- requests

    @property
    def world_size(self) -> int:
        """Number of ranks that are ready."""
        return len(self.rank_processes)

    @property
    def launcher_group(self) -> LauncherGroup:
        """Launchers of the ranks.

        Raises:
            SessionError: not started.
        """
        if self._launcher_group is None:
            raise _not_started()
        return self._launcher_group

    @property
    def is_warm(self) -> bool:
        """True if the launcher can fork immediately."""
        return self._launcher_group is not None and self._launcher_group.is_warm

    @property
    def launcher_states(self) -> list[dict[str, Any]]:
        """States of the launchers as plain values, one per node."""
        launchers = [] if self._launcher_group is None else self._launcher_group.describe()
        return [
            {**launcher, "unresponsive": self.stopped_process_watch.describe(launcher["name"])}
            for launcher in launchers
        ]

    def exited_ranks(self) -> list[int]:
        """Return the ranks whose processes have exited."""
        members = dict(enumerate(self.rank_processes))
        if self._launcher_group is None or not members:
            return list(members)
        statuses = self._launcher_group.process_statuses(members)
        return [rank for rank in members if statuses[f"rank {rank}"].status == EXITED]

    def state_of(self, rank: int) -> State:
        """Return whether a rank's process is stopped, running or sleeping; "" if unknown."""
        status = self.stopped_process_watch.status(f"rank {rank}")
        if status in STOPPED_STATUSES:
            return "stopped"
        if self.node_of(rank):  # agents report only stopped processes
            return ""
        return "running" if status == psutil.STATUS_RUNNING else "sleeping"

    def node_of(self, rank: int) -> str:
        """Return the name of a rank's node; "" locally."""
        return "" if self._launcher_group is None else self._launcher_group.node_of(rank)

    def node_usage(self, within_s: float) -> dict[str, NodeUsage]:
        """Return the usage of each node that replies in time."""
        launchers = self._launcher_group
        return (
            launchers.node_usage(within_s) if launchers is not None and launchers.is_alive else {}
        )

    def send_request(
        self,
        ranks: Sequence[int],
        channel: Channel,
        kind: str,
        content: Any,
        route: Any = None,
        *,
        note: messages.CellMetadata | None = None,
    ) -> str:
        """Have the reader thread send one request to ranks; callable from any thread.

        `route(rank, channel, message)` is called with each reply; with a `note`, for a cell,
        `route(ranks, channel, message)`, once for equal replies.

        Returns:
            Its id, for `drop_requests`.
        """
        if self._channels is None:
            raise _not_started()
        request = secrets.token_hex(16)
        if route is not None:
            self._routes[request] = route, note is not None
        metadata = {messages.CELL_METADATA_KEY: note} if note else None
        self._channels.send_request(
            ranks, channel, kind, content, metadata=metadata, message_id=request
        )
        return request

    def send_comm_message(self, rank: int, request: str, message: Message) -> None:
        """Send the front end's message for a widget to a rank, from any thread.

        The rank's output of its callback belongs to `request`, the cell that shows the widget.
        """
        if self._channels is None:
            raise _not_started()
        self._channels.send_request(
            [rank],
            "control",
            message["header"]["msg_type"],
            message["content"],
            metadata=message["metadata"],
            message_id=request,
            buffers=message["buffers"],
        )

    def drop_requests(self, requests: Iterable[str]) -> None:
        """Stop routing replies to these requests."""
        for request in requests:
            self._routes.pop(request, None)

    def request_all(
        self,
        ranks: Iterable[int],
        kind: str,
        content: Any,
        *,
        channel: Channel = "shell",
        raises: type[NbdistError] = SessionError,
        patience_s: float = REQUEST_TIMEOUT_S,
    ) -> dict[int, Any]:
        """Send one request to ranks and return the replies, by rank; as `request_each`."""
        contents = dict.fromkeys(ranks, content)
        return self.request_each(
            contents, kind, channel=channel, raises=raises, patience_s=patience_s
        )

    def request_each(
        self,
        contents: Mapping[int, Any],
        kind: str,
        *,
        channel: Channel = "shell",
        raises: type[NbdistError] = SessionError,
        patience_s: float = REQUEST_TIMEOUT_S,
    ) -> dict[int, Any]:
        """Send each rank its own request and return the replies, by rank.

        On the control channel ranks reply while a cell runs. The first error reply ends the wait.
        For collective requests use `session.collective_request`.

        Raises:
            NbdistError: of type `raises`: the request failed on a rank.
            RankDied: a rank ended before it replied.
            SessionError: no reply or progress message for `patience_s`.
        """
        answers: SimpleQueue[tuple[int, str, Message]] = SimpleQueue()
        groups: dict[int, list[int]] = {}  # ranks with the same content get one message
        for rank, content in contents.items():
            groups.setdefault(id(content), []).append(rank)
        requests = [
            self.send_request(
                ranks, channel, kind, contents[ranks[0]], lambda *answer: answers.put(answer)
            )
            for ranks in groups.values()
        ]
        replies: dict[int, Any] = {}
        try:
            while len(replies) < len(contents):
                rank, answered_on, message = self._next_reply(answers, kind, patience_s)
                if answered_on == channel:
                    replies[rank] = message["content"]
                    if replies[rank].get("status") == "error":
                        raise raises(replies[rank]["error"])
        finally:
            self.drop_requests(requests)
        return replies

    def answers_within(
        self, timeout_s: float, ranks: Sequence[int], kind: str, content: Any
    ) -> Iterator[tuple[int, Channel, Message]]:
        """Send a request on the control channel; yield what arrives for it until the timeout.

        Yields:
            Rank, channel and message.

        Raises:
            SessionError: the ranks have ended.
        """
        answers: SimpleQueue[tuple[int, Channel, Message]] = SimpleQueue()
        request = self.send_request(
            ranks, "control", kind, content, lambda *answer: answers.put(answer)
        )
        deadline = time.monotonic() + timeout_s
        try:
            with contextlib.suppress(Empty):
                while True:
                    yield answers.get(timeout=max(0.0, deadline - time.monotonic()))
        finally:
            self.drop_requests([request])

    def _next_reply(
        self, answers: SimpleQueue[Any], kind: str, patience_s: float
    ) -> tuple[int, str, Message]:
        since = time.monotonic()
        while time.monotonic() - max(since, self._last_progress_at) < patience_s:
            try:
                answer: tuple[int, str, Message] = answers.get(timeout=min(1.0, patience_s))
            except Empty:
                self.cancel_unanswerable(kind)
            else:
                return answer
        raise SessionError(f"No reply from the ranks to {kind} for {patience_s:.0f} s.")

    def cancel_unanswerable(self, kind: str) -> None:
        """Raise if no reply to a request can arrive anymore.

        Raises:
            RankDied: the ranks have ended.
        """
        if self._is_running:
            return
        if self._is_ending:  # another thread determines the cause
            self._end_known.wait(REPORT_S)
        raise self._end_error or RankDied(f"The ranks ended before they replied to {kind}.")

    def wake(self) -> None:
        """Have `on_idle` called soon."""
        if self._channels is not None:
            self._channels.wake()

    def log_tail(self) -> str:
        """Return the end of the output of launcher and ranks outside of cells."""
        return redact_secrets(self._launcher_group.log_tail()) if self._launcher_group else ""

    def log_excerpt(self) -> str:
        """Return the end of the log as part of an error message."""
        tail = self.log_tail()
        return f"End of the log:\n{tail}" if tail else "The log is empty."

    # -- messages, on the reader thread or the launcher link's thread

    def on_message(self, ranks: Sequence[int], channel: Channel, message: Message) -> None:
        """Route one message that these ranks sent."""
        if channel == "iopub" and not self._is_running:
            # Any output proves the subscription; the welcome message alone is sometimes missed.
            for rank in ranks:
                self.startup_events.put(rank)
        if message["header"]["msg_type"] == "iopub_welcome":
            return
        if message["header"]["msg_type"] == messages.PROGRESS:
            self._last_progress_at = time.monotonic()
        route, together = self._routes.get(
            message["parent_header"].get("msg_id", ""), (None, False)
        )
        if message["header"]["msg_type"] in messages.SESSION_MESSAGES or route is None:
            for rank in ranks:
                self._on_message(rank, message)
        elif together:
            route(ranks, channel, message)
        else:
            for rank in ranks:
                route(rank, channel, message)

    def on_idle(self) -> bool:
        """Check that the ranks are alive, then call `on_idle`."""
        now = time.monotonic()
        dying = self._is_running and bool(self.rank_exits)
        # The first exit is fully known after this time: torch elastic may report its code late.
        patience_s = SETTLE_S if dying and self.rank_exits[0].code is not None else REPORT_S
        if dying and now - self._first_end_at > patience_s:
            self._report_death(None)
        elif self._is_running and now >= self._watch_due:
            self._watch_due = now + LIVENESS_INTERVAL_S
            self._watch()
        return self._on_idle() or dying

    def _watch(self) -> None:
        """Check the processes; the launcher reports exits itself, unless it is stopped."""
        launchers = self._launcher_group
        if launchers is None:
            return
        members = dict(enumerate(self.rank_processes))
        statuses = launchers.process_statuses(members)
        for line in self.stopped_process_watch.update(statuses):
            self._on_notice(line)
        exited = [rank for rank in members if statuses[f"rank {rank}"].status == EXITED]
        if not exited:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = time.monotonic()
            launchers.resume_stopped()  # the launcher has the exit code
        elif time.monotonic() - self._missing_since > REPORT_S:
            end = messages.RankExited(
                self.generation, exited[0], None, node=launchers.node_of(exited[0])
            )
            self.rank_exits = self.rank_exits or [end]
            self._report_death(None)

    def _from_launcher(self, message: messages.LauncherMessage) -> None:
        if isinstance(message, messages.RankForked) and message.generation == self.generation:
            self.pids[message.rank] = message.pid
        elif isinstance(message, messages.RankExited) and message.generation == self.generation:
            self._first_end_at = self._first_end_at if self.rank_exits else time.monotonic()
            self.rank_exits.append(message)
            self.wake()
        elif isinstance(message, messages.TerminationNotice):
            self._on_termination(message)
        self.startup_events.put(message)
        if isinstance(message, messages.AllRanksExited):
            self._ended = message
            if not self.rank_exits or message.generation == LAUNCHER_GONE:
                self._report_death(message)

    def _report_death(
        self, ended: messages.AllRanksExited | None, death: WorkerFailure | None = None
    ) -> None:
        with self._lock:
            was_up, self._is_running = self._is_running, False
            if not was_up:
                return
            self._is_ending = True
            self._end_known.clear()
        death = death or self.find_failure(ended)
        if self._launcher_group is not None:
            self._launcher_group.resume_stopped()
            with contextlib.suppress(StartError):  # the launcher has exited
                self._launcher_group.send(messages.StopRanksRequest())
        self._end_error = self._on_death(death)
        self._is_ending = False
        self._end_known.set()

    def find_failure(self, ended: messages.AllRanksExited | None) -> WorkerFailure:
        """Return the cause of the ranks' end."""
        lost = ended is not None and ended.generation == LAUNCHER_GONE and bool(ended.node)
        if self.rank_exits and not lost:
            ends = [
                failure_causes.with_exit_code(end, ended or self._ended) for end in self.rank_exits
            ]
            crashes = self.crash_artifacts().crashes
            return failure_causes.rank_failure(
                ends, oom=self._oom, stack_of=crashes, log=self.log_tail()
            )
        return failure_causes.launcher_failure(ended, oom=self._oom)

    def crash_artifacts(self) -> CrashArtifacts:
        """Return the files that the ranks of this start left behind."""
        return (
            CrashArtifacts()
            if self._launcher_group is None
            else self._launcher_group.crash_artifacts()
        )


def _not_started() -> SessionError:
    return SessionError("The session is not started. Run a %%distribute cell or call start().")
