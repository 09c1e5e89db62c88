"""A checkpoint that one training wrote goes on under any engine, and half of one is never seen."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nbdist import CheckpointError, RankDied, Session, SwitchError
from nbdist.checkpoint import FolderStorage
from tests import engines
from tests.conftest import eventually
from tests.e2e.training import BACKENDS, MODEL, START, max_difference, value_of
from tests.nightly import nightly, with_core

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.live_kernel import LiveKernel

pytestmark = pytest.mark.timeout(600)

DROPOUT = "lambda: gpt2(0.1)"
OTHER = "lambda: gpt2(0.1), seed=9"
ANY_RANKS = MODEL.replace("batch_size=2", "batch_size=4 // world_size").replace(
    "lambda n: 1 / (1 + n / 40)", "lambda n: 1.0"
)
STATE = textwrap.dedent(
    """
    from nbdist.worker.training import prepared_models as training
    from nbdist.worker.training.training_state import ModelAndOptimizerState
    from nbdist.state import tensor_digest
    def fingerprint():
        state = ModelAndOptimizerState(training.all_models()[0])
        return tensor_digest.global_digests(state.owned_shards())
    """
)


@pytest.fixture(scope="module")
def living(folder: Path) -> Iterator[Session]:
    """Two ranks; tests may restart them as they like."""
    with Session(nproc=2) as session:
        assert session.checkpoints.root == folder / "checkpoints"
        yield session


@pytest.fixture
def trained(living: Session) -> Session:
    """Two ranks with the names of `MODEL`, and nothing prepared that a test relies on."""
    if living.world_size != 2 or living.state != "ready" or living.backend != "ddp":
        living.restart(nproc=2, backend="ddp")
    living.run(MODEL + STATE)
    return living


def hidden(root: Path) -> list[str]:
    """What is left of saves that came to nothing."""
    return [path.name for path in root.iterdir() if path.name.startswith((".tmp", ".old"))]


def test_what_was_not_prepared_is_named(trained: Session) -> None:
    def notes() -> tuple[str, ...]:
        save = trained.save("alone", overwrite=True)
        save.wait(60)
        return save.notes

    trained.run(START.format(""))
    trained.run("alone = torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer)")
    (note,) = notes()
    assert (
        note == "not saved: the scheduler alone: ConstantLR that accelerator.prepare() did not get"
    )
    trained.run("alone = accelerator.prepare(alone)")
    assert notes() == ()
    trained.run("alone = torch.optim.SGD(model.parameters())")
    assert notes() == ("not saved: the optimizer alone, which accelerator.prepare() did not get",)
    trained.run("del alone")


@pytest.mark.nightly
def test_every_backend_loads_what_every_backend_wrote(trained: Session) -> None:
    expected = {}
    for writer in BACKENDS:
        trained.switch(writer)
        trained.run(START.format(DROPOUT))
        trained.save(writer).wait(60)
        expected[writer] = value_of(trained, "train(5)")
    found = {entry.name: entry for entry in trained.checkpoints}
    assert {name: (entry.step, entry.backend) for name, entry in found.items()} == {
        name: (4, name) for name in BACKENDS
    }
    for reader in BACKENDS:
        trained.switch(reader)
        trained.run(START.format(OTHER))
        for writer in BACKENDS:
            report = trained.load(writer)
            assert report.verified == 84
            assert report.notes == ()
            assert report.written == f"{writer} on 2 ranks"
            losses = value_of(trained, "train(5)")
            assert max_difference(losses, expected[writer]) <= (0.0 if reader == writer else 1e-6)
    trained.switch("ddp")


@pytest.mark.fault("E11")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "fsdp2"), (1, "ddp")),
        nightly((1, "ddp"), (2, "zero3")),
        nightly((2, "ddp"), (4, "fsdp2")),
    ],
)
def test_another_number_of_ranks(
    living: Session, before: tuple[int, str], after: tuple[int, str]
) -> None:
    nproc, backend = before
    living.restart(nproc=nproc, backend=backend)
    living.run(ANY_RANKS)
    living.run(START.format(""))
    living.save("ranks", overwrite=True).wait(60)
    expected = value_of(living, "train(70)")  # beyond the epoch's end
    nproc, backend = after
    living.restart(nproc=nproc, backend=backend)
    living.run(ANY_RANKS)
    living.run(START.format("seed=9"))
    report = living.load("ranks")
    assert any("random generators are unchanged" in note for note in report.notes)
    found = value_of(living, "train(70)")
    assert max_difference(found[:10], expected[:10]) <= 2e-6
    shuffled_alone = any("next epochs are in another order" in note for note in report.notes)
    assert shuffled_alone == (before[0] == 1)
    if not shuffled_alone:
        assert max_difference(found, expected) <= 1e-4


@pytest.mark.fault("E16")
def test_an_epoch_that_is_just_over(trained: Session) -> None:
    trained.run(START.format(DROPOUT))
    trained.run("steps = train(28)")  # 32 batches a rank: the last one is out, the loop not over
    trained.save("over").wait(60)
    expected = value_of(trained, "train(3)")
    trained.load("over")
    assert value_of(trained, "train(3)") == expected


@pytest.mark.parametrize(
    "build",
    [nightly("make=torch.optim.SGD, momentum=0.9"), "make=torch.optim.NAdam", nightly("llama")],
)
def test_other_optimizers_and_models(trained: Session, build: str) -> None:
    trained.run(START.format(build))
    trained.save("other", overwrite=True).wait(60)
    assert trained.checkpoints["other"].step == 4
    expected = value_of(trained, "train(3)")
    trained.run(START.format(build + ", seed=9"))
    trained.load("other")
    assert value_of(trained, "train(3)") == expected


@pytest.mark.parametrize("backend", engines.each("zero2"))
def test_optimizers_begin_with_new_state(trained: Session, backend: str) -> None:
    trained.run(START.format(""))
    trained.save("old", overwrite=True).wait(60)
    trained.run("optimizer.state.clear()")
    expected = value_of(trained, "train(3)")
    trained.switch(backend)
    report = trained.load("old", reset_optimizer=True)
    assert "the optimizers begin with new state, as requested" in report.notes
    assert max_difference(value_of(trained, "train(3)"), expected) < 1e-5


@pytest.mark.parametrize("backend", engines.each("zero3"))
def test_a_load_after_an_evaluation(trained: Session, backend: str) -> None:
    """Of a model with a weight that no loss reaches."""
    trained.switch(backend)
    trained.run(
        "from accelerate import Accelerator, DistributedDataParallelKwargs\n"
        "unused = DistributedDataParallelKwargs(find_unused_parameters=True)\n"
        "accelerator = Accelerator(kwargs_handlers=[unused])\n"
        "def partly_used():\n"
        "    model = gpt2(0.1)\n"
        "    model.unused = torch.nn.Parameter(torch.ones(13))\n"
        "    return model"
    )
    trained.run(START.format("partly_used"))
    trained.save("evaluated", overwrite=True).wait(60)
    expected = value_of(trained, "train(3)")
    evaluation = (
        "model.eval()\nwith torch.no_grad():\n    model(input_ids=tokens[:4])\nmodel.train()"
    )
    trained.run(evaluation)
    trained.load("evaluated")
    assert value_of(trained, "train(3)") == expected


def test_a_load_refuses_several_counts_in_a_group(trained: Session) -> None:
    trained.run(START.format(""))
    trained.run("optimizer.state[bare.lm_head.weight]['step'] += 1")
    trained.save("counts").wait(60)
    trained.run("bare = model = optimizer = schedule = loader = batches = None")
    trained.switch("zero2")
    trained.run(START.format(""))
    with pytest.raises(CheckpointError, match=r"stepped 4 times .* its parameter group 5 times"):
        trained.load("counts")


@pytest.mark.nightly
def test_a_model_without_an_optimizer(trained: Session) -> None:
    trained.switch("zero3")
    loss = "model(input_ids=tokens[:4], labels=tokens[:4]).loss.item()"
    before = value_of(trained, f"torch.manual_seed(0); model = accelerator.prepare(gpt2()); {loss}")
    trained.save("alone").wait(60)
    trained.run("torch.manual_seed(1); model = accelerator.prepare(gpt2())")
    assert trained.load("alone").verified == 28
    assert value_of(trained, loss) == before
    with pytest.raises(SwitchError, match="0 optimizers, but DeepSpeed supports exactly one"):
        trained.switch("fsdp2")


@pytest.mark.fault("E16")
def test_a_new_kernel_loads_before_the_first_step(trained: Session) -> None:
    trained.run(START.format(DROPOUT))
    trained.save("fresh", overwrite=True).wait(60)
    expected = value_of(trained, "train(3)")
    trained.restart()
    with pytest.raises(CheckpointError, match="No model is prepared"):
        trained.load("fresh")
    trained.run(MODEL)
    trained.run("bare, model, optimizer, schedule, loader = build(lambda: gpt2(0.1), seed=9)")
    trained.load("fresh")
    trained.run("batches = iter(loader)")
    assert value_of(trained, "train(3)") == expected


LOADERS = textwrap.dedent(
    """
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(tokens)

    def heads(count):
        return [next(coming)[:, :3].tolist() for _ in range(count)]
    """
)


@pytest.mark.parametrize(
    "loader",
    [
        "tokens, batch_size=2, shuffle=True, num_workers=2",
        nightly("tokens, batch_size=2, shuffle=True, num_workers=2, persistent_workers=True"),
        nightly("tokens, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)"),
        "Stream(), batch_size=2",
    ],
)
def test_other_loaders_go_on(trained: Session, loader: str) -> None:
    trained.run(START.format("") + "\n" + LOADERS)
    trained.run(
        f"more = accelerator.prepare(torch.utils.data.DataLoader({loader}))\n"
        "coming = iter(more); used = heads(3)"
    )
    trained.save("loaders", overwrite=True).wait(60)
    expected = trained.run("heads(4)").values
    trained.run("later = accelerator.prepare(torch.utils.data.DataLoader(more.dataset))")
    report = trained.load("loaders")
    assert "loader at batch 3 of epoch 0" in report.loaded
    assert not report.notes  # the loader without a saved position is not taken for another
    assert trained.run("coming = iter(more); heads(4)").values == expected
    assert value_of(trained, "len(heads(57)), next(coming, None)") == (57, None)  # 64 in all


# -- in the background


WAITING = textwrap.dedent(
    """
    import threading
    from nbdist.worker.operations import save as inside
    go = threading.Event()
    inside.before_save_stage[:] = [lambda step: go.wait(60) if step == "write" else None]
    """
)


@pytest.mark.fault("E13")
def test_training_goes_on_and_the_moment_is_saved(trained: Session) -> None:
    trained.run(START.format(DROPOUT))
    trained.run(WAITING)
    save = trained.save("moment")
    later = value_of(trained, "train(4)")
    assert not save.done
    assert "moment" not in [entry.name for entry in trained.checkpoints]
    trained.run("go.set()")
    assert save.wait(60).step == 4
    assert "being written" not in str(save)
    trained.load("moment")
    assert value_of(trained, "train(4)") == later


@pytest.mark.fault("E13")
def test_save_in_a_cell_and_a_second_one_waits(trained: Session) -> None:
    trained.run(START.format(DROPOUT))
    trained.run(WAITING)
    first_is_there = trained.run(
        "save('first'); train(2); go.set(); save('second')\n"
        "import os; os.path.exists('checkpoints/first/manifest.json')"
    ).values[0]
    assert first_is_there
    # The folder is complete a moment before the ranks report how long it took.
    eventually(
        lambda: any(entry.seconds for entry in trained.checkpoints if entry.name == "second"),
        within_s=60,
    )
    assert [trained.checkpoints[name].step for name in ("first", "second")] == [4, 6]


def test_micro_batches_that_wait_are_refused(trained: Session) -> None:
    trained.run(START.format(""))
    trained.run("accelerator.backward(model(input_ids=tokens[:2], labels=tokens[:2]).loss)")
    with pytest.raises(CheckpointError, match=r"gradients of 1 micro-batch are waiting"):
        trained.save("waiting")
    trained.run("optimizer.zero_grad()")


def test_the_end_waits_for_a_save(folder: Path) -> None:
    with Session(nproc=2) as session:
        session.run(MODEL)
        session.run(START.format(""))
        session.save("at-the-end", folder="others")
    assert [entry.name for entry in FolderStorage(folder / "others").list_checkpoints()] == [
        "at-the-end"
    ]
    assert hidden(folder / "others") == []


# -- names


def test_overwrite_keep_and_what_is_not_ours(trained: Session, folder: Path) -> None:
    trained.run(START.format(""))
    root = folder / "kept"
    foreign = root / "notes"
    foreign.mkdir(parents=True)
    (foreign / "readme.txt").write_text("mine")
    for name in ("a", "b", "c"):
        save = trained.save(name, keep=2, wait=True, folder=root)
    assert save.removed == ("a",)
    assert [entry.name for entry in FolderStorage(root).list_checkpoints()] == ["b", "c"]
    with pytest.raises(CheckpointError, match="exists\\. Save under another name"):
        trained.save("c", folder=root)
    before = FolderStorage(root).list_checkpoints()[-1]
    trained.save("c", overwrite=True, wait=True, folder=root)
    after = FolderStorage(root).list_checkpoints()[-1]
    assert before is not None
    assert after is not None
    assert after.created > before.created
    with pytest.raises(CheckpointError, match="not overwritten"):
        trained.save("notes", overwrite=True, folder=root)
    for name in ("../outside", Path("notes")):
        with pytest.raises(CheckpointError, match="Invalid checkpoint name"):
            trained.save(name, folder=root)  # type: ignore[arg-type]
    assert (foreign / "readme.txt").read_text() == "mine"
    assert hidden(root) == []


def test_checkpoints_are_listed_and_read_in_the_notebook(trained: Session) -> None:
    trained.run(START.format(""))
    trained.save("listed", overwrite=True, wait=True)
    weights = trained.pull("model")
    found = trained.checkpoints["listed"].state_dict()
    assert set(weights) <= set(found)
    assert all(bool((found[name] == weights[name]).all()) for name in weights)
    assert "listed: step 4" in repr(trained.checkpoints)
    other = Session(nproc=2)
    assert "listed" in [entry.name for entry in other.checkpoints]
    assert other.checkpoints["listed"].seconds is None


# -- faults


@pytest.mark.fault("E3")
def test_one_rank_that_cannot_write_stops_all(trained: Session, folder: Path) -> None:
    trained.run(START.format(""))
    trained.run(
        "import resource\n"
        "old = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "if rank == 1: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))"
    )
    save = trained.save("limited")
    with pytest.raises(CheckpointError, match=r"rank 1 cannot write .*errno 27"):
        save.wait(60)
    assert trained.checkpoints.failed_saves[-1] is save
    assert "limited" not in [entry.name for entry in trained.checkpoints]
    assert hidden(folder / "checkpoints") == []
    trained.run("resource.setrlimit(resource.RLIMIT_FSIZE, (0, old[1])) if rank == 1 else None")
    with pytest.raises(CheckpointError, match="rank 1"):
        trained.save("limited", wait=True)
    trained.run("resource.setrlimit(resource.RLIMIT_FSIZE, old); train(1)")
    trained.save("limited", wait=True)


def test_a_failure_in_a_cells_save_is_seen(trained: Session, capsys: Any) -> None:
    trained.run(START.format(""))
    trained.run(
        "from nbdist.worker.operations import save as inside\n"
        "def fail(step):\n"
        "    if step == 'commit': raise OSError(5, 'on purpose')\n"
        "inside.before_save_stage[:] = [fail]\n"
        "save('in-a-cell')"
    )
    eventually(
        lambda: [save for save in trained.checkpoints.failed_saves if save.name == "in-a-cell"],
        within_s=60,
    )
    trained.run("inside.before_save_stage.clear()")
    eventually(lambda: "on purpose" in "".join(capsys.readouterr()), within_s=20)
    refuse(trained, "in-a-cell", "in-a-cell was not saved: .*on purpose")


def test_a_rank_that_dies_fails_its_save(trained: Session, folder: Path) -> None:
    trained.run(START.format(""))
    trained.run(WAITING)
    save = trained.save("dying")
    with pytest.raises(RankDied):
        trained.run("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(CheckpointError, match="SIGKILL"):
        save.wait(60)
    trained.restart()
    assert hidden(folder / "checkpoints") == []


# -- refusals


def refuse(session: Session, name: str, match: str, **options: Any) -> None:
    """Loading is refused, and nothing of the training has changed."""
    before = session.run("fingerprint()").values[0]
    with pytest.raises(CheckpointError, match=match):
        session.load(name, **options)
    assert session.run("fingerprint()").values[0] == before


@pytest.mark.fault("E12")
def test_what_does_not_fit_is_refused_before_anything_is_read(trained: Session) -> None:
    trained.run(START.format(""))
    trained.save("fits", overwrite=True, wait=True)
    refuse(trained, "nothing", r"No checkpoint nothing in .*Available: ")
    trained.run(START.format("llama"))
    refuse(
        trained, "fits", r"prepared model: of \d+ tensors \d+ are missing: .*; 28 are unexpected"
    )
    trained.run(START.format("lambda: gpt2(vocab_size=223)"))
    refuse(
        trained,
        "fits",
        r"1 have a different shape: model.transformer.wte.weight \(223, 45\) \(saved",
    )
    trained.run(START.format("make=torch.optim.SGD"))
    refuse(trained, "fits", r"has the state of AdamW, but SGD is prepared\. .*--reset-optim")
    report = trained.load("fits", weights_only=True)
    assert report.verified == 28
    assert "weights only" in str(report)
    trained.run("train(1)")


HOSTILE: dict[str, Any] = {
    "positions": lambda tree: tree["positions"][0].update(epoch="first"),
    "generators": lambda tree: tree["rng"][1].update(python=["x", None]),
    "no generators": lambda tree: tree.update(rng=[]),
    "a scheduler": lambda tree: tree["schedulers"][0].update(kind="os.system"),
    "an optimizer": lambda tree: tree["optimizers"][0].update(kind="builtins.eval"),
    "a path": lambda tree: tree["files"][0].update(name="../../etc/passwd"),
    "a digest": lambda tree: tree["keys"]["model.transformer.wpe.weight"].update(digest="0" * 16),
    "a shape": lambda tree: tree["keys"]["rng.00001.cpu"].update(shape=[1 << 40]),
    "a group": lambda tree: tree["optimizers"][0]["groups"].pop(),
}


@pytest.mark.parametrize("part", with_core(HOSTILE, "positions", "an optimizer", "a digest"))
def test_a_hostile_manifest_is_one_sentence(trained: Session, part: str) -> None:
    trained.run(START.format(""))
    path = trained.save("hostile", overwrite=True).wait(60).path / "manifest.json"
    tree = json.loads(path.read_text())
    HOSTILE[part](tree)
    path.write_text(json.dumps(tree))
    refuse(trained, "hostile", r"^[^\n]+$")
    path.unlink()
    for left in path.parent.iterdir():
        left.unlink()
    path.parent.rmdir()


def test_a_failed_load_puts_everything_back(trained: Session) -> None:
    trained.run(START.format(OTHER))
    trained.save("target", overwrite=True, wait=True)
    for backend in ("ddp", "zero2", "fsdp2"):
        trained.switch(backend)
        trained.run(START.format(DROPOUT))
        expected = value_of(trained, "train(3)")
        trained.run(START.format(DROPOUT))
        found = []
        for phase in ("reading", "verifying", "checking"):
            trained.run(
                "from nbdist.worker.operations import collective_phases as inside\n"
                f"def fail(phase, wanted={phase!r}):\n"
                "    if phase == wanted and rank == 1:\n"
                "        inside.before_phase.clear(); raise RuntimeError('on purpose')\n"
                "inside.before_phase[:] = [fail]"
            )
            refuse(trained, "target", "rank 1: RuntimeError: on purpose")
            trained.run("inside.before_phase.clear()")
            found += value_of(trained, "train(1)")
        assert found == expected
    trained.switch("ddp")


# -- the magics


@pytest.mark.nightly
def test_the_magics(notebook: LiveKernel) -> None:
    assert "0 checkpoints" in notebook.run("%nbdist checkpoints").text
    notebook.run(f"%%distribute -n 2\n{MODEL}")
    assert notebook.run(f"%%distribute\n{START.format('')}").status == "ok"
    shown = notebook.run("%nbdist save base --wait")
    assert shown.status == "ok"
    assert "base: saved in" in shown.text
    taken = notebook.run("%nbdist save base")
    assert taken.status == "error"
    assert "exists" in taken.text
    assert "base: step 4" in notebook.run("%nbdist checkpoints").text
    for line, completed in {"load b": "base", "load checkpoints/b": "checkpoints/base/"}.items():
        reply = notebook.client.complete(f"%nbdist {line}", reply=True, timeout=30)
        assert completed in reply["content"]["matches"]
    notebook.run("%%distribute\nbefore = train(2)")
    loaded = notebook.run("%nbdist load base")
    assert "loaded: GPT2LMHeadModel" in loaded.text
    assert "True" in notebook.run("%%distribute\ntrain(2) == before").text
    assert "--keep" in notebook.run("%nbdist save").text
    notebook.run("%%distribute\nsave('in-a-cell', overwrite=True)")
    names = "sorted(one.name for one in nbdist.session().checkpoints)"
    notebook.run("import nbdist")
    eventually(lambda: "['base', 'in-a-cell']" in notebook.run(names).text, within_s=60)
    brought = notebook.run(
        "import sys\nbefore = 'torch' in sys.modules\n"
        "state = nbdist.session().checkpoints['base'].state_dict()\nbefore, len(state)"
    )
    assert "(False, 28)" in brought.text or "(False, 29)" in brought.text
    wrong = notebook.run("%nbdist load nowhere")
    assert wrong.status == "error"
    assert "No checkpoint nowhere in" in wrong.text
