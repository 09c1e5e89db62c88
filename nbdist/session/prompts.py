"""Shows the prompts of a cell's ranks one at a time; runs in the notebook's kernel.

The thread that waits for the cell reads the answers with the notebook's own `input()`. At a prompt
of the debugger, `rank N` goes to another stopped rank and `all COMMAND` runs a command on every
stopped rank; their equal output is merged like any other.
"""

from __future__ import annotations

import getpass
import re
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from IPython.core.error import StdinNotImplementedError

from nbdist import rank_sets
from nbdist.output.sink import get_kernel
from nbdist.protocol import messages
from nbdist.session.rank_activity import describe_position

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nbdist.session.cell import Cell
    from nbdist.session.interrupt import InterruptEscalation
    from nbdist.session.rank_activity import RankActivityPoller
    from nbdist.session.worker_group import WorkerGroup

SETTLE_S = 0.5
"""Time for the other ranks to reach the collective in which they wait for a stopped one."""
COMMAND_S = 0.5
"""Time for a command to return before the prompt of another stopped rank is shown."""
_SWITCH = re.compile(r"\s*rank\s+(\d+)\s*")
_ALL = re.compile(r"\s*all\s+(\S.*)")
_QUIT = {"q", "quit", "exit", "EOF", messages.END_OF_INPUT}


def has_keyboard() -> bool:
    """Return whether the user can answer prompts of the running cell."""
    kernel = get_kernel()
    if kernel is None:
        return sys.stdin is not None and sys.stdin.isatty()
    return bool(kernel._allow_stdin)  # noqa: SLF001 - ipykernel 7.4 has no public name


class InputPrompts:
    """Prompts at which ranks of a cell wait.

    Args:
        cell: the cell.
        escalation: the escalation of its interrupts, suspended while a rank waits at a prompt.
        workers: the worker group.
        rank_activity: polls the ranks for their positions.
    """

    def __init__(
        self,
        cell: Cell,
        escalation: InterruptEscalation,
        workers: WorkerGroup,
        rank_activity: RankActivityPoller,
    ) -> None:
        self._cell, self._escalation = cell, escalation
        self._workers, self._rank_activity = workers, rank_activity
        self._requests = cell.input_requests
        self._stops: dict[int, int] = {}
        """Number of the last stop in the debugger, by rank."""
        self._current: int | None = None
        """The rank whose prompt was shown last."""
        self._busy: set[int] = set()
        """Ranks that carry out a command."""
        self._busy_until = self._settle_until = 0.0
        self._shown_positions = ""
        self._lock = threading.Lock()
        self._reader: int | None = None
        """Thread that reads a line, or None."""
        self._is_cancelled = False

    def answer_next(self) -> None:
        """Show a prompt if a rank waits at one, and send the user's answer.

        Raises:
            KeyboardInterrupt: the user interrupts the cell, or quits the debugger.
        """
        if self._escalation.num_interrupts or self._cell.finished.is_set():  # no rank waits anymore
            self._requests.clear()
        self._escalation.has_prompt = bool(self._requests)
        self._busy -= self._requests.keys()  # these have returned from their command
        for rank, request in self._requests.items():
            if self._stops.get(rank) != request["stop"]:
                self._stops[rank] = request["stop"]
                self._rank_activity.clear()  # the replies are from before the stop
                self._settle_until = time.monotonic() + SETTLE_S
        if not self._requests:
            return
        waits = self._busy & set(self._cell.running) and time.monotonic() < self._busy_until
        if waits or not self._have_settled():
            return
        if self._current not in self._requests:
            self._current = min(self._requests)
        prompt = self._requests[self._current]
        self._cell.show_all_output(self._new_positions() if prompt["debugger"] else "")
        line = self._read_line(self._current, prompt)
        if line is not None:
            self._answer(self._current, prompt, line)

    def cancel(self) -> None:
        """End the prompt that is shown, because its cell ends; callable from any thread."""
        with self._lock:
            main = threading.main_thread().ident
            if main is not None and self._reader == main != threading.get_ident():
                self._is_cancelled = True
                signal.pthread_kill(main, signal.SIGINT)

    def take_cancelled(self) -> bool:
        """Return whether the last KeyboardInterrupt came from `cancel`, once."""
        cancelled, self._is_cancelled = self._is_cancelled, False
        return cancelled

    # -- the answer

    def _read_line(self, rank: int, request: messages.InputRequest) -> str | None:
        """Return the user's line; None if the rank got an error instead."""
        read = getpass.getpass if request["password"] else input
        try:
            with self._lock:
                self._reader = threading.get_ident()
            return read(f"[rank {rank}] {request['prompt']}")
        except EOFError:
            return messages.END_OF_INPUT
        except StdinNotImplementedError:
            error = "input() and breakpoint() need a front end that can ask for input."
            self._send_answer([rank], "", error=error)
        finally:
            with self._lock:
                self._reader = None
        return None

    def _answer(self, rank: int, request: messages.InputRequest, line: str) -> None:
        """Carry out the commands for several ranks; send other lines to the rank."""
        if not request["debugger"]:
            self._send_answer([rank], line)
            return
        if switch := _SWITCH.fullmatch(line):
            chosen = int(switch[1])
            if chosen in self._requests:
                self._current = chosen  # its prompt is shown next
            else:
                stopped = rank_sets.describe_ranks(self._requests)
                self._cell.show_all_output(f"rank {chosen} is not stopped; stopped: {stopped}")
            return
        ranks = [rank]
        if command := _ALL.fullmatch(line):
            line = command[1]
            ranks = [other for other, prompt in self._requests.items() if prompt["debugger"]]
        if line.strip() in _QUIT and request["debugger"] == "breakpoint":
            raise KeyboardInterrupt
        self._send_answer(ranks, line)

    def _send_answer(self, ranks: Iterable[int], text: str, *, error: str = "") -> None:
        for rank in ranks:
            request = self._requests.pop(rank)
            answer = messages.InputAnswer(id=request["id"], text=text, error=error)
            self._workers.send_request([rank], "control", messages.ANSWER_INPUT, answer)
            self._busy.add(rank)
        self._busy_until = time.monotonic() + COMMAND_S
        self._escalation.has_prompt = bool(self._requests)

    # -- the other ranks

    def _have_settled(self) -> bool:
        """Return whether the other ranks wait or have finished, or have had time to."""
        if time.monotonic() >= self._settle_until:
            return True
        others = [rank for rank in self._cell.running if rank not in self._requests]
        self._rank_activity.poll_ranks(others)
        replies = self._rank_activity.latest_replies()
        return all(
            rank in replies
            and (replies[rank]["collective"] or replies[rank]["standing"]["waits_for"])
            for rank in others
        )

    def _new_positions(self) -> str:
        """Return where the other ranks are; "" if this has not changed."""
        replies = self._rank_activity.latest_replies()
        states: dict[int, tuple[str, str, str]] = {}
        for rank in self._cell.ranks:
            if rank == self._current:
                continue
            if rank in self._requests:
                states[rank] = ("is", "are", " stopped too")
            elif rank in self._cell.errors:
                states[rank] = ("has", "have", " failed")
            elif rank not in self._cell.running:
                states[rank] = ("has", "have", " finished")
            elif rank in replies:
                where = f" in {describe_position(replies[rank])}"
                waits = replies[rank]["collective"] or replies[rank]["standing"]["waits_for"]
                states[rank] = ("waits", "wait", where) if waits else ("is", "are", where)
        text = rank_sets.describe_states(states)
        if not text or text == self._shown_positions:
            return ""
        self._shown_positions = text
        return f"nbdist: {text}"
