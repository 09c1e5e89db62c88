"""Waits for ranks to start, and reports which are missing and why a start failed.

Runs in the notebook's kernel, on the thread that starts the session.
"""

from __future__ import annotations

from queue import Empty
from typing import TYPE_CHECKING, Any

from nbdist import rank_sets
from nbdist.cluster import local_launcher
from nbdist.errors import StartError
from nbdist.protocol import messages
from nbdist.redaction import redact_secrets
from nbdist.session import failure_causes, inspection
from nbdist.session.worker_group import RankProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.session.config import SessionConfig
    from nbdist.session.worker_group import WorkerGroup

START_TIMEOUT_S = 120.0
"""Timeout of a start without any message from launcher or ranks."""
IMPORT_TIMEOUT_S = 900.0
"""The same while the launcher imports packages, which takes minutes from a network disk."""
PROGRESS_INTERVAL_S = 5.0
"""Interval at which a slow start reports the missing ranks."""


class RankStartup:
    """Wait for one start of the ranks.

    Args:
        workers: the worker group that starts them; its channels are open.
        world_size: number of ranks.
        progress: called with a status text.
    """

    def __init__(
        self, workers: WorkerGroup, world_size: int, progress: Callable[[str], None]
    ) -> None:
        self._workers, self._world_size, self._progress = workers, world_size, progress
        self._joined: dict[int, RankProcess] = {}

    def wait_until_ready(self) -> list[RankProcess]:
        """Return when every rank's output has arrived and every rank has passed the barrier.

        Raises:
            StartError: a process exited, with its exit and last output, or the start timed out.
        """
        workers, world = self._workers, range(self._world_size)
        workers.queue_request(
            world, "shell", messages.JOIN, {}, lambda *sign: workers.startup_events.put(sign)
        )
        workers.wake()
        connected: set[int] = set()
        while len(connected) < len(world) or len(self._joined) < len(world):
            match self._next_message():
                case messages.LauncherProgress(text=text):
                    self._progress(text)
                case messages.LauncherReady():
                    self._progress("starting the ranks")
                case (
                    messages.AllRanksExited(
                        generation=workers.generation | local_launcher.LAUNCHER_GONE
                    ) as ended
                ):
                    raise StartError(self._start_error(ended))
                case messages.RankExited(generation=workers.generation, code=int()):
                    raise StartError(self._start_error(None))
                case int(rank):
                    connected.add(rank)
                case (int(rank), "shell", message):
                    self._joined[rank] = RankProcess(**message["content"])
        return [self._joined[rank] for rank in world]

    def _next_message(self) -> Any:
        """Wait for the next message from launcher or ranks; report missing ranks while waiting."""
        waited_s = 0.0
        while waited_s < (
            patience_s := START_TIMEOUT_S if self._workers.is_warm else IMPORT_TIMEOUT_S
        ):
            try:
                return self._workers.startup_events.get(timeout=PROGRESS_INTERVAL_S)
            except Empty:
                waited_s += PROGRESS_INTERVAL_S
            if self._workers.rank_exits:  # torch elastic reaps first, and does not report code 0
                raise StartError(self._start_error(None))
            self._progress(f"{self._missing()} for {waited_s:.0f} s")
        raise StartError(
            f"No message from the ranks for {patience_s:.0f} s. {self._workers.log_excerpt()}\n"
            f"Stacks of the processes:\n{inspection.startup_stacks(self._workers)}"
        )

    def _missing(self) -> str:
        if not self._workers.is_warm:
            return "the launcher is warming up"
        missing = set(range(self._world_size)) - self._joined.keys()
        return f"starting the ranks; no message from {rank_sets.describe_ranks(sorted(missing))}"

    def _start_error(self, ended: messages.AllRanksExited | None) -> str:
        death = self._workers.find_failure(ended)
        notes = self._workers.crash_artifacts().notes
        if death.rank is not None:  # its own output first: it is the cause
            notes = sorted(notes, key=lambda note: note[0] != death.rank)
        output = redact_secrets(notes[0][1]) if notes else ""
        detail = f"Its output:\n{output}" if output else self._workers.log_excerpt()
        stack = failure_causes.format_crash_stack(death.stack, {})
        stack = f" Stack (innermost first):\n{stack}\n" if stack else " "
        return f"The ranks failed to start: {death.summary}.{stack}{detail}"


def start_ranks(
    workers: WorkerGroup,
    config: SessionConfig,
    *,
    checkpoints: str,
    progress: Callable[[str], None],
) -> None:
    """Start ranks; return once each has replied and passed a barrier with all others.

    Raises:
        StartError: a process ended, or no message was received in time; no process is left.
    """
    try:
        workers.launch(config, checkpoints=checkpoints, progress=progress)
        startup = RankStartup(workers, config.placement.nproc, progress)
        workers.mark_ready(startup.wait_until_ready())
    except BaseException:
        workers.close()
        raise
