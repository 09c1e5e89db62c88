"""Collectives of CPU ranks that Stop can end, and that say so when they do not fit together.

Runs on a rank. gloo (torch 2.13) cannot be stopped while it waits for a rank, ends the process
where one rank gives 4 numbers and another 8, and pairs an all_reduce with a broadcast. So each
collective that Python calls first waits on the `Board`, in Python, until every rank has called
the same: nothing has begun then, and the group stays usable. torch's own check
(TORCH_DISTRIBUTED_DEBUG=DETAIL) ends the process in DDP's constructor under torch 2.13, and
takes 2 ms for each collective.

A collective that is called with `async_op` does not wait, for programs may rely on it; it looks
at those that are there. DDP calls from C++, past all of this: `worker.interrupt.abort_collectives`
is for that.
"""

from __future__ import annotations

import datetime as dt
import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed import distributed_c10d

from nbdist import rank_sets as rank_names
from nbdist.errors import CollectiveMismatch
from nbdist.worker.collective_log import Board, Call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SPIN_S = 0.0005
"""Ranks that come this close behind one another are waited for without sleeping."""
NAP_S = 0.0002
LONGEST_NAP_S = 0.005
GATHERED_S = 1.0
"""How long a rank that sees a misfit waits for the others, to name them all."""
WORK_S = dt.timedelta(seconds=0.25)
"""How soon Stop ends the waiting for a collective that has begun."""

GIVEN_UP = "the connections between the ranks were cut"

_SAME_SIZE = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "_allgather_base": "all_gather_single",
    "all_gather_single": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_single": "reduce_scatter_single",
}
"""Methods of torch 2.13's ProcessGroup whose input has the same size on all ranks."""
_ANY_SIZE = {
    "allgather": "all_gather",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
}
_INPUT_SECOND = frozenset(
    {
        "_allgather_base",
        "all_gather_single",
        "_reduce_scatter_base",
        "reduce_scatter_single",
        "gather",
    }
)
"""Methods that are given the output first, which may be of another size or missing."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the main thread of this rank waits for."""

    words: str
    missing: tuple[int, ...]
    """Ranks that have not called it."""
    since: float
    """time.monotonic()"""


class Meeting:
    """Where the ranks meet before a collective."""

    def __init__(self, board: Board) -> None:
        """Meet on this board."""
        self._board = board
        self._era = 0
        self._given_up = False
        """How often the groups were made anew: their names begin again."""
        self.waiting: Waiting | None = None

    def begin_anew(self) -> None:
        """The process groups are new ones."""
        self._era += 1
        self._board.clear()
        self._given_up = False

    def give_up(self) -> None:
        """Wait for nobody any more, until the groups are made anew; from any thread."""
        self._given_up = True

    def name_of(self, group: ProcessGroup) -> str:
        """Name of a group on the board."""
        return f"{self._era}:{group.group_name}"

    def __call__(self, group: ProcessGroup, call: Call, *, wait: bool) -> None:
        """Write a call down and look whether it fits with those of the other ranks.

        Raises:
            CollectiveMismatch: it does not; nothing has begun on any rank that waits.
        """
        members = distributed_c10d.get_process_group_ranks(group)
        if len(members) < 2:  # noqa: PLR2004 - a rank alone
            return
        name = self.name_of(group)
        number = self._board.post(name, call)
        if not number:
            return
        others = [rank for rank in members if rank != self._board.rank]
        try:
            if wait:
                self._wait(name, number, call, others)
            self._compare(name, number, call, others)
        except CollectiveMismatch:
            raise
        except BaseException:  # Stop
            self._board.withdraw(name, number)
            raise
        finally:
            self.waiting = None

    def _wait(self, name: str, number: int, call: Call, others: Sequence[int]) -> None:
        """Return when all are there, or when those that are do not fit."""
        began, nap, misfit_at = time.monotonic(), NAP_S, 0.0
        missing = tuple(others)
        while missing := self._missing(name, number, missing):
            now = time.monotonic()
            if self._given_up:
                raise RuntimeError(GIVEN_UP)
            if not misfit_at and self._misfits(name, number, call, others):
                misfit_at = now
            if misfit_at and now - misfit_at > GATHERED_S:
                return
            if now - began < SPIN_S:
                time.sleep(0)
                continue
            self.waiting = Waiting(call.words, missing, began)
            time.sleep(nap)
            nap = min(nap * 1.5, LONGEST_NAP_S)

    def _missing(self, name: str, number: int, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if not self._board.reached(rank, name, number))

    def _misfits(
        self, name: str, number: int, call: Call, others: Sequence[int]
    ) -> dict[int, Call]:
        calls = {rank: self._board.call(rank, name, number) for rank in others}
        return {rank: one for rank, one in calls.items() if one and one.key != call.key}

    def _compare(self, name: str, number: int, call: Call, others: Sequence[int]) -> None:
        if self._misfits(name, number, call, others):
            found = {rank: self._board.call(rank, name, number) for rank in others}
            found[self._board.rank] = call
            raise CollectiveMismatch(misfit_words(found))


