"""The processes of a session as the kernel sees them: launcher, channels, ranks.

Torch elastic's word: ranks start together and end together. Owns starting, ending,
watching, and the way of a request to a rank and of its answers back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import sys
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import psutil

from nbdist import wire
from nbdist.engines.environment import scrubbed
from nbdist.engines.local import LAUNCHER_GONE
from nbdist.errors import RankDied, SessionError, StartError
from nbdist.kernel.channel import Channels, write_connections
from nbdist.redacted import redacted
from nbdist.signed import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from nbdist.engines.local import Kind, Launcher, LocalEngine
    from nbdist.engines.run_dir import RunDir
    from nbdist.kernel.channel import Channel, Message

START_S = 120.0
"""Without any sign of launcher or ranks for this long, a start has failed."""
HALT_S = 15.0
SILENT_S = 600.0
"""Without an answer or a word about a request for this long, it has failed: a rank may be
copying many gigabytes before it answers push or pull."""
WATCH_S = 0.7
"""How often the ranks' processes are looked at."""
REPORT_S = 0.8
"""How long the launcher may take to report a rank that is gone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One rank's process."""

    pid: int
    created: float
    device: str

    def alive(self) -> bool:
        """Whether that very process runs; a zombie or a reused pid does not count."""
        try:
            process = psutil.Process(self.pid)
            return (
                process.create_time() == self.created and process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.NoSuchProcess:
            return False


class Gang:
    """Ranks that start and end together.

    Args:
        engine: where launchers come from.
        on_message: gets messages that answer no request (report, late output).
        on_idle: called on the reader thread now and then; True asks for more often.
        on_death: called once when ranks or launcher ended unasked.
    """

    def __init__(
        self,
        engine: LocalEngine,
        *,
        on_message: Callable[[int, Message], None],
        on_idle: Callable[[], bool],
        on_death: Callable[[RankDied], None],
    ) -> None:
        """Start nothing yet."""
        self.members: list[Member] = []
        self._engine = engine
        self._on_message, self._on_idle, self._on_death = on_message, on_idle, on_death
        self._launcher: Launcher | None = None
        self._channels: Channels | None = None
        self._generation = 0
        self._routes: dict[str, Any] = {}
        self._signs: SimpleQueue[Any] = SimpleQueue()
        self._lock = threading.Lock()
        self._ended = 0
        """Generation whose end the launcher has reported."""
        self._up = False
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
        progress: Callable[[str], None],
    ) -> None:
        """Start ranks; returns once each has answered and passed a barrier with all.

        Raises:
            StartError: they did not come up; nothing is left running.
        """
        kind: Kind = "cpu" if devices is None else "cuda"
        if self._launcher is None or not self._launcher.alive or self._launcher.kind != kind:
            self.close()
            self._launcher = self._engine.take(kind)
        if not self._launcher.warm:
            progress("the launcher warms up")
        try:
            self._launch(
                self._launcher,
                world_size,
                devices,
                options=dict(options),
                auto=None if auto is None else dict(auto),
                hardware=dict(hardware),
            )
            self._await_ranks(world_size, progress)
        except BaseException:
            self.close()
            raise
        self._up = True

    def halt(self) -> None:
        """End the ranks and wait until they are gone; the launcher stays warm."""
        self._up = False
        self._close_channels()
        launcher = self._launcher
        if launcher is None or not launcher.alive:
            return
        gone: SimpleQueue[wire.LinkMessage] = SimpleQueue()
        launcher.listener = gone.put
        if self._ended == self._generation:
            return  # they are gone already: there is nothing that the launcher could report
        try:
            launcher.send(wire.Halt())
            while not isinstance(gone.get(timeout=HALT_S), wire.Ended):
                pass
        except (Empty, StartError):
            self.close()  # it does not answer, or is gone: take it down with its ranks

    def give_up(self) -> None:
        """Wait for no answer any more, on any thread; the ranks are ended next."""
        self._up = False

    def close(self) -> None:
        """End ranks and launcher; nothing of them is left on the machine."""
        self._up = False
        self._close_channels()
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None

    def _launch(
        self,
        launcher: Launcher,
        world_size: int,
        devices: Sequence[str] | None,
        *,
        options: dict[str, Any],
        auto: dict[str, Any] | None,
        hardware: dict[str, Any],
    ) -> None:
        self._generation += 1
        folder = launcher.run_dir.generation(self._generation)
        connections = write_connections(
            folder, world_size=world_size, key=secrets.token_hex(KEY_BYTES).encode()
        )
        self._signs = SimpleQueue()
        launcher.listener = self._from_launcher
        self._channels = Channels(connections, self)
        launcher.send(
            wire.Launch(
                generation=self._generation,
                world_size=world_size,
                devices=None if devices is None else list(devices),
                options=options,
                auto=auto,
                hardware=hardware,
                run_dir=str(folder),
                bulk_dir=str(launcher.run_dir.bulk),
                env=scrubbed(os.environ),
                cwd=os.getcwd(),  # noqa: PTH109 - a plain string for the wire
                path=sys.path,
            )
        )

    def _await_ranks(self, world_size: int, progress: Callable[[str], None]) -> None:
        """Wait until each rank's output is heard and each rank has passed the barrier."""
        for rank in range(world_size):
            self.post(rank, "shell", wire.JOIN, {}, lambda *sign: self._signs.put(sign))
        self.wake()
        heard: set[int] = set()
        joined: dict[int, Member] = {}
        while len(heard) < world_size or len(joined) < world_size:
            match self._next_sign():
                case wire.Progress(text=text):
                    progress(text)
                case wire.Warm():
                    progress("starting the ranks")
                case wire.Ended() as ended if ended.generation in {self._generation, LAUNCHER_GONE}:
                    raise StartError(self._why_not_started(ended, world_size))
                case int(rank):
                    heard.add(rank)
                case (int(rank), "shell", message):
                    joined[rank] = Member(**message["content"])
        self.members = [joined[rank] for rank in range(world_size)]

    def _why_not_started(self, ended: wire.Ended, world_size: int) -> str:
        folder = self.run_dir.path / str(self._generation)
        notes = [wire.death_note(folder, rank) for rank in range(world_size)]
        left = next((note.read_text() for note in notes if note.exists()), None)
        detail = f"It said:\n{redacted(left)}" if left else self.log_words()
        return f"The ranks did not start: {in_words(ended)}. {detail}"

    def _next_sign(self) -> Any:
        try:
            return self._signs.get(timeout=START_S)
        except Empty:
            msg = f"The ranks gave no sign for {START_S:.0f} s. {self.log_words()}"
            raise StartError(msg) from None

    def _close_channels(self) -> None:
        if self._channels is not None:
            self._channels.close()
            self._channels = None
        self._routes.clear()
        self.members = []

    def remove_at_end(self, folder: Path, *, remove: bool = True) -> None:
        """Let the launcher remove a folder when this kernel is gone, or not any more."""
        if self._launcher is not None and self._launcher.alive:
            self._launcher.send(wire.RemoveAtEnd(str(folder), remove))

    # -- requests

    @property
    def run_dir(self) -> RunDir:
        """The private folders of the launcher."""
        if self._launcher is None:
            raise _not_started()
        return self._launcher.run_dir

    def post(
        self,
        rank: int,
        channel: Channel,
        kind: str,
        content: Any,
        route: Any = None,
        *,
        note: wire.CellNote | None = None,
    ) -> str:
        """Queue one request; `route(rank, channel, message)` gets the answers. `wake()` sends.

        Returns:
            Its id, for `forget`.
        """
        if self._channels is None:
            raise _not_started()
        request = secrets.token_hex(16)
        if route is not None:
            self._routes[request] = route
        metadata = {wire.NOTE: note} if note else None
        self._channels.send(rank, channel, kind, content, metadata=metadata, message_id=request)
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
        all_or_error: bool = False,
    ) -> dict[int, Any]:
        """Send a request to ranks and wait for the replies, by rank.

        On the control channel ranks answer while a cell runs. With `all_or_error` the first
        reply that is an error ends the waiting: ranks in a collective may wait for ever then.

        Raises:
            RankDied: a rank ended before it answered.
            SessionError: for ten minutes there was no answer, nor a word about the request.
        """
        answers: SimpleQueue[tuple[int, str, Message]] = SimpleQueue()
        waiting = set(ranks)
        requests = [
            self.post(rank, channel, kind, content, lambda *answer: answers.put(answer))
            for rank in waiting
        ]
        self.wake()
        replies: dict[int, Any] = {}
        try:
            while waiting - replies.keys():
                rank, answered_on, message = self._answer(answers, kind)
                if answered_on == channel:
                    replies[rank] = message["content"]
                    if all_or_error and replies[rank]["status"] == "error":
                        break
        finally:
            self.forget(requests)
        return replies

    def _answer(self, answers: SimpleQueue[Any], kind: str) -> tuple[int, str, Message]:
        since = time.monotonic()
        while time.monotonic() - max(since, self._heard) < SILENT_S:
            try:
                answer: tuple[int, str, Message] = answers.get(timeout=1.0)
            except Empty:
                if not self._up:
                    msg = f"The ranks ended before they answered {kind}."
                    raise RankDied(msg) from None
            else:
                return answer
        msg = f"The ranks have said nothing about {kind} for {SILENT_S:.0f} s."
        raise SessionError(msg)

    def wake(self) -> None:
        """Send what is queued, and have `on_idle` called soon."""
        if self._channels is not None:
            self._channels.wake()

    def log_tail(self) -> str:
        """The end of what launcher and ranks wrote outside of cells."""
        return redacted(self._launcher.log_tail()) if self._launcher else ""

    def log_words(self) -> str:
        """The end of the log as part of an error message."""
        tail = self.log_tail()
        return f"The log ends:\n{tail}" if tail else "The log is empty."

    # -- what arrives, on the reader thread or the link's thread

    def receive(self, rank: int, channel: Channel, message: Message) -> None:
        """Route one message of a rank."""
        if message["header"]["msg_type"] == "iopub_welcome":
            self._signs.put(rank)
            return
        if message["header"]["msg_type"] == wire.PHASE:
            self._heard = time.monotonic()
        route = self._routes.get(message["parent_header"].get("msg_id", ""))
        if message["header"]["msg_type"] in wire.OF_SESSION or route is None:
            self._on_message(rank, message)
        else:
            route(rank, channel, message)

    def idle(self) -> bool:
        """Look whether the ranks live, then let the session do what is due."""
        now = time.monotonic()
        if self._up and now >= self._watch_due:
            self._watch_due = now + WATCH_S
            self._watch()
        return self._on_idle()

    def _watch(self) -> None:
        """Notice a rank that left without a word: torch elastic does not see `os._exit(0)`.

        A rank that was killed is the launcher's to report, with its signal; it gets a moment.
        """
        gone = [rank for rank, member in enumerate(self.members) if not member.alive()]
        if not gone:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = time.monotonic()
        elif time.monotonic() - self._missing_since > REPORT_S:
            words = f"rank {gone[0]} left without a word, as os._exit(0) does"
            self._died(wire.Ended(self._generation, error=words))

    def _from_launcher(self, message: wire.LinkMessage) -> None:
        self._signs.put(message)
        if isinstance(message, wire.Ended):
            self._ended = message.generation
            self._died(message)

    def _died(self, ended: wire.Ended) -> None:
        with self._lock:
            was_up, self._up = self._up, False
        if not was_up:
            return
        death = RankDied(
            f"{in_words(ended)}; all ranks were ended and their variables are gone."
            " Start new ones with %nbdist restart."
        )
        if self._launcher is not None and self._launcher.alive:
            with contextlib.suppress(StartError):  # it is gone, and not yet seen to be
                self._launcher.send(wire.Halt())
        self._on_death(death)


def in_words(ended: wire.Ended) -> str:
    """Say how ranks ended: "rank 1 ended with signal 9 (SIGKILL)"."""
    words = []
    for rank, code in sorted(ended.exitcodes.items()):
        name = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        words.append(f"rank {rank} ended with {name}")
    return ended.error or ", ".join(words) or "the ranks ended"


def _not_started() -> SessionError:
    return SessionError("The session is not started: run a %%distribute cell or call start().")
