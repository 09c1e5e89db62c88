"""Launcher group on several nodes: one agent with a launcher on each.

Runs in the kernel. All nodes start and end together: losing one ends the others.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent import futures
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from nbdist.cluster import protocol
from nbdist.cluster.agent_server import CLOSE_S, AgentServer
from nbdist.cluster.allocation import AllocationRequest
from nbdist.cluster.interfaces import EXITED, CrashArtifacts, ProcessStatus
from nbdist.cluster.kv_store import KeyValueStore
from nbdist.cluster.local import LAUNCHER_GONE, LAUNCHER_NAME, foreign_file_message
from nbdist.cluster.protocol import (
    CHUNK_BYTES,
    LEASE_S,
    MAX_UNREAD_CHUNKS,
    MIN_FREE_BYTES,
    SHARED_FOLDER_HINT,
    SHARED_FOLDER_TIMEOUT_S,
)
from nbdist.cluster.rank_channels import BUSY_POLL_MS, QUIET_POLL_MS, RankChannels
from nbdist.cluster.run_dir import RunDir
from nbdist.errors import CheckpointError, PayloadError, SessionError, StartError
from nbdist.hardware.discovery import Machine, SessionNode
from nbdist.hardware.telemetry import UsageSnapshot
from nbdist.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from nbdist.cluster.allocation import AllocatedNode, Cluster, DeviceType
    from nbdist.cluster.interfaces import RankProcessInfo, TransferCallback
    from nbdist.cluster.rank_channels import Channel, MessageListener

    AgentResult = tuple[Any, list[bytes]]
    """Value and frames of an agent's reply."""

log = logging.getLogger(__name__)

AGENT_START_TIMEOUT_S = 120.0
"""Timeout of the agents' start, once the cluster has started them."""
REQUEST_TIMEOUT_S = 5.0
TRANSFER_TIMEOUT_S = 60.0
"""Timeout of each step of a file transfer."""
END_S = 10.0
"""Time for the agents to end everything by themselves."""
POLL_INTERVAL_S = 1.0
SHARED_POLL_S = 0.25
RUNNING = "running"


def _ignore_message(_message: messages.LauncherMessage) -> None:
    """Ignore messages before a session has taken the nodes."""


class NodeChannels(RankChannels):
    """Channels to ranks on nodes; the frames pass through the agent server."""

    def __init__(self, nodes: NodeGroup, key: bytes, reader: MessageListener) -> None:
        """Start the reader thread."""
        super().__init__(key, reader)
        self._nodes = nodes
        self._inbox: SimpleQueue[tuple[int, protocol.RankMessages, list[bytes]] | None] = (
            SimpleQueue()
        )
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="nbdist-reader", daemon=True)
        self._thread.start()

    def add_messages(
        self, index: int, messages: protocol.RankMessages, frames: list[bytes]
    ) -> None:
        """Queue messages of a node's ranks, on the agent server's thread."""
        self._inbox.put((index, messages, frames))

    def wake(self) -> None:
        """Send queued messages and wake the reader thread to call the reader's `on_idle`."""
        self._nodes.agent_server.wake()
        self._inbox.put(None)

    def close(self) -> None:
        """End the reader thread."""
        self._closing = True
        self._nodes.detach_channels(self)
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(REQUEST_TIMEOUT_S)

    def _queue(self, ranks: Sequence[int], channel: Channel, frames: list[bytes]) -> None:
        self._nodes.queue_frames(ranks, channel, frames)

    def _serve(self) -> None:
        timeout_s, due = 0.0, time.monotonic()
        while not self._closing:
            woken = False
            with contextlib.suppress(Empty):  # no message: run periodic work
                item = self._inbox.get(timeout=max(timeout_s, 0.001))
                woken = item is None
                if item is not None:
                    self._open(*item)
            if woken or time.monotonic() >= due:
                timeout_s = (BUSY_POLL_MS if self._idle() else QUIET_POLL_MS) / 1000
                due = time.monotonic() + timeout_s

    def _open(self, node: int, messages: protocol.RankMessages, frames: list[bytes]) -> None:
        """Verify and handle the messages of a node's ranks; log invalid ones and continue."""
        remaining, own_ranks = iter(frames), self._nodes.ranks_of(node)
        try:
            for ranks, channel, num_frames in messages.index:
                signed = list(itertools.islice(remaining, num_frames))
                if not ranks or not own_ranks.issuperset(ranks):
                    log.warning("node %d: dropped a message of other nodes' ranks", node)
                    continue
                message = self._signer.verify_message(signed) if signed else None
                self._take(tuple(ranks), cast("Channel", channel), message)
        except (ValueError, TypeError):
            log.exception("node %d: dropped malformed messages", node)


