"""JupyterLab's debugger in a distributed cell: the requests that its page sends."""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.live_kernel import DEADLINE_S

if TYPE_CHECKING:
    from tests.live_kernel import LiveKernel

LOOP = """%%distribute -n 2 --backend ddp
total = 0
for step in range(3):
    total += step
    total += rank
print("total", total)
"""


class DebuggerPage:
    """The debugger's requests and events."""

    def __init__(self, kernel: LiveKernel) -> None:
        self.kernel, self.client = kernel, kernel.client
        self.seq = 0

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request on the control channel; its reply."""
        self.seq += 1
        content = {"type": "request", "seq": self.seq, "command": command, "arguments": arguments}
        message = self.client.session.msg("debug_request", content)
        self.client.control_channel.send(message)
        reply = self.client.get_control_msg(timeout=DEADLINE_S)
        assert reply["parent_header"]["msg_id"] == message["header"]["msg_id"]
        return dict(reply["content"])

    def start(self) -> None:
        self.ask("initialize", clientID="page", adapterID="", pathFormat="path")
        self.ask("attach")

    def set_breakpoints(self, code: str, *lines: int) -> str:
        """Set breakpoints in a cell; its path."""
        path = str(self.ask("dumpCell", code=code)["body"]["sourcePath"])
        points = [{"line": line} for line in lines]
        self.ask("setBreakpoints", source={"path": path}, breakpoints=points)
        self.ask("configurationDone")
        return path

    def stopped(self) -> dict[str, Any]:
        """Wait until a breakpoint is hit; the topmost frame."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["msg_type"] == "debug_event" and message["content"]["event"] == "stopped":
                self.thread = message["content"]["body"]["threadId"]
                frames = self.ask("stackTrace", threadId=self.thread)["body"]["stackFrames"]
                return dict(frames[0])
        raise TimeoutError

    def variables(self, frame: dict[str, Any]) -> dict[str, str]:
        scopes = self.ask("scopes", frameId=frame["id"])["body"]["scopes"]
        reference = scopes[0]["variablesReference"]
        variables = self.ask("variables", variablesReference=reference)["body"]["variables"]
        return {variable["name"]: variable["value"] for variable in variables}

    def go_on(self, command: str = "continue") -> None:
        assert self.ask(command, threadId=self.thread)["success"]


@pytest.mark.nightly
def test_a_breakpoint_stops_a_rank_and_shows_its_variables(notebook: LiveKernel) -> None:
    notebook.run("%%distribute -n 2\npass")
    page = DebuggerPage(notebook)
    page.start()
    path = page.set_breakpoints(LOOP, 4)
    cell = notebook.send(LOOP)
    for step in range(3):
        frame = page.stopped()
        assert (frame["source"]["path"], frame["line"]) == (path, 4)
        assert page.variables(frame)["step"] == str(step)
        if step == 0:
            page.go_on("next")
            assert page.stopped()["line"] == 5
        page.go_on()
    shown = notebook.collect(cell)
    assert shown.status == "ok", shown.text
    assert "[0] total 3" in shown.text


@pytest.mark.nightly
def test_stop_ends_a_cell_that_a_breakpoint_has_stopped(notebook: LiveKernel) -> None:
    page = DebuggerPage(notebook)
    page.start()
    page.set_breakpoints(LOOP, 4)
    cell = notebook.send(LOOP)
    page.stopped()
    notebook.manager.interrupt_kernel()
    assert "KeyboardInterrupt" in notebook.collect(cell).text
    cell = notebook.send(LOOP)  # the next cell stops again
    assert page.stopped()["line"] == 4
    page.ask("disconnect", restart=False, terminateDebuggee=False)
    assert "[0] total 3" in notebook.collect(cell).text
