"""Frames on the sockets of a session that nobody with its key has written: nothing is run."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import zmq
from jupyter_client.session import DELIM
from jupyter_client.session import Session as Signer

from nbdist.cluster.rank_channels import LocalRankChannels, write_connections
from nbdist.errors import StartError
from nbdist.protocol.signing import MessageSigner as Ours
from nbdist.worker.kernel import RankApp
from tests.conftest import eventually
from tests.session_internals import workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from nbdist import Session
    from nbdist.cluster.rank_channels import Channel, Message

KEY = "0123456789abcdef" * 4
FORGED = "forged = True"
FLOOD = 20_000


class Door(NamedTuple):
    """A way to a rank's socket that is not the session's own."""

    socket: zmq.Socket[bytes]
    key: str


def opened(session: Session, rank: int, channel: str) -> Iterator[Door]:
    """Connect to a rank as a process of the same user could; others cannot."""
    folder = workers(session).launcher_group.run_dir.path / str(workers(session).generation)
    file = json.loads((folder / f"rank{rank}.json").read_text())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(f"ipc://{file['ip']}-{file[f'{channel}_port']}")
    yield Door(socket, file["key"])
    socket.close()
    context.term()


@pytest.fixture(params=["shell", "control"])
def door(request: pytest.FixtureRequest, session: Session) -> Iterator[Door]:
    """The shell and the control socket of rank 1."""
    yield from opened(session, 1, request.param)


def frames(key: str, code: str = FORGED) -> list[bytes]:
    signer = Signer(key=key.encode())
    return signer.serialize(signer.msg("execute_request", {"code": code, "silent": False}))


def wrong_key(_: str) -> list[bytes]:
    return frames("f" * 64)


def empty_key(_: str) -> list[bytes]:
    return frames("")


def unsigned(key: str) -> list[bytes]:
    made = frames(key)
    made[1] = b""
    return made


def reordered(key: str) -> list[bytes]:
    made = frames(key)
    made[2], made[5] = made[5], made[2]
    return made


def other_content(key: str) -> list[bytes]:
    made = frames(key, "1")
    made[5] = frames(key)[5]
    return made


def cut(key: str) -> list[bytes]:
    return frames(key)[:4]


def no_delimiter(key: str) -> list[bytes]:
    return frames(key)[1:]


def nothing_after_the_delimiter(_: str) -> list[bytes]:
    return [DELIM]


def not_utf8(_: str) -> list[bytes]:
    return [DELIM, b"\xff" * 64, b"\xff\xfe", b"{", b"[" * 10_000, b"\0"]


def stop_aborting(_: str) -> list[bytes]:
    return [b"stop aborting"]  # what ipykernel sends to itself


BAD: list[Callable[[str], list[bytes]]] = [
    *(wrong_key, empty_key, unsigned, reordered, other_content, cut),
    *(no_delimiter, nothing_after_the_delimiter, not_utf8, stop_aborting),
]


@pytest.mark.fault("S3")
@pytest.mark.fault("D13")
@pytest.mark.parametrize("made", BAD, ids=lambda one: one.__name__)
def test_a_rank_runs_nothing_that_is_not_signed(
    made: Callable[[str], list[bytes]], door: Door, session: Session
) -> None:
    door.socket.send_multipart(made(door.key))
    assert session.run("'forged' in globals()").values == {0: False, 1: False}
    assert session.run("rank").ok


@pytest.mark.fault("S3")
def test_the_same_frames_with_the_key_do_run(door: Door, session: Session) -> None:
    """What the test above sends would be run otherwise."""
    door.socket.send_multipart(frames(door.key, "taken = True"))
    eventually(lambda: session.run("'taken' in globals()").values[1], within_s=10)
    session.run("globals().pop('taken', None)")


@pytest.mark.fault("S3")
@pytest.mark.fault("D13")
def test_a_recorded_message_runs_once(door: Door, session: Session) -> None:
    session.run("runs = 0")
    recorded = frames(door.key, "runs += 1")
    for _ in range(4):
        door.socket.send_multipart(recorded)
    eventually(lambda: session.run("runs").values[1], within_s=10)
    assert session.run("runs").values == {0: 0, 1: 1}


@pytest.mark.fault("S3")
def test_a_recorded_message_is_not_taken_again_behind_a_flood_of_forged_ones() -> None:
    signer = Ours(key=KEY.encode(), digest_history_size=64)
    recorded = frames(KEY)
    signer.deserialize(recorded[1:])
    for _ in range(1000):
        with pytest.raises(ValueError, match="Invalid Signature"):
            signer.deserialize([os.urandom(32), b"{}", b"{}", b"{}", b"{}"])
    with pytest.raises(ValueError, match="Duplicate Signature"):
        signer.deserialize(recorded[1:])


@pytest.mark.fault("S20")
@pytest.mark.fault("D13")
def test_a_flood_of_junk_does_not_fill_the_log(door: Door, session: Session) -> None:
    for _ in range(FLOOD):
        door.socket.send_multipart([DELIM, os.urandom(32), b"{}", b"{}", b"{}", b"{}"])
    assert session.run("rank").values == {0: 0, 1: 1}
    launcher = workers(session).launcher_group
    assert launcher is not None
    assert len(launcher.log.tail()) < 50_000
    assert len(session.logs[1].text()) < 50_000


NONSENSE = (
    "k = get_ipython().kernel",
    "k.iopub_socket.send_multipart([b'x'])",
    "k.iopub_socket.send_multipart([b'<IDS|MSG>', b'\\xff' * 32, b'{}', b'{}', b'{}', b'{}'])",
    "k.publish('nbdist_report', {'rows': 5})",
    "k.publish('nbdist_send', {'name': 3, 'path': '/etc/passwd'})",
    "k.publish('nbdist_saved', {'state': 'done'})",
    "k.publish('nbdist_chosen', {'options': []})",
    "k.publish('nbdist_advice', {'lines': None})",
    "k.publish('nbdist_phase', 'words')",
    "k.publish('stream', {'name': 7})",
    "k.publish('display_data', {'data': 3})",
    "k.publish('error', {})",
    "k.publish('execute_result', {'data': None, 'metadata': None})",
    "k.session.send(k.iopub_socket, 'status', {}, parent={'header': {'msg_id': ['x']}})",
)


@pytest.mark.fault("S3")
@pytest.mark.parametrize("sent", NONSENSE[1:], ids=range(len(NONSENSE) - 1))
def test_the_kernel_outlives_what_a_rank_sends(sent: str, session: Session) -> None:
    session.run(f"{NONSENSE[0]}\nif rank == 1: {sent}")
    assert session.run("rank").values == {0: 0, 1: 1}


class Seen:
    """Takes what the channels pass on."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, str, Any]] = []
        self.looks = 0

    def on_message(self, ranks: Sequence[int], channel: Channel, message: Message) -> None:
        if message["content"].get("fail"):
            raise KeyError(message["msg_id"])
        self.messages += [(rank, channel, message["content"]) for rank in ranks]

    def on_idle(self) -> bool:
        self.looks += 1
        raise KeyError("something that nobody expects")


