"""Makes collectives of CPU ranks interruptible and checks that all ranks call the same one.

gloo (torch 2.13) cannot be interrupted while it waits for a rank, terminates the process if the
tensor sizes differ between ranks, and matches an all_reduce with a broadcast. Each collective
called from Python therefore first waits in Python, using the ``CollectiveLog``, until every rank
has called the same one. Nothing has started at that point, so the group stays usable. torch's own
check (TORCH_DISTRIBUTED_DEBUG=DETAIL) terminates the process in DDP's constructor under
torch 2.13 and takes 2 ms per collective.

A collective with `async_op=True` must not block, so it is only compared with the calls already
logged. Collectives that DDP calls from C++ are not covered; `worker.process_group`
aborts those. On ranks with a GPU the only check is that the cell runs on all ranks of the group.
"""

from __future__ import annotations

import datetime as dt
import functools
import mmap
import struct
import threading
import time
import zlib
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed import distributed_c10d

from nbdist import rank_sets
from nbdist.errors import CollectiveMismatch
from nbdist.worker import process_group
from nbdist.worker.library_patches import patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

SPIN_S = 0.0005
"""Wait this long without sleeping: ranks usually call a collective within this time."""
MIN_SLEEP_S = 0.0002
MAX_SLEEP_S = 0.005
MISMATCH_WAIT_S = 1.0
"""Time to wait for the remaining ranks after a mismatch, so that the error names them all."""
INTERRUPT_POLL_S = dt.timedelta(seconds=0.25)
"""Latency of an interrupt while waiting for a collective that has started."""
ABORTED_MESSAGE = "the connections between the ranks were cut"

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
_OUTPUT_FIRST = frozenset(
    {
        "_allgather_base",
        "all_gather_single",
        "_reduce_scatter_base",
        "reduce_scatter_single",
        "gather",
    }
)
"""Methods whose first argument is the output; it may have another size or be missing."""

MAX_GROUPS = 64
"""Process groups per page; calls in further groups are neither logged nor checked."""
CALLS_PER_GROUP = 8
"""Calls kept per group; ranks that wait for each other are at most one call apart."""
_GROUP = struct.Struct("<Q")
_NUMBER = struct.Struct("<Q")
_CALL = struct.Struct("<QQ160sQ")
"""Number, key, description (at most 160 bytes) and checksum of a call."""
_WORDS_BYTES = 160
_SLOT_BYTES = _GROUP.size + CALLS_PER_GROUP * _CALL.size


@dataclass(frozen=True, slots=True)
class LoggedCollective:
    """One call of a collective."""

    key: int
    """Equal on ranks whose calls match."""
    description: str
    """For messages: "all_reduce of float32[4]"."""
    size_bytes: int = field(default=0, compare=False)
    """Size of the larger of input and output, for a profile; it is not in the log."""

    @classmethod
    def from_signature(cls, kind: str, text: str, size_bytes: int = 0) -> LoggedCollective:
        """Return a call from its signature; calls with equal signatures match."""
        return cls(_hash(kind), text, size_bytes)


