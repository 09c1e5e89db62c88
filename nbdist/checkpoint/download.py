"""What ranks of one machine need of a checkpoint at a URL, brought into a folder there; pure.

    begun     manifest.json, and of each file its head at the beginning of a hole of its size: so
              it can be looked up what lies where
    bring     files, whole and compared with their checksums, in the place of the holes

Several ranks share the folder. Who holds the lock of a file brings it, the others wait for that.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from nbdist.checkpoint import checksum, durable_io
from nbdist.checkpoint.manifest import MAX_BYTES, FilePart, Manifest
from nbdist.checkpoint.names import MANIFEST
from nbdist.checkpoint.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES
from nbdist.checkpoint.url import in_words
from nbdist.checkpoint.url_storage import content
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from nbdist.checkpoint.url import Url

_HEAD_BYTES = 1 << 16
"""Of a file, at first: most heads are shorter."""
_POLL_S = 0.05


class Brought:
    """A folder that stands for a checkpoint at a URL."""

    def __init__(self, url: Url, folder: Path) -> None:
        """Bring what tells where everything lies; blocks while another rank does.

        Args:
            url: of the checkpoint's files.
            folder: private; all ranks of this machine name the same.

        Raises:
            CheckpointError: it cannot be read there, or there is no room here.
        """
        self.folder, self._url = folder, url
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            with in_words(f"{url} cannot be brought to {folder}"):
                while not self._once(MANIFEST, self._begin):
                    time.sleep(_POLL_S)
            self.manifest = Manifest.from_json((folder / MANIFEST).read_bytes())
        except BaseException:
            self.remove()
            raise

    def bring(
        self, names: Collection[str], told: Callable[[int], object] | None = None, first: int = 0
    ) -> None:
        """Bring files; those that another rank brings meanwhile are waited for.

        Args:
            names: of them.
            told: hears how many bytes are here.
            first: where to begin, so that ranks begin with different files.

        Raises:
            CheckpointError: one cannot be read, or has other bytes than were written.
        """
        files = deque(one for one in self.manifest.files if one.name in names)
        self._check_room(sum(one.size_bytes for one in files if not self._is_here(one)))
        files.rotate(-first)
        done = skipped = 0
        while files:
            one = files.popleft()
            heard = None if told is None else partial(_tell, told, done)
            if self._once(one.name, partial(self._fetch, one, heard)):
                done, skipped = done + one.size_bytes, 0
                continue
            files.append(one)
            skipped += 1
            if skipped >= len(files):
                time.sleep(_POLL_S)

    def _is_here(self, file: FilePart) -> bool:
        lock = self._lock(file.name)
        return lock.exists() and lock.stat().st_size > 0

    def _check_room(self, size_bytes: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if size_bytes > free:
            raise CheckpointError(
                f"{size_bytes >> 20} MiB of {self._url} have to be brought to {self.folder}, which"
                f" has room for {free >> 20} MiB; free room, or set TMPDIR to a larger disk and"
                " restart."
            )

    def _lock(self, name: str) -> Path:
        return self.folder / f".{name}.lock"

    def remove(self) -> None:
        """Remove the folder; other ranks may do so too."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _once(self, name: str, make: Callable[[], object]) -> bool:
        """Make a file unless it is there; False: another process is about to."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        lock = os.open(self._lock(name), flags, 0o600)
        try:
            if not durable_io.try_lock(lock, alone=True):
                return False
            if not os.fstat(lock).st_size:
                make()
                os.write(lock, b"1")  # it is there
            return True
        finally:
            durable_io.unlock_and_close(lock)

    def _begin(self) -> None:
        """Bring the manifest, and the heads of all files."""
        text = content(self._url / MANIFEST)
        if len(text) > MAX_BYTES:
            raise CheckpointError(f"the manifest at {self._url} is too large; take another one.")
        manifest = Manifest.from_json(text)
        for file, head in self._heads(manifest.files):
            with (self.folder / file.name).open("wb") as hole:
                hole.write(head)
                hole.truncate(file.size_bytes)
        (self.folder / MANIFEST).write_bytes(text)

    def _heads(self, files: Collection[FilePart]) -> Iterator[tuple[FilePart, bytes]]:
        """The first bytes of each file, with all of its head."""
        begun = self._ranges([(one, 0, min(one.size_bytes, _HEAD_BYTES)) for one in files])
        ends = {
            one: min(LENGTH_BYTES + _length(head), one.size_bytes, MAX_HEADER_BYTES)
            for one, head in zip(files, begun, strict=True)
        }
        longer = [(one, _HEAD_BYTES, end) for one, end in ends.items() if end > _HEAD_BYTES]
        rest = {task[0]: more for task, more in zip(longer, self._ranges(longer), strict=True)}
        for one, head in zip(files, begun, strict=True):
            yield one, head + rest.get(one, b"")

    def _ranges(self, wanted: list[tuple[FilePart, int, int]]) -> list[bytes]:
        if not wanted:
            return []
        system, path = self._url.opened()
        paths = [f"{path}/{file.name}" for file, _, _ in wanted]
        starts, ends = [start for _, start, _ in wanted], [end for _, _, end in wanted]
        found: list[bytes] = system.cat_ranges(paths, starts, ends, on_error="raise")
        return found

    def _fetch(self, file: FilePart, told: Callable[[int], object] | None) -> None:
        """Bring one file and put it in the place of its hole."""
        system, path = self._url.opened()
        here, part = self.folder / file.name, self.folder / f".{file.name}.part"
        with in_words(f"{file.name} of {self._url} cannot be brought to {self.folder}"):
            system.get_file(f"{path}/{file.name}", str(part), **_callback(told))
            fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
            try:
                same = os.fstat(fd).st_size == file.size_bytes
                same = same and checksum.of_files([(fd, file.size_bytes)]) == [file.crc32]
            finally:
                os.close(fd)
        if not same:
            with suppress(OSError):
                part.unlink()
            raise CheckpointError(
                f"{file.name} of {self._url} has other bytes than were written; take another"
                " checkpoint."
            )
        part.replace(here)


def _callback(told: Callable[[int], object] | None) -> dict[str, Any]:
    """Have a file system say how many bytes of a file are here."""
    if told is None:
        return {}
    from fsspec.callbacks import Callback

    return {"callback": Callback(hooks={"told": lambda _size, value, **_: told(value)})}


def _tell(told: Callable[[int], object], before: int, done: int) -> None:
    told(before + done)


def _length(head: bytes) -> int:
    return int.from_bytes(head[:LENGTH_BYTES], "little")
