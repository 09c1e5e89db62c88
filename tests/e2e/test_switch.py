"""A model in training goes from each engine to each other one, and nothing is lost."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from nbdist import CellError, OptionError, Session, SwitchError
from tests.e2e.training import (
    BACKENDS,
    MODEL,
    START,
    WRAPPED,
    max_difference,
    train_without_switch,
    value_of,
)
from tests.nightly import nightly, with_core

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)
DEFINITIONS = MODEL


OF_A_FUNCTION = """
import gc
from accelerate import Accelerator

def main():
    accelerator = Accelerator()
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    first, second, optimizer = accelerator.prepare(first, second, optimizer)
    accelerator.register_save_state_pre_hook(lambda *_: (accelerator, first, second))  # a cycle

gc.disable()
main()
gc.enable()
"""


def test_models_of_a_function_that_has_returned_do_not_stop_a_switch(trained: Session) -> None:
    trained.switch("ddp")
    trained.run("bare = model = optimizer = schedule = loader = batches = None")
    trained.run(OF_A_FUNCTION)
    trained.switch("fsdp2")
    assert trained.backend == "fsdp2"


def all_pairs(names: list[str]) -> Iterator[str]:
    """A walk over each ordered pair of names once, beginning at the first."""
    left = {one: [other for other in names if other != one] for one in names}
    path, found = [names[0]], []
    while path:
        following = left[path[-1]]
        if following:
            path.append(following.pop())
        else:
            found.append(path.pop())
    return reversed(found[:-1])


@pytest.mark.nightly
def test_all_pairs_in_one_training(trained: Session) -> None:
    walk = list(all_pairs(BACKENDS))
    assert len({*zip([BACKENDS[0], *walk], walk, strict=False)}) == 30
    expected = train_without_switch(trained, "", 2 * len(walk))
    trained.switch("ddp")
    trained.run(START.format(""))
    found: list[float] = []
    for backend in walk:
        report = trained.switch(backend)
        assert report.verified > 0
        wrapped, losses = value_of(trained, "(type(model).__name__, train(2))")
        assert wrapped == WRAPPED[backend]
        found += losses
    assert max_difference(found, expected) <= 1e-6


VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "dropout": ("lambda: gpt2(0.1)", {}),
    "llama": ("llama", {}),
    "untied": ("lambda: llama(tied=False)", {}),
    "clip": ("", {"clip": 0.5}),
    "accumulate": ("", {"accumulate": 2}),
    "sgd": ("make=torch.optim.SGD, momentum=0.9", {}),
    "rmsprop": ("make=torch.optim.RMSprop, lr=1e-4", {}),
    "adagrad": ("make=torch.optim.Adagrad", {}),
}


@pytest.mark.parametrize("name", with_core(VARIATIONS, "adagrad"))
def test_variations_go_on_as_without_a_switch(trained: Session, name: str) -> None:
    build, options = VARIATIONS[name]
    walk = ["fsdp2", "zero3", "zero1", "fsdp1", "zero2", "ddp"]
    expected = train_without_switch(trained, build, 2 * len(walk), **options)
    trained.switch("ddp", **options)
    trained.run(START.format(build))
    found: list[float] = []
    for backend in walk:
        trained.switch(backend)
        found += value_of(trained, "train(2)")
    assert max_difference(found, expected) <= (1e-6 if not options else 2e-6)


def test_variables_go_on_and_stale_references_say_so(trained: Session) -> None:
    trained.switch("ddp")
    trained.run(START.format(""))
    trained.run(
        "mine = {'a': [1, 2]}; head = bare.lm_head; weight = bare.lm_head.weight;"
        " hidden = (model,); count = accelerator.step; same = accelerator"
    )
    report = trained.switch("fsdp2")
    assert {"model", "optimizer", "bare", "head", "weight"} <= set(report.bound)
    assert value_of(trained, "mine == {'a': [1, 2]} and same is accelerator")
    assert value_of(trained, "head is model.lm_head and weight is model.lm_head.weight")
    with pytest.raises(
        CellError, match="prepared with ddp, but the session has since switched to fsdp2"
    ):
        trained.run("hidden[0](input_ids=tokens[:2])")
    trained.run("train(1)")


def test_objects_of_the_user_have_the_new_model(trained: Session) -> None:
    """As the Trainer classes of research code do, with an average of the weights."""
    trained.switch("ddp")
    trained.run(START.format(""))
    trained.run("""
        class Holder:
            def __init__(self, **parts):
                vars(self).update(parts)

        class Unbound:  # as a proxy outside of its context
            __class__ = property(lambda _: 1 / 0)

        unbound = Unbound()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 0.5)
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
        loop = Holder(**parts, average=Holder(of=bare), nets={1: [model]})
        bare = model = optimizer = schedule = parts = None
    """)
    trained.switch("fsdp2")
    trained.run("model, optimizer, schedule = loop.model, loop.optimizer, loop.schedule; train(1)")
    assert value_of(trained, "type(model).__name__") == WRAPPED["fsdp2"]
    assert value_of(trained, "loop.nets[1][0] is model is loop.average.of")
    assert value_of(trained, "schedule.optimizer is optimizer.optimizer")
    trained.run("del loop, unbound")


@pytest.mark.fault("E15")
def test_a_failed_phase_brings_the_old_engine_back(trained: Session) -> None:
    expected = train_without_switch(trained, "", 8)
    trained.run(START.format(""))
    trained.switch("fsdp2")
    found = []
    for phase in ("checking", "keeping", "freeing", "building", "loading", "verifying", "binding"):
        trained.run(
            "import nbdist.worker.operations.collective_phases as inside\n"
            f"def fail(phase, wanted={phase!r}):\n"
            "    if phase == wanted and rank == 1:\n"
            "        inside.before_phase.clear(); raise RuntimeError('on purpose')\n"
            "inside.before_phase.append(fail)"
        )
        message = f"failed while {phase}, on rank 1: RuntimeError: on purpose"
        with pytest.raises(SwitchError, match=message):
            trained.switch("zero3")
        trained.run("inside.before_phase.clear()")
        assert trained.backend == "fsdp2"
        assert value_of(trained, "type(model).__name__") == WRAPPED["fsdp2"]
        found += value_of(trained, "train(1)")
    found += value_of(trained, "train(1)")
    assert max_difference(found, expected) <= 1e-6


def test_an_engine_that_cannot_be_made_brings_the_old_one_back(trained: Session) -> None:
    trained.switch("ddp")
    trained.run(START.format(""))
    trained.run(
        "import nbdist.worker.engines.accelerator_patch as inside\n"
        "original = inside._original_init\n"
        "def once(*_, **__):\n"
        "    inside._original_init = original\n"
        "    raise RuntimeError('on purpose')\n"
        "inside._original_init = once"
    )
    with pytest.raises(SwitchError, match=r"failed while building.*on purpose"):
        trained.switch("zero2")
    assert trained.backend == "ddp"
    assert len(value_of(trained, "train(1)")) == 1
    trained.switch("zero2")
    assert len(value_of(trained, "train(1)")) == 1


def test_what_cannot_be_carried_is_refused_before_anything_moves(trained: Session) -> None:
    trained.switch("ddp")
    trained.run(START.format("make=torch.optim.Adafactor, lr=1e-3"))
    with pytest.raises(SwitchError, match=r"Adafactor is not known.*--reset-optimizer"):
        trained.switch("zero2")
    assert len(value_of(trained, "train(1)")) == 1
    for _ in range(2):  # also where the backend stays
        assert "without its state" in str(trained.switch("zero2", reset_optimizer=True))
    assert len(value_of(trained, "train(1)")) == 1
    with pytest.raises(OptionError):
        trained.switch("zero9")
    trained.run(
        START.format("")
        + "; accelerator.backward(model(input_ids=tokens[:2], labels=tokens[:2]).loss)"
    )
    with pytest.raises(SwitchError, match="1 micro-batch are waiting"):
        trained.switch("ddp")
    trained.run("""
        optimizer.zero_grad()
        layer = torch.nn.Linear(4, 4)
        layer, sgd = accelerator.prepare(layer, torch.optim.SGD(layer.parameters()))
        del sgd
    """)
    with pytest.raises(SwitchError, match=r"layer \(Linear\) has 0 .* Keep its optimizer"):
        trained.switch("ddp")
    trained.run("del layer; alone = torch.optim.SGD(model.parameters())")
    with pytest.raises(SwitchError, match=r"`alone` trains a prepared model, but was not prepared"):
        trained.switch("ddp")
    trained.run("del alone")
    trained.switch("ddp")


TRAINER = textwrap.dedent(
    """
    import tempfile
    from tests.trainers import logged, make
    torch.manual_seed(0)
    trainer = make(tempfile.mkdtemp(), gpt2(), max_steps=3, disable_tqdm=True)

    def again():
        trainer.train()
        inner = trainer.optimizer
        while hasattr(inner, "optimizer"):
            inner = inner.optimizer
        steps = {float(state["step"]) for state in inner.state.values()}
        return type(trainer.model_wrapped).__name__, steps, logged(trainer)
    """
)


def test_the_precision_of_the_accelerator_that_was_built_last_stays(trained: Session) -> None:
    trained.switch("ddp")
    trained.run("""
        from accelerate import Accelerator
        others = [Accelerator(mixed_precision="no") for _ in range(5)]
        own = Accelerator(mixed_precision="bf16")
        layer = torch.nn.Linear(4, 4)
        layer, sgd = own.prepare(layer, torch.optim.SGD(layer.parameters()))
    """)
    trained.switch("zero3")
    assert trained.run("own.mixed_precision").values == {0: "bf16", 1: "bf16"}
    trained.run("del others, own, layer, sgd")


def test_a_trainer_switches_between_two_calls_of_train(trained: Session) -> None:
    walk = ["ddp", "fsdp2", "zero2", "fsdp1", "zero3", "ddp"]
    trained.switch("ddp")
    trained.run(TRAINER)
    expected = [value_of(trained, "again()") for _ in walk]
    trained.run(TRAINER)
    for number, backend in enumerate(walk):
        trained.switch(backend)
        wrapped, steps, losses = value_of(trained, "again()")
        assert (wrapped, steps) == (WRAPPED[backend], {3.0 * (number + 1)})
        assert max_difference(losses, expected[number][2]) <= 1e-6


@pytest.mark.parametrize("backend", ["zero2", "fsdp2", nightly("zero3")])
def test_a_trainer_that_was_created_before_a_switch_trains(trained: Session, backend: str) -> None:
    trained.switch("ddp")
    trained.run(TRAINER)
    _, _, expected = value_of(trained, "again()")
    trained.switch("ddp")
    trained.run(TRAINER)
    trained.switch(backend)
    wrapped, _, losses = value_of(trained, "again()")
    assert wrapped == WRAPPED[backend]
    assert max_difference(losses, expected) <= 1e-6


def test_the_parts_of_a_trainer_have_the_new_model(trained: Session) -> None:
    """As the collators of transformers and the losses of sentence-transformers refer to it."""
    trained.switch("ddp")
    trained.run(TRAINER)
    trained.run("""
        from transformers import DataCollatorForSeq2Seq, default_data_collator

        class Collator(DataCollatorForSeq2Seq):
            def __call__(self, rows):
                assert self.model.config
                mask = torch.ones(len(rows), 24)  # floats, which a Trainer casts under ZeRO
                return {**default_data_collator(rows), "attention_mask": mask}

        class Loss(torch.nn.Module):
            def __init__(self, model):
                super().__init__()
                self.inner = torch.nn.ModuleDict({"model": model})

        trainer.data_collator = Collator(None, trainer.model)
        trainer.losses = {"main": Loss(trainer.model)}
        trainer.run_model = trainer.model.forward
        again()
    """)
    trained.switch("zero2")
    trained.run("again()")
    assert value_of(trained, "trainer.data_collator.model is trainer.model")
    assert value_of(trained, "trainer.losses['main'].inner['model'] is trainer.model")
    assert value_of(trained, "trainer.run_model.__self__ is trainer.model")
    trained.run("del trainer")


def test_a_model_with_a_mixin_before_its_module_class_switches(trained: Session) -> None:
    trained.switch("ddp")
    trained.run("""
        import abc

        class Scaled(abc.ABC, torch.nn.Linear):
            pass

        scaled = Scaled(4, 4)
        scaled, sgd = accelerator.prepare(scaled, torch.optim.SGD(scaled.parameters()))
    """)
    trained.switch("zero2")
    trained.run("scaled(torch.ones(1, 4)).sum().item(); del scaled, sgd")


def test_a_function_of_the_models_modules_and_a_plain_tensor_switch(trained: Session) -> None:
    trained.switch("ddp")
    trained.run("""
        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers, self.mean = torch.nn.ModuleList([torch.nn.Linear(4, 4)]), None
                layers = self.layers
                self.mlp = lambda x: layers[0](x)

            def forward(self, x):
                self.mean = x.detach().mean(0)
                return self.mlp(x)

        block = Block()
        block, sgd = accelerator.prepare(block, torch.optim.SGD(block.parameters()))
        accelerator.backward(block(torch.ones(1, 4)).sum()); sgd.step(); sgd.zero_grad()
        hook = accelerator.unwrap_model(block).layers[0].register_forward_hook(lambda *_: None)
    """)
    notes = trained.switch("fsdp2").notes
    assert [note for note in notes if "are not carried (layers.0)" in note]
    assert value_of(trained, "accelerator.unwrap_model(block).mean.tolist()") == [1, 1, 1, 1]
    trained.run("accelerator.backward(block(torch.ones(1, 4)).sum()); sgd.step(); sgd.zero_grad()")
    trained.run("[each.requires_grad_(False) for each in block.parameters()]")
    with pytest.raises(SwitchError, match="All parameters in a group of SGD are frozen, such as"):
        trained.switch("zero2")
    trained.run("del block, sgd, hook")


def test_weights_that_a_module_computes_before_its_forward_train_after_a_switch_to_zero3(
    trained: Session,
) -> None:
    trained.switch("ddp")
    trained.run("""
        import copy

        normed = torch.nn.utils.spectral_norm(torch.nn.Linear(4, 4))
        spectral = torch.nn.Sequential(torch.nn.Linear(4, 4), normed)
        alone = copy.deepcopy(spectral)
        alone_sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
        spectral, sgd = accelerator.prepare(
            spectral, torch.optim.SGD(spectral.parameters(), lr=0.1)
        )

        def distance():
            loss, expected = (each(torch.ones(1, 4)).square().sum() for each in (spectral, alone))
            accelerator.backward(loss), expected.backward()
            sgd.step(), sgd.zero_grad(), alone_sgd.step(), alone_sgd.zero_grad()
            return abs(loss.item() - expected.item())
    """)
    assert value_of(trained, "max(distance() for _ in range(2))") < 1e-5
    trained.switch("zero3")
    assert value_of(trained, "max(distance() for _ in range(3))") < 1e-5
    trained.run("del spectral, sgd, alone, alone_sgd")


def test_a_model_that_free_memory_has_dropped_is_not_kept_again(trained: Session) -> None:
    trained.switch("ddp")
    trained.run("""
        def prepared():
            linear = torch.nn.Linear(4, 4)
            return accelerator.prepare(linear, torch.optim.SGD(linear.parameters()))

        old, old_sgd = prepared()
        accelerator.free_memory()
        new, sgd = prepared()
    """)
    for backend in ("zero2", "ddp"):
        trained.switch(backend)
        bare = "accelerator.unwrap_model(accelerator._models[0]) is accelerator.unwrap_model(new)"
        assert value_of(trained, f"len(accelerator._models), {bare}") == (1, True)
    trained.run("del old, old_sgd, new, sgd")


def test_two_short_trainings_in_a_cell_switch(trained: Session) -> None:
    """Of the first model, only the start of the measured step is in the cell."""
    trained.switch("ddp")
    trained.run("""
        def short():
            model = torch.nn.Linear(4, 4)
            model, sgd = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
            for _ in range(2):
                accelerator.backward(model(torch.ones(1, 4)).sum()); sgd.step(); sgd.zero_grad()
            return model, sgd

        first, second = short(), short()
    """)
    trained.switch("fsdp2")
    trained.run("del first, second")


WATCHED = textwrap.dedent(
    """
    import weakref
    from nbdist.state import shards
    genuine, copies, left = (shards.copy_to_host, shards.empty_pinned_cache), [], []

    def watched(live, **options):
        made = genuine[0](live, **options)
        copies.extend(weakref.ref(piece.view) for one in made.values() for piece in one.pieces)
        return made

    shards.copy_to_host = watched
    shards.empty_pinned_cache = lambda: left.append(sum(copy() is not None for copy in copies))
    """
)


def test_page_locked_memory_is_given_back_when_no_copy_of_the_state_lives(
    trained: Session, tmp_path: Path
) -> None:
    """On CPU ranks the copies are ordinary memory, and giving back is seen but does nothing."""
    trained.switch("ddp")
    trained.run(START.format(""))
    trained.run(WATCHED)
    for take in (
        lambda: trained.switch("fsdp2"),
        lambda: trained.save("saved", folder=tmp_path, wait=True),
        lambda: trained.load("saved", folder=tmp_path),
    ):
        trained.run("copies.clear(); left.clear()")
        take()
        trained.run("save.__self__.wait()")
        assert value_of(trained, "len(copies) > 0 and left[-1] == 0"), take
    trained.run("shards.copy_to_host, shards.empty_pinned_cache = genuine")


def test_a_scheduler_prepared_after_its_optimizer_is_the_same_under_every_backend(
    trained: Session,
) -> None:
    """It was built from the prepared optimizer, in a call of its own."""
    start = (
        "torch.manual_seed(0); m = nn.Linear(64, 64)\n"
        "m, o = accelerator.prepare(m, torch.optim.AdamW(m.parameters(), lr=1.0))\n"
        "s = accelerator.prepare(torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=20))\n"
        "rates = []"
    )
    step = (
        "accelerator.backward(m(torch.ones(1, 64)).sum()); o.step(); s.step(); o.zero_grad()\n"
        "rates.append(s.get_last_lr()[0]); rates"
    )
    trained.switch("ddp")
    trained.run(f"from torch import nn\n{start}")
    expected = [value_of(trained, step) for _ in range(3)][-1]
    trained.switch("zero2")
    trained.run(start)
    value_of(trained, step)
    trained.switch("fsdp")
    value_of(trained, step)
    trained.switch("ddp")
    assert value_of(trained, step) == pytest.approx(expected)
