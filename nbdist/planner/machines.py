"""Answers which machine is enough: the smallest number of each GPU on which a model fits."""

from __future__ import annotations

import bisect
from dataclasses import replace
from typing import TYPE_CHECKING

from nbdist.errors import PlanError
from nbdist.planner import search, target_devices
from nbdist.planner.cluster_spec import (
    DEFAULT_GPUS_PER_NODE,
    ClusterSpec,
    default_link,
    with_default_network,
)
from nbdist.planner.result import MachinePlan, MachineRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.planner.gpu_catalog import DeviceSpec
    from nbdist.planner.plan_types import PlanInput

DEFAULT_MAX_NODES = 4
DEFAULT_DEVICE = "A100-80GB"
"""Device whose kind and capabilities the model is described for."""
_COUNTS = (1, 2, 4, DEFAULT_GPUS_PER_NODE)
_COMMON = (
    "T4-16GB",
    "L4-24GB",
    "A10-24GB",
    "RTX4090-24GB",
    "V100-32GB",
    "A6000-48GB",
    "L40S-48GB",
    "A100-40GB",
    "A100-80GB",
    "H100-80GB",
    "H200-141GB",
    "B200-180GB",
)
"""GPUs to search unless the user names some."""


def find_machines(
    request: PlanInput, max_nodes: int, only: str | Sequence[str] | None
) -> MachinePlan:
    """Search the smallest machine of each GPU, with the strategy that a plan chooses there.

    Offload is left out unless the request fixes it, since the host memory is unknown.

    Args:
        request: the model and the fixed options; its cluster is ignored.
        max_nodes: largest number of nodes, of eight GPUs each.
        only: GPUs to search, as a list or separated by commas.

    Raises:
        PlanError: an unknown GPU, or a model that no backend supports.
    """
    target_devices.check_size(max_nodes * DEFAULT_GPUS_PER_NODE, f"max_nodes {max_nodes}")
    request = replace(request, fixed_options={"offload": "none", **request.fixed_options})
    names = only.split(",") if isinstance(only, str) else _COMMON if only is None else only
    names = [str(name).strip() for name in names] if isinstance(names, list | tuple) else []
    if not all(names) or not names:
        raise PlanError(f'only must name GPUs, such as "T4,L4,A10", got {only!r}.')
    named = [target_devices.find_device(name, ",".join(names))[0] for name in names]
    devices = list({device.name: device for device in named}.values())
    machines = [_smallest(request, device, max_nodes) for device in devices]
    found = [machine for machine in machines if machine is not None]
    return MachinePlan(
        request=request,
        machines=tuple(sorted(found, key=lambda machine: machine.gpu_hours)),
        too_small=tuple(
            device.name
            for device, machine in zip(devices, machines, strict=True)
            if machine is None
        ),
        max_nodes=max_nodes,
    )


def _smallest(request: PlanInput, device: DeviceSpec, max_nodes: int) -> MachineRow | None:
    """Return the machine with the fewest of these GPUs; None if the largest is too small."""
    if request.precision == "bf16" and not device.has_bf16:
        request = replace(request, precision="fp16")

    def machine(count: int, nodes: int = 1) -> MachineRow | None:
        cluster = ClusterSpec(
            devices=(device,) * (count * nodes),
            link=default_link(device, count),
            num_nodes=nodes,
        )
        cluster = cluster if nodes == 1 else with_default_network(cluster)
        question = replace(request, cluster=cluster)
        row = search.best_row(question)
        return None if row is None else MachineRow(question=question, row=row)

    for count in _COUNTS:
        if (smallest := machine(count)) is not None:
            return smallest
    # Each node takes a part of what is sharded, so more nodes fit more.
    nodes = range(2, max_nodes + 1)
    index = bisect.bisect_left(
        nodes, 1, key=lambda number: machine(DEFAULT_GPUS_PER_NODE, number) is not None
    )
    return machine(DEFAULT_GPUS_PER_NODE, nodes[index]) if index < len(nodes) else None
