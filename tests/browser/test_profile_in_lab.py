"""A profile asked for in the panel, in JupyterLab in chromium: button, bars, advice, what stays.

One notebook, read from top to bottom.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]'")

from playwright.sync_api import expect

from tests.browser.panel_page import AXE, SETUP, Panel, violations

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from playwright.sync_api import Locator

    from tests.browser.jupyter import Notebook

LOADER = """%%distribute
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4032

    def __getitem__(self, at):
        time.sleep(0.04)
        return text[at : at + 64]

def loop(steps):
    for step, ids in zip(range(steps), loader):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        report(loss=loss)

loader = accelerator.prepare(torch.utils.data.DataLoader(Slow(), batch_size=8))"""
LOOP = "%%distribute\nloop(30)"


pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("nothing_wrong")]


@pytest.fixture(scope="module")
def notebook(open_notebook: Callable[[str], Notebook]) -> Notebook:
    """A notebook with a panel, whose two ranks wait for their loader most of the time.

    The model is small, so that this holds on a machine that does much else.
    """
    opened = open_notebook("lab")
    opened.run("%load_ext nbdist")
    opened.run(SETUP.replace("hidden_size=256", "hidden_size=64").replace("layers=4", "layers=1"))
    opened.run(LOADER)
    opened.run("%nbdist panel")
    return opened


@pytest.fixture(scope="module")
def profile(panel: Panel) -> Locator:
    return panel.root.get_by_role("region", name="profile")


def test_the_button_profiles_the_cell_that_blocks(
    notebook: Notebook, panel: Panel, profile: Locator
) -> None:
    panel.says("ready")
    expect(profile).to_be_hidden()
    cell = notebook.start(LOOP)
    panel.says(re.compile("running cell"))
    panel.button("Profile").click()
    expect(panel.root.locator(".nbd-line").first).to_contain_text(re.compile("profiling: step \\d"))
    expect(panel.button("Profile")).to_have_attribute("aria-disabled", "true")
    expect(panel.button("Profile")).to_have_attribute("title", re.compile("in progress"))
    expect(profile.locator(".nbd-verdict")).to_contain_text("input-bound")
    outputs = notebook.end(cell)
    assert "input-bound" in json.dumps(outputs)
    expect(panel.button("Profile")).not_to_have_attribute("aria-disabled", "true")


def test_each_rank_has_a_bar_that_is_its_step(panel: Panel, profile: Locator) -> None:
    rows = profile.locator(".nbd-step")
    expect(rows).to_have_count(2)
    for rank in range(2):
        bar = rows.nth(rank).get_by_role("img")
        expect(bar).to_have_attribute(
            "aria-label", re.compile(f"rank {rank}: step .*data .*forward")
        )
        whole = bar.evaluate("bar => bar.getBoundingClientRect().width")
        parts = {
            part: width / whole
            for part, width in bar.locator(".nbd-time").evaluate_all(
                "parts => parts.map(one => [one.dataset.part, one.getBoundingClientRect().width])"
            )
        }
        assert 0.9 < sum(parts.values()) <= 1.01  # the slower rank's bar is the whole width
        assert max(parts, key=lambda part: parts[part]) == "data"
        assert {"forward", "backward", "optimizer"} <= parts.keys()
    assert panel.root.evaluate("root => root.scrollWidth <= root.clientWidth")


def test_keys_and_the_pointer_read_a_bar(notebook: Notebook, profile: Locator) -> None:
    reading = profile.locator(".nbd-reading")
    bar = profile.get_by_role("img").first
    bar.focus()
    expect(reading).to_contain_text("rank 0: step")
    for _ in range(2):
        notebook.page.keyboard.press("ArrowRight")
    expect(reading).to_have_text(re.compile(r"^rank 0: (copies|forward) [\d.]+ m?s, <?\d+ %$"))
    notebook.page.keyboard.press("Tab")
    expect(reading).to_contain_text("rank 1: step")
    bar.locator("[data-part=backward]").hover()
    expect(reading).to_contain_text("rank 0: backward")
    notebook.page.mouse.move(0, 0)


def test_advice_has_a_line_to_copy(notebook: Notebook, profile: Locator) -> None:
    notebook.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    first = profile.get_by_role("list", name="advice").get_by_role("listitem").first
    expect(first).to_contain_text(re.compile("num_workers=\\d: about"))
    first.get_by_role("button", name=re.compile("^copy .*DataLoader")).click()
    expect(first.get_by_text("Copied")).to_be_visible()
    pasted = notebook.page.evaluate("() => navigator.clipboard.readText()")
    assert pasted == first.locator("code").inner_text()


def test_light_and_dark_and_what_axe_finds(
    notebook: Notebook, profile: Locator, pictures: Path
) -> None:
    found = []
    for name in ("Dark", "Light"):
        notebook.theme(f"JupyterLab {name}")
        profile.screenshot(path=pictures / f"profile-{name.lower()}.png")
        if AXE.is_file():
            found += violations(notebook)
    assert found == []


def test_what_was_followed_is_measured(notebook: Notebook, panel: Panel, profile: Locator) -> None:
    workers = "torch.utils.data.DataLoader(Slow(), batch_size=8, num_workers=8)"
    notebook.run(f"%%distribute\nloader = accelerator.prepare({workers})")
    panel.button("Profile").click()  # no cell runs: the next one is profiled
    expect(panel.root.locator(".nbd-line").first).to_contain_text("the next cell")
    notebook.run(LOOP)
    expect(profile.locator(".nbd-outcome")).to_contain_text(re.compile("predicted .*, measured"))


@pytest.mark.fault("G3")
def test_what_stays_in_the_notebook_says_the_same(
    notebook: Notebook, panel: Panel, profile: Locator
) -> None:
    if not profile.is_visible():  # the tests before this one have not been run
        panel.button("Profile").click()
        notebook.run(LOOP)
    verdict = profile.locator(".nbd-verdict").inner_text()
    notebook.run("%nbdist stop")
    cells = notebook.content()["cells"]
    (shown,) = [cell for cell in cells if cell["source"] == "%nbdist panel"]
    (data,) = [one["data"] for one in shown["outputs"]]
    for kind in ("text/html", "text/plain"):
        assert verdict in "".join(data[kind])
    expect(profile).to_have_count(0)
