"""Checks of installed software: versions, wrong builds, compilers, clusters, the front end."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from importlib import metadata
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from nbdist import rank_python
from nbdist._version import __version__
from nbdist.cluster.allocation import format_names
from nbdist.doctor.finding import note, ok, problem, redacted_variable
from nbdist.hardware import deepspeed_requirements, discovery
from nbdist.panel import protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nbdist.doctor.finding import Finding

REPORTED_PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "ipykernel")
OPTIONAL_PACKAGES = frozenset({"deepspeed"})

KNOWN_BAD_VERSIONS: tuple[tuple[str, str, str, str], ...] = (
    (
        "torch",
        "2.6",
        "runs code contained in a checkpoint, even with weights_only (CVE-2025-32434)",
        "upgrade torch; until then do not load untrusted files",
    ),
    (
        "torch",
        "2.10",
        "can write out of bounds when it loads a checkpoint (CVE-2026-24747)",
        "upgrade torch; until then do not load untrusted files",
    ),
    (
        "transformers",
        "5.0.0rc3",
        "unpickles rng_state.pth when a Trainer resumes (CVE-2026-1839)",
        "upgrade transformers; until then do not resume from untrusted folders",
    ),
)
"""Package, first fixed version, defect of the versions before it, remedy."""


def check_versions(
    version_of: Callable[[str], str | None] | None = None,
    *,
    required: Sequence[str] | None = None,
    gpus: int | None = None,
    driver_cuda: int | None = None,
) -> Iterator[Finding]:
    """Compare the versions that are installed for the ranks with nbdist's requirements.

    Args:
        version_of: returns the version of a package, or None if it is not installed.
        required: requirements in the format of `importlib.metadata.requires`.
        gpus: number of visible GPUs.
        driver_cuda: newest major CUDA version that the driver supports.
    """
    ranks = rank_python.selected()
    version_of = version_of or ranks.version_of
    required = ranks.requirements("ranks", "deepspeed") if required is None else required
    gpus = len(discovery.discover_machine().gpus) if gpus is None else gpus
    if driver_cuda is None and (driver := discovery.driver_cuda_version()):
        driver_cuda = driver[0]
    versions = {name: version_of(name) for name in REPORTED_PACKAGES}
    python = f"Python {platform.python_version()}, nbdist {__version__}"
    if not ranks.is_own:
        python += f", ranks: Python {ranks.version} ({ranks.executable})"
    packages = [
        f"{name} {version}" if version else f"no {name}" for name, version in versions.items()
    ]
    yield ok("versions", ", ".join([python, *packages]))
    yield from _unmet_requirements(version_of, required)
    yield from _known_bad(versions)
    yield from _wrong_build(version_of, gpus, driver_cuda)


def _unmet_requirements(
    version_of: Callable[[str], str | None], required: Sequence[str]
) -> Iterator[Finding]:
    """Requirements that are missing or have another version."""
    ranks = rank_python.selected()
    pip = "pip install" if ranks.is_own else f"{ranks.executable} -m pip install"
    keep = f", or `{rank_python.SETUP}`, which changes nothing here" if ranks.is_own else ""
    for requirement, version in rank_python.unmet_requirements(version_of, required):
        name = requirement.name
        state = f"{name} {version} is installed" if version else f"no {name}"
        hint = "; only the zero backends need it" if name in OPTIONAL_PACKAGES else ""
        yield problem(
            "versions",
            f"{state}, but nbdist requires {name}{requirement.specifier}{hint}",
            f'{pip} "{name}{requirement.specifier}"{keep if version else ""}',
        )


def _known_bad(versions: Mapping[str, str | None]) -> Iterator[Finding]:
    for name, first_good, defect, do in KNOWN_BAD_VERSIONS:
        version = versions[name]
        try:
            bad = version is not None and Version(version) < Version(first_good)
        except InvalidVersion:
            bad = False
        if bad:
            yield problem(
                "versions",
                f"{name} before {first_good} {defect}; version {version} is installed",
                do,
            )


def _wrong_build(
    version_of: Callable[[str], str | None], gpus: int, driver_cuda: int | None
) -> Iterator[Finding]:
    torch = version_of("torch") or ""
    if not gpus:
        return
    choose = "install the torch for your driver: https://pytorch.org/get-started/locally"
    if torch.endswith("+cpu"):
        yield problem(
            "versions", f"torch {torch} is built for CPUs, but this machine has {gpus} GPUs", choose
        )
        return
    # The major CUDA version that torch was built for; None if unknown.
    built = re.search(r"\+cu([0-9]{2})", torch)
    cuda = int(built[1]) if built else None
    for package in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        if cuda is None and (version := version_of(package)):
            cuda = int(version.split(".")[0])
    if cuda is not None and driver_cuda is not None and driver_cuda < cuda:
        message = (
            f"torch {torch} is built for CUDA {cuda}, but the driver supports CUDA {driver_cuda}"
        )
        yield problem("versions", message, f"upgrade the driver, or {choose}")


def check_compilers(kind: str | None = None) -> Iterator[Finding]:
    """Check for the compiler, ninja, libaio and the CUDA toolkit, which only offload needs.

    Args:
        kind: device type of the ranks. Default: that of a new session.
    """
    kind = kind or ("cuda" if discovery.discover_machine().gpus else "cpu")
    missing = deepspeed_requirements.missing_requirements(
        ["cpu_adam", deepspeed_requirements.NVME_OP], kind
    )
    tools = "compiler, ninja, libaio and nvcc" if kind == "cuda" else "compiler, ninja and libaio"
    if missing:
        yield note(
            "compilers",
            f"some offload ops of the zero backends cannot be compiled here: {missing}",
            "no action needed, unless you use --offload",
        )
    else:
        yield ok("compilers", f"{tools} are installed, for --offload")
    if locks := deepspeed_requirements.stale_build_locks():
        message = (
            "left by killed builds; the next build of these ops waits forever:"
            f" {format_names(locks)}"
        )
        yield note("build locks", message, f"rm {' '.join(map(str, locks))}")


def check_notebook() -> Iterator[Finding]:
    """Check what the live panel needs."""
    missing = [
        name for name in ("anywidget", "ipywidgets") if importlib.util.find_spec(name) is None
    ]
    instead = "%nbdist panel shows a static page instead"
    if missing:
        message = f"{', '.join(missing)} not installed: {instead}"
        yield note("panel", message, f"pip install {' '.join(missing)}, and restart the kernel")
    elif not protocol.has_built_assets():
        do = "reinstall nbdist without NBDIST_SKIP_FRONTEND"
        yield note("panel", f"the front end is not built: {instead}", do)
    else:
        message = "live in trusted notebooks (File > Trust Notebook); a static page elsewhere"
        yield ok("panel", message)
    if "ipykernel" not in sys.modules:
        yield ok("kernel", "none: this is a script, not a notebook")


def check_clusters(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield findings about the clusters that `--on` can use here. Opens no connection."""
    try:
        ray = metadata.version("ray")
    except metadata.PackageNotFoundError:
        ray = ""
    address = environ.get("RAY_ADDRESS")
    if ray:
        names = f", {redacted_variable('RAY_ADDRESS', address)}" if address else ""
        yield ok("clusters", f"Ray {ray} for --on ray{names}")
    if ray and address and environ.get("RAY_AUTH_MODE") != "token":
        message = (
            "RAY_AUTH_MODE is not token: anyone who can reach the Ray cluster can run code on it"
        )
        yield note("clusters", message, "start the cluster and Jupyter with RAY_AUTH_MODE=token")
    has_slurm = shutil.which("srun") is not None
    if has_slurm:
        job = environ.get("SLURM_JOB_ID")
        where = f"uses the nodes of its job {job}" if job else "allocates its own nodes"
        yield ok("clusters", f"Slurm (srun) for --on slurm; {where}")
    if not ray and not has_slurm:
        yield ok("clusters", "neither Ray nor Slurm is installed; see docs/clusters.md")
