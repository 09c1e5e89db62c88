"""A session's nodes: one agent with a launcher on each, reached through the kernel's hub.

Runs in the kernel. To the kernel's rooms it is what one launcher is on one machine (`fleet`). All
nodes start and end together: who loses one ends the others.
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
from dataclasses import asdict, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from nbdist.cluster import message_batch, protocol
from nbdist.cluster.agent_server import CLOSE_S, Hub
from nbdist.cluster.interfaces import GONE, Left, Process
from nbdist.cluster.kv_store import MeetingPoint
from nbdist.cluster.local import LAUNCHER, LAUNCHER_GONE, foreign_words
from nbdist.cluster.protocol import CHUNK_BYTES, LEASE_S, SHARE_IT, SHARED_S, WINDOW
from nbdist.cluster.rank_channels import BUSY_POLL_MS, QUIET_POLL_MS, Channels
from nbdist.cluster.run_dir import RunDir
from nbdist.errors import CheckpointError, PayloadError, SessionError, StartError
from nbdist.hardware.discovery import Machine, Node
from nbdist.hardware.telemetry import Now
from nbdist.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from nbdist.cluster.allocation import Cluster, Kind, Place, Wanted
    from nbdist.cluster.interfaces import Member, Moved
    from nbdist.cluster.rank_channels import Channel, Reader

log = logging.getLogger(__name__)

HELLO_S = 120.0
"""For the agents to be there once the cluster has started them."""
ASK_S = 5.0
FILE_S = 60.0
"""Without a word about a file for so long, it will not come."""
END_S = 10.0
"""For the agents to end everything by themselves."""
LOOK_S = 1.0
SHARED_POLL_S = 0.25
RUNNING = "running"


def _nobody(_message: messages.LinkMessage) -> None:
    """Listen to nodes that no session holds yet."""


class Relay(Channels):
    """Channels to ranks on nodes: their frames go through the hub."""

    def __init__(self, nodes: Nodes, key: bytes, reader: Reader) -> None:
        """Begin to read."""
        super().__init__(key, reader)
        self._nodes = nodes
        self._inbox: SimpleQueue[tuple[int, list[bytes]] | None] = SimpleQueue()
        self._key = key
        self._read: dict[int, int] = {}
        """Number of the last bundle of each node."""
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="nbdist-reader", daemon=True)
        self._thread.start()

    def put(self, index: int, frames: list[bytes]) -> None:
        """Take a bundle of a node; on the hub's thread."""
        self._inbox.put((index, frames))

    def wake(self) -> None:
        """Send what is queued and have `Reader.idle` called."""
        self._nodes.hub.wake()
        self._inbox.put(None)

    def close(self) -> None:
        """End the reader thread."""
        self._closing = True
        self._nodes.let_go(self)
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(ASK_S)

    def _queue(self, ranks: Sequence[int], channel: Channel, frames: list[bytes]) -> None:
        self._nodes.post_frames(ranks, channel, frames)

    def _serve(self) -> None:
        timeout_s, due = 0.0, time.monotonic()
        while not self._closing:
            woken = False
            with contextlib.suppress(Empty):  # nothing came: the session may have to do something
                item = self._inbox.get(timeout=max(timeout_s, 0.001))
                woken = item is None
                if item is not None:
                    self._open(*item)
            if woken or time.monotonic() >= due:
                timeout_s = (BUSY_POLL_MS if self._idle() else QUIET_POLL_MS) / 1000
                due = time.monotonic() + timeout_s

    def _open(self, index: int, frames: list[bytes]) -> None:
        """Read a bundle of a node; whatever came, the next is read after it."""
        try:
            number, said = message_batch.unpacked(frames, self._key, self._read.get(index, 0))
        except (ValueError, LookupError, TypeError) as error:
            log.warning("node %d: %s was dropped", index, error)
            return
        self._read[index] = number
        theirs = self._nodes.ranks_of(index)
        for ranks, channel, parts in said:
            if not ranks or not theirs.issuperset(ranks):
                log.warning("node %d: a message of other nodes' ranks was dropped", index)
                continue
            try:
                message = message_batch.read(parts) if parts else None
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                log.exception("rank %d, %s: a message that nobody can read", ranks[0], channel)
                continue
            self._take(ranks, channel, message)
        self._nodes.taken(index)


