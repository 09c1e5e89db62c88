"""Who uses the ranks, what is said of it, and how hanging ranks are ended."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

import nbdist
from nbdist.errors import RankDied
from nbdist.session import lifecycle, progress
from nbdist.session.progress import CurrentOperation, StatusLine, parse_fraction_done
from nbdist.session.rank_activity import PreparedModelPoller, RankActivityPoller
from nbdist.session.session import Session
from tests.conftest import eventually
from tests.session_internals import silent_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.session.worker_group import WorkerGroup

WITHIN_S = 10.0


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    shown: list[str] = []

    class Screen:
        can_update = False

        def display(self, bundle: dict[str, str], _: object, **__: object) -> None:
            shown.append(bundle["text/plain"])

        def flush(self) -> None:
            pass

    monkeypatch.setattr(progress, "running_cell", Screen)
    return shown


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


# ---------------------------------------------------------------------------- turns


class Worked:
    """As much of a session as a turn needs."""

    def __init__(self) -> None:
        self.lock, self.num_restarts = threading.RLock(), 0
        self.operation = CurrentOperation()
        self.done: list[str] = []

    @progress.exclusive_for_current_ranks
    def outer(self) -> None:
        self.inner()

    @progress.exclusive_for_current_ranks
    def inner(self) -> None:
        self.done.append(threading.current_thread().name)


def test_a_turn_is_taken_again_and_waited_for(lines: list[str]) -> None:
    session = Worked()
    session.outer()
    assert lines == []
    begun, end = threading.Event(), threading.Event()

    def export() -> None:
        with session.lock, session.operation.track("exporting", "exporting to out"):
            session.outer()
            begun.set()
            assert end.wait(WITHIN_S)

    working = in_thread(export)
    assert begun.wait(WITHIN_S)
    waiting = in_thread(session.outer)
    eventually(lambda: lines, within_s=WITHIN_S)
    assert len(session.done) == 2
    end.set()
    working.join(WITHIN_S)
    waiting.join(WITHIN_S)
    assert len(session.done) == 3
    assert lines == ["nbdist: waiting for a command of the panel: exporting to out"]


def startable(monkeypatch: pytest.MonkeyPatch) -> Session:
    session = nbdist.Session(nproc=2)
    monkeypatch.setattr(session, "_start_ranks", lambda choice, _: choice)
    monkeypatch.setattr(lifecycle, "current", [None])
    return session


def test_what_waits_while_the_ranks_are_restarted_is_not_done(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell waits for a command of the panel, and Restart is pressed meanwhile."""
    session = startable(monkeypatch)
    ended: list[str] = []

    def cell() -> None:
        with pytest.raises(RankDied) as error:
            session.run("import time; time.sleep(80)")
        ended.append(str(error.value))

    with session.lock, session.operation.track("saving", "saving base"):
        waiting = in_thread(cell)
        eventually(lambda: lines, within_s=WITHIN_S)
        with progress.suppress_status_lines():
            session.restart()
    waiting.join(WITHIN_S)
    assert len(ended) == 1
    assert ended[0].startswith("The ranks were restarted while this call waited for them.")
    assert session.state == "ready"
    session.stop()


def test_a_restart_that_waits_for_another_is_done_too(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = startable(monkeypatch)
    with session.lock, session.operation.track("saving", "saving base"):
        waiting = in_thread(session.restart)
        eventually(lambda: lines, within_s=WITHIN_S)
        with progress.suppress_status_lines():
            session.restart()
        assert session.num_restarts == 1
    waiting.join(WITHIN_S)
    assert session.num_restarts == 2
    session.stop()


@pytest.fixture
def workers() -> WorkerGroup:
    """Ranks that are up and never answer."""
    return silent_workers()


def hung(workers: WorkerGroup) -> tuple[threading.Thread, list[str]]:
    """A thread that waits for ranks which hang, and how that ends."""
    ended: list[str] = []

    def ask() -> None:
        with pytest.raises(RankDied) as error:
            workers.request_all([0, 1], "nbdist_load_request", {})
        ended.append(str(error.value))

    return in_thread(ask), ended


def test_stop_while_waiting_for_the_panel_ends_what_it_does(
    workers: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """%nbdist restart beside a command of the panel that hangs; Stop is pressed."""
    session = Session(nproc=2)
    session._workers = workers
    thread, ended = hung(workers)

    class Interrupted:
        def __enter__(self) -> None:
            raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None:
            raise AssertionError

    monkeypatch.setattr(session, "lock", Interrupted())
    with pytest.raises(KeyboardInterrupt):  # the second time, when the restart takes its turn
        session.restart()
    thread.join(WITHIN_S)
    assert ended


def test_two_threads_start_the_ranks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    session = nbdist.Session(nproc=2)
    starts: list[str] = []

    def start_ranks(choice: object, _: object) -> object:
        starts.append("start")
        return choice

    monkeypatch.setattr(session, "_start_ranks", start_ranks)
    monkeypatch.setattr(lifecycle, "current", [None])
    with session.lock:
        other = in_thread(session.start)
        session.start()
    other.join(WITHIN_S)
    assert starts == ["start"]
    session.stop()


# ---------------------------------------------------------------------------- progress


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("export: writing, 42%", 0.42),
        ("writing checkpoint base, 100%", 1.0),
        ("reading, 7 %", 0.07),
        ("ddp -> zero3: copying", None),
        ("100% sure that nothing follows", None),
        ("building, 400%", 1.0),
    ],
)
def test_the_share_that_words_end_with(text: str, share: float | None) -> None:
    assert parse_fraction_done(text) == share


