"""The devices to plan for: those described in words, or those of this machine."""

from __future__ import annotations

import sys

from nbdist import machine
from nbdist.plan import devices
from nbdist.plan.devices import Cluster


def cluster(given: str | Cluster | None, world_size: int | None) -> Cluster:
    """The devices that the user means, one for each rank.

    Args:
        given: words, a cluster, or None for what is found here.
        world_size: number of ranks, where it is not the number of devices.

    Raises:
        PlanError: words that name no device.
    """
    if isinstance(given, Cluster):
        made = given
    elif given is None:
        made = found(world_size)
    else:
        made = devices.parse(given)
    return made if world_size in {None, made.world_size} else made.resized(world_size)


def found(world_size: int | None = None) -> Cluster:
    """The GPUs of this machine with what is free on each now; without any, CPU ranks."""
    there = machine.found()
    return devices.of_machine(
        there,
        machine.usage(there),
        cpu_ranks=world_size or machine.CPU_RANKS,
        host_free_bytes=machine.host_free_bytes(),
    )


def say(text: str) -> None:
    """Show the progress of a trace."""
    print(f"nbdist: {text}", file=sys.stderr)  # noqa: T201 - for the one who waits
