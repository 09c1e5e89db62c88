"""Current activity of the ranks: lines, hangs, stacks, and values of expressions.

Runs in the notebook's kernel; requests use the control channel. While a cell runs, the ranks are
polled without blocking. A rank that cannot reply (its process is stopped) is polled again after a
timeout, so that requests do not pile up. Besides their current lines, rank 0 is polled for its
prepared model.

A hang is described: "rank 0 raised ValueError at line 3; ranks 1-3 have waited 4 s in all_reduce at
line 4."

For stacks a rank's control thread is asked first. If C code holds the GIL, or the rank is still
starting, a signal makes faulthandler write to a file.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from nbdist import rank_sets
from nbdist.errors import NbdistError, OptionError, SessionError
from nbdist.output.ansi import strip_ansi
from nbdist.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from nbdist.cluster.rank_channels import Channel, Message
    from nbdist.protocol.messages import RankActivityReply, RankError
    from nbdist.session.worker_group import State, WorkerGroup

LINE_TIMEOUT_S = 10.0
MODEL_TIMEOUT_S = 30.0
ReplyT = TypeVar("ReplyT")
COMPLETE_TIMEOUT_S = 2.0
"""Timeout for the completions of a name on rank 0."""
HANG_AFTER_S = 3.0
"""Minimum waiting time before a hang is reported."""

STACKS_TIMEOUT_S = 2.0
"""Timeout for each of the two ways to get stacks."""

_Counts = frozenset[tuple[str, int]]
"""Number of collectives begun, by process group."""
_LINE = re.compile(r"Cell In\[\d+\], line (\d+)")
_CELL_FRAME = re.compile(r'File "[^"]*/ipykernel_\d+/(\d+\.py)"')


class RankPoller(Generic[ReplyT]):
    """The last replies of ranks to one kind of request."""

    kind: str
    """Message type of the request."""
    timeout_s: float
    """Time after which a rank that has not replied is asked again."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers
        self._requests: dict[int, tuple[str, float]] = {}
        """Pending request and the time at which it was sent, by rank."""
        self._replies: dict[int, ReplyT] = {}
        self._silent_since: dict[int, float] = {}
        """Time of the first request without a reply, by rank."""
        self._lock = threading.Lock()

    def poll_ranks(self, ranks: Iterable[int], content: object = None) -> None:
        """Send the request to those of these ranks that have no pending one."""
        now = time.monotonic()
        with self._lock, contextlib.suppress(SessionError):  # the ranks may be ending
            ranks_to_poll = [
                rank
                for rank in ranks
                if now - self._requests.get(rank, ("", -math.inf))[1] >= self.timeout_s
            ]
            if ranks_to_poll:
                self._drop_requests(ranks_to_poll)
                request = self._workers.send_request(
                    ranks_to_poll, "control", self.kind, content or {}, self._store_reply
                )
                self._requests.update(dict.fromkeys(ranks_to_poll, (request, now)))
                self._silent_since = dict.fromkeys(ranks_to_poll, now) | self._silent_since

    def clear(self) -> None:
        """Drop replies and pending requests, because the cell has ended."""
        with self._lock:
            self._drop_requests(list(self._requests))
            self._replies.clear()
            self._silent_since.clear()

    def latest_replies(self) -> dict[int, ReplyT]:
        """Return the last replies, by rank; without errors."""
        with self._lock:
            return dict(self._replies)

    def silent(self) -> dict[int, float]:
        """Return for how many seconds ranks have not replied."""
        now = time.monotonic()
        with self._lock:
            return {rank: now - since for rank, since in self._silent_since.items()}

    def _store_reply(self, rank: int, channel: Channel, message: Message) -> None:
        """Store a reply, on the reader thread; ignore its `idle` status on iopub."""
        if channel != "control":
            return
        content: Any = message["content"]
        with self._lock:
            if message["parent_header"].get("msg_id") != self._requests.get(rank, ("", 0.0))[0]:
                return  # belongs to an earlier cell
            self._drop_requests([rank])
            self._silent_since.pop(rank, None)
            if content.get("status") != "error":  # on errors the rank is polled again
                self._replies[rank] = content

    def _drop_requests(self, ranks: Iterable[int]) -> None:
        """Drop the pending requests of ranks, unless other ranks may still reply to them."""
        dropped = {self._requests.pop(rank)[0] for rank in ranks if rank in self._requests}
        pending = {request for request, _ in self._requests.values()}
        self._workers.drop_requests(dropped - pending)