def misfit_words(calls: dict[int, Call | None]) -> str:
    """Say who called what: the same words on all ranks."""
    by_words: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        by_words.setdefault("nothing" if call is None else call.words, []).append(rank)
    said = [f"{rank_names.words(ranks)} called {words}" for words, ranks in by_words.items()]
    return (
        f"{', '.join(said)}: these do not fit together. Nothing was sent and the group is as it"
        " was; give all ranks the same call."
    )


def install(board: Board) -> Meeting:
    """Put the meeting before each collective that Python calls; once in a CPU rank's life."""
    meeting = Meeting(board)
    for name in _SAME_SIZE | _ANY_SIZE:
        if (original := getattr(ProcessGroup, name, None)) is not None:
            setattr(ProcessGroup, name, _meeting_first(name, original, meeting))
    distributed_c10d._new_group_with_tag = _together(  # noqa: SLF001 - new_group calls it
        distributed_c10d._new_group_with_tag,  # noqa: SLF001
        meeting,
    )
    setattr(Work, "wait", _interruptible(Work.wait))  # noqa: B010 - to mypy it cannot be assigned
    return meeting


def _meeting_first(name: str, original: Callable[..., Any], meeting: Meeting) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        options = next((one for one in args if hasattr(one, "asyncOp")), kwargs.get("opts"))
        wait = not getattr(options, "asyncOp", False)
        meeting(group, _call(name, args, options), wait=wait)
        return original(group, *args, **kwargs)

    return method


def _together(original: Callable[..., Any], meeting: Meeting) -> Callable[..., Any]:
    """Let all ranks come before a group is made: one that is alone waits in C for half an hour."""

    @functools.wraps(original)
    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("use_local_synchronization"):
            words = "new_group" if ranks is None else f"new_group of {rank_names.words(ranks)}"
            world = distributed_c10d._get_default_group()  # noqa: SLF001
            meeting(world, Call.of(words, words), wait=True)
        return original(ranks, *args, **kwargs)

    return new_group


def _call(name: str, args: Sequence[Any], options: object) -> Call:
    """What one rank calls, so that it can be compared and read."""
    called = (_SAME_SIZE | _ANY_SIZE)[name]
    given = args[1:2] if name in _INPUT_SECOND else args[:1]
    tensors = list(tensors_of(given))
    kinds = sorted(set(map(_kind, tensors)))
    what = [called, *kinds]
    if name in _SAME_SIZE:
        what += [str(sum(one.numel() for one in tensors))]
    how = []
    if (reduction := getattr(options, "reduceOp", None)) is not None:
        how += [str(reduction.op).rpartition(".")[2]]
    if (root := getattr(options, "rootRank", None)) is not None:
        how += [f"rank {root}"]
    shapes = [f"{_kind(one)}{list(one.shape)}" for one in tensors[:2]]
    more = [f"{len(tensors) - 2} more tensors"] if len(tensors) > 2 else []  # noqa: PLR2004
    of = f" of {', '.join([*shapes, *more])}" if tensors else ""
    by = f" ({', '.join(how)})" if how else ""
    return Call.of("|".join([*what, *how]), f"{called}{by}{of}")


def tensors_of(values: object) -> Iterator[torch.Tensor]:
    """Tensors of arguments, which may be lists in lists."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_of(value)


def _kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _interruptible(original: Callable[..., bool]) -> Callable[..., bool]:
    """Let Stop end the waiting for a collective that has begun.

    torch 2.13: a work of gloo that is waited for with a limit says that it is late and goes on;
    Python sees Stop between two looks.
    """

    @functools.wraps(original)
    def wait(work: Work, *limit: Any) -> bool:
        if limit:
            return original(work, *limit)
        while not work.is_completed():
            try:
                return original(work, WORK_S)
            except RuntimeError:
                if work.is_completed():
                    break
        return original(work)  # it is over: says how

    return wait
