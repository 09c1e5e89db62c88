"""A page that is closed while a cell runs loses no output: `%nbdist replay` shows it again."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]'")

from tests.browser.jupyter import Notebook
from tests.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOOP = """%%distribute -n 2
import time
from pathlib import Path
from tqdm import tqdm

print("printed while the page is open")
for step in tqdm(range(10), desc=f"rank {{rank}}"):
    if step == 5:
        print("half way", flush=True)
        Path({waits!r}).touch()
        while not Path({go!r}).exists():
            time.sleep(0.01)
print("printed while no page is open")
Path({done!r} + str(rank)).touch()
"""


def shown(outputs: list[dict[str, Any]]) -> str:
    texts = [output.get("text") or output["data"]["text/plain"] for output in outputs]
    return "".join("".join(text) for text in texts)


def replay_after_closing(notebook: Notebook, folder: Path, *, server_side: bool) -> str:
    """Run a loop, close the page within it, open the notebook again; what replay shows then."""
    asked: list[str] = []
    notebook.page.on("request", lambda request: asked.append(request.url))
    waits, go, done = (str(folder / name) for name in ("waits", "go", "done"))
    notebook.run("%load_ext nbdist")
    notebook.start(LOOP.format(waits=waits, go=go, done=done))
    eventually((folder / "waits").exists, within_s=120)
    notebook.page.wait_for_selector("text=half way")
    assert any("/execute" in url for url in asked) == server_side
    notebook.save()
    context = notebook.page.context
    notebook.page.close()
    (folder / "go").touch()
    eventually(lambda: all((folder / f"done{rank}").exists() for rank in (0, 1)), within_s=60)
    opened = Notebook(context.new_page(), notebook.url, notebook.kind, notebook.path)
    assert "printed while no page is open" not in shown(opened.content()["cells"][1]["outputs"])
    return shown(opened.run("%nbdist replay"))


@pytest.mark.nightly
@pytest.mark.parametrize("server_side", [False, True])
def test_replay_shows_what_a_closed_page_has_missed(
    open_notebook: Callable[..., Notebook], tmp_path: Path, *, server_side: bool
) -> None:
    if server_side and importlib.util.find_spec("jupyter_server_nbmodel") is None:
        pytest.skip("pip install jupyter-server-nbmodel")
    text = replay_after_closing(
        open_notebook("lab", server_side=server_side), tmp_path, server_side=server_side
    )
    assert "[0-1] printed while the page is open" in text
    assert "[0-1] half way" in text
    assert "[0-1] printed while no page is open" in text
    for rank in (0, 1):  # the bars in their last state, once
        assert text.count(f"rank {rank}: ") == 1
        assert f"rank {rank}: 100%" in text
