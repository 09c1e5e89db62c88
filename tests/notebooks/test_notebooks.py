"""The shipped notebooks run from start to finish on two CPU ranks, as a user runs them."""

from __future__ import annotations

import os
import re
import secrets
from typing import TYPE_CHECKING

import psutil
import pytest

from nbdist.panel import protocol
from tests.notebooks import more_machines
from tests.notebooks.run_notebook import ROOT, cell, executed, mimes, text
from tests.two_nodes import Hosts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MARK = "NBDIST_TEST_NOTEBOOK"
BACKENDS = ("ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp")


@pytest.fixture(autouse=True)
def cpu_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels that find no GPU, ask no hub, and write nothing into the home folder."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))


@pytest.fixture(autouse=True)
def nothing_left(cpu_ranks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # noqa: ARG001
    """Fail when a process that came of the test outlives it."""
    mark = secrets.token_hex(8)
    monkeypatch.setenv(MARK, mark)
    yield
    left = [process for process in psutil.process_iter() if carries(process, mark)]
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive


@pytest.fixture
def bundle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A front end for the panel: nobody looks at it, and Node need not be here."""
    if protocol.has_built_assets():
        return
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "panel.js").write_text("export default () => ({ render() {} });")
    (tmp_path / "panel.css").write_text("")
    (tmp_path / "sitecustomize.py").write_text(
        "import pathlib, nbdist.panel.protocol as bundled\n"
        f"bundled.SCRIPT = pathlib.Path({str(tmp_path / 'panel.js')!r})\n"
        "bundled.STYLE = bundled.SCRIPT.with_suffix('.css')\n"
    )


def carries(process: psutil.Process, mark: str) -> bool:
    """Whether a process inherited the test's environment; orphans are found, too."""
    try:
        return process.pid != os.getpid() and process.environ().get(MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


@pytest.mark.timeout(300)
def test_first_cell() -> None:
    notebook = executed("01_first_cell.ipynb")
    assert "rank 0 of 2" in text(notebook, "hello")
    assert "rank 1 of 2" in text(notebook, "hello")
    assert text(notebook, "same").count("all of us know the world size: 2") == 1
    assert "(False, False)" in text(notebook, "here")
    assert "step 240" in text(notebook, "train")
    assert "image/png" in mimes(notebook, "plot")
    assert text(notebook, "read").startswith("    def __init__(self")
    assert text(notebook, "mistake").count("KeyError") >= 1
    assert "known here: False" in text(notebook, "after")


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_every_backend() -> None:
    notebook = executed("02_every_backend.ipynb")
    assert "DistributedDataParallel" in text(notebook, "train")
    again = text(notebook, "again")
    assert again.count("DeepSpeedEngine") >= 3
    assert "FullyShardedDataParallel" in again
    assert "FSDPLlamaForCausalLM" in again
    assert "image/png" in mimes(notebook, "plot")
    table = cell(notebook, "table").outputs[0].data["text/markdown"]
    assert all(f"`{backend}`" in table for backend in BACKENDS)


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_trainer() -> None:
    notebook = executed("03_trainer.ipynb")
    assert "FSDP" in text(notebook, "train")
    assert "image/png" in mimes(notebook, "plot")
    bits = float(text(notebook, "plot").split(" bits per byte of files")[0].split()[-1])
    assert 1 < bits < 5


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_will_it_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # plan with the defaults
    notebook = executed("04_will_it_fit.ipynb")
    assert "the fastest that fits" in text(notebook, "seven")
    assert "text/html" in mimes(notebook, "seven")
    assert "what would help" in text(notebook, "eight")
    assert "--offload cpu" in text(notebook, "fits")
    assert text(notebook, "seventy").count("fits: False") == 2
    assert "auto: " in text(notebook, "auto")
    all_tensors = r"all tensors +\S+ MiB +(\S+) MiB"
    before, after = (re.findall(all_tensors, text(notebook, c)) for c in ("check", "check-smaller"))
    assert float(after[0]) < 0.5 * float(before[0])
    assert "CPU ranks" in text(notebook, "here")
    assert "L4" in text(notebook, "there")


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_switch() -> None:
    notebook = executed("05_switch.ipynb")
    assert "ddp -> fsdp2 in" in text(notebook, "to-fsdp")
    wrapped = {
        "begin": "DistributedDataParallel",
        "fsdp": "FSDPLlamaForCausalLM",
        "to-zero-three": "DeepSpeedEngine",
        "to-zero-one": "DeepSpeedEngine",
        "back": "DistributedDataParallel",
    }
    for name, kind in wrapped.items():
        assert kind in text(notebook, name)
    assert "image/png" in mimes(notebook, "curve")
    assert "largest difference of 50 losses" in text(notebook, "difference")


@pytest.mark.nightly
def test_debug() -> None:
    notebook = executed("10_debug.ipynb")
    assert "[0] (0, False, set())" in text(notebook, "where")
    assert "[1] (1, True, {9})" in text(notebook, "where")
    assert "[1] [[[1, 5]]]" in text(notebook, "element")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_fine_tune() -> None:
    notebook = executed("09_fine_tune.ipynb")
    assert "Loaded 21 of 49 weights of PeftModel as shards" in text(notebook, "train")
    for word in ("HELLO", "WORLD", "PYTHON", "TORCH"):
        assert f"{word}!" in text(notebook, "answers")
    assert "DeepSpeedEngine" in text(notebook, "again")
    assert "frozen parameters (208 KiB) are stored by reference" in text(notebook, "save")
    assert "MERGED!" in text(notebook, "merged-answer")


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "cell_id", "shown"),
    [
        ("11_vision.ipynb", "train", "of 999 test pictures"),
        (
            "12_plain_torch.ipynb",
            "shard",
            "a weight of shape (64, 2) of which this rank has (32, 2)",
        ),
        ("13_embeddings.ipynb", "search", "threading.Barrier: "),
        ("14_to_slurm.ipynb", "script", "not in the script: cell 4, which failed with NameError"),
    ],
)
def test_recipes(name: str, cell_id: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "train.py").touch()  # as after an earlier run of notebook 14
    notebook = executed(name, folder=tmp_path)
    assert shown in text(notebook, cell_id)
    assert "image/png" in mimes(notebook, "plot")


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_panel_is_saved_as_a_page_without_script(bundle: None) -> None:  # noqa: ARG001
    notebook = executed("08_panel.ipynb")
    (shown,) = cell(notebook, "panel").outputs
    assert set(shown.data) == {"text/html", "text/plain"}  # no widget is left
    page = shown.data["text/html"]
    for word in ("stopped", "fsdp2", "switch: ", "loss: ", "at step 152", "tokens_per_s", "llama"):
        assert word in page, word
    assert "<script" not in page
    assert "widgets" not in notebook.metadata
    assert "fsdp2" in text(notebook, "text")
    assert "switch: ddp \N{RIGHTWARDS ARROW} fsdp2" in text(notebook, "text")


