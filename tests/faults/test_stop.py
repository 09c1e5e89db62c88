"""Stop, and ranks that wait for one another: the model is kept, and what happened is reported."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

import nbdist
from nbdist import CellError, CellInterrupted, Session
from nbdist.cluster.local_launcher import LocalLauncherProvider
from nbdist.protocol import messages, operations
from tests.conftest import eventually
from tests.interrupts import meanwhile, runs_for, stopped, stopped_with
from tests.live_kernel import LiveKernel
from tests.nightly import nightly
from tests.session_internals import num_stops, workers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.cluster.rank_channels import Channel

PREPARE = """
import torch.distributed as dist
torch.manual_seed(0)
layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
batch = torch.ones(4, 8) * (rank + 1)
made = 0

def step():
    global made
    loss = model(batch).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    made += 1
    return loss.item()

step()
"""
IN_STEP = """
if rank == 0:
    step()
else:
    import time
    while True: time.sleep(0.05)
"""


@pytest.fixture(scope="module", params=["ddp", nightly("fsdp2"), nightly("zero3")])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Two CPU ranks with a model in training."""
    with nbdist.Session(nproc=2, backend=request.param) as running:
        running.run(PREPARE)
        yield running


@pytest.fixture(scope="module")
def plain() -> Iterator[Session]:
    with nbdist.Session(nproc=2) as running:
        running.run("import time\nimport torch.distributed as dist\nkept = 'mine'")
        yield running


def can_add(session: Session) -> bool:
    code = "t = torch.ones(3)\ndist.all_reduce(t)\nt.tolist()"
    return list(session.run(code).values.values()) == [[2.0] * 3] * 2


def trains_on(session: Session) -> bool:
    """Whether all ranks make further steps with the same weights."""
    losses = session.run("[step() for _ in range(3)][-1]").values
    gathered = "accelerator.gather(torch.tensor([float(made)])).tolist()"
    steps = session.run(gathered).values
    return all(isinstance(one, float) for one in losses.values()) and len(set(steps[0])) == 1


@pytest.mark.fault("C2")
def test_stop_in_python_ends_all_ranks_and_keeps_everything(plain: Session) -> None:
    text, seconds = stopped(plain, "while True: pass", when=runs_for(plain, 0.5))
    assert "all variables are kept" in text
    assert seconds < 5  # 1 s on a machine of our own
    assert plain.run("kept").values == {0: "mine", 1: "mine"}
    assert can_add(plain)


def test_stop_reaches_ranks_that_began_with_signals_blocked() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        session = nbdist.Session(nproc=1, engine=LocalLauncherProvider()).start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with session:
        text, seconds = stopped(session, "while True: pass", when=runs_for(session, 0.2))
    assert "all variables are kept" in text
    assert seconds < 5


@pytest.mark.fault("C1")
@pytest.mark.fault("C3")
def test_a_rank_alone_in_a_collective_is_reported_and_stopped(plain: Session) -> None:
    code = "if rank == 0: dist.all_reduce(torch.ones(2))"
    _, seconds = stopped_with(plain, code, says="rank 0 has waited")
    assert seconds < 10
    assert can_add(plain)


@pytest.mark.fault("C1")
def test_a_rank_that_waits_for_one_that_has_finished_is_interrupted(plain: Session) -> None:
    waited = r"^rank 0 has waited \d+ s in all_reduce at line 1; rank 1 has finished the cell\. "
    with pytest.raises(CellInterrupted, match=waited + "All ranks must run that line. Interrupted"):
        plain.run("if rank == 0: dist.all_reduce(torch.ones(2))")
    assert can_add(plain)


@pytest.mark.fault("C3")
def test_a_rank_that_is_stuck_in_a_step_is_freed_and_its_model_trains_on(session: Session) -> None:
    before = session.run("made").values
    text, seconds = stopped_with(session, IN_STEP, says="rank 0 has waited")
    assert seconds < 30  # with the models made ready again
    assert "all variables are kept" in text
    assert session.run("made").values == before
    assert trains_on(session)


def test_stop_lets_an_iteration_end(session: Session) -> None:
    session.run("ended = 0")
    loop = "while True:\n    before = made\n    step()\n    ended += made - before"
    before = session.run("made").values
    stopped(session, loop, when=runs_for(session, 0.5))
    after = session.run("(made, ended)").values
    assert {rank: made - ended for rank, (made, ended) in after.items()} == before


@pytest.mark.fault("C4")
def test_stop_leaves_all_ranks_after_the_same_step(session: Session) -> None:
    for seconds in (0.31, 0.47, 0.63):
        stopped(session, "while True: step()", when=runs_for(session, seconds))
        counts = session.run("made").values
        assert len(set(counts.values())) == 1
    assert trains_on(session)


