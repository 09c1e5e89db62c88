"""Which collectives the ranks have called, on pages of memory that all of them see.

Runs on a rank. Each rank writes its own page and reads those of the others, so that nobody
waits for a lock. A page has a slot for each process group, and a slot the last few calls in
it, numbered from 1. A call is written before its collective begins: a rank that is about to
wait can be told from one that is not there.
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

GROUPS = 64
"""Process groups that have a slot; calls in further ones are not written down, nor waited for."""
KEPT = 8
"""Calls of a group that are kept; ranks that wait for one another are one call apart."""
_GROUP = struct.Struct("<Q")
_NUMBER = struct.Struct("<Q")
_CALL = struct.Struct("<QQ160sQ")
"""Number, key, words and sum of a call."""
_SLOT_BYTES = _GROUP.size + KEPT * _CALL.size
_WORDS_BYTES = 160


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a collective."""

    key: int
    """Equal on ranks whose calls fit together."""
    words: str
    """For people: "all_reduce of float32[4]"."""

    @classmethod
    def of(cls, what: str, words: str) -> Call:
        """Make a call; `what` decides whether calls fit together."""
        return cls(_hash(what), words)


class Board:
    """The pages of all ranks."""

    def __init__(self, folder: Path, *, rank: int, world_size: int) -> None:
        """Make this rank's page; the others' are opened when they are first looked at.

        Args:
            folder: private to the session, the same on all ranks.
            rank: of this process.
            world_size: number of pages.
        """
        self.rank, self.world_size = rank, world_size
        self._folder = folder
        path = self._path(rank)
        path.write_bytes(bytes(GROUPS * _SLOT_BYTES))
        path.chmod(0o600)
        self._pages = {rank: _mapped(path)}
        self._slots: dict[tuple[int, int], int] = {}
        """(rank, group) -> offset of the group's slot in the rank's page."""
        self._own: dict[int, int] = {}
        """Group -> its last number on this rank."""

    def post(self, group: str, call: Call) -> int:
        """Write down a call of this rank; returns its number, 0 where no slot is left."""
        key = _hash(group)
        if key not in self._own:
            if len(self._own) == GROUPS:
                return 0
            offset = len(self._own) * _SLOT_BYTES
            self._slots[self.rank, key] = offset
            _GROUP.pack_into(self._pages[self.rank], offset, key)
            self._own[key] = 0
        self._own[key] += 1
        number = self._own[key]
        words = call.words.encode(errors="replace")[:_WORDS_BYTES]
        page, place = self._pages[self.rank], self._place(self.rank, key, number)
        # the number last: who sees it finds the rest, wherever the two were interrupted
        _CALL.pack_into(page, place, 0, call.key, words, _sum(number, call.key, words))
        _NUMBER.pack_into(page, place, number)
        return number

    def withdraw(self, group: str, number: int) -> None:
        """Take back the last call: its rank was stopped before it began."""
        key = _hash(group)
        if self._own.get(key) == number:
            self._own[key] -= 1
            place = self._place(self.rank, key, number)
            _CALL.pack_into(self._pages[self.rank], place, 0, 0, b"", 0)

    def last(self, group: str) -> int:
        """Number of this rank's last call in a group."""
        return self._own.get(_hash(group), 0)

    def call(self, rank: int, group: str, number: int) -> Call | None:
        """A rank's call of this number; None where it has not made it, or long ago."""
        key = _hash(group)
        if self._slot(rank, key) is None:
            return None
        page, place = self._pages[rank], self._place(rank, key, number)
        found, what, words, total = _CALL.unpack_from(page, place)
        words = words.rstrip(b"\0")
        if found != number or total != _sum(found, what, words):
            return None  # another call, or one that is being written
        return Call(what, words.decode(errors="replace"))

    def reached(self, rank: int, group: str, number: int) -> bool:
        """Whether a rank has made its call of this number, or a later one."""
        key = _hash(group)
        if self._slot(rank, key) is None:
            return self._is_full(rank)
        found, *_ = _CALL.unpack_from(self._pages[rank], self._place(rank, key, number))
        return bool(found >= number)

    def _slot(self, rank: int, key: int) -> int | None:
        """Where a rank's page has a group; None where it has not used it yet."""
        if (rank, key) not in self._slots:
            page = self._page(rank)
            for offset in range(0, GROUPS * _SLOT_BYTES, _SLOT_BYTES):
                (found,) = _GROUP.unpack_from(page, offset)
                if found == key:
                    self._slots[rank, key] = offset
                    break
                if not found:
                    return None
        return self._slots.get((rank, key))

    def _is_full(self, rank: int) -> bool:
        """Whether a rank has no slot left, so that what it calls cannot be known."""
        last = (GROUPS - 1) * _SLOT_BYTES
        return bool(_GROUP.unpack_from(self._page(rank), last)[0])

    def clear(self) -> None:
        """Forget all groups of this rank: new ones take their places."""
        self._pages[self.rank][:] = bytes(GROUPS * _SLOT_BYTES)
        self._slots.clear()
        self._own.clear()

    def _place(self, rank: int, key: int, number: int) -> int:
        return self._slots[rank, key] + _GROUP.size + number % KEPT * _CALL.size

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
    """Tell a whole entry from one that is half written."""
    return zlib.crc32(words, (number ^ what ^ what >> 32) & 0xFFFFFFFF) | 1 << 40
