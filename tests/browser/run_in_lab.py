"""Run a notebook in JupyterLab in a real browser and take pictures of what a user sees.

    pip install jupyterlab playwright; apt install chromium
    python tests/browser/run_in_lab.py notebooks/01_first_cell.ipynb build/pictures

Writes one picture of each code cell with its output, and the executed notebook. The exit
status is 1 when a cell without the tag `raises-exception` fails, or when the page asks for
anything that is not on this machine. `NBDIST_PYTHON` names the kernel's interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

DEADLINE_S = 600
CHROMIUM = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
CHROMIUM += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
LAB = ["--no-browser", "--allow-root", "--ServerApp.token=", "--ServerApp.password="]
LAB += ["--ServerApp.port_retries=0", "--LabApp.expose_app_in_browser=True"]
READY = """() => {
    const w = window.jupyterapp?.shell.currentWidget;
    return w?.context?.isReady && w.sessionContext.isReady && w.sessionContext.session?.kernel;
}"""
RUN = """() => {
    window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => window.ran = 1);
}"""
CONTENT = "() => window.jupyterapp.shell.currentWidget.content.model.toJSON()"


def environment(folder: Path) -> dict[str, str]:
    """Everything that Jupyter writes goes below `folder`; one kernel, without news pop-ups."""
    names = ["HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"]
    names += ["JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR"]
    env = {**os.environ, **{name: str(folder / name.lower()) for name in names}}
    env["JUPYTER_PREFER_ENV_PATH"] = "0"  # our kernel, not the server's own
    env["NBDIST_CACHE_DIR"] = str(Path.home() / ".cache" / "nbdist")
    spec = Path(env["JUPYTER_DATA_DIR"]) / "kernels" / "python3"
    spec.mkdir(parents=True)
    python = os.environ.get("NBDIST_PYTHON", sys.executable)
    argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(
        json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"})
    )
    settings = Path(env["JUPYTERLAB_SETTINGS_DIR"]) / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(
        json.dumps({"fetchNews": "false", "checkForUpdates": False})
    )
    return env


@contextlib.contextmanager
def lab(folder: Path, root: Path) -> Iterator[str]:
    """A JupyterLab server on a free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "jupyter", "lab", "--ip=127.0.0.1", f"--port={port}", *LAB]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [*command, f"--ServerApp.root_dir={root}"],
            env=environment(folder),
            stdout=log,
            stderr=log,
        )
        try:
            wait_for(url, server)
            yield url
        finally:
            server.terminate()
            server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Poll the server until it answers."""
    for _ in range(600):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/api/status"):  # noqa: S310
            return
        if server.poll() is not None:
            break
        time.sleep(0.1)
    msg = "JupyterLab did not start"
    raise RuntimeError(msg)


def run(page: Page, url: str, name: str) -> dict[str, Any]:
    """Open a notebook, run all cells, and return it with its outputs."""
    page.goto(f"{url}/lab/tree/{name}")
    page.wait_for_function(READY, timeout=60_000)
    page.evaluate(RUN)
    page.wait_for_function("() => window.ran", timeout=DEADLINE_S * 1000)
    notebook: dict[str, Any] = page.evaluate(CONTENT)
    return notebook


def take_pictures(page: Page, pictures: Path) -> None:
    """One picture of each code cell."""
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
    """Run `path` in a copy of its folder."""
    strangers: list[str] = []
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        shutil.copytree(path.parent, folder / "work")
        with lab(folder, folder / "work") as url:
            browser = playwright.chromium.launch_persistent_context(
                folder / "chrome",
                executable_path=shutil.which("chromium"),
                headless=True,
                viewport={"width": 1200, "height": 1400},
                args=CHROMIUM,
            )
            page = browser.new_page()
            page.on(
                "request",
                lambda request: (
                    url not in request.url
                    and not request.url.startswith(("data:", "blob:", url.replace("http", "ws")))
                    and strangers.append(request.url)
                ),
            )
            notebook = run(page, url, path.name)
            take_pictures(page, pictures)
            browser.close()
    (pictures / path.name).write_text(json.dumps(notebook, indent=1))
    wrong = failures(notebook) + [f"asked for {url}" for url in strangers]
    print("\n".join(wrong) or f"{path.name} ran; pictures are in {pictures}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
