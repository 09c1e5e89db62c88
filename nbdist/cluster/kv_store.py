"""Key-value store for process groups that span several nodes.

Runs in the kernel; ranks access it through the agents. torch's TCPStore would listen on every
interface without authentication. A request for missing keys is answered when they are set.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nbdist.cluster.protocol import KeyValueMessage


class SendReply(Protocol):
    """Sends a reply to a node."""

    def __call__(self, index: int, message: KeyValueMessage, *frames: bytes) -> None:
        """Send the reply; the frames are the requester and at most one value."""


@dataclass(slots=True)
class _WaitingRequest:
    node: int
    request: KeyValueMessage
    ident: bytes
    until: float


class KeyValueStore:
    """Key-value store for the ranks of one start.

    Args:
        reply: sends a reply to a node.
    """

    def __init__(self, reply: SendReply) -> None:
        self._reply = reply
        self._values: dict[str, bytes] = {}
        self._waiting: list[_WaitingRequest] = []
        self._lock = threading.Lock()

    def answer_request(self, node: int, request: KeyValueMessage, frames: list[bytes]) -> None:
        """Answer a request, or keep it until its keys are set."""
        ident, *values = frames
        with self._lock:
            if request.op in {"get", "wait"} and not self._has(request.keys):
                until = time.monotonic() + request.seconds
                self._waiting.append(_WaitingRequest(node, request, ident, until))
                return
            self._execute(node, request, ident, values)
            ready = [blocked for blocked in self._waiting if self._has(blocked.request.keys)]
            self._waiting = [blocked for blocked in self._waiting if blocked not in ready]
            for blocked in ready:
                self._execute(blocked.node, blocked.request, blocked.ident, [])

    def expire_requests(self) -> None:
        """Answer requests that have timed out with an error."""
        now = time.monotonic()
        with self._lock:
            expired = [blocked for blocked in self._waiting if blocked.until < now]
            self._waiting = [blocked for blocked in self._waiting if blocked.until >= now]
        for blocked in expired:
            request = blocked.request
            keys = [key for key in request.keys if key not in self._values]
            error = f"timed out after {request.seconds:.0f} s waiting for {', '.join(keys)}"
            self._reply(blocked.node, replace(request, error=error), blocked.ident)

    def _has(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _execute(
        self, node: int, request: KeyValueMessage, ident: bytes, values: list[bytes]
    ) -> None:
        """Execute a request and reply with a number and at most one value."""
        number, result = 0, list[bytes]()
        match request.op:
            case "wait":
                pass  # its keys are set
            case "check":
                number = int(self._has(request.keys))
            case "delete":
                number = int(self._values.pop(request.keys[0], None) is not None)
            case "count":
                number = len(self._values)
            case op:
                number, value = self._read_or_change(op, request.keys[0], request.number, values)
                result = [value]
        self._reply(node, replace(request, keys=[], number=number), ident, *result)

    def _read_or_change(
        self, op: str, key: str, number: int, values: list[bytes]
    ) -> tuple[int, bytes]:
        """Read or change one value; return the new count and the value."""
        before = self._values.get(key, b"")
        count = 0
        match op:
            case "get":
                return 0, before
            case "set":
                after = values[0]
            case "add":
                count = int(before or b"0") + number
                after = b"%d" % count
            case "append":
                after = before + values[0]
            case "compare_set":
                expected, after = values
                if before != expected:
                    # as torch's own stores: a missing key returns the expected value
                    return 0, before if key in self._values else expected
            case _:
                raise ValueError(f"unknown store operation {op!r}")
        self._values[key] = after
        return count, after
