"""Why ranks are gone, in words: who ended first, how, and what was last heard of it.

Pure; runs in the notebook's kernel. What ended after the first is its consequence and is
folded under it.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbdist.cluster.local import LAUNCHER
from nbdist.errors import RankDied

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.protocol import messages
    from nbdist.session.checkpoints import Checkpoint
    from nbdist.session.oom_killer import OomCounter

LAST_LINES = 20
CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP}
)
"""Signals by which a process ends through a fault of its own."""
_HINTS = {
    signal.SIGABRT: "C code gave up (abort)",
    signal.SIGTERM: "somebody asked it to end: kill, or a job scheduler",
    signal.SIGHUP: "its login ended",
}
_FRAME = re.compile(r'^  File "(.*?([^/"]+))", line (\d+) in (.+)$', re.MULTILINE)
_THREAD = re.compile(r"^Thread 0x.*$", re.MULTILINE)
_CELL_FILE = re.compile(r"/ipykernel_\d+/\d+\.py")
_SYSTEM = re.compile(r"/(?:asyncio|ipykernel|IPython|tornado)/")


@dataclass(frozen=True, slots=True)
class Death:
    """The end of ranks that nobody asked for."""

    who: str
    """"rank 1", "the launcher"; "" where the cause has no process."""
    how: str
    """"ended with signal 9 (SIGKILL): maybe the OOM killer, see dmesg"."""
    rank: int | None = None
    stack: str = ""
    """Of a crash, as faulthandler wrote it."""
    words: str = ""
    """What it wrote last and nobody had read."""
    log: str = ""
    """The end of the log that all ranks share, after a crash."""
    followers: str = ""
    """Who ended after it by itself."""
    by_stop: bool = False
    """Whether Stop has ended ranks that nothing else stopped."""

    @property
    def said(self) -> str:
        """Who ended and how."""
        return f"{self.who} {self.how}".strip()

    @property
    def headline(self) -> str:
        """Who ended and how, what is lost, what to do."""
        return (
            f"{self.said}; all ranks were ended and their variables are gone."
            " Start new ones with %nbdist restart."
        )

    def told(
        self,
        *,
        log: str = "",
        checkpoint: Checkpoint | None = None,
        cells: Mapping[str, int] | None = None,
    ) -> RankDied:
        """The error for the user.

        Args:
            log: what that rank wrote last, of the notebook's own log.
            checkpoint: the newest, if there is one.
            cells: numbers of the session's cells by the name of their code's file.
        """
        parts = [offer(checkpoint)] if checkpoint else []
        if self.followers:
            parts.append(f"It took with it: {self.followers}.")
        if stack := stack_words(self.stack, cells or {}):
            parts.append(f"{self.who} was at (innermost first):\n{stack}")
        if lines := last_lines(log, self.words):
            parts.append(f"The last lines of {self.who}:\n{lines}")
        if self.log and not self.words:
            parts.append(f"The log of launcher and ranks ends:\n{last_lines(self.log)}")
        return RankDied(self.headline, details="\n".join(parts))


def of_ranks(
    ends: Sequence[messages.RankEnded], *, oom: OomCounter, stack_of: Mapping[int, str], log: str
) -> Death:
    """The death that the first of these ends was.

    Args:
        ends: in the order in which they happened.
        oom: made when the ranks started.
        stack_of: what faulthandler wrote, by rank.
        log: the end of the log that all ranks share.
    """
    first = ends[0]
    crashed = first.code in {-one for one in CRASHES}
    followers = ", ".join(
        f"rank {end.rank} ({code_words(end.code)})"
        for end in ends[1:]
        if end.code not in {None, -signal.SIGTERM, -signal.SIGKILL}
    )
    return Death(
        who=f"rank {first.rank}{_on(first.node)}",
        how=ended_words(first.code, None if first.node else oom),
        rank=first.rank,
        stack=stack_of.get(first.rank, "") if crashed else "",
        words=first.words,
        log=log if crashed else "",
        followers=followers,
    )


def of_launcher(ended: messages.Ended | None, *, oom: OomCounter) -> Death:
    """The death that was the launcher's own, or an error of it."""
    if ended is not None and LAUNCHER in ended.exitcodes:
        code = ended.exitcodes[LAUNCHER]
        how = ended_words(code, None if ended.node else oom)
        return Death(who=f"{LAUNCHER}{_on(ended.node)}", how=how)
    return Death(who="", how=ended.error if ended and ended.error else "the ranks ended")


def _on(node: str) -> str:
    return f" on {node}" if node else ""


def completed(end: messages.RankEnded, ended: messages.Ended | None) -> messages.RankEnded:
    """Fill in the exit code that torch elastic has collected."""
    if end.code is not None or ended is None or ended.generation != end.generation:
        return end
    return replace(end, code=ended.exitcodes.get(str(end.rank)))


def ended_words(code: int | None, oom: OomCounter | None) -> str:
    """How a process ended, with what is likely behind it.

    Args:
        code: exit code, negative for a signal.
        oom: of the process's machine; None: that is another one.
    """
    told = f"ended with {code_words(code)}"
    if code == -signal.SIGKILL:
        why = oom.words() if oom is not None and oom.grew() else "maybe the OOM killer: see dmesg"
        return f"{told}: {why}"
    hint = _HINTS.get(signal.Signals(-code)) if code is not None and code < 0 else None
    return f"{told}: {hint}" if hint else told


def code_words(code: int | None) -> str:
    """Name a signal or an exit code: "signal 9 (SIGKILL)", "exit code 3"."""
    if code is None:
        return "an exit code that is not known"
    if code < 0:
        return f"signal {-code} ({_signal_name(-code)})"
    return f"exit code {code}" if code else "exit code 0, without a word, as os._exit(0) does"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"


def offer(checkpoint: Checkpoint) -> str:
    """Say how to go on from a checkpoint."""
    return (
        f"The last checkpoint is {checkpoint.name!r} of step {checkpoint.step}: %nbdist restart,"
        f" run the preparing cell, %nbdist load {checkpoint.name}."
    )


def last_lines(*texts: str) -> str:
    """The last lines of several texts, indented."""
    lines = [line for text in texts for line in text.strip("\n").splitlines() if line.strip()]
    return "\n".join(f"  {line}" for line in lines[-LAST_LINES:])


def stack_words(crash: str, cells: Mapping[str, int]) -> str:
    """The frames of the thread that crashed, up to the cell; frames below that are ours.

    Where that was a thread of C code, the thread of the cell: it waited for the other.

    Args:
        crash: what faulthandler wrote.
        cells: numbers of cells by the name of their code's file.
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
    return "\n".join(lines[:LAST_LINES])
