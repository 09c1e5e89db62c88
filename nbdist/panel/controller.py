"""The open panel of one session: its threads and the messages that it sends.

Messages of the front end arrive on any thread and are only queued there. The panel's own thread
handles them, takes snapshots and sends changes. Commands run on the thread of ``CommandQueue``, and
devices are sampled on a third thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from nbdist.errors import PlanError
from nbdist.number_formatting import truncate
from nbdist.output.ansi import replace_invalid_chars, strip_ansi
from nbdist.panel import plan_view, snapshot
from nbdist.panel.commands import (
    CommandQueue,
    InvalidPanelMessage,
    PanelCommand,
    make_answer,
    parse_message,
)
from nbdist.panel.curves import curve_history, pack_points
from nbdist.panel.device_sampler import DeviceSampler
from nbdist.panel.plan_view import NO_MODEL_MESSAGE, PlanView, plan_session_model
from nbdist.panel.protocol import (
    HEARTBEAT_INTERVAL_S,
    MAX_CURVES,
    MAX_LOG_LINES,
    MAX_POINTS,
    CommandAnswer,
    CurvePointsMessage,
    DeviceSample,
    DeviceSamples,
    DeviceSamplesMessage,
    HeartbeatMessage,
    LogMessage,
    PanelStateUpdate,
    ResetMessage,
    SampleHistory,
)
from nbdist.panel.snapshot import ProfileViewCache
from nbdist.session.metrics import UnsentPoints

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.panel.protocol import (
        FrontendMessage,
        LogRequestMessage,
        NoticeView,
        PageOpenedMessage,
        PanelState,
    )
    from nbdist.protocol import messages
    from nbdist.session.cell import Cell
    from nbdist.session.device_placement import DevicePlacement
    from nbdist.session.session import Session
    from nbdist.strategies import Options

    Send = Callable[[FrontendMessage, list[bytes]], object]

log = logging.getLogger(__name__)

UPDATE_INTERVAL_S = 0.2
"""Average interval between two messages: at most five per second."""
CLOSE_TIMEOUT_S = 5.0
STACK_POLL_INTERVAL_S = 2.0
"""Interval at which the ranks of a long cell are polled for their current line."""
MAX_MODEL_POLL_INTERVAL_S = 60.0
"""Maximum interval between two requests for the models that a long cell has prepared."""
REPLAN_DELAY_S = 0.5
"""Delay after the end of a cell before its prepared model is planned."""
MAX_INBOX = 256
NOTICE_DURATION_S = 30.0
"""Time for which the result of a command is shown."""


class PanelData:
    """State of the panel between two snapshots: devices, plan and profile."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.devices = DeviceSampler(session)
        self.plan_view = PlanView.empty(NO_MODEL_MESSAGE)
        self.profile_view = ProfileViewCache()
        self.panel: object = None
        """The open panel, if there is one."""
        self._is_plan_traced = False
        self._seen: tuple[Cell | None, Options, DevicePlacement] | None = None
        self._last_model_reply: messages.ModelReply | None = None
        self._metrics = session.metrics
        self._lock = threading.Lock()

    def snapshot(self, **more: Any) -> PanelState:
        """Return a snapshot of the session."""
        self._forget_old_ranks()
        session, shown = self.session, self.plan_view
        if shown.is_valid_for(session.options, session.world_size):  # a switch may be newer
            shown = shown.with_current_options(session.options)
        return snapshot.take_snapshot(session, self.devices, shown, self.profile_view, **more)

    def _forget_old_ranks(self) -> None:
        """Clear the plan and the samples after a restart, which creates new metrics."""
        with self._lock:
            if self._metrics is self.session.metrics:
                return
            self._metrics = self.session.metrics
            self.plan_view, self._is_plan_traced = PlanView.empty(NO_MODEL_MESSAGE), False
            self._seen = self._last_model_reply = None
            self.devices.clear_samples()

    def replan_if_changed(self, *, at_once: bool = False) -> None:
        """Plan again if a cell has ended or the strategy has changed. The session must be free.

        Uses the closed form. The traced plan of a model without a closed form is kept.

        Args:
            at_once: do not wait for the delay after the end of a cell.
        """
        self._forget_old_ranks()
        session = self.session
        if session.state != "ready" or session.undecided:
            return
        state = session.last, session.options, session.placement
        settled = at_once or time.time() - session.state_since >= REPLAN_DELAY_S
        if state == self._seen or not settled:
            return
        previous, self._seen = self._seen, state
        switched = previous is not None and previous[1:] != state[1:]
        if switched:
            self.devices.strategy_peak_bytes.clear()
        is_valid = self.plan_view.is_valid_for(session.options, session.world_size)
        if switched and is_valid and previous is not None and previous[0] is session.last:
            # The existing plan is kept: it is based on the batches that a cell has used.
            self.plan_view = self.plan_view.with_current_options(session.options)
        elif session.last is not None:
            self.update_plan(quick=True)

    def plan_prepared_model(self) -> None:
        """Plan the model that the running cell has prepared, if there is a new reply.

        The reply is to a request by ``PanelController``.
        """
        reply = self.session.model_query.poll_reply()
        if reply is None or (reply == self._last_model_reply and self.plan_view.plan is not None):
            return
        self._last_model_reply = reply
        self.plan_view = plan_view.plan_running_model(self.session, reply) or self.plan_view

    def update_plan(self, *, quick: bool) -> None:
        """Plan the prepared model. The session must be free."""
        session, predicted = self.session, plan_session_model(self.session, quick=quick)
        planned = bool(predicted.strategies["rows"])
        keeps_trace = self._is_plan_traced and self.plan_view.is_valid_for(
            session.options, session.world_size
        )
        if planned or not keeps_trace:
            self.plan_view, self._is_plan_traced = predicted, planned and not quick
        else:
            self.plan_view = self.plan_view.with_current_options(session.options)


