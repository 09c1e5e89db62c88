"""JupyterLab's visual debugger in `%%distribute` cells.

The front end sends requests of the Debug Adapter Protocol to the notebook's kernel. The kernel of
each rank has ipykernel's debugger, too. While a cell with breakpoints runs, the requests that
belong to a stopped rank are passed on to the debugger of that rank, and its events to the page.
Lines of a cell are the same on the ranks, but its file has another name there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

from nbdist.errors import NbdistError, SessionError
from nbdist.output.sink import get_kernel, get_shell
from nbdist.protocol.messages import make_execute_request

if TYPE_CHECKING:
    from nbdist.session.cell import Cell
    from nbdist.session.worker_group import WorkerGroup

    DapMessage = dict[str, Any]

REPLY_TIMEOUT_S = 20.0
INITIALIZE = {
    "clientID": "nbdist",
    "adapterID": "",
    "pathFormat": "path",
    "linesStartAt1": True,
    "columnsStartAt1": True,
    "supportsVariableType": True,
}
TRACE_MAIN_THREAD = make_execute_request("__import__('debugpy').trace_this_thread(True)")
NOTEBOOK_COMMANDS = frozenset(
    {"initialize", "attach", "configurationDone", "disconnect", "debugInfo", "dumpCell", "modules"}
    | {"setBreakpoints", "setExceptionBreakpoints", "inspectVariables"}
)
"""Requests that the debugger of the notebook's kernel answers while a rank is stopped."""


class VisualDebugger:
    """Debugger of the first rank of the running cell."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers
        self._codes: dict[str, str] = {}
        """Code of the cells that ran, as the ranks have it, by path in the notebook's kernel."""
        self._rank_paths: dict[str, str] = {}
        """Path of a cell on the rank, by path in the notebook's kernel."""
        self._rank: int | None = None
        """The rank that is debugged, or None."""
        self._stopped_threads: set[int] = set()

    def attach(self, cell: Cell) -> None:
        """Start the rank's debugger if the notebook's is on and has breakpoints in these cells.

        Not for ranks on other nodes: debugpy 1.8 listens on a port without authentication.
        """
        debugger = getattr(get_kernel(), "debugger", None)
        rank = cell.ranks[0]
        if debugger is None or self._workers.node_of(rank):
            return
        from ipykernel.compiler import get_file_name

        notebook_code = get_shell().get_parent().get("content", {}).get("code", "")
        if notebook_code.splitlines()[1:] == cell.code.splitlines()[1:]:  # the cell of the magic
            self._codes[get_file_name(notebook_code)] = cell.code
        breakpoints = {
            path: points
            for path, points in debugger.breakpoint_list.items()
            if points and path in self._codes
        }
        if not debugger.is_started or not breakpoints:
            return
        self._rank, self._rank_paths = rank, {}
        debugger.process_request = self._process_request
        try:
            self._start(rank, breakpoints)
        except BaseException:
            self.detach()
            raise

    def _start(self, rank: int, breakpoints: dict[str, list[DapMessage]]) -> None:
        """Start the rank's debugger and set breakpoints; the rank is idle."""
        if not self._request("initialize", INITIALIZE).get("success"):
            msg = f"The debugger did not start on rank {rank}. Turn it off to run the cell."
            raise SessionError(msg)
        # debugpy 1.8 would also stop in the workers of a DataLoader, which no page can continue
        self._request("attach", {"subProcess": False})
        # Python ends the tracing of a thread in whose trace function Stop raised KeyboardInterrupt,
        # and a new attach of debugpy 1.8 does not begin it again.
        self._workers.request_all([rank], "execute_request", TRACE_MAIN_THREAD)
        for path, points in breakpoints.items():
            reply = self._request("dumpCell", {"code": self._codes[path]})
            self._rank_paths[path] = reply["body"]["sourcePath"]
            source = {"path": self._rank_paths[path]}
            self._request("setBreakpoints", {"source": source, "breakpoints": points})

    def detach(self) -> None:
        """Have a stopped rank continue, without breakpoints; callable from any thread."""
        if self._rank is None:
            return
        with contextlib.suppress(AttributeError):  # another thread was faster
            del get_kernel().debugger.process_request
        with contextlib.suppress(NbdistError):  # the ranks have ended
            # debugpy 1.8 waits in the trace function of a stopped thread. If an interrupt were
            # raised there, Python would end the tracing of that thread.
            for path in self._rank_paths.values() if self._stopped_threads else ():
                self._request("setBreakpoints", {"source": {"path": path}, "breakpoints": []})
            for thread in list(self._stopped_threads):
                self._request("continue", {"threadId": thread})
            self._request("disconnect", {"restart": False, "terminateDebuggee": False})
        self._rank = None
        self._stopped_threads.clear()

    def on_event(self, rank: int, event: DapMessage) -> None:
        """Pass on to the page that a rank has stopped or continues; on the reader thread."""
        if rank != self._rank or event["event"] not in ("stopped", "continued"):
            return
        if event["event"] == "stopped":
            self._stopped_threads.add(event["body"]["threadId"])
        else:
            self._stopped_threads.clear()
        kernel = get_kernel()
        kernel.session.send(kernel.iopub_socket, "debug_event", event, ident=b"debug_event")

    async def _process_request(self, message: DapMessage) -> DapMessage:
        """Answer a request of the page; on the control thread of the notebook's kernel."""
        debugger, command = get_kernel().debugger, message["command"]
        if self._stopped_threads and command not in NOTEBOOK_COMMANDS:
            return await self._forward(message)
        if command == "disconnect":
            self.detach()
        reply: DapMessage = await type(debugger).process_request(debugger, message)
        if command == "debugInfo":
            reply["body"]["stoppedThreads"] += self._stopped_threads
        elif command == "setBreakpoints" and (
            message["arguments"]["source"]["path"] in self._rank_paths
        ):
            await self._forward(message)
        return reply

    async def _forward(self, message: DapMessage) -> DapMessage:
        """Send a request of the page to the rank, and return the reply."""
        text, paths = json.dumps(message), self._rank_paths.items()
        for path, rank_path in paths:
            text = text.replace(json.dumps(path), json.dumps(rank_path))
        request = json.loads(text)
        loop = asyncio.get_running_loop()
        try:
            reply = await loop.run_in_executor(
                None, lambda: self._request(request["command"], request.get("arguments", {}))
            )
        except NbdistError as error:  # the rank has ended
            reply = {"type": "response", "success": False, "message": str(error)}
        text = json.dumps({**reply, "command": message["command"], "request_seq": message["seq"]})
        for path, rank_path in paths:
            text = text.replace(json.dumps(rank_path), json.dumps(path))
        translated: DapMessage = json.loads(text)
        return translated

    def _request(self, command: str, arguments: DapMessage) -> DapMessage:
        rank = self._rank
        if rank is None:
            return {}
        reply: DapMessage = self._workers.request_all(
            [rank],
            "debug_request",
            {"type": "request", "seq": 1, "command": command, "arguments": arguments},
            channel="control",
            patience_s=REPLY_TIMEOUT_S,
        )[rank]
        return reply
