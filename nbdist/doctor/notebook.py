"""The notebook itself: can it show the panel."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

from nbdist.doctor.finding import note, ok
from nbdist.panel import assets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.doctor.finding import Finding

WIDGETS = ("anywidget", "ipywidgets")


def look(*, missing: list[str] | None = None, built: bool | None = None) -> Iterator[Finding]:
    """Look for what the live panel needs.

    Args:
        missing: packages of the widget that are not there, for tests.
        built: whether the front end was built, for tests.
    """
    if missing is None:
        missing = [name for name in WIDGETS if importlib.util.find_spec(name) is None]
    built = assets.present() if built is None else built
    instead = "%nbdist panel shows a page without script instead"
    if missing:
        says = f"no {', '.join(missing)}: {instead}"
        yield note("panel", says, f"pip install {' '.join(missing)}, and restart the kernel")
    elif not built:
        do = "install nbdist again without NBDIST_SKIP_FRONTEND"
        yield note("panel", f"its front end was not built: {instead}", do)
    else:
        says = "live where the notebook is trusted (File, Trust Notebook); a page elsewhere"
        yield ok("panel", says)
    if "ipykernel" not in sys.modules:
        yield ok("kernel", "a script, no notebook")
