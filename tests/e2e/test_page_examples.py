"""The examples of each page and docstring run, in order, in one notebook with two CPU ranks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbclient import NotebookClient

from tests import examples

if TYPE_CHECKING:
    from pathlib import Path

LOAD = ["%load_ext nbdist\nimport nbdist, os"]
MODEL = [
    """%%distribute
from torch.utils.data import DataLoader
from tests.models import LENGTH, VOCAB_SIZE, llama

rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, VOCAB_SIZE, (16, LENGTH))]
model = llama(tied=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(rows, batch_size=1)
"""
]
PREPARE = [
    """%%distribute
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    report(loss=loss)
"""
]
CHECKPOINTS = [
    "%nbdist export runs/checkpoint-500\nfrom tests.models import llama\nmodel = llama(tied=False)",
]
SLURM = ['os.environ["SLURM_JOB_END_TIME"] = "1951230000"']
PRETRAINED = [
    """from pathlib import Path
from tests import fine_tuning

_ = fine_tuning.save_model(Path("Qwen/Qwen3-0.6B"))  # names on the hub are folders here
Path("trl-lib/Capybara").mkdir(parents=True)
_ = fine_tuning.conversations().to_json("trl-lib/Capybara/train.jsonl")
""",
]
GENERATION = [
    """%%distribute
from tests import fine_tuning

tokenizer = fine_tuning.tokenizer()
prompts = ["what is 1 plus 2", "what is 3"]
inputs = {"input_ids": torch.ones(1, 4, dtype=torch.long), "max_new_tokens": 2}
"""
]
PLANNED = [
    """from pathlib import Path
from tests.models import llama

llama().config.save_pretrained("models/llama-3-8b")
"""
]
TRAIN = [
    """%%distribute
def train(model, optimizer, loader):
    return model(**next(iter(loader))).loss.item()
"""
]
FIRST = {
    "docs/checkpoints.md": [*LOAD, *MODEL, *PREPARE, *CHECKPOINTS],
    "docs/debugging.md": [*LOAD, *MODEL, *PREPARE],
    "docs/fine-tuning.md": [*LOAD, *PRETRAINED],
    "docs/graduate.md": [*LOAD, *SLURM],
    "docs/planner.md": [*LOAD, *MODEL, *PREPARE, *PLANNED],
    "docs/panel.md": [*LOAD, *MODEL, *PREPARE],
    "docs/profile.md": [*LOAD, *MODEL, *PREPARE],
    "docs/strategies.md": [*LOAD, *MODEL, *PREPARE, *GENERATION],
    "docs/tracking.md": [*LOAD, *MODEL, *PREPARE],
    "docs/troubleshooting.md": [*LOAD, *MODEL, *PREPARE],
    "nbdist/magics/magics.py": [*LOAD, *MODEL, *TRAIN],
}
"""Cells that define what the examples of a page use."""
ELSEWHERE = {"docs/coming-from.md"}
"""Pages with a test of their own, here `test_coming_from`."""


def pages() -> dict[str, list[examples.Example]]:
    """Return the examples to execute, by page or module."""
    found: dict[str, list[examples.Example]] = {}
    of_pages = [example for path in examples.pages() for example in examples.of_page(path)]
    for example in [*of_pages, *examples.of_docstrings()]:
        if not example.reason and example.place not in ELSEWHERE:
            found.setdefault(example.place, []).append(example)
    return found


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place", pages())
def test_examples_run(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", f"{examples.ROOT}:{':'.join(filter(None, sys.path))}")
    work = tmp_path / "work"
    work.mkdir()
    cells = list(FIRST.get(place, LOAD))
    cells += [cell for example in pages()[place] for cell in example.cells]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(work)}}).execute()
