"""Is a checkpoint what was written? Sizes first, then checksums; pure."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from nbdist.checkpoint import checksum
from nbdist.checkpoint.names import shown
from nbdist.checkpoint.reader import Opened
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from nbdist.checkpoint.manifest import FilePart, Manifest

_LISTED = 5
_AT_ONCE = 64
"""Open files: a process may have about a thousand."""


def verify(
    folder: Path,
    *,
    files: Collection[str] | None = None,
    crc: bool = True,
    told: Callable[[int], object] | None = None,
) -> Manifest:
    """Compare the files of a checkpoint with its manifest, which is returned.

    Reads all bytes of `files` where `crc` is true: 1.5 GB/s and core here. The ranks can
    each take their `share`.

    Args:
        folder: of the checkpoint.
        files: names of files whose bytes are read; all of them by default. Sizes are compared
            of all.
        crc: whether bytes are read at all.
        told: hears now and then how many bytes are compared.

    Raises:
        CheckpointError: names the files that are missing, differ, or are not of nbdist.
    """
    with Opened.at(folder) as opened:
        _check_strange(opened)
        _check_there(opened)
        chosen = [one for one in opened.manifest.files if files is None or one.name in files]
        done = 0
        for start in range(0, len(chosen) if crc else 0, _AT_ONCE):
            some = chosen[start : start + _AT_ONCE]
            _check_bytes(opened, some, None if told is None else partial(_tell, told, done))
            done += sum(file.size_bytes for file in some)
        return opened.manifest


def share(manifest: Manifest, rank: int, world_size: int) -> set[str]:
    """Give the files whose bytes this rank compares, so that all ranks have about as many."""
    loads, mine = [0] * world_size, set()
    for file in sorted(manifest.files, key=lambda one: (-one.size_bytes, one.name)):
        lightest = loads.index(min(loads))
        loads[lightest] += file.size_bytes
        if lightest == rank:
            mine.add(file.name)
    return mine


def _check_strange(opened: Opened) -> None:
    if found := opened.strange():
        raise CheckpointError(
            f"{opened.path} holds {_list(found)}, which no save of nbdist put there; move it away."
        )


def _check_there(opened: Opened) -> None:
    for file in opened.manifest.files:
        os.close(opened.open(file))


def _tell(told: Callable[[int], object], before: int, done: int) -> None:
    told(before + done)


def _check_bytes(
    opened: Opened, files: list[FilePart], told: Callable[[int], object] | None
) -> None:
    with ExitStack() as stack:
        open_files = []
        for file in files:
            fd = opened.open(file)
            stack.callback(os.close, fd)
            open_files.append((fd, file.size_bytes))
        try:
            found = checksum.of_files(open_files, told=told)
        except OSError as error:
            raise CheckpointError(
                f"{opened.path} cannot be read ({error.strerror}); take another checkpoint."
            ) from error
    bad = [file.name for file, crc in zip(files, found, strict=True) if crc != file.crc32]
    if bad:
        raise CheckpointError(
            f"{_list(bad)} of {opened.path} {'has' if len(bad) == 1 else 'have'} other bytes than"
            " were written; take another checkpoint."
        )


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(shown, names[:_LISTED])) + more
