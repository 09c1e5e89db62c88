"""Process groups of a session: a release aborts them, cells cannot end them, freeing one is safe.

A release is the same on CPU ranks and on GPUs, so these sessions rehearse what NCCL's abort needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import nbdist
from nbdist import CellError
from nbdist.errors import SwitchError
from nbdist.protocol import messages
from nbdist.session import collective_request
from tests import engines
from tests.nightly import nightly
from tests.session_internals import workers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist import Session

PREPARE = """
def prepare():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

def loss_of(step):
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    loss = model(batch).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return accelerator.reduce(loss.detach(), "mean").item()
"""
ANEW = "model = optimizer = None\nmodel, optimizer = prepare()"


def losses(session: Session, first: int, count: int) -> list[float]:
    """Of some training steps; the same on all ranks."""
    cell = f"[loss_of(step) for step in range({first}, {first + count})]"
    return next(iter(session.run(cell, output="none").values.values()))


def release(session: Session, name: str) -> dict[int, Any]:
    """Abort the process groups of all ranks, as Stop does where ranks are stuck."""
    request = messages.AbortCollectivesRequest(
        pids=[one.pid for one in workers(session).rank_processes], id=name
    )
    return workers(session).request_all(
        range(2), messages.ABORT_COLLECTIVES, request, channel="control"
    )


def renew(session: Session) -> str:
    """Make the groups and engines again, as the end of such a cell does."""
    return collective_request.rebuild_models(workers(session), groups=True)


@pytest.fixture(scope="module", params=engines.each("zero3"))
def trained(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Two CPU ranks under one engine, with something to train."""
    with nbdist.Session(nproc=2, backend=request.param) as running:
        running.run(PREPARE)
        yield running


@pytest.fixture(scope="module")
def undisturbed(trained: Session) -> list[float]:
    """Losses of nine steps."""
    trained.run(ANEW)
    return losses(trained, 0, 9)


# -- a release


@pytest.mark.fault("C11")
def test_training_goes_on_after_two_releases(trained: Session, undisturbed: list[float]) -> None:
    trained.run(ANEW)
    found = losses(trained, 0, 3)
    for name in ("first", "second"):
        replies = release(trained, name)
        assert sorted(replies) == [0, 1]
        assert not any("error" in reply for reply in replies.values())
    assert renew(trained) == ""
    found += losses(trained, 3, 3)
    release(trained, "third")
    assert renew(trained) == ""
    assert found + losses(trained, 6, 3) == undisturbed


def test_a_release_leaves_the_groups_known_by_name(trained: Session) -> None:
    names = "sorted(torch.distributed.distributed_c10d._world.pg_names.values())"
    trained.run(ANEW)
    before = trained.run(names).values
    release(trained, "names")
    try:
        assert trained.run(names).values == before
        assert trained.run("torch.distributed.get_rank()").values == {0: 0, 1: 1}
    finally:
        assert renew(trained) == ""


def test_a_model_whose_step_was_aborted_is_not_trained_on(trained: Session) -> None:
    """A GPU runs a step after `step()` has returned."""
    trained.run(ANEW)
    losses(trained, 0, 1)
    trained.run("""
        from unittest.mock import Mock
        from nbdist.worker import process_group as group
        set_device, torch.cuda.set_device = torch.cuda.set_device, Mock()
        group._step_end = Mock(query=lambda: rank == 0)
    """)
    release(trained, "cut")
    trained.run("group._step_end, torch.cuda.set_device = None, set_device")
    for _ in range(2):
        assert "while a GPU ran an optimizer step" in renew(trained)
    trained.run(ANEW)
    assert renew(trained) == ""
    losses(trained, 1, 1)


