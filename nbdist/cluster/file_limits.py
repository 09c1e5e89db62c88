"""Checks that the limit of file descriptors is high enough for a session.

Runs in the kernel; launcher and ranks inherit its limit. Without the check a rank fails inside some
library with an unrelated message.
"""

from __future__ import annotations

import os
import resource

from nbdist.errors import StartError

KERNEL_BASE, KERNEL_EACH = 16, 6
"""File descriptors of a session in the kernel, in total and per rank: sockets and wake-up pipes."""
RANK_BASE, RANK_EACH = 128, 8
"""File descriptors of a rank: torch, ipykernel and process group use 80; the rest is for data."""


def descriptors_needed(world_size: int) -> int:
    """Return the smallest limit (`ulimit -n`) for a session with this many ranks."""
    here = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only counted
    kernel = here + KERNEL_BASE + KERNEL_EACH * world_size
    return max(kernel, RANK_BASE + RANK_EACH * world_size)


def descriptor_limit() -> int:
    """Return the soft limit of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def check_descriptors(world_size: int) -> None:
    """Raise if a start would run out of file descriptors.

    Raises:
        StartError: the limit is too low.
    """
    limit, need = descriptor_limit(), descriptors_needed(world_size)
    if limit < need:
        ranks = "rank" if world_size == 1 else "ranks"
        raise StartError(
            f"{world_size} {ranks} need {need} file descriptors in a process and the limit is"
            f" {limit}. Run `ulimit -n {_round_up(need)}` in the shell that starts Jupyter."
        )


def _round_up(need: int) -> int:
    """Round up to a power of two with some reserve."""
    return max(1024, 1 << need.bit_length())
