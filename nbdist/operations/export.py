"""Export, and the gathering of models for pull; the notebook's side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.checkpoint import atomic_folder
from nbdist.display.units import format_bytes
from nbdist.errors import CheckpointError, OptionError
from nbdist.output.status_line import StatusLine
from nbdist.paths import expand_user
from nbdist.protocol import messages
from nbdist.session.recovery import TransactionalRequest

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.session.worker_group import WorkerGroup

    Listen = Callable[[Callable[[str], object] | None], None]

EXPORT_DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}
MAX_SHARD_SIZE = "5GB"
_DOING = {messages.EXPORT: "export", messages.GATHER_MODEL: "pull", messages.IMPORT: "load"}


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
        """Return a summary of a few lines."""
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
) -> messages.ExportRequest:
    """Validate the arguments of an export.

    Raises:
        OptionError: unknown dtype.
    """
    name = None if dtype is None else EXPORT_DTYPES.get(str(dtype).removeprefix("torch."))
    if dtype is not None and name is None:
        msg = f"Unknown dtype {str(dtype)!r}. Use bf16, fp16 or fp32."
        raise OptionError(msg)
    return messages.ExportRequest(
        folder=str(expand_user(folder).absolute()),
        dtype=name,
        max_shard_size=str(max_shard_size),
        overwrite=overwrite,
        model=model,
    )


def export(
    content: messages.ExportRequest, ranks: Sequence[int], workers: WorkerGroup, listen: Listen
) -> ExportReport:
    """Export the model to a folder that all ranks write together.

    Raises:
        NotEmptyError: the folder is not empty; no request was sent.
        CheckpointError: the export failed; no files remain.
    """
    atomic_folder.check_target(Path(content["folder"]), overwrite=content["overwrite"])
    with StatusLine() as line:
        reports = [
            reply["report"]
            for reply in request_all(content, messages.EXPORT, ranks, workers, listen, line)
        ]
    first = reports[0]
    seconds = {
        name: max(reply["seconds"].get(name, 0.0) for reply in reports) for name in first["seconds"]
    }
    return ExportReport(
        path=Path(content["folder"]),
        model=first["model"],
        files=tuple(first["files"]),
        tensors=first["tensors"],
        size_bytes=first["size_bytes"],
        seconds=seconds,
        gathered_bytes=sum(reply["gathered_bytes"] for reply in reports),
        companions=tuple(first["companions"]),
        notes=tuple(first["notes"]),
        how=first["how"],
    )


def gather_model(
    name: str, folders: Sequence[str], ranks: Sequence[int], workers: WorkerGroup, listen: Listen
) -> str:
    """Write the state dict of a prepared model into one payload file; return its path.

    Raises:
        CheckpointError: a rank failed.
    """
    content = messages.GatherModelRequest(name=name, folders=list(folders))
    with StatusLine() as line:
        replies = request_all(content, messages.GATHER_MODEL, ranks, workers, listen, line)
    return str(replies[0]["path"])


def request_all(
    content: Any,
    kind: str,
    ranks: Sequence[int],
    workers: WorkerGroup,
    listen: Listen,
    line: StatusLine,
) -> list[dict[str, Any]]:
    """Send a request to all ranks, and show its progress.

    Raises:
        CheckpointError: a rank failed.
    """
    doing = _DOING[kind]

    def show(text: str) -> None:
        line.show(f"nbdist: {doing}: {text}")

    listen(show)
    try:
        replies = TransactionalRequest(
            workers, ranks, kind, raises=CheckpointError, show=show
        ).send_and_wait(content)
    finally:
        listen(None)
    line.show(f"nbdist: {doing}: done")
    return [replies[rank] for rank in ranks]
