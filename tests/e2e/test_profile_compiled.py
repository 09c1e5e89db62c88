"""A profile of a loop with torch.compile in it: what is compiled stays so, and is not blamed."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import pytest

import nbdist
from tests.conftest import eventually
from tests.nightly import nightly, with_core

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist import Profile, Session

SETUP = textwrap.dedent(
    """
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            blocks = [torch.nn.Linear(256, 256) for _ in range(4)]
            self.blocks = torch.nn.Sequential(*blocks)
        def forward(self, x):
            return self.blocks(x).tanh()

    graphs = ran = 0

    def backend(graph, example):
        global graphs
        graphs += 1
        def run(*args):
            global ran
            ran += 1
            return graph.forward(*args)
        return run

    def prepare(compiled=False):
        global net, optimizer
        net = Net()
        if compiled:
            net = torch.compile(net, backend=backend)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        net, optimizer = accelerator.prepare(net, optimizer)

    def train(steps, model):
        global graphs, ran
        graphs = ran = 0
        for _ in range(steps):
            loss = model(torch.randn(64, 256)).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return ran, graphs
    """
)
HOW = {
    "inside": "torch.compile(net.module, backend=backend)",
    "whole": "torch.compile(net, backend=backend)",
    "fullgraph": "torch.compile(net.module, backend=backend, fullgraph=True)",
}


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Two CPU ranks under DDP on which models can be built."""
    with nbdist.Session(nproc=2, precision="no") as running:
        running.run(SETUP)
        yield running


def profiled(session: Session, code: str) -> tuple[Any, Profile]:
    before = len(session.profiles)
    result = session.run(code, profile={"steps": 6}, output="none")
    eventually(lambda: len(session.profiles) > before, within_s=20)
    return result.values[0], session.profiles[-1]


@pytest.mark.parametrize("how", with_core(HOW, "inside", "whole"))
def test_what_is_compiled_stays_compiled(session: Session, how: str) -> None:
    session.run("torch.compiler.reset(); prepare()")
    session.run(f"compiled = {HOW[how]}")
    # the first steps are counted by the session itself
    assert session.run("train(8, compiled)", output="none").values[0] == (8, 1)
    seen, profile = profiled(session, "train(20, compiled)")
    assert seen == (20, 0)  # the profile made nothing to be compiled anew
    assert session.run("train(8, compiled)", output="none").values[0] == (8, 0)
    assert profile.parts["forward"] > profile.parts["python"], profile
    assert any("torch.compile is in use" in note for note in profile.notes)
    assert profile.model is not None
    assert (profile.model.samples, profile.model.accumulate) == (64, 1)


def test_steps_that_compile_are_left_out(session: Session) -> None:
    session.run("torch.compiler.reset(); prepare(); compiled = None")
    code = """
    for step in range(24):
        if step in (0, 5):
            compiled = torch.compile(net.module, backend=lambda *args: slowly(*args))
        train(1, compiled)
    """
    slowly = """
    import time
    def slowly(graph, example):
        time.sleep(0.3)
        return backend(graph, example)
    """
    session.run(textwrap.dedent(slowly))
    _, profile = profiled(session, textwrap.dedent(code))
    assert len(profile.ranks[0].steps) == 6
    assert max(profile.ranks[0].steps) < 0.3
    assert not any("recompiles" in note for note in profile.notes)


@pytest.mark.parametrize(
    "model", ["net", nightly("lambda x: torch.compile(torch.square, backend=backend)(net(x))")]
)
def test_a_forward_beside_what_is_compiled_is_forward(session: Session, model: str) -> None:
    session.run("torch.compiler.reset(); prepare(); blocks = net.module.blocks")
    session.run("blocks[1] = torch.compile(blocks[1], backend=backend); _ = train(3, net)")
    _, profile = profiled(session, f"train(20, {model})")
    assert profile.parts["forward"] > profile.parts["python"], profile
    assert profile.model is not None
    assert (profile.model.samples, profile.model.accumulate) == (64, 1)


def test_a_model_that_is_compiled_before_it_is_prepared(session: Session) -> None:
    session.run("torch.compiler.reset(); prepare(compiled=True)")
    assert session.run("train(6, net)", output="none").values[0] == (6, 1)
    seen, profile = profiled(session, "train(20, net)")
    assert seen == (20, 0)
    assert profile.model is not None
    assert profile.model.params == 4 * (256 * 256 + 256)
    assert profile.parts["forward"] > 0


FAKE = """
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    fake = torch.empty(100 << 20)  # as torch.compile keeps them
"""


def test_memory_is_counted_again_when_nothing_is_compiled(session: Session) -> None:
    session.run("compiled = None; torch.compiler.reset(); prepare(); import gc; _ = gc.collect()")
    session.run(FAKE)
    _, profile = profiled(session, "train(20, net)")
    (memory, *_) = [one.memory for one in profile.ranks]
    assert memory is not None, profile.notes
    assert memory.parts["parameters"] == 4 * 4 * (256 * 256 + 256)
    assert sum(memory.parts.values()) < 50 << 20
