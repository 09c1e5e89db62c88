"""Channels to the ranks; sockets on this machine are owned by one reader thread of the kernel.

A ZMQ socket may only be used by one thread: others pass frames through a queue and wake the reader.
jupyter_client signs and verifies messages. The iopub sockets have no high-water mark, because ZMQ
would silently drop messages above it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

import zmq
from jupyter_client.connect import write_connection_file
from jupyter_client.session import DELIM

from nbdist.protocol.signing import MessageSigner

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

Channel = Literal["shell", "control", "iopub"]
Message = dict[str, Any]
CHANNELS: dict[Channel, int] = {
    "shell": zmq.DEALER,
    "control": zmq.DEALER,
    "iopub": zmq.SUB,
}
RECONNECT_MS = 5  # ZMQ's default of 100 ms would dominate a restart
QUIET_POLL_S = 0.5
BUSY_POLL_S = 0.04
CLOSE_S = 5.0


class MessageListener(Protocol):
    """Receives the ranks' messages, on the reader thread."""

    def on_message(self, ranks: Sequence[int], channel: Channel, message: Message) -> None:
        """Handle a message that these ranks have sent."""

    def on_idle(self) -> bool:
        """Run periodic work; return True to be called again soon."""


ConnectionInfo = Mapping[str, Any]
"""Content of a rank's connection file, as jupyter_client defines it."""


def write_connections(
    folder: Path, *, world_size: int, key: bytes, first: int = 0
) -> list[ConnectionInfo]:
    """Write a connection file (0600) for every rank; `jupyter console --existing` reads them.

    Args:
        folder: private folder, also for the sockets.
        world_size: number of ranks on this machine.
        key: key that signs messages.
        first: first of these ranks.
    """
    return [
        write_connection_file(
            str(folder / f"rank{rank}.json"), ip=str(folder / f"r{rank}"), transport="ipc", key=key
        )[1]
        for rank in range(first, first + world_size)
    ]


class RankChannels(ABC):
    """Signed channels to all ranks of one start, independent of the transport.

    A subclass starts the thread once it has connected.

    Args:
        key: signing key.
        reader: receives verified messages.
    """

    def __init__(self, key: bytes, reader: MessageListener) -> None:
        self._reader = reader
        self._signer = MessageSigner(key=key, username="nbdist")
        self._unsigned_logged = self._idle_failed = self._closing = False
        self._thread = threading.Thread(target=self._serve, name="nbdist-reader", daemon=True)

    def send_request(
        self,
        ranks: Sequence[int],
        channel: Channel,
        kind: str,
        content: Any = None,
        *,
        metadata: dict[str, Any] | None = None,
        message_id: str | None = None,
        buffers: Sequence[bytes | memoryview] = (),
    ) -> None:
        """Have the reader thread send one request to some ranks; callable from any thread."""
        message = self._signer.msg(kind, content or {}, metadata=metadata)
        if message_id is not None:
            message["header"]["msg_id"] = message["msg_id"] = message_id
        self._queue(ranks, channel, [*self._signer.serialize(message), *map(bytes, buffers)])
        self.wake()

    @abstractmethod
    def wake(self) -> None:
        """Wake the reader thread to send queued requests and call the reader's `on_idle`."""

    def close(self) -> None:
        """End the reader thread and close the channels."""
        self._closing = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    @abstractmethod
    def _queue(self, ranks: Sequence[int], channel: Channel, frames: list[bytes]) -> None:
        """Queue frames to some ranks."""

    @abstractmethod
    def _transfer(self, within_s: float) -> bool:
        """Send and receive what is there; return True if woken, or if nothing came in time."""

    def _serve(self) -> None:
        timeout_s, idle_due = 0.0, time.monotonic()
        while not self._closing:
            if not self._transfer(timeout_s) and time.monotonic() < idle_due:
                continue
            try:
                busy, self._idle_failed = self._reader.on_idle(), False
            except Exception:  # messages are still read
                busy = True
                if not self._idle_failed:  # log it once, not at every poll
                    self._idle_failed = True
                    log.exception("periodic work of the session failed")
            timeout_s = BUSY_POLL_S if busy else QUIET_POLL_S
            idle_due = time.monotonic() + timeout_s

    def _deliver(self, ranks: Sequence[int], channel: Channel, frames: list[bytes]) -> None:
        """Verify a message and pass it to the reader; log errors and continue."""
        try:
            message = self._signer.deserialize(frames[frames.index(DELIM) + 1 :])
        except Exception:  # noqa: BLE001 - unverified frames can raise anything
            if not self._unsigned_logged:
                self._unsigned_logged = True
                log.warning("rank %d, %s: dropped a message that is not signed", ranks[0], channel)
            return
        try:
            self._reader.on_message(ranks, channel, message)
        except Exception:
            # user code can send anything to the sockets of its own kernel
            log.exception("rank %d, %s: cannot process a message", ranks[0], channel)


