"""Checkpoint storage in a folder.

checkpoints/
    step-100/            a complete checkpoint: the manifest is written last
    .tmp-<32 hex>/       a draft, or being removed; its owner file names the process
    .old-<32 hex>-best/  being replaced by a new checkpoint "best"; if the process died
                         before the second rename, "best" still refers to this folder

A commit writes and syncs manifest.json, syncs the draft, renames it, and syncs the root. If a
process dies before that, the draft is never listed, and the next save removes it. A checkpoint
with the same name is renamed first, then the draft gets the name, so that one of the two is found
at any time.

Never removed are foreign folders, checkpoints in use, and the newest checkpoint. A removal first
renames the folder and then deletes the manifest, so that no partly removed checkpoint is listed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.checkpoint import durable_io
from nbdist.checkpoint.manifest import RankWriteReport
from nbdist.checkpoint.name_validation import (
    DRAFT_PATTERN,
    MANIFEST_NAME,
    REPLACED_PATTERN,
    check_name,
    checkpoint_path,
    is_checkpoint_name,
    is_rank_report_name,
    printable,
    rank_report_name,
)
from nbdist.checkpoint.reader import CheckpointReader
from nbdist.checkpoint.safetensors_writer import SafetensorsWriter
from nbdist.checkpoint.storage import PendingCheckpoint, Storage, check_sizes, summarize
from nbdist.errors import CheckpointError
from nbdist.hardware import process_identity
from nbdist.hardware.process_identity import OWNER_FILE, ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from nbdist.checkpoint.manifest import Manifest
    from nbdist.checkpoint.safetensors_writer import StoredTensor
    from nbdist.checkpoint.storage import CheckpointSummary

_MAX_ATTEMPTS = 6
_RETRY_DELAY_S = 0.01


class FolderStorage(Storage):
    """Checkpoint storage in a folder shared by all ranks."""

    def __init__(self, root: Path) -> None:
        self.root: Path = root

    # -- reading

    def list_checkpoints(self) -> list[CheckpointSummary]:
        """List the complete checkpoints, newest last.

        Incomplete folders, foreign folders and checkpoints with an invalid manifest or a wrong
        file size are skipped. Checksums are not compared; see ``verify_files``. Waits up to 1 s
        while another process renames checkpoints.
        """
        with durable_io.shared_lock(self.root):
            return self._list_locked()

    def _list_locked(self) -> list[CheckpointSummary]:
        found: dict[str, CheckpointSummary] = {}
        replaced: list[CheckpointSummary] = []
        for path in _folders(self.root):
            match = REPLACED_PATTERN.fullmatch(path.name)
            name = match["name"] if match else path.name
            summary = _summarize(path, name) if is_checkpoint_name(name) else None
            if summary is not None and match:
                replaced.append(summary)
            elif summary is not None:
                found[name] = summary
        # A checkpoint that is being replaced counts until the new one has its name.
        for summary in sorted(replaced, key=lambda summary: summary.created):
            if summary.name not in found or found[summary.name].path.name != summary.name:
                found[summary.name] = summary
        return sorted(found.values(), key=lambda entry: (entry.created, entry.step, entry.name))

    def find(self, name: str) -> Path:
        """Return the folder of a checkpoint.

        Raises:
            CheckpointError: the name is invalid, or no checkpoint has it; lists existing names.
        """
        path = checkpoint_path(self.root, name)
        if path.is_dir():
            return path  # opening an invalid folder raises an error with the reason
        summaries = self.list_checkpoints()
        for summary in summaries:
            if summary.name == name:
                return self.root / summary.path.name
        raise self._missing_error(name, [summary.name for summary in summaries])

    @contextmanager
    def open_checkpoint(self, name: str) -> Iterator[tuple[Path, Manifest]]:
        """Open a checkpoint and lock it against removal. Retries while it is being replaced.

        Raises:
            CheckpointError: no checkpoint has this name, or it is invalid.
        """
        with ExitStack() as stack:
            for attempts_left in reversed(range(_MAX_ATTEMPTS)):
                try:
                    opened = stack.enter_context(CheckpointReader.open_folder(self.find(name)))
                    break
                except CheckpointError:
                    if not attempts_left:
                        raise
                # Another process may be between the two renames of a replacement.
                time.sleep(_RETRY_DELAY_S)
            yield opened.path, opened.manifest

    # -- writing

    def begin(
        self, name: str, *, overwrite: bool = False, size_bytes: int = 0
    ) -> PendingFolderCheckpoint:
        """Create the draft folder that all ranks write into, and the root if needed.

        Blocks up to 30 s while another process creates or commits a draft there.
        """
        check_name(name)
        garbage: list[Path] = []
        try:
            if not self.root.is_dir():
                self.root.mkdir(parents=True, exist_ok=True)
                durable_io.sync_folder(self.root.parent)
            free = shutil.disk_usage(self.root).free
            if size_bytes > free:
                raise CheckpointError(
                    f"The checkpoint needs {size_bytes >> 20} MiB, but {self.root} has"
                    f" {free >> 20} MiB free. Free space, or use another folder."
                )
            with durable_io.exclusive_lock(self.root):
                garbage += self._repair_names()
                self.check_name_free(name, overwrite=overwrite)
                draft = self.root / f".tmp-{secrets.token_hex(16)}"
                draft.mkdir(mode=0o700)
                ProcessIdentity.current_process().write_owner_file(draft)
        except OSError as error:
            raise CheckpointError(
                f"Cannot write checkpoints to {self.root} ({error.strerror}). Use a folder that"
                " this process can write to."
            ) from error
        finally:
            _remove_folders(garbage)
        return PendingFolderCheckpoint(draft)

    def attach(self, name: str, number: str) -> PendingFolderCheckpoint:  # noqa: ARG002 - the number is unique
        """Attach to the draft folder of a save."""
        return PendingFolderCheckpoint(self.root / number)

    def check_name_free(self, name: str, *, overwrite: bool) -> None:
        """Check that the name is free, or with `overwrite`, that it refers to a checkpoint.

        Raises:
            CheckpointError: the name is taken; or the folder is not a checkpoint or holds other
                files, which are never overwritten.
        """
        path = checkpoint_path(self.root, name)
        if not path.exists():
            return
        if not overwrite:
            raise self._name_exists_error(path)
        try:
            with CheckpointReader.open_folder(path) as existing:
                unknown = existing.unknown_files()
        except CheckpointError as error:
            raise CheckpointError(
                f"{path} is not a complete nbdist checkpoint, so it is not overwritten. Save under"
                " another name, or remove it."
            ) from error
        if unknown:
            raise CheckpointError(
                f"{path} contains {printable(unknown[0])}, which was not written by nbdist. Move"
                " it elsewhere, or save under another name."
            )

    # -- removing

    def remove_oldest(self, count: int, *, written: str | None = None) -> list[str]:
        """Remove the oldest checkpoints except for the newest `count`; return the removed names.

        Folders without an nbdist manifest and damaged checkpoints are neither counted nor
        removed. Checkpoints in use, or with files that nbdist did not write, are not removed.
        """
        removed, garbage = [], []
        try:
            with durable_io.exclusive_lock(self.root):
                found = [item for item in self._list_locked() if item.path.name == item.name]
                for summary in self._checkpoints_to_remove(found, count, written):
                    if path := _rename_for_removal(self.root / summary.name):
                        removed.append(summary.name)
                        garbage.append(path)
        except OSError as error:
            raise CheckpointError(
                f"Cannot remove old checkpoints in {self.root} ({error.strerror}). Remove them"
                " manually."
            ) from error
        _remove_folders(garbage)
        return removed

    def remove_abandoned(self) -> None:
        """Remove what this user's dead processes left. Errors are ignored."""
        garbage: list[Path] = []
        with suppress(OSError, CheckpointError), durable_io.exclusive_lock(self.root):
            garbage += self._repair_names()
        _remove_folders(garbage)

    def _repair_names(self) -> list[Path]:
        """Restore the names of checkpoints after a crash, and return the folders to remove.

        The caller must hold the lock.
        """
        root, replaced = self.root, []
        for path in _folders(root):
            if match := REPLACED_PATTERN.fullmatch(path.name):
                summary = _summarize(path, match["name"])
                age = -summary.created.timestamp() if summary else 0.0
                replaced.append((age, match["name"], path, summary))
        garbage = []
        for _, name, path, summary in sorted(replaced, key=lambda item: item[0]):  # newest first
            own_path = root / name
            if summary and not own_path.exists() and not own_path.is_symlink():
                path.rename(own_path)
                durable_io.sync_folder(root)
            elif path.stat().st_uid == os.getuid() and _summarize(own_path, name):
                garbage.append(_rename_for_removal(path))
        drafts = [path for path in root.iterdir() if _is_dead_draft(path)]
        return [path for path in garbage if path] + drafts


