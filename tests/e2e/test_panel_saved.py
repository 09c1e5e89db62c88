"""What a notebook that was executed without a page holds of the panel: nbclient, nbconvert."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

from nbdist.panel import protocol

if TYPE_CHECKING:
    from pathlib import Path

SHOW = """import nbdist
session = nbdist.Session(nproc=2, backend="ddp")
session.panel()"""
BUSY = """import itertools, time
end = time.monotonic() + 2
for step in itertools.takewhile(lambda _: time.monotonic() < end, itertools.count()):
    session.metrics.add_rows(0, [{"step": step, "time": time.time(), "loss": 1.0}])
    time.sleep(0.001)"""
STOP = "session.stop()"
WIDGET = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"

pytestmark = [
    pytest.mark.fault("G3"),
    pytest.mark.skipif(not protocol.has_built_assets(), reason="the front end is not built"),
]


def executed(folder: Path, *cells: str, **options: Any) -> nbformat.NotebookNode:
    """A notebook of these cells, executed as nbclient does."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(one) for one in cells])
    resources = {"metadata": {"path": str(folder)}}
    return NotebookClient(notebook, timeout=120, resources=resources, **options).execute()


def test_without_widget_state_a_notebook_holds_a_page_to_read(tmp_path: Path) -> None:
    found = executed(tmp_path, SHOW, BUSY, store_widget_state=False)
    assert "widgets" not in found.metadata
    data = found.cells[0].outputs[0].data
    assert "2 CPU ranks" in data["text/html"]
    assert "2 CPU ranks" in data["text/plain"]
    page, _ = HTMLExporter().from_notebook_node(found)
    assert "2 CPU ranks" in page


def test_widget_state_that_nbclient_saves_is_the_front_end_and_nothing_more(
    tmp_path: Path,
) -> None:
    found = executed(tmp_path, SHOW, BUSY)
    states = found.metadata.widgets[STATE]["state"].values()
    assert sorted(one["model_name"] for one in states) == ["AnyModel", "LayoutModel"]
    front_end = protocol.SCRIPT.stat().st_size + protocol.STYLE.stat().st_size
    assert len(json.dumps(found.metadata.widgets)) < 1.2 * front_end + 2000
    assert "2 CPU ranks" in found.cells[0].outputs[0].data["text/html"]


@pytest.mark.nightly
def test_a_notebook_that_ends_with_stop_is_read_without_the_state(tmp_path: Path) -> None:
    found = executed(tmp_path, SHOW, BUSY, STOP)
    (output,) = found.cells[0].outputs
    assert WIDGET not in output.data
    assert "stopped" in output.data["text/html"]
    assert "stopped" in output.data["text/plain"]
    page, _ = HTMLExporter().from_notebook_node(found)
    assert "stopped" in page
