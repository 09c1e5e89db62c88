"""JupyterLab and Notebook 7 in a real browser, for tests and for pictures.

Everything that a server, its kernels and the browser write goes below one folder. Nothing here
waits for a time: only for what the page shows, or for what the server answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import BrowserContext, ConsoleMessage, Page, Playwright, Request

DEADLINE_S = 120
"""For what ranks do: they start in a few seconds, on a busy machine in many more."""
SHOWN_S = 30
"""For what the page shows of something that has happened."""
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
SERVER = ["--ip=127.0.0.1", "--no-browser", "--allow-root"]
SERVER += ["--ServerApp.token=", "--ServerApp.password=", "--ServerApp.port_retries=0"]
EXPOSE = {"lab": "LabApp", "notebook": "JupyterNotebookApp"}
NBMODEL = "jupyter-server-nbmodel"
ADDRESS = {"lab": "lab/tree", "notebook": "notebooks"}

OF_NOTEBOOK = "Cannot read properties of undefined (reading 'schema')"
"""What Notebook 7.6 itself throws when it reads its settings, of any notebook."""

READY = """() => {
    const w = window.jupyterapp?.shell.currentWidget;
    return w?.context?.isReady && w.sessionContext.isReady && w.sessionContext.session?.kernel;
}"""
RUN_ALL = """() => {
    window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => window.ran = 1);
}"""
INSERT = """code => {
    const { content } = window.jupyterapp.shell.currentWidget;
    const cells = content.model.sharedModel;
    const last = cells.cells.length;
    cells.insertCell(last, { cell_type: 'code', source: code });
    content.activeCellIndex = last;
    content.deselectAll();
    return last;
}"""
RUN = """cell => {
    const ended = (window.ended ??= {});
    window.jupyterapp.commands.execute('notebook:run-cell').then(() => (ended[cell] = 1));
}"""
CONTENT = "() => window.jupyterapp.shell.currentWidget.content.model.toJSON()"
RESTART = "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
SUBSHELLS = """how => {
    const { kernel } = window.jupyterapp.shell.currentWidget.sessionContext.session;
    kernel.commsOverSubshells = how;
}"""


def environment(folder: Path, *, server_side: bool = False) -> dict[str, str]:
    """Everything that Jupyter writes goes below `folder`; one kernel, without news pop-ups.

    With `server_side`, the server runs the cells (jupyter-server-nbmodel), else the page does.
    """
    names = ["HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"]
    names += ["JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR"]
    env = {**os.environ, **{name: str(folder / name.lower()) for name in names}}
    env["JUPYTER_PREFER_ENV_PATH"] = "0"  # our kernel, not the server's own
    spec = Path(env["JUPYTER_DATA_DIR"]) / "kernels" / "python3"
    spec.mkdir(parents=True)
    python = os.environ.get("NBDIST_PYTHON", sys.executable)
    argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel = {"argv": argv, "display_name": "Python 3", "language": "python"}
    kernel["metadata"] = {"debugger": True}
    (spec / "kernel.json").write_text(json.dumps(kernel))
    settings = Path(env["JUPYTERLAB_SETTINGS_DIR"]) / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(
        json.dumps({"fetchNews": "false", "checkForUpdates": False})
    )
    config = Path(env["JUPYTER_CONFIG_DIR"])
    (config / "labconfig").mkdir(parents=True)
    (config / "labconfig" / "page_config.json").write_text(
        json.dumps({"disabledExtensions": {f"@datalayer/{NBMODEL}": not server_side}})
    )
    served = {"jpserver_extensions": {NBMODEL.replace("-", "_"): server_side}}
    (config / "jupyter_server_config.json").write_text(json.dumps({"ServerApp": served}))
    return env


@contextlib.contextmanager
def serve(kind: str, folder: Path, root: Path, *, server_side: bool = False) -> Iterator[str]:
    """A server on a free loopback port; yields its address.

    Args:
        kind: lab or notebook.
        folder: where it writes what is its own.
        root: where the notebooks are.
        server_side: the server runs the cells, not the page.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "jupyter", kind, f"--port={port}", *SERVER]
    command += [f"--{EXPOSE[kind]}.expose_app_in_browser=True", f"--ServerApp.root_dir={root}"]
    log = folder / "server.log"
    with log.open("w") as log:
        env = environment(folder, server_side=server_side)
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        try:
            wait_for_server(f"{url}/api/status", server, log)
            yield url
        finally:
            server.terminate()
            server.wait()


