"""What the browser tests need: chromium, a server, a notebook; else they are skipped, with why."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.jupyter import Notebook, browse, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import BrowserContext

    from tests.browser.panel_page import Panel

INSTALL = "apt-get -qq -o DPkg::Lock::Timeout=300 update"
INSTALL += " && apt-get -qq -y -o DPkg::Lock::Timeout=300 install --no-install-recommends chromium"
NAME = "panel.ipynb"
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
EMPTY = {"cells": [], "metadata": {"kernelspec": KERNEL}, "nbformat": 4, "nbformat_minor": 5}


@pytest.fixture(scope="module")
def chromium() -> None:
    """Debian's browser; installed where it is missing and that is possible."""
    if shutil.which("chromium"):
        return
    if not shutil.which("apt-get") or os.geteuid() != 0:
        pytest.skip("there is no chromium, and only root can install it, with apt-get")
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        ["/bin/sh", "-c", INSTALL], env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode or not shutil.which("chromium"):
        lines = done.stderr.strip().splitlines()
        pytest.skip(f"there is no chromium, and apt-get: {lines[-1] if lines else 'failed'}")


@pytest.fixture(scope="module")
def browser(chromium: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserContext]:
    """A browser, and nothing of it left behind."""
    del chromium
    api = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]'")
    with (
        api.sync_playwright() as playwright,
        browse(playwright, tmp_path_factory.mktemp("browser")) as context,
    ):
        yield context


@pytest.fixture(scope="module")
def open_notebook(
    browser: BrowserContext, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Notebook]]:
    """Starts a server, lab or notebook, and opens an empty notebook in it."""
    with contextlib.ExitStack() as servers:

        def opened(kind: str, *, server_side: bool = False) -> Notebook:
            if importlib.util.find_spec({"lab": "jupyterlab"}.get(kind, kind)) is None:
                pytest.skip("there is no Jupyter here to look at: pip install -e '.[browser]'")
            folder = tmp_path_factory.mktemp(kind)
            root = folder / "work"
            root.mkdir()
            (root / NAME).write_text(json.dumps(EMPTY))
            url = servers.enter_context(serve(kind, folder, root, server_side=server_side))
            return Notebook(browser.new_page(), url, kind, root / NAME)

        yield opened


@pytest.fixture(scope="module")
def panel(notebook: Notebook) -> Panel:
    """The panel of a module's notebook."""
    # imported here: without playwright these tests are skipped
    from tests.browser.panel_page import Panel

    return Panel(notebook.page)


@pytest.fixture
def nothing_wrong(notebook: Notebook) -> Iterator[None]:
    """No test leaves an error in the console, or asks anything of another machine."""
    yield
    assert notebook.wrong == []


@pytest.fixture(scope="session")
def pictures() -> Path:
    """Where pictures go; `make pictures` takes those of the documentation."""
    folder = Path(os.environ.get("NBDIST_PICTURES", "build/pictures"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
