"""The store of the process groups on several nodes: a dictionary in the kernel, asked by ranks.

Runs in the kernel. torch's own TCPStore listens on every interface and asks for no password.
Requests come through the agents; one that waits is answered when what it waits for is there.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.cluster.protocol import Stored

    Reply = Callable[[int, Stored, list[bytes]], None]


@dataclass(slots=True)
class _Waiting:
    node: int
    request: Stored
    ident: bytes
    until: float


class MeetingPoint:
    """What the ranks of one start have stored.

    Args:
        reply: sends an answer to a node: its number, the answer, who asked and the value.
    """

    def __init__(self, reply: Reply) -> None:
        """Hold nothing yet."""
        self._reply = reply
        self._values: dict[str, bytes] = {}
        self._waiting: list[_Waiting] = []
        self._lock = threading.Lock()

    def take(self, node: int, request: Stored, frames: list[bytes]) -> None:
        """Answer a request, or keep it until it can be answered."""
        ident, *values = frames
        with self._lock:
            if request.op in {"get", "wait"} and not self._has(request.keys):
                until = time.monotonic() + request.seconds
                self._waiting.append(_Waiting(node, request, ident, until))
                return
            number, given = self._do(request, values)
            self._answer(node, request, ident, number, given)
            if request.op in {"set", "add", "append", "compare_set"}:
                self._wake()

    def look(self) -> None:
        """Tell those whose time is up."""
        now = time.monotonic()
        with self._lock:
            late = [one for one in self._waiting if one.until < now]
            self._waiting = [one for one in self._waiting if one.until >= now]
        for one in late:
            keys = [key for key in one.request.keys if key not in self._values]
            error = f"{', '.join(keys)} did not come within {one.request.seconds:.0f} s"
            self._reply(one.node, replace(one.request, error=error), [one.ident])

    def _has(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _do(self, request: Stored, values: list[bytes]) -> tuple[int, list[bytes]]:
        """Do what is asked; returns a number and at most one value."""
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
                    # as torch's own stores: what is not there is what was expected
                    return 0, [now if key in self._values else expected]
                then = desired
            case other:
                raise ValueError(f"the store has no {other!r}")
        self._values[key] = then
        return count, [then]

    def _wake(self) -> None:
        """Answer those that waited for what is there now."""
        ready = [one for one in self._waiting if self._has(one.request.keys)]
        self._waiting = [one for one in self._waiting if one not in ready]
        for one in ready:
            number, given = self._do(one.request, [])
            self._answer(one.node, one.request, one.ident, number, given)

    def _answer(
        self, node: int, request: Stored, ident: bytes, number: int, given: list[bytes]
    ) -> None:
        self._reply(node, replace(request, keys=[], number=number), [ident, *given])
