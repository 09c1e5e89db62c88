"""Finds why ranks end or stop replying; runs in the notebook's kernel.

The cause is the first process to exit, how it exited, and its last output; later exits are reported
as consequences. A process that is killed because memory ran out gets an ordinary SIGKILL; only the
counter of its cgroup shows the reason.
"""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import psutil

from nbdist.cluster.launcher_process import describe_exit_code
from nbdist.cluster.local_launcher import LAUNCHER_NAME
from nbdist.errors import RankDied
from nbdist.hardware import discovery
from nbdist.number_formatting import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from nbdist.cluster.launcher_process import ProcessStatus
    from nbdist.protocol import messages

MAX_LOG_LINES = 20
CRASH_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP}
)
"""Signals of a crash of the process itself."""
_HINTS = {
    signal.SIGABRT: "C code called abort()",
    signal.SIGTERM: "terminated by kill or a job scheduler",
    signal.SIGHUP: "its login session ended",
}
_FRAME = re.compile(r'^  File "(.*?([^/"]+))", line (\d+) in (.+)$', re.MULTILINE)
_THREAD = re.compile(r"^Thread 0x.*$", re.MULTILINE)
_CELL_FILE = re.compile(r"/ipykernel_\d+/\d+\.py")
_SYSTEM = re.compile(r"/(?:asyncio|ipykernel|IPython|tornado)/")

UNRESPONSIVE_AFTER_S = 3.0
"""Delay before a stopped process is reported; it is not dead: SIGCONT resumes it."""
_STOPPED = {
    psutil.STATUS_STOPPED: "stopped, state T",
    psutil.STATUS_TRACING_STOP: "traced, state t",
}


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """An unexpected exit of ranks."""

    process_name: str
    """"rank 1", "the launcher"; "" if the cause has no process."""
    exit_description: str
    """Such as "ended with signal 9 (SIGKILL): maybe the OOM killer: see dmesg"."""
    rank: int | None = None
    stack: str = ""
    """Stack of a crash, in faulthandler's format."""
    last_output: str = ""
    """Last output that was not read yet."""
    log: str = ""
    """End of the log shared by all ranks, after a crash."""
    followers: str = ""
    """Processes that exited by themselves afterwards."""
    by_stop: bool = False
    """True if an interrupt ended ranks that did not stop otherwise."""

    @property
    def summary(self) -> str:
        """Process and exit in one phrase."""
        return f"{self.process_name} {self.exit_description}".strip()

    @property
    def headline(self) -> str:
        """Process, exit, what is lost, and what to do."""
        return (
            f"{self.summary}; all ranks were terminated and their variables are lost."
            " Use %nbdist restart to start new ranks."
        )

    def to_error(
        self,
        *,
        log: str = "",
        checkpoint_hint: str = "",
        cells: Mapping[str, int] | None = None,
    ) -> RankDied:
        """Return the error for the user.

        Args:
            log: last output of the rank, from the notebook's own log.
            checkpoint_hint: how to continue from the newest checkpoint, if there is one.
            cells: cell numbers by the file name of their code.
        """
        parts = [checkpoint_hint] if checkpoint_hint else []
        if self.followers:
            parts.append(f"Other ranks that ended because of it: {self.followers}.")
        if stack := format_crash_stack(self.stack, cells or {}):
            parts.append(f"Stack of {self.process_name} (innermost first):\n{stack}")
        if lines := last_lines(log, self.last_output):
            parts.append(f"Last output of {self.process_name}:\n{lines}")
        if self.log and not self.last_output:
            parts.append(f"End of the log of launcher and ranks:\n{last_lines(self.log)}")
        return RankDied(self.headline, details="\n".join(parts))


def rank_failure(
    ends: Sequence[messages.RankExited],
    *,
    oom: OomKillCounter,
    stack_of: Mapping[int, str],
    log: str,
) -> WorkerFailure:
    """Return the failure that the first of these exits is.

    Args:
        ends: exits in the order in which they happened.
        oom: counter created when the ranks started.
        stack_of: faulthandler output by rank.
        log: end of the log shared by all ranks.
    """
    first = ends[0]
    crashed = first.code in {-crash for crash in CRASH_SIGNALS}
    followers = ", ".join(
        f"rank {end.rank} ({describe_exit_code(end.code)})"
        for end in ends[1:]
        if end.code not in {None, -signal.SIGTERM, -signal.SIGKILL}
    )
    return WorkerFailure(
        process_name=f"rank {first.rank}" + (f" on {first.node}" if first.node else ""),
        exit_description=describe_exit(first.code, None if first.node else oom),
        rank=first.rank,
        stack=stack_of.get(first.rank, "") if crashed else "",
        last_output=first.words,
        log=log if crashed else "",
        followers=followers,
    )


