"""Check of whether the notebook can show the live panel."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

from nbdist.doctor.finding import note, ok
from nbdist.panel import assets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.doctor.finding import Finding

WIDGET_PACKAGES = ("anywidget", "ipywidgets")


def check_notebook(
    *, missing: list[str] | None = None, built: bool | None = None
) -> Iterator[Finding]:
    """Check what the live panel needs.

    Args:
        missing: missing packages of the widget, for tests.
        built: whether the front end is built, for tests.
    """
    if missing is None:
        missing = [name for name in WIDGET_PACKAGES if importlib.util.find_spec(name) is None]
    built = assets.has_built_assets() if built is None else built
    instead = "%nbdist panel shows a static page instead"
    if missing:
        says = f"{', '.join(missing)} not installed: {instead}"
        yield note("panel", says, f"pip install {' '.join(missing)}, and restart the kernel")
    elif not built:
        do = "reinstall nbdist without NBDIST_SKIP_FRONTEND"
        yield note("panel", f"the front end is not built: {instead}", do)
    else:
        says = "live in trusted notebooks (File > Trust Notebook); a static page elsewhere"
        yield ok("panel", says)
    if "ipykernel" not in sys.modules:
        yield ok("kernel", "none: this is a script, not a notebook")
