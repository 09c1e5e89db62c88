"""Where the ranks of one start meet, and no port: a file here, the agent's store on several nodes.

Runs on a rank. torch's process groups exchange their addresses through a store. Its usual
TCPStore serves whoever connects; a file (0600) in a folder (0700) is out of reach for other
users, and so is the socket of the agent, which passes requests on to the notebook's kernel. It
lasts as long as the ranks, so that a group can be made anew under another prefix:

    distributed.init_process_group("gloo", store=PrefixStore("again-1", store()), ...)
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
"""The answer to a wait that has failed may come so much later."""
_SHORT_S = 30.0
"""For requests that wait for nobody."""
_opened: list[Store] = []
"""Kept for the life of the rank: torch removes the file with the last FileStore on it."""


def opened(launch: messages.Launch) -> Store:
    """Open the store of this start of the ranks; `store()` gives it from then on."""
    _opened[:] = [NodeStore(launch.store) if launch.store else _file(launch)]
    return store()


def store() -> Store:
    """Give the store of this start of the ranks."""
    return _opened[0]


def _file(launch: messages.Launch) -> FileStore:
    path = Path(launch.run_dir) / _NAME
    path.touch(mode=0o600)
    return FileStore(str(path), launch.world_size)


class NodeStore(Store):
    """Asks the agent of this node; the kernel answers. From any thread."""

    def __init__(self, address: str) -> None:
        """Connect when it is first asked."""
        super().__init__()
        self._address = address
        self._context = zmq.Context()
        self._own = threading.local()

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value."""
        self._ask("set", [key], value)

    def get(self, key: str) -> bytes:
        """A value, once it is there."""
        return self._ask("get", [key], seconds=self._limit_s)[1]

    def add(self, key: str, amount: int) -> int:
        """Count; returns how far it is."""
        return self._ask("add", [key], number=amount)[0]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a value where it is as expected; returns what it is then."""
        return self._ask("compare_set", [key], expected, desired)[1]

    def append(self, key: str, value: bytes | str) -> None:
        """Add to the end of a value."""
        self._ask("append", [key], value)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there."""
        return bool(self._ask("check", list(keys))[0])

    def wait(self, keys: Sequence[str], timeout: dt.timedelta | None = None) -> None:
        """Return once all of them are there.

        Raises:
            DistStoreError: they did not come in time.
        """
        seconds = self._limit_s if timeout is None else timeout.total_seconds()
        self._ask("wait", list(keys), seconds=seconds)

    def delete_key(self, key: str) -> bool:
        """Remove a value; whether there was one."""
        return bool(self._ask("delete", [key])[0])

    def num_keys(self) -> int:
        """How many values there are."""
        return self._ask("count", [])[0]

    # torch 2.13 calls these two by their names in C++
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    @property
    def _limit_s(self) -> float:
        """How long a wait without a limit of its own may take."""
        limit: dt.timedelta = self.timeout  # type: ignore[attr-defined]
        return limit.total_seconds()

    def has_extended_api(self) -> bool:
        """Not to be asked for several values at once."""
        return False

    def _ask(
        self, op: str, keys: list[str], *values: bytes | str, number: int = 0, seconds: float = 0.0
    ) -> tuple[int, bytes]:
        """Ask and wait for the answer: a number and a value."""
        request = protocol.Stored(op, keys, number=number, seconds=seconds)
        frames = [one.encode() if isinstance(one, str) else bytes(one) for one in values]
        try:
            answer, given = self._exchange(protocol.pack(request, *frames), seconds)
        except BaseException:  # Stop too: a later answer would be taken for the next one's
            self._own.socket.close(0)
            del self._own.socket
            raise
        if not isinstance(answer, protocol.Stored) or answer.error:
            why = answer.error if isinstance(answer, protocol.Stored) else "no answer"
            message = f"{op} {', '.join(keys)}: {why}"
            raise DistStoreError(message)
        return answer.number, given[0] if given else b""

    def _exchange(
        self, frames: list[bytes], seconds: float
    ) -> tuple[protocol.Message, list[bytes]]:
        """Send a request and wait for what answers it."""
        socket = self._socket()
        socket.send_multipart(frames)
        patience_s = seconds + _MARGIN_S if seconds else _SHORT_S
        if not socket.poll(int(1000 * patience_s)):
            message = f"the store of the process groups was silent for {patience_s:.0f} s"
            raise DistStoreError(message)
        return protocol.unpack(socket.recv_multipart())

    def _socket(self) -> zmq.Socket[bytes]:
        """This thread's own."""
        known: zmq.Socket[bytes] | None = vars(self._own).get("socket")
        if known is None:
            known = self._own.socket = self._context.socket(zmq.REQ)
            known.linger = 0
            known.connect(self._address)
        return known
