"""The devices to plan for: those described in words, or those of this machine."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from nbdist import machine
from nbdist.plan import described, devices
from nbdist.plan.devices import Cluster
from nbdist.plan.known import Known

if TYPE_CHECKING:
    from collections.abc import Collection


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
        made = described.parse(given)
    return made if world_size in {None, made.world_size} else made.resized(world_size)


def found(
    world_size: int | None = None,
    *,
    kind: Literal["cuda", "cpu"] | None = None,
    own: Collection[int] = (),
    nodes: int = 1,
) -> Cluster:
    """The GPUs of this machine with what is free on each now; without any, CPU ranks.

    What was measured here counts before what the catalogue says.

    Args:
        world_size: number of CPU ranks; on several machines of all ranks.
        kind: "cpu" for CPU ranks although there are GPUs.
        own: processes whose GPU memory counts as free: ranks that a plan would replace.
        nodes: machines that the ranks are on; the others are taken to be like this one.
    """
    if nodes > 1 and world_size is not None:
        each = world_size // nodes
        one = found(each, kind=kind, own=own)
        one = one if one.world_size == each else one.resized(each)
        return one.on_nodes(nodes, world_size)
    there = machine.found()
    if kind == "cpu":
        there = replace(there, gpus=(), link=None)
    made = devices.of_machine(
        there,
        machine.usage(there, own=own),
        cpu_ranks=world_size or machine.CPU_RANKS,
        host_free_bytes=machine.host_free_bytes(),
    )
    return made.informed(Known(machine.host(there)))


def say(text: str) -> None:
    """Show the progress of a trace."""
    print(f"nbdist: {text}", file=sys.stderr)  # noqa: T201 - for the one who waits
