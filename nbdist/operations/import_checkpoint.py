"""Loading what something else wrote, as the notebook's kernel sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.operations.export import asked_of_all
from nbdist.operations.switch import size
from nbdist.output.status_line import StatusLine
from nbdist.paths import expanded
from nbdist.protocol import messages

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from pathlib import Path

    from nbdist.operations.export import Listen
    from nbdist.session.worker_group import Gang


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignReport:
    """What was loaded."""

    path: Path
    kind: str
    """What wrote it."""
    tensors: int
    read_bytes: int
    """By all ranks together."""
    steps: float | None
    """Of the optimizer; None where its state was not loaded."""
    seconds: float
    notes: tuple[str, ...] = ()
    """What was not taken."""

    def __str__(self) -> str:
        """Say it in a few lines."""
        step = "" if self.steps is None else f", the optimizer at step {self.steps:g}"
        amount = f"{self.tensors} tensors, {size(self.read_bytes)} read in {self.seconds:.1f} s"
        lines = [f"{self.path} ({self.kind}): {amount}{step}", *(f"  {one}" for one in self.notes)]
        return "\n".join(lines)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: FBT001 - IPython's
        """Show the lines where IPython shows a value."""
        printer.text("ForeignReport(...)" if cycle else str(self))


def load(
    path: str | os.PathLike[str],
    ranks: Sequence[int],
    gang: Gang,
    listen: Listen,
    *,
    trust: bool,
    model: str | None,
) -> ForeignReport:
    """Let the ranks load it, together.

    Raises:
        CheckpointError: all is as it was.
    """
    found = expanded(path).absolute()
    content = messages.ForeignRequest(path=str(found), trust=trust, model=model)
    with StatusLine() as line:
        replies = asked_of_all(content, messages.FOREIGN, ranks, gang, listen, line)
    reports = [one["report"] for one in replies]
    return ForeignReport(
        path=found,
        kind=reports[0]["kind"],
        tensors=reports[0]["tensors"],
        read_bytes=sum(one["read_bytes"] for one in reports),
        steps=reports[0]["steps"],
        seconds=max(one["seconds"] for one in reports),
        notes=tuple(reports[0]["notes"]),
    )
