"""A notebook with Colab's old Jupyter packages, and ranks in the environment of these tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

from tests.live_kernel import LiveKernel

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PINS = Path(__file__).with_name("colab-pins.txt")
ALSO = ("pydantic>=2.9", "matplotlib")
"""What Colab has besides: a requirement of nbdist, and what notebook 01 draws with."""

MAMBA = {"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 256}
"""A config without a closed form: a child of the ranks' Python traces it."""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def colabs_python() -> str:
    """The interpreter for the environment: Colab's version where this machine has it."""
    for command in ("python3.13", str(Path.home() / ".pyenv/versions/3.13.0/bin/python")):
        try:
            subprocess.run([command, "-c", ""], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return command
    return sys.executable


@pytest.fixture(scope="module")
def old() -> Path:
    """The Python of an environment with Colab's packages, kept in build/."""
    folder = ROOT / "build" / "colab"
    python = folder / "bin" / "python"
    made = folder / "pins.txt"
    if not made.exists() or made.read_text() != PINS.read_text():
        subprocess.run([colabs_python(), "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "-r", PINS, *ALSO]
        subprocess.run(install, check=True)
        made.write_text(PINS.read_text())
    return python


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder from which the old environment imports nbdist."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "nbdist").symlink_to(ROOT / "nbdist")
    return folder


@pytest.fixture(scope="module")
def notebook(
    old: Path, package: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveKernel]:
    folder = tmp_path_factory.mktemp("notebook")
    with LiveKernel(folder, python=str(old), PYTHONPATH=str(package), HF_HUB_OFFLINE="1") as kernel:
        kernel.deadline_s = 600.0  # notebook 01 trains 240 steps
        loaded = kernel.run("%load_ext nbdist")
        assert loaded.status == "ok"
        assert "Error" not in loaded.text
        assert kernel.run(f"%config NbDist.python = {sys.prefix!r}").status == "ok"
        yield kernel


def test_the_first_notebook_runs(notebook: LiveKernel) -> None:
    cells = nbformat.read(ROOT / "notebooks" / "01_first_cell.ipynb", as_version=4).cells
    sources = [cell.source for cell in cells if cell.cell_type == "code"]
    ends = [(source, notebook.run(source)) for source in sources]
    failed = [shown.text for source, shown in ends if shown.status != "ok"]
    assert len(failed) == 1
    assert "KeyError: 'label'" in failed[0]
    shown = {source: shown.text for source, shown in ends}
    trained = next(text for source, text in shown.items() if "accelerator.backward" in source)
    assert "step 240: loss" in trained


def test_a_cell_without_that_environment_says_what_to_do(notebook: LiveKernel) -> None:
    notebook.run("import nbdist; nbdist.session() and nbdist.session().stop()")
    notebook.run("%config NbDist.python = None")
    shown = notebook.run("%%distribute\nrank")
    notebook.run(f"%config NbDist.python = {sys.prefix!r}")
    assert shown.error["ename"] == "StartError"
    assert "torch" in shown.error["evalue"]
    assert "`python -m nbdist.setup FOLDER`" in shown.error["evalue"]


def test_the_commands_of_a_session_work(notebook: LiveKernel) -> None:
    notebook.run("%%distribute -n 2 --backend fsdp\nimport torch\nmodel = torch.nn.Linear(4, 4)")
    prepared = notebook.run("%%distribute\nmodel = accelerator.prepare(model)")
    assert prepared.status == "ok"
    assert "ddp" in notebook.run("%nbdist switch ddp").text
    notebook.run("a = [1, 2]")
    assert notebook.run("%%distribute --push a --pull b\nb = a + [world_size]").status == "ok"
    assert "[1, 2, 2]" in notebook.run("b").text
    assert "ranks: Python" in notebook.run("%nbdist doctor").text
    assert notebook.run("%nbdist panel").status == "ok"
    plan = notebook.run(f"import nbdist; nbdist.plan({MAMBA}, batch_size=1, seq_len=16)")
    assert "zero3" in plan.text
    background = notebook.run("%%distribute --background\nimport time; time.sleep(0.5)")
    assert background.status == "ok"
    assert notebook.run("%nbdist wait").status == "ok"
    assert notebook.run("%nbdist stop").status == "ok"


def test_pip_installs_nbdist_without_changing_a_package(old: Path, tmp_path: Path) -> None:
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT]
    subprocess.run([*wheel, "--quiet"], check=True)
    report = tmp_path / "report.json"
    install = [old, "-m", "pip", "install", "--dry-run", "--quiet", "--report", report]
    subprocess.run([*install, *tmp_path.glob("*.whl")], check=True)
    new = {item["metadata"]["name"].lower() for item in json.loads(report.read_text())["install"]}
    freeze = subprocess.run(
        [old, "-m", "pip", "freeze"], check=True, capture_output=True, text=True
    )
    installed = {line.partition("==")[0].lower() for line in freeze.stdout.splitlines()}
    assert "nbdist" in new
    assert not new & installed