class CollectiveLog:
    """Log of the collectives that each rank of a node has called, in shared memory.

    Each rank writes its own file-backed page and reads those of the other ranks without locks. A
    page has a slot per process group, which holds the last few calls in that group, numbered
    from 1. A call is logged before its collective starts, which shows the ranks that have not
    reached it yet.
    """

    def __init__(self, folder: Path, *, rank: int) -> None:
        """Create this rank's page; the others' are opened on first access.

        Args:
            folder: folder private to the session, the same on all ranks.
        """
        self.rank = rank
        self._folder = folder
        path = folder / f"collectives{rank}"
        path.write_bytes(bytes(MAX_GROUPS * _SLOT_BYTES))
        path.chmod(0o600)
        self._pages: dict[int, mmap.mmap] = {}
        self._slots: dict[tuple[int, int], int] = {}
        """(rank, group) -> offset of the group's slot in the rank's page."""
        self._own_counts: dict[int, int] = {}
        """Group -> number of its last call on this rank."""

    def append(self, group: str, call: LoggedCollective) -> int:
        """Log a call of this rank; return its number, or 0 if there is no free slot."""
        key = _hash(group)
        if key not in self._own_counts:
            if len(self._own_counts) == MAX_GROUPS:
                return 0
            offset = len(self._own_counts) * _SLOT_BYTES
            self._slots[self.rank, key] = offset
            _GROUP.pack_into(self._rank_page(self.rank), offset, key)
            self._own_counts[key] = 0
        self._own_counts[key] += 1
        number = self._own_counts[key]
        text = call.description.encode(errors="replace")[:_WORDS_BYTES]
        page, place = self._rank_page(self.rank), self._call_offset(self.rank, key, number)
        # Write the number last, so that a reader that sees it also sees the rest.
        _CALL.pack_into(page, place, 0, call.key, text, _sum(number, call.key, text))
        _NUMBER.pack_into(page, place, number)
        return number

    def withdraw(self, group: str, number: int) -> None:
        """Remove the last call, which was interrupted before its collective started."""
        key = _hash(group)
        if self._own_counts.get(key) == number:
            self._own_counts[key] -= 1
            place = self._call_offset(self.rank, key, number)
            _CALL.pack_into(self._rank_page(self.rank), place, 0, 0, b"", 0)

    def call_at(self, rank: int, group: str, number: int) -> LoggedCollective | None:
        """Return a rank's call by number; None if it is not logged yet or was overwritten."""
        key = _hash(group)
        if self._slot(rank, key) is None:
            return None
        page, place = self._pages[rank], self._call_offset(rank, key, number)
        logged, signature, text, checksum = _CALL.unpack_from(page, place)
        text = text.rstrip(b"\0")
        if logged != number or checksum != _sum(logged, signature, text):
            return None  # another call, or one that is being written
        return LoggedCollective(signature, text.decode(errors="replace"))

    def has_reached(self, rank: int, group: str, number: int) -> bool:
        """Return whether a rank has made its call of this number or a later one."""
        key = _hash(group)
        if self._slot(rank, key) is None:
            # A rank without a free slot does not log its calls in further groups.
            last = (MAX_GROUPS - 1) * _SLOT_BYTES
            return bool(_GROUP.unpack_from(self._rank_page(rank), last)[0])
        logged, *_ = _CALL.unpack_from(self._pages[rank], self._call_offset(rank, key, number))
        return bool(logged >= number)

    def _slot(self, rank: int, key: int) -> int | None:
        """Return the offset of a group in a rank's page; None if the rank has not used it."""
        if (rank, key) not in self._slots:
            page = self._rank_page(rank)
            for offset in range(0, MAX_GROUPS * _SLOT_BYTES, _SLOT_BYTES):
                (group,) = _GROUP.unpack_from(page, offset)
                if group == key:
                    self._slots[rank, key] = offset
                    break
                if not group:
                    return None
        return self._slots.get((rank, key))

    def clear(self) -> None:
        """Remove all groups of this rank."""
        self._rank_page(self.rank)[:] = bytes(MAX_GROUPS * _SLOT_BYTES)
        self._slots.clear()
        self._own_counts.clear()

    def _call_offset(self, rank: int, key: int, number: int) -> int:
        return self._slots[rank, key] + _GROUP.size + number % CALLS_PER_GROUP * _CALL.size

    def _rank_page(self, rank: int) -> mmap.mmap:
        if rank not in self._pages:
            with (self._folder / f"collectives{rank}").open("r+b") as file:
                self._pages[rank] = mmap.mmap(file.fileno(), 0)
        return self._pages[rank]


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") or 1


def _sum(number: int, kind: int, text: bytes) -> int:
    """Return a checksum that detects a partially written entry."""
    return zlib.crc32(text, (number ^ kind ^ kind >> 32) & 0xFFFFFFFF) | 1 << 40


