"""Commands of the front end: validated here, then run one after the other.

Anyone who can write to the kernel's comms can run code in it. The checks therefore only protect the
panel itself: no message may crash it, fill its memory or call a function without a button.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast, get_args

from nbdist import strategies
from nbdist.errors import NbdistError, NotEmptyError, SessionBusy
from nbdist.number_formatting import truncate
from nbdist.output.ansi import replace_invalid_chars
from nbdist.panel.protocol import (
    MAX_ID_CHARS,
    MAX_SEARCH_CHARS,
    CommandAnswer,
    CommandName,
    LogRequestMessage,
    PageOpenedMessage,
    QueuedCommand,
)
from nbdist.session import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.session.session import Session

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2
"""Interval at which a waiting command checks whether it can run."""
RESTART_TIMEOUT_S = 3.0
"""A restart aborts requests to the ranks that take longer than this."""
MAX_QUEUE = 16
MAX_NPROC = 4096
"""Maximum number of ranks."""
MAX_SHOWN_CHARS = 40


class InvalidPanelMessage(Exception):  # noqa: N818 - the name describes the message
    """An invalid message; `answers` is the id of its command, if it has one."""

    def __init__(self, text: str, answers: str | None = None) -> None:
        super().__init__(text)
        self.answers = answers


@dataclass(frozen=True, slots=True)
class PanelCommand:
    """A command of the front end."""

    id: str
    name: CommandName
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Return the command as text, like a magic: "switch zero3 offload=cpu"."""
        words = [
            str(value) if key in {"name", "backend", "folder"} else f"{key}={value}"
            for key, value in self.arguments.items()
        ]
        return " ".join([self.name, *words])


# ---------------------------------------------------------------------------- checking


@dataclass(frozen=True, slots=True)
class _ArgumentRule:
    """Rule for the value of an argument."""

    kind: type
    words: str
    largest: int = 0
    """Maximum length of a text, or maximum value of a number."""

    def check(self, value: object) -> bool:
        if type(value) is not self.kind:  # excludes True, which is an int
            return False
        if isinstance(value, str):
            return value != "" and _is_text(value, self.largest)
        return not isinstance(value, int) or isinstance(value, bool) or 1 <= value <= self.largest


def _is_text(value: object, limit: int) -> bool:
    """Return whether a value is a text of at most `limit` characters, which JSON can represent."""
    return isinstance(value, str) and len(value) <= limit and replace_invalid_chars(value) == value


def _text(chars: int) -> _ArgumentRule:
    return _ArgumentRule(str, f"a string of 1 to {chars} characters", chars)


def _rule(argument: strategies.Argument) -> _ArgumentRule:
    """Return the rule of an option of a session."""
    if not argument.metavar:
        return _FLAG
    if argument.type is int:
        words = f"an integer from 1 to {argument.panel_limit}"
        return _ArgumentRule(int, words, argument.panel_limit)
    return _text(argument.panel_limit)


_FLAG = _ArgumentRule(bool, "true or false")
_NAME, _PATH = _text(64), _text(1024)
ARGUMENTS: Mapping[str, Mapping[str, _ArgumentRule]] = {
    "interrupt": {},
    "restart": {},
    "plan": {},
    "profile": {},
    "cancel": {"command": _text(MAX_ID_CHARS)},
    "switch": {name: _rule(item) for name, item in strategies.ARGUMENTS.items() if item.panel_limit}
    | {"reset_optimizer": _FLAG},
    "save": {"name": _NAME, "overwrite": _FLAG},
    "load": {"name": _PATH},
    "export": {"folder": _PATH, "overwrite": _FLAG},
}
"""Command -> argument -> rule."""
_REQUIRED_ARGUMENTS: Mapping[str, str] = {
    "save": "name",
    "load": "name",
    "export": "folder",
    "cancel": "command",
}


