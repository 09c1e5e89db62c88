"""The kernel's connections to the node agents: one encrypted socket, one port, one thread.

Runs in the kernel. Each agent connects to this port with its own key pair, created for this
session; connections without a valid key are rejected during the handshake. It is the only network
port of a session.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from nbdist.cluster import protocol
from nbdist.cluster.protocol import HEARTBEAT_S, MAX_MESSAGES_PER_POLL, NODE_TIMEOUT_S
from nbdist.cluster.rank_channels import PollWaker
from nbdist.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable

    MessageCallback = Callable[[int, protocol.Message, list[bytes]], None]
    DisconnectCallback = Callable[[int, str], None]

log = logging.getLogger(__name__)

CLOSE_S = 5.0
ZERO_COPY_MIN_BYTES = 1 << 16
"""Longer frames are sent without a copy."""
_ZAP = "inproc://zeromq.zap.01"
_SILENT_S = 3.0
"""A connection that closes after a longer silence was cut off; otherwise the agent has ended."""


@dataclass(slots=True, eq=False)
class _AgentConnection:
    """The agent of one node, known by the key that was created for it."""

    index: int
    route: bytes | None = None
    """Routing id of its connection; None without one."""
    last_message_at: float = 0.0


class AgentConnections:
    """Connections of one session to its nodes.

    Args:
        reach: address of this machine to listen on.
        take: called with each message and the index of its node, on the server's thread; must
            not block.
        on_gone: called once per node with the reason when its connection ends; the same applies.

    Raises:
        StartError: this machine does not have the address.
    """

    def __init__(
        self, address: str, *, on_message: MessageCallback, on_disconnect: DisconnectCallback
    ) -> None:
        """Start to listen; no keys are accepted yet."""
        self._on_message, self._on_disconnect = on_message, on_disconnect
        self.public_key, self._secret = (key.decode() for key in zmq.curve_keypair())
        self._agents: dict[int, _AgentConnection] = {}
        """By node index."""
        self._keys: dict[bytes, int] = {}
        """Node indices by public key as bytes."""
        self._connected: dict[bytes, _AgentConnection] = {}
        """By routing id of the connection."""
        self._outbox: deque[tuple[int, list[bytes]]] = deque()
        self._context = zmq.Context()
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._socket = self._bind_socket(address)
        self._waker = PollWaker(self._context)
        self._closing = False
        self._next_heartbeat_at = 0.0
        self._thread = threading.Thread(target=self._serve, name="nbdist-hub", daemon=True)
        self._thread.start()

    def _bind_socket(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
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
            msg = f"Cannot listen on {address}: {error}. Use an address of this machine."
            raise StartError(msg) from error
        self.address: str = str(socket.get_string(zmq.LAST_ENDPOINT))
        return socket

    def create_node_keys(self, index: int) -> tuple[str, str]:
        """Create the key pair of a node: public and secret key, in Z85."""
        public, secret = zmq.curve_keypair()
        self._agents[index] = _AgentConnection(index)
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
        for socket in (self._socket, self._zap, self._waker.socket):
            poller.register(socket, zmq.POLLIN)
        while not self._closing:
            self._send_queued()
            ready = dict(poller.poll(0 if self._outbox else int(HEARTBEAT_S * 500)))
            if self._zap in ready:
                self._authenticate()
            if self._waker.socket in ready:
                self._waker.clear()
            if self._socket in ready:
                self._read()
            self._send_heartbeats()
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

    def _read(self) -> None:
        with contextlib.suppress(zmq.Again):  # nothing more to read
            for _ in range(MAX_MESSAGES_PER_POLL):
                sender = self._socket.recv(zmq.DONTWAIT, copy=False)  # the frame has the User-Id
                self._receive(sender, self._socket.recv_multipart(zmq.DONTWAIT))

    def _receive(self, sender: zmq.Frame, frames: list[bytes]) -> None:
        agent = self._connected.get(sender.bytes)
        if agent is None:
            agent = self._agents[int(sender.get("User-Id"))]
            if agent.route is not None:
                return  # a second connection with the same key
            agent.route = sender.bytes
            self._connected[agent.route] = agent
        agent.last_message_at = time.monotonic()
        try:
            message, rest = protocol.unpack_message(frames)
            if isinstance(message, protocol.AgentExited):
                self._disconnect(agent, message.why)
            elif not isinstance(message, protocol.Heartbeat):
                self._on_message(agent.index, message, rest)
        except Exception:
            # continue with the other nodes' messages
            log.exception("node %d: cannot process a message", agent.index)

    def _send_heartbeats(self) -> None:
        now = time.monotonic()
        if now < self._next_heartbeat_at:
            return
        self._next_heartbeat_at = now + HEARTBEAT_S
        beat = protocol.pack_message(protocol.Heartbeat())
        for agent in list(self._connected.values()):
            self._send_frames(agent, beat)

    def _send_queued(self) -> None:
        while self._outbox:
            index, frames = self._outbox.popleft()
            self._send_frames(self._agents[index], frames)

    def _send_frames(self, agent: _AgentConnection, frames: list[bytes]) -> None:
        if agent.route is None:
            return  # lost, which was reported
        try:
            self._socket.send_multipart(
                [agent.route, *frames], copy=len(frames[-1]) < ZERO_COPY_MIN_BYTES
            )
        except zmq.ZMQError:
            silent_s = time.monotonic() - agent.last_message_at
            reason = "lost its agent, which ended"
            if silent_s >= _SILENT_S:
                reason = f"was cut off: no message for {silent_s:.0f} s"
            self._disconnect(agent, reason)

    def _disconnect(self, agent: _AgentConnection, reason: str) -> None:
        """Forget a connection that has ended, and report it."""
        if agent.route is not None:
            del self._connected[agent.route]
            agent.route = None
        self._on_disconnect(agent.index, reason)
