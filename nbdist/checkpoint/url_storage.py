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

import contextlib
import re
import secrets
import time
from dataclasses import dataclass, field
from pathlib import PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any

from nbdist.checkpoint import json_validation, rank_reports
from nbdist.checkpoint.catalog import (
    CheckpointSummary,
    missing_checkpoint_error,
    summarize_manifest,
)
from nbdist.checkpoint.manifest import MAX_BYTES, Manifest
from nbdist.checkpoint.names import (
    MANIFEST_NAME,
    check_name,
    is_checkpoint_name,
    is_rank_report_name,
    printable,
    rank_report_name,
)
from nbdist.checkpoint.url import Url, translate_errors
from nbdist.checkpoint.writer import SafetensorsWriter
from nbdist.errors import CheckpointError
from nbdist.hardware.process_identity import ABANDONED_AFTER_S, OWNER_FILE, ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from nbdist.checkpoint.manifest import CheckpointFile, TensorMetadata
    from nbdist.checkpoint.rank_reports import RankReport
    from nbdist.checkpoint.safetensors_header import StoredTensor

_DEPTH = 3
"""Components of a file's path below the URL."""
_ID = json_validation.hex_digits(32)
_OURS = re.compile(r"[a-z]+-[0-9]{5,9}-[0-9]+\.safetensors|\.trial-[0-9a-f]{16}")
_tried: set[Url] = set()
"""URLs that this process has tested for write access."""


@dataclass(frozen=True, slots=True)
class _SavedFiles:
    """Files of one save, complete or not."""

    url: Url
    name: str
    files: dict[str, int] = field(default_factory=dict)
    """Name -> size in bytes."""


class UrlStorage:
    """Checkpoint storage at a URL."""

    def __init__(self, root: Url) -> None:
        self.root = root
        self._manifests: dict[Url, Manifest] = {}
        """Cache of manifests. A manifest never changes after it is written."""

    def list_checkpoints(self) -> list[CheckpointSummary]:
        """List the complete checkpoints, newest last.

        Raises:
            CheckpointError: the URL cannot be listed.
        """
        complete = self._whole(self._saves())
        return [summarize_manifest(save.url, save.name, manifest) for save, manifest in complete]

    @contextlib.contextmanager
    def open_checkpoint(self, name: str) -> Iterator[tuple[Url, Manifest]]:
        """Open a checkpoint. Without locks, another process may remove it meanwhile.

        Raises:
            CheckpointError: the name is invalid, or no checkpoint has it.
        """
        check_name(name)
        saves = self._saves()
        matches = self._whole([save for save in saves if save.name == name])
        if not matches:
            raise missing_checkpoint_error(
                self.root, name, [save.name for save, _ in self._whole(saves)]
            )
        ((match, manifest),) = matches
        yield match.url, manifest

    def begin(self, name: str, *, overwrite: bool, size_bytes: int) -> PendingUrlCheckpoint:  # noqa: ARG002 - the free space is unknown
        """Create a draft, and remove leftovers of dead processes.

        Raises:
            CheckpointError: the name is invalid or taken, or the URL is not writable.
        """
        check_name(name)
        saves = self._saves()
        self.check_name_free(name, saves, overwrite=overwrite)
        for save in saves:
            with contextlib.suppress(CheckpointError), translate_errors("not removed"):
                if self._is_dead(save):
                    _remove(save)
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

    def remove_oldest(self, count: int, *, written: str) -> list[str]:
        """Remove the oldest checkpoints except for `count`; return the removed names.

        Raises:
            CheckpointError: a checkpoint cannot be removed.
        """
        saves = [save for save, _ in self._whole(self._saves())]
        saves.sort(key=lambda save: save.name == written)  # stable: `written` goes last
        with translate_errors(f"Cannot remove old checkpoints at {self.root}"):
            for save in saves[:-count]:
                _remove(save)
        return [save.name for save in saves[:-count]]

    def check_name_free(
        self, name: str, saves: Sequence[_SavedFiles] | None = None, *, overwrite: bool
    ) -> None:
        """Check that no complete checkpoint has this name, unless `overwrite`.

        Raises:
            CheckpointError: the name is taken.
        """
        if overwrite:
            return
        existing = self._saves() if saves is None else saves
        if self._whole([save for save in existing if save.name == name]):
            raise CheckpointError(
                f"{self.root / name} exists. Save under another name, or use --overwrite"
                " (overwrite=True) to replace it."
            )

    def remove_older(self, name: str, manifest: Manifest) -> None:
        """Remove older saves of the same name."""
        for save in self._saves():
            other = self._manifest(save) if save.name == name else None
            if other is not None and other.created < manifest.created:
                _remove(save)

    def _whole(self, saves: Sequence[_SavedFiles]) -> list[tuple[_SavedFiles, Manifest]]:
        """Return the newest complete save of each name, newest last."""
        newest: dict[str, tuple[_SavedFiles, Manifest]] = {}
        for save in saves:
            manifest = self._manifest(save)
            if manifest is None or not _complete(save, manifest.files):
                continue
            if save.name not in newest or newest[save.name][1].created < manifest.created:
                newest[save.name] = save, manifest
        return sorted(
            newest.values(), key=lambda item: (item[1].created, item[1].step, item[0].name)
        )

    def _saves(self) -> list[_SavedFiles]:
        """List all saves, complete or not."""
        by_id: dict[tuple[str, str], _SavedFiles] = {}
        for path, size_bytes in _listed(self.root).items():
            parts = path.split("/")
            if len(parts) != _DEPTH or not is_checkpoint_name(parts[0]) or not _is_id(parts[1]):
                continue
            name, number, file = parts
            url = self.root / name / number
            by_id.setdefault((name, number), _SavedFiles(url, name)).files[file] = size_bytes
        saves = list(by_id.values())
        urls = {save.url for save in saves}
        self._manifests = {url: item for url, item in self._manifests.items() if url in urls}
        return saves

    def _manifest(self, save: _SavedFiles) -> Manifest | None:
        """Read the manifest of a save, or return None if it is missing, partial or invalid."""
        if not 0 < save.files.get(MANIFEST_NAME, 0) <= MAX_BYTES:
            return None
        if save.url not in self._manifests:
            with contextlib.suppress(CheckpointError):
                self._manifests[save.url] = Manifest.from_json(
                    read_small_file(save.url / MANIFEST_NAME)
                )
        return self._manifests.get(save.url)

    def _is_dead(self, save: _SavedFiles) -> bool:
        """Return whether an incomplete save is abandoned.

        Its process has exited, or, if that cannot be determined, its files are old.
        """
        # The owner file is written first and removed last, so a save without it is a leftover.
        if MANIFEST_NAME in save.files or OWNER_FILE not in save.files:
            return MANIFEST_NAME not in save.files
        with contextlib.suppress(CheckpointError):
            owner = ProcessIdentity.from_json(read_small_file(save.url / OWNER_FILE))
            if owner is not None and owner.is_checkable:
                return owner.has_ended
            return _age_s(save) > ABANDONED_AFTER_S
        return False


