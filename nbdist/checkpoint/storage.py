"""Storage of checkpoints: what a folder and a URL have in common.

To save, one process calls ``Storage.begin``; the others attach to that draft. Each rank writes its
files, then its report; one process commits the draft, or aborts it. A rank that saves in the
background cannot join collectives, so the ranks exchange results and errors through these reports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from nbdist.checkpoint.manifest import MAX_TEXT_CHARS, RankWriteReport
from nbdist.checkpoint.name_validation import list_first, printable, rank_report_name
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from datetime import datetime

    from nbdist.checkpoint.manifest import CheckpointFile, Manifest, TensorMetadata
    from nbdist.checkpoint.safetensors_writer import SafetensorsWriter, StoredTensor
    from nbdist.checkpoint.url import Url


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """Summary of a checkpoint, as listed to the user."""

    name: str
    step: int
    size_bytes: int
    backend: str
    created: datetime
    path: Path | Url
    ended: str = ""
    """What ended its run from outside: "SIGTERM"; "" if nothing did."""


def summarize(path: Path | Url, name: str, manifest: Manifest) -> CheckpointSummary:
    """Summarize a checkpoint from its manifest."""
    return CheckpointSummary(
        name=name,
        step=manifest.step,
        size_bytes=manifest.size_bytes,
        backend=manifest.backend,
        created=manifest.created.astimezone(UTC),
        path=path,
        ended=str(manifest.extra.get("ended", "")),
    )


class PendingCheckpoint(ABC):
    """Draft of a checkpoint that all ranks are writing. Failures raise CheckpointError."""

    id: str
    """ID with which the other ranks attach to it."""
    location: Path | Url
    poll_s: ClassVar[float]
    """Interval at which to poll for reports of other ranks."""

    @abstractmethod
    def is_visible(self) -> bool:
        """Return whether this rank can see the draft and write to it."""

    @abstractmethod
    def create_file(self, name: str, tensors: Sequence[StoredTensor]) -> SafetensorsWriter:
        """Create a file for the given tensors.

        Raises:
            OSError: a folder cannot be written.
        """

    def written_bytes(self) -> int | None:
        """Return the bytes written so far; None if the storage does not show partial files."""
        return None

    @abstractmethod
    def commit(self, name: str, manifest: Manifest, *, overwrite: bool) -> Path | Url:
        """Commit the checkpoint and return its location.

        Call it in one process, after every rank has reported. If it raises, call ``abort``: the
        name still refers to the previous checkpoint.
        """

    @abstractmethod
    def abort(self) -> None:
        """Remove the draft unless it is committed. Errors are ignored; the next save retries."""

    @abstractmethod
    def write_small_file(self, name: str, content: bytes) -> None:
        """Write a small file that is removed on commit."""

    @abstractmethod
    def read_small_file(self, name: str) -> bytes | None:
        """Read a small file, or return None if it does not exist yet."""

    def write_report(
        self, rank: int, files: Sequence[CheckpointFile], keys: Mapping[str, TensorMetadata]
    ) -> None:
        """Write the report of a rank. Call it after all its files are written.

        Args:
            rank: the rank.
            files: the files that it has written.
            keys: tensors of which it has written a part; the digest is of that part.
        """
        report = RankWriteReport(files=tuple(files), keys=keys)
        self.write_small_file(rank_report_name(rank), report.to_json())

    def write_failure(self, rank: int, reason: str) -> None:
        """Report that a rank has failed."""
        text = "".join(char if char.isprintable() else " " for char in reason)
        report = RankWriteReport(error=text[:MAX_TEXT_CHARS] or "?")
        self.write_small_file(rank_report_name(rank), report.to_json())

    def read_reports(self, ranks: Iterable[int]) -> dict[int, RankWriteReport]:
        """Return the reports written so far by these ranks."""
        reports = {}
        for rank in ranks:
            text = self.read_small_file(rank_report_name(rank))
            # A file that is still being written is not valid JSON.
            report = None if text is None else RankWriteReport.from_json(text)
            if report is not None:
                reports[rank] = report
        return reports


class Storage(ABC):
    """Location of checkpoints: a folder or a URL. Failures raise CheckpointError."""

    root: Path | Url
    """Folder or URL of all checkpoints."""

    @abstractmethod
    def list_checkpoints(self) -> list[CheckpointSummary]:
        """List the complete checkpoints, newest last."""

    @abstractmethod
    def open_checkpoint(self, name: str) -> AbstractContextManager[tuple[Path | Url, Manifest]]:
        """Open a checkpoint: a context manager of its location and manifest."""

    @abstractmethod
    def begin(
        self, name: str, *, overwrite: bool = False, size_bytes: int = 0
    ) -> PendingCheckpoint:
        """Create a draft, and remove what dead processes of this user left. Call in one process.

        Args:
            name: name of the checkpoint. Checked here so that an invalid one fails early.
            overwrite: whether an existing checkpoint of this name may be replaced.
            size_bytes: bytes that all ranks together will write.

        Raises:
            CheckpointError: the name is invalid or taken, the location is not writable, or there
                is not enough free space.
        """

    @abstractmethod
    def attach(self, name: str, number: str) -> PendingCheckpoint:
        """Attach to a draft that another process has created."""

    @abstractmethod
    def remove_oldest(self, count: int, *, written: str | None = None) -> list[str]:
        """Remove the oldest checkpoints except for the newest `count`; return the removed names.

        Args:
            count: number of checkpoints to keep, at least 1.
            written: name of the checkpoint just saved. It is kept even if clocks differ and its
                creation time is not the newest.

        Raises:
            CheckpointError: `count` is less than 1, or the location cannot be written.
        """

    def _checkpoints_to_remove(
        self, found: Sequence[CheckpointSummary], count: int, written: str | None
    ) -> list[CheckpointSummary]:
        """Return what `remove_oldest` removes of a list that is sorted by age."""
        if type(count) is not int or count < 1:
            raise CheckpointError(f"keep must be an integer >= 1, got {count!r}. Or omit it.")
        # The sort is stable: `written` goes last, the others keep their order.
        return sorted(found, key=lambda summary: summary.name == written)[:-count]

    def _name_exists_error(self, path: Path | Url) -> CheckpointError:
        return CheckpointError(
            f"{path} exists. Save under another name, or use --overwrite (overwrite=True) to"
            " replace it."
        )

    def _missing_error(self, name: str, available: Sequence[str]) -> CheckpointError:
        """Build the error for a name that does not exist; it lists up to 10 names that do."""
        names = list_first(available[::-1])
        others = f"Available: {names}." if available else "It contains no checkpoints."
        if Path(name).exists():
            others += f" Use ./{name} for the one beside the notebook."
        return CheckpointError(f"No checkpoint {name} in {self.root}. {others}")


def check_sizes(
    sizes: Mapping[str, int], manifest: Manifest, location: Path | Url, extra: Collection[str] = ()
) -> None:
    """Compare the files of a draft with its manifest.

    Args:
        sizes: size in bytes of each file in the draft.
        manifest: the manifest to commit.
        location: location of the draft.
        extra: names of files that the manifest does not list but must not exist.

    Raises:
        CheckpointError: a file is missing, has the wrong size, or is not in the manifest.
    """
    named = {file.name: file.size_bytes for file in manifest.files}
    wrong = sorted(name for name in {*named, *extra} if sizes.get(name) != named.get(name))
    if wrong:
        raise CheckpointError(
            f"Size of {printable(wrong[0])} in {location} differs from what its rank reported."
            " Save again."
        )
