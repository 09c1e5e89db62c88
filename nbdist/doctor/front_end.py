"""`%nbdist doctor --front-end`: what the user's own front end can do, as a report for an issue.

A widget in the page confirms what the kernel cannot know: that widgets are shown, that displays
are updated, and whether the page's messages arrive while a cell blocks, which the panel's buttons
need. The user confirms that input and the interrupt button work.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import secrets
import sys
import threading
import time
from importlib import metadata
from typing import TYPE_CHECKING, Any

from nbdist import panel
from nbdist.doctor.diagnosis import Diagnosis
from nbdist.doctor.finding import LEVELS, note, ok, problem
from nbdist.output.sink import running_cell

if TYPE_CHECKING:
    from nbdist.doctor.finding import Finding

REPLY_S = 5.0
"""Time for the page to reply while the cell blocks."""
INTERRUPT_S = 15.0
"""Time for the user to press the interrupt button."""
_PACKAGES = ("IPython", "ipykernel", "jupyter_client", "ipywidgets", "anywidget", "marimo")
_HOSTS = {"VSCODE_PID": "VS Code", "COLAB_RELEASE_TAG": "Colab", "KAGGLE_KERNEL_RUN_TYPE": "Kaggle"}
_MARKER = "nbdist display check"
# Replies several times: JupyterLab 4.6 sends the first messages of a widget to the blocked shell,
# until it has made a subshell for it.
_SCRIPT = f"""
export default {{ render({{ model, el }}) {{
  el.textContent = "nbdist: this line is a live widget";
  let tries = 25;
  const reply = () => {{
    const found = document.body.textContent.match(/{_MARKER} \\w+: updated/g) ?? [];
    model.send({{ found }});
    if (--tries > 0) setTimeout(reply, 200);
  }};
  reply();
}} }};
"""


class FrontEndCheck:
    """One run of the check. Its report is updated if the page replies after the cell has ended."""

    def __init__(self) -> None:
        self._id = secrets.token_hex(4)
        self._replied: dict[str, bool] = {}
        """Kind of a reply, and whether it arrived while the cell blocked."""
        self._all_replied = threading.Event()
        self._is_over = False
        self._input_findings: list[Finding] = []
        self._no_widget = ""
        self._screen = running_cell()

    def run(self) -> Diagnosis:
        """Check the front end, and show the report below the running cell."""
        update_id = f"nbdist-{self._id}"
        self._screen.display({"text/plain": f"{_MARKER} {self._id}"}, {}, display_id=update_id)
        self._no_widget = panel.why_no_widget()
        if not self._no_widget:
            from nbdist.panel.widget import PanelWidget

            class ProbeWidget(PanelWidget):
                _esm: Any = _SCRIPT
                _css: Any = ""

            self._widget = ProbeWidget(
                self._receive, lambda: {"text/plain": "nbdist: this page shows no widgets"}
            )
            self._screen.display(*self._widget._repr_mimebundle_())
        updated = {"text/plain": f"{_MARKER} {self._id}: updated"}
        self._screen.display(updated, {}, display_id=update_id, update=True)
        self._screen.flush()
        if not self._no_widget:
            self._all_replied.wait(REPLY_S)
        self._input_findings = [*self._check_input()]
        report = self.report()
        self._screen.display(_bundle(report), {}, display_id=f"{update_id}-report")
        self._is_over = True
        return report

    def report(self) -> Diagnosis:
        """Return what is known now."""
        # The front end, as far as the kernel can know, and the versions that matter.
        name = next((host for key, host in _HOSTS.items() if key in os.environ), None)
        name = "marimo" if "marimo" in sys.modules else name or "Jupyter or unknown"
        versions = [f"Python {platform.python_version()}"]
        versions += [
            f"{package} {metadata.version(package)}"
            for package in _PACKAGES
            if importlib.util.find_spec(package) is not None
        ]
        host = ok("front end", f"{name}; {', '.join(versions)}")
        findings = [host, *self._check_page(), *self._input_findings]
        return Diagnosis(tuple(sorted(findings, key=lambda found: LEVELS.index(found.level))))

    def _receive(self, message: Any, buffers: object) -> None:
        """Record a reply of the page; called on any thread, also after the cell has ended."""
        del buffers
        is_updated = any(self._id in found for found in message["found"])
        new = {"shown", *["updated"] * is_updated} - self._replied.keys()
        self._replied.update(dict.fromkeys(new, not self._is_over))
        if self._replied.keys() >= {"shown", "updated"}:
            self._all_replied.set()
        if self._is_over and new:
            report_id = f"nbdist-{self._id}-report"
            self._screen.display(_bundle(self.report()), {}, display_id=report_id, update=True)

    def _check_page(self) -> list[Finding]:
        if self._no_widget:
            do = "the panel is static HTML or text: see 'panel' in %nbdist doctor"
            return [note("widgets", f"not checked: {self._no_widget}", do)]
        if "shown" not in self._replied:
            message = "the page did not reply: either it shows no widgets, or the cell still blocks"
            do = "wait until the cell has ended: the report changes if the page replies then"
            return [problem("widgets", message, do)]
        findings = [ok("widgets", "shown, and their messages arrive in the kernel")]
        if self._replied["shown"]:
            findings.append(ok("blocked kernel", "the page's messages arrive while a cell blocks"))
        else:
            message = "the page's messages arrive only after a cell has ended"
            do = "the panel's buttons wait meanwhile: use --background, or the interrupt button"
            findings.append(note("blocked kernel", message, do))
        if "updated" in self._replied:
            findings.append(ok("displays", "updated in place"))
        else:
            do = f'look above: does the page show "{_MARKER} {self._id}: updated"?'
            findings.append(note("displays", "the page could not find the updated display", do))
        return findings

    def _check_input(self) -> list[Finding]:
        question = "nbdist: press Enter to skip the check of the interrupt button, or type y: "
        try:
            answer = input(question).strip().lower()
        except KeyboardInterrupt:
            return [ok("interrupt", "KeyboardInterrupt reached the kernel")]
        except (EOFError, NotImplementedError, RuntimeError) as error:  # nbclient, a script
            message = f"input() is not available: {error}"
            return [note("input", message, "cells with input() or a debugger cannot be used")]
        findings = [ok("input", "input() works")]
        if answer not in {"y", "yes"}:
            return findings
        self._screen.write("stdout", f"Interrupt this cell now, within {INTERRUPT_S:.0f} s.\n")
        self._screen.flush()
        try:
            time.sleep(INTERRUPT_S)
        except KeyboardInterrupt:
            return [*findings, ok("interrupt", "KeyboardInterrupt reached the kernel")]
        do = "if you pressed it, say so in the issue; %nbdist interrupt works from another cell"
        return [*findings, problem("interrupt", "no interrupt reached the kernel", do)]


def _bundle(report: Diagnosis) -> dict[str, str]:
    return {"text/plain": str(report), "text/html": report._repr_html_()}
