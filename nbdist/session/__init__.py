"""The notebook's side of a session: start ranks, run cells, collect metrics; without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class PanelModule(Protocol):
    """Functions of `nbdist.panel` that a session calls."""

    def show_panel(self, session: Any, face: str = "auto") -> None:
        """Display the panel under the cell that runs."""

    def static_mime_bundle(self, session: Any) -> dict[str, str]:
        """Return the panel as HTML without script, and as text."""


panel_loader: list[Callable[[], PanelModule]] = []
"""Imports the panel at its first use; set by `nbdist`, since the panel imports the session."""