class NodeGroup:
    """The nodes of a session.

    Args:
        cluster: cluster that allocates the nodes.
        kind: device type of the ranks.
    """

    def __init__(self, cluster: Cluster, kind: DeviceType) -> None:
        """Create the kernel's private folders; `start` requests the nodes."""
        self.kind = kind
        self.listener: Callable[[messages.LauncherMessage], None] = _ignore_message
        self.allocated_nodes: list[AllocatedNode] = []
        self.run_dir = RunDir.create()
        self.agent_server: AgentServer
        self._cluster = cluster
        self._hellos: dict[int, protocol.AgentHello] = {}
        self._warm: set[int] = set()
        self._states: dict[int, dict[str, str]] = {}
        self._lost: dict[int, str] = {}
        self._shares: list[tuple[int, range]] = []
        """Indices of the nodes used by the last start, with their ranks."""
        self._node_of: dict[int, int] = {}
        """By rank of the last start."""
        self._generation = 0
        self._ended: dict[int, messages.AllRanksExited] = {}
        self._point = KeyValueStore(self._send_store_reply)
        self._relay: NodeChannels | None = None
        self._requests: dict[int, tuple[int, Future[AgentResult]]] = {}
        """By number the node and the future result of a request to its agent."""
        self._numbers = itertools.count(1)
        self._events: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._log = ""
        self._closing = self._closed = False
        self._ends = threading.Event()
        """Set when the thread that polls the cluster can end."""
        self._over = threading.Event()
        """Set when everything has ended and is released."""
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        atexit.register(self.close)

    # -- life

    def start(self, wanted: AllocationRequest, progress: Callable[[str], None]) -> None:
        """Allocate nodes and wait until an agent has connected from each.

        Raises:
            StartError: no nodes, or an agent does not connect; nothing stays reserved.
        """
        self.allocated_nodes = self._cluster.allocate_nodes(wanted, progress)
        got = sum(place.ranks for place in self.allocated_nodes)
        if wanted.nproc is not None and got < wanted.nproc:
            msg = f"Requested {wanted.nproc} ranks, but {self._cluster.name} provides {got}."
            raise StartError(msg)
        self.agent_server = AgentServer(
            self._cluster.kernel_address, take=self._take, on_gone=self._connection_ended
        )
        for target, name in (
            (self._handle_events, "nbdist-link"),
            (self._poll_cluster, "nbdist-cluster"),
        ):
            thread = threading.Thread(target=target, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        progress(f"starting agents on {len(self.allocated_nodes)} nodes")
        tickets = []
        for index in range(len(self.allocated_nodes)):
            public, secret = self.agent_server.create_node_keys(index)
            ticket = protocol.AgentTicket(
                hub=self.agent_server.address,
                hub_key=self.agent_server.public_key,
                public=public,
                secret=secret,
                index=index,
                kind=self.kind,
                cwd=str(Path.cwd()),
                path=list(sys.path),
                lease_s=LEASE_S,
            )
            tickets.append(ticket.to_json())
        self._cluster.start_agents(tickets)
        self._wait_for_agents()

    def _wait_for_agents(self) -> None:
        deadline = time.monotonic() + AGENT_START_TIMEOUT_S
        while len(self._hellos) < len(self.allocated_nodes):
            if self._lost:
                index, why = next(iter(self._lost.items()))
                raise StartError(f"{self._node_name(index)} {why}.")
            if time.monotonic() > deadline:
                missing = [
                    self._node_name(i)
                    for i in range(len(self.allocated_nodes))
                    if i not in self._hellos
                ]
                msg = (
                    f"The agent of {', '.join(missing)} did not connect to this machine at"
                    f" {self.agent_server.address} within {AGENT_START_TIMEOUT_S:.0f} s."
                    " The nodes must be able to connect to that address:"
                    " check the network and its firewalls."
                )
                raise StartError(msg)
            threading.Event().wait(0.02)

    @property
    def is_warm(self) -> bool:
        """True if all launchers are ready to fork."""
        return len(self._warm) == len(self.allocated_nodes)

    @property
    def is_alive(self) -> bool:
        """True if no node is lost."""
        return not self._lost and not self._closing

    def can_start(self, kind: DeviceType, world_size: int) -> bool:
        """Return True if these nodes can start this many ranks of this kind."""
        room = sum(place.ranks for place in self.allocated_nodes)
        return self.is_alive and self.kind == kind and world_size <= room

    def close(self) -> None:
        """End agents, launchers and ranks, and release the nodes."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            self._over.wait(END_S + CLOSE_S)  # until another thread has closed
            return
        try:
            self._close()
        finally:
            try:
                self._cluster.close()
            finally:
                self.run_dir.remove()
                atexit.unregister(self.close)
                self._over.set()

    def _close(self) -> None:
        if self._hellos:
            self._log = self.log_tail()
        self._closing = True
        self.listener = _ignore_message
        if self.allocated_nodes and self._threads:
            for index in self._hellos:
                self.agent_server.send(index, protocol.StopAgent())
            deadline = time.monotonic() + END_S
            while not self._hellos.keys() <= self._lost.keys() and time.monotonic() < deadline:
                threading.Event().wait(0.02)
            self.agent_server.close()
        self._events.put(None)
        self._ends.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(REQUEST_TIMEOUT_S)

    # -- LauncherGroup

    def launch(
        self, launch: messages.LaunchRanks, key: str, reader: MessageListener
    ) -> RankChannels:
        """Start ranks on all nodes, in node order."""
        self._shares = list(self._shared(launch.world_size))
        self._node_of = {rank: index for index, mine in self._shares for rank in mine}
        self._generation, self._ended = launch.generation, {}
        self._point = KeyValueStore(self._send_store_reply)
        self._relay = NodeChannels(self, key.encode(), reader)
        for number, (index, mine) in enumerate(self._shares):
            place = self.allocated_nodes[index]
            theirs = replace(
                launch,
                devices=None if launch.devices is None else list(place.gpus[: len(mine)]),
                first=mine.start,
                here=len(mine),
                node=number,
                nodes=len(self._shares),
            )
            self.agent_server.queue_message(
                index, protocol.LaunchRanks(asdict(theirs), key, place.address)
            )
        self.agent_server.wake()
        return self._relay

    def _shared(self, world_size: int) -> Iterator[tuple[int, range]]:
        """Node indices with the ranks that they get."""
        first = 0
        for index, place in enumerate(self.allocated_nodes):
            mine = range(first, min(first + place.ranks, world_size))
            if mine:
                yield index, mine
            first = mine.stop

    def nodes_for(self, world_size: int) -> list[SessionNode]:
        """Return the machines of this many ranks with their hardware."""
        nodes = []
        for index, ranks in self._shared(world_size):
            machine = Machine.from_json(self._hellos[index].machine)
            known = {gpu.uuid: gpu for gpu in machine.gpus}
            own = self.allocated_nodes[index].gpus[: len(ranks)]
            gpus = tuple(known[uuid] for uuid in own if uuid in known)
            link = machine.link if len(gpus) > 1 else None
            machine = replace(machine, gpus=gpus, link=link)
            nodes.append(SessionNode(self.allocated_nodes[index].name, tuple(ranks), machine))
        return nodes

    def node_usage(self, within_s: float) -> dict[str, UsageSnapshot]:
        """Return the usage of the ranks' nodes that respond in time."""
        requests: dict[int, dict[str, Any]] = {index: {} for index, _ in self._shares}
        found = self._answers("now", requests, within_s)
        return {
            self.allocated_nodes[index].name: UsageSnapshot.from_json(usage)
            for index, usage in found.items()
        }

    def send(self, message: messages.LauncherMessage) -> None:
        """Send a message to all connected launchers."""
        line = protocol.LauncherLine(messages.encode_line(message).decode())
        for index in self._connected_indices():
            self.agent_server.queue_message(index, line)
        self.agent_server.wake()

    def resume_stopped(self) -> None:
        """Do nothing: an agent resumes its launcher before it stops the ranks."""

    def describe(self) -> list[dict[str, Any]]:
        """Return the launchers as JSON values."""
        return [
            {
                "pid": hello.launcher,
                "alive": index not in self._lost and not self._closing,
                "name": self._launcher_name(index),
                "node": self.allocated_nodes[index].name,
            }
            for index, hello in sorted(self._hellos.items())
        ]

    def node_of(self, rank: int) -> str:
        """Return the name of a rank's node."""
        index = self._node_of.get(rank)
        return "" if index is None else self.allocated_nodes[index].name

    def process_statuses(self, members: Mapping[int, RankProcessInfo]) -> dict[str, ProcessStatus]:
        """Return the status of ranks and launchers, as last reported by the agents."""
        found = {}
        for rank, member in members.items():
            found[f"rank {rank}"] = self._process(self._node_of[rank], f"rank {rank}", member.pid)
        for index, hello in self._hellos.items():
            process = self._process(index, LAUNCHER_NAME, hello.launcher)
            found[self._launcher_name(index)] = process
        return found

    def dump_stacks(self, pids: Mapping[int, int], *, launchers: bool) -> dict[str, str]:
        """Dump Python stacks by signal, on all nodes in parallel."""
        requests: dict[int, dict[str, Any]] = {}
        for index, _ in self._shares:
            theirs = {rank: pid for rank, pid in pids.items() if self._node_of[rank] == index}
            if theirs or launchers:
                requests[index] = {"pids": theirs, "launchers": launchers}
        stacks = {f"rank{rank}": f"{self.node_of(rank)} does not respond" for rank in pids}
        for index, found in self._answers("stacks", requests).items():
            own = found.pop("launcher", None)
            stacks |= found
            if own is not None:
                stacks[self._launcher_name(index)] = own
        return stacks

    def crash_artifacts(self) -> CrashArtifacts:
        """Return the crash artifacts of the last ranks, from their nodes."""
        left = CrashArtifacts()
        requests: dict[int, dict[str, Any]] = {index: {} for index, _ in self._shares}
        for found in self._answers("left", requests).values():
            left.crashes.update({int(rank): text for rank, text in found["crashes"].items()})
            left.notes.extend((rank, text) for rank, text in found["notes"])
        return left

    def log_tail(self) -> str:
        """Return the end of the logs of all nodes."""
        if self._closing:
            return self._log
        found = self._answers("log", {index: {} for index in self._connected_indices()})
        logs = ((self.allocated_nodes[index].name, text) for index, text in found.items() if text)
        return "\n".join(f"-- {name} --\n{text}" for name, text in logs)

    # -- files

    @property
    def staging_folders(self) -> list[Path]:
        """Folders for the kernel's payload files, preferred first."""
        return [self.run_dir.payload_dir, self.run_dir.path]

    def payload_folders(self, rank: int) -> list[str]:
        """Return the folders for a rank's payload files, preferred first."""
        hello = self._hellos[self._node_of[rank]]
        return [hello.bulk_dir, hello.run_dir]

    @contextlib.contextmanager
    def ship_file(
        self, file: Path, ranks: Sequence[int], on_progress: TransferCallback
    ) -> Iterator[dict[int, str]]:
        """Copy a file once to each node of these ranks."""
        indices = sorted({self._node_of[rank] for rank in ranks})
        paths: dict[int, str] = {}
        try:
            given = {"name": f"{secrets.token_hex(8)}.payload", "size": file.stat().st_size}
            for index in indices:
                paths[index] = self._answer(self._ask(index, "receive", given))
            self._transfer(file, paths, on_progress)
            yield {rank: paths[self._node_of[rank]] for rank in ranks}
        finally:
            file.unlink(missing_ok=True)
            for index, path in paths.items():
                self._ask(index, "remove", {"path": path}).cancel()  # the reply is not needed

    def _transfer(
        self, file: Path, paths: Mapping[int, str], on_progress: TransferCallback
    ) -> None:
        """Send a file in chunks, with a limited number in flight."""
        in_flight: deque[Future[AgentResult]] = deque()
        done, total = 0, file.stat().st_size * len(paths)
        with file.open("rb") as source:
            while (chunk := source.read(CHUNK_BYTES)) or in_flight:
                for index, path in paths.items() if chunk else ():
                    in_flight.append(self._ask(index, "chunk", {"path": path}, chunk))
                while in_flight and (not chunk or len(in_flight) >= MAX_UNREAD_CHUNKS * len(paths)):
                    written, _ = self._transferred(in_flight.popleft())
                    done += written
                    on_progress(done, total)

    def fetch_file(self, rank: int, path: str, on_progress: TransferCallback) -> Path:
        """Copy a payload file of a rank to this machine and remove it on the node."""
        if str(Path(path).parent) not in self.payload_folders(rank):
            raise PayloadError(foreign_file_message(path))
        index = self._node_of[rank]
        size: int = self._answer(self._ask(index, "size", {"path": path}))
        preferred, other = self.staging_folders
        has_room = shutil.disk_usage(preferred).free > size + MIN_FREE_BYTES
        file = (preferred if has_room else other) / f"{secrets.token_hex(8)}.payload"
        file.touch(mode=0o600)
        in_flight: deque[Future[AgentResult]] = deque()
        offsets = iter(range(0, size, CHUNK_BYTES))
        try:
            with file.open("wb") as sink:
                while sink.tell() < size:
                    for offset in itertools.islice(offsets, MAX_UNREAD_CHUNKS - len(in_flight)):
                        given = {"path": path, "offset": offset}
                        in_flight.append(self._ask(index, "read", given))
                    _, frames = self._transferred(in_flight.popleft())
                    sink.write(frames[0])
                    on_progress(sink.tell(), size)
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        finally:
            self._ask(index, "remove", {"path": path}).cancel()
        return file

    def make_private_folders(self) -> list[Path]:
        """Create a folder beside the checkpoints, on the shared disk, for files between ranks.

        Raises:
            CheckpointError: a node does not share the disk.
        """
        parent = Path.cwd() / "checkpoints"
        self.check_shared_folder(parent)
        return [Path(tempfile.mkdtemp(prefix=".handover-", dir=parent))]

    def check_shared_folder(self, folder: Path) -> None:
        """Check that all nodes of the ranks see a folder of this machine and can write to it.

        Raises:
            CheckpointError: names a node that does not see it or cannot write to it.
        """
        trial = folder / f".nbdist-{secrets.token_hex(8)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            trial.write_text(text := secrets.token_hex(16))
        except OSError as error:
            msg = f"Cannot write to {folder}: {error.strerror}."
            raise CheckpointError(msg) from error
        given = {"path": str(trial), "text": text}
        deadline = time.monotonic() + SHARED_FOLDER_TIMEOUT_S
        try:
            for index, _ in self._shares:
                while why := self._answer(self._ask(index, "sees", given)):
                    if time.monotonic() > deadline:
                        raise CheckpointError(
                            f"{self._node_name(index)}: {why}. {SHARED_FOLDER_HINT}."
                        )
                    self._ends.wait(SHARED_POLL_S)  # network file systems show it with a delay
        finally:
            trial.unlink(missing_ok=True)

    def check_shared_folder_async(self, folder: Path, complain: Callable[[str], object]) -> None:
        """Check the folder in the background: network file systems show it with a delay."""

        def look() -> None:
            existing = next(path for path in (folder, *folder.parents) if path.is_dir())
            try:
                self.check_shared_folder(existing)
            except CheckpointError as error:
                complain(str(error))
            except SessionError:
                return  # the nodes are lost

        thread = threading.Thread(target=look, name="nbdist-folder", daemon=True)
        self._threads.append(thread)  # joined on close, so that it removes its trial file
        thread.start()

    # -- requests to agents

    def _ask(
        self, index: int, what: str, given: dict[str, Any] | None = None, *frames: bytes
    ) -> Future[AgentResult]:
        """Send a request to an agent; a failed one raises SessionError."""
        number = next(self._numbers)
        reply: Future[AgentResult] = Future()
        self._requests[number] = index, reply
        reply.add_done_callback(lambda _: self._requests.pop(number, None))
        if index in self._lost:
            reply.set_exception(SessionError(self._lost[index]))
        else:
            self.agent_server.send(index, protocol.AgentQuery(number, what, given or {}), *frames)
        return reply

    def _answer(self, reply: Future[AgentResult]) -> Any:
        """Wait for the value of a reply; raises SessionError for an error or a timeout."""
        try:
            return reply.result(REQUEST_TIMEOUT_S)[0]
        except TimeoutError:
            reply.cancel()
            msg = f"A node did not respond within {REQUEST_TIMEOUT_S:.0f} s."
            raise SessionError(msg) from None

    def _answers(
        self, what: str, requests: Mapping[int, dict[str, Any]], within_s: float = REQUEST_TIMEOUT_S
    ) -> dict[int, Any]:
        """Send a request to several agents; return the replies by node, without failed ones."""
        replies = {index: self._ask(index, what, given) for index, given in requests.items()}
        futures.wait(replies.values(), within_s)
        found = {}
        for index, reply in replies.items():
            # a node that does not reply in time will be reported as lost
            if not reply.cancel() and reply.exception() is None:
                found[index] = reply.result()[0]
        return found

    def _transferred(self, reply: Future[AgentResult]) -> AgentResult:
        """Wait for the next step of a file transfer."""
        try:
            return reply.result(TRANSFER_TIMEOUT_S)
        except TimeoutError:
            msg = f"A node sent no reply about a file transfer within {TRANSFER_TIMEOUT_S:.0f} s."
            raise SessionError(msg) from None
        except SessionError as error:
            raise PayloadError(f"File transfer with a node failed: {error}") from error

    # -- the ranks' frames

    def queue_frames(self, ranks: Sequence[int], channel: Channel, frames: list[bytes]) -> None:
        """Queue frames to ranks, once per node."""
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self._node_of[rank], []).append(rank)
        for index, theirs in by_node.items():
            message = protocol.RankRequestFrames(theirs, channel, self._generation)
            self.agent_server.queue_message(index, message, *frames)

    def ranks_of(self, index: int) -> frozenset[int]:
        """Return the ranks of a node."""
        return frozenset(rank for place, ranks in self._shares if place == index for rank in ranks)

    def detach_channels(self, relay: NodeChannels) -> None:
        """Detach the channels and let the agents close the ranks' sockets."""
        if self._relay is relay:
            self._relay = None
            for index in self._connected_indices():
                self.agent_server.queue_message(index, protocol.CloseRankSockets())
            self.agent_server.wake()

    def _send_store_reply(
        self, index: int, reply: protocol.KeyValueRequest, frames: list[bytes]
    ) -> None:
        self.agent_server.send(index, reply, *frames)

    # -- what arrives, on the hub's thread

    def _take(self, index: int, message: protocol.Message, frames: list[bytes]) -> None:
        match message:
            case protocol.RankMessages(generation=self._generation):
                relay = self._relay
                if relay is not None:
                    relay.add_messages(index, message, frames)
            case protocol.LauncherLine(text=text):
                line = messages.decode_line(text.encode())
                self._events.put(lambda: self._on_launcher_message(index, line))
            case protocol.KeyValueRequest():
                self._point.answer_request(index, message, frames)
            case protocol.AgentReply():
                _, reply = self._requests.get(message.id, (index, None))
                with contextlib.suppress(futures.InvalidStateError):  # cancelled meanwhile
                    if reply is not None and message.error:
                        reply.set_exception(SessionError(message.error))
                    elif reply is not None:
                        reply.set_result((message.value, frames))
            case protocol.ProcessStates(states=states):
                self._states[index] = states
            case protocol.AgentHello():
                self._hellos[index] = message

    def _connection_ended(self, index: int, why: str) -> None:
        if self._closing:
            self._lost.setdefault(index, "")
            return
        self._events.put(lambda: self._lose_node(index, self._cluster.lost_nodes().get(index, why)))

    # -- threads of its own

    def _handle_events(self) -> None:
        """Handle launcher messages in order. On a separate thread, since listeners may block."""
        while (event := self._events.get()) is not None:
            event()
        if self._lost and not self._closed:
            self.close()

    def _poll_cluster(self) -> None:
        """Poll the cluster for lost nodes, and the store for timeouts."""
        while not self._closing:
            for index, why in self._cluster.lost_nodes().items():
                if index not in self._lost:
                    self._events.put(functools.partial(self._lose_node, index, why))
            self._point.expire_requests()
            self._ends.wait(POLL_INTERVAL_S)

    def _on_launcher_message(self, index: int, line: messages.LauncherMessage) -> None:
        """Handle a launcher message; the end of the ranks is reported for all nodes together."""
        name = self.allocated_nodes[index].name
        match line:
            case messages.LauncherReady():
                self._warm.add(index)
                if self.is_warm:
                    self.listener(line)
            case messages.LauncherProgress(text=text):
                self.listener(messages.LauncherProgress(f"{name}: {text}"))
            case messages.RankExited():
                self.listener(replace(line, node=name))
            case messages.AllRanksExited(generation=generation) if generation == LAUNCHER_GONE:
                self._lose_node(index, "", replace(line, node=name))
            case messages.AllRanksExited(generation=self._generation):
                self._one_ended(index, replace(line, node=name))
            case messages.RankForked():
                self.listener(line)

    def _one_ended(self, index: int, ended: messages.AllRanksExited) -> None:
        """Handle the end of one node's ranks: end the others, report once all have ended."""
        if not self._ended:
            self.send(messages.StopRanks())
        self._ended[index] = ended
        if self._ended.keys() >= {node for node, _ in self._shares}:
            first, *others = self._ended.values()
            codes = first.exitcodes
            for other in others:
                codes = other.exitcodes | codes
            self.listener(replace(first, exitcodes=codes))

    def _lose_node(
        self, index: int, why: str, ended: messages.AllRanksExited | None = None
    ) -> None:
        """Handle the loss of a node or its launcher: end everything."""
        if index in self._lost or self._closing:
            return
        self._lost[index] = why or "lost its launcher, which ended"
        for node, reply in list(self._requests.values()):
            if node == index:
                with contextlib.suppress(futures.InvalidStateError):  # cancelled meanwhile
                    reply.set_exception(SessionError(self._lost[index]))
        words = f"{self._node_name(index)} {why}"
        name = self.allocated_nodes[index].name
        self.listener(ended or messages.AllRanksExited(LAUNCHER_GONE, error=words, node=name))
        self._events.put(None)  # end the other nodes too

    # -- in words

    def _node_name(self, index: int) -> str:
        place = self.allocated_nodes[index]
        if place.address in place.name:  # if several nodes share a host name
            return f"node {place.name}"
        return f"node {place.name} ({place.address})"

    def _launcher_name(self, index: int) -> str:
        return f"{LAUNCHER_NAME} on {self.allocated_nodes[index].name}"

    def _process(self, index: int, name: str, pid: int) -> ProcessStatus:
        status = self._states.get(index, {}).get(name, RUNNING)
        return ProcessStatus(pid, EXITED if index in self._lost or self._closing else status)

    def _connected_indices(self) -> Iterable[int]:
        return [index for index in self._hellos if index not in self._lost]


