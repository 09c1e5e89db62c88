"""The panel of one session while it is open: its threads, and what they send.

Messages of the front end come on any thread and are only put down here. The panel's own thread
reads them, draws pictures and sends what changed; commands run on the driver's thread; devices
are sampled on a third.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from nbdist.display import panel_units
from nbdist.output.ansi import clean, plain
from nbdist.panel import plan_view, snapshot
from nbdist.panel.commands import (
    BadMessage,
    Command,
    Driver,
    Hello,
    LogRequest,
    answered,
    read,
)
from nbdist.panel.curves import Series, packed
from nbdist.panel.devices import Devices
from nbdist.panel.plan_view import NOTHING_YET, Predicted, predict
from nbdist.panel.profile_view import Profiled
from nbdist.panel.protocol import (
    BEAT_S,
    MAX_LOG_LINES,
    Answer,
    Beat,
    Changed,
    DeviceSample,
    DeviceSamples,
    Log,
    Reset,
    Rows,
    SampleHistory,
    Samples,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.panel.curves import Points
    from nbdist.panel.protocol import Notice, Picture, ToFront
    from nbdist.protocol import messages
    from nbdist.session.cell import Cell
    from nbdist.session.placement import Placement
    from nbdist.session.session import Session
    from nbdist.strategies import Options

    Send = Callable[[ToFront, list[bytes]], object]

log = logging.getLogger(__name__)

EVERY_S = 0.2
"""Between two messages, on average: at most five a second."""
CLOSE_S = 5.0
WHERE_S = 2.0
"""A cell that runs for so long is asked where it is, and again after it."""
PEEK_S = 60.0
"""Between two looks at what a long cell has prepared, in the end."""
SETTLED_S = 0.5
"""After the end of a cell it is looked at what it has prepared."""
MAX_INBOX = 256
NOTICE_S = 30.0
"""What came of a command is shown for so long."""


class View:
    """What is known of a session between two pictures: its devices and its plan."""

    def __init__(self, session: Session) -> None:
        """Know nothing yet."""
        self.session = session
        self.devices = Devices(
            self._pids,
            lambda: session.placement,
            nodes=lambda: session.nodes,
            ask=session.nodes_now,
        )
        self.predicted = Predicted.nothing(NOTHING_YET)
        self.profiled = Profiled()
        self.panel: object = None
        """The open panel, if there is one."""
        self._traced = False
        self._seen: tuple[Cell | None, Options, Placement] | None = None
        self._peeked: messages.ModelReply | None = None
        self._metrics = session.metrics
        self._lock = threading.Lock()

    def _pids(self) -> dict[int, int]:
        return {one["rank"]: one["pid"] for one in self.session.status()["ranks"]}

    def draw(self, **more: Any) -> Picture:
        """The session at this moment."""
        self._forget_old_ranks()
        return snapshot.draw(self.session, self.devices, self.predicted, self.profiled, **more)

    def _forget_old_ranks(self) -> None:
        """A restart has begun, with new metrics: what the old ranks held and ran is no more."""
        with self._lock:
            if self._metrics is self.session.metrics:
                return
            self._metrics = self.session.metrics
            self.predicted, self._traced = Predicted.nothing(NOTHING_YET), False
            self._seen = self._peeked = None
            self.devices.forget()

    def replan(self, *, at_once: bool = False) -> None:
        """Plan where a cell has ended or the strategy is another one; the session is free.

        By the closed form; what a trace has told of a model that has none is kept.

        Args:
            at_once: also where a cell has ended just now, and the next may wait for it.
        """
        self._forget_old_ranks()
        session = self.session
        if session.state != "ready" or session.undecided:
            return
        seen = session.last, session.options, session.placement
        settled = at_once or time.time() - session.since >= SETTLED_S
        if seen == self._seen or not settled:
            return
        before, self._seen = self._seen, seen
        switched = before is not None and before[1:] != seen[1:]
        if switched:
            self.devices.strategy_changed()
        known = self.predicted.holds_for(session.options, session.world_size)
        if switched and known and before is not None and before[0] is session.last:
            self.predicted = self.predicted.running(session.options)  # it has seen the batches
        elif session.last is not None:
            self.plan(quick=True)

    def peek(self) -> None:
        """Ask what the running cell has prepared; `peeked` takes the answer."""
        if not self.session.undecided:
            self.session.peek.ask(self.session.hardware.kind)

    def peeked(self) -> None:
        """Plan what the running cell has prepared, if an answer has come and is new."""
        seen = self.session.peek.answer()
        if seen is None or (seen == self._peeked and self.predicted.plan is not None):
            return
        self._peeked = seen
        self.predicted = plan_view.peek(self.session, seen) or self.predicted

    def plan(self, *, quick: bool) -> None:
        """Plan the prepared model; the session is free."""
        session, found = self.session, predict(self.session, quick=quick)
        planned = bool(found.strategies["rows"])
        held = self._traced and self.predicted.holds_for(session.options, session.world_size)
        if planned or not held:
            self.predicted, self._traced = found, planned and not quick
        else:
            self.predicted = self.predicted.running(session.options)


class Live:
    """An open panel.

    Args:
        view: of its session.
        send: sends a message with its buffers to all pages.
    """

    def __init__(self, view: View, send: Send) -> None:
        """Begin to look and to send."""
        self._view, self._session, self._send = view, view.session, send
        self._series = Series()
        self._inbox: deque[tuple[object, object]] = deque(maxlen=MAX_INBOX)
        self._answers: deque[Answer] = deque()
        self._woken = threading.Event()
        self._closed = False
        self._notice: Notice | None = None
        self._before: Picture | None = None
        self._seats = view.devices.seats
        self._sampled = 0.0
        self._sent_at = self._due = time.monotonic()
        self._where_at = self._peek_at = 0.0
        self._peek_every = WHERE_S
        self.dropped = 0
        """Messages that were not the protocol's."""
        self._series.follow(self._session.metrics)
        view.devices.open()
        self._driver = Driver(
            self._session, answer=self._take_answer, plan=self._plan, idle=view.replan
        )
        self._thread = threading.Thread(target=self._run, name="nbdist-panel", daemon=True)
        self._thread.start()

    def receive(self, message: object, buffers: object = ()) -> None:
        """Put down a message of the front end; from any thread."""
        if self._closed:
            if isinstance(message, dict) and message.get("kind") == "hello":
                self.say_last()
            return
        self._inbox.append((message, buffers))
        self._woken.set()

    def history(self) -> dict[str, Points]:
        """The curves, once closed."""
        self._series.fold(now=math.inf)  # nothing more will come
        return self._series.history()

    def close(self) -> None:
        """End all threads."""
        self._closed = True
        self._woken.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)
        self._driver.close()
        self._view.devices.close()
        self._series.unfollow()

    def say_last(self) -> None:
        """Send what is to stay on the pages, once closed."""
        self._series.fold(now=math.inf)
        self._notice = None
        self._say_everything()

    # -- the panel's thread

    def _run(self) -> None:
        while not self._closed:
            self._woken.wait(max(EVERY_S, self._due - time.monotonic()))
            self._woken.clear()
            try:
                self._answer_all()
                self._driver.hurry()
                if time.monotonic() >= self._due:
                    self._tell_news()
            except Exception:  # a picture that cannot be drawn is not the end of the panel
                log.exception("the panel could not be brought up to date")
                self._due = time.monotonic() + BEAT_S

    def _answer_all(self) -> None:
        """Read what came, and answer; not later than the next message may be sent."""
        opened = False
        while self._inbox:
            message, buffers = self._inbox.popleft()
            try:
                asked = read(message, buffers)
            except BadMessage as error:
                self.dropped += 1
                log.info("a message of a page was refused: %s", error)
                if error.answers is not None:
                    self._say(answered(error.answers, str(error), ok=False))
                continue
            opened = opened or isinstance(asked, Hello)
            self._take(asked)
        if opened:  # all pages get what any asks for
            self._say_everything()
        while self._answers:
            answer = self._answers.popleft()
            self._notice = snapshot.notice("info" if answer["ok"] else "error", answer["text"])
            self._say(answer)

    def _take(self, asked: Hello | LogRequest | Command) -> None:
        match asked:
            case LogRequest(rank=rank, search=search):
                self._say(
                    Log(kind="log", rank=rank, search=search, lines=self._lines(rank, search))
                )
            case Command(name="interrupt"):
                self._interrupt(asked)
            case Command(name="cancel"):
                self._driver.cancel(asked)
            case Command():
                self._driver.put(asked)

    def _interrupt(self, asked: Command) -> None:
        """Stop waits for nothing.

        What a magic does on the main thread (a start, a load) only the notebook's own interrupt
        ends: a page whose Stop has no effect for a second asks the notebook's server for it.
        """
        doing = self._driver.doing
        if self._session.running is not None:
            self._session.interrupt()
            ok, text = True, "the cell is asked to stop."
        elif doing is not None and self._session.interrupt():
            ok, text = True, f"{doing.text} is asked to stop."
        elif doing is not None:
            ok = False
            text = f"{doing.text} cannot be stopped now; Restart ends the ranks with it."
        elif self._session.activity.now is not None:
            return
        elif self._session.interrupt():  # what a second Stop has left to itself
            ok, text = True, "what runs on the ranks is asked to stop."
        else:
            ok, text = True, "no cell runs."
        self._say(answered(asked.id, text, ok=ok))

    def _tell_news(self) -> None:
        """Send what is new since the last time, and leave a pause for each message."""
        if not self._series.follows(self._session.metrics):  # after a restart
            self._series.follow(self._session.metrics)
            self._say_everything()
        elif self._view.devices.seats is not self._seats:  # after a switch to others
            self._say_everything()
        self._ask_where()
        points = self._series.fold()
        if points:
            series, buffer = packed(points)
            self._say(Rows(kind="rows", series=series), [buffer])
        if self._notice is not None and time.time() - self._notice["time"] > NOTICE_S:
            self._notice = None
        now = self._view.draw(queue=self._driver.queue, notice=self._notice)
        if changed := snapshot.changed(self._before, now):
            self._say(Changed(kind="picture", changed=changed))
        self._before = now
        latest = self._view.devices.latest
        if latest is not None and latest.time != self._sampled:
            self._sampled = latest.time
            self._say(Samples(kind="samples", time=latest.time, devices=_samples_of(latest)))
        if time.monotonic() - self._sent_at >= BEAT_S:
            self._say(Beat(kind="beat", time=time.time()))

    def _say_everything(self) -> None:
        self._series.fold()
        series, buffer = packed(self._series.history())
        self._seats = self._view.devices.seats
        self._before = self._view.draw(queue=self._driver.queue, notice=self._notice)
        self._say(
            Reset(
                kind="reset",
                picture=self._before,
                series=series,
                samples=sample_history(self._view.devices),
            ),
            [buffer],
        )

    def _say(self, message: ToFront, buffers: list[bytes] | None = None) -> None:
        self._send(message, buffers or [])
        self._sent_at = time.monotonic()
        self._due = max(self._due, self._sent_at) + EVERY_S

    def _ask_where(self) -> None:
        """Ask the ranks of a long cell which line they are at, and what they have prepared."""
        cell, now = self._session.running, time.monotonic()
        if cell is None or time.time() - cell.began < WHERE_S:
            self._peek_at, self._peek_every = now, WHERE_S
            return
        if now - self._where_at >= WHERE_S:
            self._where_at = now
            self._session.whereabouts.ask(cell.pending)
        self._view.peeked()
        if now >= self._peek_at:  # it prepares its model soon, or late, or another one
            self._peek_at = now + self._peek_every
            self._peek_every = min(2 * self._peek_every, PEEK_S)
            self._view.peek()

    def _lines(self, rank: int | None, search: str) -> list[str]:
        """The last lines of a rank, or of the launcher, that contain a text."""
        if rank is not None and rank >= self._session.world_size:
            return []
        text = self._session.log(rank, lines=MAX_LOG_LINES if not search else 10**6)
        shown = plain(clean(text)).splitlines()
        lines = [line for line in shown if search.lower() in line.lower()]
        return [panel_units.cut(line, snapshot.MAX_LINE_CHARS) for line in lines[-MAX_LOG_LINES:]]

    # -- the driver's thread

    def _take_answer(self, answer: Answer) -> None:
        self._answers.append(answer)
        self._woken.set()

    def _plan(self) -> str:
        with self._session.activity.doing("planning", "planning the model"):
            self._view.plan(quick=False)
        rows = self._view.predicted.strategies
        return rows["note"]


def _samples_of(moment: Any) -> list[DeviceSample]:
    return [
        DeviceSample(
            memory_bytes=one.memory_bytes, utilization=one.utilization, power_w=one.power_w
        )
        for one in moment.readings
    ]


def sample_history(devices: Devices) -> SampleHistory:
    """The last minutes of all devices."""
    moments = [one for one in list(devices.history) if len(one.readings) == len(devices.seats)]
    columns = zip(*(one.readings for one in moments), strict=True)
    return SampleHistory(
        times=[one.time for one in moments],
        devices=[
            DeviceSamples(
                memory_bytes=[one.memory_bytes for one in column],
                utilization=[one.utilization for one in column],
                power_w=[one.power_w for one in column],
            )
            for column in columns
        ],
    )
