"""Who can reach a session: nobody from another host, no other user, nobody without its key."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import nbdist
from tests.conftest import eventually
from tests.live_kernel import LiveKernel
from tests.session_internals import workers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist import Session

LOOK_S = 0.1
Listener = tuple[str, str]
"""Command line of a process, and the address that it listens at."""


def tree() -> list[psutil.Process]:
    """This process, which is the session's kernel here, and everything it has started."""
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def listeners(processes: list[psutil.Process]) -> set[Listener]:
    """Where these processes wait for others, over TCP or UDP."""
    found = set()
    for process in processes:
        try:
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN or one.type == socket.SOCK_DGRAM:
                    found.add((" ".join(process.cmdline()), one.laddr.ip))
        except psutil.Error:
            continue  # it has ended meanwhile
    return found


@contextmanager
def watched() -> Iterator[set[Listener]]:
    """Collect all listeners of the session's processes while something happens."""
    seen: set[Listener] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            seen.update(listeners(tree()))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


PREPARED = """
bare = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters()))
loss = model(torch.ones(2, 4)).sum()
accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()
"""
GROUPS = """
group = torch.distributed.new_group([0, 1])
x = torch.ones(1)
torch.distributed.all_reduce(x, group=group)
loader = iter(torch.utils.data.DataLoader(range(100), num_workers=2))
next(loader)
"""


@pytest.mark.timeout(600)
@pytest.mark.fault("S1")
@pytest.mark.fault("S9")
@pytest.mark.fault("S12")
def test_nothing_listens_off_loopback_at_any_time_in_any_process(tmp_path: Path) -> None:
    with watched() as seen, nbdist.Session(nproc=2) as session:
        session.run(GROUPS)
        for backend in ("ddp", "fsdp2", "zero3"):
            session.switch(backend)
            session.run(PREPARED)
        session.save("one", wait=True, folder=tmp_path)
        session.switch("ddp", nproc=3)
        session.run("torch.distributed.barrier()")
        session.restart()
    assert seen, "gloo has to be seen, or nothing was looked at"
    assert {address for _, address in seen} == {"127.0.0.1"}


@pytest.mark.fault("S9")
@pytest.mark.fault("S10")
def test_the_ranks_meet_in_a_file_and_no_store_listens(session: Session) -> None:
    kinds = session.run(
        "from torch.distributed import distributed_c10d\n"
        "store = distributed_c10d._get_default_store()\n"
        "while isinstance(store, torch.distributed.PrefixStore): store = store.underlying_store\n"
        "type(store).__name__"
    ).values
    assert kinds == {0: "FileStore", 1: "FileStore"}
    launcher = psutil.Process(session.status()["ranks"][0]["pid"]).parent()
    assert launcher is not None
    assert launcher.net_connections("inet") == []


STORE_CLIENT = """
import os, sys, threading
from datetime import timedelta
from torch.distributed import TCPStore
written = []
def write(port):
    try:
        TCPStore("127.0.0.1", port, timeout=timedelta(seconds=2)).set("x", "y")
        written.append(port)
    except RuntimeError:
        pass  # wanted
clients = [threading.Thread(target=write, args=[int(port)], daemon=True) for port in sys.argv[1:]]
for one in clients: one.start()
for one in clients: one.join(5)  # some wait for ever: nobody answers
print("written:", written, flush=True)
os._exit(0)
"""