def test_a_rank_that_never_comes_to_the_step_of_the_others_is_stopped_too(plain: Session) -> None:
    plain.run(PREPARE)
    code = "step()\nif rank == 0: optimizer.step()\nwhile True: pass"
    text, seconds = stopped(plain, code, when=runs_for(plain, 1.0))
    assert "Interrupted on all ranks" in text
    assert seconds < 8


@pytest.mark.fault("C5")
@pytest.mark.parametrize(
    "error", ["ValueError('bad batch')", nightly("torch.OutOfMemoryError('CUDA out of memory')")]
)
def test_a_rank_that_raises_ends_the_cell_of_those_that_wait_for_it(
    session: Session, error: str
) -> None:
    code = f"for i in range(50):\n    if rank == 1 and i == 2: raise {error}\n    step()"
    with pytest.raises(CellError, match=error.partition("(")[0].removeprefix("torch.")) as excinfo:
        session.run(code)
    assert set(excinfo.value.errors) == {0, 1}
    assert excinfo.value.errors[0].ename in {"KeyboardInterrupt", "RuntimeError"}
    assert trains_on(session)


def test_stop_in_an_evaluation_leaves_models_usable(session: Session) -> None:
    code = "with torch.no_grad():\n    while True: accelerator.gather(model(batch))"
    for seconds in (0.4, 0.5, 0.6):
        stopped(session, code, when=runs_for(session, seconds))
        assert trains_on(session)


@pytest.mark.nightly
@pytest.mark.fault("C11")
def test_what_was_prepared_before_says_so(session: Session) -> None:
    session.run("kept_apart = [model]\nsame = model")
    stopped_with(session, IN_STEP, says="rank 0 has waited")
    result = session.run(
        "before, now = kept_apart[0], model\n"
        "try:\n    before(batch) if before is not now else None\n    said = ''\n"
        "except Exception as error:\n    said = str(error)\n(before is now, said)"
    ).values[0]
    assert isinstance(result, tuple)
    assert result[0] or "was prepared before" in str(result[1])
    assert trains_on(session)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        pytest.param(
            "dist.all_reduce(torch.ones(4 + 4 * rank))",
            r"rank 0 called all_reduce \(SUM\) of float32\[4\], rank 1 .* of float32\[8\]",
            marks=pytest.mark.fault("C6"),
        ),
        pytest.param(
            "dist.all_reduce(torch.ones(4, dtype=[torch.float32, torch.int64][rank]))",
            r"of float32\[4\], rank 1 called all_reduce \(SUM\) of int64\[4\]",
            marks=pytest.mark.fault("C7"),
        ),
        pytest.param(
            "t = torch.ones(4)\ndist.all_reduce(t) if rank else dist.broadcast(t, 0)",
            r"rank 0 called broadcast .*, rank 1 called all_reduce",
            marks=pytest.mark.fault("C8"),
        ),
        pytest.param(
            "dist.barrier() if rank == 0 else accelerator.gather(torch.ones(2))",
            "rank 0 called barrier, rank 1 called all_gather",
            marks=[pytest.mark.fault("C8"), pytest.mark.nightly],
        ),
    ],
)
def test_calls_that_do_not_fit_name_both_sides_and_break_nothing(
    plain: Session, code: str, says: str
) -> None:
    with pytest.raises(CellError, match=says) as excinfo:
        plain.run(code)
    assert {error.ename for error in excinfo.value.errors.values()} == {"CollectiveMismatch"}
    assert "line" in "\n".join(excinfo.value._render_traceback_())  # the cell's own line is shown
    assert can_add(plain)


LEGAL = """
t = torch.arange(2.0) + rank
seen = []
into = [torch.zeros(2), torch.zeros(2)]
dist.gather(t, into if rank == 0 else None, dst=0)
seen.append(into[1].sum().item() if rank == 0 else 0)
own = torch.zeros(2)
dist.scatter(own, [t, t + 1] if rank == 1 else None, src=1)
seen.append(own.sum().item())
dist.reduce(own, dst=1)
got = [torch.zeros(2), torch.zeros(2)]
dist.all_to_all(got, [t, t])
uneven = torch.zeros(2 if rank == 0 else 4)
dist.all_to_all_single(uneven, torch.ones(3), [1, 1] if rank == 0 else [2, 2], [1, 2])
objects = [None, None]
dist.all_gather_object(objects, "x" * (1 + 100 * rank))
seen.append([len(one) for one in objects])
named = [{"a": rank}, None]
dist.broadcast_object_list(named, src=1)
seen.append(named[0])
works = [dist.all_reduce(torch.ones(1 + n), async_op=True) for n in range(20)]
[one.wait() for one in works]
if rank == 0:
    dist.send(t, 1)
else:
    dist.recv(own, 0)
alone = dist.new_group([1])
if rank == 1:
    dist.all_reduce(torch.ones(1), group=alone)
dist.barrier()
seen
"""


