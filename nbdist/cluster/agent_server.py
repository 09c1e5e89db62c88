"""The kernel's end of the connections to the nodes: one encrypted socket, one port, one thread.

Runs in the kernel. Every node's agent connects to this port with a key pair of its own that was
made for this session; whoever has none is refused before a byte of a message is read. Nothing
else of a session listens on the network.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from nbdist.cluster import protocol
from nbdist.cluster.protocol import AT_ONCE, BEAT_S, CUT_OFF_S
from nbdist.cluster.rank_channels import Alarm
from nbdist.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable

    Take = Callable[[int, protocol.Message, list[bytes]], None]
    Gone = Callable[[int, str], None]

log = logging.getLogger(__name__)

CLOSE_S = 5.0
COPIED_BYTES = 1 << 16
"""Longer frames are sent from where they are."""
_ZAP = "inproc://zeromq.zap.01"
_SILENT_S = 3.0
"""A connection that ends after so long a silence was cut; else the agent has ended."""


class Hub:
    """The connections of one session to its nodes.

    Args:
        reach: address of this machine to listen on.
        take: gets each message with the number of its node; on the hub's thread, may not wait.
        gone: called once for each node whose connection has ended, with the cause; likewise.

    Raises:
        StartError: this machine has no such address.
    """

    def __init__(self, reach: str, *, take: Take, gone: Gone) -> None:
        """Listen; nobody is let in yet."""
        self._take, self._gone = take, gone
        self.public, self._secret = (key.decode() for key in zmq.curve_keypair())
        self._nodes: dict[bytes, int] = {}
        """Public keys of the nodes, as bytes, with their numbers."""
        self._routes: dict[bytes, int] = {}
        """Connections that have said hello."""
        self._heard: dict[int, float] = {}
        self._outbox: deque[tuple[int, list[bytes]]] = deque()
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._socket = self._listening(reach)
        self._alarm = Alarm(self._context)
        self._closing = False
        self._beat_due = 0.0
        self._thread = threading.Thread(target=self._serve, name="nbdist-hub", daemon=True)
        self._thread.start()

    def _listening(self, reach: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.set_hwm(0)
        socket.ipv6 = ":" in reach
        socket.curve_server = True
        socket.curve_secretkey = self._secret.encode()
        socket.zap_domain = b"nbdist"
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.router_mandatory = True  # a node that is gone is an error, not silence
        # answered by ZMQ's own threads, also while the notebook computes
        socket.heartbeat_ivl = int(BEAT_S * 1000)
        socket.heartbeat_timeout = int(CUT_OFF_S * 1000)
        try:
            socket.bind(f"tcp://[{reach}]:*" if socket.ipv6 else f"tcp://{reach}:*")
        except zmq.ZMQError as error:
            self._context.destroy(0)
            msg = f"This machine cannot listen on {reach}: {error}. Name an address of its own."
            raise StartError(msg) from error
        self.address: str = str(socket.get_string(zmq.LAST_ENDPOINT))
        return socket

    def let_in(self, index: int) -> tuple[str, str]:
        """Make the key pair of a node: public and secret, in Z85."""
        public, secret = zmq.curve_keypair()
        self._nodes[z85.decode(public)] = index
        return public.decode(), secret.decode()

    def silent_s(self, index: int) -> float:
        """Since when nothing was heard of a node."""
        return time.monotonic() - self._heard.get(index, time.monotonic())

    def post(self, index: int, message: protocol.Message, *frames: bytes) -> None:
        """Queue a message to a node, from any thread; `wake()` sends what is queued."""
        self._outbox.append((index, protocol.pack(message, *frames)))

    def send(self, index: int, message: protocol.Message, *frames: bytes) -> None:
        """Send a message to a node, from any thread."""
        self.post(index, message, *frames)
        self.wake()

    def wake(self) -> None:
        """Have what is queued sent."""
        if threading.current_thread() is self._thread:
            return  # it looks before it waits again
        self._alarm.ring()

    def close(self) -> None:
        """Send what is queued, then end all connections."""
        self._closing = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    # -- the hub's thread

    def _serve(self) -> None:
        poller = zmq.Poller()
        for socket in (self._socket, self._zap, self._alarm.socket):
            poller.register(socket, zmq.POLLIN)
        while not self._closing:
            self._send_queued()
            ready = dict(poller.poll(0 if self._outbox else int(BEAT_S * 500)))
            if self._zap in ready:
                self._judge()
            if self._alarm.socket in ready:
                self._alarm.silence()
            if self._socket in ready:
                self._read()
            self._beat()
        self._send_queued()
        self._socket.close(int(CLOSE_S * 100))  # what was said last gets half a second
        self._zap.close(0)
        self._alarm.close()
        self._context.term()

    def _judge(self) -> None:
        """Say whether the key of somebody who connects is one of a node (ZMQ's RFC 27)."""
        version, request, _domain, _address, _routing, mechanism, *keys = self._zap.recv_multipart()
        index = self._nodes.get(keys[0]) if mechanism == b"CURVE" and keys else None
        code, text = (b"400", b"not let in") if index is None else (b"200", b"OK")
        user = b"" if index is None else b"%d" % index
        self._zap.send_multipart([version, request, code, text, user, b""])

    def _read(self) -> None:
        with contextlib.suppress(zmq.Again):  # nothing more to read: wanted
            for _ in range(AT_ONCE):
                sender = self._socket.recv(zmq.DONTWAIT, copy=False)  # it says whose key it was
                self._receive(sender, self._socket.recv_multipart(zmq.DONTWAIT))

    def _receive(self, sender: zmq.Frame, frames: list[bytes]) -> None:
        route = sender.bytes
        index = self._routes.get(route)
        if index is None:
            index = int(sender.get("User-Id"))
            if index in self._routes.values():
                return  # a second one with the same key
            self._routes[route] = index
        self._heard[index] = time.monotonic()
        try:
            message, rest = protocol.unpack(frames)
            if isinstance(message, protocol.Bye):
                del self._routes[route]
                self._gone(index, message.why)
            elif not isinstance(message, protocol.Beat):
                self._take(index, message, rest)
        except Exception:
            # whatever one node sends, the others' messages are read after it
            log.exception("node %d: a message that nobody can read", index)

    def _beat(self) -> None:
        now = time.monotonic()
        if now < self._beat_due:
            return
        self._beat_due = now + BEAT_S
        beat = protocol.pack(protocol.Beat())
        for route, index in list(self._routes.items()):
            self._put(route, index, beat)

    def _send_queued(self) -> None:
        routes = {index: route for route, index in self._routes.items()}
        while self._outbox:
            index, frames = self._outbox.popleft()
            if index not in routes:
                continue  # it is gone, which was said
            self._put(routes[index], index, frames)

    def _put(self, route: bytes, index: int, frames: list[bytes]) -> None:
        try:
            self._socket.send_multipart([route, *frames], copy=len(frames[-1]) < COPIED_BYTES)
        except zmq.ZMQError:
            if self._routes.pop(route, None) is not None:
                self._gone(index, self._why(index))

    def _why(self, index: int) -> str:
        """Why a connection has ended."""
        silent_s = self.silent_s(index)
        if silent_s < _SILENT_S:
            return "lost its agent, which ended"
        return f"was cut off: nothing was heard of it for {silent_s:.0f} s"
