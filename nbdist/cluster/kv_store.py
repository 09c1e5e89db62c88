"""Key-value store for process groups that span several nodes.

Runs in the kernel; ranks access it through the agents. torch's TCPStore would listen on every
interface without authentication. A request for missing keys is answered when they are set.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.cluster.protocol import KeyValueRequest

    Reply = Callable[[int, KeyValueRequest, list[bytes]], None]


@dataclass(slots=True)
class _BlockedRequest:
    node: int
    request: KeyValueRequest
    ident: bytes
    until: float


class KeyValueStore:
    """Key-value store for the ranks of one start.

    Args:
        reply: sends a reply to a node: node index, reply, requester and value.
    """

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._values: dict[str, bytes] = {}
        self._waiting: list[_BlockedRequest] = []
        self._lock = threading.Lock()

    def answer_request(self, node: int, request: KeyValueRequest, frames: list[bytes]) -> None:
        """Answer a request, or keep it until its keys are set."""
        ident, *values = frames
        with self._lock:
            if request.op in {"get", "wait"} and not self._has(request.keys):
                until = time.monotonic() + request.seconds
                self._waiting.append(_BlockedRequest(node, request, ident, until))
                return
            number, given = self._do(request, values)
            self._answer(node, request, ident, number, given)
            if request.op in {"set", "add", "append", "compare_set"}:
                self._wake()

    def expire_requests(self) -> None:
        """Answer requests that have timed out with an error."""
        now = time.monotonic()
        with self._lock:
            late = [blocked for blocked in self._waiting if blocked.until < now]
            self._waiting = [blocked for blocked in self._waiting if blocked.until >= now]
        for blocked in late:
            request = blocked.request
            keys = [key for key in request.keys if key not in self._values]
            error = f"timed out after {request.seconds:.0f} s waiting for {', '.join(keys)}"
            self._reply(blocked.node, replace(request, error=error), [blocked.ident])

    def _has(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _do(self, request: KeyValueRequest, values: list[bytes]) -> tuple[int, list[bytes]]:
        """Execute a request; return a number and at most one value."""
        stored, keys = self._values, request.keys
        match request.op:
            case "check":
                return int(self._has(keys)), []
            case "delete":
                return int(stored.pop(keys[0], None) is not None), []
            case "count":
                return len(stored), []
            case "wait":
                return 0, []
        return self._changed(request.op, keys[0], request.number, values)

    def _changed(
        self, op: str, key: str, number: int, values: list[bytes]
    ) -> tuple[int, list[bytes]]:
        """Read or change one value."""
        now = self._values.get(key, b"")
        count = 0
        match op:
            case "get":
                return 0, [now]
            case "set":
                then = values[0]
            case "add":
                count = int(now or b"0") + number
                then = b"%d" % count
            case "append":
                then = now + values[0]
            case "compare_set":
                expected, desired = values
                if now != expected:
                    # as torch's own stores: a missing key returns the expected value
                    return 0, [now if key in self._values else expected]
                then = desired
            case other:
                raise ValueError(f"unknown store operation {other!r}")
        self._values[key] = then
        return count, [then]

    def _wake(self) -> None:
        """Answer blocked requests whose keys are now set."""
        ready = [blocked for blocked in self._waiting if self._has(blocked.request.keys)]
        self._waiting = [blocked for blocked in self._waiting if blocked not in ready]
        for blocked in ready:
            number, given = self._do(blocked.request, [])
            self._answer(blocked.node, blocked.request, blocked.ident, number, given)

    def _answer(
        self, node: int, request: KeyValueRequest, ident: bytes, number: int, given: list[bytes]
    ) -> None:
        self._reply(node, replace(request, keys=[], number=number), [ident, *given])