def wait_for_server(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the URL answers; what the server logged is in the error."""
    deadline = time.monotonic() + DEADLINE_S
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url):  # noqa: S310
            return
        time.sleep(0.1)
    tail = "\n".join(log.read_text().splitlines()[-20:])
    message = f"the server did not start; it said:\n{tail}"
    raise RuntimeError(message)


@contextlib.contextmanager
def browse(playwright: Playwright, folder: Path, *, scale: int = 2) -> Iterator[BrowserContext]:
    """Debian's chromium without a window, and with nothing of an earlier run."""
    context = playwright.chromium.launch_persistent_context(
        folder / "chrome",
        executable_path=shutil.which("chromium"),
        headless=True,
        viewport={"width": 1400, "height": 1400},
        device_scale_factor=scale,
        args=FLAGS,
    )
    context.set_default_timeout(1000 * DEADLINE_S)
    try:
        yield context
    finally:
        context.close()


class Notebook:
    """A notebook in a page, as its reader sees it.

    Args:
        page: of a browser.
        url: of the server.
        kind: lab or notebook.
        path: of the file; the server's root is its folder.
    """

    def __init__(self, page: Page, url: str, kind: str, path: Path) -> None:
        """Open it, and wait until its kernel is there."""
        self.page, self.url, self.kind, self.path = page, url, kind, path
        self.wrong: list[str] = []
        """Errors in the page's console, and what it asked of other machines."""
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self._fell(str(error)))
        page.on("request", self._asked)
        self.open(path.name)

    def open(self, name: str) -> None:
        self.page.goto(f"{self.url}/{ADDRESS[self.kind]}/{name}")
        self.page.wait_for_function(READY)

    def reload(self) -> None:
        self.page.reload()
        self.page.wait_for_function(READY)

    def insert(self, code: str) -> int:
        """Add a cell, active and not run; returns its place."""
        return int(self.page.evaluate(INSERT, code))

    def start(self, code: str) -> int:
        """Add a cell and run it; returns its place."""
        cell = self.insert(code)
        self.page.evaluate(RUN, cell)
        return cell

    def end(self, cell: int) -> list[dict[str, Any]]:
        self.page.wait_for_function("cell => window.ended[cell]", arg=cell)
        outputs: list[dict[str, Any]] = self.content()["cells"][cell]["outputs"]
        return outputs

    def run(self, code: str) -> list[dict[str, Any]]:
        """Run a new cell to its end; it must not fail."""
        outputs = self.end(self.start(code))
        failed = [one for one in outputs if one["output_type"] == "error"]
        assert not failed, failed
        return outputs

    def run_all(self) -> None:
        """Run what is there, to the end."""
        self.page.evaluate(RUN_ALL)
        self.page.wait_for_function("() => window.ran")

    def content(self) -> dict[str, Any]:
        found: dict[str, Any] = self.page.evaluate(CONTENT)
        return found

    def save(self) -> None:
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")

    def theme(self, name: str) -> None:
        """Switch to "JupyterLab Dark" or "JupyterLab Light"."""
        change = "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })"
        self.page.evaluate(change, name)
        light = "false" if "Dark" in name else "true"
        self.page.wait_for_selector(f"body[data-jp-theme-light={light}]", state="attached")
        splash = "#jupyterlab-splash"  # fades above the page when the theme changes
        self.page.wait_for_selector(splash, state="detached")

    def comms_while_busy(self, *, served: bool) -> None:
        """Let the page's messages overtake a cell, or not, as older front ends."""
        self.page.evaluate(SUBSHELLS, "perCommTarget" if served else "disabled")

    def restart_kernel(self) -> None:
        """As the menu does, without its question."""
        self.page.evaluate(RESTART)

    def _fell(self, error: str) -> None:
        if error != OF_NOTEBOOK:
            self.wrong.append(f"error in the page: {error}")

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.wrong.append(f"console: {message.text} ({message.location.get('url', '')})")

    def _asked(self, request: Request) -> None:
        own = (self.url, self.url.replace("http", "ws", 1), "data:", "blob:")
        if not request.url.startswith(own):
            self.wrong.append(f"asked for {request.url}")
