"""Checkpoint storage at a URL.

<url>/
    step-1000/
        <32 hex>/             one save, with the same files as a checkpoint in a folder
            manifest.json     written last; a save without it is not listed
            .owner.json       process that writes the save; removed on commit
            part-00000.json   report of a rank; removed on commit

Object stores have neither locks nor renames, so a save never changes the files of another one.
Saving under an existing name creates a second save next to the first; the newest complete one
is used and the older one is removed. The next save removes leftovers of dead processes.
"""

from __future__ import annotations

import re
import secrets
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbdist.checkpoint.manifest import MAX_BYTES, Manifest
from nbdist.checkpoint.name_validation import (
    MANIFEST_NAME,
    check_name,
    is_checkpoint_name,
    is_rank_report_name,
    rank_report_name,
)
from nbdist.checkpoint.safetensors_writer import SafetensorsWriter
from nbdist.checkpoint.storage import PendingCheckpoint, Storage, check_sizes, summarize
from nbdist.checkpoint.url import Url, translate_errors
from nbdist.errors import CheckpointError
from nbdist.hardware.process_identity import ABANDONED_AFTER_S, OWNER_FILE, ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from nbdist.checkpoint.manifest import RankWriteReport
    from nbdist.checkpoint.safetensors_writer import StoredTensor
    from nbdist.checkpoint.storage import CheckpointSummary

_SAVED_FILE = re.compile(r"(?P<name>[^/]+)/(?P<number>[0-9a-f]{32})/(?P<file>[^/]+)")
"""Path below the URL of a file that belongs to a save."""
_OWN_FILES = re.compile(r"[a-z]+-[0-9]{5,9}-[0-9]+\.safetensors|\.trial-[0-9a-f]{16}")
_tried: set[Url] = set()
"""URLs that this process has tested for write access."""


@dataclass(frozen=True, slots=True)
class _SavedFiles:
    """Files of one save, complete or not."""

    url: Url
    name: str
    files: dict[str, int] = field(default_factory=dict)
    """Name -> size in bytes."""

    def remove(self) -> None:
        """Remove the files that nbdist wrote."""
        # The manifest goes first, so a partly removed save is never listed; the owner goes last.
        order = {MANIFEST_NAME: -1, OWNER_FILE: 1}
        ours = [
            name
            for name in self.files
            if name in order or is_rank_report_name(name) or _OWN_FILES.fullmatch(name)
        ]
        _remove_files(self.url, sorted(ours, key=lambda name: order.get(name, 0)))
        for folder in (self.url, self.url.parent):
            system, path = folder.open_filesystem()
            with suppress(Exception):  # the folder is not empty, or the store has none
                system.rmdir(path)