@dataclass(frozen=True, slots=True)
class PendingCollective:
    """Collective that the main thread of this rank is waiting to start."""

    description: str
    missing_ranks: tuple[int, ...]
    """Ranks that have not called it yet."""
    since: float
    """time.monotonic()"""


class CollectiveBarrier:
    """Barrier before each collective that checks that all ranks call the same one."""

    def __init__(self, log: CollectiveLog) -> None:
        self._log = log
        self._num_resets = 0
        """Number of times the groups were recreated; torch then reuses group names."""
        self._abandoned = False
        self.pending: PendingCollective | None = None

    def reset(self) -> None:
        """Reset the log after the process groups were recreated."""
        self._num_resets += 1
        self._log.clear()
        self._abandoned = False

    def abort(self) -> None:
        """Raise in every wait until the groups are recreated; thread-safe."""
        self._abandoned = True

    def __call__(self, group: ProcessGroup, call: LoggedCollective, *, wait: bool) -> None:
        """Log a call and compare it with those of the other ranks.

        Raises:
            CollectiveMismatch: the calls differ; no waiting rank has started its collective.
        """
        members = distributed_c10d.get_process_group_ranks(group)
        if len(members) < 2:  # noqa: PLR2004 - a group of one rank
            return
        name = f"{self._num_resets}:{group.group_name}"
        number = self._log.append(name, call)
        if not number:
            return
        others = [rank for rank in members if rank != self._log.rank]
        try:
            if wait:
                self._wait(name, number, call, others)
            is_mismatch = self._is_mismatch(name, number, call, others)
        except BaseException:  # interrupted
            self._log.withdraw(name, number)
            raise
        finally:
            self.pending = None
        if is_mismatch:
            calls = {rank: self._log.call_at(rank, name, number) for rank in others}
            raise CollectiveMismatch(describe_mismatch(calls | {self._log.rank: call}))

    def _wait(self, name: str, number: int, call: LoggedCollective, others: Sequence[int]) -> None:
        """Return when all ranks have logged the call, or some time after a mismatch."""
        start_time, sleep_s, mismatch_at = time.monotonic(), MIN_SLEEP_S, 0.0
        missing = tuple(others)
        while missing := tuple(r for r in missing if not self._log.has_reached(r, name, number)):
            now = time.monotonic()
            if self._abandoned:
                raise RuntimeError(ABORTED_MESSAGE)
            if not mismatch_at and self._is_mismatch(name, number, call, others):
                mismatch_at = now
            if mismatch_at and now - mismatch_at > MISMATCH_WAIT_S:
                return
            if now - start_time < SPIN_S:
                time.sleep(0)
                continue
            self.pending = PendingCollective(call.description, missing, start_time)
            time.sleep(sleep_s)
            sleep_s = min(sleep_s * 1.5, MAX_SLEEP_S)

    def _is_mismatch(
        self, name: str, number: int, call: LoggedCollective, others: Sequence[int]
    ) -> bool:
        calls = (self._log.call_at(rank, name, number) for rank in others)
        return any(other and other.key != call.key for other in calls)


def describe_mismatch(calls: dict[int, LoggedCollective | None]) -> str:
    """Return the error message for mismatched calls; it is the same on all ranks."""
    by_words: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        by_words.setdefault("nothing" if call is None else call.description, []).append(rank)
    parts = [
        f"{rank_sets.describe_ranks(ranks)} called {words}" for words, ranks in by_words.items()
    ]
    return (
        f"{', '.join(parts)}: these collectives do not match. Nothing was sent and the process"
        " group is still usable. Make all ranks call the same collective, also in a sharded save."
    )


