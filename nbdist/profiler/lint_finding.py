"""What the text of a cell alone tells about its training loop: one remark; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nbdist.profiler.symbolic_walk import Event

Kind = Literal[
    "num_workers",
    "pin_memory",
    "sharding",
    "fp16",
    "sync",
    "zero_grad",
    "set_to_none",
    "accumulate",
    "train_mode",
]

Sure = Literal["certain", "likely", "worth a look"]
"""In words: the text shows it; nearly always so; depends on what the text does not show."""

Evidence = Literal["data", "copies", "sharded", "precision", "line", "training", ""]
"""What of `RankFigures` confirms or refutes a remark; "" where a profile cannot tell.

data       the share of the step that waits for batches, and the loader's own workers
copies     the share of batches on their way to the device, and the loader's pin_memory
sharded    whether the loaders that the loop took batches from are sharded
precision  the precision that the engine has, and the kind of device
line       seconds on the very line
training   whether the model was in training mode
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """One thing in the text of a cell that costs time or is wrong."""

    kind: Kind
    cell: str
    """"In[3]"."""
    line: int
    source: str
    """The line itself, stripped."""
    reason: str
    """One sentence: what it does, and with a profile what it cost."""
    change: str
    """What to write instead: a line to paste, or a sentence."""
    sure: Sure
    evidence: Evidence = ""
    seconds: float = 0.0
    """Of a step, that the profile puts on it; an upper bound of what the change gains."""


def remark(
    event: Event, kind: Kind, reason: str, change: str, sure: Sure, evidence: Evidence = ""
) -> Remark:
    """A remark on the line of an event."""
    line: int = getattr(event.node, "lineno", 1)
    return Remark(
        kind=kind,
        cell=event.cell.name,
        line=line,
        source=event.cell.line(line),
        reason=reason,
        change=change,
        sure=sure,
        evidence=evidence,
    )
