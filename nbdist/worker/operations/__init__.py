"""Collective operations on all ranks: save, load, switch, resize, export, import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping
    from pathlib import Path

    from nbdist.protocol.operations import SaveRequest
    from nbdist.worker.collective_check import CollectiveBarrier
    from nbdist.worker.report import Reporter


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Parts of this rank that the operations use."""

    variables: MutableMapping[str, Any]
    """The user's variables."""
    predefined: dict[str, Any]
    """The variables before the first cell; later differences are the user's."""
    initial_environ: dict[str, str]
    reporter: Reporter
    on_phase: Callable[[str], None]
    """Called with the name of each phase and with progress texts."""
    begin_save: Callable[[SaveRequest], str]
    """Starts a save in the background; returns its id."""
    barrier: CollectiveBarrier | None
    """Barrier of CPU ranks before each collective."""
    folder: Path
    """Private folder of this node's ranks."""
