"""The pictures of the documentation: what each shows, and the sources that it was made from.

    python -m tests.browser.pictures session    # docs/images/session.webp
    python -m tests.browser.pictures record     # docs/images/pictures.json, of all pictures

`make pictures` takes all of them. tests/unit/test_pictures.py compares the recorded digests with
the sources, and says which picture is older than what it shows.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.browser.jupyter import Notebook

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
RECORD = IMAGES / "pictures.json"
FRAMES = ROOT / "build" / "pictures" / "session"
"""The frames of the animation, to look at."""
PANEL = ["widgets/src/*", "nbdist/panel/*.py", "tests/browser/panel_page.py"]
SOURCES = {
    "session.webp": [*PANEL, "tests/browser/pictures.py"],
    "debugger.png": ["nbdist/worker/debugger.py", "tests/browser/test_debugger_in_lab.py"],
    "panel-light.png": PANEL,
    "panel-dark.png": PANEL,
    "profile-light.png": [*PANEL, "nbdist/profiler/profile.py"],
    "profile-dark.png": [*PANEL, "nbdist/profiler/profile.py"],
}
"""Picture -> files, relative to the repository, that decide how it looks."""

SETUP = """%%distribute -n 2 --backend ddp
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=256, hidden_size=256, intermediate_size=512,
    num_hidden_layers=4, num_attention_heads=4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
text = (torch.arange(4096) ** 2 // 7) % 256
print(f"rank {rank} of {world_size} on {device}")"""
TRAIN = """%%distribute
for step in range(40):
    starts = torch.randint(0, 4032, (8,)).tolist()
    ids = torch.stack([text[i : i + 64] for i in starts]).to(device)
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    report(loss=loss)
print(type(model).__name__, f"loss {loss.item():.2f}")"""
SWITCH = "%nbdist switch fsdp"
VIEW_SIZE = {"width": 1180, "height": 700}
SHOW_BESIDE = """async () => {
    const { shell, commands } = window.jupyterapp;
    const notebook = shell.currentWidget;
    await commands.execute('notebook:create-output-view');
    await commands.execute('notebook:hide-cell-outputs');
    const view = [...shell.widgets('main')].find(one => one !== notebook);
    shell.add(view, 'main', { ref: notebook.id, mode: 'split-right' });
    shell.activateById(notebook.id);
}"""
TIDY = """() => {
    const { shell } = window.jupyterapp;
    shell.collapseLeft();
    shell.currentWidget.content.model.sharedModel.deleteCell(0);
}"""
NO_PLACEHOLDER = ".jp-OutputPlaceholder { visibility: hidden }"
"""JupyterLab 4.6 shows the HTML of a hidden output as text."""
IS_OVER = "cell => Boolean(window.ended[cell])"
PACE_MS = 500
"""Time between two looks at the page while a cell runs."""
FRAMES_PER_CELL = 12
"""Largest number of frames of a cell in the picture, however long it ran."""
FRAME_MS, REST_MS = 180, 1600
"""How long the picture shows a frame, and the last one of a cell."""


def digest(picture: str) -> str:
    """Digest of the files that decide how a picture looks."""
    sha = hashlib.sha256()
    for path in sorted(path for name in SOURCES[picture] for path in ROOT.glob(name)):
        sha.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return sha.hexdigest()


def frames_of(notebook: Notebook, code: str) -> list[bytes]:
    """Run a new cell and take frames until it has ended; returns some, evenly spaced."""
    cell, frames, is_over = notebook.start(code), [], False
    while not is_over:
        is_over = bool(notebook.page.evaluate(IS_OVER, cell))
        notebook.page.wait_for_timeout(PACE_MS)  # the pace of the picture, not a synchronization
        notebook.page.locator(".jp-Notebook .jp-Cell").last.scroll_into_view_if_needed()
        frames.append(notebook.page.screenshot())
    failed = [one for one in notebook.end(cell) if one["output_type"] == "error"]
    if failed:
        raise RuntimeError(str(failed))
    every = -(-len(frames) // FRAMES_PER_CELL)
    return frames[::-1][::every][::-1]


def film(notebook: Notebook) -> Iterator[list[bytes]]:
    """Run the story of the picture: a cell on two ranks, the panel, a switch, the cell again."""
    notebook.page.set_viewport_size(VIEW_SIZE)
    notebook.run("%load_ext nbdist")
    notebook.page.evaluate(TIDY)
    yield frames_of(notebook, SETUP)
    notebook.run("%nbdist panel")
    notebook.page.evaluate(SHOW_BESIDE)
    notebook.page.add_style_tag(content=NO_PLACEHOLDER)
    for code in (TRAIN, SWITCH, TRAIN):
        yield frames_of(notebook, code)


def save_animation(scenes: list[list[bytes]], path: Path) -> None:
    """Write the frames of all cells as an animated WebP."""
    from PIL import Image

    frames = [frame for scene in scenes for frame in scene]
    times = [time for scene in scenes for time in [FRAME_MS] * (len(scene) - 1) + [REST_MS]]
    times[-1] += REST_MS
    FRAMES.mkdir(parents=True, exist_ok=True)
    for index, frame in enumerate(frames):
        (FRAMES / f"{index:03d}.png").write_bytes(frame)
    first, *others = [Image.open(io.BytesIO(frame)).convert("RGB") for frame in frames]
    first.save(
        path, save_all=True, append_images=others, duration=times, loop=0, quality=60, method=3
    )
    print(f"{path.name}: {len(frames)} frames, {path.stat().st_size / 1e3:.0f} kB")


def take_session() -> None:
    """Run the story in JupyterLab and write docs/images/session.webp."""
    from playwright.sync_api import sync_playwright

    from tests.browser.conftest import EMPTY
    from tests.browser.jupyter import Notebook, browse, serve

    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        path = folder / "work" / "training.ipynb"
        path.parent.mkdir()
        path.write_text(json.dumps(EMPTY))
        with (
            serve("lab", folder, path.parent) as url,
            browse(playwright, folder, scale=1) as browser,
        ):
            notebook = Notebook(browser.new_page(), url, "lab", path)
            save_animation(list(film(notebook)), IMAGES / "session.webp")


def main(step: str) -> None:
    """Take the animation, or record what all pictures were made from."""
    if step == "session":
        take_session()
    else:
        digests = {picture: digest(picture) for picture in SOURCES}
        RECORD.write_text(json.dumps(digests, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
