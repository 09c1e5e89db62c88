"""Stop between optimizer steps."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from nbdist.worker import optimizer_step_gate as optimizer_step_gate_module
from nbdist.worker.optimizer_step_gate import OptimizerStepGate, optimizer_step_gate
from nbdist.worker.training import prepared_models


class Optimizer:
    """As prepare() returns it."""

    def __init__(self, *, accumulates: bool = False) -> None:
        self.gradient_state = SimpleNamespace(sync_gradients=not accumulates)
        self.steps = 0

    def step(self) -> None:
        self.steps += 1

    def zero_grad(self) -> None:
        """Nothing to forget."""


def gated() -> tuple[OptimizerStepGate, type[Optimizer]]:
    gate = OptimizerStepGate()

    class Gated(Optimizer):
        def step(self) -> None:
            with gate.step(self):
                super().step()

    return gate, Gated


def test_without_stop_steps_go_on_and_are_counted() -> None:
    gate, cls = gated()
    optimizer = cls()
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad()
    assert gate.pause_steps()[0] == optimizer.steps == 3


def test_a_rank_that_lags_makes_the_last_step_and_ends_its_iteration() -> None:
    gate, cls = gated()
    optimizer = cls()
    optimizer.step()
    assert gate.pause_steps()[0] == 1
    gate.interrupt_after(2)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(KeyboardInterrupt):
        gate.end_iteration()  # the next forward
    assert optimizer.steps == 2


def test_a_forward_with_gradients_announces_a_step() -> None:
    gate, cls = gated()
    gate.end_iteration(is_training=False)
    assert not gate.is_training
    gate.end_iteration()
    assert gate.is_training
    cls().step()
    assert not gate.is_training


def test_a_held_rank_waits_however_late_the_word_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, cls = gated()
    optimizer, hours = cls(), iter(range(10**6))
    optimizer.step()
    gate.pause_steps()
    naps = iter(range(5))

    def nap(_: float) -> None:
        assert optimizer.steps == 1
        if next(naps, None) is None:
            gate.interrupt_after(5)

    late = SimpleNamespace(monotonic=lambda: 3600.0 * next(hours), sleep=nap)
    monkeypatch.setattr(optimizer_step_gate_module, "time", late)
    optimizer.step()
    assert optimizer.steps == 2


def test_a_rank_whose_cell_has_ended_says_how_far_it_came() -> None:
    gate, cls = gated()
    cls().step()
    gate.end_cell()
    assert gate.pause_steps()[0] == 1
    gate.begin_cell()
    assert gate.pause_steps()[0] == 0


def test_a_loop_without_a_further_forward_is_stopped_soon_after_the_step() -> None:
    gate, cls = gated()
    optimizer = cls()
    optimizer.step()
    gate.pause_steps()
    gate.interrupt_after(2)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - where it comes is not known
        optimizer.step()
        threading.Event().wait(10)


def test_without_training_stop_acts_at_once() -> None:
    gate, _ = gated()
    assert gate.pause_steps()[0] == 0
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        gate.interrupt_after(0)
        threading.Event().wait(10)


def test_micro_batches_between_steps_are_not_counted() -> None:
    optimizer_step_gate.begin_cell()
    step, optimizer = prepared_models.wrap_step(Optimizer.step), Optimizer(accumulates=True)
    step(optimizer)
    assert (optimizer.steps, optimizer_step_gate.num_steps_begun) == (1, 0)
    optimizer.gradient_state.sync_gradients = True
    step(optimizer)
    assert (optimizer.steps, optimizer_step_gate.num_steps_begun) == (2, 1)
