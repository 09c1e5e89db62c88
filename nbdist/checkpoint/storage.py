"""Common interface of checkpoint storage in a folder and at a URL."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Protocol

from nbdist.checkpoint import catalog, commit_protocol, rank_reports, retention
from nbdist.checkpoint.url import Url
from nbdist.checkpoint.url_storage import UrlStorage
from nbdist.checkpoint.writer import SafetensorsWriter
from nbdist.errors import CheckpointError
from nbdist.hardware.process_identity import OWNER_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path, PurePath

    from nbdist.checkpoint.catalog import CheckpointSummary
    from nbdist.checkpoint.manifest import CheckpointFile, Manifest, TensorMetadata
    from nbdist.checkpoint.rank_reports import RankReport
    from nbdist.checkpoint.safetensors_header import StoredTensor


class PendingCheckpoint(Protocol):
    """Checkpoint that all ranks are writing. Failures raise CheckpointError."""

    id: str
    """ID with which the other ranks attach to it."""
    poll_s: float
    """Interval at which to poll for reports of other ranks."""

    @property
    def folder(self) -> PurePath:
        """Folder of its files."""

    @property
    def create_file(self) -> Callable[[PurePath, Sequence[StoredTensor]], SafetensorsWriter]:
        """Function that creates a file for the given tensors."""

    def is_visible(self) -> bool:
        """Return whether this rank can see the draft."""

    def write_report(
        self, rank: int, parts: Sequence[CheckpointFile], keys: Mapping[str, TensorMetadata]
    ) -> None:
        """Write the report of a rank. Call it after all its files are written."""

    def write_failure(self, rank: int, why: str) -> None:
        """Report that a rank has failed."""

    def read_reports(self, ranks: Collection[int]) -> dict[int, RankReport]:
        """Return the reports written so far by these ranks."""

    def written_bytes(self) -> int | None:
        """Return the bytes written so far; None if the storage does not show partial files."""

    def commit(self, name: str, manifest: Manifest, *, overwrite: bool) -> Path | Url:
        """Commit the checkpoint and return its location."""

    def abort(self) -> None:
        """Remove the draft unless it is committed."""


class Storage(Protocol):
    """Location of checkpoints: a folder or a URL. Failures raise CheckpointError."""

    @property
    def root(self) -> Path | Url:
        """Folder or URL of all checkpoints."""

    def list_checkpoints(self) -> list[CheckpointSummary]:
        """List the complete checkpoints, newest last."""

    def open_checkpoint(self, name: str) -> AbstractContextManager[tuple[Path | Url, Manifest]]:
        """Open a checkpoint: a context manager of its location and manifest."""

    def begin(self, name: str, *, overwrite: bool, size_bytes: int) -> PendingCheckpoint:
        """Create a draft. Called in one process."""

    def attach(self, name: str, number: str) -> PendingCheckpoint:
        """Attach to a draft that another process has created."""

    def remove_oldest(self, count: int, *, written: str) -> list[str]:
        """Remove the oldest checkpoints except for `count`; return the removed names."""


@functools.lru_cache(maxsize=8)
def storage_for(where: Path | Url) -> Storage:
    """Return the storage for a folder or URL (cached)."""
    return UrlStorage(where) if isinstance(where, Url) else FolderStorage(where)


class FolderStorage:
    """Checkpoint storage in a folder shared by all ranks."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def list_checkpoints(self) -> list[CheckpointSummary]:
        """List the complete checkpoints, newest last."""
        return catalog.list_checkpoints(self.root)

    @contextlib.contextmanager
    def open_checkpoint(self, name: str) -> Iterator[tuple[Path, Manifest]]:
        """Open a checkpoint and lock it against removal."""
        with catalog.open_checkpoint(self.root, name) as reader:
            yield reader.path, reader.manifest

    def begin(self, name: str, *, overwrite: bool, size_bytes: int) -> PendingFolderCheckpoint:
        """Create the draft folder that all ranks write into."""
        folder = commit_protocol.create_draft(
            self.root, name, overwrite=overwrite, size_bytes=size_bytes
        )
        return PendingFolderCheckpoint(folder)

    def attach(self, name: str, number: str) -> PendingFolderCheckpoint:  # noqa: ARG002 - the number is unique
        """Attach to the draft folder of a save."""
        return PendingFolderCheckpoint(self.root / number)

    def remove_oldest(self, count: int, *, written: str) -> list[str]:
        """Remove the oldest checkpoints except for `count`; return the removed names."""
        return retention.remove_oldest(self.root, count, written=written)


class PendingFolderCheckpoint:
    """Draft of a checkpoint: a private folder next to the checkpoints."""

    poll_s = 0.01
    create_file = SafetensorsWriter

    def __init__(self, folder: Path) -> None:
        self.folder, self.id = folder, folder.name

    def is_visible(self) -> bool:
        """Return whether this rank sees the draft. Network file systems show it with a delay."""
        return (self.folder / OWNER_FILE).exists()

    def write_report(
        self, rank: int, parts: Sequence[CheckpointFile], keys: Mapping[str, TensorMetadata]
    ) -> None:
        """Write the report of a rank."""
        rank_reports.write_report(self.folder, rank, parts, keys=keys)

    def write_failure(self, rank: int, why: str) -> None:
        """Report that a rank has failed."""
        rank_reports.write_failure(self.folder, rank, why)

    def read_reports(self, ranks: Collection[int]) -> dict[int, RankReport]:
        """Return the reports written so far by these ranks."""
        return {
            rank: report
            for rank in ranks
            if (report := rank_reports.read_report(self.folder, rank)) is not None
        }

    def written_bytes(self) -> int:
        """Return the bytes written so far; -2 if files changed while they were counted."""
        try:
            return sum(path.stat().st_size for path in self.folder.iterdir())
        except FileNotFoundError:
            if self.folder.is_dir():
                return -2  # a file was removed while the folder was listed
            raise CheckpointError(
                f"{self.folder} was removed while it was being written. Save again."
            ) from None

    def commit(self, name: str, manifest: Manifest, *, overwrite: bool) -> Path:
        """Commit the draft under this name and return the folder."""
        return commit_protocol.commit_draft(self.folder, name, manifest, overwrite=overwrite)

    def abort(self) -> None:
        """Remove the draft."""
        commit_protocol.remove_draft(self.folder)
