"""The widget's model; the only module that imports anywidget, when a panel is first displayed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import anywidget
from traitlets import Unicode

from nbdist.panel import assets

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.panel.protocol import ToFront

log = logging.getLogger(__name__)

ANY_VERSION = "*"
"""Of anywidget's front end. Its own pin is the kernel's minor version, and a server that has
another one would show nothing; the messages between the two are the same (0.9.18 to 0.11)."""


class PanelWidget(anywidget.AnyWidget):
    """Passes messages between a panel and its pages; has no state of its own.

    Args:
        receive: gets each message of a page, with its buffers, on whichever thread it comes.
        words: what is displayed where no widget can be.
    """

    _esm = assets.SCRIPT
    _css = assets.STYLE
    _model_module_version = Unicode(ANY_VERSION).tag(sync=True)
    _view_module_version = Unicode(ANY_VERSION).tag(sync=True)

    def __init__(
        self, receive: Callable[[object, object], object], words: Callable[[], dict[str, str]]
    ) -> None:
        super().__init__()
        self._words = words
        self.on_msg(lambda _, content, buffers: receive(content, buffers))
        if hasattr(self.comm, "_reply_subshell_for"):
            # ipykernel 7.4 sends a page's messages to the shell that wrote to the comm last:
            # the one in which a cell blocks. JupyterLab's subshell can take them meanwhile.
            self.comm._reply_subshell_for = _where_it_came  # noqa: SLF001

    def say(self, message: ToFront, buffers: list[bytes]) -> None:
        """Send a message to all pages."""
        self.send(message, buffers)

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Let no page change the model: another `_esm` would end the views of all pages."""
        del sync_data
        log.info("a page wanted to change the panel's model; refused")

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The view, and what is shown instead of it where there are no widgets."""
        made = super()._repr_mimebundle_(**options)
        if made is None:
            return None
        bundle, metadata = made
        return {**bundle, **self._words()}, metadata


def _where_it_came(_data: object, default: object) -> object:
    """Take a message on the shell that it was sent to."""
    return default
