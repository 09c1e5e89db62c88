"""Ray and Slurm as this kernel would use them: what is there, and whether Ray asks for a token."""

from __future__ import annotations

import os
import shutil
from importlib import metadata
from typing import TYPE_CHECKING

from nbdist.doctor.finding import note, ok, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.doctor.finding import Finding

TOPIC = "clusters"
TOKEN = "token"  # noqa: S105 - the name of a mode


def look(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Say what `--on` can name here; connects to nothing."""
    found = [*_ray(environ), *_slurm(environ)]
    yield from found
    if not found:
        yield ok(TOPIC, "neither Ray nor Slurm here; docs/clusters.md says how to use them")


def _ray(environ: Mapping[str, str]) -> Iterator[Finding]:
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        return
    address = environ.get("RAY_ADDRESS")
    names = f", {shown('RAY_ADDRESS', address)}" if address else ""
    yield ok(TOPIC, f"Ray {version} for --on ray{names}")
    if address and environ.get("RAY_AUTH_MODE") != TOKEN:
        says = (
            "RAY_AUTH_MODE is not token: whoever reaches a Ray cluster without one runs code there"
        )
        yield note(TOPIC, says, "start the cluster and Jupyter with RAY_AUTH_MODE=token")


def _slurm(environ: Mapping[str, str]) -> Iterator[Finding]:
    if shutil.which("srun") is None:
        return
    job = environ.get("SLURM_JOB_ID")
    where = f"inside its job {job}, whose nodes it uses" if job else "it asks for nodes of its own"
    yield ok(TOPIC, f"Slurm's srun for --on slurm; {where}")
