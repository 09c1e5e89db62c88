"""`ipywidgets.Output` on a rank: its context puts what is printed and displayed into the widget.

In the notebook's own process, the page moves output whose parent is the running cell into the
widget. Of a rank it would find none, and the `clear_output` of `interact` would remove its slider.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Any, cast

from IPython.core.getipython import get_ipython

from nbdist.worker.library_patches import patch, when_imported
from nbdist.worker.output_streams import KEPT_CHARS

if TYPE_CHECKING:
    from types import TracebackType

MODULE = "ipywidgets.widgets.widget_output"


def install() -> None:
    """Patch the context of `Output`, now or when a cell imports ipywidgets."""
    when_imported(MODULE, _patch_context)


def _patch_context() -> None:
    patch(f"{MODULE}:Output.__enter__", lambda _: lambda widget: _collector(widget).enter())
    patch(
        f"{MODULE}:Output.__exit__",
        lambda _: lambda widget, *error: _collector(widget).leave(*error),
    )


def _collector(widget: Any) -> _Collector:
    found: _Collector = vars(widget).setdefault("_nbdist_collector", _Collector(widget))
    return found


class _Collector:
    """Collects the output of the main thread for one widget."""

    def __init__(self, widget: Any) -> None:
        self._widget, self._shell = widget, cast("Any", get_ipython())
        self._outer_streams: list[tuple[Any, Any]] = []
        self._clears_next = False

    def enter(self) -> None:
        self._outer_streams.append((sys.stdout, sys.stderr))
        sys.stdout, sys.stderr = _Stream(self, "stdout"), _Stream(self, "stderr")
        self._shell.display_pub.register_hook(self._on_display)

    def leave(
        self, kind: type[BaseException], error: BaseException | None, frames: TracebackType | None
    ) -> bool:
        """Leave the context. As with ipywidgets the widget shows an error; Stop is passed on."""
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = self._outer_streams.pop()
        self._shell.display_pub.unregister_hook(self._on_display)
        if not isinstance(error, Exception):
            return False
        lines = self._shell.InteractiveTB.structured_traceback(kind, error, frames)
        shown = {"ename": kind.__name__, "evalue": str(error), "traceback": lines}
        self.add({"output_type": "error", **shown})
        return True

    def _on_display(self, message: dict[str, Any]) -> dict[str, Any] | None:
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "update_display_data":
            return message
        if kind == "display_data":
            shown = {"data": content["data"], "metadata": content["metadata"]}
            self.add({"output_type": "display_data", **shown})
        elif content["wait"]:
            self._clears_next = True
        else:
            self._widget.outputs = ()
        return None

    def add(self, output: dict[str, Any]) -> None:
        outputs = [] if self._clears_next else list(self._widget.outputs)
        self._clears_next = False
        name = output.get("name")
        if name and outputs and outputs[-1].get("name") == name:
            output["text"] = (outputs.pop()["text"] + output["text"])[-KEPT_CHARS:]
        self._widget.outputs = (*outputs, output)


class _Stream(io.StringIO):
    """Collects whole lines: each change of the widget sends all of its output."""

    def __init__(self, collector: _Collector, name: str) -> None:
        super().__init__()
        self._collector, self._name = collector, name

    def write(self, text: str) -> int:
        count = super().write(text)
        if text.endswith("\n"):
            self.flush()
        return count

    def flush(self) -> None:
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        if text:
            self._collector.add({"output_type": "stream", "name": self._name, "text": text})
