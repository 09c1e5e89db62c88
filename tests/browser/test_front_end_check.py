"""`%nbdist doctor --front-end` in JupyterLab: the page confirms what the kernel cannot know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]'")

from playwright.sync_api import expect

import tests.browser.panel_page  # noqa: F401 - sets the timeout of expect

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.browser.jupyter import Notebook

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("served", [True, False])
def test_the_report_says_what_the_page_has_confirmed(
    open_notebook: Callable[[str], Notebook], *, served: bool
) -> None:
    notebook = open_notebook("lab")
    notebook.run("%load_ext nbdist")
    notebook.comms_while_busy(served=served)
    cell = notebook.start("%nbdist doctor --front-end")
    notebook.page.locator(".jp-Stdin-input").fill("y")
    notebook.page.keyboard.press("Enter")
    notebook.page.get_by_text("Interrupt this cell now").wait_for()
    notebook.page.evaluate("() => window.jupyterapp.commands.execute('notebook:interrupt-kernel')")
    notebook.end(cell)
    report = notebook.page.locator(".jp-OutputArea-output table").last
    for text in ("shown, and their messages", "updated in place", "input() works"):
        expect(report).to_contain_text(text)
    expect(report).to_contain_text("KeyboardInterrupt reached the kernel")
    expect(report).to_contain_text(
        "arrive while a cell blocks" if served else "arrive only after a cell has ended"
    )
