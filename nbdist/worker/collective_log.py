"""Log of the collectives that each rank has called, in shared memory.

Each rank writes its own file-backed page and reads those of the other ranks without locks. A page
has a slot per process group, which holds the last few calls in that group, numbered from 1. A call
is logged before its collective starts, which shows the ranks that have not reached it yet.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MAX_GROUPS = 64
"""Process groups per page; calls in further groups are neither logged nor checked."""
CALLS_PER_GROUP = 8
"""Calls kept per group; ranks that wait for each other are at most one call apart."""
_GROUP = struct.Struct("<Q")
_NUMBER = struct.Struct("<Q")
_CALL = struct.Struct("<QQ160sQ")
"""Number, key, description and checksum of a call."""
_SLOT_BYTES = _GROUP.size + CALLS_PER_GROUP * _CALL.size
_WORDS_BYTES = 160


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """One call of a collective."""

    key: int
    """Equal on ranks whose calls match."""
    description: str
    """For messages: "all_reduce of float32[4]"."""

    @classmethod
    def from_signature(cls, what: str, words: str) -> LoggedCall:
        """Return a call from its signature; calls with equal signatures match."""
        return cls(_hash(what), words)


class CollectiveLog:
    """Log pages of all ranks of one node."""

    def __init__(self, folder: Path, *, rank: int, world_size: int) -> None:
        """Create this rank's page; the others' are opened on first access.

        Args:
            folder: folder private to the session, the same on all ranks.
            rank: rank of this process.
            world_size: number of pages.
        """
        self.rank, self.world_size = rank, world_size
        self._folder = folder
        path = self._path(rank)
        path.write_bytes(bytes(MAX_GROUPS * _SLOT_BYTES))
        path.chmod(0o600)
        self._pages = {rank: _mapped(path)}
        self._slots: dict[tuple[int, int], int] = {}
        """(rank, group) -> offset of the group's slot in the rank's page."""
        self._own: dict[int, int] = {}
        """Group -> number of its last call on this rank."""

    def append(self, group: str, call: LoggedCall) -> int:
        """Log a call of this rank; return its number, or 0 if there is no free slot."""
        key = _hash(group)
        if key not in self._own:
            if len(self._own) == MAX_GROUPS:
                return 0
            offset = len(self._own) * _SLOT_BYTES
            self._slots[self.rank, key] = offset
            _GROUP.pack_into(self._pages[self.rank], offset, key)
            self._own[key] = 0
        self._own[key] += 1
        number = self._own[key]
        words = call.description.encode(errors="replace")[:_WORDS_BYTES]
        page, place = self._pages[self.rank], self._place(self.rank, key, number)
        # Write the number last, so that a reader that sees it also sees the rest.
        _CALL.pack_into(page, place, 0, call.key, words, _sum(number, call.key, words))
        _NUMBER.pack_into(page, place, number)
        return number

    def withdraw(self, group: str, number: int) -> None:
        """Remove the last call, which was interrupted before its collective started."""
        key = _hash(group)
        if self._own.get(key) == number:
            self._own[key] -= 1
            place = self._place(self.rank, key, number)
            _CALL.pack_into(self._pages[self.rank], place, 0, 0, b"", 0)

    def last_number(self, group: str) -> int:
        """Return the number of this rank's last call in a group, 0 if there is none."""
        return self._own.get(_hash(group), 0)

    def call_at(self, rank: int, group: str, number: int) -> LoggedCall | None:
        """Return a rank's call by number; None if it is not logged yet or was overwritten."""
        key = _hash(group)
        if self._slot(rank, key) is None:
            return None
        page, place = self._pages[rank], self._place(rank, key, number)
        logged, signature, words, checksum = _CALL.unpack_from(page, place)
        words = words.rstrip(b"\0")
        if logged != number or checksum != _sum(logged, signature, words):
            return None  # another call, or one that is being written
        return LoggedCall(signature, words.decode(errors="replace"))

    def has_reached(self, rank: int, group: str, number: int) -> bool:
        """Return whether a rank has made its call of this number or a later one."""
        key = _hash(group)
        if self._slot(rank, key) is None:
            return self._is_full(rank)
        logged, *_ = _CALL.unpack_from(self._pages[rank], self._place(rank, key, number))
        return bool(logged >= number)

    def _slot(self, rank: int, key: int) -> int | None:
        """Return the offset of a group in a rank's page; None if the rank has not used it."""
        if (rank, key) not in self._slots:
            page = self._page(rank)
            for offset in range(0, MAX_GROUPS * _SLOT_BYTES, _SLOT_BYTES):
                (group,) = _GROUP.unpack_from(page, offset)
                if group == key:
                    self._slots[rank, key] = offset
                    break
                if not group:
                    return None
        return self._slots.get((rank, key))

    def _is_full(self, rank: int) -> bool:
        """Return whether a rank has no free slot, so that its calls are unknown."""
        last = (MAX_GROUPS - 1) * _SLOT_BYTES
        return bool(_GROUP.unpack_from(self._page(rank), last)[0])

    def clear(self) -> None:
        """Remove all groups of this rank."""
        self._pages[self.rank][:] = bytes(MAX_GROUPS * _SLOT_BYTES)
        self._slots.clear()
        self._own.clear()

    def _place(self, rank: int, key: int, number: int) -> int:
        return self._slots[rank, key] + _GROUP.size + number % CALLS_PER_GROUP * _CALL.size

    def _page(self, rank: int) -> mmap.mmap:
        if rank not in self._pages:
            self._pages[rank] = _mapped(self._path(rank))
        return self._pages[rank]

    def _path(self, rank: int) -> Path:
        return self._folder / f"board{rank}"


def _mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") or 1


def _sum(number: int, what: int, words: bytes) -> int:
    """Return a checksum that detects a partially written entry."""
    return zlib.crc32(words, (number ^ what ^ what >> 32) & 0xFFFFFFFF) | 1 << 40
