"""The processes of a session as the kernel sees them: launcher, channels, ranks.

Torch elastic's word: ranks start together and end together. Owns starting, ending,
watching, and the way of a request to a rank and of its answers back.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import psutil

from nbdist.cluster.interfaces import GONE, Left
from nbdist.cluster.local import LAUNCHER_GONE
from nbdist.cluster.process_inspection import STOPPED
from nbdist.cluster.rank_environment import scrubbed
from nbdist.errors import RankDied, SessionError, StartError
from nbdist.hardware import discovery
from nbdist.protocol import messages
from nbdist.protocol.signing import KEY_BYTES
from nbdist.redaction import redacted
from nbdist.session import failure_causes
from nbdist.session.oom_killer import OomCounter
from nbdist.session.startup import Arrival
from nbdist.session.stopped_processes import Pulse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from nbdist.cluster.allocation import Kind
    from nbdist.cluster.interfaces import Engine, Fleet
    from nbdist.cluster.rank_channels import Channel, Channels, Message
    from nbdist.errors import NbdistError
    from nbdist.hardware.discovery import Node
    from nbdist.hardware.telemetry import Now
    from nbdist.session.collective_request import Joint
    from nbdist.session.failure_causes import Death
    from nbdist.session.hang_detection import State
    from nbdist.session.startup import Member

HALT_S = 15.0
SILENT_S = 600.0
"""Without an answer or a word about a request for this long, it has failed: a rank may be
copying many gigabytes before it answers push or pull."""
WATCH_S = 0.7
"""How often the ranks' processes are looked at."""
REPORT_S = 0.8
"""How long the launcher may take to report a rank that is gone."""
SETTLE_S = 0.3
"""After the end of a rank this long, what it said last has been read, and who followed it."""


def _nobody(_line: str) -> None:
    """Take no notice."""


