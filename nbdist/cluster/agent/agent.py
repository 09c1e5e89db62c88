"""One node's share of a session: its launcher, its ranks' sockets, its files, and the lease.

Runs in a process of its own on the node, on one thread. It passes on what comes from either
side, opens no port, and ends everything when the kernel or the network to it is gone.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import zmq
from zmq.utils.monitor import recv_monitor_message

from nbdist import __version__
from nbdist.cluster import message_batch, process_inspection, protocol
from nbdist.cluster.agent.dedup import Together
from nbdist.cluster.agent.files import Files
from nbdist.cluster.agent.telemetry import Watch
from nbdist.cluster.file_limits import check_descriptors
from nbdist.cluster.interfaces import GONE
from nbdist.cluster.local import LAUNCHER, Launcher
from nbdist.cluster.message_batch import Said
from nbdist.cluster.protocol import AHEAD, AT_ONCE, BEAT_S
from nbdist.cluster.rank_channels import CHANNELS, connected, write_connections
from nbdist.cluster.rank_environment import scrubbed
from nbdist.errors import StartError
from nbdist.hardware import discovery
from nbdist.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.cluster.protocol import Ticket
    from nbdist.cluster.rank_channels import Channel
    from nbdist.cluster.run_dir import RunDir

LOOK_S = 0.7
"""How often the processes are looked at."""
LAST_WORD_MS = 500
"""For the agent's last message to leave."""
MEET_S = 30.0
"""For the connection to the kernel to be there."""
_ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_NODES_OWN = ("HOSTNAME", "TMPDIR", "XDG_RUNTIME_DIR", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
"""Environment that belongs to a machine: here the node's own stays."""
_NODES_OWN_PREFIXES = ("SLURM_", "RAY_")


class Ended(Exception):  # noqa: N818 - no error: the session is over
    """The agent has to end."""


class Agent:
    """Serves one session.

    Args:
        ticket: of this node.
        launcher: makes what starts the ranks.
    """

    def __init__(self, ticket: Ticket, *, launcher: type[Launcher] = Launcher) -> None:
        """Connect; the launcher is started by `serve`."""
        self._ticket, self._make_launcher = ticket, launcher
        self._lines: deque[messages.LinkMessage] = deque()
        """What the launcher said; its link has a thread of its own."""
        self._late: deque[tuple[int, Any]] = deque()
        """Answers of threads that take long."""
        self._watch = Watch(self._answer_late)
        self._awake, self._waker = socket.socketpair()
        self._context = zmq.Context()
        self._hub = self._connected()
        monitored = zmq.EVENT_HANDSHAKE_SUCCEEDED | _ENDS | _REFUSED
        self._monitor = self._hub.get_monitor_socket(monitored)
        self._hub.connect(ticket.hub)
        self._poller = zmq.Poller()
        for one in (self._hub, self._monitor, self._awake):
            self._poller.register(one, zmq.POLLIN)
        self._sockets: dict[zmq.Socket[bytes], tuple[int, Channel]] = {}
        self._places: dict[tuple[int, str], zmq.Socket[bytes]] = {}
        self._together: dict[Channel, Together] = {}
        self._key = b""
        """That signs what ranks say."""
        self._bundles = self._ahead = 0
        """How many were sent since the ranks were started, and how many of them wait to be read."""
        self._refused: set[tuple[int, Channel]] = set()
        """Who has sent what is not signed."""
        self._store: zmq.Socket[bytes] | None = None
        self._pids: dict[int, int] = {}
        self._gpus: dict[int, str] = {}
        """UUIDs by rank; "" for CPU ranks."""
        self._states: dict[str, str] = {}
        self._met = self._cut_off = False
        self._began = time.monotonic()
        self._due = self._look_due = 0.0
        self._launcher: Launcher | None = None
        self._folder, self._generation = Path(), 0

    def _connected(self) -> zmq.Socket[bytes]:
        hub = self._context.socket(zmq.DEALER)
        hub.set_hwm(0)
        hub.ipv6 = "[" in self._ticket.hub
        hub.curve_serverkey = self._ticket.hub_key.encode()
        hub.curve_publickey = self._ticket.public.encode()
        hub.curve_secretkey = self._ticket.secret.encode()
        # the lease: ZMQ's own threads ask and answer, also while a notebook computes
        hub.heartbeat_ivl = int(BEAT_S * 1000)
        hub.heartbeat_timeout = int(self._ticket.lease_s * 1000)
        hub.reconnect_ivl = -1  # what was on its way is lost: a new one would be another session's
        return hub

    # -- life

    def serve(self) -> None:
        """Pass on what comes until the session ends."""
        try:
            self._launcher = self._make_launcher(self._ticket.kind)
            self._launcher.listener = self._hear
            self._files = Files(self._launcher.run_dir)
            self._say(self._hello())
            while True:
                self._turn()
        except Ended:
            self._close("its agent ended")
        except (StartError, OSError) as error:
            self._close(f"has failed: {error}")
        except SystemExit:
            self._close("was told to end")
            raise
        except BaseException as error:
            self._close(f"its agent failed: {type(error).__name__}: {error}")
            raise

    def _hello(self) -> protocol.Hello:
        run_dir = self._run_dir
        return protocol.Hello(
            host=socket.gethostname(),
            pid=os.getpid(),
            launcher=self._started.process.pid,
            run_dir=str(run_dir.path),
            bulk_dir=str(run_dir.bulk),
            versions={
                "python": platform.python_version(),
                "torch": metadata.version("torch"),
                "nbdist": __version__,
            },
            machine=discovery.found().to_json(),
        )

    @property
    def _run_dir(self) -> RunDir:
        return self._started.run_dir

    @property
    def _started(self) -> Launcher:
        if self._launcher is None:
            msg = "there is no launcher"
            raise StartError(msg)
        return self._launcher

    def _close(self, why: str) -> None:
        """End everything here; then, where it can be, the kernel is told why."""
        if self._launcher is not None:
            self._launcher.listener = _nobody
            self._launcher.close()
        self._watch.close()
        self._cut()
        if not self._cut_off:
            self._say(protocol.Bye(why))
        self._hub.disable_monitor()
        # to a connection that is over nothing can be said: ZMQ would wait for ever
        self._hub.close(0 if self._cut_off else LAST_WORD_MS)
        self._monitor.close(0)
        self._context.term()
        self._awake.close()
        self._waker.close()

    def _turn(self) -> None:
        ready = dict(self._poller.poll(self._patience_ms()))
        if self._monitor in ready:
            self._see()
        if self._awake.fileno() in ready:
            self._awake.recv(4096)
        self._pass_on_lines()
        if self._hub in ready:
            self._read_hub()
        if self._store is not None and self._store in ready:
            self._read_store(self._store)
        for one in ready.keys() & self._sockets.keys():
            self._read_rank(one)
        now = time.monotonic()
        self._pass_on(now)
        if now >= self._due:
            self._due = now + BEAT_S
            self._say(protocol.Beat())
        if now >= self._look_due:
            self._look_due = now + LOOK_S
            self._look()
        if not self._met and now - self._began > MEET_S:
            self._cut_off = True
            raise Ended

    def _patience_ms(self) -> int:
        """How long nothing has to be done if nothing comes."""
        dues = [one.due for one in self._together.values() if self._ahead < AHEAD]
        left_s = min((due for due in dues if due is not None), default=math.inf) - time.monotonic()
        return math.ceil(max(0.0, min(BEAT_S / 2, left_s)) * 1000)

    def _see(self) -> None:
        """Take an event of the connection: its end is the end of everything here."""
        event = recv_monitor_message(self._monitor)["event"]
        self._met = self._met or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if event & (_ENDS | _REFUSED):
            self._cut_off = True
            raise Ended

    def _say(self, message: protocol.Message, *frames: bytes) -> None:
        self._hub.send_multipart(protocol.pack(message, *frames))

    # -- from the kernel

    def _read_hub(self) -> None:
        with contextlib.suppress(zmq.Again):  # nothing more to read: wanted
            for _ in range(AT_ONCE):
                message, frames = protocol.unpack(self._hub.recv_multipart(zmq.DONTWAIT))
                self._take(message, frames)

    def _take(self, message: protocol.Message, frames: list[bytes]) -> None:
        match message:
            case protocol.Frames(generation=self._generation):
                self._give(message, frames)
            case protocol.Line(text=text):
                with contextlib.suppress(StartError):  # its end is told by its link
                    self._line(messages.from_line(text.encode()))
            case protocol.Launch():
                self._launch(message)
            case protocol.Stored():
                if self._store is not None:
                    ident, *values = frames
                    reply = protocol.pack(message, *values)
                    self._store.send_multipart([ident, b"", *reply])
            case protocol.Ask():
                self._answer(message, frames)
            case protocol.Taken(generation=self._generation):
                self._ahead -= 1
            case protocol.Cut():
                self._cut()
            case protocol.End():
                raise Ended

    def _give(self, message: protocol.Frames, frames: list[bytes]) -> None:
        """Send a message to each of the ranks that it is for."""
        if not self._sockets:
            return  # the kernel has let go of them
        for together in self._together.values():
            together.asked(message.ranks, frames)
        for rank in message.ranks:
            self._places[rank, message.channel].send_multipart(frames)

    def _line(self, line: messages.LinkMessage) -> None:
        if isinstance(line, messages.Halt):
            self._started.wake_up()
        self._started.send(line)

    def _launch(self, message: protocol.Launch) -> None:
        launch = messages.Launch(**message.fields)
        try:
            check_descriptors(launch.ranks_here)
            interface = interface_of(message.address)
            self._open(launch, message.key)
            own = {k: v for k, v in scrubbed(os.environ).items() if _is_nodes_own(k)}
            given = {k: v for k, v in launch.env.items() if not _is_nodes_own(k)}
            self._started.send(
                replace(
                    launch,
                    run_dir=str(self._folder),
                    bulk_dir=str(self._run_dir.bulk),
                    env=given | own,
                    cwd=launch.cwd if Path(launch.cwd).is_dir() else str(Path.cwd()),
                    path=[*dict.fromkeys([*launch.path, *sys.path])],
                    interface=interface,
                    store=self._store_address,
                )
            )
        except (OSError, StartError) as error:
            self._hear(messages.Ended(launch.generation, error=str(error)))

    @property
    def _store_address(self) -> str:
        return f"ipc://{self._folder}/store"

    def _open(self, launch: messages.Launch, key: str) -> None:
        """Open the sockets of a start: to the ranks, and the store for them."""
        self._cut()
        self._pids.clear()
        self._states = {}
        self._say(protocol.States({}))  # a rank of the same number may have been gone
        self._generation = launch.generation
        self._folder = self._run_dir.generation(launch.generation)
        connections = write_connections(
            self._folder, world_size=launch.ranks_here, key=key.encode(), first=launch.first
        )
        for number, connection in enumerate(connections):
            for channel in CHANNELS:
                one = connected(self._context, connection, channel)
                place = launch.first + number, channel
                self._sockets[one], self._places[place] = place, one
                self._poller.register(one, zmq.POLLIN)
        ranks = range(launch.first, launch.first + launch.ranks_here)
        self._gpus = dict(zip(ranks, launch.devices or [""] * len(ranks), strict=True))
        self._key, self._bundles, self._ahead = key.encode(), 0, 0
        self._together = {channel: Together(ranks, self._key) for channel in CHANNELS}
        self._store = self._context.socket(zmq.ROUTER)
        self._store.linger = 0
        self._store.set_hwm(0)
        self._store.bind(self._store_address)
        self._poller.register(self._store, zmq.POLLIN)

    def _cut(self) -> None:
        """Let go of the ranks' sockets."""
        for one in [*self._sockets, *([self._store] if self._store is not None else [])]:
            self._poller.unregister(one)
            one.close(0)
        self._sockets, self._places, self._together, self._store = {}, {}, {}, None

    # -- from launcher and ranks

    def _hear(self, line: messages.LinkMessage) -> None:
        """Take a message of the launcher; on its link's thread."""
        self._lines.append(line)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the agent is closing
            self._waker.send(b"\0")

    def _pass_on_lines(self) -> None:
        while self._lines:
            line = self._lines.popleft()
            if isinstance(line, messages.Born):
                self._pids[line.rank] = line.pid
            self._say(protocol.Line(messages.to_line(line).decode()))
        while self._late:
            number, value = self._late.popleft()
            self._say(protocol.Answer(number, value))

    def _read_rank(self, one: zmq.Socket[bytes]) -> None:
        rank, channel = self._sockets[one]
        together, now = self._together[channel], time.monotonic()
        with contextlib.suppress(zmq.Again):  # nothing more to read: wanted
            for _ in range(AT_ONCE):
                if not together.put(rank, one.recv_multipart(zmq.DONTWAIT), now):
                    self._refused.add((rank, channel))

    def _pass_on(self, now: float) -> None:
        """Send on what ranks have said, unless the kernel has enough to read."""
        if self._ahead >= AHEAD:
            return
        said = [
            Said(ranks, channel, parts)
            for channel, together in self._together.items()
            for ranks, parts in together.leave(now)
        ]
        said += [Said((rank,), channel, []) for rank, channel in self._refused]
        self._refused.clear()
        if said:
            self._bundles += 1
            self._ahead += 1
            frames = message_batch.packed(said, self._key, self._bundles)
            self._say(protocol.Bundle(self._generation), *frames)

    def _read_store(self, store: zmq.Socket[bytes]) -> None:
        """Pass on the requests of ranks; what is none was sent by code of a cell."""
        with contextlib.suppress(zmq.Again):  # nothing more to read: wanted
            for _ in range(AT_ONCE):
                ident, _, *frames = store.recv_multipart(zmq.DONTWAIT)
                with contextlib.suppress(ValueError):
                    message, values = protocol.unpack(frames)
                    if isinstance(message, protocol.Stored):
                        self._say(message, ident, *values)

    def _look(self) -> None:
        """Tell of processes that do not simply run, when that changes."""
        if self._launcher is None:
            return
        pids = {f"rank {rank}": pid for rank, pid in self._pids.items()}
        pids[LAUNCHER] = self._launcher.process.pid
        found = {name: process_inspection.status(pid) for name, pid in pids.items()}
        told = {n: s for n, s in found.items() if s == GONE or s in process_inspection.STOPPED}
        if told != self._states:
            self._states = told
            self._say(protocol.States(told))

    # -- answers

    def _answer(self, ask: protocol.Ask, frames: list[bytes]) -> None:
        if ask.what == "stacks":
            threading.Thread(target=self._stacks, args=(ask,), daemon=True).start()
            return
        if ask.what == "now":
            pids = self._pids
            self._watch.ask(ask.id, {one: (gpu, pids.get(one)) for one, gpu in self._gpus.items()})
            return
        try:
            if ask.what == "read":
                chunk = self._files.read(ask.given["path"], ask.given["offset"])
                self._say(protocol.Answer(ask.id, len(chunk)), chunk)
            else:
                self._say(protocol.Answer(ask.id, self._done(ask.what, ask.given, frames)))
        except (OSError, ValueError, LookupError) as error:
            self._say(protocol.Answer(ask.id, error=f"{type(error).__name__}: {error}"))

    def _done(self, what: str, given: dict[str, Any], frames: list[bytes]) -> Any:
        """Do what can be done at once; returns the answer."""
        files = self._files
        known: dict[str, Callable[[], Any]] = {
            "receive": lambda: files.receive(given["name"], given["size"]),
            "chunk": lambda: files.take(given["path"], frames[0]),
            "remove": lambda: files.remove(given["path"]),
            "size": lambda: files.size(given["path"]),
            "sees": lambda: files.sees(given["path"], given["text"]),
            "left": lambda: asdict(process_inspection.left(self._folder)),
            "log": self._started.log_tail,
        }
        return known[what]()

    def _stacks(self, ask: protocol.Ask) -> None:
        """Wait for stacks, on a thread of its own."""
        pids = {int(rank): pid for rank, pid in ask.given["pids"].items()}
        own = self._started.process.pid
        told: dict[str, str] = {}
        if ask.given["launchers"]:
            told = process_inspection.stacks(self._run_dir.path, {"launcher": own}, launcher=own)
        names = {f"rank{rank}": pid for rank, pid in sorted(pids.items())}
        told |= process_inspection.stacks(self._folder, names, launcher=own)
        self._answer_late(ask.id, told)

    def _answer_late(self, number: int, value: Any) -> None:
        """Have something answered, from any thread."""
        self._late.append((number, value))
        self._wake()


def _nobody(_line: messages.LinkMessage) -> None:
    """Listen no more."""


def interface_of(address: str) -> str:
    """The network interface that has an address.

    Raises:
        StartError: none has it.
    """
    for name, ends in psutil.net_if_addrs().items():
        if any(end.address.partition("%")[0] == address for end in ends):
            return name
    msg = f"no network interface of {socket.gethostname()} has the address {address}."
    raise StartError(msg)


def _is_nodes_own(name: str) -> bool:
    return name in _NODES_OWN or name.startswith(_NODES_OWN_PREFIXES)