class RankActivityPoller(RankPoller[messages.RankActivityReply]):
    """Polls ranks for the line that they execute."""

    kind, timeout_s = messages.RANK_ACTIVITY, LINE_TIMEOUT_S


class PreparedModelPoller(RankPoller[messages.ModelReply]):
    """Polls rank 0 for the model prepared last: its cell often trains it for hours."""

    kind, timeout_s = messages.MODEL, MODEL_TIMEOUT_S

    def send_request(self, kind: Literal["cuda", "cpu"]) -> None:
        """Request the closed form of the model; return immediately."""
        request = messages.ModelRequest(
            name=None, batch_size=None, seq_len=None, kind=kind, quick=True
        )
        self.poll_ranks([0], request)

    def poll_reply(self) -> messages.ModelReply | None:
        """Return the reply, once, if a new one has arrived, else None."""
        with self._lock:
            return self._replies.pop(0, None)


# -- hangs


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A hang: ranks of a cell that wait for others."""

    waiting_ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    """Ranks that are waited for, as far as known."""
    in_collective: bool
    """True if all waiting ranks are in the call of a collective: nothing else can end the wait."""
    description: str


@dataclass(frozen=True, slots=True)
class _WaitingRank:
    """A waiting rank."""

    place: str
    seconds: float
    missing: tuple[int, ...]
    """Ranks that it waits for, as far as known."""
    known: bool = True
    """False if it only stays at one line while others have failed."""


def detect_hang(
    ranks: Sequence[int],
    *,
    replies: Mapping[int, RankActivityReply],
    pending: Sequence[int],
    errors: Mapping[int, RankError],
    waited_s: float | None = None,
) -> Hang | None:
    """Detect ranks of a cell that wait for others; return None if there is no hang.

    A rank waits if it stays at the same line and others have begun fewer collectives of a shared
    process group, or have failed, or if the line is inside a collective. CPU time is not a
    criterion: `cudaStreamSynchronize` spins while NCCL runs.

    Args:
        ranks: ranks that run the cell.
        replies: last reply of each rank of the session.
        pending: ranks whose code has not finished.
        errors: errors of the ranks that failed.
        waited_s: minimum waiting time. Default: `HANG_AFTER_S`.
    """
    alike: dict[_Counts, list[int]] = {}  # usually most ranks have the same counts
    for rank, reply in replies.items():
        alike.setdefault(frozenset(reply["standing"]["counts"].items()), []).append(rank)
    waited_s = HANG_AFTER_S if waited_s is None else waited_s
    waits = {
        rank: _find_wait(rank, replies, alike, errors)
        for rank in pending
        if rank in replies and rank not in errors
    }
    waiting = {rank: wait for rank, wait in waits.items() if wait and wait.seconds >= waited_s}
    if not waiting:
        return None
    missing = {other for wait in waiting.values() for other in wait.missing} - waiting.keys()
    parts = []
    for rank, error in sorted(errors.items()):
        numbers = [number for item in error.traceback for number in _LINE.findall(strip_ansi(item))]
        where = f" at line {numbers[-1]}" if numbers else ""
        parts.append(f"rank {rank} raised {error.ename}{where}")
    parts += _describe_waits(waiting)
    parts += [
        _describe_peer(rank, ranks, pending, replies) for rank in sorted(missing - errors.keys())
    ]
    return Hang(
        waiting_ranks=tuple(sorted(waiting)),
        missing_ranks=tuple(sorted(missing)),
        in_collective=all(
            replies[rank]["standing"]["waits_for"] or replies[rank]["collective"]
            for rank in waiting
        ),
        description="; ".join(parts),
    )


def _find_wait(
    rank: int,
    replies: Mapping[int, RankActivityReply],
    alike: Mapping[_Counts, Sequence[int]],
    errors: Mapping[int, RankError],
) -> _WaitingRank | None:
    """Return where, how long and for which ranks a rank waits; None if nothing indicates a wait."""
    here = replies[rank]
    standing = here["standing"]
    if standing["waits_for"]:
        return _WaitingRank(
            describe_position(here), standing["still_s"], tuple(standing["missing"])
        )
    behind = tuple(
        other
        for counts, others in alike.items()
        if _is_behind(dict(counts), standing["counts"])
        for other in others
    )
    if behind or here["collective"]:
        return _WaitingRank(describe_position(here), standing["still_s"], behind)
    if errors:
        return _WaitingRank(
            describe_position(here), standing["still_s"], tuple(errors), known=False
        )
    return None


def describe_position(here: RankActivityReply) -> str:
    """Describe the position of a rank: "all_reduce at line 4 (train.py line 41)"."""
    what = here["collective"] or here["called"] or here["source"]
    line = f"line {here['line']}" if here["line"] else ""
    line += f" ({here['script']})" if here["script"] else ""
    return " at ".join(part for part in (what, line) if part) or "code outside the cell"


def _is_behind(peer_counts: Mapping[str, int], counts: Mapping[str, int]) -> bool:
    """Return whether a rank has begun fewer collectives of a group than another rank."""
    return any(peer_counts[name] < counts[name] for name in peer_counts.keys() & counts.keys())


def have_collectives_diverged(replies: Iterable[RankActivityReply]) -> bool:
    """Return whether ranks have begun different numbers of collectives of a group."""
    distinct = {frozenset(reply["standing"]["counts"].items()) for reply in replies}
    counts = [dict(items) for items in distinct]
    return any(_is_behind(theirs, ours) for theirs in counts for ours in counts)


def _describe_waits(waiting: Mapping[int, _WaitingRank]) -> list[str]:
    """Describe waiting ranks, grouped by position."""
    places: dict[tuple[str, bool], list[int]] = {}
    for rank, wait in sorted(waiting.items()):
        places.setdefault((wait.place, wait.known), []).append(rank)
    parts = []
    for (where, known), ranks in places.items():
        longest = max(waiting[rank].seconds for rank in ranks)
        has = f"{rank_sets.describe_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'}"
        waited, been = f"waited {longest:.0f} s in {where}", f"been in {where} for {longest:.0f} s"
        parts.append(f"{has} {waited if known else been}")
    return parts


def _describe_peer(
    rank: int,
    ranks: Sequence[int],
    pending: Sequence[int],
    replies: Mapping[int, RankActivityReply],
) -> str:
    """Describe the position of a rank that others wait for."""
    if rank not in ranks:
        return f"rank {rank} does not run this cell"
    if rank not in pending:
        return f"rank {rank} has finished the cell"
    if rank not in replies:
        return f"the position of rank {rank} is unknown"
    return f"rank {rank} is in {describe_position(replies[rank])}"


_PROCESS_STATE_TEXTS: dict[str, tuple[str, str]] = {
    "stopped": ("is stopped (SIGSTOP, state T)", "are stopped (SIGSTOP, state T)"),
    "running": ("holds the GIL and spins", "hold the GIL and spin"),
    "sleeping": ("holds the GIL and sleeps in C", "hold the GIL and sleep in C"),
    "": ("holds the GIL in C, or is stopped", "hold the GIL in C, or are stopped"),
}


def describe_positions(
    ranks: Sequence[int],
    *,
    replies: Mapping[int, RankActivityReply],
    silent: Mapping[int, float],
    states: Mapping[int, State],
) -> str:
    """Describe for each rank whether it spins, sleeps, holds the GIL or is stopped, and where."""
    words: dict[int, tuple[str, str, str]] = {}
    for rank in ranks:
        if rank in silent:
            verbs = _PROCESS_STATE_TEXTS[states.get(rank, "")]
            where = f", last seen in {describe_position(replies[rank])}" if rank in replies else ""
            words[rank] = (*verbs, f" and has not answered for {silent[rank]:.0f} s{where}")
        elif rank in replies:
            standing, where = replies[rank]["standing"], f" in {describe_position(replies[rank])}"
            if standing["still_s"] < HANG_AFTER_S:
                words[rank] = ("is", "are", where)
            elif standing["sleeps"]:
                words[rank] = ("sleeps", "sleep", where)
            else:
                words[rank] = ("spins", "spin", where)
    return rank_sets.describe_states(words)


# -- stacks and values


def inspect(
    workers: WorkerGroup, expression: str, ranks: Sequence[int], *, timeout_s: float
) -> dict[int, str]:
    """Return the text of an expression's value, by rank; as `Session.inspect`."""
    try:
        compile(expression, "<inspect>", "eval")
    except SyntaxError as error:
        text = f"Expected a Python expression, got {expression!r}: {error.msg}."
        raise OptionError(text) from None
    request = messages.InspectRequest(expression=expression, within_s=timeout_s)
    texts: dict[int, str] = {}
    for rank, channel, message in workers.answers_within(
        timeout_s, ranks, messages.INSPECT, request
    ):
        if (channel, message["header"]["msg_type"]) == ("iopub", messages.INSPECTED):
            content: Any = message["content"]
            texts[rank] = content["text"]
        if len(texts) == len(ranks):
            return dict(sorted(texts.items()))
    workers.cancel_unanswerable("inspect")
    missing = rank_sets.describe_ranks(set(ranks) - texts.keys())
    raise SessionError(
        f"No value from {missing} within {timeout_s:.0f} s: a rank evaluates an expression"
        " only before an optimizer step, at a prompt, or when no cell runs. Try again then."
    )