def patch_collectives(log: CollectiveLog | None) -> CollectiveBarrier | None:
    """Patch torch.distributed to check each collective first; call it once per process.

    Args:
        log: log of CPU ranks on one host; None to check only that the cell runs on all ranks.
    """
    barrier = CollectiveBarrier(log) if log else None
    for name in _SAME_SIZE | _ANY_SIZE:
        if hasattr(ProcessGroup, name):
            patch(
                f"torch.distributed:ProcessGroup.{name}",
                functools.partial(_wrap_collective, name, barrier),
            )
    if barrier is not None:
        patch(
            "torch.distributed.distributed_c10d:_new_group_with_tag",
            functools.partial(_wrap_new_group, barrier),
        )
        patch("torch.distributed:Work.wait", _wrap_wait)
    return barrier


def _wrap_collective(
    name: str, barrier: CollectiveBarrier | None, original: Callable[..., Any]
) -> Callable[..., Any]:
    def method(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        options = next((arg for arg in args if hasattr(arg, "asyncOp")), kwargs.get("opts"))
        wait = not getattr(options, "asyncOp", False)
        # another cell may start the other ranks' part of an asynchronous collective, and a save in
        # the background communicates on its own thread
        if wait and threading.current_thread() is threading.main_thread():
            process_group.require_all_ranks((_SAME_SIZE | _ANY_SIZE)[name], group=group)
        if barrier is not None:
            barrier(group, _describe_call(name, args, options), wait=wait)
        return original(group, *args, **kwargs)

    return method


def _wrap_new_group(barrier: CollectiveBarrier, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wait for all ranks before new_group, which otherwise blocks in C++ for 30 minutes."""

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("use_local_synchronization"):
            words = (
                "new_group" if ranks is None else f"new_group of {rank_sets.describe_ranks(ranks)}"
            )
            world = distributed_c10d._get_default_group()  # noqa: SLF001
            barrier(world, LoggedCollective.from_signature(words, words), wait=True)
        return original(ranks, *args, **kwargs)

    return new_group


def _describe_call(name: str, args: Sequence[Any], options: object) -> LoggedCollective:
    """Return the key for comparing a call with other ranks' calls, and its description."""
    collective = (_SAME_SIZE | _ANY_SIZE)[name]
    inputs = args[1:2] if name in _OUTPUT_FIRST else args[:1]
    tensors = list(_tensors_of(inputs))
    dtypes = sorted(set(map(_kind, tensors)))
    signature = [collective, *dtypes]
    if name in _SAME_SIZE:
        signature += [str(sum(tensor.numel() for tensor in tensors))]
    details = []
    if (reduction := getattr(options, "reduceOp", None)) is not None:
        details += [str(reduction.op).rpartition(".")[2]]
    if (root := getattr(options, "rootRank", None)) is not None:
        details += [f"rank {root}"]
    shapes = [f"{_kind(tensor)}{list(tensor.shape)}" for tensor in tensors[:2]]
    more = [f"{len(tensors) - 2} more tensors"] if len(tensors) > 2 else []  # noqa: PLR2004
    of = f" of {', '.join([*shapes, *more])}" if tensors else ""
    by = f" ({', '.join(details)})" if details else ""
    sizes = [
        sum(tensor.numel() * tensor.element_size() for tensor in _tensors_of(argument))
        for argument in args[:2]
    ]
    return LoggedCollective.from_signature(
        "|".join([*signature, *details]), f"{collective}{by}{of}", max(sizes, default=0)
    )


def _tensors_of(values: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of arguments, which may be nested lists or tuples."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors_of(value)


def _kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _wrap_wait(original: Callable[..., bool]) -> Callable[..., bool]:
    """Make `Work.wait` interruptible while a collective runs.

    In torch 2.13 a gloo work whose wait times out raises an error but keeps running, so Python
    waits in short intervals and handles signals in between.
    """

    def wait(work: Work, *limit: Any) -> bool:
        if limit:
            return original(work, *limit)
        while not work.is_completed():
            try:
                return original(work, INTERRUPT_POLL_S)
            except RuntimeError:
                if work.is_completed():
                    break
        return original(work)  # completed: returns the result or raises its error

    return wait
