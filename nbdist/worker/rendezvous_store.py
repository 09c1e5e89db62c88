"""Store for the rendezvous of torch's process groups, without an open port.

torch's process groups exchange addresses through a store. The default TCPStore accepts any
connection. On one node, this is a FileStore on a file (0600) in a folder (0700) that other users
cannot access. On several nodes, the node agent forwards requests from a Unix socket to the
notebook's kernel. The store exists as long as the ranks, so a process group can be recreated
under another prefix:

    distributed.init_process_group("gloo", store=PrefixStore("again-1", get_store()), ...)
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError, FileStore  # type: ignore[attr-defined]

from nbdist.cluster import protocol

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Sequence

    from nbdist.protocol import messages

_NAME = "store"
_MARGIN_S = 15.0
"""Additional time for the reply to a wait that timed out."""
_SHORT_S = 30.0
"""Timeout of requests that do not wait for other ranks."""
_opened: list[Store] = []
"""Kept until the rank exits: torch deletes the file with the last FileStore on it."""


def open_store(launch: messages.LaunchRanksRequest) -> Store:
    """Open the store and return it; ``get_store()`` returns it from then on."""
    if launch.store:
        _opened[:] = [NodeAgentStore(launch.store)]
    else:
        path = Path(launch.run_dir) / _NAME
        path.touch(mode=0o600)
        _opened[:] = [FileStore(str(path), launch.world_size)]
    return get_store()


def get_store() -> Store:
    """Return the store of these ranks."""
    return _opened[0]


class NodeAgentStore(Store):
    """Store that sends requests to the kernel through this node's agent; thread-safe."""

    def __init__(self, address: str) -> None:
        """Create the store; each thread connects at its first request."""
        super().__init__()
        self._address = address
        self._context = zmq.Context()
        self._own = threading.local()

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value."""
        self._request("set", [key], value)

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        return self._request("get", [key], seconds=self._limit_s)[1]

    def add(self, key: str, amount: int) -> int:
        """Increment a counter and return its new value."""
        return self._request("add", [key], number=amount)[0]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a value if the current one is `expected`; return the resulting value."""
        return self._request("compare_set", [key], expected, desired)[1]

    def append(self, key: str, value: bytes | str) -> None:
        """Append to a value."""
        self._request("append", [key], value)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._request("check", list(keys))[0])

    def wait(self, keys: Sequence[str], timeout: dt.timedelta | None = None) -> None:
        """Wait until all keys exist.

        Raises:
            DistStoreError: the wait timed out.
        """
        seconds = self._limit_s if timeout is None else timeout.total_seconds()
        self._request("wait", list(keys), seconds=seconds)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return bool(self._request("delete", [key])[0])

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._request("count", [])[0]

    # torch 2.13 calls these two by their C++ names
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    @property
    def _limit_s(self) -> float:
        timeout: dt.timedelta = self.timeout  # type: ignore[attr-defined]
        return timeout.total_seconds()

    def _request(
        self, op: str, keys: list[str], *values: bytes | str, number: int = 0, seconds: float = 0.0
    ) -> tuple[int, bytes]:
        """Send a request and return the reply: a number and a value."""
        request = protocol.KeyValueMessage(op, keys, number=number, seconds=seconds)
        frames = [value.encode() if isinstance(value, str) else bytes(value) for value in values]
        timeout_s = seconds + _MARGIN_S if seconds else _SHORT_S
        socket: zmq.Socket[bytes] | None = vars(self._own).get("socket")
        if socket is None:  # the first request of this thread
            socket = self._own.socket = self._context.socket(zmq.REQ)
            socket.linger = 0
            socket.connect(self._address)
        try:
            socket.send_multipart(protocol.pack_message(request, *frames))
            if not socket.poll(int(1000 * timeout_s)):
                raise DistStoreError(  # noqa: TRY301 - a late reply is handled below
                    f"the store of the process groups did not reply within {timeout_s:.0f} s"
                )
            answer, payload = protocol.unpack_message(socket.recv_multipart())
        except BaseException:  # interrupts too: a late reply would match the next request
            self._own.socket.close(0)
            del self._own.socket
            raise
        if not isinstance(answer, protocol.KeyValueMessage) or answer.error:
            reason = (
                answer.error if isinstance(answer, protocol.KeyValueMessage) else "invalid reply"
            )
            raise DistStoreError(f"{op} {', '.join(keys)}: {reason}")
        return answer.number, payload[0] if payload else b""