def parse_message(
    message: object, buffers: object = ()
) -> PageOpenedMessage | LogRequestMessage | PanelCommand:
    """Validate a message of the front end. Unknown keys are ignored.

    Raises:
        InvalidPanelMessage: the message does not follow the protocol.
    """
    if buffers:
        raise InvalidPanelMessage("a message of a front end must not have buffers; send JSON alone")
    if not isinstance(message, dict):
        raise InvalidPanelMessage(
            "a message must be a JSON object with a kind: hello, log or command"
        )
    kind = message.get("kind")
    if kind == "hello":
        return PageOpenedMessage(kind="hello")
    if kind == "log":
        rank, search = message.get("rank"), message.get("search", "")
        if rank is not None and (type(rank) is not int or not 0 <= rank < MAX_NPROC):
            raise InvalidPanelMessage("the rank of a log must be null or an integer")
        if not _is_text(search, MAX_SEARCH_CHARS):
            raise InvalidPanelMessage(
                f"a log is searched for a text of at most {MAX_SEARCH_CHARS} characters"
            )
        return LogRequestMessage(kind="log", rank=rank, search=search)
    identity = message.get("id")
    if not identity or not _is_text(identity, MAX_ID_CHARS):
        raise InvalidPanelMessage(
            f"the id of a command must be a string of 1 to {MAX_ID_CHARS} characters"
        )
    if kind != "command":
        raise InvalidPanelMessage("the kind of a message must be hello, log or command", identity)
    return _command(message, identity)


def _command(message: Mapping[str, Any], identity: str) -> PanelCommand:
    name, arguments = message.get("name"), message.get("arguments", {})
    if not isinstance(name, str) or name not in get_args(CommandName):
        raise InvalidPanelMessage(
            f"a command must be one of {', '.join(get_args(CommandName))}", identity
        )
    if not isinstance(arguments, dict):
        raise InvalidPanelMessage(
            "the arguments of a command must be a JSON object; use {} for none", identity
        )
    allowed = ARGUMENTS[name]
    for key, value in arguments.items():
        if key not in allowed:
            names = ", ".join(allowed) or "none"
            argument = truncate(ascii(key), MAX_SHOWN_CHARS)
            raise InvalidPanelMessage(
                f"unknown argument {argument} of {name}, allowed: {names}", identity
            )
        if not allowed[key].check(value):
            raise InvalidPanelMessage(
                f"argument {key} of {name} must be {allowed[key].words}", identity
            )
    needed = _REQUIRED_ARGUMENTS.get(name)
    if needed is not None and needed not in arguments:
        raise InvalidPanelMessage(f"{name} requires {needed}", identity)
    if name == "switch" and not arguments:
        raise InvalidPanelMessage("switch requires at least one argument", identity)
    return PanelCommand(identity, cast("CommandName", name), dict(arguments))


# ---------------------------------------------------------------------------- running


