"""The widget's model. Imports anywidget, and is imported when a panel is first displayed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import anywidget
from traitlets import Unicode

from nbdist.panel import protocol

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

ANY_FRONTEND_VERSION = "*"
"""Accepts any version of anywidget's front end. By default it is pinned to the kernel's minor
version, and a server with another one would show nothing. The messages are the same in 0.9.18 to
0.11."""


class PanelWidget(anywidget.AnyWidget):
    """Transports messages between a panel and its pages; stateless.

    Args:
        receive: called with each message of a page and its buffers, on any thread.
        words: returns the MIME bundle for front ends without widgets.
    """

    _esm: Any = protocol.SCRIPT
    _css: Any = protocol.STYLE
    _model_module_version = Unicode(ANY_FRONTEND_VERSION).tag(sync=True)
    _view_module_version = Unicode(ANY_FRONTEND_VERSION).tag(sync=True)
    # ipywidgets 7 defines it, which would bypass the MIME bundle below and the display id
    _ipython_display_ = None

    def __init__(
        self, receive: Callable[[object, object], object], words: Callable[[], dict[str, str]]
    ) -> None:
        super().__init__()
        self._fallback_bundle = words
        self.on_msg(lambda _, content, buffers: receive(content, buffers))
        if hasattr(self.comm, "_reply_subshell_for"):
            # ipykernel 7.4 dispatches a page's messages to the shell that last wrote to the comm:
            # the one that a cell blocks. JupyterLab's subshell can handle them in the meantime.
            self.comm._reply_subshell_for = lambda _data, default: default  # noqa: SLF001

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Ignore changes by a page: another `_esm` would break the views of all pages."""
        del sync_data
        log.info("rejected a page's change of the panel's model")

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Return the view, and the MIME bundle for front ends without widgets."""
        result = super()._repr_mimebundle_(**options)
        if result is None:
            return None
        bundle, metadata = result
        return {**bundle, **self._fallback_bundle()}, metadata
