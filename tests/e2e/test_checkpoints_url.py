"""Checkpoints at a URL: saved by ranks, loaded by any number of them, and half of one never seen.

`file://` runs everywhere; an S3 server (moto) where `pip install s3fs "moto[s3,server]"` was done.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nbdist import CellInterrupted, CheckpointError, RankDied, Session, checkpoint
from nbdist.checkpoint import Url, UrlStorage
from tests.conftest import eventually
from tests.e2e.test_checkpoints import ANY_RANKS, STATE, WAITING
from tests.e2e.training import MODEL, START, max_difference, value_of
from tests.interrupts import meanwhile
from tests.nightly import nightly
from tests.session_internals import workers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.live_kernel import LiveKernel

pytestmark = pytest.mark.timeout(600)

SECRET = "not-to-be-shown-anywhere"  # noqa: S105 - of a server that ends with the tests


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bucket on a server of our own."""
    if not all(map(importlib.util.find_spec, ("s3fs", "moto"))):
        pytest.skip('no S3 here: pip install s3fs "moto[s3,server]"')
    import s3fs

    command = [sys.executable, "-m", "moto.server", "-p", "0"]
    log = tmp_path_factory.mktemp("server") / "log"
    with (
        pytest.MonkeyPatch.context() as patch,
        log.open("w") as file,
        subprocess.Popen(command, stdout=file, stderr=file) as server,
    ):
        eventually(lambda: re.search(r"http://[0-9.:]+", log.read_text()), within_s=60)
        address = re.search(r"http://[0-9.:]+", log.read_text())
        assert address is not None
        patch.setenv("AWS_ENDPOINT_URL", address[0])
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem().mkdir("runs")
        yield "s3://runs"
        server.terminate()


@pytest.fixture(scope="module", params=[nightly("file"), "s3"])
def url(request: pytest.FixtureRequest, folder: Path) -> str:
    if request.param == "file":
        return f"file://{folder}/at a url"
    return f"{request.getfixturevalue('bucket')}/first"


@pytest.fixture(scope="module")
def living(url: str, folder: Path) -> Iterator[Session]:  # noqa: ARG001 - runs there
    """Two ranks whose checkpoints go to a URL."""
    with Session(nproc=2, checkpoints=url) as session:
        yield session


@pytest.fixture
def trained(living: Session) -> Session:
    """Two ranks with a model in training."""
    if living.world_size != 2 or living.state != "ready" or living.backend != "ddp":
        living.restart(nproc=2, backend="ddp")
    living.run(MODEL + STATE)
    living.run(START.format(""))
    return living


def listed(url: str) -> list[str]:
    """Checkpoints as a process sees them that has just come."""
    return [entry.name for entry in UrlStorage(Url(url)).list_checkpoints()]


def files(url: str) -> list[str]:
    """Everything that lies there, without what a session's start tries."""
    system, path = Url(url).open_filesystem()
    system.invalidate_cache()
    found = (one.removeprefix(path).lstrip("/") for one in system.find(path))
    return [one for one in found if not one.startswith("trial/")]


def test_the_very_same_training_goes_on(trained: Session, url: str) -> None:
    save = trained.save("base", wait=True)
    assert str(save.path).startswith(f"{url}/base/")
    expected = value_of(trained, "train(5)")
    trained.run(START.format("seed=9"))
    report = trained.load("base")
    assert (report.verified, report.notes) == (84, ())
    assert max_difference(value_of(trained, "train(5)"), expected) == 0.0
    state = trained.checkpoints["base"].state_dict()
    assert all(bool(tensor.isfinite().all()) for tensor in state.values())


@pytest.mark.nightly
def test_another_number_of_ranks_and_another_engine(living: Session) -> None:
    living.restart(nproc=2, backend="ddp")
    living.run(ANY_RANKS)
    living.run(START.format(""))
    living.save("ranks", wait=True)
    expected = value_of(living, "train(10)")
    living.restart(nproc=1, backend="fsdp")
    living.run(ANY_RANKS)
    living.run(START.format("seed=9"))
    living.load("ranks")
    assert max_difference(value_of(living, "train(10)"), expected) <= 2e-6
    assert not list(
        Path(workers(living).launcher_group.run_dir.folders[1]).rglob("load-*")
    )  # nothing stays here


