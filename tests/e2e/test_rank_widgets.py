"""Widgets of ranks: the messages that a page sends for a click or a moved slider reach the rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.conftest import eventually

if TYPE_CHECKING:
    from tests.live_kernel import LiveKernel, Shown

CLICK = {"method": "custom", "content": {"event": "click"}}
WIDGETS = """%%distribute -n 2 --backend ddp
from ipywidgets import Button, IntSlider

if rank == 1:
    button, slider = Button(), IntSlider()
    button.on_click(lambda _: print("clicked"))
    slider.observe(lambda change: print("slider at", change.new), "value")
    display(button, slider)
"""
TRAIN_UNTIL_CLICKED = """%%distribute
from ipywidgets import Button

model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
stop = torch.zeros(1)
if rank == 0:
    def on_click(_):
        stop.fill_(1)
        print("clicked while it trains")
        1 / 0

    button = Button()
    button.on_click(on_click)
    display(button)
    print("training")
while not accelerator.reduce(stop.clone()):
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
print("stopped")
"""
WAIT_IN_CALLBACK = """%%distribute
import threading

if rank == 0:
    button = Button()
    button.on_click(lambda _: (print("waiting"), threading.Event().wait()))
    display(button)
"""
INTERACT = """%%distribute -n 2 --backend ddp
from ipywidgets import IntSlider, interact

if rank == 1:
    below = interact(lambda x: print("x is", x), x=IntSlider(3)).widget.out
"""
COMMS_OF_RANKS = "len([c for c in get_ipython().kernel.comm_manager.comms if c in {ids}])"


def comms(shown: Shown) -> dict[str, str]:
    """Return the comm ids of a cell's widgets, by the name of the model."""
    opened: list[dict[str, Any]] = [o for o in shown.outputs if o["kind"] == "comm_open"]
    return {o["data"]["state"]["_model_name"]: o["comm_id"] for o in opened}


def test_a_click_reaches_the_rank_while_no_cell_runs(notebook: LiveKernel) -> None:
    cell = notebook.send(WIDGETS)
    widgets = comms(notebook.collect(cell))
    notebook.send_comm(widgets["ButtonModel"], CLICK)
    assert "[1] clicked" in notebook.below(cell, until="clicked").text
    moved = {"method": "update", "state": {"value": 7}}
    notebook.send_comm(widgets["IntSliderModel"], moved)
    assert "[1] slider at 7" in notebook.below(cell, until="slider at").text
    assert notebook.run("%%distribute --ranks 1\nslider.value").text == "7\n"


def test_interact_replaces_its_own_output_and_keeps_the_slider(notebook: LiveKernel) -> None:
    shown = notebook.run(INTERACT)
    moved = {"method": "update", "state": {"value": 7}}
    notebook.send_comm(comms(shown)["IntSliderModel"], moved)
    code = "%%distribute --ranks 1\nprint([one['text'] for one in below.outputs])"
    eventually(lambda: notebook.run(code).text == "['x is 7\\n']\n", within_s=30)
    assert "x is 3" not in shown.text
    assert "clear_output" not in [output["kind"] for output in shown.outputs]


def test_a_click_reaches_the_rank_between_the_steps_of_a_loop(notebook: LiveKernel) -> None:
    subshell = notebook.subshell()
    cell = notebook.send(TRAIN_UNTIL_CLICKED)
    button = comms(notebook.collect(cell, until="[0] training"))["ButtonModel"]
    notebook.send_comm(button, CLICK, subshell=subshell)
    shown = notebook.collect(cell)
    assert "[0] clicked while it trains" in shown.text
    assert "ZeroDivisionError" in shown.text  # of the callback: shown, and the loop continues
    assert "[0-1] stopped" in shown.text
    assert shown.status == "ok"


def test_stop_ends_a_callback_for_which_a_cell_waits(notebook: LiveKernel) -> None:
    cell = notebook.send(WAIT_IN_CALLBACK)
    notebook.send_comm(comms(notebook.collect(cell))["ButtonModel"], CLICK)
    notebook.below(cell, until="waiting")
    blocked = notebook.send("%%distribute\nprint('started on', rank)")
    notebook.collect(blocked, until="started on 1")
    notebook.manager.interrupt_kernel()
    assert "KeyboardInterrupt" in notebook.collect(blocked).text
    assert "[0-1] 2" in notebook.run("%%distribute\nworld_size").text


def test_a_restart_leaves_no_comm_of_the_old_ranks(notebook: LiveKernel) -> None:
    ids = set(comms(notebook.run(WIDGETS)).values())
    assert f"{len(ids)}\n" in notebook.run(COMMS_OF_RANKS.format(ids=ids)).text
    notebook.run("%nbdist restart")
    assert "0\n" in notebook.run(COMMS_OF_RANKS.format(ids=ids)).text
