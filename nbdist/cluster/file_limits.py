"""How many file descriptors a session needs, against what this process may have.

Runs in the kernel, whose limit launcher and ranks inherit. Without room a rank dies in the
middle of a library, with a message about some file.
"""

from __future__ import annotations

import os
import resource

from nbdist.errors import StartError

KERNEL_BASE, KERNEL_EACH = 16, 6
"""What a session opens in the kernel, and again for each rank: sockets and their wake-up pipes."""
RANK_BASE, RANK_EACH = 128, 8
"""In a rank, whose torch, ipykernel and process group take 80, with some for loaders and data."""


def descriptors_needed(world_size: int) -> int:
    """Least limit (`ulimit -n`) under which a session of so many ranks can work."""
    here = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counted only
    kernel = here + KERNEL_BASE + KERNEL_EACH * world_size
    return max(kernel, RANK_BASE + RANK_EACH * world_size)


def descriptor_limit() -> int:
    """The soft limit of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def check_descriptors(world_size: int) -> None:
    """Refuse a start that would run out of file descriptors.

    Raises:
        StartError: the limit is too low.
    """
    limit, need = descriptor_limit(), descriptors_needed(world_size)
    if limit < need:
        ranks = "rank" if world_size == 1 else "ranks"
        raise StartError(
            f"{world_size} {ranks} need {need} file descriptors in a process and the limit is"
            f" {limit}; say `ulimit -n {_round_up(need)}` in the shell that starts Jupyter."
        )


def _round_up(need: int) -> int:
    """To a number that is usual and leaves room."""
    return max(1024, 1 << need.bit_length())
