"""A real Jupyter kernel for tests: cells in, what a front end would show out."""

from __future__ import annotations

import os
import queue
import re
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from jupyter_client.manager import KernelManager

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
DEADLINE_S = 180.0


@dataclass
class Shown:
    """What one cell left under it."""

    status: str = ""
    count: int = 0
    """Its number, In[count]."""
    outputs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Everything readable, as plain text; later versions of a display replace earlier."""
        return ANSI.sub("", "".join(map(_text, self.outputs)))

    @property
    def error(self) -> dict[str, Any]:
        return next(o for o in self.outputs if o["kind"] == "error")


def _text(output: dict[str, Any]) -> str:
    if output["kind"] == "stream":
        return str(output["text"])
    if output["kind"] == "error":
        return "\n".join(output["traceback"]) + "\n"
    return str(output.get("data", {}).get("text/plain", "")) + "\n"


class LiveKernel:
    """A kernel process, driven as a front end drives it."""

    def __init__(
        self,
        folder: Path,
        *,
        within: Sequence[str] = (),
        python: str = sys.executable,
        **environ: str,
    ) -> None:
        """Start the kernel in `folder`, with its own IPython directory.

        Args:
            folder: where it works.
            within: a command that runs it, as `ip netns exec NAME`.
            python: the interpreter of the kernel.
            environ: variables that it has beside ours.
        """
        environ = {"IPYTHONDIR": str(folder / "ipython"), "OMP_NUM_THREADS": "1", **environ}
        self.manager = KernelManager(kernel_name="python3", transport="ipc", ip=str(folder / "k"))
        self.manager.kernel_spec.argv[:1] = [*within, python]
        self.manager.start_kernel(cwd=str(folder), env={**os.environ, **environ})
        self.client = self.manager.blocking_client()
        self.deadline_s = DEADLINE_S
        """Time that a cell may take."""
        self.client.start_channels()
        self.client.wait_for_ready(timeout=DEADLINE_S)

    def send(self, code: str) -> str:
        """Send a cell; `collect` gets what it shows."""
        return str(self.client.execute(code, store_history=True))

    def collect(self, request: str, *, until: str | None = None) -> Shown:
        """Collect until the cell has ended, or until `until` appears in its text."""
        shown, idle = Shown(), False
        deadline = time.monotonic() + self.deadline_s
        while time.monotonic() < deadline:
            idle = self._read_iopub(request, shown) or idle
            if until is not None and until in shown.text:
                return shown
            if idle:
                reply = self.client.get_shell_msg(timeout=DEADLINE_S)
                while reply["parent_header"].get("msg_id") != request:
                    reply = self.client.get_shell_msg(timeout=DEADLINE_S)
                shown.status = reply["content"]["status"]
                return shown
        msg = f"no end of the cell within {self.deadline_s} s; it shows:\n{shown.text}"
        raise TimeoutError(msg)

    def run(self, code: str) -> Shown:
        return self.collect(self.send(code))

    def run_with_answers(self, code: str, *answers: str) -> tuple[Shown, list[str]]:
        """Run a cell and answer its prompts; returns what it shows, and the prompts."""
        request = self.send(code)
        prompts = [self.answer_prompt(answer) for answer in answers]
        return self.collect(request), prompts

    def answer_prompt(self, answer: str) -> str:
        prompt = self.next_prompt()
        self.client.input(answer)
        return prompt

    def next_prompt(self) -> str:
        message = self.client.get_stdin_msg(timeout=self.deadline_s)
        return str(message["content"]["prompt"])

    def below(self, request: str, *, until: str) -> Shown:
        """Collect what comes below a cell that has returned, until `until` appears."""
        shown = Shown()
        deadline = time.monotonic() + DEADLINE_S
        while until not in shown.text:
            assert time.monotonic() < deadline, f"it shows:\n{shown.text}"
            self._read_iopub(request, shown)
        return shown

    def subshell(self) -> str:
        """A shell that answers while a cell blocks the main one, as JupyterLab makes it."""
        self.client.control_channel.send(self.client.session.msg("create_subshell_request", {}))
        return str(self.client.get_control_msg(timeout=DEADLINE_S)["content"]["subshell_id"])

    def send_comm(self, comm_id: str, data: dict[str, Any], *, subshell: str | None = None) -> None:
        """Send a message of a page to a widget."""
        message = self.client.session.msg("comm_msg", {"comm_id": comm_id, "data": data})
        if subshell is not None:
            message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)

    def _read_iopub(self, request: str, shown: Shown) -> bool:
        try:
            message = self.client.get_iopub_msg(timeout=0.5)
        except queue.Empty:
            return False
        if message["parent_header"].get("msg_id") != request:
            return False
        kind, content = message["msg_type"], message["content"]
        if kind == "status":
            return bool(content["execution_state"] == "idle")
        if kind == "update_display_data":
            _replace(shown.outputs, content)
        elif kind == "execute_input":
            shown.count = content["execution_count"]
        else:
            shown.outputs.append({"kind": kind, **content})
        return False

    def __enter__(self) -> Self:
        """Use as a context: the kernel ends with it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Shut the kernel down as a front end does."""
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=False)


def _replace(outputs: list[dict[str, Any]], content: dict[str, Any]) -> None:
    wanted = content["transient"]["display_id"]
    for output in outputs:
        if output.get("transient", {}).get("display_id") == wanted:
            output["data"] = content["data"]