def test_status_lines_of_other_threads_do_not_change_the_operation(lines: list[str]) -> None:
    mine, other = CurrentOperation(), CurrentOperation()
    with mine.track("loading", "loading base"):
        with StatusLine("load base") as line:
            line.show("reading, 5%")
            assert mine.progress is not None
            assert (mine.progress.text, mine.progress.fraction_done) == (
                "load base: reading, 5%",
                0.05,
            )
            line.show("reading, 6%")  # not printed where lines stay
            assert mine.progress.fraction_done == 0.06
            with mine.track("starting", "starting 2 CPU ranks"):
                assert mine.progress.kind == "loading"  # the outermost, with the newest words
                assert mine.progress.text == "starting 2 CPU ranks"
        in_thread(lambda: StatusLine().show("elsewhere")).join(WITHIN_S)
        assert mine.progress.text == "load base: reading, 6%"
    assert mine.progress is None
    assert other.progress is None
    assert lines == ["nbdist: load base: reading, 5%", "nbdist: elsewhere"]


# ---------------------------------------------------------------------------- whereabouts


class Asked:
    """A workers that notes what it is asked to send."""

    def __init__(self) -> None:
        self.routes: dict[str, Any] = {}
        self.sent: list[str] = []

    def send_request(
        self, ranks: Sequence[int], _channel: str, _kind: str, _content: object, route: Any
    ) -> str:
        request = f"{','.join(map(str, ranks))}.{len(self.sent)}"
        self.sent.append(request)
        self.routes[request] = route
        return request

    def drop_requests(self, requests: list[str]) -> None:
        for request in requests:
            self.routes.pop(request, None)

    def wake(self) -> None:
        pass

    def answer(self, route: Any, request: str, line: int, rank: int = 0) -> None:
        """What the reader thread does with a rank's answer."""
        content = {"cell": "In[3]", "line": line, "source": "", "collective": ""}
        message = {"content": content, "parent_header": {"msg_id": request}}
        route(rank, "control", message)


def test_a_rank_is_not_asked_again_before_it_answers() -> None:
    workers = Asked()
    places = RankActivityPoller(workers)  # type: ignore[arg-type]
    places.poll_ranks([0, 1])
    places.poll_ranks([0, 1])
    assert workers.sent == ["0,1.0"]
    workers.answer(workers.routes["0,1.0"], "0,1.0", 7)
    places.poll_ranks([0, 1])
    assert workers.sent[1:] == ["0.1"]
    assert {rank: one["line"] for rank, one in places.latest_replies().items()} == {0: 7}
    assert "0,1.0" in workers.routes  # rank 1 may answer it still
    places.timeout_s = 0.0
    places.poll_ranks([1])
    assert workers.sent[2:] == ["1.2"]
    assert "0,1.0" not in workers.routes


def test_one_question_for_a_model_at_a_time() -> None:
    workers = Asked()
    peek = PreparedModelPoller(workers)  # type: ignore[arg-type]
    peek.send_request("cpu")
    peek.send_request("cpu")
    assert workers.sent == ["0.0"]
    assert peek.poll_reply() is None
    workers.answer(workers.routes["0.0"], "0.0", 7)
    assert peek.poll_reply() is not None
    assert peek.poll_reply() is None  # told once
    peek.send_request("cpu")
    peek.timeout_s = 0.0
    peek.send_request("cpu")
    assert workers.sent == ["0.0", "0.1", "0.2"]
    assert list(workers.routes) == ["0.2"]


def test_an_answer_of_a_cell_that_has_ended_is_dropped() -> None:
    workers = Asked()
    places = RankActivityPoller(workers)  # type: ignore[arg-type]
    places.poll_ranks([0])
    late = workers.routes["0.0"]
    places.clear()
    workers.answer(late, "0.0", 7)  # it was on its way
    assert places.latest_replies() == {}
    places.poll_ranks([0])
    assert workers.sent == ["0.0", "0.1"]
