"""A lint finding: a problem found by static analysis of a cell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from nbdist.profiler.symbolic_walk import AstEvent

LintKind = Literal[
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

Confidence = Literal["certain", "likely", "worth a look"]
"""Confidence: shown by the source; true in nearly all cases; depends on facts outside of it."""

Evidence = Literal["data", "copies", "sharded", "precision", "line", "training", ""]
"""Measurement of ``RankProfile`` that confirms or refutes a finding; "" if there is none.

data       share of the step spent waiting for batches, and `num_workers` of the loaders
copies     share of the step spent copying batches to the device, and `pin_memory`
sharded    whether the loaders used by the loop are sharded
precision  precision of the engine, and kind of the device
line       seconds spent on the line of the finding
training   whether the model was in training mode
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LintFinding:
    """Something in the source of a cell that costs time or is wrong."""

    kind: LintKind
    cell: str
    """Name of the cell, such as "In[3]"."""
    line: int
    source: str
    """Stripped text of the line."""
    reason: str
    """The problem and, with a profile, its measured cost."""
    change: str
    """What to write instead: code to paste, or a sentence."""
    sure: Confidence
    evidence: Evidence = ""
    seconds: float = 0.0
    """Measured cost in seconds per step, an upper bound of the gain."""


def finding_at(
    event: AstEvent,
    kind: LintKind,
    reason: str,
    change: str,
    sure: Confidence,
    evidence: Evidence = "",
) -> LintFinding:
    """Create a finding at the line of an event."""
    line: int = getattr(event.node, "lineno", 1)
    return LintFinding(
        kind=kind,
        cell=event.cell.name,
        line=line,
        source=event.cell.source_line(line),
        reason=reason,
        change=change,
        sure=sure,
        evidence=evidence,
    )
