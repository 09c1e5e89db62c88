from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Self

import pytest

from nbdist.errors import CheckpointError, NotEmptyError, RankDied, SessionBusy
from nbdist.panel import commands
from nbdist.panel.commands import (
    CommandQueue,
    InvalidPanelMessage,
    PanelCommand,
    parse_message,
)
from tests.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Callable


def command(
    name: object = "save", /, identity: object = "1", **arguments: object
) -> dict[str, Any]:
    return {"kind": "command", "id": identity, "name": name, "arguments": arguments}


LOG = {"kind": "log", "rank": 1, "search": "error"}


@pytest.mark.parametrize(
    ("message", "meant"),
    [
        ({"kind": "hello"}, {"kind": "hello"}),
        ({"kind": "hello", "more": "x"}, {"kind": "hello"}),
        (LOG | {"rank": None, "search": ""}, LOG | {"rank": None, "search": ""}),
        (LOG, LOG),
        (LOG | {"more": "x"}, LOG),
        (command("interrupt"), PanelCommand("1", "interrupt", {})),
        (
            command("switch", backend="zero3", offload="cpu", nproc=2),
            PanelCommand("1", "switch", {"backend": "zero3", "offload": "cpu", "nproc": 2}),
        ),
        ({"kind": "command", "id": "7", "name": "plan"}, PanelCommand("7", "plan", {})),
        (command("profile"), PanelCommand("1", "profile", {})),
        (command("switch", accumulate=4), PanelCommand("1", "switch", {"accumulate": 4})),
    ],
)
def test_what_the_protocol_has_is_read(message: object, meant: object) -> None:
    assert parse_message(message, []) == meant


@pytest.mark.fault("G2")
@pytest.mark.parametrize(
    "message",
    [
        *(None, 17, "hello", [], {}, {"kind": None}, {"kind": ["hello"]}),
        *({"kind": "eval", "code": "1"}, {"kind": "log", "rank": "0"}),
        *({"kind": "log", "rank": True}, {"kind": "log", "rank": -1}),
        {"kind": "log", "rank": 0, "search": 5},
        {"kind": "log", "rank": 0, "search": "x" * 300},
        *({"kind": "log", "rank": 0, "search": "\ud800"}, {"kind": "start", "n": "9e99"}),
        {"kind": "command", "id": "1", "name": "save", "arguments": {"name": "x" * 10_000_000}},
        *(command("stop"), command("__class__"), command(None), command(["save"])),
        *(command(identity=None), command(identity=""), command(identity=5)),
        *(command(identity="x" * 65), command("save"), command("save", name="")),
        *(command("save", name=5), command("save", name="x" * 65)),
        command("save", name="a", overwrite="true"),
        *(command("save", name="a", overwrite=1), command("save", name="a", keep=1)),
        *(command("load", name="a", trust=True), command("load", name="x" * 2000)),
        *(command("export"), command("export", folder="out", overwrite="yes")),
        *(command("cancel"), command("cancel", command=7)),
        *(command("cancel", command="1", name="a"), command("switch")),
        *(command("switch", nproc="2"), command("switch", nproc=2.0)),
        *(command("switch", nproc=True), command("switch", nproc=0)),
        *(command("switch", nproc=10**9), command("switch", backend={"a": 1})),
        *(command("switch", fsdp_config={}), command("switch", accumulate=0)),
        *(command("switch", accumulate="4"), command("profile", steps=10)),
        *(command("profile", trace="/etc"), command("restart", backend="ddp")),
        {"kind": "command", "id": "1", "name": "save", "arguments": ["name"]},
        {"kind": "command", "id": "1", "name": "save", "arguments": {1: 2}},
        command("save", name="a", deep=[[[[[[[[[[]]]]]]]]]]),
    ],
    ids=lambda message: repr(message)[:60],
)
def test_everything_else_is_refused(message: object) -> None:
    with pytest.raises(InvalidPanelMessage):
        parse_message(message, [])


@pytest.mark.fault("G2")
def test_buffers_are_refused() -> None:
    with pytest.raises(InvalidPanelMessage):
        parse_message({"kind": "hello"}, [b"x"])


def test_a_refused_command_is_answered_by_its_id() -> None:
    with pytest.raises(InvalidPanelMessage, match="interrupt, restart, cancel, switch") as refused:
        parse_message(command("stop", identity="9"), [])
    assert refused.value.answers == "9"
    with pytest.raises(InvalidPanelMessage) as nameless:
        parse_message({"kind": "x", "id": {"a": 1}}, [])
    assert nameless.value.answers is None


class FakeCell:
    """A cell that runs."""


