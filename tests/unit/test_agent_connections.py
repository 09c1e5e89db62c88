"""What several nodes need beside real ones: the store of the groups, messages, who is let in."""

from __future__ import annotations

import json
import os
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import zmq

from nbdist.cluster import protocol
from nbdist.cluster.agent import NodeAgent
from nbdist.cluster.agent_connections import AgentConnections, KeyValueStore
from nbdist.cluster.protocol import KeyValueMessage
from nbdist.cluster.run_dir import RunDir, shared_folder_error
from nbdist.protocol import messages
from tests.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Reply = tuple[int, KeyValueMessage, list[bytes]]


class Asked:
    """A store, and what it has answered."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.point = KeyValueStore(self.take)

    def take(self, index: int, message: KeyValueMessage, *frames: bytes) -> None:
        self.replies.append((index, message, list(frames)))

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
        request = KeyValueMessage(op, list(keys), number=number, seconds=seconds)
        self.point.answer_request(0, request, [b"me", *values])
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


def test_a_timeout_names_the_missing_keys(asked: Asked) -> None:
    asked("wait", "a", "b", seconds=-1)
    asked("set", "a", values=(b"1",))
    asked.point.expire_requests()
    assert asked.replies[-1][1].error.endswith("waiting for b")


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
def test_invalid_messages_are_rejected(frames: list[bytes]) -> None:
    with pytest.raises(ValueError, match="is not a node message"):
        protocol.unpack_message(frames)


def test_an_invalid_ticket_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="not the connection data") as excinfo:
        protocol.AgentCredentials.from_json(json.dumps({"secret": "hush"}))
    assert "hush" not in str(excinfo.value)


@pytest.fixture
def hub() -> Iterator[tuple[AgentConnections, list[tuple[int, object]]]]:
    heard: list[tuple[int, object]] = []
    made = AgentConnections(
        "127.0.0.1",
        on_message=lambda index, message, _: heard.append((index, message)),
        on_disconnect=lambda index, why: heard.append((index, why)),
    )
    yield made, heard
    made.close()


def connected(
    hub: AgentConnections, context: zmq.Context[zmq.Socket[bytes]], keys: tuple[str, str]
) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.curve_serverkey = hub.public_key.encode()
    socket.curve_publickey, socket.curve_secretkey = keys[0].encode(), keys[1].encode()
    socket.connect(hub.address)
    return socket


@pytest.mark.fault("S23")
def test_a_node_is_known_by_its_key(hub: tuple[AgentConnections, list[tuple[int, object]]]) -> None:
    made, heard = hub
    keys = made.create_node_keys(7)
    with zmq.Context() as context, connected(made, context, keys) as node:
        node.send_multipart(protocol.pack_message(protocol.ProcessStates({"rank 0": "gone"})))
        eventually(lambda: heard == [(7, protocol.ProcessStates({"rank 0": "gone"}))], within_s=5)
        made.send(7, protocol.CloseRankSocketsRequest())
        received = []
        while protocol.CloseRankSocketsRequest() not in received:
            assert node.poll(5000)
            received.append(protocol.unpack_message(node.recv_multipart())[0])
    eventually(lambda: heard[-1] == (7, "lost its agent, which ended"), within_s=5)


def test_junk_of_one_node_does_not_stop_the_others(
    hub: tuple[AgentConnections, list[tuple[int, object]]],
) -> None:
    made, heard = hub
    with (
        zmq.Context() as context,
        connected(made, context, made.create_node_keys(0)) as bad,
        connected(made, context, made.create_node_keys(1)) as good,
    ):
        bad.send_multipart([b"\xff", b"junk"])
        good.send_multipart(protocol.pack_message(protocol.ProcessStates({})))
        eventually(lambda: (1, protocol.ProcessStates({})) in heard, within_s=5)


class FakeLauncher:
    """A launcher that starts nothing."""

    made: FakeLauncher
    listener: Callable[[messages.LauncherMessage], None]

    def __init__(self, _kind: str) -> None:
        FakeLauncher.made = self
        self.process = SimpleNamespace(pid=os.getpid())
        self.run_dir = RunDir.create()
        self.sent: list[messages.LauncherMessage] = []
        self.send = self.sent.append

    def resume_stopped(self) -> None:
        """Nothing is stopped."""

    def log_tail(self) -> str:
        return "said"

    def dump_stacks(self, pids: dict[int, int], *, launchers: bool) -> dict[str, str]:
        return {f"rank{rank}": f"{pid} {launchers}" for rank, pid in pids.items()}

    def close(self) -> None:
        self.run_dir.remove()


def test_an_agent_answers_and_forwards_until_it_is_stopped(
    hub: tuple[AgentConnections, list[tuple[int, object]]],
) -> None:
    made, heard = hub
    public, secret = made.create_node_keys(0)
    ticket = protocol.AgentCredentials(
        hub=made.address,
        hub_key=made.public_key,
        public=public,
        secret=secret,
        kind="cpu",
    )
    agent = NodeAgent(ticket, launcher=FakeLauncher)  # type: ignore[arg-type]
    serving = threading.Thread(target=agent.serve)
    serving.start()
    eventually(lambda: heard and isinstance(heard[0][1], protocol.AgentHello), within_s=5)
    given = {"pids": {"3": 7}, "launchers": True}
    for number, ask in enumerate([("log", {}), ("stacks", given), ("size", {"path": "/x"})]):
        made.send(0, protocol.AgentRequest(number, *ask))
    stop = messages.encode_line(messages.StopRanksRequest()).decode()
    made.send(0, protocol.LauncherLinkMessage(stop))
    eventually(lambda: FakeLauncher.made.sent == [messages.StopRanksRequest()], within_s=5)
    FakeLauncher.made.listener(messages.LauncherReady())
    ready = messages.encode_line(messages.LauncherReady()).decode()
    eventually(lambda: (0, protocol.LauncherLinkMessage(ready)) in heard, within_s=5)
    replies = [
        protocol.AgentReply(0, "said"),
        protocol.AgentReply(1, {"rank3": "7 True"}),
        protocol.AgentReply(2, error="PermissionError: /x is outside this session's folders"),
    ]
    eventually(lambda: all((0, reply) in heard for reply in replies), within_s=5)
    made.send(0, protocol.StopAgentRequest())
    serving.join(5)
    eventually(lambda: heard[-1] == (0, "lost its agent, which ended"), within_s=5)


@pytest.mark.fault("S23")
def test_an_agent_touches_files_of_its_session_alone(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "a", tmp_path / "b")
    for folder in (run_dir.path, run_dir.payload_dir):
        folder.mkdir()
    path = run_dir.create_file("../../x", 10)
    assert path == str(run_dir.payload_dir / "x")
    assert run_dir.append_chunk(path, b"0123456789") == 10
    assert run_dir.read_chunk(path, 4) == b"456789"
    outside = tmp_path / "secret"
    outside.write_text("mine")
    (run_dir.payload_dir / "link").symlink_to(outside)
    for name in (
        str(outside),
        f"{run_dir.payload_dir}/../secret",
        str(run_dir.payload_dir / "link"),
    ):
        for ask in (
            run_dir.file_size_bytes,
            run_dir.remove_file,
            lambda one: run_dir.read_chunk(one, 0),
        ):
            with pytest.raises(PermissionError):
                ask(name)
    assert outside.read_text() == "mine"


def test_a_folder_that_is_not_shared_is_reported(tmp_path: Path) -> None:
    trial = tmp_path / "trial"
    trial.write_text("written by the kernel")
    assert shared_folder_error(str(trial), "written by the kernel") == ""
    assert "is not the same folder there" in shared_folder_error(str(trial), "something else")
    assert "is not the same folder there" in shared_folder_error(
        str(tmp_path / "none" / "trial"), "x"
    )
