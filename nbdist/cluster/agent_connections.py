"""The kernel's connections to the node agents, and the key-value store for process groups.

Runs in the kernel. Each agent connects to one encrypted socket with its own key pair, created for
this session; connections without a valid key are rejected during the handshake. It is the only
network port of a session. Ranks access the store through their agent: torch's TCPStore would
listen on every interface without authentication.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from nbdist.cluster import protocol
from nbdist.cluster.protocol import HEARTBEAT_S, MAX_MESSAGES_PER_POLL, NODE_TIMEOUT_S
from nbdist.cluster.rank_channels import PollWaker
from nbdist.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.cluster.protocol import KeyValueMessage

    MessageCallback = Callable[[int, protocol.Message, list[bytes]], None]
    DisconnectCallback = Callable[[int, str], None]

log = logging.getLogger(__name__)

CLOSE_S = 5.0
ZERO_COPY_MIN_BYTES = 1 << 16
"""Longer frames are sent without a copy."""
_ZAP = "inproc://zeromq.zap.01"
_SILENT_S = 3.0
"""A connection that closes after a longer silence was cut off; otherwise the agent has ended."""


class AgentConnections:
    """Connections of one session to its nodes.

    Args:
        address: address of this machine to listen on.
        on_message: called with each message and the index of its node, on the server's thread;
            must not block.
        on_disconnect: called once per node with the reason when its connection ends; the same
            applies.

    Raises:
        StartError: this machine does not have the address.
    """

    def __init__(
        self, address: str, *, on_message: MessageCallback, on_disconnect: DisconnectCallback
    ) -> None:
        """Start to listen; no keys are accepted yet."""
        self._on_message, self._on_disconnect = on_message, on_disconnect
        self.public_key, self._secret = (key.decode() for key in zmq.curve_keypair())
        self._keys: dict[bytes, int] = {}
        """Node indices by public key as bytes."""
        self._routes: dict[int, bytes] = {}
        """Routing ids of the connections by node index."""
        self._nodes: dict[bytes, int] = {}
        """Node indices by routing id."""
        self._last_message_at: dict[int, float] = {}
        self._outbox: deque[tuple[int, list[bytes]]] = deque()
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        socket = self._socket = self._context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.set_hwm(0)
        socket.ipv6 = ":" in address
        socket.curve_server = True
        socket.curve_secretkey = self._secret.encode()
        socket.zap_domain = b"nbdist"
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.router_mandatory = True  # sending to a lost node raises
        # ZMQ's own threads answer heartbeats, also while the notebook computes
        socket.heartbeat_ivl = int(HEARTBEAT_S * 1000)
        socket.heartbeat_timeout = int(NODE_TIMEOUT_S * 1000)
        try:
            socket.bind(f"tcp://[{address}]:*" if socket.ipv6 else f"tcp://{address}:*")
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise StartError(
                f"Cannot listen on {address}: {error}. Use an address of this machine."
            ) from error
        self.address: str = str(socket.get_string(zmq.LAST_ENDPOINT))
        self._waker = PollWaker()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="nbdist-hub", daemon=True)
        self._thread.start()

    def create_node_keys(self, index: int) -> tuple[str, str]:
        """Create the key pair of a node: public and secret key, in Z85."""
        public, secret = zmq.curve_keypair()
        self._keys[z85.decode(public)] = index
        return public.decode(), secret.decode()

    def queue_message(self, index: int, message: protocol.Message, *frames: bytes) -> None:
        """Queue a message to a node, from any thread; `wake()` sends queued messages."""
        self._outbox.append((index, protocol.pack_message(message, *frames)))

    def send(self, index: int, message: protocol.Message, *frames: bytes) -> None:
        """Send a message to a node, from any thread."""
        self.queue_message(index, message, *frames)
        self.wake()

    def wake(self) -> None:
        """Send queued messages."""
        if threading.current_thread() is not self._thread:  # which sends before it polls again
            self._waker.wake()

    def close(self) -> None:
        """Send queued messages, then close all connections."""
        self._closing = True
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    # -- the hub's thread

    def _serve(self) -> None:
        poller = zmq.Poller()
        for polled in (self._socket, self._zap, self._waker.fd):
            poller.register(polled, zmq.POLLIN)
        next_heartbeat_at = 0.0
        while not self._closing:
            self._send_queued()
            ready = dict(poller.poll(0 if self._outbox else int(HEARTBEAT_S * 500)))
            if self._zap in ready:
                self._authenticate()
            if self._waker.fd in ready:
                self._waker.clear()
            if self._socket in ready:
                with contextlib.suppress(zmq.Again):  # nothing more to read
                    for _ in range(MAX_MESSAGES_PER_POLL):
                        sender = self._socket.recv(zmq.DONTWAIT, copy=False)  # it has the User-Id
                        self._receive(sender, self._socket.recv_multipart(zmq.DONTWAIT))
            now = time.monotonic()
            if now >= next_heartbeat_at:
                next_heartbeat_at = now + HEARTBEAT_S
                beat = protocol.pack_message(protocol.Heartbeat())
                for index in list(self._routes):
                    self._send_frames(index, beat)
        self._send_queued()
        self._socket.close(int(CLOSE_S * 100))  # linger half a second for the last messages
        self._zap.close(0)
        self._waker.close()
        self._context.term()

    def _authenticate(self) -> None:
        """Accept or reject the public key of a new connection (ZMQ RFC 27)."""
        version, request, _domain, _address, _routing, mechanism, *keys = self._zap.recv_multipart()
        index = self._keys.get(keys[0]) if mechanism == b"CURVE" and keys else None
        code, text = (b"400", b"not let in") if index is None else (b"200", b"OK")
        user = b"" if index is None else b"%d" % index
        self._zap.send_multipart([version, request, code, text, user, b""])

    def _receive(self, sender: zmq.Frame, frames: list[bytes]) -> None:
        index = self._nodes.get(sender.bytes)
        if index is None:
            index = int(sender.get("User-Id"))
            if index in self._routes:
                return  # a second connection with the same key
            self._routes[index], self._nodes[sender.bytes] = sender.bytes, index
        self._last_message_at[index] = time.monotonic()
        try:
            message, rest = protocol.unpack_message(frames)
            if isinstance(message, protocol.AgentExited):
                self._disconnect(index, message.why)
            elif not isinstance(message, protocol.Heartbeat):
                self._on_message(index, message, rest)
        except Exception:
            # continue with the other nodes' messages
            log.exception("node %d: cannot process a message", index)

    def _send_queued(self) -> None:
        while self._outbox:
            self._send_frames(*self._outbox.popleft())

    def _send_frames(self, index: int, frames: list[bytes]) -> None:
        route = self._routes.get(index)
        if route is None:
            return  # lost, which was reported
        try:
            self._socket.send_multipart(
                [route, *frames], copy=len(frames[-1]) < ZERO_COPY_MIN_BYTES
            )
        except zmq.ZMQError:
            silent_s = time.monotonic() - self._last_message_at[index]
            reason = "lost its agent, which ended"
            if silent_s >= _SILENT_S:
                reason = f"was cut off: no message for {silent_s:.0f} s"
            self._disconnect(index, reason)

    def _disconnect(self, index: int, reason: str) -> None:
        if route := self._routes.pop(index, None):
            del self._nodes[route]
        self._on_disconnect(index, reason)


@dataclass(slots=True)
class _WaitingRequest:
    node: int
    request: KeyValueMessage
    ident: bytes
    until: float


class KeyValueStore:
    """Key-value store for the ranks of one start; a request for missing keys waits for them.

    Args:
        reply: sends a reply to a node; the frames are the requester and at most one value.
    """

    def __init__(self, reply: Callable[..., object]) -> None:
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
        key = next(iter(request.keys), "")
        before = self._values.get(key, b"")
        number, result = 0, list[bytes]()
        match request.op:
            case "get" | "wait":  # its keys are set
                result = [before]
            case "set":
                self._values[key] = values[0]
            case "append":
                self._values[key] = before + values[0]
            case "add":
                number = int(before or b"0") + request.number
                self._values[key] = b"%d" % number
            case "compare_set":
                expected, after = values
                if before == expected:
                    self._values[key] = after
                # as torch's own stores: a missing key returns the expected value
                result = [self._values.get(key, expected)]
            case "check":
                number = int(self._has(request.keys))
            case "delete":
                number = int(self._values.pop(key, None) is not None)
            case "count":
                number = len(self._values)
            case op:
                raise ValueError(f"unknown store operation {op!r}")
        self._reply(node, replace(request, keys=[], number=number), ident, *result)
