"""Ranks in marimo notebooks in chromium: in the editor, and as an app."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]'")
pytest.importorskip("marimo", reason="pip install -e '.[marimo]'")

from playwright.sync_api import expect

from tests.browser.jupyter import DEADLINE_S, wait_for_server
from tests.browser.panel_page import Panel
from tests.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import BrowserContext, Locator, Page

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
FIRST_CELL = ROOT / "notebooks" / "marimo" / "first_cell.py"
BEGIN = """import marimo

app = marimo.App()


@app.cell
def _():
    import nbdist
    session = nbdist.Session(nproc=2).start()
    return (session,)


"""
NOTEBOOK = '''@app.cell
def _(session):
    session.panel()
    return


@app.cell
def _(session):
    session.run("""
    import sys, time
    import matplotlib.pyplot as plt
    from IPython.display import HTML, display
    from tqdm import tqdm

    print("printed by", rank)
    print("an error line", file=sys.stderr)
    shown = display(HTML("<b>first</b>"), display_id=True)
    shown.update(HTML(f"<b>updated by {rank}</b>"))
    plt.plot([1, 2])
    plt.show()
    for _ in tqdm(range(10), desc=f"bar {rank}"):
        time.sleep(0.1)
    """)
    return


@app.cell
def _(session):
    session.run("""
    display(HTML("<b>background begun</b>"))
    for step in range(20):
        time.sleep(0.1)
        report(loss=step)
    print("background over")
    display(HTML("<b>background ended</b>"))
    """, background=True)
    return
'''
BLOCKING = '''@app.cell
def _(session):
    session.run("""
    kept = "kept variable"
    print("blocks")
    while True:
        pass
    """)
    return


@app.cell
def _(session):
    session.wait()
    session.run("print(kept)")
    return
'''


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[object]:
    """Starts marimo on a free port; returns its address and the file with its output."""
    with contextlib.ExitStack() as servers:

        def start(mode: str, notebook: str) -> tuple[str, Path]:
            path = tmp_path / "notebook.py"
            path.write_text(notebook)
            port = free_port()
            command = [sys.executable, "-m", "marimo", "-y", mode, str(path), f"--port={port}"]
            env = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
            log = tmp_path / "server.log"
            output = servers.enter_context(log.open("w"))
            server = subprocess.Popen(
                [*command, "--headless", "--no-token"], env=env, stdout=output, stderr=output
            )
            servers.callback(server.wait)
            servers.callback(server.terminate)
            url = f"http://127.0.0.1:{port}"
            wait_for_server(f"{url}/health", server, log)
            return url, log

        yield start


def run_cell(page: Page, number: int) -> Locator:
    cell = page.locator("[data-cell-id]").nth(number)
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    return cell


def test_output_displays_and_the_panel_in_the_editor(
    serve: object, browser: BrowserContext
) -> None:
    url, _ = serve("edit", BEGIN + NOTEBOOK)
    page = browser.new_page()
    page.goto(url)
    expect(run_cell(page, 0)).to_contain_text("2 CPU ranks", timeout=1000 * DEADLINE_S)
    run_cell(page, 1)
    panel = Panel(page)
    panel.says("ready")

    cell = run_cell(page, 2)
    for text in ("[0] printed by 0", "[1] printed by 1", "[0-1] an error line"):
        expect(cell.locator(".console-output-area")).to_contain_text(text)
    shown = cell.locator(".output-area")
    for text in ("updated by 0", "updated by 1", "bar 0: 100%", "bar 1: 100%"):
        expect(shown).to_contain_text(text)
    expect(shown).not_to_contain_text("first")
    expect(shown.locator("img")).to_have_count(1)  # the ranks' figures are equal

    cell = run_cell(page, 3)
    panel.says(re.compile("running cell"))
    expect(cell.locator(".output-area")).to_contain_text("background ended")
    expect(cell.locator(".output-area")).to_contain_text("background begun")
    expect(cell.locator(".console-output-area")).to_contain_text("[0-1] background over")
    panel.reaches(19)
    run_cell(page, 1)  # closes the widget and shows a new one
    expect(panel.button("Restart")).to_have_count(1)
    panel.says("ready")
    panel.button("Restart").click()
    panel.button("Restart ranks").click()
    expect(panel.root).to_contain_text("No values yet")


def test_the_editors_interrupt_button_stops_the_ranks(
    serve: object, browser: BrowserContext
) -> None:
    url, _ = serve("edit", BEGIN + BLOCKING)
    page = browser.new_page()
    page.goto(url)
    expect(run_cell(page, 0)).to_contain_text("2 CPU ranks", timeout=1000 * DEADLINE_S)
    cell = run_cell(page, 1)
    expect(cell.locator(".console-output-area")).to_contain_text("[0-1] blocks")
    page.get_by_test_id("interrupt-button").click()
    expect(cell).to_contain_text("Interrupted on all ranks; all variables are kept.")
    expect(run_cell(page, 2)).to_contain_text("kept variable")


def test_an_app_shows_displays_and_the_panel(serve: object, browser: BrowserContext) -> None:
    url, log = serve("run", BEGIN + NOTEBOOK)
    page = browser.new_page()
    page.goto(url)
    expect(page.get_by_text("updated by 1")).to_be_visible(timeout=1000 * DEADLINE_S)
    expect(page.get_by_text("bar 1: 100%").first).to_be_visible()
    expect(page.get_by_text("background ended")).to_be_visible()
    panel = Panel(page)
    panel.says("ready")
    panel.reaches(19)
    assert "[1] printed by 1" in log.read_text()  # as print() of the notebook itself
    panel.button("Restart").click()
    panel.button("Restart ranks").click()
    expect(panel.root).to_contain_text("No values yet")


def test_the_first_notebook_runs_as_an_app(serve: object, browser: BrowserContext) -> None:
    url, _ = serve("run", FIRST_CELL.read_text())
    page = browser.new_page()
    page.goto(url)
    expect(page.get_by_text(re.compile("The last losses: rank 0: 0"))).to_be_visible(
        timeout=1000 * DEADLINE_S
    )
    Panel(page).reaches(59)


def test_the_first_notebook_runs_as_a_script() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, FIRST_CELL], env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "this is rank 1 of 2" in ran.stdout
