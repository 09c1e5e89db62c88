"""Export of the prepared model; the notebook's side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.checkpoint import durable_io
from nbdist.display.elements import show_as_text
from nbdist.errors import OptionError
from nbdist.number_formatting import format_bytes
from nbdist.paths import expand_user
from nbdist.protocol.operations import EXPORT, ExportRequest, slowest_phases
from nbdist.session.collective_request import CollectiveRequest
from nbdist.session.progress import StatusLine

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

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
        OptionError: unknown dtype.
    """
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