def test_a_save_that_runs_during_a_release_ends(
    trained: Session, undisturbed: list[float], tmp_path: Path
) -> None:
    trained.run(ANEW)
    losses(trained, 0, 3)
    trained.run("""
        import threading
        from torch.distributed import distributed_c10d
        from nbdist.worker.operations import save as saving
        go_on = threading.Event()
        saving.before_save_stage.append(lambda step: step == "write" and go_on.wait(60))
    """)
    try:
        running = trained.save("kept", folder=tmp_path, wait=False)
        release(trained, "save")
        trained.run("""
            world = torch.distributed.group.WORLD
            distributed_c10d._update_default_pg(None)  # as for a moment in a renewal
            try:
                go_on.set()
                assert save.__self__.wait(60)
            finally:
                distributed_c10d._update_default_pg(world)
        """)
        assert running.wait(60).step == 3
    finally:
        trained.run("go_on.set(); saving.before_save_stage.clear()")
        assert renew(trained) == ""
    trained.load("kept", folder=tmp_path)
    assert losses(trained, 3, 6) == undisturbed[3:]


# -- what a script does at its end


@pytest.mark.fault("C15")
@pytest.mark.parametrize(
    "ending",
    [
        "accelerator.end_training()",
        "torch.distributed.destroy_process_group()",
        nightly("torch.distributed.destroy_process_group(torch.distributed.group.WORLD)"),
        nightly(
            "from accelerate.state import AcceleratorState; AcceleratorState._reset_state(True)"
        ),
    ],
)
def test_training_goes_on_after(trained: Session, undisturbed: list[float], ending: str) -> None:
    trained.run(ANEW)
    found = losses(trained, 0, 3)
    trained.run(ending)
    assert found + losses(trained, 3, 6) == undisturbed


@pytest.mark.fault("C15")
def test_another_training_follows_free_memory(trained: Session, undisturbed: list[float]) -> None:
    trained.run(ANEW)
    trained.run("model, optimizer = accelerator.free_memory(model, optimizer)")
    trained.run("assert accelerator.gather(torch.tensor([rank])).tolist() == [0, 1]")
    trained.run(ANEW)
    assert losses(trained, 0, 9) == undisturbed


@pytest.mark.fault("C15")
def test_a_whole_script_runs_again_and_again(trained: Session, undisturbed: list[float]) -> None:
    script = """
        import torch.distributed as dist
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("gloo")
        AcceleratorState._reset_state()
        mine = Accelerator()
        of_session, accelerator = accelerator, mine
        model, optimizer = prepare()
        found = [loss_of(step) for step in range(3)]
        mine.end_training()
        accelerator = of_session
    """
    for _ in range(2):
        trained.run(script)
        assert trained.run("found", output="none").values[0] == undisturbed[:3]
    trained.run(ANEW)
    assert losses(trained, 0, 3) == undisturbed[:3]


# -- groups of cells, under one engine

COUNTED = """
from pathlib import Path
import time

def workers():
    "Threads of gloo's process groups."
    tasks = Path("/proc/self/task").glob("*/comm")
    return sum(one.read_text().startswith("pt_gloo_runloop") for one in tasks)
"""


def test_a_group_of_a_cell_is_freed_with_its_threads(session: Session) -> None:
    session.run(COUNTED)
    before = session.run("workers()").values
    session.run("mine = torch.distributed.new_group()\nother = torch.distributed.new_group()")
    assert session.run("workers()").values[0] > before[0]
    session.run("torch.distributed.destroy_process_group(mine)\ndel mine")
    session.run("torch.distributed.destroy_process_group()\ndel other")
    assert session.run("workers()").values == before


def test_another_default_group_is_refused(session: Session) -> None:
    session.run("torch.distributed.init_process_group(world_size=2, rank=rank)")
    with pytest.raises(CellError, match=r"rank 0 of 2\), but .* got world_size=4\. Remove"):
        session.run("torch.distributed.init_process_group(world_size=4, rank=rank)", ranks=[0])
    with pytest.raises(CellError, match="got backend='nccl'"):
        session.run("torch.distributed.init_process_group('nccl')")


def test_nccl_watchdog_ends_no_rank_whose_groups_were_aborted(session: Session) -> None:
    names = "ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT"
    found = session.run(f"import os; [os.environ['TORCH_NCCL_' + name] for name in {names}]").values
    assert found == {0: ["2", "0", "0"], 1: ["2", "0", "0"]}


def test_fsdp1_scales_gradients_in_the_group_of_the_time_of_a_step(session: Session) -> None:
    session.run(
        "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Scaler"
    )
    assert session.run("Scaler(device='cpu').process_group is None").values == {0: True, 1: True}


