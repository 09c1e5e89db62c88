"""Channels to the ranks: sockets on this machine, all owned by one reader thread of the kernel.

ZMQ sockets belong to one thread: others hand over finished frames through a queue and a
wake-up. Messages are signed and checked by jupyter_client; iopub is read without a
high-water mark, because ZMQ would drop what exceeds it, unseen.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import zmq
from jupyter_client.connect import write_connection_file

from nbdist.protocol.signing import Signer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

Channel = Literal["shell", "control", "iopub"]
Message = dict[str, Any]
CHANNELS: dict[Channel, int] = {
    "shell": zmq.DEALER,
    "control": zmq.DEALER,
    "iopub": zmq.SUB,
}
RECONNECT_MS = 5  # ZMQ's 100 ms would be most of a restart
QUIET_POLL_MS = 500
BUSY_POLL_MS = 40
CLOSE_S = 5.0
WAKE = "inproc://wake"


class Reader(Protocol):
    """Who gets what the ranks send; called on the reader thread."""

    def receive(self, ranks: Sequence[int], channel: Channel, message: Message) -> None:
        """Take one message that these have sent."""

    def idle(self) -> bool:
        """Do what is due; True asks to be called again soon."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Where a rank listens; the same text as in its connection file."""

    path: str
    """Prefix of the socket paths."""
    ports: dict[Channel, int]
    key: bytes

    def address(self, channel: Channel) -> str:
        """ZMQ address of one channel."""
        return f"ipc://{self.path}-{self.ports[channel]}"


def write_connections(
    folder: Path, *, world_size: int, key: bytes, first: int = 0
) -> list[Connection]:
    """Write a connection file (0600) for every rank; `jupyter console --existing` reads them.

    Args:
        folder: private; the sockets will be there too.
        world_size: how many ranks there are on this machine.
        key: that signs their messages.
        first: number of the first of them.
    """
    connections = []
    for rank in range(first, first + world_size):
        path = str(folder / f"r{rank}")
        _, written = write_connection_file(
            str(folder / f"rank{rank}.json"), ip=path, transport="ipc", key=key
        )
        numbers: Mapping[str, Any] = written
        ports = {channel: int(numbers[f"{channel}_port"]) for channel in CHANNELS}
        connections.append(Connection(path, ports, key))
    return connections


class Channels(ABC):
    """Signed channels to all ranks of one start, whatever carries the frames.

    Args:
        key: that signs.
        reader: gets what is signed.
    """

    def __init__(self, key: bytes, reader: Reader) -> None:
        """Open nothing yet."""
        self._reader = reader
        self._signer = Signer(key=key, username="nbdist")
        self._refusal_told = self._idle_failed = False

    def send(
        self,
        ranks: Sequence[int],
        channel: Channel,
        kind: str,
        content: Any = None,
        *,
        metadata: dict[str, Any] | None = None,
        message_id: str | None = None,
    ) -> None:
        """Queue one request to some ranks, from any thread; `wake()` sends what is queued."""
        message = self._signer.msg(kind, content or {}, metadata=metadata)
        if message_id is not None:
            message["header"]["msg_id"] = message["msg_id"] = message_id
        self._queue(ranks, channel, self._signer.serialize(message))

    @abstractmethod
    def wake(self) -> None:
        """Make the reader thread send what is queued and call `Reader.idle`."""

    @abstractmethod
    def close(self) -> None:
        """End the reader thread and let go of the ranks."""

    @abstractmethod
    def _queue(self, ranks: Sequence[int], channel: Channel, frames: list[bytes]) -> None:
        """Queue frames to some ranks."""

    def _idle(self) -> bool:
        """Have done what is due; whatever fails in it, the ranks' messages are read on."""
        try:
            busy, self._idle_failed = self._reader.idle(), False
        except Exception:
            busy = True
            if not self._idle_failed:  # it would be said a hundred times a second
                self._idle_failed = True
                log.exception("the session could not be looked at")
        return busy

    def _take(self, ranks: Sequence[int], channel: Channel, message: Message | None) -> None:
        """Pass on what ranks have sent, None where it is not signed; the next is read after it."""
        if message is None:
            if not self._refusal_told:
                self._refusal_told = True
                log.warning(
                    "rank %d, %s: a message that is not signed was dropped", ranks[0], channel
                )
            return
        try:
            self._reader.receive(ranks, channel, message)
        except Exception:
            # a cell can write what it likes to its own kernel's sockets
            log.exception("rank %d, %s: a message that nobody can read", ranks[0], channel)


