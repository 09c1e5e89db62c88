"""Loading of a checkpoint or of files of another tool, and export; the notebook's side."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist import checkpoint
from nbdist.checkpoint import durable_io
from nbdist.display import show_as_text
from nbdist.errors import CheckpointError, OptionError
from nbdist.number_formatting import format_bytes
from nbdist.paths import expand_user
from nbdist.protocol.operations import (
    EXPORT,
    IMPORT,
    LOAD,
    ExportRequest,
    ImportCheckpointRequest,
    LoadRequest,
    distinct_notes,
    slowest_phases,
)
from nbdist.session.collective_request import CollectiveRequest
from nbdist.session.progress import StatusLine

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from nbdist.checkpoint import Url
    from nbdist.session.worker_group import WorkerGroup

EXPORT_DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}
MAX_SHARD_SIZE = "5GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Result of a load."""

    name: str
    step: int
    written: str
    """Backend and number of ranks that wrote it."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase, of the slowest rank."""
    read_bytes: int = 0
    """Sum over all ranks."""
    verified: int = 0
    """Number of tensors whose digest matches the saved one."""
    loaded: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Differences from the saved state, with reasons."""

    @property
    def total_s(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        lines = [
            f"{self.name} (step {self.step}, {self.written}) loaded in {self.total_s:.1f} s",
            f"  loaded: {'; '.join(self.loaded)}",
            f"  {self.verified} tensors verified; {format_bytes(self.read_bytes)} read",
        ]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    _repr_pretty_ = show_as_text


def load_checkpoint(
    workers: WorkerGroup,
    name: str,
    root: Path | Url,
    *,
    weights_only: bool,
    reset_optimizer: bool,
) -> LoadReport:
    """Load a checkpoint into the prepared models of the ranks.

    Raises:
        CheckpointError: the models are unchanged, or the message says otherwise.
    """
    with (
        checkpoint.storage_for(root).open_checkpoint(name) as (path, manifest),
        StatusLine(f"loading {name}") as line,
    ):
        request = LoadRequest(
            path=checkpoint.location_with_password(path),
            id=manifest.id,
            weights_only=weights_only,
            reset_optimizer=reset_optimizer,
        )
        try:
            reports = CollectiveRequest(workers, LOAD, line.show).run(request)
        except CheckpointError:
            line.show("failed")
            raise
        first = reports[0]
        report = LoadReport(
            name=name,
            step=first.step,
            written=f"{first.backend} on {first.world_size} ranks",
            seconds=slowest_phases(reports),
            read_bytes=sum(report.read_bytes for report in reports),
            verified=first.verified,
            loaded=tuple(first.loaded),
            notes=distinct_notes(reports),
        )
        line.show(f"done in {report.total_s:.1f} s")
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignReport:
    """Result of loading files of another tool."""

    path: Path
    kind: str
    """Format and tool that wrote it."""
    tensors: int
    read_bytes: int
    """Sum over all ranks."""
    steps: float | None
    """Step of the optimizer; None if its state was not loaded."""
    seconds: float
    notes: tuple[str, ...] = ()
    """Parts that were not loaded."""

    def __str__(self) -> str:
        step = "" if self.steps is None else f", the optimizer at step {self.steps:g}"
        amount = (
            f"{self.tensors} tensors, {format_bytes(self.read_bytes)} read in {self.seconds:.1f} s"
        )
        lines = [
            f"{self.path} ({self.kind}): {amount}{step}",
            *(f"  {note}" for note in self.notes),
        ]
        return "\n".join(lines)

    _repr_pretty_ = show_as_text


def import_checkpoint(
    workers: WorkerGroup,
    path: str | os.PathLike[str],
    *,
    trust: bool,
    model: str | None,
    weights_only: bool,
) -> ForeignReport:
    """Load the files on all ranks together.

    Raises:
        CheckpointError: loading failed; the model is unchanged.
    """
    absolute = expand_user(path).absolute()
    with StatusLine("load") as line:
        reports = CollectiveRequest(workers, IMPORT, line.show).run(
            ImportCheckpointRequest(
                path=str(absolute), trust=trust, model=model, weights_only=weights_only
            )
        )
        line.show("done")
    return ForeignReport(
        path=absolute,
        kind=reports[0].kind,
        tensors=reports[0].tensors,
        read_bytes=sum(report.read_bytes for report in reports),
        steps=reports[0].steps,
        seconds=max(report.seconds for report in reports),
        notes=tuple(reports[0].notes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """Result of an export."""

    path: Path
    model: str
    """Class name of the model."""
    files: tuple[str, ...]
    """Files with tensors."""
    tensors: int
    size_bytes: int
    """Total size of the tensors."""
    seconds: Mapping[str, float]
    """By phase, of the slowest rank."""
    gathered_bytes: int = 0
    """Bytes sent between ranks."""
    companions: tuple[str, ...] = ()
    """Variables saved with the model, such as a tokenizer."""
    notes: tuple[str, ...] = ()
    how: str = ""
    """Code that loads the folder."""

    def __str__(self) -> str:
        files = f"{len(self.files)} files" if len(self.files) > 1 else "1 file"
        lines = [
            (
                f"{self.model} in {self.path}: {self.tensors} tensors,"
                f" {format_bytes(self.size_bytes)} in {files}, {sum(self.seconds.values()):.1f} s"
            ),
            *([f"  with {', '.join(self.companions)}"] if self.companions else []),
            *(f"  {note}" for note in self.notes),
            f"  {self.how}",
        ]
        return "\n".join(lines)

    _repr_pretty_ = show_as_text


def make_export_request(
    folder: str | os.PathLike[str],
    dtype: object,
    *,
    model: str | None,
    max_shard_size: str | int,
    overwrite: bool,
) -> ExportRequest:
    """Validate the arguments of an export.

    Raises:
        OptionError: unknown dtype, or a URL instead of a folder.
    """
    if checkpoint.is_url(folder):
        raise OptionError(
            f"An export needs a folder, and {checkpoint.Url(folder)} is a URL. Export to a folder,"
            " then copy it there."
        )
    name = None if dtype is None else EXPORT_DTYPES.get(str(dtype).removeprefix("torch."))
    if dtype is not None and name is None:
        raise OptionError(f"Unknown dtype {str(dtype)!r}. Use bf16, fp16 or fp32.")
    return ExportRequest(
        folder=str(expand_user(folder).absolute()),
        dtype=name,
        max_shard_size=str(max_shard_size),
        overwrite=overwrite,
        model=model,
    )


def export(workers: WorkerGroup, request: ExportRequest) -> ExportReport:
    """Export the model to a folder that all ranks write together.

    Raises:
        NotEmptyError: the folder is not empty; no request was sent.
        CheckpointError: the export failed; no files remain.
    """
    durable_io.check_target(Path(request.folder), overwrite=request.overwrite)
    with StatusLine("export") as line:
        reports = CollectiveRequest(workers, EXPORT, line.show).run(request)
        line.show("done")
    first = reports[0]
    return ExportReport(
        path=Path(request.folder),
        model=first.model,
        files=tuple(first.files),
        tensors=first.tensors,
        size_bytes=first.size_bytes,
        seconds=slowest_phases(reports),
        gathered_bytes=sum(report.gathered_bytes for report in reports),
        companions=tuple(first.companions),
        notes=tuple(first.notes),
        how=first.how,
    )
