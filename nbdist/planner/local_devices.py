"""The devices to plan for: those described in words, or those of this machine."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from nbdist.hardware import discovery
from nbdist.planner import cluster_spec, device_parser
from nbdist.planner.cluster_spec import Cluster
from nbdist.planner.measurement_store import Known

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from nbdist.hardware.discovery import Node, Usage


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
        made = device_parser.parse(given)
    return made if world_size in {None, made.world_size} else made.resized(world_size)


def found(
    world_size: int | None = None,
    *,
    kind: Literal["cuda", "cpu"] | None = None,
    own: Collection[int] = (),
) -> Cluster:
    """The GPUs of this machine with what is free on each now; without any, CPU ranks.

    What was measured here counts before what the catalogue says.

    Args:
        world_size: number of CPU ranks.
        kind: "cpu" for CPU ranks although there are GPUs.
        own: processes whose GPU memory counts as free: ranks that a plan would replace.
    """
    there = discovery.found()
    if kind == "cpu":
        there = replace(there, gpus=(), link=None)
    made = cluster_spec.of_machine(
        there,
        discovery.usage(there, own=own),
        cpu_ranks=world_size or discovery.CPU_RANKS,
        host_free_bytes=discovery.host_free_bytes(),
    )
    return made.informed(Known(discovery.host(there)))


def on_nodes(told: Sequence[tuple[Node, Sequence[Usage], int]]) -> Cluster:
    """The nodes of a session, one device for each of their ranks, with what is free on each now.

    Args:
        told: each node, the memory of its GPUs, and the host memory that is free on it.
    """
    clusters = {
        node.name: cluster_spec.of_machine(
            node.machine, usage, cpu_ranks=len(node.ranks), host_free_bytes=host_free_bytes
        )
        for node, usage, host_free_bytes in told
    }
    hosts = dict.fromkeys(discovery.host(node.machine) for node, *_ in told)
    return cluster_spec.of_nodes(clusters).informed(Known(" and ".join(hosts)))


def say(text: str) -> None:
    """Show the progress of a trace."""
    print(f"nbdist: {text}", file=sys.stderr)  # noqa: T201 - for the one who waits
