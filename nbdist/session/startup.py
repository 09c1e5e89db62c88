"""Waits for ranks to start, and reports which are missing and why a start failed.

Runs in the notebook's kernel, on the thread that starts the session.
"""

from __future__ import annotations

from queue import Empty
from typing import TYPE_CHECKING, Any

from nbdist import rank_sets
from nbdist.cluster import local_launcher
from nbdist.cluster.launcher_process import RankProcess
from nbdist.errors import StartError
from nbdist.protocol import messages
from nbdist.redaction import redact_secrets
from nbdist.session import failure_causes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from nbdist.session.worker_group import WorkerGroup

START_TIMEOUT_S = 120.0
"""Timeout of a start without any message from launcher or ranks."""
IMPORT_TIMEOUT_S = 900.0
"""The same while the launcher imports packages, which takes minutes from a network disk."""
PROGRESS_INTERVAL_S = 5.0
"""Interval at which a slow start reports the missing ranks."""


def wait_until_ready(
    workers: WorkerGroup, world_size: int, progress: Callable[[str], None]
) -> list[RankProcess]:
    """Return when every rank's output has arrived and every rank has passed the barrier.

    Args:
        workers: the worker group that starts them; its channels are open.
        world_size: number of ranks.
        progress: called with a status text.

    Raises:
        StartError: a process exited, with its exit and last output, or the start timed out.
    """
    world, joined, connected = range(world_size), dict[int, RankProcess](), set[int]()
    workers.send_request(
        world, "shell", messages.JOIN, {}, lambda *sign: workers.startup_events.put(sign)
    )
    while len(connected) < len(world) or len(joined) < len(world):
        match _next_message(workers, set(world) - joined.keys(), progress):
            case messages.LauncherProgress(text=text):
                progress(text)
            case messages.LauncherReady():
                progress("starting the ranks")
            case (
                messages.AllRanksExited(
                    generation=workers.generation | local_launcher.LAUNCHER_GONE
                ) as ended
            ):
                raise _start_error(workers, ended)
            case messages.RankExited(generation=workers.generation, code=int()):
                raise _start_error(workers, None)
            case int(rank):
                connected.add(rank)
            case (int(rank), "shell", message):
                joined[rank] = RankProcess(**message["content"])
    return [joined[rank] for rank in world]


def _next_message(
    workers: WorkerGroup, missing: Collection[int], progress: Callable[[str], None]
) -> Any:
    """Wait for the next message from launcher or ranks; report missing ranks while waiting."""
    waited_s = 0.0
    while waited_s < (patience_s := START_TIMEOUT_S if workers.is_warm else IMPORT_TIMEOUT_S):
        try:
            return workers.startup_events.get(timeout=PROGRESS_INTERVAL_S)
        except Empty:
            waited_s += PROGRESS_INTERVAL_S
        if workers.rank_exits:  # torch elastic reaps first, and does not report code 0
            raise _start_error(workers, None)
        waits_for = "the launcher is warming up"
        if workers.is_warm:
            silent = rank_sets.describe_ranks(sorted(missing))
            waits_for = f"starting the ranks; no message from {silent}"
        progress(f"{waits_for} for {waited_s:.0f} s")
    stacks = workers.launcher_group.dump_stacks(workers.pids, launchers=True)
    raise StartError(
        f"No message from the ranks for {patience_s:.0f} s. {workers.log_excerpt()}\n"
        "Stacks of the processes:\n"
        + "\n".join(f"-- {name} --\n{text}" for name, text in stacks.items())
    )


def _start_error(workers: WorkerGroup, ended: messages.AllRanksExited | None) -> StartError:
    death = workers.find_failure(ended)
    notes = workers.crash_artifacts().notes
    if death.rank is not None:  # its own output first: it is the cause
        notes = sorted(notes, key=lambda note: note[0] != death.rank)
    output = redact_secrets(notes[0][1]) if notes else ""
    detail = f"Its output:\n{output}" if output else workers.log_excerpt()
    stack = failure_causes.format_crash_stack(death.stack, {})
    stack = f" Stack (innermost first):\n{stack}\n" if stack else " "
    return StartError(f"The ranks failed to start: {death.summary}.{stack}{detail}")