class PendingUrlCheckpoint:
    """Draft of a checkpoint at a URL, written by all ranks."""

    poll_s = 0.5
    """Interval at which to poll for reports of other ranks."""

    def __init__(self, place: UrlStorage, name: str, number: str) -> None:
        self.id = number
        self.folder = PurePosixPath(number)
        """Folder of its files, relative to the URL of the checkpoint name."""
        self._place, self._name = place, name
        self._url = place.root / name / number

    def write_owner(self) -> None:
        """Write the owner file.

        Raises:
            CheckpointError: the URL is not writable.
        """
        self._place.root.open_filesystem()
        with translate_errors(f"Cannot write checkpoints to {self._place.root}"):
            self._url.make_folder()
        self._put(OWNER_FILE, ProcessIdentity.current_process().to_json())

    def is_visible(self) -> bool:
        """Return True if this process can write to the URL, which it tests once per URL.

        Raises:
            CheckpointError: it cannot write or remove a test file.
        """
        if self._place.root not in _tried:
            trial = f".trial-{secrets.token_hex(8)}"
            self._put(trial, "")
            with translate_errors(f"Cannot remove files at {self._place.root}"):
                _remove_files(self._url, [trial])
            _tried.add(self._place.root)
        return True

    def create_file(self, path: PurePath, tensors: Sequence[StoredTensor]) -> SafetensorsWriter:
        """Create a file for the given tensors."""
        return UrlWriter(self._url / path.name, tensors)

    def write_report(
        self, rank: int, parts: Sequence[CheckpointFile], keys: Mapping[str, TensorMetadata]
    ) -> None:
        """Write the report of a rank. Call it after all its files are written."""
        self._put(rank_report_name(rank), rank_reports.report_text(parts, keys))

    def write_failure(self, rank: int, why: str) -> None:
        """Report that a rank has failed. Errors are ignored."""
        with contextlib.suppress(CheckpointError):
            self._put(rank_report_name(rank), rank_reports.report_text(error=why))

    def read_reports(self, ranks: Collection[int]) -> dict[int, RankReport]:
        """Return the reports written so far by these ranks."""
        files, reports = self._files(), {}
        for rank in ranks:
            if rank_report_name(rank) in files and (
                report := rank_reports.parse_report(
                    read_small_file(self._url / rank_report_name(rank))
                )
            ):
                reports[rank] = report
        return reports

    def written_bytes(self) -> int | None:
        """Return None: most object stores do not show partly written files."""
        return None

    def commit(self, name: str, manifest: Manifest, *, overwrite: bool) -> Url:
        """Write the manifest, remove older saves of the same name and return the URL.

        Raises:
            CheckpointError: the name was taken meanwhile, files are missing, or the URL is not
                writable.
        """
        sizes = self._files()
        wrong = [file.name for file in manifest.files if sizes.get(file.name) != file.size_bytes]
        if wrong:
            raise CheckpointError(
                f"Size of {printable(wrong[0])} at {self._url} differs from what its rank reported."
                " Save again."
            )
        self._place.check_name_free(name, overwrite=overwrite)
        self._put(MANIFEST_NAME, manifest.to_json().decode())
        with contextlib.suppress(CheckpointError), translate_errors("not removed"):
            self._place.remove_older(name, manifest)
            _remove_files(
                self._url,
                [file for file in sizes if is_rank_report_name(file) or file == OWNER_FILE],
            )
        return self._url

    def abort(self) -> None:
        """Remove the draft unless it is committed. Errors are ignored; the next save retries."""
        with contextlib.suppress(CheckpointError), translate_errors("not removed"):
            files = self._files()
            if MANIFEST_NAME not in files:
                _remove(_SavedFiles(self._url, self._name, files))

    def _files(self) -> dict[str, int]:
        """Return the size of each file by name."""
        return {path.rpartition("/")[2]: size for path, size in _listed(self._url).items()}

    def _put(self, name: str, text: str) -> None:
        system, path = (self._url / name).open_filesystem()
        with translate_errors(f"Cannot write checkpoints to {self._place.root}"):
            system.pipe_file(path, text.encode())