@pytest.mark.nightly
@pytest.mark.fault("S10")
def test_a_strangers_store_client_and_junk_get_nothing_and_stop_nothing(session: Session) -> None:
    pids = [rank["pid"] for rank in session.status()["ranks"]]
    ports = {
        one.laddr.port
        for pid in pids
        for one in psutil.Process(pid).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }
    assert ports  # gloo's
    command = [sys.executable, "-c", STORE_CLIENT, *map(str, ports)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "written: []"
    for port in ports:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(os.urandom(4096))
    session.run("torch.distributed.barrier()")
    session.run(GROUPS)


@pytest.mark.fault("S11")
def test_gloo_and_nccl_are_configured_to_stay_on_loopback(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = "import os; [os.environ[n] for n in ('GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME')]"
    assert session.run(asked).values == {0: ["lo", "lo"], 1: ["lo", "lo"]}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    session.restart()
    assert session.run(asked).values == {0: ["lo", "lo"], 1: ["lo", "lo"]}


# ------------------------------------------------------------------ other users of this machine


@pytest.fixture
def open_umask() -> Iterator[None]:
    """A user whose new files everybody may read and write."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.fault("S2")
@pytest.mark.fault("S14")
@pytest.mark.usefixtures("open_umask")
def test_folders_are_0700_and_files_0600_under_any_umask() -> None:
    with nbdist.Session(nproc=2) as session:
        session.push(x=list(range(10)))
        run_dir = workers(session).launcher_group.run_dir
        for folder in (run_dir.path, run_dir.payload_dir, run_dir.path / "1"):
            found = folder.lstat()
            assert stat.S_ISDIR(found.st_mode)
            assert found.st_mode & 0o777 == 0o700
            assert found.st_uid == os.getuid()
        files = {p.name: p for p in (run_dir.path / "1").iterdir() if p.is_file()}
        assert {"rank0.json", "rank1.json", "store"} <= files.keys()
        for path in files.values():
            assert path.stat().st_mode == 0o100600, path


STRANGER = """
import os, pathlib, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
reached = []
for name in sys.argv[1:]:
    path = pathlib.Path(name)
    for what, attempt in {
        "listed": lambda: os.listdir(path),
        "read": lambda: path.read_bytes(),
        "written": lambda: path.open("ab"),
        "made": lambda: (path / "x").mkdir(),
        "connected": lambda: socket.socket(socket.AF_UNIX).connect(name),
    }.items():
        try:
            attempt()
        except (PermissionError, IsADirectoryError):
            continue
        except OSError as error:
            reached.append(f"{name}: {what}: {error}")
        else:
            reached.append(f"{name}: {what}")
print(reached)
"""


@pytest.mark.fault("S2")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.usefixtures("open_umask")
def test_another_user_reaches_nothing() -> None:
    with nbdist.Session(nproc=2) as session:
        run_dir = workers(session).launcher_group.run_dir
        inside = sorted(map(str, (run_dir.path / "1").iterdir()))
        assert len(inside) > 10
        targets = [str(run_dir.path), str(run_dir.payload_dir), *inside]
        command = [sys.executable, "-c", STRANGER, *targets]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
        assert shown.stdout.strip() == "[]"


# -------------------------------------------------------------------------------------- the key


def everywhere(session: Session) -> Iterator[tuple[str, str]]:
    """Places where a key does not belong, and what is there."""
    for process in tree():
        yield f"argv of {process.pid}", " ".join(process.cmdline())
        yield f"environ of {process.pid}", json.dumps(process.environ())
    yield "status", json.dumps(session.status(), default=str)
    yield "repr", repr(session)
    yield "launcher's log", session.log()
    for rank in range(2):
        yield f"log of rank {rank}", session.log(rank)


@pytest.mark.fault("S5")
def test_the_key_is_in_the_connection_files_alone(
    session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session.run(PREPARED)
    with pytest.raises(nbdist.CellError) as raised:
        session.run("raise ValueError(get_ipython())")
    session.save("one", wait=True, folder=tmp_path)
    session.panel("text")
    session.panel("html")
    folder = workers(session).launcher_group.run_dir.path / str(workers(session).generation)
    keys = {json.loads(path.read_text())["key"] for path in folder.glob("rank?.json")}
    (key,) = keys
    places = dict(everywhere(session))
    places["output"] = "".join(capsys.readouterr())
    places["error"] = "\n".join(raised.value._render_traceback_())
    for path in tmp_path.rglob("*"):
        if path.is_file():
            places[str(path)] = path.read_bytes().decode("latin-1")
    assert len(places) > 10
    assert [place for place, text in places.items() if key in text] == []
    holders = [p for p in workers(session).launcher_group.run_dir.path.rglob("*") if p.is_file()]
    named = {p.name for p in holders if key.encode() in p.read_bytes()}
    assert named == {"rank0.json", "rank1.json"}


# --------------------------------------------------------------------------------- the notebook

CELLS = (
    "%load_ext nbdist",
    "%%distribute -n 2\nprint(rank)\nx = '<img src=x onerror=alert(1)></script>'\nx",
    "%%distribute\nraise ValueError(x)",
    """%%distribute
import os
print(os.environ['FAKE_TOKEN'])
os.system('echo $FAKE_TOKEN and $OTHER_PASSWORD >&2')""",
    "%nbdist panel --face html",
    "%nbdist plan 7b",
    "%nbdist status",
)
SECRETS = {"FAKE_TOKEN": "tok-0123456789", "OTHER_PASSWORD": "correct horse"}


def raw(outputs: list[dict[str, Any]]) -> str:
    """Everything a notebook's file would hold of a cell's outputs."""
    return json.dumps(outputs, default=str)


def markup(outputs: list[dict[str, Any]]) -> str:
    """What a page would take for HTML."""
    return "".join(str(one.get("data", {}).get("text/html", "")) for one in outputs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveKernel, list[Any]]]:
    with LiveKernel(tmp_path_factory.mktemp("saved"), **SECRETS) as kernel:
        yield kernel, [kernel.run(cell) for cell in CELLS]


@pytest.mark.fault("S5")
def test_the_key_is_in_no_output_of_a_notebook(saved: tuple[LiveKernel, list[Any]]) -> None:
    kernel, shown = saved
    pid = kernel.manager.provisioner.pid
    (file,) = Path("/tmp").glob(f"nbdist-{pid}-*/1/rank0.json")  # noqa: S108 - a session's folder
    key = json.loads(file.read_text())["key"]
    assert key not in raw([output for one in shown for output in one.outputs])


@pytest.mark.fault("S17")
@pytest.mark.fault("G1")
def test_a_saved_notebook_holds_no_script_and_no_markup_of_a_cell(
    saved: tuple[LiveKernel, list[Any]],
) -> None:
    import nbformat
    from nbconvert import HTMLExporter

    _, shown = saved
    html = "".join(markup(one.outputs) for one in shown)
    assert "<div" in html
    for way_in in (r"<script", r"<img", r"<iframe", r"<object", r"\son\w+\s*=", r"javascript:"):
        assert not re.search(way_in, html, re.IGNORECASE), way_in
    cells = [
        nbformat.v4.new_code_cell(
            "", outputs=[nbformat.from_dict(_as_saved(output)) for output in one.outputs]
        )
        for one in shown
    ]
    page, _ = HTMLExporter(exclude_input=True).from_notebook_node(
        nbformat.v4.new_notebook(cells=cells)
    )
    body = page.partition("<body")[2]
    assert "<img src=x" not in body
    assert len(re.findall("<script", body)) <= 1  # nbconvert's own, for its widgets' styles


def _as_saved(output: dict[str, Any]) -> dict[str, Any]:
    """An output as a notebook's file has it."""
    kept = {key: value for key, value in output.items() if key not in {"kind", "transient"}}
    return {"output_type": output["kind"], **kept}


@pytest.mark.fault("S18")
def test_no_log_shows_a_secret_of_the_environment(saved: tuple[LiveKernel, list[Any]]) -> None:
    kernel, shown = saved
    assert "tok-0123456789" in shown[3].text  # the user's own print shows what it prints

    def log(of: str) -> str:
        return str(kernel.run(f"%nbdist log {of}").text)

    eventually(lambda: "<OTHER_PASSWORD>" in log(""), within_s=20)
    for of in ("", "0", "1"):
        assert "tok-0123456789" not in log(of)
        assert "correct horse" not in log(of)
    assert "<FAKE_TOKEN>" in log("0")
