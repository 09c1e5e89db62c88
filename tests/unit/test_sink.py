from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.output import sink
from nbdist.output.sink import FinishedCellSink, RunningCellWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    ShellSetter = Callable[[Any], None]

HEADER = {"msg_id": "cell-1"}


class KernelStream(io.StringIO):
    """As ipykernel's OutStream: knows which cell it belongs to."""

    def set_parent(self, parent: Any) -> None:
        del parent


class FakeKernel:
    """Records what is sent on iopub."""

    iopub_socket = object()

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any, Any, dict[str, Any]]] = []
        self.session = self

    def send(
        self, _socket: object, msg_type: str, content: Any, *, parent: Any, **more: Any
    ) -> None:
        self.sent.append((msg_type, content, parent, more))


class FakeShell:
    """As ipykernel's shell, with its display publisher."""

    def __init__(self) -> None:
        self.kernel = FakeKernel()
        self.published: list[tuple[Any, ...]] = []
        self.display_pub = SimpleNamespace(
            pub_socket=object(),
            publish=lambda *args, **kwargs: self.published.append((args, kwargs)),
            clear_output=lambda wait: self.published.append(("clear", wait)),
        )

    def get_parent(self) -> dict[str, Any]:
        return {"header": HEADER, "content": {}}


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> FakeShell:
    found = FakeShell()
    monkeypatch.setattr(sink, "get_shell", lambda: found)
    return found


@pytest.fixture
def no_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "get_shell", lambda: None)


def test_live_goes_where_the_users_own_output_goes(
    shell: FakeShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", KernelStream())
    monkeypatch.setattr(sys, "stderr", KernelStream())
    live = RunningCellWriter()
    assert live.can_update
    live.write("stdout", "a\n")
    live.write("stderr", "b\n")
    live.display({"text/html": "x"}, {"m": 1}, display_id="d", update=True)
    live.clear(wait=True)
    live.flush()
    assert sys.stdout.getvalue() == "a\n"  # type: ignore[attr-defined]
    assert sys.stderr.getvalue() == "b\n"  # type: ignore[attr-defined]
    args = ({"text/html": "x"}, {"m": 1})
    assert shell.published == [
        (args, {"transient": {"display_id": "d"}, "update": True}),
        ("clear", True),
    ]


def test_live_relays_widgets_under_the_running_cell(shell: FakeShell) -> None:
    RunningCellWriter().relay_comm("comm_open", {"comm_id": "c"}, {"version": "2"}, [b"x"])
    more = {"ident": b"comm_open", "metadata": {"version": "2"}, "buffers": [b"x"]}
    assert shell.kernel.sent == [("comm_open", {"comm_id": "c"}, HEADER, more)]


@pytest.mark.usefixtures("shell")
def test_live_does_not_update_what_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert not RunningCellWriter().can_update


@pytest.mark.usefixtures("no_shell")
@pytest.mark.parametrize("cell", [sink.running_cell, sink.finished_cell])
def test_a_plain_script_prints(cell: Callable[[], Any], capsys: pytest.CaptureFixture[str]) -> None:
    plain = cell()
    assert not plain.can_update
    plain.write("stdout", "a\n")
    plain.write("stderr", "b\n")
    plain.display({"text/plain": "Figure", "image/png": "AAAA"}, {})
    plain.display({"text/html": "x"}, {})
    plain.clear(wait=False)
    plain.relay_comm("comm_open", {}, {}, [])
    plain.flush()
    assert capsys.readouterr() == ("a\nFigure\n", "b\n")


def test_a_terminal_with_a_small_alphabet_gets_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    live = RunningCellWriter()
    live.write("stdout", "caf\u00e9\n")
    live.flush()
    assert raw.getvalue() == b"caf\\xe9\n"


def test_pinned_sends_to_its_cell_in_order_and_in_few_messages(shell: FakeShell) -> None:
    pinned = FinishedCellSink()
    assert pinned.can_update
    for _ in range(100):
        pinned.write("stdout", "x\n")
    pinned.write("stderr", "warn\n")
    pinned.display({"text/plain": "1"}, {}, display_id="d")
    pinned.display({"text/plain": "2"}, {}, display_id="d", update=True)
    pinned.write("stdout", "end\n")
    pinned.clear(wait=False)
    pinned.flush()
    sent = shell.kernel.sent
    assert [message[0] for message in sent] == [
        "stream",
        "stream",
        "display_data",
        "update_display_data",
        "stream",
        "clear_output",
    ]
    assert sent[0][1] == {"name": "stdout", "text": "x\n" * 100}
    assert sent[2][1]["transient"] == {"display_id": "d"}
    assert all(message[2] == HEADER for message in sent)


@pytest.mark.usefixtures("no_shell")
def test_outside_a_kernel_there_is_no_parent_message() -> None:
    assert sink.parent_header() == {}