def test_save_in_a_cell_keeps_the_last_ones(trained: Session, url: str) -> None:
    trained.run("for n in range(4):\n    train(1)\n    save(f'step-{n}', keep=2)")
    eventually(lambda: not trained.saves_running(), within_s=60)
    assert [one.name for one in trained.checkpoints.cached] == ["step-2", "step-3"]
    assert listed(url) == ["step-2", "step-3"]
    assert {one.split("/")[0] for one in files(url)} == {"step-2", "step-3"}
    trained.save("step-3", overwrite=True, wait=True)
    assert len({one.split("/")[1] for one in files(url)}) == 2
    with pytest.raises(CheckpointError, match=r"step-3 exists\. .*overwrite=True"):
        trained.save("step-3")


@pytest.mark.fault("E1")
@pytest.mark.parametrize(
    ("step", "victim"),
    [
        ("commit", 0),
        *(
            pytest.param(step, victim, marks=pytest.mark.nightly)
            for step, victim in [("write", 0), ("write", 1), ("commit", 1)]
        ),
    ],
)
def test_a_save_that_is_killed_half_way_is_never_listed(
    trained: Session, url: str, step: str, victim: int
) -> None:
    trained.save("best", overwrite=True, wait=True)
    before = set(files(url))
    trained.run(WAITING.replace('"write"', repr(step)))
    save = trained.save("best", overwrite=True)
    written = ".owner.json" if step == "write" else "part-00001.json"
    eventually(lambda: any(written in one for one in set(files(url)) - before), within_s=30)
    with pytest.raises(RankDied):
        trained.run(f"import os\nif rank == {victim}: os.kill(os.getpid(), {signal.SIGKILL:d})")
    with pytest.raises(CheckpointError, match="SIGKILL"):
        save.wait(60)
    assert "best" in listed(url)
    trained.restart()
    assert set(files(url)) == before  # what was half written is gone too
    trained.run(MODEL)
    trained.run(START.format(""))
    trained.load("best")


@pytest.mark.fault("E7")
def test_damage_is_found_and_nothing_has_changed(trained: Session, url: str) -> None:
    trained.save("damaged", wait=True, overwrite=True)
    trained.run("train(2)")
    system, path = Url(url).open_filesystem()
    (name,) = [one for one in files(url) if "damaged" in one and "optim-00001-0" in one]
    content = bytearray(system.cat_file(f"{path}/{name}"))
    content[-9] ^= 1
    system.pipe_file(f"{path}/{name}", bytes(content))
    before = value_of(trained, "fingerprint()")
    with pytest.raises(CheckpointError, match=r"Checksum mismatch in .*optim-00001-0"):
        trained.load("damaged")
    assert value_of(trained, "fingerprint()") == before


@pytest.mark.fault("E14")
def test_stop_ends_a_load_that_waits_for_the_store(trained: Session) -> None:
    trained.save("slow", wait=True, overwrite=True)
    trained.run("train(1)")
    before = value_of(trained, "fingerprint()")
    trained.run(
        "import threading\nfrom nbdist.checkpoint import CheckpointDownload\n"
        "download = CheckpointDownload.download_file\n"
        "CheckpointDownload.download_file = lambda self, file, *given: ("
        "open('waiting', 'w').close() or threading.Event().wait()"
        " if 'optim' in file.name else download(self, file, *given))"
    )

    def press() -> None:  # generators are downloaded before, while checking
        eventually(lambda: Path("waiting").exists(), within_s=60)
        trained.interrupt()

    interrupted = pytest.raises(CellInterrupted, match="Load interrupted while downloading")
    with meanwhile(press), interrupted:
        trained.load("slow")
    assert value_of(trained, "fingerprint()") == before
    assert not list(Path(workers(trained).launcher_group.run_dir.folders[1]).rglob("load-*"))
    trained.run("CheckpointDownload.download_file = download")
    trained.load("slow")
    assert value_of(trained, "fingerprint()") != before


def test_what_cannot_be_is_one_sentence_and_touches_nothing(trained: Session, url: str) -> None:
    before = value_of(trained, "fingerprint()")
    for folder, text in (
        ("nope://x", "does not support the URL nope://x"),
        ("gs://bucket", "a package that is not installed: "),
        ("file:///proc/nothing", "Cannot write checkpoints to file:///proc/nothing"),
        ("ftp://me:pass-word@127.0.0.1:9/x", "Cannot reach ftp://me:<redacted>@127.0.0.1:9/x"),
    ):
        with pytest.raises(CheckpointError, match=text) as excinfo:
            trained.save("refused", folder=folder)
        assert "\n" not in str(excinfo.value)
        assert "pass-word" not in str(excinfo.value)
    with pytest.raises(CheckpointError, match=rf"No checkpoint nothing in {url}\. Available: "):
        trained.load("nothing")
    assert value_of(trained, "fingerprint()") == before


