"""Finds the root cause when ranks end: the first process to exit, how, and its last output.

Pure; runs in the notebook's kernel. Later exits are reported as consequences.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbdist.cluster.local import LAUNCHER_NAME
from nbdist.errors import RankDied

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.protocol import messages
    from nbdist.session.oom_killer import OomKillCounter

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
            f"{self.summary}; all ranks were ended and their variables are lost."
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
        process_name=f"rank {first.rank}{_on(first.node)}",
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
        return WorkerFailure(process_name=f"{LAUNCHER_NAME}{_on(ended.node)}", exit_description=how)
    return WorkerFailure(
        process_name="",
        exit_description=ended.error if ended and ended.error else "the ranks ended",
    )


def _on(node: str) -> str:
    return f" on {node}" if node else ""


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
        why = (
            oom.describe()
            if oom is not None and oom.has_grown()
            else "maybe the OOM killer: see dmesg"
        )
        return f"{described}: {why}"
    hint = _HINTS.get(signal.Signals(-code)) if code is not None and code < 0 else None
    return f"{described}: {hint}" if hint else described


def describe_exit_code(code: int | None) -> str:
    """Describe a signal or an exit code: "signal 9 (SIGKILL)", "exit code 3"."""
    if code is None:
        return "an unknown exit code"
    if code < 0:
        return f"signal {-code} ({_signal_name(-code)})"
    return f"exit code {code}" if code else "exit code 0 without output, as from os._exit(0)"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"


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
