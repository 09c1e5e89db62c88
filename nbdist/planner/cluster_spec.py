"""Devices of a plan and the links between them, and the cluster found on this machine.

Pure. `target_devices` parses them from text; `cluster_for_machine` takes what NVML reports.
Speeds come from `gpu_catalog`. Memory is in bytes, speeds are in bytes/s and FLOP/s; a link's
speed is for one direction.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from nbdist import rank_python
from nbdist.planner.gpu_catalog import FP32_EFFICIENCY, GB, GIB, GPU_CATALOG, DeviceSpec, find_gpu
from nbdist.planner.measurement_store import COLLECTIVES, DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from nbdist.hardware.discovery import Gpu, GpuFreeMemory, Machine
    from nbdist.planner.measurement_store import Collective, Measurement, MeasurementStore

__all__ = ["GPU_CATALOG", "ClusterSpec", "DeviceSpec", "cluster_for_machine", "cpu_cluster"]

Link = Literal["nvlink", "pcie", "cpu", "none"]
"""cpu: loopback between ranks of one machine; none: a single device."""
CollectiveScope = Literal["all", "node", "nodes"]
"""Ranks of a collective: all, those of one node, or one rank per node (each node's other ranks
run the same collective among themselves)."""

DEFAULT_GPUS_PER_NODE = 8
"""Default GPUs per node when more GPUs are requested than one node has."""
DEFAULT_NETWORK_BANDWIDTH = 50 * GB
"""Default network bandwidth into each node: one adapter of 400 Gb/s."""

_LINK_SHARE = 0.8
"""Fraction of a link's datasheet speed that large collectives reach: 235 of 300 GB/s on 8 A100,
361 of 450 on 8 H200, 382 of 400 over 4 nodes (nccl-tests, stas00/ml-engineering)."""
_SWITCH_GAIN = 1.3
"""Speedup of an all-reduce inside the NVSwitch (NVLS) over a ring: 475 against 367 GB/s, 8 H200."""
_SWITCH_RANKS = 5
"""Minimum number of GPUs for which NCCL uses NVLS; 4 H200 reach the ring's 363 GB/s."""
_PCIE_SHARE = 0.63
"""Fraction of PCIe that collectives reach: they cross bridges shared by several GPUs."""
_PAIR = 2


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """All devices of a plan, one per rank, and the links between them."""

    devices: tuple[DeviceSpec, ...]
    link: Link
    """Link between the devices of one node."""
    num_nodes: int = 1
    network_bandwidth: float = 0.0
    """Bandwidth into one node over all its adapters, one direction."""
    host_memory_bytes: int | None = None
    """Free host memory of one node; None if unknown."""
    host_bandwidth: float = 50 * GB
    """Host memory bandwidth of one node for an optimizer on the CPU. Llama-2-7B: over 4 s for the
    202 GB that AdamW moves (DeepSpeed, ZenFlow's announcement, 2025)."""
    nvme_bytes: int | None = None
    """Free NVMe space of one node; None if unknown."""
    nvme_bandwidth: float = 6 * GB
    """NVMe bandwidth of one node."""
    num_cpus: int | None = None
    """Cores of one node that CPU ranks share; None if unknown."""
    notes: tuple[str, ...] = ()
    """Sentences for the user: assumptions and limiting devices."""
    kind: Literal["cuda", "cpu"] = "cuda"
    measurement_store: MeasurementStore | None = None
    """Measurements of this machine; None for devices given as text."""
    comm_speed: Mapping[str, Measurement] | None = None
    """Measured collectives between exactly these ranks, by name; None if there are none."""
    comm_slowdown: float = 1.0
    """How many times as long collectives take as by the catalogue, whatever their size."""
    disk_speed: Measurement | None = None
    """The disk measured last."""
    has_deepspeed: bool = True
    """False if the ranks' environment lacks DeepSpeed; True for devices given as text."""

    @property
    def world_size(self) -> int:
        """Number of ranks, one per device."""
        return len(self.devices)

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one node, which share its host memory and network."""
        return len(self.devices) // self.num_nodes

    @cached_property
    def smallest_device(self) -> DeviceSpec:
        """The device with the least free memory. It limits the plan, as all hold equal shards."""
        return min(self.devices, key=lambda device: device.free_bytes)

    @cached_property
    def slowest_device(self) -> DeviceSpec:
        """The slowest device, which all others wait for."""
        return min(self.devices, key=lambda device: device.sustained_flops("bf16"))

    @property
    def latency_s(self) -> float:
        """Seconds from the call of a collective to its first byte."""
        inside = {"nvlink": 10e-6, "pcie": 15e-6, "cpu": 200e-6, "none": 0.0}
        return (30e-6 if self.num_nodes > 1 else inside[self.link]) * self.comm_slowdown

    @property
    def ramp_s(self) -> float:
        """Ramp-up constant in seconds: a collective with this ideal time takes twice as long.

        Fitted to nccl-tests (stas00/ml-engineering) of 8 A100 and 8 H200 (1 MiB: 8 % of full
        speed, 8 MiB: 32-47 %, 128 MiB: 75-83 %) and of 4 nodes of B200 (1 MiB: 1.4 %).
        """
        return (300e-6 if self.num_nodes > 1 else 45e-6) * self.comm_slowdown

    def link_bytes_per_s(self, collective: Collective) -> float:
        """Bus bandwidth of a large collective over all ranks, in bytes/s per rank."""
        device = self.slowest_device
        if self.link == "none" or (self.ranks_per_node == 1 and self.num_nodes > 1):
            inside = math.inf
        elif self.link == "cpu":
            inside = _LOOPBACK
        elif self.link == "pcie" or not (device.has_nvswitch or self.ranks_per_node <= _PAIR):
            inside = device.pcie * _PCIE_SHARE
        else:
            summed = (
                collective == "all_reduce"
                and device.reduces_in_switch
                and self.ranks_per_node >= _SWITCH_RANKS
            )
            inside = device.nvlink * _LINK_SHARE * (_SWITCH_GAIN if summed else 1.0)
        # A ring crosses each node's adapters once, so all adapters of a node count together.
        outside = math.inf if self.num_nodes == 1 else self.network_bandwidth * _LINK_SHARE
        return min(inside, outside) / self.comm_slowdown

    def subcluster(self, which: CollectiveScope) -> ClusterSpec:
        """Return the ranks of a collective as a cluster of their own, of the slowest device."""
        if which == "all":
            return self
        ranks, nodes, network = self.ranks_per_node, 1, 0.0
        link: Link = self.link if ranks > 1 else "none"
        if which == "nodes":  # each with its share of the network
            ranks, nodes, network = 1, self.num_nodes, self.network_bandwidth / ranks
            link = "none"
        return replace(
            self,
            devices=(self.slowest_device,) * (ranks * nodes),
            num_nodes=nodes,
            network_bandwidth=network,
            link=link,
            comm_speed=None,
        )

    @property
    def comm_measured_date(self) -> str:
        """Date on which collectives were measured here, or "" for catalogue figures."""
        return max((measured.day for measured in (self.comm_speed or {}).values()), default="")

    def with_measurements(self, store: MeasurementStore | None) -> ClusterSpec:
        """Return this cluster with measured speeds in place of the catalogue's."""
        if store is None:
            return self
        curves = {
            name: store.get("collective", f"{name}, {self.describe()}") for name in COLLECTIVES
        }
        measured: dict[str, Measurement] = {
            name: curve for name, curve in curves.items() if curve is not None
        }
        _, disk = store.latest("disk") or ("", None)
        nvme_bandwidth = self.nvme_bandwidth
        if disk is not None:  # a step reads as much as it writes
            nvme_bandwidth = 2 / (1 / disk.values["read"] + 1 / disk.values["write"])
        devices: list[DeviceSpec] = []
        for device in self.devices:
            place = self.compute_speed_key(device)
            compute = store.get("compute", place)
            loops = {kind: store.get("loop", f"{place}, {kind}") for kind in DTYPES}
            host_link = compute.values.get("host_link") if compute is not None else None
            devices.append(
                replace(
                    device,
                    compute_speed=compute,
                    loop_speeds={kind: loop for kind, loop in loops.items() if loop is not None},
                    host_link=host_link or device.host_link,
                )
            )
        return replace(
            self,
            measurement_store=store,
            comm_speed=measured or None,
            devices=tuple(devices),
            disk_speed=disk,
            nvme_bandwidth=nvme_bandwidth,
        )

    def compute_speed_key(self, device: DeviceSpec) -> str:
        """Return the key under which a device's compute speed is stored."""
        # CPU ranks share their machine's cores, so their speed depends on how many there are.
        return _cpu_text(self.ranks_per_node) if self.kind == "cpu" else device.name

    def describe(self) -> str:
        """Return a short description: "8 x H100-80GB, nvlink", "2 CPU ranks"."""
        if self.kind == "cpu":
            ranks = _cpu_text(self.world_size)
            return ranks if self.num_nodes == 1 else f"{ranks} on {self.num_nodes} nodes"
        kinds = Counter(device.name for device in self.devices)
        words = [" + ".join(f"{count} x {name}" for name, count in kinds.items())]
        words += [self.link] if self.link != "none" else []
        if self.num_nodes == 1:
            return ", ".join(words)
        # Nodes differ only if a number of ranks was requested.
        each = self.ranks_per_node
        if len(kinds) > 1 or each * self.num_nodes != self.world_size:
            nodes = f"{', '.join(words)} on {self.num_nodes} nodes"
        else:
            node = ", ".join([f"{each} x {next(iter(kinds))}", *words[1:]])
            nodes = f"{self.num_nodes} x ({node})"
        return f"{nodes}, {8 * self.network_bandwidth / GB:g} Gb/s"

    def with_num_ranks(self, ranks: int) -> ClusterSpec:
        """Return this cluster with another number of ranks; add nodes if needed."""
        if self.kind == "cpu":
            memory = self.host_memory_bytes
            each = -(-ranks // self.num_nodes)
            cluster = cpu_cluster(each, host_memory_bytes=memory, num_cpus=self.num_cpus)
            if self.num_nodes > 1:
                devices, network = cluster.devices[:1] * ranks, self.network_bandwidth
                cluster = replace(
                    cluster,
                    devices=devices,
                    num_nodes=self.num_nodes,
                    network_bandwidth=network,
                    notes=self.notes,
                )
            return cluster.with_measurements(self.measurement_store)
        per_node = (
            self.ranks_per_node
            if self.num_nodes > 1
            else max(self.ranks_per_node, DEFAULT_GPUS_PER_NODE)
        )
        nodes = -(-ranks // per_node)
        smallest = self.smallest_device
        devices = self.devices[:ranks] + (smallest,) * (ranks - self.world_size)
        link: Link = "none" if ranks == 1 else self.link
        if link == "none" and ranks > 1:
            link = default_link(smallest, ranks)
        cluster = replace(self, devices=devices, link=link, num_nodes=nodes)
        cluster = cluster if nodes == 1 or self.network_bandwidth else with_default_network(cluster)
        return cluster.with_measurements(self.measurement_store)


def _cpu_text(ranks: int) -> str:
    return f"{ranks} CPU {'rank' if ranks == 1 else 'ranks'}"


def with_default_network(cluster: ClusterSpec) -> ClusterSpec:
    """Assume the default network between nodes and add a note about it."""
    speed = f"{8 * DEFAULT_NETWORK_BANDWIDTH / GB:.0f} Gb/s"
    note = f"No network given: assuming {speed} into each node."
    return replace(
        cluster, network_bandwidth=DEFAULT_NETWORK_BANDWIDTH, notes=(*cluster.notes, note)
    )


_TYPICAL = (
    "RTX2080Ti-11GB",
    "T4-16GB",
    "RTX3090-24GB",
    "V100-32GB",
    "A100-40GB",
    "A6000-48GB",
    "MI250-64GB",
    "A100-80GB",
    "H100-96GB",
    "H200-141GB",
    "B200-180GB",
)
"""Stand-ins for a GPU of which only the memory is known."""
USABLE_MEMORY_FRACTION = 0.985
"""Fraction of the nominal memory that CUDA reports, for GPUs missing in the catalogue."""

_LOOPBACK = 1.5 * GB
"""Gloo between processes on one machine."""
_CORE_FLOPS = 60e9
"""fp32 FLOP/s of one current server core in torch's matrix products: 97e9 were measured on an idle
EPYC, 45e9 beside two other busy processes."""
_HOST_MEMORY_BANDWIDTH = 40 * GB


def cpu_cluster(
    count: int, *, host_memory_bytes: int | None = None, num_cpus: int | None = None
) -> ClusterSpec:
    """Return CPU ranks of one machine, which share its memory and cores."""
    memory = host_memory_bytes or 8 * GIB * count
    cores = max(1.0, (num_cpus or count) / count)
    rank = DeviceSpec(
        name="CPU rank",
        memory_bytes=memory // count,
        free_bytes=memory // count,
        # bf16 is no faster than fp32 on cores without bf16 instructions.
        flops=dict.fromkeys(("fp32", "bf16"), cores * _CORE_FLOPS),
        compute_efficiency=FP32_EFFICIENCY,
        memory_bandwidth=_HOST_MEMORY_BANDWIDTH / count,
        pcie=_LOOPBACK,
        host_link=_HOST_MEMORY_BANDWIDTH / count,
        source="estimate for a current server core",
    )
    notes: tuple[str, ...] = ()
    if host_memory_bytes is None:
        notes = (f"No host memory given: assuming {memory / count / GIB:.0f} GiB per rank.",)
    return ClusterSpec(
        devices=(rank,) * count,
        link="cpu" if count > 1 else "none",
        host_memory_bytes=host_memory_bytes,
        host_bandwidth=_HOST_MEMORY_BANDWIDTH,
        num_cpus=num_cpus,
        notes=notes,
        kind="cpu",
    )


def device_with_memory(memory: float, reason: str) -> tuple[DeviceSpec, tuple[str, ...]]:
    """Return a GPU of which only the memory is known, with the speeds of a typical one."""
    typical = min(
        (GPU_CATALOG[name] for name in _TYPICAL),
        key=lambda device: abs(math.log(device.memory_bytes / memory)),
    )
    device = replace(
        typical,
        name=f"{round(memory / USABLE_MEMORY_FRACTION / GIB, 1):g}GB",
        memory_bytes=int(memory),
        free_bytes=int(memory),
    )
    return device, (f"{reason}: assuming the speeds of {typical.name}.",)


def default_link(device: DeviceSpec, count: int) -> Link:
    """Return the usual link between such GPUs in one machine."""
    if count == 1:
        return "none"
    return "nvlink" if device.has_nvswitch else "pcie"


# ------------------------------------------------------------------------- this machine


def cluster_for_machine(
    machine: Machine,
    usage: Sequence[GpuFreeMemory] = (),
    *,
    cpu_ranks: int = 2,
    host_free_bytes: int | None = None,
) -> ClusterSpec:
    """Return the cluster of this machine: one rank per GPU, or CPU ranks without GPUs.

    Args:
        machine: the detected hardware.
        usage: current usage of each GPU; memory held by other processes is not planned with.
        cpu_ranks: number of CPU ranks if there is no GPU.
        host_free_bytes: free host memory.
    """
    has_deepspeed = rank_python.selected().has("deepspeed")
    if not machine.gpus:
        cluster = cpu_cluster(
            cpu_ranks, host_memory_bytes=host_free_bytes, num_cpus=machine.num_cpus
        )
        return replace(cluster, has_deepspeed=has_deepspeed)
    specs = [_catalogued_gpu(gpu) for gpu in machine.gpus]
    devices = [device for device, _ in specs]
    notes = list(dict.fromkeys(note for _, notes_of_gpu in specs for note in notes_of_gpu))
    for index, gpu_usage in enumerate(usage):
        devices[index] = replace(devices[index], free_bytes=gpu_usage.free_bytes)
        if gpu_usage.holders:
            free, whole = gpu_usage.free_bytes / GIB, devices[index].memory_bytes / GIB
            notes.append(
                f"GPU {index} has {free:.1f} of {whole:.1f} GiB free; the plan uses no more. Also "
                f"running on it: {', '.join(gpu_usage.holders)}."
            )
    fast = machine.link == "NVLink" and all(device.nvlink for device in devices)
    link: Link = "nvlink" if fast else "pcie"
    return ClusterSpec(
        devices=tuple(devices),
        link=link if len(devices) > 1 else "none",
        host_memory_bytes=host_free_bytes,
        notes=(*notes, *_unequal_gpu_notes(devices)),
        has_deepspeed=has_deepspeed,
    )


def cluster_for_nodes(nodes: Mapping[str, ClusterSpec]) -> ClusterSpec:
    """Return one cluster of several machines. Where they differ, the minimum counts.

    Args:
        nodes: cluster of each machine by name, in rank order.
    """
    first, *others = nodes.values()
    if not others:
        return first
    devices = [device for node in nodes.values() for device in node.devices]
    links = {node.link for node in nodes.values()}
    cluster = ClusterSpec(
        devices=tuple(devices),
        link=next((link for link in _SLOWEST_FIRST if link in links), "none"),
        num_nodes=len(nodes),
        host_memory_bytes=_smallest_known(node.host_memory_bytes for node in nodes.values()),
        host_bandwidth=first.host_bandwidth,
        num_cpus=_smallest_known(node.num_cpus for node in nodes.values()),
        notes=(*_notes_of(nodes), *_unequal_gpu_notes(devices), *_scarce_node_notes(nodes)),
        kind=first.kind,
        has_deepspeed=first.has_deepspeed,
    )
    return with_default_network(cluster)


_SLOWEST_FIRST: tuple[Link, ...] = ("cpu", "pcie", "nvlink")
_EQUAL_RATIO = 0.9
"""Nodes whose free host memory differs by less than this are treated as equal."""


def _smallest_known(figures: Iterable[int | None]) -> int | None:
    return min((figure for figure in figures if figure is not None), default=None)


def _notes_of(nodes: Mapping[str, ClusterSpec]) -> Iterator[str]:
    """Notes of the nodes: once if all share it, otherwise prefixed with the node's name."""
    by_node = {
        name: set(node.notes) - set(_unequal_gpu_notes(node.devices))
        for name, node in nodes.items()
    }
    everywhere = set.intersection(*by_node.values())
    yield from sorted(everywhere)
    for name, notes in by_node.items():
        yield from (f"On {name}: {note}" for note in sorted(notes - everywhere))


def _scarce_node_notes(nodes: Mapping[str, ClusterSpec]) -> Iterator[str]:
    memory = {name: node.host_memory_bytes or 0 for name, node in nodes.items()}
    smallest, largest = min(memory, key=memory.__getitem__), max(memory.values())
    if memory[smallest] < _EQUAL_RATIO * largest:
        yield (
            f"The nodes differ: {smallest} has the least free host memory,"
            f" {memory[smallest] / GIB:.1f} GiB against {largest / GIB:.1f} GiB elsewhere; the plan"
            " assumes this minimum on every node."
        )
    cores = {name: node.num_cpus or 0 for name, node in nodes.items()}
    fewest, largest = min(cores, key=cores.__getitem__), max(cores.values())
    if cores[fewest] < largest:
        yield (
            f"The nodes differ: {fewest} has {cores[fewest]} cores against {largest} elsewhere; all"
            f" ranks wait for those on {fewest}."
        )


def _catalogued_gpu(gpu: Gpu) -> tuple[DeviceSpec, tuple[str, ...]]:
    """A detected GPU under the driver's name, with the catalogue's speeds."""
    notes: tuple[str, ...] = ()
    # A MIG instance has a fraction of a GPU: 3/7 for "MIG 3g.40gb".
    slices = re.search(r"MIG ([1-7])g\.", gpu.name)
    share = int(slices[1]) / 7 if slices else 1.0
    device = find_gpu(gpu.name, memory_bytes=gpu.memory_bytes if share == 1 else None)
    if device is None:
        device, notes = device_with_memory(gpu.memory_bytes, f"{gpu.name} is not in the catalogue")
    bandwidth = device.memory_bandwidth
    return replace(
        device,
        name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        free_bytes=gpu.memory_bytes,
        flops={kind: share * peak for kind, peak in device.flops.items()},
        memory_bandwidth=bandwidth * (gpu.memory_bytes / device.memory_bytes if share < 1 else 1),
    ), notes


def _unequal_gpu_notes(devices: Sequence[DeviceSpec]) -> Iterator[str]:
    names = Counter(device.name for device in devices)
    if len(names) > 1:
        smallest = min(devices, key=lambda device: device.free_bytes)
        slowest = min(devices, key=lambda device: device.sustained_flops("bf16"))
        kinds = " and ".join(f"{count} x {name}" for name, count in names.items())
        yield (
            f"The GPUs differ ({kinds}). All ranks hold equal shards and wait for each other, so "
            f"{smallest.name} with {smallest.free_bytes / GIB:.1f} GiB free limits the memory and "
            f"{slowest.name} the speed."
        )
