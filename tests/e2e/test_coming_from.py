"""docs/coming-from.md: the nbdist side of every section runs, and the other side where it can.

Both sides of all sections train the same model, so they print the same loss.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live_kernel import LiveKernel

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
SIDE = re.compile(r"^\*\*([\w ]+)\*\*.*\n((?:\n```python\n(?:.*\n)*?```\n)+)", re.MULTILINE)
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
LOSS = re.compile(r"\bloss (\d+\.\d{4})\b")


def sides() -> dict[str, dict[str, list[str]]]:
    """Section of the page -> tool, as "nbdist" or "Ray Train" -> its cells."""
    _, *parts = SECTION.split(PAGE.read_text())
    return {
        title: {tool: BLOCK.findall(blocks) for tool, blocks in SIDE.findall(text)}
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


SIDES = sides()
THERE = {tool: cells for both in SIDES.values() for tool, cells in both.items() if tool != "nbdist"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coming-from")
    (folder / "data.py").write_text(BLOCK.findall(PAGE.read_text())[0])
    return folder


@pytest.fixture(scope="module")
def losses_here(folder: Path) -> dict[str, set[str]]:
    """What the nbdist side of each section prints, all in one session."""
    with LiveKernel(folder) as kernel:
        kernel.run("%load_ext nbdist")
        return {title: printed(kernel, both["nbdist"]) for title, both in SIDES.items()}


def printed(kernel: LiveKernel, cells: list[str]) -> set[str]:
    """Run the cells of one side; return the losses that they print."""
    text = ""
    for cell in cells:
        shown = kernel.run(cell)
        assert shown.status == "ok", shown.text
        text += shown.text
    return set(LOSS.findall(text))


def test_each_section_has_both_sides() -> None:
    assert len(SIDES) == 6
    for both in SIDES.values():
        assert len(both) == 2
        assert both["nbdist"]


@pytest.mark.nightly
def test_all_sections_print_the_same_loss(losses_here: dict[str, set[str]]) -> None:
    losses = set().union(*losses_here.values())
    assert len(losses) == 1
    assert all(losses_here.values())


@pytest.mark.nightly
def test_torchrun_prints_the_same_loss(folder: Path, losses_here: dict[str, set[str]]) -> None:
    (folder / "train.py").write_text(THERE["torchrun"][0])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "train.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert set(LOSS.findall(done.stdout)) == losses_here["`torchrun`"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("tool", "module"),
    [
        ("notebook_launcher", "accelerate"),
        ("ipyparallel", "ipyparallel"),
        ("Ray Train", "ray.train"),
        ("Lightning", "lightning"),
    ],
)
def test_the_other_side_prints_the_same_loss(
    tool: str, module: str, folder: Path, losses_here: dict[str, set[str]]
) -> None:
    pytest.importorskip(module)
    with LiveKernel(folder) as kernel:
        found = printed(kernel, THERE[tool])
        if tool == "ipyparallel":
            kernel.run("cluster.stop_cluster_sync()")
    assert found == set().union(*losses_here.values())


def test_what_cannot_run_here_is_python() -> None:
    for cell in THERE["Databricks"]:
        assert ast.parse(cell).body
