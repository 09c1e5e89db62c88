"""CRC-32 of much data, on several cores; pure.

zlib computes 1.5 to 2 GB/s on one core and lets other threads run. Parts are computed side
by side and put together as zlib's crc32_combine does, which Python 3.11 does not offer.
"""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING

from nbdist.checkpoint.durable_io import read_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PART_BYTES = 32 << 20
MAX_THREADS = 8
_BUFFER_BYTES = 256 << 10  # stays in the core's own cache
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""The polynomial 1: zlib keeps the bits in reverse."""


def combined(first: int, second: int, size_bytes: int) -> int:
    """Checksum of two parts from the checksum of each and the bytes of the second."""
    return _times(_shift(size_bytes), first) ^ second


def of_files(
    files: Sequence[tuple[int, int]],
    *,
    threads: int | None = None,
    told: Callable[[int], object] | None = None,
) -> list[int]:
    """Checksums of open files.

    Args:
        files: descriptor and size in bytes of each.
        threads: at most so many cores; all that this process may use, up to 8, by default.
        told: hears after each part of it how many bytes are done.

    Raises:
        OSError: a file cannot be read, or is shorter.
    """
    tasks = [
        (number, fd, start, min(PART_BYTES, size_bytes - start))
        for number, (fd, size_bytes) in enumerate(files)
        for start in range(0, size_bytes, PART_BYTES)
    ]
    found, done = [0] * len(files), 0
    with ThreadPoolExecutor(threads or _cores(), thread_name_prefix="nbdist-crc") as pool:
        parts = pool.map(lambda task: _of_part(*task[1:]), tasks)
        for (number, _, _, size_bytes), part in zip(tasks, parts, strict=True):
            found[number] = combined(found[number], part, size_bytes)
            done += size_bytes
            if told is not None:
                told(done)
    return found


def _of_part(fd: int, start: int, size_bytes: int) -> int:
    # Not a map: a file that another process cuts short would end this one with SIGBUS.
    buffer, found = memoryview(bytearray(min(_BUFFER_BYTES, size_bytes))), 0
    for at in range(start, start + size_bytes, _BUFFER_BYTES):
        piece = buffer[: start + size_bytes - at]
        read_at(fd, piece, at)
        found = zlib.crc32(piece, found)
    return found


def _cores() -> int:
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)


@lru_cache(maxsize=256)
def _shift(size_bytes: int) -> int:
    """What so many bytes of zeros do to a checksum: x to the power of their bits."""
    power, square, bits = _ONE, _ONE >> 1, 8 * size_bytes
    while bits:
        if bits & 1:
            power = _times(square, power)
        square, bits = _times(square, square), bits >> 1
    return power


def _times(first: int, second: int) -> int:
    """Product of two polynomials modulo CRC-32's."""
    product = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            product ^= second
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)
    return product