class Nodes:
    """The nodes of a session, or those that it is about to get.

    Args:
        cluster: that gives them.
        kind: of the ranks.
    """

    def __init__(self, cluster: Cluster, kind: Kind) -> None:
        """Ask for nothing yet."""
        self.kind = kind
        self.listener: Callable[[messages.LinkMessage], None] = _nobody
        self.places: list[Place] = []
        self.run_dir = RunDir.create()
        self.hub: Hub
        self._cluster = cluster
        self._hellos: dict[int, protocol.Hello] = {}
        self._warm: set[int] = set()
        self._states: dict[int, dict[str, str]] = {}
        self._lost: dict[int, str] = {}
        self._shares: list[tuple[int, range]] = []
        """Places that take part in the last start, with their ranks."""
        self._node_of: dict[int, int] = {}
        """By rank of the last start."""
        self._generation = 0
        self._ended: dict[int, messages.Ended] = {}
        self._point = MeetingPoint(self._store_reply)
        self._relay: Relay | None = None
        self._asked: dict[int, tuple[int, SimpleQueue[Any]]] = {}
        self._numbers = itertools.count(1)
        self._events: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._log = ""
        self._closing = self._closed = False
        self._ends = threading.Event()
        """Nothing has to be looked at any more."""
        self._over = threading.Event()
        """Everything is ended and given back."""
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        atexit.register(self.close)

    # -- life

    def start(self, wanted: Wanted, progress: Callable[[str], None]) -> None:
        """Get nodes and wait until an agent has come from each.

        Raises:
            StartError: no nodes, or one whose agent does not come; nothing stays reserved.
        """
        self.places = self._cluster.allot(wanted, progress)
        got = sum(place.ranks for place in self.places)
        if wanted.nproc is not None and got < wanted.nproc:
            msg = f"{wanted.nproc} ranks were asked for and {self._cluster.name} gives {got}."
            raise StartError(msg)
        self.hub = Hub(self._cluster.reach, take=self._take, gone=self._connection_ended)
        for target, name in ((self._tell, "nbdist-link"), (self._look, "nbdist-cluster")):
            thread = threading.Thread(target=target, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        progress(f"starting agents on {len(self.places)} nodes")
        self._cluster.start([self._ticket(index) for index in range(len(self.places))])
        self._wait_for_agents()

    def _ticket(self, index: int) -> str:
        public, secret = self.hub.let_in(index)
        return protocol.Ticket(
            hub=self.hub.address,
            hub_key=self.hub.public,
            public=public,
            secret=secret,
            index=index,
            kind=self.kind,
            cwd=str(Path.cwd()),
            path=list(sys.path),
            lease_s=LEASE_S,
        ).to_json()

    def _wait_for_agents(self) -> None:
        deadline = time.monotonic() + HELLO_S
        while len(self._hellos) < len(self.places):
            if self._lost:
                index, why = next(iter(self._lost.items()))
                raise StartError(f"{self._named(index)} {why}.")
            if time.monotonic() > deadline:
                missing = [self._named(i) for i in range(len(self.places)) if i not in self._hellos]
                msg = (
                    f"The agent of {', '.join(missing)} did not reach this machine at"
                    f" {self.hub.address} within {HELLO_S:.0f} s: the nodes must be able to connect"
                    " to that address, and a firewall must let them."
                )
                raise StartError(msg)
            threading.Event().wait(0.02)

    @property
    def warm(self) -> bool:
        """Whether all launchers can fork at once."""
        return len(self._warm) == len(self.places)

    @property
    def alive(self) -> bool:
        """Whether all nodes are there."""
        return not self._lost and not self._closing

    def fits(self, kind: Kind, world_size: int) -> bool:
        """Whether these nodes can start so many ranks of this kind."""
        room = sum(place.ranks for place in self.places)
        return self.alive and self.kind == kind and world_size <= room

    def close(self) -> None:
        """End agents, launchers and ranks, and give the nodes back."""
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            self._over.wait(END_S + CLOSE_S)  # by another thread: the cluster has to be free
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
        self.listener = _nobody
        if self.places and self._threads:
            for index in self._hellos:
                self.hub.send(index, protocol.End())
            deadline = time.monotonic() + END_S
            while not self._hellos.keys() <= self._lost.keys() and time.monotonic() < deadline:
                threading.Event().wait(0.02)
            self.hub.close()
        self._events.put(None)
        self._ends.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(ASK_S)

    # -- what the kernel asks of a fleet

    def launch(self, launch: messages.Launch, key: str, reader: Reader) -> Channels:
        """Start ranks: each node its share, in the order of the nodes."""
        self._shares = list(self._shared(launch.world_size))
        self._node_of = {rank: index for index, mine in self._shares for rank in mine}
        self._generation, self._ended = launch.generation, {}
        self._point = MeetingPoint(self._store_reply)
        self._relay = Relay(self, key.encode(), reader)
        for number, (index, mine) in enumerate(self._shares):
            place = self.places[index]
            theirs = replace(
                launch,
                devices=None if launch.devices is None else list(place.gpus[: len(mine)]),
                first=mine.start,
                here=len(mine),
                node=number,
                nodes=len(self._shares),
            )
            self.hub.post(index, protocol.Launch(asdict(theirs), key, place.address))
        self.hub.wake()
        return self._relay

    def _shared(self, world_size: int) -> Iterator[tuple[int, range]]:
        """Places that get ranks, with these."""
        first = 0
        for index, place in enumerate(self.places):
            mine = range(first, min(first + place.ranks, world_size))
            if mine:
                yield index, mine
            first = mine.stop

    def nodes(self, world_size: int) -> list[Node]:
        """The machines that so many ranks are on, with what their agents have found."""
        return [
            Node(self.places[index].name, tuple(mine), self._machine(index, len(mine)))
            for index, mine in self._shared(world_size)
        ]

    def _machine(self, index: int, ranks: int) -> Machine:
        """A node with the GPUs that so many ranks have there."""
        found = Machine.from_json(self._hellos[index].machine)
        known = {gpu.uuid: gpu for gpu in found.gpus}
        gpus = tuple(known[uuid] for uuid in self.places[index].gpus[:ranks] if uuid in known)
        return replace(found, gpus=gpus, link=found.link if len(gpus) > 1 else None)

    def now(self, within_s: float) -> dict[str, Now]:
        """What the nodes of the ranks hold and do: one answer of each."""
        asked: dict[int, dict[str, Any]] = {index: {} for index, _ in self._shares}
        found = self._answers("now", asked, within_s)
        return {self.places[index].name: Now.from_json(one) for index, one in found.items()}

    def send(self, message: messages.LinkMessage) -> None:
        """Send a message to all launchers that can be reached."""
        line = protocol.Line(messages.to_line(message).decode())
        for index in self._reached():
            self.hub.post(index, line)
        self.hub.wake()

    def wake_up(self) -> None:
        """Nothing to do: an agent wakes its launcher before it halts it."""

    def describe(self) -> list[dict[str, Any]]:
        """The launchers as plain values."""
        return [
            {
                "pid": hello.launcher,
                "alive": index not in self._lost and not self._closing,
                "name": self._launcher_name(index),
                "node": self.places[index].name,
            }
            for index, hello in sorted(self._hellos.items())
        ]

    def node_of(self, rank: int) -> str:
        """Name of a rank's node."""
        index = self._node_of.get(rank)
        return "" if index is None else self.places[index].name

    def processes(self, members: Mapping[int, Member]) -> dict[str, Process]:
        """How ranks and launchers are, as the agents said last."""
        found = {}
        for rank, member in members.items():
            found[f"rank {rank}"] = self._process(self._node_of[rank], f"rank {rank}", member.pid)
        for index, hello in self._hellos.items():
            process = self._process(index, LAUNCHER, hello.launcher)
            found[self._launcher_name(index)] = process
        return found

    def stacks(self, pids: Mapping[int, int], *, launchers: bool) -> dict[str, str]:
        """Python stacks by signal, of all nodes at once."""
        asked: dict[int, dict[str, Any]] = {}
        for index, _ in self._shares:
            theirs = {rank: pid for rank, pid in pids.items() if self._node_of[rank] == index}
            if theirs or launchers:
                asked[index] = {"pids": theirs, "launchers": launchers}
        told = {f"rank{rank}": f"{self.node_of(rank)} does not answer" for rank in pids}
        for index, found in self._answers("stacks", asked).items():
            own = found.pop("launcher", None)
            told |= found
            if own is not None:
                told[self._launcher_name(index)] = own
        return told

    def left(self) -> Left:
        """What the ranks of the last start have left on their nodes."""
        left = Left()
        asked: dict[int, dict[str, Any]] = {index: {} for index, _ in self._shares}
        for found in self._answers("left", asked).values():
            left.crashes.update({int(rank): text for rank, text in found["crashes"].items()})
            left.notes.extend((rank, text) for rank, text in found["notes"])
        return left

    def log_tail(self) -> str:
        """The end of the logs of all nodes."""
        if self._closing:
            return self._log
        found = self._answers("log", {index: {} for index in self._reached()})
        logs = ((self.places[index].name, text) for index, text in found.items() if text)
        return "\n".join(f"-- {name} --\n{text}" for name, text in logs)

    # -- files

    @property
    def staging(self) -> list[Path]:
        """Where the kernel puts payload files, best first."""
        return [self.run_dir.bulk, self.run_dir.path]

    def folders(self, rank: int) -> list[str]:
        """Where a rank may write payload files, best first."""
        hello = self._hellos[self._node_of[rank]]
        return [hello.bulk_dir, hello.run_dir]

    @contextlib.contextmanager
    def shipped(self, file: Path, ranks: Sequence[int], told: Moved) -> Iterator[dict[int, str]]:
        """Bring a file to the nodes of these ranks, to each once."""
        indices = sorted({self._node_of[rank] for rank in ranks})
        paths: dict[int, str] = {}
        try:
            given = {"name": f"{secrets.token_hex(8)}.payload", "size": file.stat().st_size}
            for index in indices:
                paths[index] = self._answer(*self._ask(index, "receive", given))
            self._ship(file, paths, told)
            yield {rank: paths[self._node_of[rank]] for rank in ranks}
        finally:
            file.unlink(missing_ok=True)
            for index, path in paths.items():
                self._forget(self._ask(index, "remove", {"path": path})[0])

    def _ship(self, file: Path, paths: Mapping[int, str], told: Moved) -> None:
        """Send a file in chunks; a few are on their way at once."""
        acknowledged: SimpleQueue[Any] = SimpleQueue()
        on_the_way = done = 0
        total = file.stat().st_size * len(paths)
        with file.open("rb") as source:
            while (chunk := source.read(CHUNK_BYTES)) or on_the_way:
                for index, path in paths.items() if chunk else ():
                    self._ask(index, "chunk", {"path": path}, chunk, into=acknowledged)
                    on_the_way += 1
                while on_the_way and (not chunk or on_the_way >= WINDOW * len(paths)):
                    written, _ = self._taken(acknowledged)
                    done, on_the_way = done + written, on_the_way - 1
                    told(done, total)

    def fetch(self, rank: int, path: str, told: Moved) -> Path:
        """Bring a payload file of a rank here; there it is removed."""
        if str(Path(path).parent) not in self.folders(rank):
            raise PayloadError(foreign_words(path))
        index = self._node_of[rank]
        size: int = self._answer(*self._ask(index, "size", {"path": path}))
        file = self._room_for(size) / f"{secrets.token_hex(8)}.payload"
        chunks: SimpleQueue[Any] = SimpleQueue()
        offsets = iter(range(0, size, CHUNK_BYTES))
        file.touch(mode=0o600)
        try:
            with file.open("wb") as sink:
                waiting = 0
                for offset in itertools.islice(offsets, WINDOW):
                    self._ask(index, "read", {"path": path, "offset": offset}, into=chunks)
                    waiting += 1
                while waiting:
                    _, frames = self._taken(chunks)
                    sink.write(frames[0])
                    told(sink.tell(), size)
                    waiting -= 1
                    if (after := next(offsets, None)) is not None:
                        given = {"path": path, "offset": after}
                        self._ask(index, "read", given, into=chunks)
                        waiting += 1
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        finally:
            self._forget(self._ask(index, "remove", {"path": path})[0])
        return file

    def _room_for(self, size: int) -> Path:
        bulk, usual = self.staging
        return bulk if shutil.disk_usage(bulk).free > size + (64 << 20) else usual

    def private_folders(self) -> list[Path]:
        """A folder for what passes from ranks to ranks, beside the checkpoints: all nodes see it.

        Raises:
            CheckpointError: a node does not.
        """
        parent = Path.cwd() / "checkpoints"
        self.see(parent)
        return [Path(tempfile.mkdtemp(prefix=".handover-", dir=parent))]

    def see(self, folder: Path) -> None:
        """Make sure that all nodes of the ranks see a folder that this machine sees.

        Raises:
            CheckpointError: which node does not, or cannot write there.
        """
        trial = folder / f".nbdist-{secrets.token_hex(8)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            trial.write_text(text := secrets.token_hex(16))
        except OSError as error:
            msg = f"{folder} cannot be written here: {error.strerror}."
            raise CheckpointError(msg) from error
        given, deadline = {"path": str(trial), "text": text}, time.monotonic() + SHARED_S
        try:
            for index, _ in self._shares:
                while why := self._answer(*self._ask(index, "sees", given)):
                    if time.monotonic() > deadline:
                        raise CheckpointError(f"{self._named(index)}: {why}. {SHARE_IT}.")
                    self._ends.wait(SHARED_POLL_S)  # a network's file system tells it late
        finally:
            trial.unlink(missing_ok=True)

    def see_later(self, folder: Path, complain: Callable[[str], object]) -> None:
        """Look in the background: a network's file system may tell it late."""

        def look() -> None:
            there = next(one for one in (folder, *folder.parents) if one.is_dir())
            try:
                self.see(there)
            except CheckpointError as error:
                complain(str(error))
            except SessionError:
                return  # nodes that are gone see nothing

        thread = threading.Thread(target=look, name="nbdist-folder", daemon=True)
        self._threads.append(thread)  # its trial file is gone before the nodes are
        thread.start()

    # -- requests to agents

    def _ask(
        self,
        index: int,
        what: str,
        given: dict[str, Any] | None = None,
        *frames: bytes,
        into: SimpleQueue[Any] | None = None,
    ) -> tuple[int, SimpleQueue[Any]]:
        """Ask an agent; its answer comes into a queue."""
        number = next(self._numbers)
        answers: SimpleQueue[Any] = SimpleQueue() if into is None else into
        self._asked[number] = index, answers
        if index in self._lost:
            self._settle(number, protocol.Answer(number, error=self._lost[index]), [])
        else:
            self.hub.send(index, protocol.Ask(number, what, given or {}), *frames)
        return number, answers

    def _answer(self, number: int, answers: SimpleQueue[Any]) -> Any:
        """Wait for the answer; raises SessionError where there is none."""
        try:
            answer, _ = answers.get(timeout=ASK_S)
        except Empty:
            self._forget(number)
            msg = f"A node has not answered for {ASK_S:.0f} s."
            raise SessionError(msg) from None
        if answer.error:
            raise SessionError(answer.error)
        return answer.value

    def _answers(
        self, what: str, asked: Mapping[int, dict[str, Any]], within_s: float = ASK_S
    ) -> dict[int, Any]:
        """Ask several agents at once; answers of those that give one, by place."""
        waiting = {index: self._ask(index, what, given) for index, given in asked.items()}
        deadline, found = time.monotonic() + within_s, {}
        for index, (number, answers) in waiting.items():
            with contextlib.suppress(Empty):  # it is about to be seen that the node is lost
                answer, _ = answers.get(timeout=max(0.0, deadline - time.monotonic()))
                if not answer.error:
                    found[index] = answer.value
            self._forget(number)
        return found

    def _taken(self, answers: SimpleQueue[Any]) -> tuple[Any, list[bytes]]:
        """Wait for one of several answers about a file."""
        try:
            answer, frames = answers.get(timeout=FILE_S)
        except Empty:
            msg = f"A node has said nothing about a file for {FILE_S:.0f} s."
            raise SessionError(msg) from None
        if answer.error:
            raise PayloadError(f"A node could not take or give a file: {answer.error}")
        return answer.value, frames

    def _forget(self, number: int) -> None:
        self._asked.pop(number, None)

    def _settle(self, number: int, answer: protocol.Answer, frames: list[bytes]) -> None:
        asked = self._asked.pop(number, None)
        if asked is not None:
            asked[1].put((answer, frames))

    # -- the ranks' frames

    def post_frames(self, ranks: Sequence[int], channel: Channel, frames: list[bytes]) -> None:
        """Queue frames to ranks: once to each node."""
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self._node_of[rank], []).append(rank)
        for index, theirs in by_node.items():
            message = protocol.Frames(tuple(theirs), channel, self._generation)
            self.hub.post(index, message, *frames)

    def ranks_of(self, index: int) -> frozenset[int]:
        """Ranks of a node."""
        return frozenset(rank for place, ranks in self._shares if place == index for rank in ranks)

    def taken(self, index: int) -> None:
        """Tell a node that a bundle of its ranks was read."""
        self.hub.send(index, protocol.Taken(self._generation))

    def let_go(self, relay: Relay) -> None:
        """Pass on no more frames."""
        if self._relay is relay:
            self._relay = None
            for index in self._reached():
                self.hub.post(index, protocol.Cut())
            self.hub.wake()

    # -- what arrives, on the hub's thread

    def _take(self, index: int, message: protocol.Message, frames: list[bytes]) -> None:
        match message:
            case protocol.Bundle(generation=self._generation):
                relay = self._relay
                if relay is not None:
                    relay.put(index, frames)
            case protocol.Line(text=text):
                line = messages.from_line(text.encode())
                self._events.put(lambda: self._hear(index, line))
            case protocol.Stored():
                self._point.take(index, message, frames)
            case protocol.Answer():
                self._settle(message.id, message, frames)
            case protocol.States(states=states):
                self._states[index] = states
            case protocol.Hello():
                self._hellos[index] = message

    def _store_reply(self, index: int, answer: protocol.Stored, frames: list[bytes]) -> None:
        self.hub.send(index, answer, *frames)

    def _connection_ended(self, index: int, why: str) -> None:
        if self._closing:
            self._lost.setdefault(index, "")
            return
        self._events.put(lambda: self._lose(index, self._cluster.lost().get(index, why)))

    # -- threads of its own

    def _tell(self) -> None:
        """Pass on, in order, what the nodes said: who listens may ask them in turn."""
        while (event := self._events.get()) is not None:
            event()
        if self._lost and not self._closed:
            self.close()

    def _look(self) -> None:
        """Ask the cluster what it knows, and the store whose time is up."""
        while not self._closing:
            for index, why in self._cluster.lost().items():
                if index not in self._lost:
                    self._events.put(functools.partial(self._lose, index, why))
            self._point.look()
            self._ends.wait(LOOK_S)

    def _hear(self, index: int, line: messages.LinkMessage) -> None:
        """Take a message of a launcher; ends are told for all nodes together."""
        name = self.places[index].name
        match line:
            case messages.Warm():
                self._warm.add(index)
                if self.warm:
                    self.listener(line)
            case messages.Progress(text=text):
                self.listener(messages.Progress(f"{name}: {text}"))
            case messages.RankEnded():
                self.listener(replace(line, node=name))
            case messages.Ended(generation=generation) if generation == LAUNCHER_GONE:
                self._lose(index, "", replace(line, node=name))
            case messages.Ended(generation=self._generation):
                self._one_ended(index, replace(line, node=name))
            case messages.Born():
                self.listener(line)

    def _one_ended(self, index: int, ended: messages.Ended) -> None:
        """The ranks of one node have ended: end the others, tell it once all have."""
        if not self._ended:
            self.send(messages.Halt())
        self._ended[index] = ended
        if self._ended.keys() >= {one for one, _ in self._shares}:
            first, *others = self._ended.values()
            codes = first.exitcodes
            for one in others:
                codes = one.exitcodes | codes
            self.listener(replace(first, exitcodes=codes))

    def _lose(self, index: int, why: str, ended: messages.Ended | None = None) -> None:
        """A node, or its launcher, is gone: everything ends."""
        if index in self._lost or self._closing:
            return
        self._lost[index] = why or "its launcher ended"
        for number, (asked, _) in list(self._asked.items()):
            if asked == index:
                self._settle(number, protocol.Answer(number, error=self._lost[index]), [])
        words = f"{self._named(index)} {why}"
        name = self.places[index].name
        self.listener(ended or messages.Ended(LAUNCHER_GONE, error=words, node=name))
        self._events.put(None)  # the other nodes are of no use any more

    # -- in words

    def _named(self, index: int) -> str:
        place = self.places[index]
        if place.address in place.name:  # as it is where several have one host name
            return f"node {place.name}"
        return f"node {place.name} ({place.address})"

    def _launcher_name(self, index: int) -> str:
        return f"{LAUNCHER} on {self.places[index].name}"

    def _process(self, index: int, name: str, pid: int) -> Process:
        told = self._states.get(index, {}).get(name, RUNNING)
        return Process(pid, GONE if index in self._lost or self._closing else told)

    def _reached(self) -> Iterable[int]:
        return [index for index in self._hellos if index not in self._lost]