def complete(workers: WorkerGroup, code: str, cursor: int) -> tuple[list[str], int]:
    """Return what completes the code on rank 0; as `Session.complete`."""
    request = {"code": code, "cursor_pos": cursor}
    try:
        replies = workers.request_all(
            [0], "complete_request", request, patience_s=COMPLETE_TIMEOUT_S
        )
    except NbdistError:  # Tab shows no errors
        return [], cursor
    return replies[0]["matches"], replies[0]["cursor_start"]


def rank_stacks(workers: WorkerGroup, cells: Mapping[str, int]) -> dict[int, str]:
    """Return the Python stacks of all threads, by rank; takes at most four seconds."""
    texts: dict[int, str] = {}
    ranks = range(len(workers.rank_processes))
    with contextlib.suppress(SessionError):  # the ranks are ending
        for rank, channel, message in workers.answers_within(
            STACKS_TIMEOUT_S, ranks, messages.STACKS, {}
        ):
            if channel == "control":
                content: Any = message["content"]
                texts[rank] = content["error" if content.get("status") == "error" else "text"]
            if len(texts) == len(ranks):
                break
    silent = {rank: pid for rank, pid in workers.pids.items() if rank not in texts}
    written = workers.launcher_group.dump_stacks(silent, launchers=False) if silent else {}
    for rank in silent:
        threads = reversed(written[f"rank{rank}"].split("\n\n"))  # the main thread is the last
        texts[rank] = _CELL_FRAME.sub(
            lambda cell: f"In[{cells.get(cell[1], '?')}]", "\n\n".join(threads)
        )
    return {rank: texts[rank] for rank in sorted(workers.pids)}