def connected(
    context: zmq.Context[Any], connection: Connection, channel: Channel
) -> zmq.Socket[bytes]:
    """Connect to a rank; one that has not bound its sockets yet is reached once it does."""
    socket: zmq.Socket[bytes] = context.socket(CHANNELS[channel])
    socket.linger = 0
    socket.set_hwm(0)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    if channel == "iopub":
        socket.subscribe(b"")
    socket.connect(connection.address(channel))
    return socket


class Alarm:
    """Wakes a thread that polls sockets of a context, from any other thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Make both ends."""
        self.socket = context.socket(zmq.PAIR)
        """To be polled."""
        self.socket.bind(WAKE)
        self._ringing = context.socket(zmq.PAIR)
        self._ringing.connect(WAKE)
        self._lock = threading.Lock()

    def ring(self) -> None:
        """Wake the thread."""
        with self._lock, contextlib.suppress(zmq.ContextTerminated, zmq.ZMQError):
            # suppressed: that thread is closing its sockets and needs no waking
            self._ringing.send(b"", zmq.DONTWAIT)

    def silence(self) -> None:
        """Forget how often it was rung; on the thread that was woken."""
        with contextlib.suppress(zmq.Again):  # the queue of wake-ups is empty: wanted
            while True:
                self.socket.recv(zmq.DONTWAIT)

    def close(self) -> None:
        """Close both ends."""
        self.socket.close(0)
        self._ringing.close(0)


class Sockets(Channels):
    """Channels to ranks on this machine."""

    def __init__(self, connections: list[Connection], reader: Reader) -> None:
        """Connect; ranks that have not bound their sockets yet are reached once they do."""
        super().__init__(connections[0].key, reader)
        self._context = zmq.Context()
        self._outbox: deque[tuple[int, Channel, list[bytes]]] = deque()
        self._sockets = {
            (rank, channel): connected(self._context, connection, channel)
            for rank, connection in enumerate(connections)
            for channel in CHANNELS
        }
        self._alarm = Alarm(self._context)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="nbdist-reader", daemon=True)
        self._thread.start()

    def _queue(self, ranks: Sequence[int], channel: Channel, frames: list[bytes]) -> None:
        self._outbox.extend((rank, channel, frames) for rank in ranks)

    def wake(self) -> None:
        """Make the reader thread send what is queued and call `Reader.idle`."""
        self._alarm.ring()

    def close(self) -> None:
        """End the reader thread and close every socket."""
        self._closing = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def _serve(self) -> None:
        poller = zmq.Poller()
        places = {socket: place for place, socket in self._sockets.items()}
        for socket in (*places, self._alarm.socket):
            poller.register(socket, zmq.POLLIN)
        timeout, idle_due = 0, time.monotonic()
        while not self._closing:
            ready = dict(poller.poll(timeout))
            if self._alarm.socket in ready:
                self._alarm.silence()
            self._send_queued()
            for socket in ready.keys() & places.keys():
                self._read(socket, *places[socket])
            if not ready or time.monotonic() >= idle_due or self._alarm.socket in ready:
                timeout = BUSY_POLL_MS if self._idle() else QUIET_POLL_MS
                idle_due = time.monotonic() + timeout / 1000
        for socket in places:
            socket.close(0)
        self._alarm.close()
        self._context.term()

    def _send_queued(self) -> None:
        while self._outbox:
            rank, channel, frames = self._outbox.popleft()
            self._sockets[rank, channel].send_multipart(frames)

    def _read(self, socket: zmq.Socket[bytes], rank: int, channel: Channel) -> None:
        with contextlib.suppress(zmq.Again):  # nothing more to read: wanted
            while True:
                frames = socket.recv_multipart(zmq.DONTWAIT)
                self._take((rank,), channel, self._signer.opened(frames))
