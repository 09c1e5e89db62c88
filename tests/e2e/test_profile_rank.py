"""What a rank measures of a training loop, on two real CPU ranks under three engines."""

from __future__ import annotations

import gzip
import json
import secrets
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from nbdist import CellError, Session
from nbdist.profiler.measurements import RankProfile
from nbdist.protocol import messages
from nbdist.session.worker_group import WorkerGroup
from tests.conftest import eventually
from tests.nightly import nightly
from tests.session_internals import workers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from nbdist.session.cell import CellResult

PREPARE = textwrap.dedent(
    """
    import time

    class Slow(torch.utils.data.Dataset):
        pause_s = 0.0
        def __len__(self): return 4000
        def __getitem__(self, place):
            time.sleep(self.pause_s)
            return torch.ones(256), torch.ones(1)

    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(4)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Slow(), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def train(steps, between=lambda step: None):
        batches = iter(loader)
        for step in range(steps):
            x, y = next(batches)
            loss = ((model(x) - y) ** 2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            between(step)
        return loss.item()

    train(4)
    """
)
PATCHED = textwrap.dedent(
    """
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from torch._C._distributed_c10d import Work
    from nbdist.worker import collective_check as collectives
    from nbdist.worker.engines import deepspeed as zero
    import accelerate.data_loader, threading
    from torch.utils.data import dataloader

    def patched():
        found = [torch.autograd.backward, torch.nn.utils.clip_grad_norm_, Work.wait]
        found += [torch.autograd.profiler.profile._prepare_trace]
        found += [accelerate.data_loader.send_to_device, collectives._describe_call]
        found += [torch._dynamo.eval_frame.OptimizedModule.__call__]
        found += [collectives.CollectiveBarrier.__call__, dataloader._BaseDataLoaderIter.__next__]
        wrapper = zero.SteppingOptimizerWrapper
        for owner in (Accelerator, AcceleratedOptimizer, wrapper, type(accelerator)):
            found += [vars(owner).get(name) for name in ("backward", "step", "zero_grad")]
        hooks = [len(model._forward_hooks), len(model._forward_pre_hooks)]
        threads = sorted(one.name for one in threading.enumerate() if "profile" in one.name)
        return [*map(id, found), *hooks, *threads, torch.autograd.profiler._is_profiler_enabled]
    """
)


class Profiler:
    """Asks the ranks of a session as its kernel does, and keeps what they publish."""

    def __init__(self, session: Session, heard: dict[str, dict[int, Any]]) -> None:
        self.session, self._heard = session, heard

    def ask(
        self, *, steps: int | None = 5, cell: str = "", **changes: Any
    ) -> tuple[str, dict[int, Any]]:
        """Arm all ranks; returns the profile's id and their replies."""
        usual = {"limit_s": 30.0, "trace": "", "memory": False, **changes}
        name = secrets.token_hex(4)
        asked = {"id": name, "ranks": [0, 1], "steps": steps, "running": bool(cell), "cell": cell}
        replies = workers(self.session).request_all(
            [0, 1], messages.PROFILE, {**asked, **usual}, channel="control"
        )
        return name, replies

    def replies_of(self, name: str) -> Mapping[int, Any]:
        eventually(lambda: len(self._heard.get(name, {})) == 2, within_s=20)
        return self._heard[name]

    def run(self, code: str, **asked: Any) -> list[RankProfile]:
        """Profile a cell; figures by rank."""
        name, replies = self.ask(**asked)
        assert {one["status"] for one in replies.values()} == {"ok"}, replies
        self.session.run(code)
        replies = self.replies_of(name)
        assert "error" not in replies[0], replies[0]
        return [RankProfile.from_json(replies[rank]["figures"]) for rank in (0, 1)]

    def fail(self, code: str, **asked: Any) -> str:
        """Profile a cell that gives no figures; the sentence."""
        name, _ = self.ask(**asked)
        self.session.run(code)
        replies = self.replies_of(name)
        return str(replies[0]["error"])


@pytest.fixture(
    scope="module",
    params=["ddp", nightly("fsdp2"), nightly("zero2")],
)
def profiler(request: pytest.FixtureRequest) -> Iterator[Profiler]:
    """Two ranks with a model, under three engines."""
    heard: dict[str, dict[int, Any]] = {}
    usual = WorkerGroup.on_message

    def receive(workers: WorkerGroup, ranks: Any, channel: Any, message: Any) -> None:
        if message["header"]["msg_type"] == messages.PROFILE_RESULT:
            heard.setdefault(message["content"]["id"], {})[ranks[0]] = message["content"]
        usual(workers, ranks, channel, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerGroup, "on_message", receive)
        with Session(nproc=2, backend=request.param) as session:
            session.run(PREPARE)
            session.run(PATCHED)
            yield Profiler(session, heard)


