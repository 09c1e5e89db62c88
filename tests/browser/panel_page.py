"""The panel in a page: what a reader sees of it, and does with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import expect

from tests.browser.jupyter import SHOWN_S
from tests.conftest import eventually

if TYPE_CHECKING:
    from re import Pattern

    from playwright.sync_api import Locator, Page

    from tests.browser.jupyter import Notebook

expect.set_options(timeout=1000 * SHOWN_S)

PANEL = ".nbdist"
AXE = Path(__file__).parents[2] / "widgets" / "node_modules" / "axe-core" / "axe.min.js"
SETUP = """%%distribute -n 2
from transformers import LlamaConfig, LlamaForCausalLM
import time
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
    num_attention_heads=4, max_position_embeddings=64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
text = (torch.arange(4096) ** 2 // 7) % 256"""
TRAIN = """%%distribute
for _ in range({steps}):
    began = time.perf_counter()
    starts = torch.randint(0, 4032, (8,))
    ids = torch.stack([text[start:start + 64] for start in starts]).to(device)
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    speed = world_size * ids.numel() / (time.perf_counter() - began)
    report(**{{"loss": loss, "tokens/s": speed}})"""
BLOCK = "%%distribute\nwhile True:\n    time.sleep(0.1)"

NAMED = """const named = element =>
    `${element.tagName} ${element.getAttribute('aria-label') ?? element.textContent}`;"""
FOCUSED = f"""root => {{
    {NAMED}
    return root.contains(document.activeElement) ? named(document.activeElement) : null;
}}"""
FOCUSABLE = f"""root => {{
    {NAMED}
    return [...root.querySelectorAll('button, input, select, [tabindex]')]
        .filter(one => !one.disabled && one.tabIndex >= 0 && one.checkVisibility())
        .map(named);
}}"""


def train(steps: int) -> str:
    return TRAIN.format(steps=steps)


class Panel:
    """One of the panels that a page shows."""

    def __init__(self, page: Page, view: int = 0) -> None:
        self.page = page
        self.root: Locator = page.locator(PANEL).nth(view)
        self.state = self.root.locator(".nbd-state")
        self.setup = self.root.locator(".nbd-setup")

    def button(self, name: str) -> Locator:
        return self.root.get_by_role("button", name=name, exact=True)

    def tab(self, name: str) -> Locator:
        """A tab, whose label has a number behind its name."""
        return self.root.get_by_role("tab", name=re.compile(rf"^{name}"))

    def says(self, words: str | Pattern[str]) -> None:
        """Wait until the header's state says so."""
        expect(self.state).to_have_text(words)

    def chart(self, name: str) -> Locator:
        return self.root.get_by_role("group", name=f"{name}: arrow keys")

    def step(self, name: str = "loss") -> int:
        """The latest step that a chart's caption names."""
        figures = self.chart(name).locator(".nbd-caption .nbd-figures").inner_text()
        return int(figures.split("step ")[1].replace(",", ""))

    def reaches(self, step: int, name: str = "loss") -> None:
        """Wait until the chart of a series has come to a step; on its way it may skip some."""
        eventually(lambda: self.step(name) >= step, within_s=SHOWN_S)

    def ink(self, name: str = "loss") -> str:
        """The pixels of a chart, as text: another one is another drawing."""
        canvas = self.chart(name).locator("canvas")
        return str(canvas.evaluate("canvas => canvas.toDataURL()"))

    def picture(self, path: Path) -> None:
        """Take a picture of it, at a moment when its size does not change."""
        before = None
        while before is None or before != self.root.bounding_box():
            self.root.scroll_into_view_if_needed()
            before = self.root.bounding_box()
            self.root.screenshot(path=path)

    def draws_other_than(self, ink: str, name: str = "loss") -> None:
        """Wait until a chart's pixels are others."""
        canvas = self.chart(name).locator("canvas").element_handle()
        self.page.wait_for_function("([one, ink]) => one.toDataURL() !== ink", arg=[canvas, ink])

    def live_width(self) -> float:
        """How far the first device's live bar reaches, in pixels."""
        live = self.root.locator(".nbd-live").first
        return float(live.evaluate("bar => bar.getBoundingClientRect().width"))

    def ranks(self) -> Locator:
        self.tab("Ranks").click()
        return self.root.locator(".nbd-ranks tbody tr")

    def focusable(self) -> list[str]:
        """What the Tab key must reach from the first enabled button on, in words."""
        return list(self.root.evaluate(FOCUSABLE))

    def tab_through(self) -> list[str]:
        """What the Tab key reaches from where the focus is to the end of the panel."""
        reached = []
        while found := self.root.evaluate(FOCUSED):
            reached.append(found)
            self.page.keyboard.press("Tab")
        return reached


def violations(notebook: Notebook) -> list[str]:
    notebook.page.evaluate(AXE.read_text())
    found: list[str] = notebook.page.evaluate(
        "async root => (await axe.run(root, { preload: false })).violations"
        ".map(one => `${one.id}: ${one.nodes[0].html.slice(0, 160)}`)",
        PANEL,
    )
    return found
