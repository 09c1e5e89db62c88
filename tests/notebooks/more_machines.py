"""What notebooks/07_more_machines.ipynb must show, whichever cluster gives the two hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import nbformat

from tests.notebooks.run_notebook import ROOT, cell, executed, text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from nbformat import NotebookNode

NAME = "07_more_machines.ipynb"
COPIED = ("same", "data", "model", "train")


def passes(folder: Path, *, within: Sequence[str]) -> None:
    """Execute it on the first of two hosts, 10.213.0.1 and 10.213.0.2."""
    ran = executed(NAME, folder=folder, within=within)
    copies_are_true(ran)
    assert "2 CPU ranks on 2 nodes" in text(ran, "where")
    for rank in (0, 1):
        assert f"this is rank {rank} of 2, on cpu of 10.213.0.{rank + 1}" in text(ran, "where")
    assert text(ran, "same").count("all of us know the world size: 2") == 1
    assert text(ran, "status").count("  node ") == 2
    assert "step 240" in text(ran, "train")
    assert text(ran, "report").startswith("240 losses")
    assert "before: saved" in text(ran, "save")
    lost = text(ran, "lost")
    assert "RankDied: node " in lost
    assert "10.213.0.2" in lost
    assert "The last checkpoint is 'before' at step 240" in lost
    assert text(ran, "after").startswith("Session(dead: 2 CPU ranks on 2 nodes")
    assert "2 CPU ranks on 2 nodes" in text(ran, "restart")
    assert "step 240" in text(ran, "on-with-it")
    assert "at first" in text(ran, "proof")


def copies_are_true(ran: NotebookNode) -> None:
    """What is said to be a cell of notebook 01 is one."""
    first = nbformat.read(ROOT / "notebooks" / "01_first_cell.ipynb", as_version=4)
    for name in COPIED:
        assert cell(ran, name).source == cell(first, name).source
    for name in ("data", "model"):
        assert cell(first, name).source.removeprefix("%%distribute\n") in cell(ran, "again").source
    assert cell(ran, "on-with-it").source == cell(first, "train").source