def values(result: CellResult) -> list[Any]:
    """Last value of a cell, by rank."""
    return [result.values[rank] for rank in (0, 1)]


def test_the_parts_sum_up_to_the_step_and_nothing_is_left_behind(profiler: Profiler) -> None:
    before = values(profiler.session.run("patched()"))
    for one in profiler.run("train(12)", steps=6):
        assert one.ended == "steps"
        assert len(one.steps) == 6
        assert sum(one.parts.values()) == pytest.approx(one.step_s, rel=0.03)
        assert all(seconds >= 0 for seconds in one.parts.values())
        computing = ("forward", "backward", "optimizer")
        assert all(one.parts[part] > 0 for part in computing)
        assert one.notes == []
    assert values(profiler.session.run("patched()")) == before


def test_what_was_recorded_is_freed(profiler: Profiler) -> None:
    resident = "import psutil; psutil.Process().memory_info().rss"
    held = []
    for _ in range(4):  # each window records tens of MB
        profiler.run("train(24)", steps=20)
        held.append(values(profiler.session.run(resident)))
    for first, *_, last in zip(*held[1:], strict=True):
        assert last - first < 16 << 20, held


def test_ranks_record_the_same_steps_and_see_the_same_collectives(profiler: Profiler) -> None:
    one, other = profiler.run("train(14)", steps=None)
    assert len(one.ends) == len(other.ends)
    assert abs(one.ends[0] - other.ends[0]) < 0.5 * one.step_s + 0.1
    assert {group: len(begins) for group, begins in one.begins.items()} == {
        group: len(begins) for group, begins in other.begins.items()
    }
    gradients = 4 * one.model.params if one.model else 0
    sent = {kind.name: kind for kind in one.traffic}
    assert sum(kind.bytes for kind in one.traffic) == pytest.approx(
        {"ddp": 1, "fsdp2": 3, "zero2": 2}[one.model.backend if one.model else ""] * gradients,
        rel=0.3,
    )
    assert all(kind.exposed_s <= kind.seconds + 1e-6 for kind in sent.values())


def test_the_model_and_the_loader_are_described(profiler: Profiler) -> None:
    one, _ = profiler.run("train(9)")
    assert one.model is not None
    assert one.model.params == 4 * (256 * 256 + 256) + 257
    assert one.model.units == (5 if one.model.backend == "fsdp2" else 0)
    assert (one.model.samples, one.model.optimizer) == (16, "AdamW")
    (loader,) = one.loaders
    assert (loader.num_workers, loader.batch_size, loader.batches) == (0, 16, 1)
    assert loader.sharded


def test_micro_batches_are_counted_as_the_loop_makes_them(profiler: Profiler) -> None:
    by_hand = """
    for micro in range(4 * 9):
        loss = ((model(torch.ones(16, 256)) - 1) ** 2).mean() / 4
        accelerator.backward(loss)
        if micro % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    """
    for one in profiler.run(textwrap.dedent(by_hand)):
        assert one.model is not None
        assert (one.model.samples, one.model.accumulate) == (16, 4)
    twice = """
    for _ in range(9):
        x = torch.ones(16, 256)
        accelerator.backward((model(x) - model(2 * x)).mean())
        optimizer.step()
        optimizer.zero_grad()
    """
    for one in profiler.run(textwrap.dedent(twice)):
        assert one.model is not None
        assert (one.model.samples, one.model.accumulate) == (16, 1)


def test_a_loop_that_updates_and_nothing_else_has_no_samples(profiler: Profiler) -> None:
    if profiler.session.options.backend == "zero2":
        pytest.skip("DeepSpeed's engine cannot step without gradients")
    for one in profiler.run("for _ in range(9): optimizer.step()"):
        assert one.model is not None
        assert one.model.samples == 0


def test_a_model_in_eval_mode_trains_too(profiler: Profiler) -> None:
    one, _ = profiler.run("_ = model.eval(); train(9); _ = model.train()")
    assert one.model is not None
    assert one.model.samples == 16
    assert sum(kind.bytes for kind in one.traffic) >= 0.7 * 4 * one.model.params


def test_a_forward_past_the_engine_is_forward(profiler: Profiler) -> None:
    code = """
    bare = getattr(model, "module", model)
    for _ in range(9):
        loss = bare(torch.ones(512, 256)).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    del bare
    """
    for one in profiler.run(textwrap.dedent(code)):
        assert one.parts["forward"] > one.parts["python"]
        assert one.model is not None
        assert one.model.samples == 512


