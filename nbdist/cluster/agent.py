"""Agent of one node: its launcher, the sockets of its ranks, file transfers, and the heartbeat.

`python -m nbdist.cluster.agent`, started on the node by the cluster (Ray, Slurm), with the ticket
on stdin's first line. It forwards messages in both directions on one thread and opens no port. It
ends everything when the kernel or the connection to it is lost, or at the end of stdin, also after
the parent was killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import zmq
from zmq.utils.monitor import recv_monitor_message

from nbdist.cluster import launcher_process, protocol
from nbdist.cluster.launcher_process import EXITED, check_descriptors, remove_launch_variables
from nbdist.cluster.local_launcher import LAUNCHER_NAME, Launcher, ignore_message
from nbdist.cluster.protocol import HEARTBEAT_S, MAX_MESSAGES_PER_POLL, AgentCredentials
from nbdist.cluster.rank_channels import CHANNELS, PollWaker, connect_socket, write_connections
from nbdist.cluster.run_dir import shared_folder_error
from nbdist.errors import StartError
from nbdist.hardware import discovery
from nbdist.hardware.telemetry import NodeUsageMonitor
from nbdist.output.dedup import MessageMerger
from nbdist.protocol import messages
from nbdist.signal_handling import TerminationSignal

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.cluster.rank_channels import Channel

AGENT_LEFT_BEHIND = 3
"""Exit code when the parent has ended."""
END_S = 9.5
"""Time for the agent to end launcher and ranks, which otherwise end after it."""
POLL_INTERVAL_S = 0.7
"""Interval of checking the processes."""
LAST_MESSAGE_TIMEOUT_MS = 500
"""Time to send the agent's last message."""
CONNECT_TIMEOUT_S = 30.0
"""Timeout of the connection to the kernel."""
_DISCONNECT_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
_REJECT_EVENTS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_NODE_VARIABLES = (
    "HOSTNAME",
    "TMPDIR",
    "XDG_RUNTIME_DIR",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
)
"""Environment variables of the machine: the node's own values are kept."""
_NODE_VARIABLE_PREFIXES = ("SLURM_", "RAY_")


class SessionEnded(Exception):  # noqa: N818 - not an error: the session has ended
    """The session has ended, or the connection to the kernel is lost."""


