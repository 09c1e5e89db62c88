"""The live panel: predicted and actual memory, curves, ranks, and buttons that run commands.

Runs in the notebook kernel, without torch. `snapshot` takes the state of the session, which is
shown as a live widget (`widget`, with the front end in widgets/), as static HTML or as text.
anywidget is imported when a widget is first displayed.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING
from uuid import uuid4

from nbdist.errors import OptionError
from nbdist.output.sink import PANEL_FORMATS, get_kernel, in_marimo_cell, running_cell
from nbdist.panel import protocol
from nbdist.panel.controller import PanelController, PanelData
from nbdist.panel.curves import curve_history
from nbdist.session import progress

if TYPE_CHECKING:
    from nbdist.output.sink import OutputSink
    from nbdist.panel.curves import Points
    from nbdist.panel.protocol import PanelState
    from nbdist.panel.widget import PanelWidget
    from nbdist.session.session import Session

_KAGGLE = "KAGGLE"
"""Prefix of variables that Kaggle sets. Its server has no anywidget, so that a widget
would show an error (Kaggle/docker-python#1487)."""


def show_panel(session: Session, face: str = "auto") -> None:
    """Display the panel of a session below the running cell.

    A session has one panel. Displayed again, the same panel is shown in two places.

    Args:
        session: the session to show.
        face: one of ``PANEL_FORMATS``; auto selects the best one that is available here.

    Raises:
        OptionError: the format is unknown or not available here.
    """
    chosen = choose_output_format(face)
    if chosen == "widget" and session.state != "stopped":  # a stopped session has no updates
        open_panel(session).show()
        return
    mime_bundle = static_mime_bundle(session, look=True)
    if chosen == "text":
        print(mime_bundle["text/plain"])  # noqa: T201 - the requested output
    else:
        running_cell().display(mime_bundle, {})


def choose_output_format(face: str) -> str:
    """Return the format to use here: widget, html or text.

    Raises:
        OptionError: the format is unknown or not available here.
    """
    if face not in PANEL_FORMATS:
        *formats, last_format = PANEL_FORMATS
        raise OptionError(
            f"Unknown panel format {face!r} (--face). Use {', '.join(formats)} or {last_format}."
        )
    if face == "widget" and (reason := why_no_widget()):
        raise OptionError(f"The live panel is not available here: {reason}. Use --face html.")
    if face != "auto":
        return face
    if not _is_notebook():
        return "text"
    on_kaggle = any(name.startswith(_KAGGLE) for name in os.environ)
    return "html" if on_kaggle or why_no_widget() else "widget"


def static_mime_bundle(session: Session, *, look: bool = False) -> dict[str, str]:
    """Return the panel as static HTML and as text.

    Args:
        session: the session to show.
        look: first sample the devices and plan the prepared model, unless a cell runs.
    """
    view = panel_data(session)
    if look and view.panel is None:
        _sample_and_plan(view)
    return render_formats(view.snapshot(), curve_history(session.metrics))


def render_formats(drawn: PanelState, curves: dict[str, Points]) -> dict[str, str]:
    """Render a snapshot as HTML and as text."""
    from nbdist.panel import static_page

    return {
        "text/html": str(static_page.render_html(drawn, curves)),
        "text/plain": static_page.render_text(drawn, curves),
    }


def _sample_and_plan(view: PanelData) -> None:
    """Sample the devices and plan once, for the first display."""
    session = view.session
    if session.state in {"ready", "running"}:
        view.devices.sample_once()
    if session.running is None and session.lock.acquire(blocking=False):
        try:
            with progress.suppress_status_lines():
                view.replan_if_changed(at_once=True)
        finally:
            session.lock.release()


def _is_notebook() -> bool:
    return get_kernel() is not None or in_marimo_cell()


def why_no_widget() -> str:
    """Return why a widget cannot be shown; "" if it can."""
    if not _is_notebook():
        return "this is not a notebook"
    if importlib.util.find_spec("anywidget") is None:
        return "anywidget is not installed"
    if not protocol.has_built_assets():
        return f"{protocol.SCRIPT.name} was not built when nbdist was installed"
    return ""


class Panel:
    """The live panel of one session, and the displays that show it."""

    def __init__(self, session: Session) -> None:
        from nbdist.panel.widget import PanelWidget

        self._session = session
        self.view = panel_data(session)
        self._displays: list[tuple[OutputSink, str]] = []
        self._widget: PanelWidget = PanelWidget(
            lambda message, buffers: self.live.receive_message(  # noqa: PLW0108 - made below
                message, buffers
            ),
            lambda: static_mime_bundle(session),
        )
        self.live = PanelController(self.view, self._widget.send)
        self.view.panel = self  # last, since the lines above may fail
        session.at_stop(self.freeze)

    def show(self) -> None:
        """Display the panel below the running cell."""
        screen, display_id = running_cell(), f"nbdist-panel-{uuid4().hex}"
        screen.display(*self._widget._repr_mimebundle_(), display_id=display_id)
        self._displays.append((screen, display_id))

    def freeze(self) -> None:
        """Replace the widget permanently by a static view of the last state."""
        if self.view.panel is not self:  # frozen already
            return
        self.live.close()
        mime_bundle = render_formats(self.view.snapshot(), curve_history(self._session.metrics))
        for screen, display_id in self._displays:
            screen.display(mime_bundle, {}, display_id=display_id, update=True)
        self._displays.clear()
        self.live.send_final_state()  # a reloaded page does not know which output to replace
        self.view.panel = None


def panel_data(session: Session) -> PanelData:
    """Return the panel model of a session, created on first use."""
    if not isinstance(session.panel_model, PanelData):
        session.panel_model = PanelData(session)
    return session.panel_model


def open_panel(session: Session) -> Panel:
    """Return the panel of a session, created on first use."""
    view = panel_data(session)
    if isinstance(view.panel, Panel):
        if not in_marimo_cell():
            return view.panel
        view.panel.freeze()  # marimo (0.25) has closed its comm if the cell runs again
    _sample_and_plan(view)  # now, because there may be no time between consecutive cells
    return Panel(session)
