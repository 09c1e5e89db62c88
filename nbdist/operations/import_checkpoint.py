"""Loading of files that other tools wrote; the notebook's side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.number_formatting import format_bytes
from nbdist.paths import expand_user
from nbdist.protocol.operations import IMPORT, ImportCheckpointRequest
from nbdist.session.collective_request import CollectiveRequest
from nbdist.session.progress import StatusLine

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from nbdist.session.worker_group import WorkerGroup


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

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: FBT001 - IPython's
        printer.text("ForeignReport(...)" if cycle else str(self))


def import_checkpoint(
    workers: WorkerGroup,
    world_size: int,
    path: str | os.PathLike[str],
    *,
    trust: bool,
    model: str | None,
) -> ForeignReport:
    """Load the files on all ranks together.

    Raises:
        CheckpointError: loading failed; the model is unchanged.
    """
    absolute = expand_user(path).absolute()
    with StatusLine() as line:
        reports = CollectiveRequest(
            workers, IMPORT, world_size, lambda text: line.show(f"nbdist: load: {text}")
        ).run(ImportCheckpointRequest(path=str(absolute), trust=trust, model=model))
        line.show("nbdist: load: done")
    return ForeignReport(
        path=absolute,
        kind=reports[0].kind,
        tensors=reports[0].tensors,
        read_bytes=sum(report.read_bytes for report in reports),
        steps=reports[0].steps,
        seconds=max(report.seconds for report in reports),
        notes=tuple(reports[0].notes),
    )