class NodeAgent:
    """Serves one session.

    Args:
        ticket: ticket of this node.
        launcher: class of the launcher.
    """

    def __init__(self, ticket: AgentCredentials, *, launcher: type[Launcher] = Launcher) -> None:
        """Connect. `serve` starts the launcher."""
        self._ticket, self._make_launcher = ticket, launcher
        self._outbox: deque[messages.LauncherMessage | protocol.AgentReply] = deque()
        """What other threads send to the kernel: the launcher's messages, and slow replies."""
        self._watch = NodeUsageMonitor(lambda *reply: self._queue(protocol.AgentReply(*reply)))
        self._waker = PollWaker()
        self._context = zmq.Context()
        hub = self._kernel_socket = self._context.socket(zmq.DEALER)
        hub.set_hwm(0)
        hub.ipv6 = "[" in ticket.hub
        hub.curve_serverkey = ticket.hub_key.encode()
        hub.curve_publickey = ticket.public.encode()
        hub.curve_secretkey = ticket.secret.encode()
        # ZMQ's own threads send the heartbeats, also while a notebook computes
        hub.heartbeat_ivl = int(HEARTBEAT_S * 1000)
        hub.heartbeat_timeout = int(ticket.lease_s * 1000)
        hub.reconnect_ivl = -1  # a reconnect would lose messages
        monitored = zmq.EVENT_HANDSHAKE_SUCCEEDED | _DISCONNECT_EVENTS | _REJECT_EVENTS
        self._monitor = self._kernel_socket.get_monitor_socket(monitored)
        self._kernel_socket.connect(ticket.hub)
        self._poller = zmq.Poller()
        for polled in (self._kernel_socket, self._monitor, self._waker.fd):
            self._poller.register(polled, zmq.POLLIN)
        self._sockets: dict[zmq.Socket[bytes], tuple[int, Channel]] = {}
        self._places: dict[tuple[int, str], zmq.Socket[bytes]] = {}
        self._mergers: dict[Channel, MessageMerger] = {}
        self._refused: set[tuple[int, Channel]] = set()
        """Ranks and channels with unsigned messages."""
        self._store: zmq.Socket[bytes] | None = None
        self._pids: dict[int, int] = {}
        self._gpus: dict[int, str] = {}
        """UUIDs by rank; "" for CPU ranks."""
        self._states: dict[str, str] = {}
        self._is_connected = self._is_disconnected = False
        self._started_at = time.monotonic()
        self._due = self._next_process_check = 0.0
        self._launcher: Launcher
        self._folder, self._generation = Path(), 0

    # -- life

    def serve(self) -> None:
        """Forward messages until the session ends."""
        try:
            launcher = self._launcher = self._make_launcher(self._ticket.kind)
            try:
                launcher.listener = self._queue
                hello = protocol.AgentHello(
                    launcher=launcher.process.pid,
                    run_dir=str(launcher.run_dir.path),
                    bulk_dir=str(launcher.run_dir.payload_dir),
                    machine=discovery.discover_machine().to_json(),
                )
                self._send(hello)
                while True:
                    self._poll_once()
            finally:
                launcher.listener = ignore_message
                launcher.close()
        except SessionEnded:
            self._close("lost its agent, which ended")
        except (StartError, OSError) as error:
            self._close(f"failed: {error}")
        except SystemExit:
            self._close("was terminated")
            raise
        except BaseException as error:
            self._close(f"failed: agent raised {type(error).__name__}: {error}")
            raise

    def report_sigterm(self) -> None:
        """Report the first SIGTERM to the kernel, which saves and then ends this agent.

        Call it on the main thread.
        """

        def report() -> None:
            self._queue(messages.TerminationNotice("SIGTERM to the agent"))
            time.sleep(messages.TERMINATION_GRACE_S)
            sigterm.deliver()

        sigterm = TerminationSignal(report)

    def _close(self, reason: str) -> None:
        """Close all connections; send the reason to the kernel if it is connected."""
        self._watch.close()
        self._close_rank_sockets()
        if not self._is_disconnected:
            self._send(protocol.AgentExited(reason))
        self._kernel_socket.disable_monitor()
        # linger 0 for a lost connection: ZMQ would wait for it forever
        self._kernel_socket.close(0 if self._is_disconnected else LAST_MESSAGE_TIMEOUT_MS)
        self._monitor.close(0)
        self._context.term()
        self._waker.close()

    def _poll_once(self) -> None:
        # wait until a held message is due, at most half a heartbeat
        dues = [merger.next_due_at for merger in self._mergers.values()]
        left_s = min((due for due in dues if due is not None), default=math.inf) - time.monotonic()
        timeout_ms = math.ceil(max(0.0, min(HEARTBEAT_S / 2, left_s)) * 1000)
        ready = dict(self._poller.poll(timeout_ms))
        if self._monitor in ready:
            event = recv_monitor_message(self._monitor)["event"]
            self._is_connected = self._is_connected or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event & (_DISCONNECT_EVENTS | _REJECT_EVENTS):
                self._is_disconnected = True
                raise SessionEnded
        if self._waker.fd in ready:
            self._waker.clear()
        self._send_queued()
        if self._kernel_socket in ready:
            self._read_kernel()
        if self._store is not None and self._store in ready:
            self._read_store(self._store)
        for ready_socket in ready.keys() & self._sockets.keys():
            self._read_rank(ready_socket)
        now = time.monotonic()
        self._forward_messages(now)
        if now >= self._due:
            self._due = now + HEARTBEAT_S
            self._send(protocol.Heartbeat())
        if now >= self._next_process_check:
            self._next_process_check = now + POLL_INTERVAL_S
            self._report_process_states()
        if not self._is_connected and now - self._started_at > CONNECT_TIMEOUT_S:
            self._is_disconnected = True
            raise SessionEnded

    def _send(self, message: protocol.Message, *frames: bytes) -> None:
        self._kernel_socket.send_multipart(protocol.pack_message(message, *frames))

    # -- from the kernel

    def _read_kernel(self) -> None:
        with contextlib.suppress(zmq.Again):  # nothing more to read
            for _ in range(MAX_MESSAGES_PER_POLL):
                message, frames = protocol.unpack_message(
                    self._kernel_socket.recv_multipart(zmq.DONTWAIT)
                )
                self._dispatch(message, frames)

    def _dispatch(self, message: protocol.Message, frames: list[bytes]) -> None:
        match message:
            case protocol.RequestToRanks(generation=self._generation):
                for rank in message.ranks if self._sockets else ():  # the kernel may have closed
                    self._places[rank, message.channel].send_multipart(frames)
            case protocol.LauncherLinkMessage(text=text):
                with contextlib.suppress(StartError):  # the link's thread reports its exit
                    self._send_to_launcher(messages.decode_line(text.encode()))
            case protocol.LaunchNodeRanksRequest():
                self._launch(message)
            case protocol.KeyValueMessage():
                if self._store is not None:
                    ident, *values = frames
                    reply = protocol.pack_message(message, *values)
                    self._store.send_multipart([ident, b"", *reply])
            case protocol.AgentRequest():
                self._handle_request(message, frames)
            case protocol.CloseRankSocketsRequest():
                self._close_rank_sockets()
            case protocol.StopAgentRequest():
                raise SessionEnded

    def _send_to_launcher(self, line: messages.LauncherMessage) -> None:
        if isinstance(line, messages.StopRanksRequest):
            self._launcher.resume_stopped()
        self._launcher.send(line)

    def _launch(self, message: protocol.LaunchNodeRanksRequest) -> None:
        launch = messages.LaunchRanksRequest(**message.fields)
        try:
            check_descriptors(launch.local_world_size)
            interface = interface_for_address(message.address)
            self._open_sockets(launch, message.key)
            own = {
                k: v for k, v in remove_launch_variables(os.environ).items() if _is_node_variable(k)
            }
            given = {k: v for k, v in launch.env.items() if not _is_node_variable(k)}
            self._launcher.send(
                replace(
                    launch,
                    run_dir=str(self._folder),
                    bulk_dir=str(self._launcher.run_dir.payload_dir),
                    env=given | own,
                    cwd=launch.cwd if Path(launch.cwd).is_dir() else str(Path.cwd()),
                    path=[*dict.fromkeys([*launch.path, *sys.path])],
                    interface=interface,
                    store=f"ipc://{self._folder}/store",
                )
            )
        except (OSError, StartError) as error:
            self._queue(messages.AllRanksExited(launch.generation, error=str(error)))

    def _open_sockets(self, launch: messages.LaunchRanksRequest, key: str) -> None:
        """Open the sockets of a start: to the ranks, and the key-value store for them."""
        self._close_rank_sockets()
        self._pids.clear()
        self._states = {}
        self._send(protocol.ProcessStates({}))  # discard states of the previous ranks
        self._generation = launch.generation
        self._folder = self._launcher.make_start_folder(launch.generation)
        connections = write_connections(
            self._folder, world_size=launch.local_world_size, key=key.encode(), first=launch.first
        )
        for number, connection in enumerate(connections):
            for channel in CHANNELS:
                rank_socket = connect_socket(self._context, connection, channel)
                place = launch.first + number, channel
                self._sockets[rank_socket], self._places[place] = place, rank_socket
                self._poller.register(rank_socket, zmq.POLLIN)
        ranks = range(launch.first, launch.first + launch.local_world_size)
        self._gpus = dict(zip(ranks, launch.devices or [""] * len(ranks), strict=True))
        self._mergers = {channel: MessageMerger(ranks, key.encode()) for channel in CHANNELS}
        self._store = self._context.socket(zmq.ROUTER)
        self._store.linger = 0
        self._store.set_hwm(0)
        self._store.bind(f"ipc://{self._folder}/store")
        self._poller.register(self._store, zmq.POLLIN)

    def _close_rank_sockets(self) -> None:
        for open_socket in [*self._sockets, *([self._store] if self._store is not None else [])]:
            self._poller.unregister(open_socket)
            open_socket.close(0)
        self._sockets, self._places, self._mergers, self._store = {}, {}, {}, None

    # -- from launcher and ranks

    def _queue(self, message: messages.LauncherMessage | protocol.AgentReply) -> None:
        """Queue a message to the kernel, from any thread."""
        self._outbox.append(message)
        self._waker.wake()

    def _send_queued(self) -> None:
        while self._outbox:
            message = self._outbox.popleft()
            if isinstance(message, protocol.AgentReply):
                self._send(message)
                continue
            if isinstance(message, messages.RankForked):
                self._pids[message.rank] = message.pid
            self._send(protocol.LauncherLinkMessage(messages.encode_line(message).decode()))

    def _read_rank(self, socket: zmq.Socket[bytes]) -> None:
        rank, channel = self._sockets[socket]
        merger, now = self._mergers[channel], time.monotonic()
        with contextlib.suppress(zmq.Again):  # nothing more to read
            for _ in range(MAX_MESSAGES_PER_POLL):
                if not merger.add_message(rank, socket.recv_multipart(zmq.DONTWAIT), now):
                    self._refused.add((rank, channel))

    def _forward_messages(self, now: float) -> None:
        """Forward the messages that are due, and report ranks that sent unsigned ones."""
        index: list[tuple[tuple[int, ...], str, int]] = []
        all_frames: list[bytes] = []
        for channel, merger in self._mergers.items():
            for ranks, frames in merger.pop_ready(now):
                index.append((ranks, channel, len(frames)))
                all_frames += frames
        index += [((rank,), channel, 0) for rank, channel in self._refused]
        self._refused.clear()
        if index:
            self._send(protocol.MessagesFromRanks(self._generation, index), *all_frames)

    def _read_store(self, store: zmq.Socket[bytes]) -> None:
        """Forward key-value requests of ranks; ignore invalid messages, sent by user code."""
        with contextlib.suppress(zmq.Again):  # nothing more to read
            for _ in range(MAX_MESSAGES_PER_POLL):
                ident, _, *frames = store.recv_multipart(zmq.DONTWAIT)
                with contextlib.suppress(ValueError):
                    message, values = protocol.unpack_message(frames)
                    if isinstance(message, protocol.KeyValueMessage):
                        self._send(message, ident, *values)

    def _report_process_states(self) -> None:
        pids = {f"rank {rank}": pid for rank, pid in self._pids.items()}
        pids[LAUNCHER_NAME] = self._launcher.process.pid
        found = {name: launcher_process.process_status(pid) for name, pid in pids.items()}
        states = {
            n: s for n, s in found.items() if s == EXITED or s in launcher_process.STOPPED_STATUSES
        }
        if states != self._states:
            self._states = states
            self._send(protocol.ProcessStates(states))

    # -- answers

    def _handle_request(self, ask: protocol.AgentRequest, frames: list[bytes]) -> None:
        if ask.what == "stacks":
            threading.Thread(target=self._stacks, args=(ask,), daemon=True).start()
            return
        if ask.what == "now":
            pids = self._pids
            ranks = {rank: (gpu, pids.get(rank)) for rank, gpu in self._gpus.items()}
            self._watch.request_usage(ask.id, ranks)
            return
        files = self._launcher.run_dir
        known: dict[str, Callable[..., Any]] = {  # they take no time
            "receive": files.create_file,
            "chunk": lambda path: files.append_chunk(path, frames[0]),
            "read": files.read_chunk,
            "remove": files.remove_file,
            "size": files.file_size_bytes,
            "sees": shared_folder_error,
            "left": lambda: asdict(self._launcher.crash_artifacts()),
            "log": self._launcher.log_tail,
        }
        try:
            value = known[ask.what](**ask.given)
            if isinstance(value, bytes):
                self._send(protocol.AgentReply(ask.id, len(value)), value)
            else:
                self._send(protocol.AgentReply(ask.id, value))
        except (OSError, ValueError, LookupError) as error:
            self._send(protocol.AgentReply(ask.id, error=f"{type(error).__name__}: {error}"))

    def _stacks(self, ask: protocol.AgentRequest) -> None:
        pids = {int(rank): pid for rank, pid in ask.given["pids"].items()}
        launchers = ask.given["launchers"]
        stacks = self._launcher.dump_stacks(pids, launchers=launchers)
        self._queue(protocol.AgentReply(ask.id, stacks))


