"""A session becomes a job with the same losses, and the job's config a session with the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from safetensors.torch import load_file

import nbdist
from nbdist import OptionError, Session
from tests import engines
from tests.notebooks.run_notebook import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MODEL = """
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=scale)
data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""
TRAIN = """
for batch in loader:
    with accelerator.accumulate(model):
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    report(loss=loss)
"""
NOTEBOOKS = ("01_first_cell", "02_every_backend", "03_trainer", "05_switch", "09_fine_tune")
Rows = dict[int, list[float]]


def launch(folder: Path, command: str = "", **variables: str) -> str:
    """Run a written script with two processes and without nbdist on the path; what it printed."""
    words = command or "accelerate.commands.launch --config_file accelerate.yaml train.py"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-m", *words.split()],
        cwd=folder,
        env=environment | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout + ran.stderr


def written(folder: Path, name: str = "loss") -> Rows:
    """Return what report() of a script wrote, by rank."""
    files = sorted((folder / "metrics").glob("rank*.jsonl"))
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return {rank: [row[name] for row in of if name in row] for rank, of in enumerate(rows)}


def train(session: Session) -> Rows:
    session.push(scale=0.01)
    session.run(MODEL)
    session.run(TRAIN)
    return session.metrics.by_rank("loss")


def same_losses_in_a_job(backend: str, folder: Path, **options: Any) -> None:
    """Train in a session, in the job written from it, and in a session with the job's config."""
    with Session(nproc=2, backend=backend, **options) as session:
        losses = train(session)
        session.script(folder)
        chosen = session.options
    launch(folder)
    assert written(folder) == losses
    with Session(config=folder / "accelerate.yaml", clip=options.get("clip")) as session:
        assert (session.backend, session.world_size) == (chosen.backend, 2)
        assert train(session) == losses


def test_a_job_has_the_losses_of_the_session(session: Session, tmp_path: Path) -> None:
    losses = train(session)
    session.script(tmp_path / "job")
    launch(tmp_path / "job")
    assert written(tmp_path / "job") == losses


@pytest.mark.nightly
def test_a_job_exports_the_model_that_was_named(session: Session, tmp_path: Path) -> None:
    train(session)
    session.run("runtime = 3.0\nother = accelerator.prepare(nn.Linear(8, 8))")
    session.export(tmp_path / "model", model="model", dtype="bf16")
    session.script(tmp_path / "job")
    file = tmp_path / "model" / "model.safetensors"
    in_notebook = file.rename(tmp_path / "notebook.safetensors")
    launch(tmp_path / "job")
    exported, expected = load_file(file), load_file(in_notebook)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in exported.items())
    session.run("del other")


def test_calls_of_distributed_functions_are_left_out(session: Session, tmp_path: Path) -> None:
    @nbdist.distribute
    def add(x: int) -> int:
        return x + 1

    session.run("x = 1")
    assert add(1) == [2, 2]
    files = session.script(tmp_path / "job")
    (note,) = [note for note in files.notes if "add()" in note]
    assert note.startswith("not in the script: the call of add() in cell")
    assert "worker" not in (tmp_path / "job" / "train.py").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("backend", engines.each())
@pytest.mark.parametrize(
    "options",
    [{}, {"clip": 0.5}, {"precision": "bf16"}],
    ids=["plain", "clip", "bf16"],
)
def test_every_engine_and_option_has_the_same_losses_in_a_job(
    backend: str, options: Mapping[str, Any], tmp_path: Path
) -> None:
    same_losses_in_a_job(backend, tmp_path / "job", **options)


def test_a_folder_that_is_not_empty_is_refused(session: Session, tmp_path: Path) -> None:
    session.run("x = 1")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(
        OptionError, match=r"is not empty\. Use another, or add --overwrite \(overwrite=True\)\.$"
    ):
        session.script(tmp_path)
    files = session.script(tmp_path, overwrite=True).files
    assert {"train.py", "accelerate.yaml", "submit.sbatch", "README.md"} <= {*files}
    assert (tmp_path / "notes.txt").exists()