@pytest.mark.fault("S3")
@pytest.mark.fault("D13")
@pytest.mark.parametrize("channel", ["shell", "control", "iopub"])
def test_the_kernel_reads_on_behind_frames_of_a_stranger(
    channel: Channel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    connections = write_connections(tmp_path, world_size=1, key=KEY.encode())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    rank = context.socket(zmq.PUB if channel == "iopub" else zmq.DEALER)
    rank.linger = 0
    rank.bind(f"ipc://{connections[0]['ip']}-{connections[0][f'{channel}_port']}")
    seen = Seen()
    channels = LocalRankChannels(connections, seen)
    genuine = Ours(key=KEY.encode())

    def arrives(number: int) -> bool:
        rank.send_multipart(genuine.serialize(genuine.msg("stream", {"n": number})))
        return (0, channel, {"n": number}) in seen.messages

    eventually(lambda: arrives(1), within_s=10)
    recorded = genuine.serialize(genuine.msg("stream", {"n": 99}))
    for frame in [*(bad(KEY) for bad in BAD), recorded, recorded]:
        rank.send_multipart(frame)
    rank.send_multipart(genuine.serialize(genuine.msg("stream", {"fail": True})))
    eventually(lambda: arrives(2), within_s=10)
    assert seen.messages.count((0, channel, {"n": 99})) == 1
    assert {"code": FORGED, "silent": False} not in [content for _, _, content in seen.messages]
    looks = seen.looks
    eventually(lambda: seen.looks > looks, within_s=10)
    lines = [record.message for record in caplog.records]
    assert sum("periodic work of the session failed" in words for words in lines) == 1
    assert sum("not signed" in words for words in lines) == 1
    assert sum("cannot process a message" in words for words in lines) == 1
    channels.close()
    rank.close()
    context.term()


@pytest.mark.fault("S4")
def test_every_channel_is_a_unix_socket(session: Session) -> None:
    folder = workers(session).launcher_group.run_dir.path / str(workers(session).generation)
    for rank in range(2):
        file = json.loads((folder / f"rank{rank}.json").read_text())
        assert file["transport"] == "ipc"
        assert file["ip"] == str(folder / f"r{rank}")
        assert len(file["key"]) == 64
    sockets = [one for one in folder.iterdir() if one.is_socket()]
    assert len(sockets) == 10  # shell, control, iopub, stdin and heartbeat of each rank


@pytest.mark.fault("S4")
@pytest.mark.parametrize(
    "change",
    [{"transport": "tcp", "ip": "0.0.0.0"}, {"key": ""}, {"key": "short"}],  # noqa: S104
)
def test_a_rank_refuses_to_listen_on_tcp_or_without_a_key(
    change: dict[str, str], tmp_path: Path
) -> None:
    write_connections(tmp_path, world_size=1, key=KEY.encode())
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    app = RankApp(connection_file=str(path))
    with pytest.raises(StartError, match="expected ipc transport and a signing key"):
        app.load_connection_file()
