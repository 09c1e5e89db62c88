"""Run a notebook in JupyterLab in a real browser and take pictures of what a user sees.

    python -m tests.browser.run_in_lab notebooks/01_first_cell.ipynb build/pictures

Writes one picture of each code cell with its output, and the executed notebook. The exit
status is 1 when a cell without the tag `raises-exception` fails, when the page's console has an
error, or when the page asks for anything that is not on this machine. `NBDIST_PYTHON` names the
kernel's interpreter.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playwright.sync_api import sync_playwright

from tests.browser.jupyter import Notebook, browse, serve

if TYPE_CHECKING:
    from playwright.sync_api import Page

DEADLINE_S = 600
"""For a whole notebook."""


def take_pictures(page: Page, pictures: Path) -> None:
    pictures.mkdir(parents=True, exist_ok=True)
    cells = page.locator(".jp-Notebook .jp-CodeCell")
    for index in range(cells.count()):
        cells.nth(index).scroll_into_view_if_needed()
        cells.nth(index).screenshot(path=str(pictures / f"cell{index:02d}.png"))


def failures(notebook: dict[str, Any]) -> list[str]:
    """Errors of cells that were not meant to fail."""
    return [
        f"{output['ename']}: {output['evalue']}"
        for cell in notebook["cells"]
        if "raises-exception" not in cell["metadata"].get("tags", [])
        for output in cell.get("outputs", [])
        if output["output_type"] == "error"
    ]


def main(path: Path, pictures: Path) -> int:
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        shutil.copytree(path.parent, folder / "work")
        with serve("lab", folder, folder / "work") as url, browse(playwright, folder) as browser:
            browser.set_default_timeout(1000 * DEADLINE_S)
            shown = Notebook(browser.new_page(), url, "lab", folder / "work" / path.name)
            shown.run_all()
            notebook = shown.content()
            take_pictures(shown.page, pictures)
    (pictures / path.name).write_text(json.dumps(notebook, indent=1))
    wrong = failures(notebook) + shown.wrong
    print("\n".join(wrong) or f"{path.name} ran; pictures are in {pictures}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
