"""`python -m nbdist.setup FOLDER` creates a virtual environment with everything that ranks need.

For a notebook whose own packages are too old or must not change. Run again after an interrupt, it
continues: pip keeps what is installed, and its downloads.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from nbdist import rank_python
from nbdist.errors import OptionError, StartError
from nbdist.hardware import amd, discovery

if TYPE_CHECKING:
    from collections.abc import Sequence

TORCH_INDEX = "https://download.pytorch.org/whl/"
BUILDS = ("pypi", "cpu", "cu126", "cu128")
"""Builds of torch: that of PyPI, for current drivers, and those of ``TORCH_INDEX``."""


def main(arguments: Sequence[str] | None = None) -> str | None:
    """Create the environment; return an error message, or None."""
    parser = argparse.ArgumentParser(prog="python -m nbdist.setup", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the environment")
    parser.add_argument("--torch", choices=BUILDS, help="build of torch; default: for the GPUs")
    options = parser.parse_args(arguments)
    folder = options.folder.expanduser().absolute()
    again = "Run the same command again to continue"
    try:
        if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
            return f"nbdist: {folder} is not a virtual environment. Give a new folder."
        install(folder, options.torch or choose_build())
    except KeyboardInterrupt:
        return f"nbdist: interrupted. {again}."
    except subprocess.CalledProcessError as error:
        return f"nbdist: pip failed with exit code {error.returncode}; see above. {again}."
    except OSError as error:
        return f"nbdist: {folder} cannot be used: {error.strerror}. Give another folder."
    except (OptionError, StartError) as error:
        return f"nbdist: {error}"
    print(f'nbdist: ready. In the notebook:\n\n    %config NbDist.python = "{folder}"\n')  # noqa: T201
    return None


def install(folder: Path, build: str) -> None:
    """Create the environment and install torch, the other packages of ranks, and DeepSpeed.

    Raises:
        OSError: the folder cannot be created.
        CalledProcessError: pip failed.
    """
    required = rank_python.KERNEL_PYTHON.requirements("ranks")
    torch = [line for line in required if Requirement(line).name == "torch"]
    # a torch outside of any environment, such as Colab's, is used and not installed twice
    shared = sys.prefix == sys.base_prefix and not [
        *rank_python.unmet_requirements(rank_python.KERNEL_PYTHON.version_of, torch)
    ]
    _show(1, f"creating {folder}")
    has_pip = importlib.util.find_spec("pip") is not None
    venv.create(folder, with_pip=not has_pip, system_site_packages=shared, symlinks=True)
    index = [] if build == "pypi" else ["--index-url", TORCH_INDEX + build]
    _show(2, "torch: reusing the one of this Python" if shared else f"torch, build for {build}")
    _pip(folder, *torch, *([] if shared else index))
    conflicts = "; conflicts that pip reports with packages of this Python have no effect"
    _show(3, "pip, and the other packages of ranks" + conflicts * shared)
    _pip(folder, "pip", *required)
    _show(4, "DeepSpeed, for the zero backends")
    try:
        _pip(folder, *rank_python.KERNEL_PYTHON.requirements("deepspeed"))
    except subprocess.CalledProcessError:
        _show(4, "DeepSpeed cannot be installed here: the zero backends are not available")
    rank_python.find(folder).check()


def choose_build() -> str:
    """Return the build of torch for the GPUs and the driver of this machine.

    Raises:
        OptionError: the driver is too old for all builds, or the GPUs are AMD's.
    """
    gpus, cuda = discovery.discover_machine().gpus, discovery.driver_cuda_version()
    if gpus and amd.is_rocm():
        raise OptionError(
            "nbdist.setup cannot select a ROCm build of torch. Install one in an environment of"
            " your own, and set NbDist.python to it."
        )
    if not gpus or cuda is None:
        return "cpu"
    if cuda < (12, 0):
        raise OptionError(f"The driver is for CUDA {cuda[0]}; torch needs 12. Upgrade the driver.")
    weakest = min(gpu.capability for gpu in gpus)
    # CUDA 13 has no code for GPUs before Turing, and torch's CUDA 12.8 none before Volta
    if cuda >= (13, 0) and weakest >= (7, 5):
        return "pypi"
    return "cu128" if cuda >= (12, 8) and weakest >= (7, 0) else "cu126"


def _pip(folder: Path, *arguments: str) -> None:
    python = str(folder / "bin" / "python")
    has_pip = importlib.util.find_spec("pip") is not None
    pip = [sys.executable, "-m", "pip", "--python", python] if has_pip else [python, "-m", "pip"]
    subprocess.run([*pip, "install", *arguments], check=True)  # noqa: S603 - the user's own pip


def _show(step: int, text: str) -> None:
    print(f"nbdist: [{step}/4] {text}", flush=True)  # noqa: T201 - a command's progress


if __name__ == "__main__":
    sys.exit(main())