def interface_for_address(address: str) -> str:
    """Return the network interface with this address.

    Raises:
        StartError: no interface has it.
    """
    for name, ends in psutil.net_if_addrs().items():
        if any(end.address.partition("%")[0] == address for end in ends):
            return name
    raise StartError(f"No network interface of {socket.gethostname()} has the address {address}.")


def _is_node_variable(name: str) -> bool:
    return name in _NODE_VARIABLES or name.startswith(_NODE_VARIABLE_PREFIXES)


def main(launcher: type[Launcher] = Launcher) -> None:
    """Serve one session on this node until it ends; leave nothing behind.

    Args:
        launcher: class of the launcher.

    Raises:
        ValueError: the first line is not a ticket.
    """
    signal.signal(signal.SIGHUP, _exit)
    signal.signal(signal.SIGTERM, _exit)  # until the agent reports it to the kernel
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)  # only the line: the thread reads the rest
        if not byte:
            sys.exit(AGENT_LEFT_BEHIND)
        line += byte
    threading.Thread(target=_exit_with_parent, name="stdin", daemon=True).start()
    agent = NodeAgent(AgentCredentials.from_json(line.decode()), launcher=launcher)
    agent.report_sigterm()
    agent.serve()


def _exit(*_: object) -> None:
    """Leave `serve`, which then cleans up."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(AGENT_LEFT_BEHIND)


def _exit_with_parent() -> None:
    while os.read(0, 4096):
        continue  # ignore further input
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(END_S)
    os._exit(AGENT_LEFT_BEHIND)


if __name__ == "__main__":
    main()
