"""A rank or the launcher ends: reported within two seconds, with its cause; nothing is left.

One session for the module, which takes new ranks after each death.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from nbdist import CellError, RankDied, Session
from nbdist.cluster.local_launcher import LocalLauncherProvider
from nbdist.hardware.discovery import CGROUP_FILES, find_memory_events_file
from nbdist.magics import results
from nbdist.session import worker_group
from nbdist.session.failure_causes import OomKillCounter
from tests.conftest import eventually
from tests.doubles.unkillable import Unkillable
from tests.live_kernel import ANSI
from tests.nightly import nightly
from tests.processes import gone
from tests.session_internals import workers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REPORTED_S = 2.0
FREED_S = 10.0
LOOP = "while True: torch.distributed.all_reduce(torch.ones(1))\n"


@pytest.fixture(scope="module")
def memory_events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a cgroup of 2 GiB says of its OOM killer, as version 2 has it."""
    folder = tmp_path_factory.mktemp("cgroup")
    (folder / "memory.max").write_text(f"{2 * 2**30}\n")
    events = folder / "memory.events"
    events.write_text("low 0\nhigh 0\nmax 7\noom 0\noom_kill 0\noom_group_kill 0\n")
    return events


@pytest.fixture(scope="module")
def one_session(memory_events: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("notebook"))
        patch.setattr(worker_group, "OomKillCounter", lambda: OomKillCounter(memory_events))
        engine = LocalLauncherProvider()
        with Session(nproc=2, engine=engine) as running:
            yield running
        engine.close()


@pytest.fixture
def session(one_session: Session) -> Session:
    if one_session.state != "ready":
        one_session.restart()
    workers(one_session)._launcher_provider.warm_up("cpu")  # for the test that ends the launcher
    return one_session


def pids(session: Session) -> list[int]:
    return [member["pid"] for member in session.status()["ranks"]]


def launcher(session: Session) -> int:
    return int(session.status()["launcher"]["pid"])


def death_text(session: Session, *, within_s: float = REPORTED_S) -> str:
    eventually(lambda: session.state == "dead", within_s=within_s)
    return str(session.death)


def ends_in_time(session: Session) -> str:
    """What a cell that runs in the background ends with, and in time."""
    began = time.monotonic()
    with pytest.raises(RankDied) as caught:
        session.wait(FREED_S)
    assert time.monotonic() - began < REPORTED_S
    return str(caught.value)


@pytest.mark.fault("B1")
@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGKILL, "rank 1 ended with signal 9 (SIGKILL): maybe the OOM killer: see dmesg"),
        nightly(signal.SIGTERM, "SIGTERM to rank 1"),
        nightly(signal.SIGHUP, "rank 1 ended with signal 1 (SIGHUP): its login session ended"),
        nightly(signal.SIGSEGV, "rank 1 ended with signal 11 (SIGSEGV)"),
    ],
)
def test_an_idle_rank_that_ends_is_reported_with_its_signal(
    session: Session, number: signal.Signals, cause: str
) -> None:
    ranks = pids(session)
    os.kill(ranks[1], number)
    assert death_text(session).startswith(cause)
    assert cause in "\n".join(results.status_lines(session))
    eventually(lambda: gone(ranks), within_s=FREED_S)
    with pytest.raises(RankDied, match="%nbdist restart"):
        session.run("1")
    session.restart()
    assert session.run("rank").values == {0: 0, 1: 1}


@pytest.mark.fault("B2")
def test_a_rank_killed_in_a_collective_is_the_cause_and_not_its_peer(session: Session) -> None:
    session.run(LOOP, background=True)
    os.kill(pids(session)[1], signal.SIGKILL)
    text = ends_in_time(session)
    assert text.startswith("rank 1 ended with signal 9 (SIGKILL)")
    assert "peer" not in text


