"""The live panel: predicted and actual memory, curves, ranks, and buttons that run commands.

Runs in the notebook's kernel, without torch. One picture of the session (`picture`) has three
faces: a live widget (`widget`, with its front end in widgets/), HTML without script (`html`) and
text (`text`). anywidget is imported when a widget is first displayed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from nbdist.errors import OptionError
from nbdist.output.sink import FACES, kernel_here, shell_here
from nbdist.panel import assets
from nbdist.panel.controller import Live, View
from nbdist.panel.curves import Series
from nbdist.session import progress

if TYPE_CHECKING:
    from nbdist.panel.curves import Points
    from nbdist.panel.protocol import Picture
    from nbdist.panel.widget import PanelWidget
    from nbdist.session.session import Session

_KAGGLE = "KAGGLE"
"""Begins the names of variables that Kaggle sets. Its server has no anywidget, so that a widget
would be an error there (Kaggle/docker-python#1487)."""


def show(session: Session, face: str = "auto") -> None:
    """Display the panel of a session under the cell that runs.

    A session has one panel; displayed again, the same one is seen in two places.

    Args:
        session: to be shown.
        face: one of FACES; auto takes the best that is possible here.

    Raises:
        OptionError: no such face, or one that is not possible here.
    """
    chosen = face_for(face)
    if chosen == "widget" and session.state != "stopped":  # of which no news will come
        _open(session).show()
        return
    words = bundle(session, look=True)
    if chosen == "text" or shell_here() is None:
        print(words["text/plain"])  # noqa: T201 - what was asked for
        return
    from IPython.display import display

    display(words, raw=True)


def face_for(face: str) -> str:
    """The face to show here: widget, html or text.

    Raises:
        OptionError: no such face, or one that is not possible here.
    """
    if face not in FACES:
        message = f"the panel has no face {face!r}; use one of {', '.join(FACES)}."
        raise OptionError(message)
    if face == "widget" and (why := _why_no_widget()):
        raise OptionError(f"the live panel is not possible here: {why}; use --face html.")
    if face != "auto":
        return face
    if kernel_here() is None:
        return "text"
    on_kaggle = any(name.startswith(_KAGGLE) for name in os.environ)
    return "html" if on_kaggle or _why_no_widget() else "widget"


def bundle(session: Session, *, look: bool = False) -> dict[str, str]:
    """The session as HTML without script, and as text.

    Args:
        session: to be shown.
        look: sample the devices and plan the prepared model first, where no cell runs.
    """
    view = _view(session)
    if look and view.panel is None:
        _look(view)
    return faces(view.draw(), history(session))


def faces(drawn: Picture, curves: dict[str, Points]) -> dict[str, str]:
    """A picture as HTML and as text."""
    from nbdist.display import panel_html, panel_text

    return {
        "text/html": panel_html.page(drawn, curves),
        "text/plain": panel_text.page(drawn, curves),
    }


def history(session: Session) -> dict[str, Points]:
    """The curves so far."""
    series = Series()
    series.follow(session.metrics)
    series.unfollow()
    return series.history()


def _look(view: View) -> None:
    """Sample and plan once, for what is seen first."""
    session = view.session
    if session.state in {"ready", "running"}:
        view.devices.look()
    if session.running is None and session.turn.acquire(blocking=False):
        try:
            with progress.without_lines():
                view.replan(at_once=True)
        finally:
            session.turn.release()


def _why_no_widget() -> str:
    """What is missing for a widget; empty where nothing is."""
    if kernel_here() is None:
        return "there is no notebook"
    if not assets.present():
        return f"{assets.SCRIPT.name} was not built when nbdist was installed"
    return ""


class Panel:
    """The live panel of one session, and where it is displayed."""

    def __init__(self, session: Session) -> None:
        """Make the widget and begin to look."""
        from nbdist.panel.widget import PanelWidget

        self._session = session
        self.view = _view(session)
        self._handles: list[Any] = []
        self._widget: PanelWidget = PanelWidget(self._receive, lambda: bundle(session))
        self.live = Live(self.view, self._widget.say)
        self.view.panel = self  # now that nothing can fail any more
        session.at_stop(self.freeze)

    def show(self) -> None:
        """Display it under the cell that runs."""
        from IPython.display import display

        self._handles.append(display(self._widget, display_id=True))

    def freeze(self) -> None:
        """Put what was seen last in the place of the widget, for good."""
        if self.view.panel is not self:  # it is frozen already
            return
        self.live.close()
        words = faces(self.view.draw(), self.live.history())
        for handle in self._handles:
            handle.update(words, raw=True)
        self._handles.clear()
        self.live.say_last()  # a page that was reloaded no longer knows which output to replace
        self.view.panel = None

    def _receive(self, message: object, buffers: object) -> None:
        self.live.receive(message, buffers)


def _view(session: Session) -> View:
    """What is known of a session; it lives as long."""
    if not isinstance(session.kept_for_panel, View):
        session.kept_for_panel = View(session)
    return session.kept_for_panel


def _open(session: Session) -> Panel:
    """The panel of a session, made where there is none."""
    view = _view(session)
    if isinstance(view.panel, Panel):
        return view.panel
    _look(view)  # between cells that follow each other there is no time for it
    return Panel(session)
