"""URLs of checkpoints, accessed with fsspec, and the download of a checkpoint.

fsspec is imported on first use. Each of its file systems takes credentials from the environment,
its own configuration files, or the URL. Passwords in a URL are redacted in all messages.

A checkpoint is downloaded into a folder that the ranks of one machine share:

    constructor   downloads manifest.json and the safetensors header of each file. Each file is
                  created as a sparse file of its final size, so that tensors can be located.
    fetch         downloads whole files, compares their checksums and replaces the sparse files

The rank that holds the lock of a file downloads it; other ranks wait.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from nbdist.checkpoint import durable_io
from nbdist.checkpoint.manifest import MAX_BYTES, CheckpointFile, Manifest
from nbdist.checkpoint.name_validation import MANIFEST_NAME
from nbdist.checkpoint.reader import crc32_of_file
from nbdist.checkpoint.safetensors_writer import LENGTH_BYTES, MAX_HEADER_BYTES
from nbdist.errors import CheckpointError
from nbdist.paths import expand_user
from nbdist.redaction import redact_secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
_MAX_WORDS = 200
_BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci", "tos"}
"""Object stores: they need no folders, and creating one could create a bucket."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, repr=False)
class Url:
    """URL with an interface like `pathlib.Path`. Its password is redacted when printed."""

    unredacted: str

    def __truediv__(self, name: str) -> Url:
        """Return the URL of a child."""
        return Url(f"{self.unredacted.rstrip('/')}/{name}")

    def __str__(self) -> str:
        """Return the URL without its password."""
        return redact_secrets(self.unredacted)

    def __repr__(self) -> str:
        """Return the representation without the password."""
        return f"Url({str(self)!r})"

    @property
    def name(self) -> str:
        """Last component of the path."""
        return self.unredacted.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """URL without the last component of the path."""
        return Url(self.unredacted.rstrip("/").rpartition("/")[0])

    def open_filesystem(self) -> tuple[Any, str]:
        """Return the fsspec file system and the path in it.

        Raises:
            CheckpointError: the URL is not supported or reachable, or a package is missing.
        """
        from fsspec.core import url_to_fs

        if _SCHEME.fullmatch(self.unredacted):
            raise CheckpointError(
                f"{self} does not name a folder. Use a URL such as s3://bucket/path, or a folder."
            )
        try:
            system, path = url_to_fs(self.unredacted)
        except ImportError as error:
            raise CheckpointError(
                f"{self} needs a package that is not installed: {error}. Install it on all"
                " machines with ranks."
            ) from error
        except ValueError as error:
            raise CheckpointError(
                f"fsspec does not support the URL {self} ({describe_error(error)}). Use a URL such"
                " as s3://bucket/path, or a folder."
            ) from error
        except Exception as error:
            raise CheckpointError(
                f"Cannot reach {self} ({describe_error(error)}). Check the URL and the network."
            ) from error
        if "memory" in _protocols(system):
            raise CheckpointError(
                f"{self} is the memory of a single process, which other processes cannot read. Use"
                " a URL such as s3://bucket/path, or a folder."
            )
        return system, path

    def read_bytes(self) -> bytes:
        """Read a small file.

        Raises:
            CheckpointError: the file cannot be read.
        """
        system, path = self.open_filesystem()
        with translate_errors(f"Cannot read {self}"):
            content: bytes = system.cat_file(path)
        return content

    def make_folder(self) -> None:
        """Create the folder, except in object stores, which need none."""
        system, path = self.open_filesystem()
        if not _BUCKETS & _protocols(system):
            system.makedirs(path, exist_ok=True)


def is_url(text: object) -> TypeGuard[str]:
    """Return whether the text is a URL rather than a path."""
    return isinstance(text, str) and _SCHEME.match(text) is not None


def parse_location(text: object, within: Path = Path()) -> Path | Url:
    """Parse a URL or a path. "~" is expanded, and a relative path is joined to `within`.

    Raises:
        OptionError: "~" of a user that does not exist.
    """
    if isinstance(text, Url):
        return text
    return Url(text) if is_url(text) else within / expand_user(str(text))


def location_with_password(where: Path | Url) -> str:
    """Return the text that ``parse_location`` accepts. A URL includes its password."""
    return where.unredacted if isinstance(where, Url) else str(where)