@pytest.mark.timeout(300)
@pytest.mark.alone
def test_make_it_faster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # what this learns is of a busy machine
    notebook = executed("06_make_it_faster.ipynb")
    assert "input-bound" in text(notebook, "first")
    # how many depends on how fast this machine computes beside its loader
    assert re.search(r"1\. num_workers=\d+: about", text(notebook, "first"))
    assert "predicted" in text(notebook, "workers")  # beside what was measured
    assert "text/html" in mimes(notebook, "plain")
    assert "image/png" in mimes(notebook, "plot")
    factors = re.findall(r"([\d.]+) x", text(notebook, "table"))
    assert len(factors) == 4
    assert float(factors[-1]) >= 1.5, text(notebook, "table")


STAND_IN = """
import sys
sys.path.insert(0, {root!r})
from tests.doubles import two_hosts
two_hosts.stand_in({prefix!r})
"""


@pytest.fixture
def alpha(tmp_path: Path) -> Iterator[list[str]]:
    """Begins a command on the first of two hosts, where `--on ray` of a kernel means both."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    hosts = Hosts()
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    code = STAND_IN.format(root=str(ROOT), prefix=hosts.prefix)
    (startup / "two_hosts.py").write_text(code)
    try:
        hosts.__enter__()
    except OSError as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    try:
        yield hosts.inside("alpha")
    finally:
        hosts.__exit__()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_more_machines(alpha: list[str], tmp_path: Path) -> None:
    more_machines.passes(tmp_path, within=alpha)
