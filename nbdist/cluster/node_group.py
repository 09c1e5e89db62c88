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
import tempfile
import threading
import time
from collections import deque
from concurrent import futures
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from nbdist.cluster import protocol
from nbdist.cluster.agent_connections import CLOSE_S, AgentConnections, KeyValueStore
from nbdist.cluster.launcher_process import (
    EXITED,
    CrashArtifacts,
    ProcessStatus,
    check_payload_path,
)
from nbdist.cluster.local_launcher import (
    LAUNCHER_GONE,
    LAUNCHER_NAME,
    Launcher,
    LocalLauncherProvider,
    ignore_message,
)
from nbdist.cluster.protocol import (
    CHUNK_BYTES,
    LEASE_S,
    MAX_UNREAD_CHUNKS,
    MIN_FREE_BYTES,
    SHARED_FOLDER_HINT,
    SHARED_FOLDER_TIMEOUT_S,
)
from nbdist.cluster.rank_channels import RankChannels
from nbdist.cluster.run_dir import RunDir
from nbdist.errors import CheckpointError, PayloadError, SessionError, StartError
from nbdist.hardware.discovery import Machine, SessionNode
from nbdist.hardware.telemetry import NodeUsage
from nbdist.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from nbdist.cluster.allocation import AllocatedNode, Cluster, DeviceType
    from nbdist.cluster.launcher_process import RankProcess, TransferCallback
    from nbdist.cluster.rank_channels import Channel, MessageListener
    from nbdist.rank_python import RankPython

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
WAIT_POLL_S = 0.02
RUNNING = "running"


@dataclass(slots=True, eq=False)
class Node:
    """A node of the session, with what its agent has reported."""

    index: int
    place: AllocatedNode
    hello: protocol.AgentHello | None = None
    """None until the agent has connected."""
    is_warm: bool = False
    """True if its launcher is ready to fork."""
    lost: str | None = None
    """Why the connection has ended; None if it has not."""
    states: dict[str, str] = field(default_factory=dict)
    """Processes that are stopped or have exited, by name."""
    requests: dict[int, Future[AgentResult]] = field(default_factory=dict)
    """Future results of requests to the agent, by number."""
    ranks: range = range(0)
    """Its ranks of the last start."""
    ended: messages.AllRanksExited | None = None
    """Report of the end of these ranks."""

    @property
    def title(self) -> str:
        """Name and address in messages."""
        if self.place.address in self.place.name:  # if several nodes share a host name
            return f"node {self.place.name}"
        return f"node {self.place.name} ({self.place.address})"

    @property
    def launcher_name(self) -> str:
        """Name of its launcher in messages."""
        return f"{LAUNCHER_NAME} on {self.place.name}"

    @property
    def is_connected(self) -> bool:
        """True while messages can be sent to its agent."""
        return self.hello is not None and self.lost is None


class NodeChannels(RankChannels):
    """Channels to the ranks of one start; the frames pass through the agent server."""

    def __init__(
        self, group: NodeGroup, generation: int, key: bytes, reader: MessageListener
    ) -> None:
        super().__init__(key, reader)
        self._group, self._generation = group, generation
        self.inbox: SimpleQueue[tuple[Node, protocol.MessagesFromRanks, list[bytes]] | None] = (
            SimpleQueue()
        )
        """Messages of a node's ranks, from the agent server's thread; None wakes the reader."""
        self._thread.start()

    def wake(self) -> None:
        """Send queued messages and wake the reader thread to call the reader's `on_idle`."""
        self._group.agent_connections.wake()
        self.inbox.put(None)

    def close(self) -> None:
        """End the reader thread."""
        self._group.detach_channels(self)
        super().close()

    def _queue(self, ranks: Sequence[int], channel: Channel, frames: list[bytes]) -> None:
        by_node: dict[Node, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self._group.node_by_rank[rank], []).append(rank)
        for node, node_ranks in by_node.items():  # once per node
            message = protocol.RequestToRanks(node_ranks, channel, self._generation)
            self._group.agent_connections.queue_message(node.index, message, *frames)

    def _transfer(self, within_s: float) -> bool:
        try:
            item = self.inbox.get(timeout=max(within_s, 0.001))
        except Empty:
            return True
        if item is None:
            return True
        node, messages, frames = item
        remaining = iter(frames)
        try:  # log invalid messages and continue
            for ranks, channel, num_frames in messages.index:
                signed = list(itertools.islice(remaining, num_frames))
                if not ranks or not all(rank in node.ranks for rank in ranks):
                    log.warning("node %d: dropped a message of other nodes' ranks", node.index)
                    continue
                self._deliver(tuple(ranks), cast("Channel", channel), signed)
        except (ValueError, TypeError):
            log.exception("node %d: dropped malformed messages", node.index)
        return False