@pytest.mark.fault("B2")
def test_the_last_lines_are_those_of_the_rank_that_ended(session: Session) -> None:
    code = "for line in range(30): print(f'line {line} of {rank}', flush=True)\n"
    session.run(code + LOOP, background=True)
    eventually(lambda: "line 29 of 1" in session.log(1), within_s=5)
    os.kill(pids(session)[1], signal.SIGKILL)
    text = ends_in_time(session)
    assert "line 29 of 1" in text
    assert "line 10 of 1" in text
    assert "line 9 of 1" not in text
    assert "of 0" not in text


@pytest.mark.fault("B9")
@pytest.mark.parametrize("code", [0, nightly(3)])
def test_an_exit_without_output_is_reported_with_its_code(session: Session, code: int) -> None:
    session.run(f"import os\nif rank == 0: os._exit({code})\n" + LOOP, background=True)
    assert ends_in_time(session).startswith(f"rank 0 ended with exit code {code}")


@pytest.mark.fault("B10")
@pytest.mark.parametrize(
    ("crash", "name"),
    [("__import__('ctypes').string_at(0)", "SIGSEGV"), nightly("os.abort()", "SIGABRT")],
)
def test_a_crash_in_c_names_the_signal_and_the_line(
    session: Session, crash: str, name: str
) -> None:
    code = f"""import os
def step():
    os.write(2, b"the last words of C\\n")
    {crash}
if rank == 1: step()
"""
    session.run(code + LOOP, background=True, count=77)
    text = ends_in_time(session)
    assert f"({name})" in text.splitlines()[0]
    assert "In[77], line 4 in step" in text
    assert "In[77], line 5 in <module>" in text
    assert "the last words of C" in text


