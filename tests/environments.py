"""Virtual environments for tests, with the packages of the environment that runs the tests."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path


def environment(folder: Path, *, without: tuple[str, ...] = ()) -> Path:
    """Create an environment that links the installed packages, and return its interpreter.

    Args:
        folder: folder of the environment.
        without: names of packages that it lacks.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = next(folder.glob("lib/python*/site-packages"))
    for installed in Path(sysconfig.get_path("purelib")).iterdir():
        if not installed.name.startswith((*without, "nbdist", "_nbdist", "__editable__.nbdist")):
            (packages / installed.name).symlink_to(installed)
    return python