class NodeGroup:
    """The nodes of a session, with the methods of one `Launcher`.

    Args:
        cluster: cluster that allocates the nodes.
        kind: device type of the ranks.
    """

    def __init__(self, cluster: Cluster, kind: DeviceType) -> None:
        """Create the kernel's private folders; `start` requests the nodes."""
        self.kind = kind
        self.listener: Callable[[messages.LauncherMessage], None] = ignore_message
        self.nodes: list[Node] = []
        self.node_by_rank: dict[int, Node] = {}
        """Of the last start."""
        self.run_dir = RunDir.create()
        self.agent_connections: AgentConnections
        self._store: KeyValueStore
        """Of the last start."""
        self._cluster = cluster
        self._generation = 0
        self._channels: NodeChannels | None = None
        self._first_end: messages.AllRanksExited
        """The first report of the end of the last ranks."""
        self._failure = ""
        """The first node that was lost, and why."""
        self._numbers = itertools.count(1)
        self._events: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._log = ""
        self._closed = False
        self._closing = threading.Event()
        self._over = threading.Event()
        """Set when everything has ended and is released."""
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        atexit.register(self.close)

    # -- life

    def start(self, progress: Callable[[str], None]) -> None:
        """Allocate nodes and wait until an agent has connected from each.

        Raises:
            StartError: no nodes, or an agent does not connect; nothing stays reserved.
        """
        places = self._cluster.allocate_nodes(progress)
        self.nodes = [Node(index, place) for index, place in enumerate(places)]
        self.agent_connections = AgentConnections(
            self._cluster.kernel_address,
            on_message=self._on_agent_message,
            on_disconnect=self._on_connection_end,
        )
        self._store = KeyValueStore(self.agent_connections.send)
        for target, name in (
            (self._handle_events, "nbdist-link"),
            (self._poll_cluster, "nbdist-cluster"),
        ):
            thread = threading.Thread(target=target, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        progress(f"starting agents on {len(self.nodes)} nodes")
        tickets = []
        for node in self.nodes:
            public, secret = self.agent_connections.create_node_keys(node.index)
            ticket = protocol.AgentCredentials(
                hub=self.agent_connections.address,
                hub_key=self.agent_connections.public_key,
                public=public,
                secret=secret,
                kind=self.kind,
                lease_s=LEASE_S,
            )
            tickets.append(ticket.to_json())
        self._cluster.start_agents(tickets)
        deadline = time.monotonic() + AGENT_START_TIMEOUT_S
        while missing := [node.title for node in self.nodes if node.hello is None]:
            if self._failure:
                raise StartError(f"{self._failure}.")
            if time.monotonic() > deadline:
                raise StartError(
                    f"The agent of {', '.join(missing)} did not connect to this machine at"
                    f" {self.agent_connections.address} within {AGENT_START_TIMEOUT_S:.0f} s."
                    " The nodes must be able to connect to that address:"
                    " check the network and its firewalls."
                )
            time.sleep(WAIT_POLL_S)

    @property
    def is_warm(self) -> bool:
        """True if all launchers are ready to fork."""
        return all(node.is_warm for node in self.nodes)

    @property
    def is_alive(self) -> bool:
        """True if no node is lost."""
        return not self._failure and not self._closing.is_set()

    def can_start(self, kind: DeviceType, world_size: int) -> bool:
        """Return True if these nodes can start this many ranks of this kind."""
        num_slots = sum(node.place.ranks for node in self.nodes)
        return self.is_alive and self.kind == kind and world_size <= num_slots

    def close(self) -> None:
        """End agents, launchers and ranks, and release the nodes."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            self._over.wait(END_S + CLOSE_S)  # until another thread has closed
            return
        with contextlib.ExitStack() as released:
            released.callback(self._over.set)
            released.callback(atexit.unregister, self.close)
            released.callback(self.run_dir.remove)
            released.callback(self._cluster.close)
            self._log = self.log_tail()
            self._closing.set()
            self.listener = ignore_message
            if self._threads:
                for node in self.nodes:
                    if node.hello is not None:
                        self.agent_connections.send(node.index, protocol.StopAgentRequest())
                deadline = time.monotonic() + END_S
                while any(node.is_connected for node in self.nodes) and time.monotonic() < deadline:
                    time.sleep(WAIT_POLL_S)
                self.agent_connections.close()
            self._events.put(None)
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join(REQUEST_TIMEOUT_S)

    # -- as `Launcher`

    def launch(
        self, launch: messages.LaunchRanksRequest, key: str, reader: MessageListener
    ) -> RankChannels:
        """Start ranks on all nodes, in node order."""
        for node, ranks in zip(self.nodes, self._ranks_per_node(launch.world_size), strict=True):
            node.ranks, node.ended = ranks, None
        self.node_by_rank = {rank: node for node in self.nodes for rank in node.ranks}
        self._generation = launch.generation
        self._store = KeyValueStore(self.agent_connections.send)
        self._channels = NodeChannels(self, launch.generation, key.encode(), reader)
        used = self._used_nodes()
        for number, node in enumerate(used):
            gpus = list(node.place.gpus[: len(node.ranks)])
            theirs = replace(
                launch,
                devices=None if launch.devices is None else gpus,
                first=node.ranks.start,
                here=len(node.ranks),
                node=number,
                nodes=len(used),
            )
            self.agent_connections.queue_message(
                node.index, protocol.LaunchNodeRanksRequest(asdict(theirs), key, node.place.address)
            )
        self.agent_connections.wake()
        return self._channels

    def _ranks_per_node(self, world_size: int) -> list[range]:
        shares, first = [], 0
        for node in self.nodes:
            shares.append(range(first, min(first + node.place.ranks, world_size)))
            first = shares[-1].stop
        return shares

    def _used_nodes(self) -> list[Node]:
        """Nodes with ranks of the last start."""
        return [node for node in self.nodes if node.ranks]

    def nodes_for(self, world_size: int) -> list[SessionNode]:
        """Return the machines of this many ranks with their hardware."""
        found = []
        for node, ranks in zip(self.nodes, self._ranks_per_node(world_size), strict=True):
            if not ranks or node.hello is None:
                continue
            machine = Machine.from_json(node.hello.machine)
            known = {gpu.uuid: gpu for gpu in machine.gpus}
            own = node.place.gpus[: len(ranks)]
            gpus = tuple(known[uuid] for uuid in own if uuid in known)
            link = machine.link if len(gpus) > 1 else None
            machine = replace(machine, gpus=gpus, link=link)
            found.append(SessionNode(node.place.name, tuple(ranks), machine))
        return found

    def node_usage(self, within_s: float) -> dict[str, NodeUsage]:
        """Return the usage of the ranks' nodes that respond in time."""
        found = self._request_many("now", {node: {} for node in self._used_nodes()}, within_s)
        return {node.place.name: NodeUsage.from_json(usage) for node, usage in found.items()}

    def send(self, message: messages.LauncherMessage) -> None:
        """Send a message to all connected launchers."""
        self._send_to_all(protocol.LauncherLinkMessage(messages.encode_line(message).decode()))

    def _send_to_all(self, message: protocol.Message) -> None:
        for node in self.nodes:
            if node.is_connected:
                self.agent_connections.queue_message(node.index, message)
        self.agent_connections.wake()

    def resume_stopped(self) -> None:
        """Do nothing: an agent resumes its launcher before it stops the ranks."""

    def describe(self) -> list[dict[str, Any]]:
        """Return the launchers as JSON values."""
        return [
            {
                "pid": node.hello.launcher,
                "alive": node.lost is None and not self._closing.is_set(),
                "name": node.launcher_name,
                "node": node.place.name,
            }
            for node in self.nodes
            if node.hello is not None
        ]

    def node_of(self, rank: int) -> str:
        """Return the name of a rank's node."""
        return self.node_by_rank[rank].place.name if rank in self.node_by_rank else ""

    def process_statuses(self, members: Mapping[int, RankProcess]) -> dict[str, ProcessStatus]:
        """Return the status of ranks and launchers, as last reported by the agents."""
        processes = [
            (f"rank {rank}", self.node_by_rank[rank], f"rank {rank}", member.pid)
            for rank, member in members.items()
        ]
        processes += [
            (node.launcher_name, node, LAUNCHER_NAME, node.hello.launcher)
            for node in self.nodes
            if node.hello is not None
        ]
        statuses = {}
        for name, node, name_on_node, pid in processes:
            has_ended = node.lost is not None or self._closing.is_set()
            state = EXITED if has_ended else node.states.get(name_on_node, RUNNING)
            statuses[name] = ProcessStatus(pid, state)
        return statuses

    def dump_stacks(self, pids: Mapping[int, int], *, launchers: bool) -> dict[str, str]:
        """Dump Python stacks by signal, on all nodes in parallel."""
        requests: dict[Node, dict[str, Any]] = {}
        for node in self._used_nodes():
            theirs = {rank: pid for rank, pid in pids.items() if rank in node.ranks}
            if theirs or launchers:
                requests[node] = {"pids": theirs, "launchers": launchers}
        stacks = {f"rank{rank}": f"{self.node_of(rank)} does not respond" for rank in pids}
        for node, found in self._request_many("stacks", requests).items():
            own = found.pop("launcher", None)
            stacks |= found
            if own is not None:
                stacks[node.launcher_name] = own
        return stacks

    def crash_artifacts(self) -> CrashArtifacts:
        """Return the crash artifacts of the last ranks, from their nodes."""
        left = CrashArtifacts()
        for found in self._request_many("left", {node: {} for node in self._used_nodes()}).values():
            left.crashes.update({int(rank): text for rank, text in found["crashes"].items()})
            left.notes.extend((rank, text) for rank, text in found["notes"])
        return left

    def log_tail(self) -> str:
        """Return the end of the logs of all nodes."""
        if self._closing.is_set():
            return self._log
        connected: dict[Node, dict[str, Any]] = {
            node: {} for node in self.nodes if node.is_connected
        }
        found = self._request_many("log", connected)
        return "\n".join(f"-- {node.place.name} --\n{log}" for node, log in found.items() if log)

    # -- files

    def payload_folders(self, rank: int) -> list[str]:
        """Return the folders for a rank's payload files, preferred first."""
        hello = self.node_by_rank[rank].hello
        return [] if hello is None else [hello.bulk_dir, hello.run_dir]

    @contextlib.contextmanager
    def ship_file(
        self, file: Path, ranks: Sequence[int], on_progress: TransferCallback
    ) -> Iterator[dict[int, str]]:
        """Copy a file once to each node of these ranks."""
        paths: dict[Node, str] = {}
        try:
            name, size = f"{secrets.token_hex(8)}.payload", file.stat().st_size
            for node in dict.fromkeys(self.node_by_rank[rank] for rank in ranks):
                request = self._request(node, "receive", name=name, size=size)
                paths[node], _ = self._wait_for_reply(request)
            done, total = 0, size * len(paths)
            with file.open("rb") as source:
                chunks = iter(functools.partial(source.read, CHUNK_BYTES), b"")
                requests = (
                    self._request(node, "chunk", chunk, path=path)
                    for chunk in chunks
                    for node, path in paths.items()
                )
                for written, _ in self._pipelined(requests, MAX_UNREAD_CHUNKS * len(paths)):
                    done += written
                    on_progress(done, total)
            yield {rank: paths[self.node_by_rank[rank]] for rank in ranks}
        finally:
            file.unlink(missing_ok=True)
            for node, path in paths.items():
                self._request(node, "remove", path=path).cancel()  # the reply is not needed

    def fetch_file(self, rank: int, path: str, on_progress: TransferCallback) -> Path:
        """Copy a payload file of a rank to this machine and remove it on the node."""
        check_payload_path(path, self.payload_folders(rank))
        node = self.node_by_rank[rank]
        size: int = self._wait_for_reply(self._request(node, "size", path=path))[0]
        preferred, other = self.run_dir.folders
        has_room = shutil.disk_usage(preferred).free > size + MIN_FREE_BYTES
        file = (preferred if has_room else other) / f"{secrets.token_hex(8)}.payload"
        file.touch(mode=0o600)
        requests = (
            self._request(node, "read", path=path, offset=offset)
            for offset in range(0, size, CHUNK_BYTES)
        )
        try:
            with file.open("wb") as sink:
                for _, frames in self._pipelined(requests, MAX_UNREAD_CHUNKS):
                    sink.write(frames[0])
                    on_progress(sink.tell(), size)
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        finally:
            self._request(node, "remove", path=path).cancel()
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
            raise CheckpointError(f"Cannot write to {folder}: {error.strerror}.") from error
        deadline = time.monotonic() + SHARED_FOLDER_TIMEOUT_S
        try:
            for node in self._used_nodes():
                while True:
                    request = self._request(node, "sees", path=str(trial), text=text)
                    problem, _ = self._wait_for_reply(request)
                    if not problem:
                        break
                    if time.monotonic() > deadline:
                        raise CheckpointError(f"{node.title}: {problem}. {SHARED_FOLDER_HINT}.")
                    self._closing.wait(SHARED_POLL_S)  # network file systems show it with a delay
        finally:
            trial.unlink(missing_ok=True)

    def check_shared_folder_async(self, folder: Path, on_warning: Callable[[str], object]) -> None:
        """Check the folder in the background: network file systems show it with a delay."""

        def look() -> None:
            existing = next(path for path in (folder, *folder.parents) if path.is_dir())
            try:
                self.check_shared_folder(existing)
            except CheckpointError as error:
                on_warning(str(error))
            except SessionError:
                return  # the nodes are lost

        thread = threading.Thread(target=look, name="nbdist-folder", daemon=True)
        self._threads.append(thread)  # joined on close, so that it removes its trial file
        thread.start()

    # -- requests to agents

    def _request(
        self, node: Node, kind: str, /, *frames: bytes, **arguments: Any
    ) -> Future[AgentResult]:
        """Send a request to an agent; a failed one raises SessionError."""
        number = next(self._numbers)
        reply: Future[AgentResult] = Future()
        node.requests[number] = reply
        reply.add_done_callback(lambda _: node.requests.pop(number, None))
        if node.lost is not None:
            reply.set_exception(SessionError(f"{node.title} {node.lost or 'was closed'}"))
        else:
            query = protocol.AgentRequest(number, kind, arguments)
            self.agent_connections.send(node.index, query, *frames)
        return reply

    def _wait_for_reply(
        self, reply: Future[AgentResult], within_s: float = REQUEST_TIMEOUT_S
    ) -> AgentResult:
        """Wait for a reply; raises SessionError for an error or a timeout."""
        try:
            return reply.result(within_s)
        except TimeoutError:
            reply.cancel()
            raise SessionError(f"A node did not respond within {within_s:.0f} s.") from None

    def _request_many(
        self,
        kind: str,
        requests: Mapping[Node, dict[str, Any]],
        within_s: float = REQUEST_TIMEOUT_S,
    ) -> dict[Node, Any]:
        """Send a request to several agents; return the replies by node, without failed ones."""
        replies = {
            node: self._request(node, kind, **arguments) for node, arguments in requests.items()
        }
        futures.wait(replies.values(), within_s)
        found = {}
        for node, reply in replies.items():
            # a node that does not reply in time will be reported as lost
            if not reply.cancel() and reply.exception() is None:
                found[node] = reply.result()[0]
        return found

    def _pipelined(
        self, requests: Iterable[Future[AgentResult]], max_in_flight: int
    ) -> Iterator[AgentResult]:
        """Yield the results of the requests of a file transfer, with a limited number in flight."""
        in_flight: deque[Future[AgentResult]] = deque()
        remaining = iter(requests)
        while True:
            in_flight.extend(itertools.islice(remaining, max_in_flight - len(in_flight)))
            if not in_flight:
                return
            try:
                result = self._wait_for_reply(in_flight.popleft(), TRANSFER_TIMEOUT_S)
            except SessionError as error:
                raise PayloadError(f"File transfer with a node failed: {error}") from error
            yield result

    # -- what arrives, on the agent server's thread

    def detach_channels(self, channels: NodeChannels) -> None:
        """Detach the channels and let the agents close the ranks' sockets."""
        if self._channels is channels:
            self._channels = None
            self._send_to_all(protocol.CloseRankSocketsRequest())

    def _on_agent_message(self, index: int, message: protocol.Message, frames: list[bytes]) -> None:
        node = self.nodes[index]
        match message:
            case protocol.MessagesFromRanks(generation=self._generation):
                channels = self._channels
                if channels is not None:
                    channels.inbox.put((node, message, frames))
            case protocol.LauncherLinkMessage(text=text):
                line = messages.decode_line(text.encode())
                self._events.put(lambda: self._on_launcher_message(node, line))
            case protocol.KeyValueMessage():
                self._store.answer_request(index, message, frames)
            case protocol.AgentReply():
                reply = node.requests.get(message.id)
                with contextlib.suppress(futures.InvalidStateError):  # cancelled meanwhile
                    if reply is not None and message.error:
                        reply.set_exception(SessionError(message.error))
                    elif reply is not None:
                        reply.set_result((message.value, frames))
            case protocol.ProcessStates(states=states):
                node.states = states
            case protocol.AgentHello():
                node.hello = message

    def _on_connection_end(self, index: int, reason: str) -> None:
        node = self.nodes[index]
        if not self._closing.is_set():
            self._events.put(
                lambda: self._lose_node(node, self._cluster.lost_nodes().get(index, reason))
            )
        elif node.lost is None:
            node.lost = ""

    # -- threads of its own

    def _handle_events(self) -> None:
        """Handle launcher messages in order. On a separate thread, since listeners may block."""
        while (event := self._events.get()) is not None:
            event()
        if self._failure and not self._closed:
            self.close()

    def _poll_cluster(self) -> None:
        """Poll the cluster for lost and drained nodes, and the store for timeouts."""
        reported: set[int] = set()
        while not self._closing.is_set():
            for index, reason in self._cluster.lost_nodes().items():
                if self.nodes[index].lost is None:
                    self._events.put(functools.partial(self._lose_node, self.nodes[index], reason))
            drained = self._cluster.drained_nodes()
            for index in drained.keys() - reported:
                end, cause = drained[index], f"the drain of {self.nodes[index].title}"
                notice = messages.TerminationNotice(
                    cause, None if end is None else end - time.time()
                )
                self._events.put(functools.partial(self.listener, notice))
            reported |= drained.keys()
            self._store.expire_requests()
            self._closing.wait(POLL_INTERVAL_S)

    def _on_launcher_message(self, node: Node, line: messages.LauncherMessage) -> None:
        """Handle a launcher message; the end of the ranks is reported for all nodes together."""
        name = node.place.name
        match line:
            case messages.LauncherReady():
                node.is_warm = True
                if self.is_warm:
                    self.listener(line)
            case messages.LauncherProgress(text=text):
                self.listener(messages.LauncherProgress(f"{name}: {text}"))
            case messages.RankExited():
                self.listener(replace(line, node=name))
            case messages.AllRanksExited(generation=generation) if generation == LAUNCHER_GONE:
                self._lose_node(node, "", replace(line, node=name))
            case messages.AllRanksExited(generation=self._generation):
                self._on_ranks_end(node, replace(line, node=name))
            case messages.TerminationNotice(cause=cause):
                self.listener(replace(line, cause=f"{cause} of {node.title}"))
            case messages.RankForked():
                self.listener(line)

    def _on_ranks_end(self, node: Node, ended: messages.AllRanksExited) -> None:
        """Handle the end of one node's ranks: end the others, report once all have ended."""
        if all(other.ended is None for other in self.nodes):
            self._first_end = ended
            self.send(messages.StopRanksRequest())
        node.ended = ended
        codes = self._first_end.exitcodes
        for other in self._used_nodes():
            if other.ended is None:
                return
            codes = other.ended.exitcodes | codes
        self.listener(replace(self._first_end, exitcodes=codes))

    def _lose_node(
        self, node: Node, reason: str, ended: messages.AllRanksExited | None = None
    ) -> None:
        """Handle the loss of a node or its launcher: end everything."""
        if node.lost is not None or self._closing.is_set():
            return
        node.lost = reason or "lost its launcher, which ended"
        failure = f"{node.title} {node.lost}"
        self._failure = self._failure or failure
        for reply in list(node.requests.values()):
            with contextlib.suppress(futures.InvalidStateError):  # cancelled meanwhile
                reply.set_exception(SessionError(failure))
        if ended is None:
            ended = messages.AllRanksExited(LAUNCHER_GONE, error=failure, node=node.place.name)
        self.listener(ended)
        self._events.put(None)  # end the other nodes too


class ClusterLauncherProvider:
    """Provides launchers on the nodes of a cluster; each agent checks its own machine."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def acquire_launchers(
        self,
        kind: DeviceType,
        world_size: int,  # noqa: ARG002 - the cluster knows the ranks of each node
        progress: Callable[[str], None],
        python: RankPython,  # noqa: ARG002 - ranks use the Python of their agent
    ) -> NodeGroup:
        """Reserve nodes and start an agent on each; the caller closes them.

        Raises:
            StartError: no nodes available; nothing stays reserved.
        """
        group = NodeGroup(self.cluster, kind)
        try:
            group.start(progress)
        except BaseException:
            group.close()
            raise
        return group


LauncherGroup = Launcher | NodeGroup
"""The launchers of a session."""
LauncherProvider = LocalLauncherProvider | ClusterLauncherProvider
