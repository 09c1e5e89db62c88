"""What the front end asks for: checked here, then run one after the other.

Whoever can write to the kernel's comms can run code in it, so that nothing is defended here but
the panel itself: no message may end it, fill its memory or call what has no button.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast, get_args

from nbdist.errors import NbdistError, NotEmptyError, SessionBusy
from nbdist.output.ansi import clean
from nbdist.panel.protocol import (
    MAX_ID_CHARS,
    MAX_MESSAGE_CHARS,
    Answer,
    CommandName,
    Queued,
)
from nbdist.session import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.session.session import Session

log = logging.getLogger(__name__)

LOOK_S = 0.2
"""How often a command that waits looks whether it is its turn."""
PATIENCE_S = 3.0
"""A restart cuts short what the ranks have been asked for longer than this."""
MAX_QUEUE = 16
MAX_NPROC = 4096
MAX_ACCUMULATE = 4096
_NAME_CHARS, _PATH_CHARS, _SEARCH_CHARS = 64, 1024, 256
_DEPTH = 6


class BadMessage(Exception):  # noqa: N818 - what it is
    """A message that is refused; `answers` names the command, where it has a name."""

    def __init__(self, text: str, answers: str | None = None) -> None:
        super().__init__(text)
        self.answers = answers


@dataclass(frozen=True, slots=True)
class Hello:
    """A page was opened: it wants everything."""


@dataclass(frozen=True, slots=True)
class LogRequest:
    """Lines of a rank, or of the launcher, that contain a text."""

    rank: int | None
    search: str


@dataclass(frozen=True, slots=True)
class Command:
    """Something to be done."""

    id: str
    name: CommandName
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """In words, as a magic would have it: "switch zero3 offload=cpu"."""
        said = [
            str(value) if key in {"name", "backend", "folder"} else f"{key}={value}"
            for key, value in self.arguments.items()
        ]
        return " ".join([self.name, *said])


# ---------------------------------------------------------------------------- checking


@dataclass(frozen=True, slots=True)
class _Is:
    """What an argument must be."""

    kind: type
    words: str
    largest: int = 0
    """Characters of a text, value of a number."""

    def check(self, value: object) -> bool:
        if type(value) is not self.kind:  # True is no number here
            return False
        if isinstance(value, str):
            return 0 < len(value) <= self.largest and clean(value) == value
        return not isinstance(value, int) or isinstance(value, bool) or 1 <= value <= self.largest


def _text(chars: int) -> _Is:
    return _Is(str, f"a text of 1 to {chars} characters", chars)


_FLAG = _Is(bool, "true or false")
ARGUMENTS: Mapping[str, Mapping[str, _Is]] = {
    "interrupt": {},
    "restart": {},
    "plan": {},
    "profile": {},
    "cancel": {"command": _text(MAX_ID_CHARS)},
    "switch": {
        "backend": _text(_NAME_CHARS),
        "offload": _text(_PATH_CHARS),
        "offload_params": _FLAG,
        "activation_checkpointing": _FLAG,
        "replicate_across": _text(_NAME_CHARS),
        "accumulate": _Is(int, f"a whole number from 1 to {MAX_ACCUMULATE}", MAX_ACCUMULATE),
        "precision": _text(_NAME_CHARS),
        "nproc": _Is(int, f"a whole number from 1 to {MAX_NPROC}", MAX_NPROC),
        "reset_optimizer": _FLAG,
    },
    "save": {"name": _text(_NAME_CHARS), "overwrite": _FLAG},
    "load": {"name": _text(_PATH_CHARS)},
    "export": {"folder": _text(_PATH_CHARS), "overwrite": _FLAG},
}
"""Command -> argument -> what it must be."""
_NEEDED: Mapping[str, str] = {
    "save": "name",
    "load": "name",
    "export": "folder",
    "cancel": "command",
}


def read(message: object, buffers: object = ()) -> Hello | LogRequest | Command:
    """Check a message of the front end.

    Raises:
        BadMessage: it is none of the protocol's.
    """
    if buffers:
        raise BadMessage("no message of a front end has buffers")
    if not isinstance(message, dict):
        raise BadMessage("a message is an object with a kind")
    given = message.get("id")
    named = isinstance(given, str) and len(given) <= MAX_ID_CHARS and clean(given) == given
    identity = given if named else None
    if _weight(message) > MAX_MESSAGE_CHARS:
        raise BadMessage(f"a message has at most {MAX_MESSAGE_CHARS} characters", identity)
    kind = message.get("kind")
    if kind == "hello":
        return Hello()
    if kind == "log":
        return _log_request(message)
    if kind == "command":
        return _command(message, identity)
    raise BadMessage("the kind of a message is hello, log or command", identity)


def _log_request(message: Mapping[str, Any]) -> LogRequest:
    rank, search = message.get("rank"), message.get("search", "")
    if rank is not None and (type(rank) is not int or not 0 <= rank < MAX_NPROC):
        raise BadMessage("the rank of a log is null or a whole number")
    if not isinstance(search, str) or len(search) > _SEARCH_CHARS or clean(search) != search:
        raise BadMessage(
            f"what is searched in a log is a text of {_SEARCH_CHARS} characters at most"
        )
    return LogRequest(rank, search)


def _command(message: Mapping[str, Any], identity: str | None) -> Command:
    if not identity:
        raise BadMessage(f"a command has an id of 1 to {MAX_ID_CHARS} characters")
    name, arguments = message.get("name"), message.get("arguments", {})
    if not isinstance(name, str) or name not in get_args(CommandName):
        raise BadMessage(f"a command is one of {', '.join(get_args(CommandName))}", identity)
    if not isinstance(arguments, dict):
        raise BadMessage("the arguments of a command are an object", identity)
    allowed = ARGUMENTS[name]
    for key, value in arguments.items():
        if key not in allowed:
            words = ", ".join(allowed) or "no arguments"
            raise BadMessage(f"{name} has {words}; {_short(key)} is none of them", identity)
        if not allowed[key].check(value):
            raise BadMessage(f"{key} of {name} is {allowed[key].words}", identity)
    needed = _NEEDED.get(name)
    if needed is not None and needed not in arguments:
        raise BadMessage(f"{name} needs {needed}", identity)
    if name == "switch" and not arguments:
        raise BadMessage("switch needs what is to change", identity)
    return Command(identity, cast("CommandName", name), dict(arguments))


def _weight(value: object, depth: int = 0) -> int:
    """About as many characters as its JSON has; stops counting where it is too much."""
    if isinstance(value, str):
        return len(value) + 2
    if depth > _DEPTH:
        return MAX_MESSAGE_CHARS + 1
    if isinstance(value, dict):
        parts: Any = (part for pair in value.items() for part in pair)
    elif isinstance(value, list | tuple):
        parts = value
    else:
        return 8
    total = 2
    for part in parts:
        total += _weight(part, depth + 1)
        if total > MAX_MESSAGE_CHARS:
            break
    return total


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."  # noqa: PLR2004 - a part of a sentence


# ---------------------------------------------------------------------------- running


class Driver:
    """One thread that runs commands in their order, when the session is free.

    A profile is of the cell that runs, and waits for none.

    Args:
        session: whose methods the commands are.
        answer: gets what came of each; on the thread.
        plan: makes the plan anew.
        idle: called now and then while nothing waits and the session is free, in its turn.
    """

    def __init__(
        self,
        session: Session,
        *,
        answer: Callable[[Answer], object],
        plan: Callable[[], str],
        idle: Callable[[], object],
    ) -> None:
        """Begin to wait for commands."""
        self._session, self._answer, self._plan, self._idle = session, answer, plan, idle
        self._waiting: deque[Command] = deque()
        self._lock = threading.Lock()
        """For those that wait: any thread puts, takes and cancels."""
        self.doing: Command | None = None
        """The command that runs."""
        self._busy_since: float | None = None
        """Since when the thread runs a command or looks around, by the monotonic clock."""
        self._woken = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="nbdist-commands", daemon=True)
        self._thread.start()

    def put(self, command: Command) -> None:
        """Take a command; returns at once."""
        if command.name == "restart":
            self._make_way()
        with self._lock:
            full = len(self._waiting) >= MAX_QUEUE
            if not full:
                self._waiting.append(command)
        if full:
            text = f"{MAX_QUEUE} commands wait already; stop the running cell, or wait."
            self._answer(answered(command.id, text, ok=False))
        self._woken.set()

    def cancel(self, asked: Command) -> None:
        """Take a command back that still waits; returns at once."""
        wanted = asked.arguments["command"]
        with self._lock:
            found = next((one for one in self._waiting if one.id == wanted), None)
            if found is not None:
                self._waiting.remove(found)
        if found is None:
            text = "it no longer waits: it runs, or has run."
            self._answer(answered(asked.id, text, ok=False))
            return
        self._answer(answered(found.id, "not done: it was cancelled.", ok=False))
        self._answer(answered(asked.id, f"cancelled: {found.text}", ok=True))

    def _make_way(self) -> None:
        """For a restart, which waits for nothing that the old ranks should still do."""
        while (dropped := self._next()) is not None:
            self._answer(answered(dropped.id, "not done: the ranks are restarted.", ok=False))

    def hurry(self) -> None:
        """Cut short what a restart waits for too long; called now and then, from another thread.

        What this thread asks of the ranks may hang, and only new ranks end that.
        """
        since = self._busy_since
        if since is None or time.monotonic() - since <= PATIENCE_S or not self._restart_waits():
            return
        self._session.give_up()

    def _next(self) -> Command | None:
        """Take the first that waits."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    @property
    def queue(self) -> list[Queued]:
        """Commands that wait for the running cell."""
        with self._lock:
            return [Queued(id=one.id, text=one.text) for one in self._waiting]

    def close(self) -> None:
        """End the thread; a command that runs is waited for, those that wait are not run."""
        self._closed = True
        self._woken.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with progress.without_lines():
            while not self._closed:
                self._woken.wait(LOOK_S if self._waiting else 5 * LOOK_S)
                self._woken.clear()
                if self._restart_waits():
                    self._session.abandon()  # what magics do, too: it waits for no cell
                while (command := self._take_profile()) is not None:
                    self._do(command)
                self._try_next()

    def _restart_waits(self) -> bool:
        with self._lock:
            return any(one.name == "restart" for one in self._waiting)

    def _take_profile(self) -> Command | None:
        with self._lock:
            found = next((one for one in self._waiting if one.name == "profile"), None)
            if found is not None:
                self._waiting.remove(found)
        return found

    def _try_next(self) -> None:
        """Do the next thing, if it can be done now."""
        if self._session.running is not None or not self._session.turn.acquire(timeout=LOOK_S):
            return
        try:
            if self._closed or self._session.running is not None:
                return
            command = self._next()
            if command is not None:
                self._do(command)
                self._woken.set()
            else:
                self._look_around()
        finally:
            self._session.turn.release()

    def _look_around(self) -> None:
        self._busy_since = time.monotonic()
        try:
            self._idle()
        except Exception:  # whatever it is, commands are still to be done
            log.exception("the session could not be looked at")
        finally:
            self._busy_since = None

    def _do(self, command: Command) -> None:
        self.doing, self._busy_since = command, time.monotonic()
        replaces = False
        try:
            text, ok = self._done(command), True
        except NbdistError as error:
            if isinstance(error, SessionBusy) and command.name != "profile":
                with self._lock:  # a cell in the background was quicker
                    self._waiting.appendleft(command)
                return
            text, ok = str(error), False
            replaces = isinstance(error, NotEmptyError)
        except Exception as error:  # a defect of ours: told, and the panel goes on
            log.exception("%s failed", command.text)
            text, ok = f"{type(error).__name__}: {error}", False
        finally:
            self.doing = self._busy_since = None
        self._answer(answered(command.id, text, ok=ok, replaces=replaces))

    def _done(self, command: Command) -> str:
        """Run one command; returns what it says."""
        session = self._session
        if command.name == "plan":
            return self._plan()
        if command.name == "restart":
            session.restart()
            return f"new ranks: {session.describe()}"
        return str(getattr(session, command.name)(**command.arguments))


def answered(identity: str, text: str, *, ok: bool, replaces: bool = False) -> Answer:
    """What is said of the command of this name."""
    return Answer(kind="answer", id=identity, ok=ok, text=clean(text), replaces=replaces)
