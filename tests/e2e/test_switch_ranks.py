"""A model in training goes to another number of ranks, with all the user's variables."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest

from nbdist import Session, SwitchError
from nbdist.errors import RankDied, StartError
from nbdist.state import shard_io
from tests.e2e.training import MODEL, WRAPPED, max_difference, value_of
from tests.session_internals import workers

pytestmark = pytest.mark.timeout(900)
DEFINITIONS = MODEL

WALK = [("fsdp2", 1), ("zero3", 2), ("ddp", 4), ("zero2", 2), ("fsdp1", 4), ("zero1", 1)]
BUILD = textwrap.dedent(
    """
    from accelerate import Accelerator, DataLoaderConfiguration

    # The global batch stays: 4 samples, cut among the ranks. 6 batches are an epoch.
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))

    def begin():
        torch.manual_seed(0)
        bare = gpt2()
        optimizer = torch.optim.AdamW(groups(bare), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n / 40))
        loader = torch.utils.data.DataLoader(tokens[:24], batch_size=4, shuffle=True)
        return accelerator.prepare(bare, optimizer, schedule, loader)

    model, optimizer, schedule, loader = begin()
    batches = iter(loader)
    train(4)
    """
)


def folders() -> set[Path]:
    return {
        path
        for root in ("/dev/shm", "/tmp")  # noqa: S108 - where they are
        for path in Path(root).glob(f"nbdist-{os.getpid()}-*")
    }


def build(session: Session) -> None:
    """Train four steps on two ranks under DDP."""
    session.switch("ddp", nproc=2)
    session.run("book = hidden = head = weight = None")
    session.run(BUILD)


@pytest.mark.nightly
def test_numbers_of_ranks_and_engines_change_in_one_training(trained: Session) -> None:
    build(trained)
    expected = value_of(trained, "train(2 * 6)")
    rates = value_of(trained, "schedule.get_last_lr()")
    build(trained)
    before = folders()
    found: list[float] = []
    for backend, nproc in WALK:
        report = trained.switch(backend, nproc=nproc)
        assert report.verified > 80
        assert trained.world_size == nproc
        assert "batches" in report.not_carried
        result = trained.run("batches = iter(loader); (type(model).__name__, train(2))")
        assert len(result.values) == nproc
        assert {wrapped for wrapped, _ in result.values.values()} == {WRAPPED[backend]}
        found += result.values[0][1]
        assert folders() == before
    assert max_difference(found, expected) <= 1e-6
    assert value_of(trained, "schedule.get_last_lr()") == pytest.approx(rates, rel=1e-12)
    assert value_of(trained, "schedule.scheduler.last_epoch") == 16


@pytest.mark.nightly
def test_a_batch_of_each_rank_keeps_its_size(trained: Session) -> None:
    trained.switch("ddp", nproc=2)
    trained.run(
        "from accelerate import Accelerator\naccelerator = Accelerator()\n"
        "optimizer = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=1.0)\n"
        "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: n)\n"
        "schedule = accelerator.prepare(schedule)\n"
        "data = torch.utils.data.DataLoader(range(48), batch_size=2)\n"
        "loader = accelerator.prepare(data)\n"
        "batches = iter(loader); seen = next(batches), next(batches)\n"
        "model = None"
    )
    report = trained.switch(nproc=4)
    assert any("4 -> 8 samples" in words for words in report.will_differ)
    result = trained.run("batches = iter(loader); next(batches).tolist()")
    # 8 samples were used, and the epoch goes on behind them; the ranks take turns
    assert result.values == {0: [8, 9], 1: [10, 11], 2: [12, 13], 3: [14, 15]}
    trained.switch(nproc=2)
    # 16 are used; an iterator that is gone would have begun anew
    assert value_of(trained, "batches = iter(loader); next(batches).tolist()") == [16, 17]
    trained.run("del batches")
    trained.switch(nproc=1)
    assert value_of(trained, "next(iter(loader)).tolist()") == [0, 1]


def test_variables_arrive(trained: Session, tmp_path: Path) -> None:
    build(trained)
    trained.run(
        textwrap.dedent(
            f"""
            import collections, sys
            import numpy as np
            from dataclasses import dataclass

            @dataclass
            class Thing:
                size: int
                def ranks(self): return self.size, world_size

            class Odd(Exception):
                def __init__(self, one, two): super().__init__(one)

            def later(): return what_comes_later
            def counter():
                count = 0
                def more():
                    nonlocal count
                    count += 1
                    return count
                return more

            more = counter(); more()
            thing, mine = Thing(3), rank * 10
            book = {{"model": model, "steps": [optimizer, schedule], "all": (loader, accelerator)}}
            head, weight, tell = bare_head(model), next(model.parameters()), report
            base = torch.arange(6.0); view = base[2:]
            array = np.arange(5); again = array
            opened = open({str(tmp_path / "log.txt")!r}, "w")
            def writes(): opened.write("x")
            twice = [opened]
            numbers = (n for n in range(3))
            if rank == 1: only_here = 5
            lock, odd = __import__("threading").Lock(), Odd(1, 2)
            report(loss=1.0); report(loss=2.0)
            """
        ).replace("bare_head(model)", "accelerator.unwrap_model(model).lm_head")
    )
    report = trained.switch("zero3", nproc=1)
    assert any(words.startswith("rank 1 ends; its random") for words in report.will_differ)
    assert "an open file belongs to its process" in report.not_carried["opened"]
    assert "an open file belongs to its process" in report.not_carried["twice"]
    assert "cannot pickle" in report.not_carried["lock"]
    assert "TypeError" in report.not_carried["odd"]
    assert "iterator" in report.not_carried["numbers"]
    assert report.not_carried["only_here"] == "only rank 1 had it"
    assert "writes" not in report.not_carried
    assert value_of(trained, "thing.ranks(), type(thing) is Thing, more(), mine") == (
        (3, 1),
        True,
        2,
        0,
    )
    assert value_of(trained, "what_comes_later = 7; later()") == 7
    assert value_of(trained, "book['model'] is model and book['steps'] == [optimizer, schedule]")
    assert value_of(trained, "book['all'][0] is loader and book['all'][1] is accelerator")
    assert value_of(trained, "head is accelerator.unwrap_model(model).lm_head and tell is report")
    assert value_of(
        trained, "isinstance(weight, torch.nn.Parameter) and collections.OrderedDict() == {}"
    )
    assert value_of(trained, "base[2] = 9; view[0].item(), array is again, array.sum().item()") == (
        9.0,
        True,
        10,
    )
    trained.run("array[0] = 1; report(loss=3.0)")
    assert trained.metrics.steps("loss") == [0, 1, 2]
    assert trained.metrics["loss"] == [1.0, 2.0, 3.0]
    report = trained.switch("fsdp2", nproc=2)
    assert trained.run("mine, rank, world_size, thing.ranks()").values == {
        0: (0, 0, 2, (3, 2)),
        1: (0, 1, 2, (3, 2)),
    }
    assert any("rank 1 is new" in words for words in report.will_differ)


BOMB = textwrap.dedent(
    """
    class Bomb:
        phase = ""
        def __reduce__(self): return armed, (self.phase,)
        def __deepcopy__(self, memo): return self

    def armed(phase):
        bomb = Bomb()
        bomb.phase = phase
        if world_size == 4:
            import nbdist.worker.operations.collective_phases as inside
            inside.before_phase.append(bursting(phase))
        return bomb

    def bursting(wanted):
        def burst(phase):
            if phase == wanted and rank == 1:
                raise RuntimeError("on purpose")
            if wanted == "death" and phase == "loading" and rank == 1:
                import os, signal
                os.kill(os.getpid(), signal.SIGKILL)
        return burst

    bomb = Bomb()
    """
)


@pytest.mark.nightly
def test_a_model_that_only_a_trainer_holds_is_not_lost(trained: Session, tmp_path: Path) -> None:
    trained.switch("ddp", nproc=2)
    trained.run(f"""
        from tests.trainers import make
        coach = make({str(tmp_path)!r}, gpt2(), max_steps=1, disable_tqdm=True)
        coach.train()
    """)
    with pytest.raises(SwitchError, match=r"Trainer coach.* Run `model = coach\.model` in a cell"):
        trained.switch("ddp", nproc=1)
    trained.run("model = coach.model; mean = sum(p.mean() for p in model.parameters()).item()")
    trained.switch("ddp", nproc=1)
    assert value_of(trained, "sum(p.mean() for p in model.parameters()).item() == mean")
    trained.run("del model")


@pytest.mark.nightly
@pytest.mark.parametrize("phases", [("loading",), ("checking", "building", "verifying", "binding")])
def test_what_fails_in_new_ranks_brings_the_old_number_back(
    trained: Session, phases: tuple[str, ...]
) -> None:
    build(trained)
    expected = value_of(trained, f"train({len(phases) + 1})")
    trained.run(BOMB)
    trained.run(
        BUILD.replace("bare = gpt2()", "bare = gpt2(); bare.extra = bomb")
        + "\nopened = open('/dev/null')\nhidden = [model]"
    )
    before = folders()
    found = []
    for phase in phases:
        trained.run(f"bomb.phase = {phase!r}; mine = rank + 5")
        if phase == "checking":
            trained.run(
                "import nbdist.worker.operations.collective_phases as inside\n"
                "inside.before_phase.append(bursting(bomb.phase))"
            )
        message = f"failed while {phase}, on rank 1: RuntimeError: on purpose"
        with pytest.raises(SwitchError, match=message) as caught:
            trained.switch("fsdp2", nproc=4)
        trained.run(
            "import nbdist.worker.operations.collective_phases as phase; phase.before_phase.clear()"
        )
        if phase != "checking":
            assert "Rolled back to 2 CPU ranks" in str(caught.value)
            trained.run("batches = iter(loader)")
        assert trained.world_size == 2
        assert trained.backend == "ddp"
        assert trained.run("mine, hidden[0] is model").values == {0: (5, True), 1: (6, True)}
        assert folders() == before
        found += value_of(trained, "train(1)")
    trained.run("bomb.phase = 'death'")
    with pytest.raises(SwitchError, match=r"(?s)ended.*Rolled back to 2 CPU ranks"):
        trained.switch("fsdp2", nproc=4)
    assert folders() == before
    found += value_of(trained, "batches = iter(loader); train(1)")
    assert max_difference(found, expected) <= 1e-6


def test_ranks_that_do_not_start(trained: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    build(trained)
    start, fails = trained._start_ranks, [True]

    def failing(choice: Any, progress: Any) -> Any:
        if fails.pop():
            workers(trained).close()
            message = "The ranks failed to start."
            raise StartError(message)
        return start(choice, progress)

    monkeypatch.setattr(trained, "_start_ranks", failing)
    fails[:] = [False, True]
    with pytest.raises(SwitchError, match=r"failed to start. Rolled back to 2 CPU ranks"):
        trained.switch(nproc=1)
    trained.run("batches = iter(loader)")
    assert len(value_of(trained, "train(1)")) == 1
    fails[:] = [True, True]
    with pytest.raises(SwitchError, match="could not be restored either") as caught:
        trained.switch(nproc=1)
    found = re.search(r"kept in (\S+),", str(caught.value))
    assert found is not None
    folder = Path(found[1])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert "transformer.wte.weight" in shard_io.read_state_dict(folder / "state")
    shutil.rmtree(folder)
    with pytest.raises(RankDied, match="could not be restored"):
        trained.run("1")
    monkeypatch.undo()
    trained.restart()
    assert value_of(trained, "1") == 1
