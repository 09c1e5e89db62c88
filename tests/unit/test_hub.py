"""What several nodes need beside real ones: the store of the groups, messages, who is let in."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import zmq

from nbdist.cluster import kv_store, protocol
from nbdist.cluster.agent.files import Files
from nbdist.cluster.agent_server import Hub
from nbdist.cluster.protocol import Stored
from nbdist.cluster.run_dir import RunDir
from tests.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Reply = tuple[int, Stored, list[bytes]]


class Asked:
    """A store, and what it has answered."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.point = kv_store.MeetingPoint(lambda *reply: self.replies.append(reply))

    def __call__(
        self,
        op: str,
        *keys: str,
        values: tuple[bytes, ...] = (),
        number: int = 0,
        seconds: float = 9,
    ) -> list[tuple[int, bytes]]:
        """Ask; new answers as number and value."""
        before = len(self.replies)
        request = Stored(op, list(keys), number=number, seconds=seconds)
        self.point.take(0, request, [b"me", *values])
        new = self.replies[before:]
        return [(one.number, given[1] if len(given) > 1 else b"") for _, one, given in new]


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_a_store_keeps_counts_and_compares(asked: Asked) -> None:
    asked("set", "a", values=(b"1",))
    assert asked("get", "a") == [(0, b"1")]
    assert asked("add", "n", number=3)[0][0] == 3
    assert asked("add", "n", number=4)[0][0] == 7
    asked("append", "a", values=(b"2",))
    assert asked("get", "a") == [(0, b"12")]
    assert asked("compare_set", "a", values=(b"12", b"new"))[0][1] == b"new"
    assert asked("compare_set", "a", values=(b"other", b"lost"))[0][1] == b"new"
    assert asked("compare_set", "b", values=(b"", b"made"))[0][1] == b"made"
    assert asked("check", "a", "b")[0][0] == 1
    assert asked("check", "a", "c")[0][0] == 0
    assert asked("count")[0][0] == 3
    assert asked("delete", "b")[0][0] == 1
    assert asked("delete", "b")[0][0] == 0


def test_who_waits_is_answered_when_all_is_there(asked: Asked) -> None:
    assert asked("wait", "a", "b") == []
    assert asked("get", "a") == []
    assert len(asked("set", "a", values=(b"1",))) == 2  # the setter, and who wanted this alone
    assert len(asked("set", "b", values=(b"2",))) == 2


def test_who_waits_in_vain_is_told_for_what(asked: Asked) -> None:
    asked("wait", "a", "b", seconds=-1)
    asked("set", "a", values=(b"1",))
    asked.point.look()
    assert asked.replies[-1][1].error.startswith("b did not come")


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"{}"],
        [b"[1, 2]"],
        [b'["Nothing", {}]'],
        [b'["Hello", {"x": 1}]'],
        [b"[" * 99999],
    ],
)
def test_junk_is_no_message(frames: list[bytes]) -> None:
    with pytest.raises(ValueError, match="no message"):
        protocol.unpack(frames)


def test_a_message_arrives_as_it_was_sent() -> None:
    sent = protocol.Frames((3,), "iopub", 2)
    assert protocol.unpack(protocol.pack(sent, b"a", b"b")) == (sent, [b"a", b"b"])


def test_what_is_no_ticket_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="no ticket") as told:
        protocol.Ticket.from_json(json.dumps({"secret": "hush"}))
    assert "hush" not in str(told.value)


@pytest.fixture
def hub() -> Iterator[tuple[Hub, list[tuple[int, object]]]]:
    heard: list[tuple[int, object]] = []
    made = Hub(
        "127.0.0.1",
        take=lambda index, message, _: heard.append((index, message)),
        gone=lambda index, why: heard.append((index, why)),
    )
    yield made, heard
    made.close()


def connected(
    hub: Hub, context: zmq.Context[zmq.Socket[bytes]], keys: tuple[str, str]
) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.curve_serverkey = hub.public.encode()
    socket.curve_publickey, socket.curve_secretkey = keys[0].encode(), keys[1].encode()
    socket.connect(hub.address)
    return socket


@pytest.mark.fault("S23")
def test_a_node_is_known_by_its_key(hub: tuple[Hub, list[tuple[int, object]]]) -> None:
    made, heard = hub
    keys = made.let_in(7)
    with zmq.Context() as context, connected(made, context, keys) as node:
        node.send_multipart(protocol.pack(protocol.States({"rank 0": "gone"})))
        eventually(lambda: heard == [(7, protocol.States({"rank 0": "gone"}))], within_s=5)
        made.send(7, protocol.Cut())
        said = []
        while protocol.Cut() not in said:
            assert node.poll(5000)
            said.append(protocol.unpack(node.recv_multipart())[0])
    eventually(lambda: heard[-1] == (7, "lost its agent, which ended"), within_s=5)


def test_junk_of_one_node_does_not_stop_the_others(
    hub: tuple[Hub, list[tuple[int, object]]],
) -> None:
    made, heard = hub
    with (
        zmq.Context() as context,
        connected(made, context, made.let_in(0)) as bad,
        connected(made, context, made.let_in(1)) as good,
    ):
        bad.send_multipart([b"\xff", b"junk"])
        good.send_multipart(protocol.pack(protocol.States({})))
        eventually(lambda: (1, protocol.States({})) in heard, within_s=5)


@pytest.mark.fault("S23")
def test_an_agent_touches_files_of_its_session_alone(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "a", tmp_path / "b")
    for folder in (run_dir.path, run_dir.bulk):
        folder.mkdir()
    files = Files(run_dir)
    path = files.receive("../../x", 10)
    assert path == str(run_dir.bulk / "x")
    assert files.take(path, b"0123456789") == 10
    assert files.read(path, 4) == b"456789"
    outside = tmp_path / "secret"
    outside.write_text("mine")
    (run_dir.bulk / "link").symlink_to(outside)
    for name in (str(outside), f"{run_dir.bulk}/../secret", str(run_dir.bulk / "link")):
        for ask in (files.size, files.remove, lambda one: files.read(one, 0)):
            with pytest.raises(PermissionError):
                ask(name)
    assert outside.read_text() == "mine"


def test_a_folder_that_is_not_shared_is_told(tmp_path: Path) -> None:
    files = Files(RunDir(tmp_path, tmp_path))
    trial = tmp_path / "trial"
    trial.write_text("written by the kernel")
    assert files.sees(str(trial), "written by the kernel") == ""
    assert "is another folder there" in files.sees(str(trial), "something else")
    assert "is another folder there" in files.sees(str(tmp_path / "none" / "trial"), "x")