def test_the_old_groups_are_aborted_before_a_new_one_is_used(session: Session) -> None:
    """NCCL would run the proof behind a collective that another rank has never begun."""
    session.run("""
        from nbdist.worker import process_group as group
        from nbdist.worker import process_group as release
        order, abort, prove = [], release.abort_groups, group.verify_group
        release.abort_groups = lambda: (order.append("abort"), abort())
        group.verify_group = lambda **how: (order.append("prove"), prove(**how))
    """)
    try:
        assert renew(session) == ""
        assert session.run("order").values == {rank: ["abort", "abort", "prove"] for rank in (0, 1)}
    finally:
        session.run("release.abort_groups, group.verify_group = abort, prove")


@pytest.mark.fault("C16")
@pytest.mark.parametrize("last", ["ddp.reducer", "ddp.logger"])
def test_a_group_is_freed_without_the_gil(session: Session, last: str) -> None:
    """As of a cell that ends: the last reference to DDP goes while gloo's thread needs the GIL.

    On rank 0 that thread runs a callback, which waits in Python for another thread.
    """
    session.run(f"""
        import threading
        import torch.distributed as dist
        group = dist.new_group()
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
        found = [torch.empty(1) for _ in range(2)]
        called, go_on = threading.Event(), threading.Event()
        if rank == 0:
            work = dist.all_gather(found, torch.ones(1), group=group, async_op=True)
            work.get_future().then(lambda _: (called.set(), go_on.wait(60)))
            del work
        dist.barrier()  # rank 1 gathers once the callback waits for it
        if rank == 1:
            dist.all_gather(found, torch.ones(1), group=group)
        else:
            assert called.wait(60)
            threading.Timer(0.2, go_on.set).start()
        dist.destroy_process_group(group)
        last = {last}
        del group, ddp
        del last
        assert rank == 1 or go_on.is_set()
    """)


PROFILED = """
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs
from torch.utils.data import DataLoader, TensorDataset

def training_function():
    "The calls of Accelerate's example by_feature/profiler.py, on random data."
    options = ProfileKwargs(record_shapes=True, profile_memory=True)
    accelerator = Accelerator(kwargs_handlers=[options])
    data = TensorDataset(torch.randn(128, 32), torch.randint(0, 2, (128,)))
    model = torch.nn.Linear(32, 2).to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, train, evaluate = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data)
    )
    for epoch in range(2):
        with accelerator.profile() as profile:
            for batch, target in train:
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.cross_entropy(model(batch), target)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
        accelerator.print(profile.key_averages().table(row_limit=5))
        for batch, target in evaluate:
            with torch.no_grad():
                accelerator.gather_for_metrics((model(batch).argmax(dim=-1), target))
    accelerator.end_training()

training_function()
"""


@pytest.mark.fault("C16")
@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_an_example_of_accelerate_ends_two_hundred_times() -> None:
    with nbdist.Session(nproc=2) as session:
        for _ in range(200):
            session.run(PROFILED, background=True, output="none")
            assert session.wait(60), "the ranks hang"
            session.run("assert accelerator.gather(torch.tensor([rank])).tolist() == [0, 1]")
            session.restart()


# -- a rank that fails in an exchange of state


@pytest.mark.fault("E19")
def test_a_rank_that_lacks_memory_in_a_switch_takes_all_back(session: Session) -> None:
    """As on GPUs, where no check of collectives stands between the ranks and NCCL."""
    session.run(PREPARE + ANEW)
    session.switch("fsdp2")
    found = losses(session, 0, 3)
    session.run("""
        from nbdist.worker.collective_check import CollectiveBarrier
        from nbdist.state import reshard as moving
        meet, CollectiveBarrier.__call__ = CollectiveBarrier.__call__, lambda *_, **__: None
        packed = moving._ReshardPlan._pack

        def lacking(*_):
            moving._ReshardPlan._pack = packed
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")

        if rank == 1:
            moving._ReshardPlan._pack = lacking
    """)
    try:
        with pytest.raises(SwitchError, match=r"while loading, on rank 1: .*out of memory"):
            session.switch("ddp")
    finally:
        session.run("CollectiveBarrier.__call__ = meet")
    found += losses(session, 3, 3)
    session.run(ANEW)
    assert found == losses(session, 0, 6)
