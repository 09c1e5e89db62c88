"""What `report()` sends, in the files that the clients of the trackers write without an account."""

from __future__ import annotations

import sqlite3
import struct
import sys
from typing import TYPE_CHECKING, Any

import pytest

import nbdist
from nbdist import OptionError
from tests.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STEPS = 20
LOOP = f"for _ in range({STEPS}): report(loss=float(world_size + rank), lr=0.1)"
PREPARE = """
from tests.models import gpt2
model = gpt2()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
"""
RANKS = "2 CPU ranks (no GPU found)"


def train(track: str, *, switches: bool = False) -> None:
    """Report steps on two ranks, with a switch between if asked."""
    with nbdist.Session(nproc=2, backend="fsdp2", precision="no", track=track) as session:
        session.run(LOOP)
        if switches:
            session.run(PREPARE)
            session.switch("ddp")
            session.run(LOOP)


def test_tensorboard_reads_the_means_over_ranks_and_the_options(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(f"tensorboard:{tmp_path}")
    (run,) = tmp_path.iterdir()
    events = reader.EventAccumulator(str(run)).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert losses == [(step, 2.5) for step in range(STEPS)]
    assert any("backend: fsdp2" in file.read_text() for file in run.rglob("hparams.yml"))


@pytest.mark.nightly
def test_tensorboard_has_switches_as_text(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(f"tensorboard:{tmp_path}", switches=True)
    (run,) = tmp_path.iterdir()
    events = reader.EventAccumulator(str(run)).Reload()
    assert len(events.Scalars("loss")) == 2 * STEPS
    (switch,) = events.Tensors("event/switch/text_summary")
    assert switch.step == STEPS - 1
    assert switch.tensor_proto.string_val == [f"{RANKS}: fsdp2 -> ddp".encode()]


@pytest.mark.nightly
def test_a_restart_starts_a_new_run(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with nbdist.Session(nproc=2, precision="no", track=f"tensorboard:{tmp_path}") as session:
        session.run(LOOP)
        session.restart()
        session.run(LOOP)
    runs = list(tmp_path.iterdir())
    assert len(runs) == 2
    for run in runs:
        assert len(reader.EventAccumulator(str(run)).Reload().Scalars("loss")) == STEPS


@pytest.mark.nightly
def test_mlflow_has_metrics_options_and_switches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow 3.17 refuses it otherwise
    train("mlflow:demo", switches=True)
    client = mlflow.MlflowClient(f"file://{tmp_path}")
    experiment = client.get_experiment_by_name("demo")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(n, 2.5) for n in range(2 * STEPS)]
    assert run.data.params["backend"] == "fsdp2"
    assert f"step {STEPS - 1}: switch: {RANKS}: fsdp2 -> ddp" in run.data.tags.values()
    assert run.info.status == "FINISHED"


@pytest.mark.nightly
def test_trackio_has_metrics_and_switches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    train("trackio:demo", switches=True)
    rows = sqlite3.connect(tmp_path / "demo.db").execute("select step, metrics from metrics")
    written = [(step, bytes(text)) for step, text in rows]
    losses = [step for step, text in written if b'"loss":2.5' in text]
    assert losses == list(range(2 * STEPS))
    assert any(b"fsdp2 -> ddp" in text for _, text in written)


@pytest.mark.nightly
def test_wandb_offline_keeps_steps_that_are_reported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    again = f"for step in range({STEPS}): report(step=step, loss=float(rank))"
    with nbdist.Session(nproc=2, precision="no", track="wandb:demo") as session:
        session.run(again)
        eventually(lambda: len(written_steps(tmp_path)) == STEPS, within_s=60)
        session.run(again)
    assert written_steps(tmp_path) == 2 * list(range(STEPS))


def written_steps(folder: Path) -> list[int]:
    """Steps with the mean loss in the file of the only run."""
    files = list(folder.rglob("*.wandb"))
    history = [dict(row) for file in files for row in wandb_history(file)]
    return [int(row["step"]) for row in history if row.get("loss") == "0.5"]


def wandb_history(file: Path) -> Iterator[list[tuple[str, str]]]:
    """Yield the rows of an offline run: records of protobuf in a log with blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (rest := 32768 - position % 32768) < 7:
            position += rest
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            record: Any = wandb_internal_pb2.Record.FromString(parts)
            parts = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                yield [(item.key or ".".join(item.nested_key), item.value_json) for item in items]


def test_a_tracker_that_fails_is_reported_once_and_training_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    file = tmp_path / "file"
    file.touch()  # a folder cannot be created in it
    text = ""
    with nbdist.Session(nproc=2, precision="no", track=f"tensorboard:{file}") as session:

        def is_reported() -> bool:
            nonlocal text
            text += capfd.readouterr().err
            return "stopped tracking" in text

        eventually(is_reported, within_s=60)
        session.run(LOOP)
        assert len(session.metrics["loss"]) == STEPS
    text += capfd.readouterr().err
    assert text.count("stopped tracking to tensorboard:") == 1
    assert "the session continues: NotADirectoryError" in text


@pytest.mark.parametrize(
    ("track", "problem"),
    [
        ("tensorboard", "track must be one of tensorboard:DIR, .* got 'tensorboard'"),
        ("comet_ml:demo", "track must be one of .* got 'comet_ml:demo'"),
        ("", "track must be one of"),
    ],
)
def test_a_tracker_that_is_not_known_is_refused_in_one_sentence(track: str, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        nbdist.Session(nproc=2, track=track)


def test_a_tracker_that_is_not_installed_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.path", [])  # where no package is found
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(OptionError, match="wandb, which is not installed"):
        nbdist.Session(nproc=2, track="wandb:demo")
