"""`python -m nbdist.setup`: which build of torch a machine gets, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nbdist import setup
from nbdist.errors import OptionError
from nbdist.hardware import discovery

if TYPE_CHECKING:
    from pathlib import Path


def build_for(
    monkeypatch: pytest.MonkeyPatch, cuda: tuple[int, int], *capabilities: tuple[int, int]
) -> str:
    gpus = tuple(
        discovery.Gpu(name="GPU", uuid=f"GPU-{n}", memory_bytes=1 << 34, capability=each)
        for n, each in enumerate(capabilities)
    )
    machine = discovery.Machine(gpus=gpus, num_cpus=2)
    monkeypatch.setattr(discovery, "discover_machine", lambda: machine)
    monkeypatch.setattr(discovery, "driver_cuda_version", lambda: cuda)
    return setup.choose_build()


@pytest.mark.parametrize(
    ("cuda", "capability", "build"),
    [
        ((13, 0), (7, 5), "pypi"),  # Colab's and Kaggle's T4
        ((13, 0), (7, 0), "cu128"),  # V100
        ((13, 0), (6, 0), "cu126"),  # P100
        ((12, 8), (9, 0), "cu128"),
        ((12, 4), (8, 0), "cu126"),
    ],
)
def test_the_build_fits_driver_and_gpu(
    monkeypatch: pytest.MonkeyPatch,
    cuda: tuple[int, int],
    capability: tuple[int, int],
    build: str,
) -> None:
    assert build_for(monkeypatch, cuda, capability, (9, 0)) == build


def test_a_machine_without_gpus_gets_the_build_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_for(monkeypatch, (13, 0)) == "cpu"


def test_an_old_driver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="is for CUDA 11; torch needs 12"):
        build_for(monkeypatch, (11, 4), (7, 5))


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    message = setup.main([str(tmp_path)])
    assert message is not None
    assert message.endswith("is not a virtual environment. Give a new folder.")
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    message = setup.main([str(tmp_path / "notes.txt")])
    assert message is not None
    assert "notes.txt cannot be used: Not a directory." in message