@pytest.mark.fault("S5")
@pytest.mark.parametrize("url", ["s3"], indirect=True)
def test_a_store_that_does_not_let_us_in(trained: Session, bucket: str, capsys: Any) -> None:
    with pytest.raises(CheckpointError, match="Cannot write checkpoints to s3://none/x") as excinfo:
        trained.save("refused", folder="s3://none/x")
    text = str(excinfo.value) + "".join(capsys.readouterr()) + repr(trained.checkpoints)
    assert SECRET not in text
    assert bucket not in str(excinfo.value)


@pytest.mark.nightly
def test_a_url_of_the_session_is_tried_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="does not support the URL nope://x"):
        Session(nproc=1, checkpoints="nope://x")
    lines: list[str] = []
    with Session(nproc=1, checkpoints="file:///proc/nothing") as session:

        def warned() -> bool:
            lines.append(capsys.readouterr().err)
            return "Cannot write checkpoints to file:///proc/nothing" in "".join(lines)

        eventually(warned, within_s=20)
        assert value_of(session, "1") == 1  # cells that save nothing run


def test_the_magics_take_a_url(notebook: LiveKernel, tmp_path: Path) -> None:
    where = f"file://{tmp_path}/notebook"
    notebook.run(f"%config NbDist.checkpoints = {where!r}")
    notebook.run("%%distribute -n 1\n" + MODEL)
    notebook.run("%%distribute\n" + START.format(""))
    assert "base: saved in" in notebook.run("%nbdist save base --wait").text
    assert f"{where}: 1 checkpoint\n" in notebook.run("%nbdist checkpoints").text
    assert "base (step 4" in notebook.run("%nbdist load base").text
    other = f"file://{tmp_path}/other"
    notebook.run(f"%nbdist save best --wait --dir {other}")
    assert "best: step 4" in notebook.run(f"%nbdist checkpoints --dir {other}").text
    assert "best (step 4" in notebook.run(f"%nbdist load {other}/best").text
    assert [one.name for one in checkpoint.storage_for(Url(other)).list_checkpoints()] == ["best"]
    assert not Path(os.fspath(tmp_path / "checkpoints")).exists()


@pytest.mark.nightly
def test_a_living_session_goes_to_another_place(notebook: LiveKernel, tmp_path: Path) -> None:
    first, second = tmp_path / "first", f"file://{tmp_path}/second"
    notebook.run(f"%config NbDist.checkpoints = {str(first)!r}")
    notebook.run("%%distribute -n 2\n" + MODEL)
    notebook.run("%%distribute\n" + START.format(""))
    assert f"s to {first}; training" in notebook.run("%nbdist save one --wait").text
    moved = notebook.run(f"%config NbDist.checkpoints = {second!r}")
    assert f"checkpoints are now saved to {second}" in moved.text
    assert f"{second}: 0 checkpoints" in notebook.run("%nbdist checkpoints").text
    assert f"s to {second}; training" in notebook.run("%nbdist save two --wait").text
    notebook.run("%%distribute\nsave('three')")
    notebook.run("%nbdist save four --wait")  # waits for the one before
    there = checkpoint.storage_for(Url(second)).list_checkpoints()
    assert sorted(one.name for one in there) == ["four", "three", "two"]
    assert "two (step 4" in notebook.run("%nbdist load two").text
    refused = notebook.run("%config NbDist.checkpoints = 'file://'")
    assert "does not name a folder" in refused.text
    notebook.run("%nbdist restart")
    assert f"{second}: 3 checkpoints" in notebook.run("%nbdist checkpoints").text
    notebook.run("%config NbDist.checkpoints = None")
    notebook.run("%%distribute\n" + MODEL)
    notebook.run("%%distribute\n" + START.format("") + "\nsave('five')")
    assert " s; training" in notebook.run("%nbdist save six --wait").text
    beside = notebook.run("%nbdist checkpoints").text
    assert "/checkpoints: 2 checkpoints" in beside
    assert "five: step 4" in beside
    assert "applies to the next session" in notebook.run("%config NbDist.nproc = 3").text
    notebook.run("%nbdist stop")
    notebook.run(f"%config NbDist.checkpoints = {second!r}")
    assert f"{second}: 3 checkpoints" in notebook.run("%nbdist checkpoints").text


@pytest.mark.parametrize("given", ["", " ", "file://", "s3://"])
def test_no_place_is_refused(given: str) -> None:
    with pytest.raises(CheckpointError, match="folder"):
        Session(nproc=1, checkpoints=given)
