"""Registration of the panel: it imports the session, and the session shows it."""

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


_loaders: list[Callable[[], Any]] = []


def register(load: Callable[[], Any]) -> None:
    """Set the function that imports the panel; `nbdist/__init__.py` does it."""
    _loaders[:] = [load]


def panel() -> PanelModule:
    """Import the panel at its first use."""
    module: PanelModule = _loaders[0]()
    return module
