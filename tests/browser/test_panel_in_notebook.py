"""The panel in Notebook 7 in chromium: what is another front end's; and its end as a page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]'")

from playwright.sync_api import expect

from tests.browser.panel_page import SETUP, Panel, train

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.browser.jupyter import Notebook

WIDGET = "application/vnd.jupyter.widget-view+json"


pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("nothing_wrong")]


@pytest.fixture(scope="module")
def notebook(open_notebook: Callable[[str], Notebook]) -> Notebook:
    opened = open_notebook("notebook")
    opened.run("%load_ext nbdist")
    opened.run(SETUP)
    opened.run("%nbdist panel")
    return opened


def test_curves_and_ranks(notebook: Notebook, panel: Panel) -> None:
    panel.says("ready")
    notebook.run(train(10))
    panel.reaches(9)
    expect(panel.ranks()).to_have_count(2)


def test_restart_asks_and_starts_new_ranks(panel: Panel) -> None:
    old = panel.ranks().first.locator(".nbd-figures").inner_text()
    panel.button("Restart").click()
    panel.button("Restart ranks").click()
    # "starting" may be over before anybody looks: new ranks are there within a fraction of a second
    expect(panel.ranks().first.locator(".nbd-figures")).not_to_have_text(old)
    panel.says("ready")
    expect(panel.root).to_contain_text("No values yet")
    expect(panel.ranks()).to_have_count(2)


@pytest.mark.fault("G3")
def test_the_end_of_the_session_leaves_a_page_to_read(notebook: Notebook, panel: Panel) -> None:
    notebook.run("%nbdist stop")
    expect(panel.root).to_have_count(0)
    notebook.save()
    saved = json.loads(notebook.path.read_text())
    (cell,) = (one for one in saved["cells"] if "".join(one["source"]) == "%nbdist panel")
    (output,) = cell["outputs"]
    assert WIDGET not in output["data"]
    assert "stopped" in "".join(output["data"]["text/html"])
    assert "widgets" not in saved["metadata"]