@contextmanager
def translate_errors(problem: str) -> Iterator[None]:
    """Convert any exception of a file system to a CheckpointError.

    Args:
        problem: beginning of the message; the exception is appended in parentheses.

    Raises:
        CheckpointError: the block raised an exception.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{problem} ({describe_error(error)}). Check the URL and the permissions of this"
            " machine."
        ) from error


def describe_error(error: Exception) -> str:
    """Describe an exception on one line, at most 200 characters long, with secrets redacted."""
    text = redact_secrets(" ".join(str(error).split()))
    text = text if len(text) <= _MAX_WORDS else f"{text[:_MAX_WORDS]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _protocols(system: Any) -> set[str]:
    found = system.protocol
    return {found} if isinstance(found, str) else set(found)


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
                while not self._create_if_missing(MANIFEST_NAME, self._download_headers):
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
        needed = 0
        for file in files:
            lock = self._lock(file.name)
            if not lock.exists() or not lock.stat().st_size:  # not downloaded yet
                needed += file.size_bytes
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise CheckpointError(
                f"Downloading {self._url} to {self.folder} needs {needed >> 20} MiB, but only"
                f" {free >> 20} MiB are free. Free space, or set TMPDIR to a larger disk and"
                " restart."
            )
        files.rotate(-first)
        done = skipped = 0
        while files:
            file = files.popleft()
            if self._create_if_missing(
                file.name, partial(self.download_file, file, on_progress, done)
            ):
                done, skipped = done + file.size_bytes, 0
                continue
            files.append(file)
            skipped += 1
            if skipped >= len(files):
                time.sleep(_POLL_S)

    def remove(self) -> None:
        """Remove the folder. Several ranks may call this at the same time."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _lock(self, name: str) -> Path:
        return self.folder / f".{name}.lock"

    def _create_if_missing(self, name: str, make: Callable[[], object]) -> bool:
        """Create a file unless it exists. Return False if another process is creating it."""
        lock = os.open(self._lock(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not durable_io.try_lock(lock, exclusive=True):
                return False
            if not os.fstat(lock).st_size:
                make()
                os.write(lock, b"1")  # a lock file that is not empty marks the file as complete
            return True
        finally:
            durable_io.unlock_and_close(lock)

    def _download_headers(self) -> None:
        text = (self._url / MANIFEST_NAME).read_bytes()
        if len(text) > MAX_BYTES:
            raise CheckpointError(
                f"The manifest at {self._url} is too large. Load another checkpoint."
            )
        files = Manifest.from_json(text).files
        system, url_path = self._url.open_filesystem()
        paths = [f"{url_path}/{file.name}" for file in files]
        ends = [min(LENGTH_BYTES, file.size_bytes) for file in files]
        lengths = system.cat_ranges(paths, [0] * len(files), ends, on_error="raise")
        for index, (file, length) in enumerate(zip(files, lengths, strict=True)):
            header_bytes = min(int.from_bytes(length, "little"), MAX_HEADER_BYTES)
            ends[index] = min(LENGTH_BYTES + header_bytes, file.size_bytes)
        heads = system.cat_ranges(paths, [0] * len(files), ends, on_error="raise")
        for file, head in zip(files, heads, strict=True):
            with (self.folder / file.name).open("wb") as sparse:
                sparse.write(head)
                sparse.truncate(file.size_bytes)
        (self.folder / MANIFEST_NAME).write_bytes(text)

    def download_file(
        self, file: CheckpointFile, on_progress: Callable[[int], object] | None, before: int
    ) -> None:
        """Download one file and replace its sparse file."""
        system, path = self._url.open_filesystem()
        part = self.folder / f".{file.name}.part"
        with translate_errors(f"Cannot download {self._url / file.name} to {self.folder}"):
            options: dict[str, Any] = {}
            if on_progress is not None:
                from fsspec.callbacks import Callback

                def report(_size: int, value: int, **_: object) -> None:
                    on_progress(before + value)

                options["callback"] = Callback(hooks={"progress": report})
            system.get_file(f"{path}/{file.name}", str(part), **options)
            with part.open("rb", buffering=0) as content:
                size_bytes = os.fstat(content.fileno()).st_size
                is_valid = size_bytes == file.size_bytes and crc32_of_file(content) == file.crc32
        if not is_valid:
            with suppress(OSError):
                part.unlink()
            raise CheckpointError(
                f"Checksum mismatch in {self._url / file.name}: the file is corrupt. Load another"
                " checkpoint."
            )
        part.replace(self.folder / file.name)
