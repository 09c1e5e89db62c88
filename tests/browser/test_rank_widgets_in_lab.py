"""Clicks in a real page on the widgets of a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]'")

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.browser.jupyter import Notebook

COUNTER = """%%distribute -n 2
from ipywidgets import Button, IntSlider

if rank == 0:
    def on_click(button):
        button.description = f"clicked at {slider.value}"

    slider = IntSlider(value=1, description="value")
    button = Button(description="click me")
    button.on_click(on_click)
    display(slider, button)
"""
TRAIN = """%%distribute
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
stop = torch.zeros(1)
if rank == 0:
    def on_stop(button):
        stop.fill_(1)
        button.description = "stopping"

    button = Button(description="stop training")
    button.on_click(on_stop)
    display(button)
while not accelerator.reduce(stop.clone()):
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
print("trained until the click")
"""


@pytest.mark.nightly
def test_clicks_reach_a_rank_that_is_idle_and_one_that_trains(
    open_notebook: Callable[..., Notebook],
) -> None:
    notebook = open_notebook("lab")
    page = notebook.page
    notebook.run("%load_ext nbdist")
    notebook.run(COUNTER)
    page.focus(".widget-slider .noUi-handle")
    page.keyboard.press("ArrowRight")
    page.click("button:has-text('click me')")
    page.wait_for_selector("button:has-text('clicked at 2')")
    training = notebook.start(TRAIN)
    page.click("button:has-text('stop training')")
    outputs = notebook.end(training)
    assert "trained until the click" in str(outputs)
    page.wait_for_selector("button:has-text('stopping')")
    assert not notebook.wrong
