"""The debugger of a rank in a real page: at a prompt, and in JupyterLab's own panel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]'")

from tests.browser.jupyter import RUN

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.browser.jupyter import Notebook

LOOP = """%%distribute -n 2
batches = torch.arange(12.0).reshape(3, 4)
if rank == 1:
    batches[2, 1] = float("nan")
for step, batch in enumerate(batches):
    loss = batch.square().mean()
    if not loss.isfinite():
        breakpoint()
    torch.distributed.all_reduce(loss)
print("all steps ran")"""
LINES = """%%distribute -n 2
found = 20 + rank
doubled = 2 * found
print("doubled is", doubled)"""
PROMPT = ".jp-Stdin-input"
ONE_PROMPT = "() => document.querySelectorAll('.jp-Stdin-input').length === 1"
"""The field of the answered prompt stays until JupyterLab has replaced it."""
SIZE = {"width": 1100, "height": 760}


@pytest.mark.nightly
def test_prompt_of_a_rank(open_notebook: Callable[..., Notebook], pictures: Path) -> None:
    notebook = open_notebook("lab")
    page = notebook.page
    page.set_viewport_size(SIZE)
    page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
    notebook.run("%load_ext nbdist")
    cell = notebook.start(LOOP)
    for command, answer in {
        "p step, batch": "nan, 10.",
        "p batch.isnan().sum()": "tensor(1)",
    }.items():
        page.locator(PROMPT).fill(command)
        page.keyboard.press("Enter")
        page.wait_for_selector(f".jp-OutputArea-output:has-text('{answer}')")
        page.wait_for_function(ONE_PROMPT)
    page.locator(".jp-Notebook .jp-Cell").nth(cell).screenshot(path=str(pictures / "debugger.png"))
    page.locator(PROMPT).fill("c")
    page.keyboard.press("Enter")
    shown = str(notebook.end(cell))
    assert "[rank 1] In[" in shown
    assert "all steps ran" in shown
    assert not notebook.wrong


@pytest.mark.nightly
def test_breakpoint_in_the_margin(open_notebook: Callable[..., Notebook]) -> None:
    notebook = open_notebook("lab")
    page = notebook.page
    notebook.run("%load_ext nbdist")
    notebook.run("%%distribute -n 2\nready = True")
    page.click(".jp-DebuggerBugButton")
    page.wait_for_selector(".jp-DebuggerBugButton[aria-pressed=true]")
    cell = notebook.insert(LINES)
    editor = page.locator(".jp-Notebook .jp-Cell").nth(cell)
    editor.locator(".cm-gutter.cm-breakpoint-gutter > .cm-gutterElement").nth(3).click()
    page.wait_for_selector(".jp-DebuggerBreakpoint")
    page.evaluate(RUN, cell)
    page.wait_for_selector(".jp-DebuggerCallstackFrame")
    page.wait_for_selector(".jp-DebuggerVariables-body:has-text('found')")
    page.evaluate("() => window.jupyterapp.commands.execute('debugger:continue')")
    assert "doubled is" in str(notebook.end(cell))
    assert not notebook.wrong