class Gang:
    """Ranks that start and end together.

    Args:
        engine: where launchers come from.
        on_message: gets messages that answer no request (report, late output).
        on_idle: called on the reader thread now and then; True asks for more often.
        on_death: called once when ranks or launcher ended unasked; returns it in full words.
        on_notice: gets a line when a process does not answer, and when it does again.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_message: Callable[[int, Message], None],
        on_idle: Callable[[], bool],
        on_death: Callable[[Death], RankDied],
        on_notice: Callable[[str], None] = _nobody,
    ) -> None:
        """Start nothing yet."""
        self.members: list[Member] = []
        self.pids: dict[int, int] = {}
        """Process of each rank, also of those that are still starting."""
        self.nodes: list[Node] = []
        """The machines of the last start; none for this one."""
        self.pulse = Pulse()
        self._engine = engine
        self._on_notice = on_notice
        self._on_message, self._on_idle, self._on_death = on_message, on_idle, on_death
        self._fleet: Fleet | None = None
        self._channels: Channels | None = None
        self.generation = 0
        """Number of the last start."""
        self._routes: dict[str, Any] = {}
        self.signs: SimpleQueue[Any] = SimpleQueue()
        """What is heard of launcher and ranks while they start."""
        self._lock = threading.Lock()
        self._ended: messages.Ended | None = None
        """The last end that the launcher has reported, of some generation."""
        self._up = self._dying = False
        self.joint: Joint | None = None
        """What all ranks are asked to do together now."""
        self._told: RankDied | None = None
        """How the ranks ended that are dead."""
        self.ends: list[messages.RankEnded] = []
        """Ends of ranks of this generation, in their order."""
        self._first_end_at = 0.0
        self._missing_since: float | None = None
        self._watch_due = 0.0
        self._heard = 0.0
        """When the ranks last said how far a long request is."""

    # -- life

    def start(
        self,
        *,
        world_size: int,
        devices: Sequence[str] | None,
        options: Mapping[str, Any],
        auto: Mapping[str, Any] | None,
        hardware: Mapping[str, Any],
        checkpoints: str,
        progress: Callable[[str], None],
    ) -> None:
        """Start ranks; returns once each has answered and passed a barrier with all.

        Raises:
            StartError: they did not come up; nothing is left running.
        """
        self._oom = OomCounter(self._engine.memory_events)
        fleet = self.take("cpu" if devices is None else "cuda", world_size, progress)
        if not fleet.warm:
            progress("the launcher warms up")
        try:
            self._launch(
                fleet,
                world_size,
                devices,
                options=dict(options),
                auto=None if auto is None else dict(auto),
                hardware=dict(hardware),
                checkpoints=checkpoints,
            )
            self.members = Arrival(self, world_size, progress).wait()
        except BaseException:
            self.close()
            raise
        self._up = True

    def take(self, kind: Kind, world_size: int, progress: Callable[[str], None]) -> Fleet:
        """Get what can start so many ranks; then `nodes` says where they will be.

        Raises:
            StartError: there is not enough; nothing is left running.
        """
        self._engine.check(world_size)
        if self._fleet is None or not self._fleet.fits(kind, world_size):
            self.close()
            self._fleet = self._engine.take(kind, world_size, progress)
        self.nodes = self._fleet.nodes(world_size)
        return self._fleet

    def halt(self) -> None:
        """End the ranks and wait until they are gone; the launcher stays warm."""
        self._up = False
        self._close_channels()
        fleet = self._fleet
        if fleet is None or not fleet.alive:
            return
        gone: SimpleQueue[messages.LinkMessage] = SimpleQueue()
        fleet.listener = gone.put
        fleet.wake_up()
        if self._ended is not None and self._ended.generation == self.generation:
            return  # they are gone already: there is nothing that the launcher could report
        try:
            fleet.send(messages.Halt())
            while not isinstance(message := gone.get(timeout=HALT_S), messages.Ended):
                pass
            self._ended = message
            if message.generation == LAUNCHER_GONE:
                self.close()  # it took its ranks with it, or could not end them all
        except (Empty, StartError):
            self.close()  # it does not answer, or is gone: take it down with its ranks

    def give_up(self) -> None:
        """Wait for no answer any more, on any thread; the ranks are ended next."""
        self._up = False

    def end(self, who: str, how: str) -> None:
        """End ranks that nothing else stops; from any thread. Told as any death of theirs."""
        self._died(None, failure_causes.Death(who=who, how=how, by_stop=True))

    def close(self) -> None:
        """End ranks and launcher; nothing of them is left on the machine."""
        self._up = False
        self._close_channels()
        if self._fleet is not None:
            self._fleet.close()
            self._fleet = None

    def _launch(
        self,
        fleet: Fleet,
        world_size: int,
        devices: Sequence[str] | None,
        *,
        options: dict[str, Any],
        auto: dict[str, Any] | None,
        hardware: dict[str, Any],
        checkpoints: str,
    ) -> None:
        self.generation += 1
        self._told = self._missing_since = None
        self.signs, self.ends, self.pids = SimpleQueue(), [], {}
        self.pulse = Pulse()
        fleet.listener = self._from_launcher
        launch = messages.Launch(
            generation=self.generation,
            world_size=world_size,
            devices=None if devices is None else list(devices),
            options=options,
            auto=auto,
            hardware=hardware,
            machines=discovery.to_runs(self.nodes),
            run_dir="",
            bulk_dir="",
            env=scrubbed(os.environ),
            cwd=os.getcwd(),  # noqa: PTH109 - a plain string for the wire
            path=sys.path,
            checkpoints=checkpoints,
        )
        self._channels = fleet.launch(launch, secrets.token_hex(KEY_BYTES), self)

    def _close_channels(self) -> None:
        if self._channels is not None:
            self._channels.close()
            self._channels = None
        self._routes.clear()
        self.members = []
        self.joint = None

    def remove_at_end(self, folder: Path, *, remove: bool = True) -> None:
        """Let the launcher remove a folder when this kernel is gone, or not any more."""
        if self._fleet is not None and self._fleet.alive:
            self._fleet.send(messages.RemoveAtEnd(str(folder), remove))

    # -- requests

    @property
    def fleet(self) -> Fleet:
        """Where the ranks are.

        Raises:
            SessionError: nowhere yet.
        """
        if self._fleet is None:
            raise _not_started()
        return self._fleet

    @property
    def warm(self) -> bool:
        """Whether the launcher can fork at once."""
        return self._fleet is not None and self._fleet.warm

    @property
    def launchers(self) -> list[dict[str, Any]]:
        """The launchers' states as plain values, one for each node."""
        found = [] if self._fleet is None else self._fleet.describe()
        return [{**one, "unresponsive": self.pulse.words(one["name"])} for one in found]

    def gone(self) -> list[int]:
        """Ranks whose processes have ended."""
        members = dict(enumerate(self.members))
        if self._fleet is None or not members:
            return list(members)
        found = self._fleet.processes(members)
        return [rank for rank in members if found[f"rank {rank}"].status == GONE]

    def state_of(self, rank: int) -> State:
        """Whether a rank's process is stopped, runs or sleeps, as far as it is known here."""
        status = self.pulse.status(f"rank {rank}")
        if status in STOPPED:
            return "stopped"
        if self.node_of(rank):  # an agent tells of stopped processes and of no other state
            return ""
        return "running" if status == psutil.STATUS_RUNNING else "sleeping"

    def node_of(self, rank: int) -> str:
        """Name of a rank's node; "" on one machine."""
        return "" if self._fleet is None else self._fleet.node_of(rank)

    def now(self, within_s: float) -> dict[str, Now]:
        """What each node holds and does, of those that answer in this time."""
        fleet = self._fleet
        return fleet.now(within_s) if fleet is not None and fleet.alive else {}

    def post(
        self,
        ranks: Sequence[int],
        channel: Channel,
        kind: str,
        content: Any,
        route: Any = None,
        *,
        note: messages.CellNote | None = None,
        together: bool = False,
    ) -> str:
        """Queue one request to ranks; `wake()` sends it.

        `route(rank, channel, message)` gets the answers of all; with `together`
        `route(ranks, channel, message)`, where ranks have answered the same.

        Returns:
            Its id, for `forget`.
        """
        if self._channels is None:
            raise _not_started()
        request = secrets.token_hex(16)
        if route is not None:
            self._routes[request] = route if together else _each(route)
        metadata = {messages.NOTE: note} if note else None
        self._channels.send(ranks, channel, kind, content, metadata=metadata, message_id=request)
        return request

    def forget(self, requests: Iterable[str]) -> None:
        """Route no more answers to these requests."""
        for request in requests:
            self._routes.pop(request, None)

    def ask(
        self,
        ranks: Iterable[int],
        kind: str,
        content: Any,
        *,
        channel: Channel = "shell",
        raises: type[NbdistError] = SessionError,
        patience_s: float = SILENT_S,
    ) -> dict[int, Any]:
        """Send a request to ranks and wait for the replies, by rank; as `ask_each`."""
        asked = [(list(ranks), content)]
        return self._ask(asked, kind, channel=channel, raises=raises, patience_s=patience_s)

    def ask_each(
        self,
        contents: Mapping[int, Any],
        kind: str,
        *,
        channel: Channel = "shell",
        raises: type[NbdistError] = SessionError,
        patience_s: float = SILENT_S,
    ) -> dict[int, Any]:
        """Send each rank its own request and wait for the replies, by rank.

        On the control channel ranks answer while a cell runs. The first reply that is an error
        ends the waiting. What all ranks do together is for `session.collective_request`.

        Raises:
            NbdistError: of the type given: it failed on a rank.
            RankDied: a rank ended before it answered.
            SessionError: for `patience_s` there was no answer, nor a word about the request.
        """
        asked = [([rank], content) for rank, content in contents.items()]
        return self._ask(asked, kind, channel=channel, raises=raises, patience_s=patience_s)

    def _ask(
        self,
        asked: Sequence[tuple[list[int], Any]],
        kind: str,
        *,
        channel: Channel,
        raises: type[NbdistError],
        patience_s: float,
    ) -> dict[int, Any]:
        """Send ranks what they are asked, and wait for all."""
        answers: SimpleQueue[tuple[int, str, Message]] = SimpleQueue()
        requests = [
            self.post(ranks, channel, kind, content, lambda *answer: answers.put(answer))
            for ranks, content in asked
        ]
        missing = {rank for ranks, _ in asked for rank in ranks}
        self.wake()
        replies: dict[int, Any] = {}
        try:
            while missing:
                rank, answered_on, message = self._answer(answers, kind, patience_s)
                if answered_on == channel:
                    replies[rank] = message["content"]
                    missing.discard(rank)
                    if replies[rank].get("status") == "error":
                        raise raises(replies[rank]["error"])
        finally:
            self.forget(requests)
        return replies

    def _answer(
        self, answers: SimpleQueue[Any], kind: str, patience_s: float
    ) -> tuple[int, str, Message]:
        since = time.monotonic()
        while time.monotonic() - max(since, self._heard) < patience_s:
            try:
                answer: tuple[int, str, Message] = answers.get(timeout=min(1.0, patience_s))
            except Empty:
                self.check_up(kind)
            else:
                return answer
        msg = f"The ranks have said nothing about {kind} for {patience_s:.0f} s."
        raise SessionError(msg)

    def check_up(self, kind: str) -> None:
        """Wait no longer for answers to a request where nobody can give them.

        Raises:
            RankDied: the ranks have ended.
        """
        if self._up:
            return
        deadline = time.monotonic() + REPORT_S
        while self._dying and time.monotonic() < deadline:
            time.sleep(0.01)  # another thread finds out how
        raise self._told or RankDied(f"The ranks ended before they answered {kind}.")

    def wake(self) -> None:
        """Send what is queued, and have `on_idle` called soon."""
        if self._channels is not None:
            self._channels.wake()

    def log_tail(self) -> str:
        """The end of what launcher and ranks wrote outside of cells."""
        return redacted(self._fleet.log_tail()) if self._fleet else ""

    def log_words(self) -> str:
        """The end of the log as part of an error message."""
        tail = self.log_tail()
        return f"The log ends:\n{tail}" if tail else "The log is empty."

    # -- what arrives, on the reader thread or the link's thread

    def receive(self, ranks: Sequence[int], channel: Channel, message: Message) -> None:
        """Route one message that these have sent."""
        if channel == "iopub" and not self._up:
            # any output shows that a rank is heard; its welcome alone was missed now and then
            for rank in ranks:
                self.signs.put(rank)
        if message["header"]["msg_type"] == "iopub_welcome":
            return
        if message["header"]["msg_type"] == messages.PHASE:
            self._heard = time.monotonic()
        route = self._routes.get(message["parent_header"].get("msg_id", ""))
        if message["header"]["msg_type"] in messages.OF_SESSION or route is None:
            for rank in ranks:
                self._on_message(rank, message)
        else:
            route(ranks, channel, message)

    def idle(self) -> bool:
        """Look whether the ranks live, then let the session do what is due."""
        now = time.monotonic()
        dying = self._up and bool(self.ends)
        if dying and self._settled(now):
            self._died(None)
        elif self._up and now >= self._watch_due:
            self._watch_due = now + WATCH_S
            self._watch()
        return self._on_idle() or dying

    def _settled(self, now: float) -> bool:
        """Whether all is known of the first end: its code comes late where elastic was quicker."""
        patience_s = SETTLE_S if self.ends[0].code is not None else REPORT_S
        return now - self._first_end_at > patience_s

    def _watch(self) -> None:
        """Look at the processes: the launcher reports ends at once, unless it is stopped itself."""
        fleet = self._fleet
        if fleet is None:
            return
        members = dict(enumerate(self.members))
        found = fleet.processes(members)
        for line in self.pulse.look(found):
            self._on_notice(line)
        gone = [rank for rank in members if found[f"rank {rank}"].status == GONE]
        if not gone:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = time.monotonic()
            fleet.wake_up()  # the launcher knows how that rank ended
        elif time.monotonic() - self._missing_since > REPORT_S:
            end = messages.RankEnded(self.generation, gone[0], None, node=fleet.node_of(gone[0]))
            self.ends = self.ends or [end]
            self._died(None)

    def _from_launcher(self, message: messages.LinkMessage) -> None:
        if isinstance(message, messages.Born) and message.generation == self.generation:
            self.pids[message.rank] = message.pid
        elif isinstance(message, messages.RankEnded) and message.generation == self.generation:
            self._first_end_at = self._first_end_at if self.ends else time.monotonic()
            self.ends.append(message)
            self.wake()
        self.signs.put(message)
        if isinstance(message, messages.Ended):
            self._ended = message
            if not self.ends or message.generation == LAUNCHER_GONE:
                self._died(message)

    def _died(self, ended: messages.Ended | None, death: Death | None = None) -> None:
        with self._lock:
            was_up, self._up = self._up, False
            self._dying = self._dying or was_up
        if not was_up:
            return
        death = death or self.death(ended)
        if self._fleet is not None:
            self._fleet.wake_up()
            with contextlib.suppress(StartError):  # it is gone
                self._fleet.send(messages.Halt())
        self._told = self._on_death(death)
        self._dying = False

    def death(self, ended: messages.Ended | None) -> Death:
        """What has ended the ranks."""
        lost = ended is not None and ended.generation == LAUNCHER_GONE and bool(ended.node)
        if self.ends and not lost:
            ends = [failure_causes.completed(end, ended or self._ended) for end in self.ends]
            crashes = self.left().crashes
            return failure_causes.of_ranks(
                ends, oom=self._oom, stack_of=crashes, log=self.log_tail()
            )
        return failure_causes.of_launcher(ended, oom=self._oom)

    def left(self) -> Left:
        """What the ranks of this start have left in their folder."""
        return Left() if self._fleet is None else self._fleet.left()


def _each(route: Callable[[int, Channel, Message], None]) -> Any:
    """Route a message of several ranks for one rank after the other."""

    def route_each(ranks: Sequence[int], channel: Channel, message: Message) -> None:
        for rank in ranks:
            route(rank, channel, message)

    return route_each


def _not_started() -> SessionError:
    return SessionError("The session is not started: run a %%distribute cell or call start().")
