"""The output of a cell in a marimo notebook: text on its console, displays in its output area.

Imported in marimo's kernel only. `mo.output` and `mo.Thread` write to a cell only while it runs or
from a thread that it started, so this module uses what they are made of (marimo 0.25).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import marimo
from marimo._messaging.cell_output import CellChannel, CellOutput
from marimo._messaging.notification import CellNotification
from marimo._messaging.notification_utils import CellNotificationUtils, broadcast_notification
from marimo._plugins.ui._impl.anywidget.init import WIDGET_COMM_MANAGER
from marimo._runtime.cell_lifecycle_item import CellLifecycleItem
from marimo._runtime.context import get_context

from nbdist.output.ansi import strip_ansi

if TYPE_CHECKING:
    from nbdist.output.dedup import MimeBundle, StreamName

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class MarimoCell(CellLifecycleItem):  # type: ignore[misc]
    """The cell that runs now on this thread; usable from any thread, also after it has returned.

    Output of an earlier run is dropped when the cell runs again.

    Args:
        uses_streams: write text to sys.stdout and sys.stderr, as `print` in the cell does. Only
            for the thread of the cell, while it runs.
    """

    can_update = has_output_area = True

    def __init__(self, *, uses_streams: bool) -> None:
        context = get_context()
        self._cell_id = context.execution_context.cell_id
        self._outputs = context.execution_context.output
        self._stream = context.stream
        # `marimo run` leaves print() on the server's terminal; --redirect-console-to-browser
        self._uses_streams = uses_streams or context.stdout is None
        self._displays: dict[str, _Display] = {}
        self._is_over = False
        context.cell_lifecycle_registry.add(self)

    @property
    def displays(self) -> Any:
        """All displays of the cell as one; None without any."""
        return self._outputs.stack()

    def create(self, context: object) -> None:
        """Do nothing when the cell starts."""

    def dispose(self, context: object, deletion: bool) -> bool:  # noqa: ARG002, FBT001 - marimo's
        """Stop writing: the cell runs again or was deleted."""
        self._is_over = True
        return True

    def write(self, name: StreamName, text: str) -> None:
        """Write text to the cell's console."""
        if self._uses_streams:
            (sys.stdout if name == "stdout" else sys.stderr).write(text)
        elif not self._is_over:
            output = CellOutput.stdout(text) if name == "stdout" else CellOutput.stderr(text)
            self._notify(output)

    def display(
        self,
        bundle: MimeBundle,
        metadata: MimeBundle,  # noqa: ARG002
        *,
        display_id: str | None = None,
        update: bool = False,
    ) -> None:
        """Show a MIME bundle in the output area, or update the displays with this id."""
        shown = self._displays.get(display_id or "")
        if shown is not None:
            shown.set_bundle(bundle)
        if not update:
            shown = shown or _Display(bundle)
            if display_id is not None:
                self._displays[display_id] = shown
            self._outputs.append(shown)
        self._show_outputs()

    def clear(self, *, wait: bool) -> None:  # noqa: ARG002 - marimo has no later clearing
        """Clear the cell's console and its output area."""
        self._outputs.clear()
        self._notify([])
        self._show_outputs()

    def relay_comm(
        self, msg_type: str, content: MimeBundle, metadata: MimeBundle, buffers: list[Any]
    ) -> None:
        """Drop a comm message of a rank's widget: marimo shows widgets of its own process only."""

    def flush(self) -> None:
        """Send the written text."""
        self._stream.flush_console()

    def _show_outputs(self) -> None:
        """Replace the output area by all displays of the cell."""
        if self._is_over:
            return
        stack = self.displays or marimo.Html("")
        mimetype, data = stack._mime_()
        CellNotificationUtils.broadcast_output(
            channel=CellChannel.OUTPUT,
            mimetype=mimetype,
            data=data,
            cell_id=self._cell_id,
            status=None,
            stream=self._stream,
        )

    def _notify(self, console: Any) -> None:
        broadcast_notification(
            CellNotification(cell_id=self._cell_id, console=console), self._stream
        )


class _Display(marimo.Html):  # type: ignore[misc]
    """One display of a cell, which an update changes in place."""

    def __init__(self, bundle: MimeBundle) -> None:
        self._shown = marimo.Html("")
        super().__init__("")
        self.set_bundle(bundle)

    @property
    def text(self) -> str:
        return str(self._shown.text)

    def set_bundle(self, bundle: MimeBundle) -> None:
        """Replace what is shown."""
        rich, plain = dict(bundle), bundle.get("text/plain")
        if rich.get(_WIDGET_VIEW, {}).get("model_id") not in WIDGET_COMM_MANAGER.comms:
            rich.pop(_WIDGET_VIEW, None)  # a rank's widget
        if len(rich) > 1 or plain is None:
            self._shown = marimo.as_html(_Bundle(rich))
        elif plain:
            self._shown = marimo.plain_text(strip_ansi(plain))
        else:
            self._shown = marimo.Html("")


class _Bundle:
    """An object with the representations of a MIME bundle."""

    def __init__(self, bundle: MimeBundle) -> None:
        self._bundle = bundle

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> MimeBundle:
        del include, exclude
        return self._bundle