class UrlStorage(Storage):
    """Checkpoint storage at a URL."""

    def __init__(self, root: Url) -> None:
        self.root: Url = root
        self._manifests: dict[Url, Manifest] = {}
        """Cache of manifests. A manifest never changes after it is written."""

    def list_checkpoints(self) -> list[CheckpointSummary]:
        """List the complete checkpoints, newest last."""
        complete = self._complete(self._saves())
        return [summarize(save.url, save.name, manifest) for save, manifest in complete]

    @contextmanager
    def open_checkpoint(self, name: str) -> Iterator[tuple[Url, Manifest]]:
        """Open a checkpoint. Without locks, another process may remove it meanwhile."""
        check_name(name)
        complete = self._complete(self._saves())
        for save, manifest in complete:
            if save.name == name:
                yield save.url, manifest
                return
        if re.fullmatch("[0-9a-f]{32}", name):  # the URL of the files, which lists and errors show
            with UrlStorage(self.root.parent).open_checkpoint(self.root.name) as (url, manifest):
                if url.name == name:
                    yield url, manifest
                    return
        raise self._missing_error(name, [save.name for save, _ in complete])

    def begin(
        self,
        name: str,
        *,
        overwrite: bool = False,
        size_bytes: int = 0,  # noqa: ARG002 - the free space at a URL is unknown
    ) -> PendingUrlCheckpoint:
        """Create a draft, and remove what dead processes of this user left."""
        check_name(name)
        saves = self._saves()
        if not overwrite:
            self.check_name_free(name, saves)
        for save in saves:
            with suppress(CheckpointError), translate_errors("not removed"):
                if self._is_dead(save):
                    save.remove()
        draft = self.attach(name, secrets.token_hex(16))
        draft.write_owner()
        return draft

    def check_writable(self) -> None:
        """Check that this process can write checkpoints to the URL.

        Raises:
            CheckpointError: it cannot.
        """
        draft = self.attach("trial", secrets.token_hex(16))
        draft.write_owner()
        draft.abort()

    def attach(self, name: str, number: str) -> PendingUrlCheckpoint:
        """Attach to a draft that another process has created."""
        return PendingUrlCheckpoint(self, name, number)

    def remove_oldest(self, count: int, *, written: str | None = None) -> list[str]:
        """Remove the oldest checkpoints except for `count`; return the removed names."""
        saves = self._saves()
        found = [summarize(save.url, save.name, m) for save, m in self._complete(saves)]
        oldest = self._checkpoints_to_remove(found, count, written)
        with translate_errors(f"Cannot remove old checkpoints at {self.root}"):
            for save in saves:
                if any(save.url == summary.path for summary in oldest):
                    save.remove()
        return [summary.name for summary in oldest]

    def remove_older(self, name: str, manifest: Manifest) -> None:
        """Remove older saves of the same name."""
        for save in self._saves():
            other = self._manifest(save) if save.name == name else None
            if other is not None and other.created < manifest.created:
                save.remove()

    def check_name_free(self, name: str, saves: Iterable[_SavedFiles] | None = None) -> None:
        """Check that no complete checkpoint has this name.

        Raises:
            CheckpointError: the name is taken.
        """
        existing = self._saves() if saves is None else saves
        if self._complete(save for save in existing if save.name == name):
            raise self._name_exists_error(self.root / name)

    def _complete(self, saves: Iterable[_SavedFiles]) -> list[tuple[_SavedFiles, Manifest]]:
        """Return the newest complete save of each name, newest last."""
        newest: dict[str, tuple[_SavedFiles, Manifest]] = {}
        for save in saves:
            manifest = self._manifest(save)
            if manifest is None:
                continue
            if any(save.files.get(file.name) != file.size_bytes for file in manifest.files):
                continue
            if save.name not in newest or newest[save.name][1].created < manifest.created:
                newest[save.name] = save, manifest
        return sorted(
            newest.values(), key=lambda item: (item[1].created, item[1].step, item[0].name)
        )

    def _saves(self) -> list[_SavedFiles]:
        """List all saves, complete or not."""
        saves: dict[Url, _SavedFiles] = {}
        for path, size_bytes in _list_files(self.root).items():
            match = _SAVED_FILE.fullmatch(path)
            if match and is_checkpoint_name(match["name"]):
                url = self.root / match["name"] / match["number"]
                save = saves.setdefault(url, _SavedFiles(url, match["name"]))
                save.files[match["file"]] = size_bytes
        self._manifests = {url: item for url, item in self._manifests.items() if url in saves}
        return list(saves.values())

    def _manifest(self, save: _SavedFiles) -> Manifest | None:
        """Read the manifest of a save, or return None if it is missing, partial or invalid."""
        if not 0 < save.files.get(MANIFEST_NAME, 0) <= MAX_BYTES:
            return None
        if save.url not in self._manifests:
            with suppress(CheckpointError):
                text = (save.url / MANIFEST_NAME).read_bytes()
                self._manifests[save.url] = Manifest.from_json(text)
        return self._manifests.get(save.url)

    def _is_dead(self, save: _SavedFiles) -> bool:
        """Return whether a save is incomplete, and its process has exited or its files are old."""
        if MANIFEST_NAME in save.files:
            return False
        if OWNER_FILE not in save.files:
            return True  # the owner file is written first and removed last
        owner = ProcessIdentity.from_json((save.url / OWNER_FILE).read_bytes())
        if owner is not None and owner.is_checkable:
            return owner.has_ended
        system, path = save.url.open_filesystem()
        try:
            newest = max(system.modified(f"{path}/{name}") for name in save.files)
        except Exception:  # noqa: BLE001 - unsupported in some file systems; each raises its own
            return False
        return time.time() - float(newest.timestamp()) > ABANDONED_AFTER_S