def test_unusual_calls_that_are_legal_go_through(plain: Session) -> None:
    values = plain.run(LEGAL).values
    assert values[0] == [3.0, 3.0, [1, 101], {"a": 1}]
    assert values[1] == [0, 5.0, [1, 101], {"a": 1}]


@pytest.mark.fault("C10")
def test_ranks_that_wait_in_different_groups_are_stopped(plain: Session) -> None:
    code = (
        "other = dist.new_group([0, 1])\ndist.all_reduce(torch.ones(1), group=[None, other][rank])"
    )
    stopped_with(plain, code, says="ranks 0-1 have waited")
    assert can_add(plain)


@pytest.mark.fault("C9")
def test_a_group_that_timed_out_is_created_again(plain: Session) -> None:
    code = (
        "import datetime\n"
        "dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1))\n"
        "if rank == 0: dist.all_reduce(torch.ones(1), async_op=True).wait()\n"
        "else: time.sleep(3)"
    )
    with pytest.raises(CellError):
        plain.run(code)
    assert can_add(plain)


def test_groups_are_aborted_on_all_ranks_before_new_ones_are_made(
    plain: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, int]] = []
    post = workers(plain).send_request

    def noted(ranks: range, channel: Channel, kind: str, *args: object, **kwargs: object) -> str:
        sent.append((kind, len(ranks)))
        return post(ranks, channel, kind, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(workers(plain), "send_request", noted)
    code = "if rank == 0:\n    dist.all_reduce(torch.ones(1), async_op=True)\n    raise ValueError"
    with pytest.raises(CellError, match="ValueError"):
        plain.run(code)  # one collective has begun on rank 0 alone
    assert can_add(plain)
    made_anew = [
        one
        for one in sent
        if one[0] in {messages.ABORT_COLLECTIVES, operations.REBUILD_MODELS.message_type}
    ]
    assert made_anew == [
        (messages.ABORT_COLLECTIVES, 2),
        (operations.REBUILD_MODELS.message_type, 2),
    ]


@pytest.mark.fault("C3")
def test_a_rank_that_makes_a_group_alone_is_freed(plain: Session) -> None:
    code = "if rank == 0: dist.new_group([0, 1])\nelse:\n    while True: time.sleep(0.05)"
    text, seconds = stopped(plain, code, when=runs_for(plain, 2.0))
    assert seconds < 20
    assert "all variables are kept" in text
    assert can_add(plain)


@pytest.mark.fault("C13")
def test_a_slow_rank_is_reported_and_never_stopped(plain: Session) -> None:
    lines: list[str] = []

    def listen() -> None:
        eventually(lambda: "rank 1 is in" in plain.standstill, within_s=30)
        lines.append(plain.standstill)

    code = "if rank == 1: time.sleep(7)\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
    with meanwhile(listen):
        assert plain.run(code).values == {0: 2.0, 1: 2.0}
    assert "rank 0 has waited" in lines[0]
    assert "line 1" in lines[0]
    assert plain.standstill == ""


@pytest.mark.fault("C12")
def test_a_second_stop_aborts_the_groups_and_keeps_the_model(session: Session) -> None:
    made = session.run("made").values
    stopped(session, IN_STEP, when=runs_for(session, 2.5), more=lambda: num_stops(session) == 1)
    assert session.wait(60)  # on a busy machine the prompt returns before the groups are aborted
    assert session.run("made").values == made
    assert trains_on(session)


@pytest.mark.nightly
@pytest.mark.fault("C14")
def test_a_kernel_that_was_suspended_declares_no_rank_dead(tmp_path: Path) -> None:
    with LiveKernel(tmp_path) as kernel:
        kernel.run("%load_ext nbdist")
        assert kernel.run("%%distribute -n 2\nkept = rank").status == "ok"
        pid = kernel.manager.provisioner.pid
        os.kill(pid, signal.SIGSTOP)
        threading.Event().wait(6)  # the fault itself: as long as the machine sleeps
        os.kill(pid, signal.SIGCONT)
        assert "[1] 1" in kernel.run("%%distribute\nkept").text
        assert "ended" not in kernel.run("%nbdist status").text
