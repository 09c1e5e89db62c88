"""Check what users install: `make release-check` and `make binder-check` run this.

    python .ci/release_check.py release    # docs/releasing.md, up to the upload
    python .ci/release_check.py binder     # the steps of binder/, in a new environment

Both end with notebooks/01_first_cell.ipynb, run in a copy outside the repository, so that nothing
but the new environment can provide nbdist. Everything is below build/release or build/binder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ["build>=1.2", "twine>=6"]
NOTEBOOK_TOOLS = ["nbclient", "nbformat", "matplotlib"]
"""What runs a notebook, and what notebook 01 plots with."""
IN_WHEEL = ["nbdist/panel/static/panel.js", "nbdist/panel/static/panel.css", "nbdist/py.typed"]


def run(*command: str | Path, folder: Path = ROOT, path: Path | None = None) -> None:
    """Run one step and show it; `path` comes first in PATH, and PYTHONPATH does not count."""
    print("==>", *(str(part).replace(f"{ROOT}/", "") for part in command), flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    subprocess.run(command, cwd=folder, env=environment, check=True)


def new_environment(folder: Path, *packages: str | Path) -> Path:
    """Create a virtual environment with the tested versions of `packages`; return its bin/."""
    run(sys.executable, "-m", "venv", "--clear", folder)
    if packages:
        pip_install(folder / "bin", "--constraint", ROOT / "constraints.txt", *packages)
    return folder / "bin"


def pip_install(programs: Path, *arguments: str | Path) -> None:
    """Install with the pip of an environment."""
    quiet = ["--quiet", "--disable-pip-version-check"]
    run(programs / "python", "-m", "pip", "install", *quiet, *arguments)


def run_first_notebook(programs: Path, folder: Path) -> None:
    """Run notebook 01 as a user does: from a folder that has nothing but the notebook."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in ("run.py", "01_first_cell.ipynb"):
        shutil.copy(ROOT / "notebooks" / name, folder)
    run(programs / "python", "run.py", "01_first_cell.ipynb", folder=folder, path=programs)


def check_wheel(wheel: Path) -> None:
    """Check that the wheel has what no source file shows: the panel's bundle and the types."""
    with zipfile.ZipFile(wheel) as archive:
        missing = set(IN_WHEEL) - set(archive.namelist())
    if missing:
        sys.exit(f"{wheel.name} lacks {', '.join(sorted(missing))}")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, with the panel's bundle")


def release(build: Path) -> None:
    """Build sdist and wheel, check both, and run notebook 01 with the installed wheel."""
    tools = new_environment(build / "tools")
    pip_install(tools, *TOOLS)
    dist = build / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    run(tools / "python", "-m", "build", "--outdir", dist)  # the wheel is built from the sdist
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    run(tools / "twine", "check", "--strict", sdist, wheel)
    check_wheel(wheel)
    programs = new_environment(build / "user", f"nbdist[ranks] @ {wheel.as_uri()}", *NOTEBOOK_TOOLS)
    run_first_notebook(programs, build / "work")


def binder(build: Path) -> None:
    """Repeat the steps of Binder's image in a new environment."""
    programs = new_environment(build / "image")
    pip_install(programs, "--requirement", ROOT / "binder" / "requirements.txt")
    run(ROOT / "binder" / "postBuild", path=programs)
    run_first_notebook(programs, build / "work")


def main() -> None:
    """Run the check that the command line names."""
    parser = argparse.ArgumentParser(description="Check what users install.")
    parser.add_argument("check", choices=["release", "binder"])
    check = parser.parse_args().check
    build = ROOT / "build" / check
    build.mkdir(parents=True, exist_ok=True)
    {"release": release, "binder": binder}[check](build)
    print(f"the {check} check has passed")


if __name__ == "__main__":
    main()
