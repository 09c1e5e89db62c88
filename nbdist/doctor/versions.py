"""Versions of what nbdist is built on, and combinations that are known to be bad."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

import nbdist
from nbdist.doctor.finding import ok, problem
from nbdist.hardware import discovery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nbdist.doctor.finding import Finding

SHOWN = ("torch", "accelerate", "deepspeed", "transformers", "ipykernel")
OPTIONAL = frozenset({"deepspeed"})
TOPIC = "versions"

KNOWN_BAD: tuple[tuple[str, str, str, str], ...] = (
    (
        "torch",
        "2.6",
        "runs code that is in a checkpoint, even under weights_only (CVE-2025-32434)",
        "upgrade torch, and load no file of a stranger until then",
    ),
    (
        "torch",
        "2.10",
        "can be made to write outside its memory by a checkpoint (CVE-2026-24747)",
        "upgrade torch, and load no file of a stranger until then",
    ),
    (
        "transformers",
        "5.0.0rc3",
        "unpickles rng_state.pth when a Trainer resumes (CVE-2026-1839)",
        "upgrade transformers, and resume from no folder of a stranger until then",
    ),
)
"""Package, first good version, what the versions before it do, what to do."""


def look(
    version_of: Callable[[str], str | None] | None = None,
    *,
    required: Sequence[str] | None = None,
    gpus: int | None = None,
    driver_cuda: int | None = None,
) -> Iterator[Finding]:
    """Compare what is installed with what nbdist relies on.

    Args:
        version_of: gives the version of a package, None where it is not installed.
        required: what nbdist relies on, as `importlib.metadata.requires` has it.
        gpus: how many are visible.
        driver_cuda: the newest CUDA that the GPUs' driver can serve, as its major number.
    """
    version_of = version_of or installed
    required = _required() if required is None else required
    gpus = len(discovery.found().gpus) if gpus is None else gpus
    driver_cuda = _driver_cuda() if driver_cuda is None else driver_cuda
    versions = {name: version_of(name) for name in SHOWN}
    python = f"Python {platform.python_version()}, nbdist {nbdist.__version__}"
    yield ok(TOPIC, ", ".join([python, *(_words(*one) for one in versions.items())]))
    yield from _unfit(version_of, required)
    yield from _known_bad(versions)
    yield from _wrong_build(version_of, gpus, driver_cuda)


def installed(package: str) -> str | None:
    """Version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _required() -> list[str]:
    """What nbdist relies on; nothing is known of a source tree that was not installed."""
    try:
        return importlib.metadata.requires("nbdist") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _words(name: str, version: str | None) -> str:
    return f"{name} {version}" if version else f"no {name}"


def _unfit(version_of: Callable[[str], str | None], required: Sequence[str]) -> Iterator[Finding]:
    """What is missing, or of a version that nbdist was not made for."""
    for line in required:
        try:
            wanted = Requirement(line)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            version = version_of(wanted.name)
            fits = version is not None and wanted.specifier.contains(version, prereleases=True)
        except (InvalidRequirement, InvalidVersion):
            continue  # a build of somebody's own: nothing can be said of it
        if not fits:
            has = f"{wanted.name} {version} is installed" if version else f"no {wanted.name}"
            what = "" if wanted.name not in OPTIONAL else "; only the zero backends need it"
            yield problem(
                TOPIC,
                f"{has}, and nbdist relies on {wanted.name}{wanted.specifier}{what}",
                f'pip install "{wanted.name}{wanted.specifier}"',
            )


def _known_bad(versions: Mapping[str, str | None]) -> Iterator[Finding]:
    for name, first_good, does, do in KNOWN_BAD:
        version = versions[name]
        try:
            bad = version is not None and Version(version) < Version(first_good)
        except InvalidVersion:
            bad = False
        if bad:
            yield problem(TOPIC, f"{name} before {first_good} {does}; here is {version}", do)


def _wrong_build(
    version_of: Callable[[str], str | None], gpus: int, driver_cuda: int | None
) -> Iterator[Finding]:
    """A torch that cannot use the GPUs that are here."""
    torch = version_of("torch") or ""
    if not gpus:
        return
    choose = "install the torch for your driver: https://pytorch.org/get-started/locally"
    if torch.endswith("+cpu"):
        yield problem(TOPIC, f"torch {torch} is built for CPUs and there are {gpus} GPUs", choose)
        return
    cuda = _cuda_of(torch, version_of)
    if cuda is not None and driver_cuda is not None and driver_cuda < cuda:
        says = f"torch {torch} is built for CUDA {cuda} and the driver serves CUDA {driver_cuda}"
        yield problem(TOPIC, says, f"upgrade the driver, or {choose}")


def _cuda_of(torch: str, version_of: Callable[[str], str | None]) -> int | None:
    """Major number of the CUDA that torch was built for; None where nothing tells."""
    if built := re.search(r"\+cu([0-9]{2})", torch):
        return int(built[1])
    for package in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        if version := version_of(package):
            return int(version.split(".")[0])
    return None


def _driver_cuda() -> int | None:
    nvml = discovery.pynvml()
    if nvml is None:
        return None
    try:
        with discovery.opened(nvml):
            return int(nvml.nvmlSystemGetCudaDriverVersion_v2()) // 1000
    except nvml.NVMLError:
        return None
