"""Resolves the devices to plan for: given as text, or detected on this machine."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from nbdist.hardware import discovery
from nbdist.planner import cluster_spec, device_parser
from nbdist.planner.cluster_spec import ClusterSpec
from nbdist.planner.measurements import MeasurementStore

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from nbdist.hardware.discovery import GpuFreeMemory, SessionNode


def resolve_cluster(given: str | ClusterSpec | None, world_size: int | None) -> ClusterSpec:
    """Return the requested devices, one per rank.

    Args:
        given: a description, a cluster, or None to detect the devices of this machine.
        world_size: number of ranks, if it differs from the number of devices.

    Raises:
        PlanError: an invalid description.
    """
    if isinstance(given, ClusterSpec):
        resolved = given
    elif given is None:
        resolved = detect_local_cluster(world_size)
    else:
        resolved = device_parser.parse_devices(given)
    return (
        resolved
        if world_size in {None, resolved.world_size}
        else resolved.with_num_ranks(world_size)
    )


def detect_local_cluster(
    world_size: int | None = None,
    *,
    kind: Literal["cuda", "cpu"] | None = None,
    own: Collection[int] = (),
) -> ClusterSpec:
    """Return the GPUs of this machine with their free memory; without GPUs, CPU ranks.

    Measurements on this machine take precedence over the catalogue.

    Args:
        world_size: number of CPU ranks.
        kind: "cpu" for CPU ranks even if there are GPUs.
        own: processes whose GPU memory counts as free: ranks that the plan would replace.
    """
    machine = discovery.discover_machine()
    if kind == "cpu":
        machine = replace(machine, gpus=(), link=None)
    detected = cluster_spec.cluster_for_machine(
        machine,
        discovery.gpu_memory_usage(machine, own=own),
        cpu_ranks=world_size or discovery.DEFAULT_CPU_RANKS,
        host_free_bytes=discovery.host_free_memory_bytes(),
    )
    return detected.with_measurements(MeasurementStore(discovery.host_fingerprint(machine)))


def cluster_for_session_nodes(
    readings: Sequence[tuple[SessionNode, Sequence[GpuFreeMemory], int]],
) -> ClusterSpec:
    """Return a session's nodes with one device per rank and the memory that is free.

    Args:
        readings: each node, the usage of its GPUs, and its free host memory.
    """
    clusters = {
        node.name: cluster_spec.cluster_for_machine(
            node.machine, usage, cpu_ranks=len(node.ranks), host_free_bytes=host_free_bytes
        )
        for node, usage, host_free_bytes in readings
    }
    hosts = dict.fromkeys(discovery.host_fingerprint(node.machine) for node, *_ in readings)
    return cluster_spec.cluster_for_nodes(clusters).with_measurements(
        MeasurementStore(" and ".join(hosts))
    )


def print_progress(text: str) -> None:
    """Print the progress of a trace to stderr."""
    print(f"nbdist: {text}", file=sys.stderr)  # noqa: T201 - shown to the waiting user