@pytest.mark.fault("B8")
@pytest.mark.parametrize("way", ["exit()", "quit()", "import sys; sys.exit(3)"])
def test_a_cell_cannot_end_a_rank(
    session: Session, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = pids(session)
    with pytest.raises(CellError):
        session.run(f"if rank == 1:\n    {way}")
    assert session.run("rank").values == {0: 0, 1: 1}
    assert pids(session) == before
    shown = capsys.readouterr()
    assert "use 'exit'" not in shown.out + shown.err


@pytest.mark.fault("B8")
def test_an_exit_in_a_thread_ends_that_thread_alone(session: Session) -> None:
    code = "import sys, threading\nleaving = threading.Thread(target=sys.exit, args=(3,))\n"
    session.run(code + "leaving.start()\nleaving.join()")
    assert session.run("rank").values == {0: 0, 1: 1}


@pytest.mark.fault("F1")
def test_the_oom_killer_is_named_with_the_limit(session: Session, memory_events: Path) -> None:
    counted = memory_events.read_text().replace("oom_kill 0", "oom_kill 1")
    os.kill(pids(session)[1], signal.SIGSTOP)  # as one that is being killed: it says nothing
    memory_events.write_text(counted)
    os.kill(pids(session)[1], signal.SIGKILL)
    assert "rank 1 ended with signal 9 (SIGKILL): killed by the kernel's OOM killer" in death_text(
        session
    )
    assert "(cgroup limit 2.0 GiB)" in death_text(session)
    session.restart()
    os.kill(pids(session)[1], signal.SIGKILL)
    assert "maybe the OOM killer" in death_text(session)  # the counter has not grown since


@pytest.fixture
def small_cgroup(memory_events: Path) -> Iterator[Path]:
    """A cgroup of 2.5 GiB inside our own."""
    own = find_memory_events_file()
    assert own != memory_events
    if own is None or not os.access(own.parent, os.W_OK):
        pytest.skip("no cgroup of memory can be made here")
    folder = own.parent / f"nbdist-test-{os.getpid()}"
    folder.mkdir()
    try:
        limits = (folder / name for name in CGROUP_FILES)
        limit = next((file for file in limits if file.exists()), None)
        if limit is None:
            pytest.skip("this cgroup does not limit memory")
        limit.write_text(str(5 * 2**29))
        yield folder
    finally:
        folder.rmdir()


FULL = r"""
import os, sys
from pathlib import Path
from nbdist import RankDied, Session
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
with Session(nproc=2) as session:
    try:
        session.run("kept = []\nwhile rank == 1: kept.append(bytearray(2**26))")
    except RankDied as death:
        print(death)
"""


@pytest.mark.nightly
@pytest.mark.fault("F1")
def test_the_real_oom_killer_is_named_with_the_limit(small_cgroup: Path) -> None:
    script = [sys.executable, "-c", FULL, str(small_cgroup)]
    shown = subprocess.run(script, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "signal 9 (SIGKILL): killed by the kernel's OOM killer (cgroup limit 2.5 GiB)" in shown


@pytest.mark.fault("F2")
def test_a_rank_without_memory_raises_and_lives(session: Session) -> None:
    limited = """import resource, psutil
kept = resource.getrlimit(resource.RLIMIT_AS)
room = psutil.Process().memory_info().vms + 2**28
if rank == 1: resource.setrlimit(resource.RLIMIT_AS, (room, kept[1]))
try:
    block = bytearray(2**30)
finally:
    resource.setrlimit(resource.RLIMIT_AS, kept)
"""
    with pytest.raises(CellError) as caught:
        session.run(limited)
    assert {rank: error.ename for rank, error in caught.value.errors.items()} == {1: "MemoryError"}
    shown = "\n".join(caught.value.errors[1].traceback)
    assert "block = bytearray(2**30)" in ANSI.sub("", shown)
    assert "---->" not in shown, "nothing was parsed: CPython may end by that without memory"
    assert session.run("rank").values == {0: 0, 1: 1}


@pytest.mark.fault("B1")
def test_the_last_checkpoint_is_offered_and_loads(session: Session) -> None:
    prepare = """from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
"""
    session.run(
        prepare + "for _ in range(3):\n    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step(); optimizer.zero_grad()"
    )
    session.save("base", wait=True)
    weight = session.pull("model", as_numpy=True)["weight"]
    os.kill(pids(session)[0], signal.SIGKILL)
    offer = (
        "The last checkpoint is 'base' at step 3: use %nbdist restart, run the cell that calls"
        " prepare(), then %nbdist load base."
    )
    assert offer in death_text(session)
    session.restart()
    session.run(prepare)
    session.load("base")
    assert (session.pull("model", as_numpy=True)["weight"] == weight).all()


CHILDREN = """import subprocess
loader = iter(torch.utils.data.DataLoader(range(100), num_workers=2))
next(loader)
away = subprocess.Popen(['sleep', '999'], start_new_session=True)
[away.pid, *(worker.pid for worker in loader._workers)]
"""


@pytest.mark.fault("B12")
def test_children_of_a_killed_rank_end_too(session: Session) -> None:
    children = [pid for own in session.run(CHILDREN).values.values() for pid in own]
    assert len(children) == 6
    os.kill(pids(session)[1], signal.SIGKILL)
    death_text(session)
    eventually(lambda: gone(children), within_s=FREED_S)


@pytest.mark.fault("B3", "B14")
def test_a_killed_launcher_is_reported_and_its_processes_end(session: Session) -> None:
    children = [pid for own in session.run(CHILDREN).values.values() for pid in own]
    ranks, folder = pids(session), workers(session).launcher_group.run_dir
    os.kill(launcher(session), signal.SIGKILL)
    eventually(lambda: gone(ranks), within_s=REPORTED_S)
    assert death_text(session).startswith("the launcher ended with signal 9 (SIGKILL)")
    assert not session.status()["launcher"]["alive"]
    eventually(lambda: gone(children), within_s=FREED_S)
    session.restart()
    assert not folder.path.exists()
    assert not folder.payload_dir.exists()


@pytest.mark.fault("B4")
@pytest.mark.parametrize("number", [signal.SIGTERM, nightly(signal.SIGHUP)])
def test_a_launcher_that_is_asked_to_end_ends_cleanly(
    session: Session, number: signal.Signals
) -> None:
    everything = [launcher(session), *pids(session)]
    os.kill(everything[0], number)
    eventually(lambda: gone(everything), within_s=5)
    summary = f"the launcher ended with signal {number} ({number.name})"
    if number == signal.SIGTERM:  # the kernel ends it
        summary = "SIGTERM to the launcher"
    assert death_text(session).startswith(summary)


@pytest.mark.fault("B7")
def test_a_stopped_rank_is_unresponsive_and_not_dead(session: Session) -> None:
    stopped = pids(session)[1]
    session.run("for _ in range(1000): torch.distributed.barrier()", background=True)
    os.kill(stopped, signal.SIGSTOP)
    eventually(lambda: session.status()["ranks"][1]["unresponsive"], within_s=6)
    assert session.status()["ranks"][1]["unresponsive"] == "unresponsive (stopped, state T)"
    assert session.stacks()[1].endswith(f"resume it with kill -CONT {stopped}")
    assert session.death is None
    os.kill(stopped, signal.SIGCONT)
    assert session.wait(30)
    eventually(lambda: not session.status()["ranks"][1]["unresponsive"], within_s=3)
    assert session.run("rank").values == {0: 0, 1: 1}


@pytest.mark.fault("B7")
def test_a_stopped_rank_does_not_hold_up_a_restart(session: Session) -> None:
    ranks = pids(session)
    os.kill(ranks[1], signal.SIGSTOP)
    began = time.monotonic()
    workers(session).stop_ranks()
    assert time.monotonic() - began < 5
    assert gone(ranks)
    session.restart()


@pytest.mark.fault("B7")
def test_a_stopped_launcher_is_reported_and_does_not_delay_a_restart(session: Session) -> None:
    os.kill(launcher(session), signal.SIGSTOP)
    eventually(lambda: session.status()["launcher"]["unresponsive"], within_s=6)
    assert session.run("rank").values == {0: 0, 1: 1}
    ranks = pids(session)
    os.kill(ranks[0], signal.SIGKILL)
    assert death_text(session, within_s=4).startswith("rank 0 ended with signal 9 (SIGKILL)")
    eventually(lambda: gone(ranks), within_s=FREED_S)
    session.restart()
    assert session.run("rank").values == {0: 0, 1: 1}


@pytest.mark.fault("B11")
def test_a_stop_is_bounded_by_what_cannot_be_killed(session: Session) -> None:
    held = workers(session).launcher_group
    real, held.process = held.process, Unkillable(held.process)
    began = time.monotonic()
    with pytest.warns(RuntimeWarning, match=f"cannot be killed: {real.pid}"):
        workers(session).close()
    assert time.monotonic() - began < 10
    real.wait(5)  # the double only hid it
    session.restart()


@pytest.mark.fault("B15")
def test_a_megabyte_from_c_does_not_block(session: Session) -> None:
    code = (
        "import os\nfor fd in (1, 2):\n    for _ in range(1024): os.write(fd, b'x' * 1023 + b'\\n')"
    )
    began = time.monotonic()
    assert session.run(code, output="none").ok
    assert time.monotonic() - began < 20
    assert session.run("rank").values == {0: 0, 1: 1}


def test_stacks_name_the_line_of_a_python_loop(session: Session) -> None:
    session.run("def wait():\n    while rank == 0: pass\nwait()", background=True, count=31)
    eventually(lambda: "In[31], line 2 in wait" in session.stacks()[0], within_s=5)
    session.interrupt()
    with pytest.raises(CellError, match="KeyboardInterrupt"):
        session.wait(10)


def test_stacks_reach_into_c_that_holds_the_interpreter(session: Session) -> None:
    code = "import ctypes\nif rank == 1: ctypes.PyDLL(None).sleep(8)"
    session.run(code, background=True, count=32)
    eventually(lambda: "In[32], line 2 in <module>" in session.stacks()[1], within_s=5)
    assert session.wait(20)