class PendingFolderCheckpoint(PendingCheckpoint):
    """Draft of a checkpoint: a private folder next to the checkpoints."""

    poll_s = 0.01

    def __init__(self, folder: Path) -> None:
        self.location: Path = folder
        self.id = folder.name

    def is_visible(self) -> bool:
        """Return whether this rank sees the draft. Network file systems show it with a delay."""
        return (self.location / OWNER_FILE).exists()

    def create_file(self, name: str, tensors: Sequence[StoredTensor]) -> SafetensorsWriter:
        """Create a file for the given tensors."""
        return SafetensorsWriter(name, tensors, durable_io.DurableFile(self.location / name))

    def write_small_file(self, name: str, content: bytes) -> None:
        """Write a small file that is removed on commit."""
        # No fsync: the committing process reads a report now and copies it into the manifest.
        (self.location / name).write_bytes(content)

    def read_small_file(self, name: str) -> bytes | None:
        """Read a small file, or return None if it does not exist yet."""
        with suppress(OSError):
            return (self.location / name).read_bytes()
        return None

    def write_failure(self, rank: int, reason: str) -> None:
        """Report that a rank has failed. Falls back to an empty marker file if the disk is full."""
        try:
            super().write_failure(rank, reason)
        except OSError as error:
            # An empty file needs no disk space; its name carries the errno.
            marker = f"{rank_report_name(rank)}.failed-{error.errno or 0}"
            with suppress(OSError):
                (self.location / marker).touch()

    def read_reports(self, ranks: Iterable[int]) -> dict[int, RankWriteReport]:
        """Return the reports written so far by these ranks."""
        wanted = set(ranks)
        reports = super().read_reports(wanted)
        for rank in wanted - reports.keys():
            for path in self.location.glob(f"{rank_report_name(rank)}.failed-*"):
                number = path.name.rpartition("-")[2]
                reason = os.strerror(int(number)) if number.isdecimal() else "no reason given"
                why = f"rank {rank} cannot write there ({reason}, errno {number})"
                reports[rank] = RankWriteReport(error=why)
        return reports

    def written_bytes(self) -> int | None:
        """Return the bytes written so far; None if files changed while they were counted."""
        try:
            return sum(path.stat().st_size for path in self.location.iterdir())
        except FileNotFoundError:
            if self.location.is_dir():
                return None  # a file was removed while the folder was listed
            raise CheckpointError(
                f"{self.location} was removed while it was being written. Save again."
            ) from None

    def commit(self, name: str, manifest: Manifest, *, overwrite: bool = False) -> Path:
        """Write the manifest and rename the draft to the name of the checkpoint.

        Blocks up to 30 s while another process renames checkpoints there.
        """
        draft, storage = self.location, FolderStorage(self.location.parent)
        path = checkpoint_path(storage.root, name)
        if not DRAFT_PATTERN.fullmatch(draft.name) or not draft.is_dir():
            raise CheckpointError(f"{draft} is not a checkpoint draft. Save again.")
        text = manifest.to_json()
        try:
            for item in list(draft.iterdir()):
                if is_rank_report_name(item.name):
                    item.unlink()
            sizes = {
                item.name: item.stat().st_size
                for item in draft.iterdir()
                if item.name != OWNER_FILE
            }
            check_sizes(sizes, manifest, draft, extra=sizes)
            with closing(durable_io.DurableFile(draft / MANIFEST_NAME)) as file:
                file.write(memoryview(text))
            draft.chmod(draft.parent.stat().st_mode & 0o777)  # the draft was private (0o700)
            durable_io.sync_folder(draft)
            with durable_io.exclusive_lock(storage.root):
                storage.check_name_free(name, overwrite=overwrite)
                aside = path.with_name(f".old-{secrets.token_hex(16)}-{path.name}")
                replaced = durable_io.rename_over(draft, path, aside)
                (path / OWNER_FILE).unlink(missing_ok=True)
                durable_io.sync_folder(storage.root)
                garbage = _rename_for_removal(aside) if replaced else None
        except OSError as error:
            raise CheckpointError(
                f"Cannot write {path} ({error.strerror}). Free space, or use another folder."
            ) from error
        if garbage:
            durable_io.remove_folder(garbage)
        return path

    def abort(self) -> None:
        """Remove the draft. Does nothing if it was already removed or committed."""
        if DRAFT_PATTERN.fullmatch(self.location.name):
            durable_io.remove_folder(self.location)


