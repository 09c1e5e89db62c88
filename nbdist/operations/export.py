"""Export of the prepared model; the notebook's side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.checkpoint import durable_io
from nbdist.errors import OptionError
from nbdist.number_formatting import format_bytes
from nbdist.paths import expand_user
from nbdist.protocol.operations import EXPORT, ExportRequest, RankExportReport, slowest_phases
from nbdist.session.collective_request import CollectiveRequest
from nbdist.session.progress import StatusLine

if TYPE_CHECKING:
    import os

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


@dataclass(slots=True, kw_only=True)
class ExportReport(RankExportReport):
    """Result of an export, of all ranks together."""

    path: Path

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

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: FBT001 - IPython's
        printer.text("ExportReport(...)" if cycle else str(self))


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
        msg = f"Unknown dtype {str(dtype)!r}. Use bf16, fp16 or fp32."
        raise OptionError(msg)
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
    with StatusLine() as line:
        reports = CollectiveRequest(
            workers, EXPORT, lambda text: line.show(f"nbdist: export: {text}")
        ).run(request)
        line.show("nbdist: export: done")
    report = ExportReport(path=Path(request.folder), **asdict(reports[0]))
    report.seconds = slowest_phases(reports)
    report.gathered_bytes = sum(each.gathered_bytes for each in reports)
    return report