def test_the_phases_agree_with_what_torch_profiler_saw(profiler: Profiler, tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        from torch.profiler import record_function
        batches = iter(loader)
        for _ in range(9):
            x, y = next(batches)
            with record_function("ours:forward"):
                loss = ((model(x) - y) ** 2).mean()
            with record_function("ours:backward"):
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        """
    )
    for one in profiler.run(code, steps=5, trace=str(tmp_path)):
        with gzip.open(one.trace) as file:
            events = [
                event
                for event in json.load(file)["traceEvents"]
                if str(event.get("name")).startswith("ours:") and event.get("ph") == "X"
            ]
        last = sorted(events, key=lambda event: float(event["ts"]))[-2 * len(one.steps) :]
        theirs = sum(float(event["dur"]) for event in last) * 1e-6 / len(one.steps)
        ours = one.parts["forward"] + one.parts["backward"]
        # exposed communication lies in a pass or in the optimizer's step; between a forward and
        # its backward the cell's own code runs
        assert ours <= 1.03 * theirs
        beside = sum(one.parts[part] for part in ("communication", "python", "idle"))
        assert ours + beside >= 0.97 * theirs


def test_a_slow_loader_is_data_and_says_how_long_a_batch_takes(profiler: Profiler) -> None:
    profiler.session.run("Slow.pause_s = 0.004")
    one, other = profiler.run("train(9)")
    profiler.session.run("Slow.pause_s = 0.0")
    for figures in (one, other):
        assert figures.parts["data"] > 0.06
        assert 0 < figures.loaders[0].fetch_cpu_s <= figures.loaders[0].fetch_s
        assert figures.loaders[0].fetch_s == pytest.approx(figures.parts["data"], rel=0.2)


def test_a_pause_in_the_cell_is_idle_on_its_line(profiler: Profiler) -> None:
    code = "def pause(step):\n    time.sleep(0.1)\ntrain(9, pause)"
    for one in profiler.run(code):
        assert one.parts["idle"] == pytest.approx(0.1, rel=0.3)
        assert one.parts["python"] < 0.05
        assert one.lines[0].source == "time.sleep(0.1)"
        assert one.lines[0].seconds == pytest.approx(0.1, rel=0.3)


def test_computing_in_the_cell_is_python_on_its_line(profiler: Profiler) -> None:
    code = """
    def reckon(step):
        until = time.thread_time() + 0.1
        while time.thread_time() < until: pass
    train(9, reckon)
    """
    for one in profiler.run(textwrap.dedent(code)):
        assert one.parts["python"] > 0.08
        assert one.lines[0].source == "while time.thread_time() < until: pass"


def test_lines_are_of_whole_steps(profiler: Profiler) -> None:
    code = """
    def stop(step):
        time.sleep(0.1)
        if step == 6:
            time.sleep(2)
            raise ValueError('mine')
    train(20, stop)
    """
    name, _ = profiler.ask(steps=10)
    with pytest.raises(CellError, match="mine"):
        profiler.session.run(textwrap.dedent(code))
    one = RankProfile.from_json(profiler.replies_of(name)[0]["figures"])
    assert sum(line.seconds for line in one.lines) < 1.1 * one.step_s
    assert one.loaders[0].batches == 1


def test_a_rank_that_comes_late_is_waited_for_in_communication(profiler: Profiler) -> None:
    code = "def late(step):\n    rank == 1 and time.sleep(0.1)\ntrain(9, late)"
    one, other = profiler.run(code)
    assert one.parts["communication"] > 0.08
    assert other.parts["communication"] < 0.5 * one.parts["communication"]
    late = [
        theirs[0] - ours[0]
        for group, begins in one.begins.items()
        for ours, theirs in zip(begins, other.begins[group], strict=True)
    ]
    assert max(late) > 0.08


def test_the_peak_is_shown_by_category_and_by_line(profiler: Profiler) -> None:
    one, _ = profiler.run("train(12)", memory=True)
    assert one.memory is not None
    assert set(one.memory.parts) <= {
        "parameters", "gradients", "optimizer", "activations", "buffers", "other",
    }  # fmt: skip
    own = one.model.params * 4 if one.model else 0
    assert one.memory.parts["parameters"] == pytest.approx(own, rel=0.01) or (
        one.memory.parts["parameters"] == pytest.approx(own / 2, rel=0.01)
    )
    assert one.memory.parts["activations"] > 0
    assert "accelerator.backward(loss)" in {line.source for line in one.memory.lines}


def test_memory_without_a_further_step_is_said_in_a_note(profiler: Profiler) -> None:
    one, _ = profiler.run("train(7)", memory=True, steps=5)
    assert one.memory is None
    assert one.notes == ["No complete step followed the window, so the memory was not measured."]


def test_traces_are_written_for_each_rank(profiler: Profiler, tmp_path: Path) -> None:
    for one in profiler.run("train(8)", trace=str(tmp_path)):
        with gzip.open(one.trace) as file:
            trace = json.load(file)
        assert trace["distributedInfo"]["rank"] == one.rank
        assert trace["distributedInfo"]["world_size"] == 2
        assert any(event.get("name") == "aten::addmm" for event in trace["traceEvents"])
    assert len(list(tmp_path.glob("rank*.json.gz"))) == 2


def test_a_cell_that_ends_early_gives_what_there_is(profiler: Profiler) -> None:
    one, _ = profiler.run("train(5)", steps=50)
    assert one.ended == "cell"
    assert len(one.steps) == 3


def test_an_exception_in_the_window_harms_nothing(profiler: Profiler) -> None:
    before = values(profiler.session.run("patched()"))
    code = "def fail(step):\n    if step == 4: raise ValueError('mine')\ntrain(20, fail)"
    name, _ = profiler.ask(steps=10)
    with pytest.raises(CellError, match="mine"):
        profiler.session.run(code)
    assert len(RankProfile.from_json(profiler.replies_of(name)[0]["figures"]).steps) == 3
    assert values(profiler.session.run("patched()")) == before
    assert profiler.run("train(9)")[0].ended == "steps"


def test_two_profiles_at_once_are_refused_and_a_running_loop_can_be_profiled(
    profiler: Profiler,
) -> None:
    loop = "for _ in range(2000):\n    train(1)"
    result = profiler.session.run(loop, background=True)
    cell = result._cell.request_id
    name, replies = profiler.ask(cell=cell)
    assert {one["status"] for one in replies.values()} == {"ok"}
    _, second = profiler.ask(cell=cell)
    assert "already running" in second[0]["error"]
    ends = [profiler.replies_of(name)[rank]["figures"]["ends"] for rank in (0, 1)]
    assert [len(one) for one in ends] == [6, 6]
    profiler.session.interrupt()
    with pytest.raises(CellError, match="KeyboardInterrupt"):
        profiler.session.wait()
    _, late = profiler.ask(cell=cell)
    assert "already finished" in late[0]["error"]


OWN = """
from torch.profiler import profile, schedule
def rows(other):
    return sum("addmm" in one.key for one in other.key_averages())
"""


def test_a_profiler_of_the_cell_wins(profiler: Profiler) -> None:
    profiler.session.run(OWN)
    own = "with profile() as other:\n    train(12)\nother_rows = rows(other)"
    assert "its own torch profiler" in profiler.fail(own)
    assert values(profiler.session.run("other_rows"))[0] > 0


@pytest.mark.nightly
def test_a_profiler_that_starts_within_the_window_ends_it(profiler: Profiler) -> None:
    profiler.session.run(OWN)
    before = values(profiler.session.run("patched()"))
    code = """
    def between(step):
        global other
        if step == 5:
            other = profile()
            other.start()
        if step == 8:
            other.stop()
    train(20, between)
    """
    for one in profiler.run(textwrap.dedent(code), steps=10):
        assert 1 <= len(one.steps) <= 4
        assert sum(one.parts.values()) == pytest.approx(one.step_s, rel=0.03)
        assert one.notes == [
            "Recording ended early because the cell started its own torch profiler."
        ]
    assert values(profiler.session.run("rows(other)"))[0] > 0
    assert values(profiler.session.run("patched()")) == before


SCHEDULED = """
with profile(schedule=schedule(wait={wait}, warmup={warmup}, active=3, repeat=1)) as other:
    train(20, lambda step: other.step())
other_rows = rows(other)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("wait", [5, 12])  # in the window, and after it
def test_a_profiler_with_a_schedule_gets_its_steps(profiler: Profiler, wait: int) -> None:
    profiler.session.run(OWN)
    for one in profiler.run(SCHEDULED.format(wait=wait, warmup=2), steps=6):
        assert len(one.steps) == (6 if wait == 12 else 3)
    assert values(profiler.session.run("other_rows"))[0] > 0


@pytest.mark.nightly
def test_a_profiler_that_is_prepared_by_a_schedule_wins(profiler: Profiler) -> None:
    profiler.session.run(OWN)
    text = profiler.fail(SCHEDULED.format(wait=0, warmup=12), steps=6)
    assert "its own torch profiler" in text
    assert values(profiler.session.run("other_rows"))[0] > 0
    profiler.run("train(9)")  # one that is over is none
