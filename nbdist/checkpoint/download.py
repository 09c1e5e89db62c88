"""Download of a checkpoint at a URL into a folder that the ranks of one machine share.

    constructor   downloads manifest.json and the safetensors header of each file. Each file is
                  created as a sparse file of its final size, so that tensors can be located.
    fetch         downloads whole files, compares their checksums and replaces the sparse files

The rank that holds the lock of a file downloads it; other ranks wait.
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
from nbdist.checkpoint.manifest import MAX_BYTES, CheckpointFile, Manifest
from nbdist.checkpoint.names import MANIFEST_NAME
from nbdist.checkpoint.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES
from nbdist.checkpoint.url import translate_errors
from nbdist.checkpoint.url_storage import read_small_file
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from nbdist.checkpoint.url import Url

_HEAD_BYTES = 1 << 16
"""Size of the first read of each file. Most safetensors headers are shorter."""
_POLL_S = 0.05


class CheckpointDownload:
    """Local folder with downloaded files of a checkpoint at a URL."""

    def __init__(self, url: Url, folder: Path) -> None:
        """Download the manifest and the file headers. Blocks while another rank does so.

        Args:
            url: URL of the checkpoint's files.
            folder: private folder, the same for all ranks of this machine.

        Raises:
            CheckpointError: the URL cannot be read or the folder cannot be written.
        """
        self.folder, self._url = folder, url
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            with translate_errors(f"Cannot download {url} to {folder}"):
                while not self._once(MANIFEST_NAME, self._begin):
                    time.sleep(_POLL_S)
            self.manifest = Manifest.from_json((folder / MANIFEST_NAME).read_bytes())
        except BaseException:
            self.remove()
            raise

    def fetch(
        self,
        names: Collection[str],
        on_progress: Callable[[int], object] | None = None,
        first: int = 0,
    ) -> None:
        """Download files, and wait for those that other ranks are downloading.

        Args:
            names: names of the files.
            on_progress: called with the number of bytes downloaded.
            first: index of the file to begin with. With a different index on each rank, the
                ranks download different files.

        Raises:
            CheckpointError: a file cannot be read, its checksum differs, or the disk is full.
        """
        files = deque(file for file in self.manifest.files if file.name in names)
        self._check_room(sum(file.size_bytes for file in files if not self._is_here(file)))
        files.rotate(-first)
        done = skipped = 0
        while files:
            file = files.popleft()
            on_file_progress = (
                None if on_progress is None else partial(_report_total, on_progress, done)
            )
            if self._once(file.name, partial(self._fetch, file, on_file_progress)):
                done, skipped = done + file.size_bytes, 0
                continue
            files.append(file)
            skipped += 1
            if skipped >= len(files):
                time.sleep(_POLL_S)

    def _is_here(self, file: CheckpointFile) -> bool:
        lock = self._lock(file.name)
        return lock.exists() and lock.stat().st_size > 0

    def _check_room(self, size_bytes: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if size_bytes > free:
            raise CheckpointError(
                f"Downloading {self._url} to {self.folder} needs {size_bytes >> 20} MiB, but only"
                f" {free >> 20} MiB are free. Free space, or set TMPDIR to a larger disk and"
                " restart."
            )

    def _lock(self, name: str) -> Path:
        return self.folder / f".{name}.lock"

    def remove(self) -> None:
        """Remove the folder. Several ranks may call this at the same time."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _once(self, name: str, make: Callable[[], object]) -> bool:
        """Create a file unless it exists. Return False if another process is creating it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        lock = os.open(self._lock(name), flags, 0o600)
        try:
            if not durable_io.try_lock(lock, alone=True):
                return False
            if not os.fstat(lock).st_size:
                make()
                os.write(lock, b"1")  # a lock file that is not empty marks the file as complete
            return True
        finally:
            durable_io.unlock_and_close(lock)

    def _begin(self) -> None:
        """Download the manifest and the headers of all files."""
        text = read_small_file(self._url / MANIFEST_NAME)
        if len(text) > MAX_BYTES:
            raise CheckpointError(
                f"The manifest at {self._url} is too large. Load another checkpoint."
            )
        manifest = Manifest.from_json(text)
        for file, head in self._heads(manifest.files):
            with (self.folder / file.name).open("wb") as hole:
                hole.write(head)
                hole.truncate(file.size_bytes)
        (self.folder / MANIFEST_NAME).write_bytes(text)

    def _heads(self, files: Collection[CheckpointFile]) -> Iterator[tuple[CheckpointFile, bytes]]:
        """Yield each file with its first bytes, which include the whole header."""
        heads = self._ranges([(file, 0, min(file.size_bytes, _HEAD_BYTES)) for file in files])
        ends = {
            file: min(LENGTH_BYTES + _length(head), file.size_bytes, MAX_HEADER_BYTES)
            for file, head in zip(files, heads, strict=True)
        }
        longer = [(file, _HEAD_BYTES, end) for file, end in ends.items() if end > _HEAD_BYTES]
        rest = {task[0]: more for task, more in zip(longer, self._ranges(longer), strict=True)}
        for file, head in zip(files, heads, strict=True):
            yield file, head + rest.get(file, b"")

    def _ranges(self, wanted: list[tuple[CheckpointFile, int, int]]) -> list[bytes]:
        if not wanted:
            return []
        system, path = self._url.open_filesystem()
        paths = [f"{path}/{file.name}" for file, _, _ in wanted]
        starts, ends = [start for _, start, _ in wanted], [end for _, _, end in wanted]
        contents: list[bytes] = system.cat_ranges(paths, starts, ends, on_error="raise")
        return contents

    def _fetch(self, file: CheckpointFile, on_progress: Callable[[int], object] | None) -> None:
        """Download one file and replace its sparse file."""
        system, path = self._url.open_filesystem()
        target, part = self.folder / file.name, self.folder / f".{file.name}.part"
        with translate_errors(f"Cannot download {self._url / file.name} to {self.folder}"):
            system.get_file(f"{path}/{file.name}", str(part), **_callback(on_progress))
            fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
            try:
                is_valid = os.fstat(fd).st_size == file.size_bytes
                is_valid = is_valid and checksum.crc32_of_files([(fd, file.size_bytes)]) == [
                    file.crc32
                ]
            finally:
                os.close(fd)
        if not is_valid:
            with suppress(OSError):
                part.unlink()
            raise CheckpointError(
                f"Checksum mismatch in {self._url / file.name}: the file is corrupt. Load another"
                " checkpoint."
            )
        part.replace(target)


def _callback(on_progress: Callable[[int], object] | None) -> dict[str, Any]:
    """Return the fsspec argument for progress reports, with `on_progress` as the callback."""
    if on_progress is None:
        return {}
    from fsspec.callbacks import Callback

    return {"callback": Callback(hooks={"progress": lambda _size, value, **_: on_progress(value)})}


def _report_total(on_progress: Callable[[int], object], before: int, done: int) -> None:
    on_progress(before + done)


def _length(head: bytes) -> int:
    return int.from_bytes(head[:LENGTH_BYTES], "little")