class PanelController:
    """An open panel."""

    def __init__(self, view: PanelData, send: Send) -> None:
        self._view, self._session, self._send = view, view.session, send
        self._new_points = UnsentPoints(self._session.metrics, max_names=MAX_CURVES)
        self._points_since_reset = 0
        """Of the curve that has got the most."""
        self._inbox: deque[tuple[object, object]] = deque(maxlen=MAX_INBOX)
        self._answers: deque[CommandAnswer] = deque()
        self._wake_event = threading.Event()
        self._closed = False
        self._notice: NoticeView | None = None
        self._before: PanelState | None = None
        self._page_opened = False
        """A page has opened since the last reset."""
        self._reset_at = -math.inf
        self._sent_device_slots = view.devices.device_slots
        self._sampled = 0.0
        self._sent_at = self._due = time.monotonic()
        self._stacks_polled_at = self._next_model_poll = 0.0
        self._model_poll_interval_s = STACK_POLL_INTERVAL_S
        view.devices.start()
        self._driver = CommandQueue(
            self._session, answer=self._queue_answer, plan=self._plan, idle=view.replan_if_changed
        )
        self._thread = threading.Thread(target=self._run, name="nbdist-panel", daemon=True)
        self._thread.start()

    def receive_message(self, message: object, buffers: object = ()) -> None:
        """Queue a message of the front end. Safe to call from any thread."""
        if self._closed:
            if isinstance(message, dict) and message.get("kind") == "hello":
                self.send_final_state()
            return
        self._inbox.append((message, buffers))
        self._wake_event.set()

    def close(self) -> None:
        """End all threads."""
        self._closed = True
        self._wake_event.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)
        self._driver.close()
        self._view.devices.stop()

    def send_final_state(self) -> None:
        """Send the final state of a closed panel."""
        self._notice = None
        self._send_reset()

    # -- the panel's thread

    def _run(self) -> None:
        while not self._closed:
            self._wake_event.wait(max(UPDATE_INTERVAL_S, self._due - time.monotonic()))
            self._wake_event.clear()
            try:
                self._answer_all()
                self._driver.abort_stuck_restart()
                if time.monotonic() >= self._due:
                    self._send_changes()
            except Exception:  # an error in one snapshot must not end the panel
                log.exception("the panel could not be updated")
                self._due = time.monotonic() + HEARTBEAT_INTERVAL_S

    def _answer_all(self) -> None:
        """Handle and answer the queued messages."""
        while self._inbox:
            message, buffers = self._inbox.popleft()
            try:
                request = parse_message(message, buffers)
            except InvalidPanelMessage as error:
                log.info("invalid message of a page: %s", error)
                if error.answers is not None:
                    self._send_message(make_answer(error.answers, str(error), ok=False))
                continue
            self._handle_page_message(request)
        # Every message goes to all pages.
        if self._page_opened and time.monotonic() - self._reset_at >= UPDATE_INTERVAL_S:
            self._send_reset()
        while self._answers:
            answer = self._answers.popleft()
            self._notice = snapshot.make_notice("info" if answer["ok"] else "error", answer["text"])
            self._send_message(answer)

    def _handle_page_message(
        self, message: PageOpenedMessage | LogRequestMessage | PanelCommand
    ) -> None:
        if isinstance(message, PanelCommand):
            actions = {"interrupt": self._interrupt, "cancel": self._driver.cancel}
            actions.get(message.name, self._driver.submit)(message)
        elif message["kind"] == "hello":
            self._page_opened = True
        else:
            rank, search = message["rank"], message["search"]
            lines: list[str] = []
            if rank is None or rank < self._session.world_size:
                text = self._session.log(rank, lines=MAX_LOG_LINES if not search else 10**6)
                lines = strip_ansi(replace_invalid_chars(text)).splitlines()
            shown = [line for line in lines if search.lower() in line.lower()][-MAX_LOG_LINES:]
            shown = [truncate(line, snapshot.MAX_LINE_CHARS) for line in shown]
            self._send_message(LogMessage(kind="log", rank=rank, search=search, lines=shown))

    def _interrupt(self, request: PanelCommand) -> None:
        """Interrupt what runs, without waiting.

        Only the notebook's own interrupt ends what a magic runs on the main thread (a start, a
        load). If Stop has no effect for a second, the page requests that interrupt from the
        Jupyter server.
        """
        command = self._driver.doing
        if self._session.running is not None:
            self._session.interrupt()
            ok, text = True, "Interrupting the cell."
        elif command is not None and self._session.interrupt():
            ok, text = True, f"Interrupting {command.text}."
        elif command is not None:
            ok = False
            text = f"Cannot interrupt {command.text} now. Restart to end the ranks and the command."
        elif self._session.operation.progress is not None:
            return
        elif self._session.interrupt():  # work that a second interrupt has left
            ok, text = True, "Interrupting the ranks."
        else:
            ok, text = True, "No cell is running."
        self._send_message(make_answer(request.id, text, ok=ok))

    def _send_changes(self) -> None:
        """Send what has changed since the last time."""
        restarted = self._new_points.metrics is not self._session.metrics
        moved = self._view.devices.device_slots is not self._sent_device_slots
        # A page keeps all points that it gets. A reset replaces them by a downsampled history.
        if restarted or moved or self._points_since_reset > 2 * MAX_POINTS:
            self._send_reset()
        self._poll_ranks()
        if points := self._new_points.pop_ready():
            self._points_since_reset += max(map(len, points.values()))
            series, buffer = pack_points(points)
            self._send_message(CurvePointsMessage(kind="points", series=series), [buffer])
        if self._notice is not None and time.time() - self._notice["time"] > NOTICE_DURATION_S:
            self._notice = None
        now = self._view.snapshot(queue=self._driver.waiting_commands, notice=self._notice)
        if changed := snapshot.changed_keys(self._before, now):
            self._send_message(PanelStateUpdate(kind="state", changed=changed))
        self._before = now
        latest = self._view.devices.latest_snapshot
        if latest is not None and latest.time != self._sampled:
            self._sampled = latest.time
            samples = [
                DeviceSample(
                    memory_bytes=reading.memory_bytes,
                    utilization=reading.utilization,
                    power_w=reading.power_w,
                )
                for reading in latest.readings
            ]
            self._send_message(
                DeviceSamplesMessage(kind="samples", time=latest.time, devices=samples)
            )
        if time.monotonic() - self._sent_at >= HEARTBEAT_INTERVAL_S:
            self._send_message(HeartbeatMessage(kind="heartbeat", time=time.time()))

    def _send_reset(self) -> None:
        metrics = self._session.metrics
        self._new_points = UnsentPoints(metrics, max_names=MAX_CURVES)
        self._points_since_reset = 0
        series, buffer = pack_points(curve_history(metrics))
        self._sent_device_slots = self._view.devices.device_slots
        self._before = self._view.snapshot(queue=self._driver.waiting_commands, notice=self._notice)
        self._send_message(
            ResetMessage(
                kind="reset",
                state=self._before,
                series=series,
                samples=sample_history(self._view.devices),
            ),
            [buffer],
        )
        self._page_opened, self._reset_at = False, time.monotonic()

    def _send_message(self, message: FrontendMessage, buffers: list[bytes] | None = None) -> None:
        self._send(message, buffers or [])
        self._sent_at = time.monotonic()
        self._due = max(self._due, self._sent_at) + UPDATE_INTERVAL_S

    def _poll_ranks(self) -> None:
        """Poll the ranks of a long cell for their current line and their prepared models."""
        cell, now = self._session.running, time.monotonic()
        if cell is None or time.time() - cell.started_at < STACK_POLL_INTERVAL_S:
            self._next_model_poll, self._model_poll_interval_s = now, STACK_POLL_INTERVAL_S
            return
        if now - self._stacks_polled_at >= STACK_POLL_INTERVAL_S:
            self._stacks_polled_at = now
            self._session.rank_activity.poll_ranks(cell.pending)
        self._view.plan_prepared_model()
        if now >= self._next_model_poll:  # it may prepare a model at any time, or another one
            self._next_model_poll = now + self._model_poll_interval_s
            self._model_poll_interval_s = min(
                2 * self._model_poll_interval_s, MAX_MODEL_POLL_INTERVAL_S
            )
            if not self._session.undecided:
                self._session.model_query.send_request(self._session.hardware.kind)

    # -- the driver's thread

    def _queue_answer(self, answer: CommandAnswer) -> None:
        self._answers.append(answer)
        self._wake_event.set()

    def _plan(self) -> str:
        with self._session.operation.track("planning", "planning the model"):
            self._view.update_plan(quick=False)
        strategies = self._view.plan_view.strategies
        if not strategies["rows"]:
            raise PlanError(strategies["note"])
        return strategies["note"]


def sample_history(devices: DeviceSampler) -> SampleHistory:
    """Return the recent samples of all devices."""
    moments = [
        moment
        for moment in list(devices.history)
        if len(moment.readings) == len(devices.device_slots)
    ]
    columns = zip(*(moment.readings for moment in moments), strict=True)
    return SampleHistory(
        times=[moment.time for moment in moments],
        devices=[
            DeviceSamples(
                memory_bytes=[reading.memory_bytes for reading in column],
                utilization=[reading.utilization for reading in column],
                power_w=[reading.power_w for reading in column],
            )
            for column in columns
        ],
    )
