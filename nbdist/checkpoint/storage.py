"""Where checkpoints are: a folder or a URL, the same to who saves and who looks; pure."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Protocol

from nbdist.checkpoint import catalog, commit_protocol, rank_reports, retention
from nbdist.checkpoint.url import Url
from nbdist.checkpoint.url_storage import Remote
from nbdist.checkpoint.writer import Writer
from nbdist.errors import CheckpointError
from nbdist.hardware.process_identity import OWNER

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path, PurePath

    from nbdist.checkpoint.catalog import Entry
    from nbdist.checkpoint.manifest import FilePart, Key, Manifest
    from nbdist.checkpoint.rank_reports import Told
    from nbdist.checkpoint.safetensors_header import Stored


class Draft(Protocol):
    """A checkpoint that is being written by all ranks; what fails raises CheckpointError."""

    id: str
    """By which all ranks find it."""
    poll_s: float
    """How often it is worth looking whether other ranks are done."""

    @property
    def folder(self) -> PurePath:
        """Of its files."""

    @property
    def new(self) -> Callable[[PurePath, Sequence[Stored]], Writer]:
        """Begins a file."""

    def seen(self) -> bool:
        """Whether it is there for this rank too."""

    def report(self, rank: int, parts: Sequence[FilePart], keys: Mapping[str, Key]) -> None:
        """Say what a rank has written; the last thing that it does."""

    def failed(self, rank: int, why: str) -> None:
        """Say that a rank will write nothing more."""

    def heard(self, ranks: Collection[int]) -> dict[int, Told]:
        """What those of these ranks say who have said something."""

    def size_bytes(self) -> int | None:
        """Bytes there now; None where that is not told before files are whole."""

    def commit(self, name: str, manifest: Manifest, *, overwrite: bool) -> Path | Url:
        """Make it a whole checkpoint; returns where it is."""

    def abort(self) -> None:
        """Remove it, if it is not whole."""


class Place(Protocol):
    """Where checkpoints are; what fails raises CheckpointError."""

    @property
    def root(self) -> Path | Url:
        """Of all checkpoints."""

    def entries(self) -> list[Entry]:
        """List the whole checkpoints, the newest last."""

    def opened(self, name: str) -> AbstractContextManager[tuple[Path | Url, Manifest]]:
        """Find a checkpoint."""

    def begin(self, name: str, *, overwrite: bool, size_bytes: int) -> Draft:
        """Begin a save, in one process."""

    def draft(self, name: str, number: str) -> Draft:
        """A save that another process has begun."""

    def keep(self, count: int, *, written: str) -> list[str]:
        """Remove the oldest checkpoints beyond `count`; give the names of those removed."""


@functools.lru_cache(maxsize=8)
def place(where: Path | Url) -> Place:
    """What knows how checkpoints are kept there."""
    return Remote(where) if isinstance(where, Url) else Folder(where)


class Folder:
    """A folder that all ranks see."""

    def __init__(self, root: Path) -> None:
        """Look at nothing yet."""
        self.root = root

    def entries(self) -> list[Entry]:
        """List the whole checkpoints, the newest last."""
        return catalog.entries(self.root)

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[tuple[Path, Manifest]]:
        """Find a checkpoint; nobody removes it meanwhile."""
        with catalog.opened(self.root, name) as found:
            yield found.path, found.manifest

    def begin(self, name: str, *, overwrite: bool, size_bytes: int) -> FolderDraft:
        """Make the private folder that all ranks write into."""
        made = commit_protocol.begin(self.root, name, overwrite=overwrite, size_bytes=size_bytes)
        return FolderDraft(made)

    def draft(self, name: str, number: str) -> FolderDraft:  # noqa: ARG002 - the number is enough
        """The private folder of a save."""
        return FolderDraft(self.root / number)

    def keep(self, count: int, *, written: str) -> list[str]:
        """Remove the oldest checkpoints beyond `count`."""
        return retention.keep(self.root, count, written=written)


class FolderDraft:
    """A private folder beside the checkpoints."""

    poll_s = 0.01
    new = Writer

    def __init__(self, folder: Path) -> None:
        """Know where it is."""
        self.folder, self.id = folder, folder.name

    def seen(self) -> bool:
        """Whether this rank sees it; a network's file system tells it late."""
        return (self.folder / OWNER).exists()

    def report(self, rank: int, parts: Sequence[FilePart], keys: Mapping[str, Key]) -> None:
        """Say what a rank has written."""
        rank_reports.report(self.folder, rank, parts, keys=keys)

    def failed(self, rank: int, why: str) -> None:
        """Say that a rank will write nothing more."""
        rank_reports.failed(self.folder, rank, why)

    def heard(self, ranks: Collection[int]) -> dict[int, Told]:
        """What those of these ranks say who have said something."""
        return {
            rank: one for rank in ranks if (one := rank_reports.told(self.folder, rank)) is not None
        }

    def size_bytes(self) -> int:
        """Bytes there now."""
        try:
            return sum(path.stat().st_size for path in self.folder.iterdir())
        except FileNotFoundError:
            if self.folder.is_dir():
                return -2  # a file went while it was looked at
            raise CheckpointError(
                f"{self.folder} was removed while it was written; save again."
            ) from None

    def commit(self, name: str, manifest: Manifest, *, overwrite: bool) -> Path:
        """Give it its name."""
        return commit_protocol.commit(self.folder, name, manifest, overwrite=overwrite)

    def abort(self) -> None:
        """Remove it."""
        commit_protocol.abort(self.folder)