class PendingUrlCheckpoint(PendingCheckpoint):
    """Draft of a checkpoint at a URL, written by all ranks."""

    poll_s = 0.5

    def __init__(self, storage: UrlStorage, name: str, number: str) -> None:
        self.id, self._storage, self._name = number, storage, name
        self.location: Url = storage.root / name / number

    def write_owner(self) -> None:
        """Write the owner file.

        Raises:
            CheckpointError: the URL is not writable.
        """
        self._storage.root.open_filesystem()
        with translate_errors(f"Cannot write checkpoints to {self._storage.root}"):
            self.location.make_folder()
        self.write_small_file(OWNER_FILE, ProcessIdentity.current_process().to_json().encode())

    def is_visible(self) -> bool:
        """Return True if this process can write to the URL, which it tests once per URL.

        Raises:
            CheckpointError: it cannot write or remove a test file.
        """
        if self._storage.root not in _tried:
            trial = f".trial-{secrets.token_hex(8)}"
            self.write_small_file(trial, b"")
            with translate_errors(f"Cannot remove files at {self._storage.root}"):
                _remove_files(self.location, [trial])
            _tried.add(self._storage.root)
        return True

    def create_file(self, name: str, tensors: Sequence[StoredTensor]) -> SafetensorsWriter:
        """Create a file for the given tensors, which is streamed without a local copy."""
        return SafetensorsWriter(name, tensors, _UploadedFile(self.location / name))

    def write_small_file(self, name: str, content: bytes) -> None:
        """Write a small file."""
        system, path = (self.location / name).open_filesystem()
        with translate_errors(f"Cannot write checkpoints to {self._storage.root}"):
            system.pipe_file(path, content)

    def read_small_file(self, name: str) -> bytes | None:
        """Read a small file."""
        return (self.location / name).read_bytes()

    def read_reports(self, ranks: Iterable[int]) -> dict[int, RankWriteReport]:
        """Return the reports written so far by these ranks."""
        # File systems raise different errors for a file that does not exist: list them first.
        files = _list_files(self.location)
        return super().read_reports(rank for rank in ranks if rank_report_name(rank) in files)

    def write_failure(self, rank: int, reason: str) -> None:
        """Report that a rank has failed. Errors are ignored."""
        with suppress(CheckpointError):
            super().write_failure(rank, reason)

    def commit(self, name: str, manifest: Manifest, *, overwrite: bool = False) -> Url:
        """Write the manifest, remove older saves of the same name and return the URL."""
        sizes = _list_files(self.location)
        check_sizes(sizes, manifest, self.location)
        if not overwrite:
            self._storage.check_name_free(name)
        self.write_small_file(MANIFEST_NAME, manifest.to_json())
        with suppress(CheckpointError), translate_errors("not removed"):
            self._storage.remove_older(name, manifest)
            temporary = [file for file in sizes if is_rank_report_name(file) or file == OWNER_FILE]
            _remove_files(self.location, temporary)
        return self.location

    def abort(self) -> None:
        """Remove the draft unless it is committed. Errors are ignored; the next save retries."""
        with suppress(CheckpointError), translate_errors("not removed"):
            files = _list_files(self.location)
            if MANIFEST_NAME not in files:
                _SavedFiles(self.location, self._name, files).remove()


class _UploadedFile:
    """A new file at a URL, open for writing."""

    def __init__(self, url: Url) -> None:
        self._url = url
        system, path = url.open_filesystem()
        with translate_errors(f"Cannot write {url}"):
            self._file: Any = system.open(path, "wb")

    def write(self, content: memoryview) -> None:
        with translate_errors(f"Cannot write {self._url}"):
            while content:
                content = content[self._file.write(content) :]

    def close(self) -> None:
        with translate_errors(f"Cannot write {self._url}"):
            self._file.close()

    def abort(self) -> None:
        """Stop writing. The partial file is removed together with its draft."""
        with suppress(Exception):  # not all file systems can discard an upload
            self._file.discard()
        with suppress(Exception):
            self._file.close()


def _list_files(url: Url) -> dict[str, int]:
    """Return the size in bytes of each file below a URL, by relative path."""
    system, root = url.open_filesystem()
    with translate_errors(f"Cannot list {url}"):
        system.invalidate_cache()
        try:
            files = system.find(root, detail=True)
        except FileNotFoundError:
            return {}
    return {path.removeprefix(root).strip("/"): info["size"] or 0 for path, info in files.items()}


def _remove_files(url: Url, names: Iterable[str]) -> None:
    system, path = url.open_filesystem()
    for name in names:
        with suppress(FileNotFoundError):
            system.rm_file(f"{path}/{name}")
