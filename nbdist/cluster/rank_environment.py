"""The environment that launcher and ranks get: the kernel's, without stale launch variables.

Pure. A notebook opened inside a Slurm job, under torchrun or after an earlier
`notebook_launcher` carries RANK, WORLD_SIZE or ACCELERATE_* of something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

STALE_NAMES = frozenset(
    name
    for names in (
        # torch elastic, MPI launchers, DeepSpeed
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "NODE_RANK"),
        ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
        ("MASTER_ADDR", "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE"),
        # nbdist: this notebook may itself have been started on a rank
        ("NBDIST_KERNEL", "NBDIST_RUN_DIR", "NBDIST_BULK_DIR", "NBDIST_RANK"),
        # ipykernel: the notebook's own parent and channels are not the rank's
        ("JPY_PARENT_PID", "JPY_SESSION_NAME", "JPY_INTERRUPT_EVENT"),
    )
    for name in names
)
STALE_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_")


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """Copy of `environ` without what another launcher left in it."""
    return {
        name: value
        for name, value in environ.items()
        if name not in STALE_NAMES and not name.startswith(STALE_PREFIXES)
    }
