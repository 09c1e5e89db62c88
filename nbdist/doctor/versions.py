"""Checks of the versions of nbdist's dependencies, and of known bad versions and builds."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from nbdist._version import __version__
from nbdist.doctor.finding import ok, problem
from nbdist.hardware import discovery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nbdist.doctor.finding import Finding

REPORTED_PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "ipykernel")
OPTIONAL_PACKAGES = frozenset({"deepspeed"})
TOPIC = "versions"

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
    """Compare the installed versions with nbdist's requirements.

    Args:
        version_of: returns the version of a package, or None if it is not installed.
        required: requirements in the format of `importlib.metadata.requires`.
        gpus: number of visible GPUs.
        driver_cuda: newest major CUDA version that the driver supports.
    """
    version_of = version_of or installed_version
    required = _required() if required is None else required
    gpus = len(discovery.discover_machine().gpus) if gpus is None else gpus
    driver_cuda = _driver_cuda() if driver_cuda is None else driver_cuda
    versions = {name: version_of(name) for name in REPORTED_PACKAGES}
    python = f"Python {platform.python_version()}, nbdist {__version__}"
    yield ok(TOPIC, ", ".join([python, *(_words(*package) for package in versions.items())]))
    yield from _unfit(version_of, required)
    yield from _known_bad(versions)
    yield from _wrong_build(version_of, gpus, driver_cuda)


def installed_version(package: str) -> str | None:
    """Return the version of an installed package without importing it, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _required() -> list[str]:
    """The requirements of nbdist; empty for a source tree that is not installed."""
    try:
        return importlib.metadata.requires("nbdist") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _words(name: str, version: str | None) -> str:
    return f"{name} {version}" if version else f"no {name}"


def _unfit(version_of: Callable[[str], str | None], required: Sequence[str]) -> Iterator[Finding]:
    """Requirements that are missing or have another version."""
    for line in required:
        try:
            requirement = Requirement(line)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            version = version_of(requirement.name)
            fits = version is not None and requirement.specifier.contains(version, prereleases=True)
        except (InvalidRequirement, InvalidVersion):
            continue  # a custom build: its version cannot be compared
        if not fits:
            state = (
                f"{requirement.name} {version} is installed"
                if version
                else f"no {requirement.name}"
            )
            hint = (
                ""
                if requirement.name not in OPTIONAL_PACKAGES
                else "; only the zero backends need it"
            )
            yield problem(
                TOPIC,
                f"{state}, but nbdist requires {requirement.name}{requirement.specifier}{hint}",
                f'pip install "{requirement.name}{requirement.specifier}"',
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
                TOPIC, f"{name} before {first_good} {defect}; version {version} is installed", do
            )


def _wrong_build(
    version_of: Callable[[str], str | None], gpus: int, driver_cuda: int | None
) -> Iterator[Finding]:
    """Report a torch build that cannot use the GPUs."""
    torch = version_of("torch") or ""
    if not gpus:
        return
    choose = "install the torch for your driver: https://pytorch.org/get-started/locally"
    if torch.endswith("+cpu"):
        yield problem(
            TOPIC, f"torch {torch} is built for CPUs, but this machine has {gpus} GPUs", choose
        )
        return
    cuda = _cuda_of(torch, version_of)
    if cuda is not None and driver_cuda is not None and driver_cuda < cuda:
        says = f"torch {torch} is built for CUDA {cuda}, but the driver supports CUDA {driver_cuda}"
        yield problem(TOPIC, says, f"upgrade the driver, or {choose}")


def _cuda_of(torch: str, version_of: Callable[[str], str | None]) -> int | None:
    """Major CUDA version that torch was built for; None if unknown."""
    if built := re.search(r"\+cu([0-9]{2})", torch):
        return int(built[1])
    for package in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        if version := version_of(package):
            return int(version.split(".")[0])
    return None


def _driver_cuda() -> int | None:
    nvml = discovery.import_pynvml()
    if nvml is None:
        return None
    try:
        with discovery.open_nvml(nvml):
            return int(nvml.nvmlSystemGetCudaDriverVersion_v2()) // 1000
    except nvml.NVMLError:
        return None