def connect_socket(
    context: zmq.Context[Any], connection: ConnectionInfo, channel: Channel
) -> zmq.Socket[bytes]:
    """Connect to a rank. ZMQ retries until the rank has bound its sockets."""
    rank_socket: zmq.Socket[bytes] = context.socket(CHANNELS[channel])
    rank_socket.linger = 0
    rank_socket.set_hwm(0)
    rank_socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    if channel == "iopub":
        rank_socket.subscribe(b"")
    rank_socket.connect(f"ipc://{connection['ip']}-{connection[f'{channel}_port']}")
    return rank_socket


class PollWaker:
    """Wakes a thread that polls ZMQ sockets, from any other thread."""

    def __init__(self) -> None:
        self._reading, self._writing = socket.socketpair()
        self._reading.settimeout(0)
        self._writing.settimeout(0)
        self.fd = self._reading.fileno()
        """To be polled."""

    def wake(self) -> None:
        """Wake the thread."""
        with contextlib.suppress(OSError):  # it is woken already, or closes its sockets
            self._writing.send(b"\0")

    def clear(self) -> None:
        """Clear pending wake-ups, on the polling thread."""
        with contextlib.suppress(BlockingIOError):
            self._reading.recv(4096)

    def close(self) -> None:
        """Close both ends."""
        self._reading.close()
        self._writing.close()


class LocalRankChannels(RankChannels):
    """Channels to ranks on this machine."""

    def __init__(self, connections: list[ConnectionInfo], reader: MessageListener) -> None:
        """Connect. ZMQ retries until the ranks have bound their sockets."""
        super().__init__(connections[0]["key"].encode(), reader)
        self._context = zmq.Context()
        self._outbox: deque[tuple[int, Channel, list[bytes]]] = deque()
        self._sockets = {
            (rank, channel): connect_socket(self._context, connection, channel)
            for rank, connection in enumerate(connections)
            for channel in CHANNELS
        }
        self._waker = PollWaker()
        self._places = {socket: place for place, socket in self._sockets.items()}
        self._poller = zmq.Poller()
        for polled in (*self._places, self._waker.fd):
            self._poller.register(polled, zmq.POLLIN)
        self._thread.start()

    def _queue(self, ranks: Sequence[int], channel: Channel, frames: list[bytes]) -> None:
        self._outbox.extend((rank, channel, frames) for rank in ranks)

    def wake(self) -> None:
        """Wake the reader thread to send queued requests and call the reader's `on_idle`."""
        self._waker.wake()

    def _transfer(self, within_s: float) -> bool:
        ready = dict(self._poller.poll(int(within_s * 1000)))
        is_woken = self._waker.fd in ready
        if is_woken:
            self._waker.clear()
        while self._outbox:
            rank, channel, frames = self._outbox.popleft()
            self._sockets[rank, channel].send_multipart(frames)
        for readable in ready.keys() & self._places.keys():
            rank, channel = self._places[readable]
            with contextlib.suppress(zmq.Again):  # nothing more to read
                while True:
                    frames = readable.recv_multipart(zmq.DONTWAIT)
                    self._deliver((rank,), channel, frames)
        return is_woken or not ready

    def _serve(self) -> None:
        super()._serve()
        for place in self._places:
            place.close(0)
        self._waker.close()
        self._context.term()