def _rename_for_removal(path: Path) -> Path | None:
    """Rename a checkpoint for removal and delete its manifest; the caller holds the lock.

    Returns:
        The renamed folder, which the caller removes. None if the checkpoint is in use, has
        files that nbdist did not write, or cannot be renamed.
    """
    try:
        with CheckpointReader.open_folder(path) as opened:
            if opened.unknown_files():
                return None
    except CheckpointError:
        return None
    with suppress(OSError):
        # O_RDWR: an exclusive lock on NFS requires a descriptor open for writing.
        fd = os.open(path / MANIFEST_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if not durable_io.try_lock(fd, exclusive=True):
                return None  # a process is reading it
            ProcessIdentity.current_process().write_owner_file(path)
            renamed = path.with_name(f".tmp-{secrets.token_hex(16)}")
            path.rename(renamed)
            (renamed / MANIFEST_NAME).unlink()
            return renamed
        finally:
            durable_io.unlock_and_close(fd)
    return None


def _is_dead_draft(path: Path) -> bool:
    """Return whether it is a draft of this user whose process has exited."""
    if not DRAFT_PATTERN.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    with suppress(FileNotFoundError):  # another process removes it now
        if path.stat().st_uid != os.getuid():
            return False
        owner = process_identity.read_owner(path)
        if owner is None:
            # The process died before it wrote the owner file, or the disk was full.
            return not any(item.name != OWNER_FILE for item in path.iterdir())
        return owner.has_abandoned(path)
    return False


def _folders(root: Path) -> list[Path]:
    """List the folders in `root`, without symbolic links."""
    try:
        with os.scandir(root) as items:
            return [Path(item.path) for item in items if item.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _summarize(path: Path, name: str) -> CheckpointSummary | None:
    """Summarize the checkpoint in a folder, or return None if it is not complete."""
    with suppress(CheckpointError), CheckpointReader.open_folder(path) as opened:
        if opened.is_complete():
            return summarize(path, name, opened.manifest)
    return None


def _remove_folders(paths: Iterable[Path]) -> None:
    for path in paths:
        durable_io.remove_folder(path)
