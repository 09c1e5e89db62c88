"""Environment of launcher and ranks: the kernel's, without stale launch variables.

A notebook opened inside a Slurm job, under torchrun or after a `notebook_launcher` has RANK,
WORLD_SIZE or ACCELERATE_* variables of that launch.
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
        # nbdist: this notebook may itself have been started from a rank
        ("NBDIST_KERNEL", "NBDIST_RUN_DIR", "NBDIST_BULK_DIR", "NBDIST_RANK"),
        # ipykernel: parent and channels of the notebook's own kernel
        ("JPY_PARENT_PID", "JPY_SESSION_NAME", "JPY_INTERRUPT_EVENT"),
    )
    for name in names
)
STALE_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_")


def remove_launch_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `environ` without the variables of another launch."""
    return {
        name: value
        for name, value in environ.items()
        if name not in STALE_NAMES and not name.startswith(STALE_PREFIXES)
    }