def launcher_failure(
    ended: messages.AllRanksExited | None, *, oom: OomKillCounter
) -> WorkerFailure:
    """Return the failure of the launcher, or an error that it reported."""
    if ended is not None and LAUNCHER_NAME in ended.exitcodes:
        code = ended.exitcodes[LAUNCHER_NAME]
        how = describe_exit(code, None if ended.node else oom)
        name = LAUNCHER_NAME + (f" on {ended.node}" if ended.node else "")
        return WorkerFailure(process_name=name, exit_description=how)
    return WorkerFailure(
        process_name="",
        exit_description=ended.error if ended and ended.error else "the ranks ended",
    )


def with_exit_code(
    end: messages.RankExited, ended: messages.AllRanksExited | None
) -> messages.RankExited:
    """Fill in the exit code that torch elastic has collected."""
    if end.code is not None or ended is None or ended.generation != end.generation:
        return end
    return replace(end, code=ended.exitcodes.get(str(end.rank)))


def describe_exit(code: int | None, oom: OomKillCounter | None) -> str:
    """Describe an exit and its likely cause.

    Args:
        code: exit code, negative for a signal.
        oom: counter of the process's machine; None if it is another machine.
    """
    described = f"ended with {describe_exit_code(code)}"
    if code == -signal.SIGKILL:
        reason = "" if oom is None else oom.describe_kill()
        return f"{described}: {reason or 'maybe the OOM killer: see dmesg'}"
    hint = _HINTS.get(signal.Signals(-code)) if code is not None and code < 0 else None
    return f"{described}: {hint}" if hint else described


def last_lines(*texts: str) -> str:
    """Return the last lines of several texts, indented."""
    lines = [line for text in texts for line in text.strip("\n").splitlines() if line.strip()]
    return "\n".join(f"  {line}" for line in lines[-MAX_LOG_LINES:])


def format_crash_stack(crash: str, cells: Mapping[str, int]) -> str:
    """Format the frames of the crashed thread up to the cell; frames below it are nbdist's.

    If a C++ thread crashed, the thread of the cell is used instead: it waits for the other.

    Args:
        crash: output of faulthandler.
        cells: cell numbers by the file name of their code.
    """
    fatal = crash.rpartition("Fatal Python error")[2]
    current, *others = _THREAD.split(fatal.rpartition("Current thread ")[2]) if fatal else [""]
    earlier = _THREAD.split(fatal.partition("Current thread ")[0])[1:]
    waiting = (block for block in (*earlier, *others) if _CELL_FILE.search(block))
    block = current if _FRAME.search(current) else next(waiting, "")
    lines: list[str] = []
    for path, name, number, function in _FRAME.findall(block):
        in_cell = _CELL_FILE.search(path)
        if not in_cell and _SYSTEM.search(path):
            break
        place = f"In[{cells[name]}]" if name in cells else "the cell" if in_cell else f'"{path}"'
        lines.append(f"  {place}, line {number} in {function}")
    return "\n".join(lines[:MAX_LOG_LINES])


class OomKillCounter:
    """Counts OOM kills in the cgroup of this process, which contains launcher and ranks.

    Args:
        events: the file with a line "oom_kill N": "memory.events" of version 2,
            "memory.oom_control" of version 1. Default: that of this process.
    """

    def __init__(self, events: Path | None = None) -> None:
        self._events = events or discovery.find_memory_events_file()
        self._before = self._count()

    def describe_kill(self) -> str:
        """Describe a kill since this counter was created, with its limit; "" if there was none."""
        if self._count() <= self._before:
            return ""
        limit = min((limit for limit, _ in discovery.cgroup_limits(self._events)), default=None)
        cause = f"cgroup limit {format_bytes(limit)}" if limit else "the machine is out of memory"
        return f"killed by the kernel's OOM killer ({cause})"

    def _count(self) -> int:
        lines = discovery.read_text(self._events).splitlines()
        counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
        return int(counts[0]) if counts else 0


class StoppedProcessWatch:
    """Stopped processes (SIGSTOP, a debugger): alive but not replying.

    By name: "rank 1", "the launcher"; used on the reader thread.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._reported: dict[str, str] = {}
        self._status: dict[str, str] = {}

    def describe(self, name: str) -> str:
        """Return why a process does not reply: "unresponsive (stopped, state T)"; "" if it does."""
        return self._reported.get(name, "")

    def status(self, name: str) -> str:
        """Return the last known psutil status of a process; "" if unknown."""
        return self._status.get(name, "")

    def update(self, processes: Mapping[str, ProcessStatus]) -> list[str]:
        """Update all processes; return a line for each that has changed."""
        lines = []
        for name, process in processes.items():
            self._status[name] = process.status
            state = _STOPPED.get(process.status)
            if state is None:
                self._since.pop(name, None)
                if self._reported.pop(name, None):
                    lines.append(f"nbdist: {name} is running again")
                continue
            since = self._since.setdefault(name, time.monotonic())
            waited_s = time.monotonic() - since
            if name not in self._reported and waited_s > UNRESPONSIVE_AFTER_S:
                self._reported[name] = f"unresponsive ({state})"
                lines.append(
                    f"nbdist: {name} is {self._reported[name]}: kill -CONT {process.pid} resumes"
                    " it, %nbdist restart starts new ranks"
                )
        return lines