class FakeSession:
    """As much of a session as the driver uses."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.running: FakeCell | None = None
        self.done: list[str] = []
        self.busy_times = 0
        self.hangs = threading.Event()

    def load(self, name: str) -> str:
        assert self.hangs.wait(5)
        raise RankDied(f"the ranks ended before they answered {name}.")

    def give_up(self) -> None:
        self.hangs.set()

    def save(self, name: str) -> str:
        if self.busy_times:
            self.busy_times -= 1
            raise SessionBusy("a cell runs")
        if name == "bad":
            raise CheckpointError("no room.")
        if name == "broken":
            raise ZeroDivisionError("oh")
        self.done.append(f"save {name}")
        return f"{name} saved"

    def export(self, folder: str, *, overwrite: bool = False) -> str:
        if not overwrite:
            raise NotEmptyError(f"{folder} exists and is not empty.")
        self.done.append(f"export {folder}")
        return f"{folder} written"

    def restart(self) -> None:
        self.done.append("restart")

    def abandon(self) -> None:
        self.running = None

    def describe(self) -> str:
        return "2 CPU ranks"


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


class Driven:
    """A driver and what it answers."""

    def __init__(self, session: FakeSession) -> None:
        self.answers: list[Any] = []
        self.planned = threading.Event()
        self.failing = self.hanging = self.hangs = False
        self._session = session
        self.driver = CommandQueue(
            session,  # type: ignore[arg-type]
            answer=self.answers.append,
            plan=lambda: "planned",
            idle=self._look,
        )

    def _look(self) -> None:
        self.planned.set()
        if self.failing:
            raise ZeroDivisionError("a model that the planner has not met")
        if self.hanging and not self.hangs:
            self.hangs = True
            self._session.load("a model")

    def hurried(self, answers: int) -> Callable[[], bool]:
        """Whether there are so many answers, asked now and then by who hurries the driver."""

        def hurried() -> bool:
            self.driver.abort_stuck_restart()
            return len(self.answers) == answers

        return hurried

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.close()


@pytest.mark.fault("G5")
def test_errors_are_answers(session: FakeSession) -> None:
    with Driven(session) as driven:
        for name in ("bad", "broken", "good"):
            driven.driver.submit(PanelCommand(name, "save", {"name": name}))
        eventually(lambda: len(driven.answers) == 3, within_s=5)
    assert [one["ok"] for one in driven.answers] == [False, False, True]
    assert driven.answers[0]["text"] == "no room."
    assert driven.answers[1]["text"] == "ZeroDivisionError: oh"


def test_a_background_cell_that_was_quicker_is_waited_for(session: FakeSession) -> None:
    session.busy_times = 2
    with Driven(session) as driven:
        driven.driver.submit(PanelCommand("1", "save", {"name": "a"}))
        eventually(lambda: driven.answers, within_s=5)
    assert driven.answers[0]["ok"]


def test_a_restart_drops_what_waits(session: FakeSession) -> None:
    session.running = FakeCell()
    with Driven(session) as driven:
        driven.driver.submit(PanelCommand("1", "save", {"name": "a"}))
        eventually(lambda: driven.driver.waiting_commands, within_s=5)
        driven.driver.submit(PanelCommand("2", "restart"))
        eventually(lambda: len(driven.answers) == 2, within_s=5)
    assert session.done == ["restart"]
    assert driven.answers[0]["text"] == "Not run: the ranks are restarted."


def test_a_restart_ends_a_look_at_ranks_that_hang(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "RESTART_TIMEOUT_S", 0.1)
    with Driven(session) as driven:
        driven.hanging = True
        eventually(lambda: driven.hangs, within_s=5)
        driven.driver.submit(PanelCommand("1", "restart"))
        eventually(driven.hurried(1), within_s=5)
    assert session.done == ["restart"]


def test_what_takes_long_goes_on_where_no_restart_waits(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "RESTART_TIMEOUT_S", 0.0)
    with Driven(session) as driven:
        driven.driver.submit(PanelCommand("1", "load", {"name": "a"}))
        eventually(lambda: driven.driver.doing, within_s=5)
        driven.driver.submit(PanelCommand("2", "save", {"name": "b"}))
        driven.driver.abort_stuck_restart()
        assert not session.hangs.is_set()
        session.hangs.set()


@pytest.mark.fault("G5")
def test_a_session_that_cannot_be_looked_at_is_not_the_end(session: FakeSession) -> None:
    with Driven(session) as driven:
        driven.failing = True
        assert driven.planned.wait(5)
        driven.driver.submit(PanelCommand("1", "save", {"name": "a"}))
        eventually(lambda: driven.answers, within_s=5)
    assert session.done == ["save a"]


def test_what_runs_already_can_no_longer_be_cancelled(session: FakeSession) -> None:
    with Driven(session) as driven:
        driven.driver.submit(PanelCommand("a", "load", {"name": "a"}))
        eventually(lambda: driven.driver.doing, within_s=5)
        driven.driver.cancel(PanelCommand("1", "cancel", {"command": "a"}))
        (answer,) = driven.answers
        assert (answer["id"], answer["ok"]) == ("1", False)
        assert answer["text"] == "Cannot cancel the command: it has already started."
        session.hangs.set()


def test_a_full_queue_says_so(session: FakeSession) -> None:
    session.running = FakeCell()
    with Driven(session) as driven:
        for number in range(commands.MAX_QUEUE + 1):
            driven.driver.submit(PanelCommand(str(number), "save", {"name": "a"}))
        assert not driven.answers[0]["ok"]
        assert len(driven.driver.waiting_commands) == commands.MAX_QUEUE
    assert session.done == []  # what waits when the panel closes is not run
