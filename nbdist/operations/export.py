"""Export and the pull of models as the notebook's kernel sees them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist.checkpoint import atomic_folder
from nbdist.errors import CheckpointError, OptionError
from nbdist.operations.switch import size
from nbdist.output.status_line import StatusLine
from nbdist.paths import expanded
from nbdist.protocol import messages
from nbdist.session.recovery import Transaction

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.session.worker_group import Gang

    Listen = Callable[[Callable[[str], object] | None], None]

DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}
MAX_SHARD_SIZE = "5GB"
_DOING = {messages.EXPORT: "export", messages.GATHER: "pull", messages.FOREIGN: "load"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export wrote."""

    path: Path
    model: str
    """Its class."""
    files: tuple[str, ...]
    """With tensors."""
    tensors: int
    size_bytes: int
    """Of all tensors."""
    seconds: Mapping[str, float]
    """By phase, of the slowest rank."""
    gathered_bytes: int = 0
    """That went from one rank to another."""
    companions: tuple[str, ...] = ()
    """Variables saved along."""
    notes: tuple[str, ...] = ()
    how: str = ""
    """How the folder is loaded."""

    def __str__(self) -> str:
        """Say it in a few lines."""
        files = f"{len(self.files)} files" if len(self.files) > 1 else "1 file"
        lines = [
            (
                f"{self.model} in {self.path}: {self.tensors} tensors, {size(self.size_bytes)} in"
                f" {files}, {sum(self.seconds.values()):.1f} s"
            ),
            *([f"  with {', '.join(self.companions)}"] if self.companions else []),
            *(f"  {note}" for note in self.notes),
            f"  {self.how}",
        ]
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: FBT001 - IPython's
        """Show the lines where IPython shows a value."""
        printer.text("ExportReport(...)" if cycle else str(self))


def request(
    folder: str | os.PathLike[str],
    dtype: object,
    *,
    model: str | None,
    max_shard_size: str | int,
    overwrite: bool,
) -> messages.ExportRequest:
    """Check what is asked for.

    Raises:
        OptionError: no such dtype.
    """
    name = None if dtype is None else DTYPES.get(str(dtype).removeprefix("torch."))
    if dtype is not None and name is None:
        msg = f"dtype {str(dtype)!r} is not allowed; give bf16, fp16 or fp32."
        raise OptionError(msg)
    return messages.ExportRequest(
        folder=str(expanded(folder).absolute()),
        dtype=name,
        max_shard_size=str(max_shard_size),
        overwrite=overwrite,
        model=model,
    )


def export(
    content: messages.ExportRequest, ranks: Sequence[int], gang: Gang, listen: Listen
) -> ExportReport:
    """Let the ranks write the folder, together.

    Raises:
        NotEmptyError: files are there; the ranks were not asked.
        CheckpointError: nothing of it is left.
    """
    atomic_folder.check(Path(content["folder"]), overwrite=content["overwrite"])
    with StatusLine() as line:
        reports = [
            one["report"]
            for one in asked_of_all(content, messages.EXPORT, ranks, gang, listen, line)
        ]
    first = reports[0]
    seconds = {
        name: max(one["seconds"].get(name, 0.0) for one in reports) for name in first["seconds"]
    }
    return ExportReport(
        path=Path(content["folder"]),
        model=first["model"],
        files=tuple(first["files"]),
        tensors=first["tensors"],
        size_bytes=first["size_bytes"],
        seconds=seconds,
        gathered_bytes=sum(one["gathered_bytes"] for one in reports),
        companions=tuple(first["companions"]),
        notes=tuple(first["notes"]),
        how=first["how"],
    )


def gather(
    name: str, folders: Sequence[str], ranks: Sequence[int], gang: Gang, listen: Listen
) -> str:
    """Let the ranks write the state dict of a prepared model into one payload file; name it.

    Raises:
        CheckpointError: they cannot.
    """
    content = messages.GatherRequest(name=name, folders=list(folders))
    with StatusLine() as line:
        replies = asked_of_all(content, messages.GATHER, ranks, gang, listen, line)
    return str(replies[0]["path"])


def asked_of_all(
    content: Any, kind: str, ranks: Sequence[int], gang: Gang, listen: Listen, line: StatusLine
) -> list[dict[str, Any]]:
    """Ask all ranks for something that they do together; show how far they are.

    Raises:
        CheckpointError: they could not.
    """
    doing = _DOING[kind]

    def show(text: str) -> None:
        line.show(f"nbdist: {doing}: {text}")

    listen(show)
    try:
        replies = Transaction(gang, ranks, kind, raises=CheckpointError, show=show).ask(content)
    finally:
        listen(None)
    line.show(f"nbdist: {doing}: done")
    return [replies[rank] for rank in ranks]
