"""Files of strangers are loaded, listed, planned and exported over: nothing in them is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import nbdist
from nbdist import strategies
from nbdist.errors import CheckpointError, NbdistError, OptionError, PlanError
from nbdist.state import importers
from tests.doubles.foreign_checkpoints import Bomb, bomb_metadata, bomb_pickle, bomb_zero, read
from tests.hostile import malicious_files

if TYPE_CHECKING:
    from pathlib import Path

    from nbdist import Session


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    made.mkdir()
    return made


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@pytest.mark.fault("S7")
@pytest.mark.fault("E9")
def test_pickles_of_accelerate_beside_a_model_are_not_looked_at(folder: Path, marker: Path) -> None:
    malicious_files.custom_checkpoint(folder, marker)
    assert read(importers.open_checkpoint(folder, groups=[["w"]]))["model.w"].tolist() == [1, 1]
    assert not marker.exists()


@pytest.mark.fault("S7")
def test_ranks_refuse_them_too_and_go_on(session: Session, tmp_path: Path) -> None:
    session.run(
        "bare = torch.nn.Linear(2, 1); model = accelerator.prepare(bare);"
        "before = [p.clone() for p in bare.parameters()]"
    )
    for number, write in enumerate((bomb_pickle, bomb_metadata, bomb_zero)):
        folder, marker = tmp_path / str(number), tmp_path / f"marker{number}"
        folder.mkdir()
        write(folder, Bomb(marker))
        with pytest.raises(CheckpointError):
            session.load_foreign(folder)
        assert not marker.exists()
    same = "all(torch.equal(a, b) for a, b in zip(before, bare.parameters()))"
    assert session.run(same).values == {0: True, 1: True}


@pytest.mark.fault("S7")
@pytest.mark.fault("A12")
@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json", ""])
def test_a_config_that_asks_for_objects_is_refused(suffix: str, folder: Path, marker: Path) -> None:
    file = folder / f"config{suffix}"
    file.write_text(malicious_files.YAML.format(marker=marker))
    with pytest.raises(OptionError):
        strategies.load_config(file)
    assert not marker.exists()


@pytest.mark.fault("S7")
@pytest.mark.fault("A12")
def test_a_config_of_a_billion_laughs_costs_nothing(folder: Path) -> None:
    file = folder / "config.yaml"
    file.write_text(malicious_files.LAUGHS)
    content = strategies.load_config(file)  # shared, not copied
    with pytest.raises(OptionError, match="Unknown keys"):
        strategies.Options(backend="fsdp2", fsdp_config=content).validate(
            strategies.Hardware(kind="cpu", bf16=False, fp8=False, world_size=2, deepspeed=True)
        )


NO_NETWORK = """
import os, socket
_connect = socket.socket.connect
def connect(self, address):
    if self.family != socket.AF_UNIX:
        os.mkdir({marker!r})
        raise OSError("no network here")
    return _connect(self, address)
def looked_up(*_, **__):
    os.mkdir({marker!r})
    raise OSError("no network here")
socket.socket.connect = connect
socket.getaddrinfo = socket.create_connection = looked_up
"""
PLAN = """
import sys, nbdist
try:
    plan = nbdist.plan(sys.argv[1], devices="2x24GB", seq_len=32, batch_size=1)
    print("planned", len(plan.rows))
except nbdist.PlanError as error:
    print("refused", error)
"""


@pytest.mark.fault("S19")
@pytest.mark.fault("S7")
@pytest.mark.fault("F8")
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("model_type", "words"), [("llama", "planned"), ("olmo", "planned"), ("evil", "refused")]
)
def test_a_plan_runs_no_code_of_the_model_and_asks_no_network(
    model_type: str, words: str, folder: Path, marker: Path, tmp_path: Path
) -> None:
    """By closed form, by a trace in a process of its own, and not at all."""
    malicious_files.remote_code(folder, marker, model_type)
    asked = tmp_path / "network"
    guard = tmp_path / "guard"
    guard.mkdir()
    (guard / "sitecustomize.py").write_text(NO_NETWORK.format(marker=str(asked)))
    path = os.pathsep.join([str(guard), os.environ.get("PYTHONPATH", "")])
    shown = subprocess.run(
        [sys.executable, "-c", PLAN, str(folder)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout.startswith(words), shown.stdout
    assert not marker.exists()
    assert not asked.exists()


@pytest.mark.fault("S19")
def test_the_guard_against_the_network_guards(tmp_path: Path) -> None:
    asked = tmp_path / "network"
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK.format(marker=str(asked)))
    code = "import socket; socket.create_connection(('127.0.0.1', 9))"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, check=False
    )
    assert ended.returncode != 0
    assert asked.exists()


@pytest.mark.fault("S7")
def test_an_export_over_a_strangers_folder_leaves_it_alone(
    session: Session, folder: Path, marker: Path
) -> None:
    malicious_files.remote_code(folder, marker, "llama")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    session.run("model = accelerator.prepare(torch.nn.Linear(2, 1))")
    with pytest.raises(NbdistError):
        session.export(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not marker.exists()


@pytest.mark.fault("S7")
def test_a_notebook_of_a_stranger_is_only_outputs(folder: Path) -> None:
    """What was saved below a cell is never read back: no module of ours reads notebooks."""
    notebook: dict[str, Any] = {"cells": [], "nbformat": 4, "metadata": {"widgets": {"x": 1}}}
    file = folder / "x.ipynb"
    file.write_text(json.dumps(notebook))
    with pytest.raises(PlanError):
        nbdist.plan(str(file), devices="2x24GB")
    with pytest.raises(CheckpointError):
        importers.open_checkpoint(file)