class ClusterLauncherProvider:
    """Provides launchers on the nodes of a cluster.

    Args:
        cluster: Ray or Slurm.
        nodes: number of nodes. Default: the cluster decides.
        gpus_per_node: GPUs on each node, one per rank.
    """

    memory_events_file: Path | None = None
    """None: this machine's OOM counter does not cover the nodes."""

    def __init__(
        self, cluster: Cluster, *, nodes: int | None = None, gpus_per_node: int | None = None
    ) -> None:
        self.cluster = cluster
        self._nodes, self._gpus_per_node = nodes, gpus_per_node

    def check_limits(self, world_size: int) -> None:
        """Do nothing: each agent checks its own machine."""

    def warm_up(self, kind: DeviceType) -> None:
        """Do nothing: no nodes are reserved in advance."""

    def acquire_launchers(
        self, kind: DeviceType, world_size: int, progress: Callable[[str], None]
    ) -> NodeGroup:
        """Reserve nodes and start an agent on each; the caller closes them.

        Raises:
            StartError: no nodes available; nothing stays reserved.
        """
        group = NodeGroup(self.cluster, kind)
        try:
            group.start(
                AllocationRequest(
                    kind=kind,
                    nproc=world_size,
                    nodes=self._nodes,
                    gpus_per_node=self._gpus_per_node,
                ),
                progress,
            )
        except BaseException:
            group.close()
            raise
        return group

    def close(self) -> None:
        """Do nothing: there are no unused launchers."""