@pytest.mark.nightly
def test_what_a_job_does_without_nbdist_is_set_or_named(session: Session, tmp_path: Path) -> None:
    session.switch("fsdp2")
    session.run("saves = 'trainer.save_model()'")
    session.script(tmp_path)
    assert "fsdp_state_dict_type: FULL_STATE_DICT" in (tmp_path / "accelerate.yaml").read_text()
    session.switch("zero2")
    session.run("clips = 'accelerator.clip_grad_norm_()'")
    notes = " ".join(session.script(tmp_path, overwrite=True).notes)
    assert "clips gradients, which DeepSpeed does with gradient_clipping in ds_config.json" in notes
    session.switch("ddp")


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["ddp", "fsdp", "fsdp1", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_its_losses_in_a_job(name: str, backend: str, tmp_path: Path) -> None:
    """Notebooks that train with a Trainer print its losses; the others report them."""
    in_notebook, printed = run_in_both(name, backend, tmp_path)
    metrics = {"loss", "pretraining", "straight"} & in_notebook.keys()
    assert metrics
    for metric in metrics:
        losses = in_notebook[metric]
        if any(written(tmp_path / "job", metric).values()):
            assert written(tmp_path / "job", metric) == losses
        else:  # a Trainer prints four digits
            by_trainer = [float(loss) for loss in re.findall(r"'loss': '([^']+)'", printed)]
            assert by_trainer == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_notebook_that_switched_has_its_losses_up_to_rounding(tmp_path: Path) -> None:
    """The job uses the last engine, ddp, from the start."""
    in_notebook, _ = run_in_both("05_switch", None, tmp_path)
    job = {name: written(tmp_path / "job", name) for name in ("straight", "switched")}
    assert job["straight"] == in_notebook["straight"]
    for rank, losses in in_notebook["switched"].items():
        assert job["switched"][rank][:20] == losses[:20]  # before the first switch
        assert job["switched"][rank] == pytest.approx(losses, abs=1e-5)


def run_in_both(name: str, backend: str | None, folder: Path) -> tuple[dict[str, Rows], str]:
    """Run a notebook and its job; return the notebook's metrics and what the job printed."""
    client = NotebookClient(
        with_script(name, backend, folder),
        timeout=600,
        allow_errors=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    printed = launch(folder / "job", PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1")
    metrics = json.loads((folder / "metrics.json").read_text())
    rows = {name: {int(r): values for r, values in of.items()} for name, of in metrics.items()}
    return rows, printed


def with_script(name: str, backend: str | None, folder: Path) -> nbformat.NotebookNode:
    """Return a notebook that writes its script and metrics before it stops.

    Args:
        name: of the notebook.
        backend: all cells use this one. Default: those of the notebook.
        folder: where they are written.
    """
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    first = next(cell for cell in cells if cell.source.startswith("%%distribute"))
    for cell in cells if backend else ():
        cell.source = re.sub(r"^(%%distribute.*) --backend \S+", r"\1", cell.source)
        cell.source = re.sub(r"^%nbdist switch .*", "", cell.source)
    if backend:
        first.source = first.source.replace("%%distribute", f"%%distribute --backend {backend}", 1)
    kept = [c for c in cells if "run_cell_magic" not in c.source and "plt" not in c.source]
    # TRL's bf16 by default needs a GPU or the session's options.
    arguments = "--with-nbdist" if name == "09_fine_tune" else ""
    kept[-1].source = (
        f"import json, math, nbdist\n%nbdist script {folder}/job {arguments}\n"
        "found = nbdist.session().metrics\n"
        "values = {n: {r: [v for v in of if not math.isnan(v)]"
        " for r, of in found.by_rank(n).items()} for n in found.names}\n"
        f"json.dump(values, open('{folder}/metrics.json', 'w'))\n%nbdist stop"
    )
    notebook.cells = kept
    return notebook