class CommandQueue:
    """A thread that runs commands in order whenever the session is free.

    A profile applies to the running cell, so it does not wait for the cell to end.

    Args:
        session: the session whose methods are called.
        answer: called on the thread with the answer to each command.
        plan: plans the model again.
        idle: called regularly, in the session's turn, while no command waits and it is free.
    """

    def __init__(
        self,
        session: Session,
        *,
        answer: Callable[[CommandAnswer], object],
        plan: Callable[[], str],
        idle: Callable[[], object],
    ) -> None:
        self._session, self._answer, self._plan, self._idle = session, answer, plan, idle
        self._waiting: deque[PanelCommand] = deque()
        self._lock = threading.Lock()
        """Protects the waiting commands, which any thread may add, take and cancel."""
        self.doing: PanelCommand | None = None
        self._busy_since: float | None = None
        """Monotonic time since which the thread runs a command or the idle callback."""
        self._wake_event = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="nbdist-commands", daemon=True)
        self._thread.start()

    def submit(self, command: PanelCommand) -> None:
        """Add a command. Returns immediately."""
        if command.name == "restart":
            while (dropped := self._pop_first()) is not None:
                self._answer(make_answer(dropped.id, "Not run: the ranks are restarted.", ok=False))
        with self._lock:
            full = len(self._waiting) >= MAX_QUEUE
            if not full:
                self._waiting.append(command)
        if full:
            text = f"{MAX_QUEUE} commands are already queued. Interrupt the running cell, or wait."
            self._answer(make_answer(command.id, text, ok=False))
        self._wake_event.set()

    def cancel(self, request: PanelCommand) -> None:
        """Cancel a command that still waits. Returns immediately."""
        command_id = request.arguments["command"]
        cancelled = self._pop_first(lambda command: command.id == command_id)
        if cancelled is None:
            text = "Cannot cancel the command: it has already started."
            self._answer(make_answer(request.id, text, ok=False))
            return
        self._answer(make_answer(cancelled.id, "Not run: the command was cancelled.", ok=False))
        self._answer(make_answer(request.id, f"Cancelled: {cancelled.text}", ok=True))

    def _pop_first(
        self, matches: Callable[[PanelCommand], bool] = lambda _: True
    ) -> PanelCommand | None:
        """Remove and return the first waiting command that matches."""
        with self._lock:
            command = next(filter(matches, self._waiting), None)
            if command is not None:
                self._waiting.remove(command)
        return command

    def abort_stuck_restart(self) -> None:
        """Abort the running request if a restart has waited too long; called regularly.

        Called from another thread, because a request to the ranks may hang until they are replaced.
        """
        since = self._busy_since
        is_stuck = since is not None and time.monotonic() - since > RESTART_TIMEOUT_S
        if is_stuck and self._restart_waits():
            self._session.give_up()

    @property
    def waiting_commands(self) -> list[QueuedCommand]:
        """Return the commands that wait for the running cell."""
        with self._lock:
            return [QueuedCommand(id=command.id, text=command.text) for command in self._waiting]

    def close(self) -> None:
        """End the thread after the running command; waiting commands are dropped."""
        self._closed = True
        self._wake_event.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with progress.suppress_status_lines():
            while not self._closed:
                self._wake_event.wait(POLL_INTERVAL_S if self._waiting else 5 * POLL_INTERVAL_S)
                self._wake_event.clear()
                if self._restart_waits():
                    self._session.abandon()  # as the magic does: a restart does not wait for a cell
                while (
                    command := self._pop_first(lambda waiting: waiting.name == "profile")
                ) is not None:
                    self._run_command(command)
                self._try_next()

    def _restart_waits(self) -> bool:
        with self._lock:
            return any(command.name == "restart" for command in self._waiting)

    def _try_next(self) -> None:
        """Run the next command, or the idle callback, if the session is free."""
        if self._session.running is not None or not self._session.lock.acquire(
            timeout=POLL_INTERVAL_S
        ):
            return
        try:
            if self._closed or self._session.running is not None:
                return
            command = self._pop_first()
            if command is not None:
                self._run_command(command)
                self._wake_event.set()
            else:
                self._busy_since = time.monotonic()
                self._idle()
        except Exception:  # commands must still run
            log.exception("the idle callback of the panel failed")
        finally:
            self._busy_since = None
            self._session.lock.release()

    def _run_command(self, command: PanelCommand) -> None:
        self.doing, self._busy_since = command, time.monotonic()
        can_replace = False
        try:
            if command.name == "plan":
                text = self._plan()
            elif command.name == "restart":
                self._session.restart()
                text = f"Restarted the ranks: {self._session.describe()}"
            else:
                text = str(getattr(self._session, command.name)(**command.arguments))
            ok = True
        except NbdistError as error:
            if isinstance(error, SessionBusy) and command.name != "profile":
                with self._lock:  # a background cell started first
                    self._waiting.appendleft(command)
                return
            text, ok, can_replace = str(error), False, isinstance(error, NotEmptyError)
        except Exception as error:  # a bug of nbdist: report it and continue
            log.exception("%s failed", command.text)
            text, ok = f"{type(error).__name__}: {error}", False
        finally:
            self.doing = self._busy_since = None
        self._answer(make_answer(command.id, text, ok=ok, can_replace=can_replace))


def make_answer(identity: str, text: str, *, ok: bool, can_replace: bool = False) -> CommandAnswer:
    """Return the answer to the command with this id."""
    return CommandAnswer(
        kind="answer", id=identity, ok=ok, text=replace_invalid_chars(text), can_replace=can_replace
    )
