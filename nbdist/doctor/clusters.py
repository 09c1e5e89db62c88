"""Checks of Ray and Slurm as seen from this kernel, and of Ray's token authentication."""

from __future__ import annotations

import os
import shutil
from importlib import metadata
from typing import TYPE_CHECKING

from nbdist.doctor.finding import note, ok, redacted_variable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.doctor.finding import Finding

TOPIC = "clusters"
RAY_TOKEN_AUTH_MODE = "token"  # noqa: S105 - the name of a mode, not a secret


def check_clusters(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield findings about the clusters that `--on` can use here. Opens no connection."""
    findings = [*_ray(environ), *_slurm(environ)]
    yield from findings
    if not findings:
        yield ok(TOPIC, "neither Ray nor Slurm is installed; see docs/clusters.md")


def _ray(environ: Mapping[str, str]) -> Iterator[Finding]:
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        return
    address = environ.get("RAY_ADDRESS")
    names = f", {redacted_variable('RAY_ADDRESS', address)}" if address else ""
    yield ok(TOPIC, f"Ray {version} for --on ray{names}")
    if address and environ.get("RAY_AUTH_MODE") != RAY_TOKEN_AUTH_MODE:
        says = "RAY_AUTH_MODE is not token: anyone who can reach the Ray cluster can run code on it"
        yield note(TOPIC, says, "start the cluster and Jupyter with RAY_AUTH_MODE=token")


def _slurm(environ: Mapping[str, str]) -> Iterator[Finding]:
    if shutil.which("srun") is None:
        return
    job = environ.get("SLURM_JOB_ID")
    where = f"uses the nodes of its job {job}" if job else "allocates its own nodes"
    yield ok(TOPIC, f"Slurm (srun) for --on slurm; {where}")