class UrlWriter(SafetensorsWriter):
    """Writer that streams a safetensors file to a URL without a local copy."""

    def __init__(self, url: Url, tensors: Sequence[StoredTensor]) -> None:
        """Create the file.

        Raises:
            CheckpointError: the URL is not writable.
        """
        self._url = url
        self._file: Any = None
        super().__init__(PurePosixPath(url.name), tensors)

    def abort(self) -> None:
        """Stop writing. The partial file is removed together with its draft."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(Exception):  # not all file systems can discard an upload
                file.discard()
            with contextlib.suppress(Exception):
                file.close()
        super().abort()

    def _open(self) -> None:
        system, path = self._url.open_filesystem()
        with translate_errors(f"Cannot write {self._url}"):
            self._file = system.open(path, "wb")

    def _take(self, content: memoryview) -> None:
        with translate_errors(f"Cannot write {self._url}"):
            while content:
                content = content[self._file.write(content) :]

    _send = _take

    def _settle(self) -> None:
        with translate_errors(f"Cannot write {self._url}"):
            self._file.close()
        self._file = None

    def _remove(self) -> None:
        """Do nothing: the file is removed together with its draft."""


def _listed(url: Url) -> dict[str, int]:
    """Return the size in bytes of each file below a URL, by relative path.

    Raises:
        CheckpointError: the URL cannot be listed.
    """
    system, root = url.open_filesystem()
    with translate_errors(f"Cannot list {url}"):
        system.invalidate_cache()
        try:
            files = system.find(root, detail=True)
        except FileNotFoundError:
            return {}
    return {path.removeprefix(root).strip("/"): info["size"] or 0 for path, info in files.items()}


def read_small_file(url: Url) -> bytes:
    """Read a small file.

    Raises:
        CheckpointError: the file cannot be read.
    """
    system, path = url.open_filesystem()
    with translate_errors(f"Cannot read {url}"):
        data: bytes = system.cat_file(path)
    return data


def _complete(save: _SavedFiles, files: Sequence[CheckpointFile]) -> bool:
    return all(save.files.get(file.name) == file.size_bytes for file in files)


def _age_s(save: _SavedFiles) -> float:
    """Return the seconds since the last write, or 0.0 if the file system does not report it."""
    system, path = save.url.open_filesystem()
    try:
        newest = max(system.modified(f"{path}/{name}") for name in save.files)
        return time.time() - float(newest.timestamp())
    except Exception:  # noqa: BLE001 - unsupported in some file systems; each raises its own error
        return 0.0


def _remove(save: _SavedFiles) -> None:
    """Remove the files that nbdist wrote for a save."""
    # The manifest goes first: a partly removed save is never listed.
    order = {MANIFEST_NAME: -1, OWNER_FILE: 1}
    ours = filter(_is_ours, save.files)
    _remove_files(save.url, sorted(ours, key=lambda name: order.get(name, 0)))
    for folder in (save.url, save.url.parent):
        system, path = folder.open_filesystem()
        with contextlib.suppress(Exception):  # the folder is not empty, or the store has none
            system.rmdir(path)


def _remove_files(url: Url, names: Sequence[str]) -> None:
    system, path = url.open_filesystem()
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            system.rm_file(f"{path}/{name}")


def _is_ours(name: str) -> bool:
    return (
        name in {MANIFEST_NAME, OWNER_FILE}
        or is_rank_report_name(name)
        or _OURS.fullmatch(name) is not None
    )


def _is_id(text: str) -> bool:
    try:
        return _ID(text, "") >= 0
    except json_validation.ValidationError:
        return False
