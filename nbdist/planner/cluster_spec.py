"""The devices that a plan is for, and what is between them; those found on this machine.

Pure. `described` reads them from words; `of_machine` takes what NVML told. Speeds are those of
`catalogue`. Memory is in bytes, speeds are in bytes/s and FLOP/s; a link's speed is of one
direction.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from nbdist.planner.gpu_catalog import CATALOGUE, FP32_SUSTAINED, GB, GIB, Device, lookup

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from nbdist.hardware.discovery import Gpu, Machine, Usage
    from nbdist.planner.measurement_store import Known
    from nbdist.planner.measurements import Collective, Disk, Links

__all__ = ["CATALOGUE", "Cluster", "Device", "cpu_ranks", "of_machine"]

Link = Literal["nvlink", "pcie", "cpu", "none"]
"""cpu: ranks of one machine over its loopback; none: one device alone."""
Ring = Literal["all", "node", "nodes"]
"""Ranks of a collective: all, those of one node, or one of each node, while the others of each
node have rings of their own."""

NODE_SIZE = 8
"""GPUs of a node, where more are asked for than one is said to have."""
NETWORK = 50 * GB
"""Into each node, where nobody said: one adapter of 400 Gb/s."""

_LINK_SHARE = 0.8
"""Of a link's datasheet speed that large collectives reach: 235 of 300 GB/s on 8 A100, 361 of
450 on 8 H200, 382 of 400 over 4 nodes (nccl-tests, stas00/ml-engineering)."""
_SWITCH_GAIN = 1.3
"""Of an all-reduce summed inside the NVSwitch (NVLS), against a ring: 475 to 367 GB/s, 8 H200."""
_SWITCH_RANKS = 5
"""Fewest GPUs for which NCCL does so; 4 H200 reach the ring's 363 GB/s."""
_PCIE_SHARE = 0.63
"""Of PCIe for collectives, which cross bridges that several GPUs share."""
_PAIR = 2


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All devices of a plan, one a rank, and what is between them."""

    devices: tuple[Device, ...]
    link: Link
    """Between the devices of one node."""
    nodes: int = 1
    network: float = 0.0
    """Into one node, all its adapters together, one direction."""
    host_memory_bytes: int | None = None
    """Of one node, free; None where nobody said."""
    host_bandwidth: float = 50 * GB
    """Of one node, as an optimizer on the CPU reaches it. Llama-2-7B: over 4 s for the 202 GB
    that AdamW moves (DeepSpeed, ZenFlow's announcement, 2025)."""
    nvme_bytes: int | None = None
    """Of one node, free; None where nobody said."""
    nvme_bandwidth: float = 6 * GB
    """Of one node."""
    num_cpus: int | None = None
    """Cores of one node that CPU ranks share; None where nobody said."""
    notes: tuple[str, ...] = ()
    """Sentences for the reader: what was assumed, what binds."""
    kind: Literal["cuda", "cpu"] = "cuda"
    known: Known | None = None
    """What was measured on this machine; None for devices that were described in words."""
    links: Links | None = None
    """Of it, between these very ranks."""
    disk: Disk | None = None
    """Of it, the disk measured last."""

    @property
    def world_size(self) -> int:
        """Ranks: one a device."""
        return len(self.devices)

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one node, which share its host memory and its network."""
        return len(self.devices) // self.nodes

    @cached_property
    def smallest(self) -> Device:
        """The device with the least free memory; all hold equal shards, so it binds."""
        return min(self.devices, key=lambda device: device.free_bytes)

    @cached_property
    def slowest(self) -> Device:
        """The device that all others wait for."""
        return min(self.devices, key=lambda device: device.reached("bf16"))

    @property
    def latency_s(self) -> float:
        """From the call of a collective to its first byte."""
        if self.nodes > 1:
            return 30e-6
        return {"nvlink": 10e-6, "pcie": 15e-6, "cpu": 200e-6, "none": 0.0}[self.link]

    @property
    def ramp_s(self) -> float:
        """Time of a transfer that a collective of that size doubles.

        Fitted to nccl-tests (stas00/ml-engineering) of 8 A100 and 8 H200 (1 MiB: 8 % of full
        speed, 8 MiB: 32-47 %, 128 MiB: 75-83 %) and of 4 nodes of B200 (1 MiB: 1.4 %).
        """
        return 300e-6 if self.nodes > 1 else 45e-6

    def link_bytes_per_s(self, collective: Collective) -> float:
        """Bus bandwidth of a large collective over all ranks, per rank.

        A ring crosses each node's adapters once, so a node's adapters count together.
        """
        inside = self._inside(collective)
        return inside if self.nodes == 1 else min(inside, self.network * _LINK_SHARE)

    def ring(self, which: Ring) -> Cluster:
        """The ranks of a collective as a cluster of their own."""
        return {"all": self, "node": self._one_node, "nodes": self._one_of_each}[which]

    @cached_property
    def _one_node(self) -> Cluster:
        """The devices of one node, those that bind."""
        ranks = self.ranks_per_node
        link: Link = self.link if ranks > 1 else "none"
        one = (self.slowest,) * ranks
        return replace(self, devices=one, nodes=1, network=0.0, link=link, links=None)

    @cached_property
    def _one_of_each(self) -> Cluster:
        """One device of each node, with its share of the network."""
        one = (self.slowest,) * self.nodes
        share = self.network / self.ranks_per_node
        return replace(self, devices=one, link="none", network=share, links=None)

    def measured_s(self, collective: Collective, size: float) -> float | None:
        """Time of a collective of this size as measured here; None where it was not."""
        return None if self.links is None else self.links.seconds(collective, size)

    def informed(self, known: Known | None) -> Cluster:
        """The same with what was measured on this machine instead of the catalogue's figures."""
        if known is None:
            return self
        disk = known.disk()
        return replace(
            self,
            known=known,
            links=known.links(self.describe()),
            devices=tuple(_paced(one, known, self.place_of(one)) for one in self.devices),
            disk=disk,
            nvme_bandwidth=self.nvme_bandwidth if disk is None else disk.both,
        )

    def place_of(self, device: Device) -> str:
        """What decides how fast one rank computes: CPU ranks share their machine's cores."""
        return _cpu_words(self.ranks_per_node) if self.kind == "cpu" else device.name

    def _inside(self, collective: Collective) -> float:
        """Bus bandwidth between the devices of one node."""
        if self.link == "none" or (self.ranks_per_node == 1 and self.nodes > 1):
            return math.inf
        device = self.slowest
        if self.link == "cpu":
            return _LOOPBACK
        if self.link == "pcie" or not (device.switched or self.ranks_per_node <= _PAIR):
            return device.pcie * _PCIE_SHARE
        summed = (
            collective == "all_reduce"
            and device.reduces_in_switch
            and self.ranks_per_node >= _SWITCH_RANKS
        )
        return device.nvlink * _LINK_SHARE * (_SWITCH_GAIN if summed else 1.0)

    def describe(self) -> str:
        """Describe in a few words: "8 x H100-80GB, nvlink", "2 CPU ranks"."""
        if self.kind == "cpu":
            ranks = _cpu_words(self.world_size)
            return ranks if self.nodes == 1 else f"{ranks} on {self.nodes} nodes"
        kinds = Counter(device.name for device in self.devices)
        words = [" + ".join(f"{count} x {name}" for name, count in kinds.items())]
        words += [self.link] if self.link != "none" else []
        if self.nodes == 1:
            return ", ".join(words)
        return f"{self._in_nodes(words)}, {8 * self.network / GB:g} Gb/s"

    def _in_nodes(self, words: Sequence[str]) -> str:
        """All devices on several nodes, which are alike but where a number of ranks was asked."""
        kinds, each = {device.name for device in self.devices}, self.ranks_per_node
        if len(kinds) > 1 or each * self.nodes != self.world_size:
            return f"{', '.join(words)} on {self.nodes} nodes"
        one = f"{each} x {kinds.pop()}"
        return f"{self.nodes} x ({', '.join([one, *words[1:]])})"

    def resized(self, ranks: int) -> Cluster:
        """The same with another number of ranks; more nodes where one has not so many GPUs."""
        if self.kind == "cpu":
            memory = self.host_memory_bytes
            each = -(-ranks // self.nodes)
            made = cpu_ranks(each, host_memory_bytes=memory, num_cpus=self.num_cpus)
            if self.nodes > 1:
                devices, network = made.devices[:1] * ranks, self.network
                made = replace(
                    made, devices=devices, nodes=self.nodes, network=network, notes=self.notes
                )
            return made.informed(self.known)
        said = self.ranks_per_node if self.nodes > 1 else max(self.ranks_per_node, NODE_SIZE)
        nodes = -(-ranks // said)
        least = self.smallest
        kept = self.devices[:ranks] + (least,) * (ranks - self.world_size)
        link: Link = "none" if ranks == 1 else self.link
        if link == "none" and ranks > 1:
            link = usual_link(least, ranks)
        made = replace(self, devices=kept, link=link, nodes=nodes)
        made = made if nodes == 1 or self.network else networked(made)
        return made.informed(self.known)


def _cpu_words(ranks: int) -> str:
    return f"{ranks} CPU {'rank' if ranks == 1 else 'ranks'}"


def _paced(device: Device, known: Known, place: str) -> Device:
    """A device with what was measured of it."""
    pace = known.pace(place)
    host_link = (pace and pace.host_link) or device.host_link
    return replace(device, pace=pace, host_link=host_link)


def networked(cluster: Cluster) -> Cluster:
    """Assume a network between nodes, and say so."""
    speed = f"{8 * NETWORK / GB:.0f} Gb/s"
    note = f"The network is not said: {speed} into each node is assumed."
    return replace(cluster, network=NETWORK, notes=(*cluster.notes, note))


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
"""Whose speeds a GPU has that is known by its memory alone."""
USABLE = 0.985
"""Of the memory in a name that CUDA reports, where the catalogue does not say."""

_LOOPBACK = 1.5 * GB
"""Gloo between processes of one machine."""
_CORE_FLOPS = 30e9
"""fp32, one core of a present server in torch's matrix products."""
_HOST_MEMORY_BANDWIDTH = 20 * GB


def cpu_ranks(
    count: int, *, host_memory_bytes: int | None = None, num_cpus: int | None = None
) -> Cluster:
    """CPU ranks of one machine, which share its memory and its cores."""
    memory = host_memory_bytes or 8 * GIB * count
    cores = max(1.0, (num_cpus or count) / count)
    rank = Device(
        name="CPU rank",
        memory_bytes=memory // count,
        free_bytes=memory // count,
        # bf16 is no faster than fp32 on cores without units for it.
        flops=MappingProxyType(dict.fromkeys(("fp32", "bf16"), cores * _CORE_FLOPS)),
        sustained=FP32_SUSTAINED,
        memory_bandwidth=_HOST_MEMORY_BANDWIDTH / count,
        pcie=_LOOPBACK,
        host_link=_HOST_MEMORY_BANDWIDTH / count,
        source="a present server core; a modest guess",
    )
    notes: tuple[str, ...] = ()
    if host_memory_bytes is None:
        notes = (f"Host memory is not said: {memory / count / GIB:.0f} GiB a rank is assumed.",)
    return Cluster(
        devices=(rank,) * count,
        link="cpu" if count > 1 else "none",
        host_memory_bytes=host_memory_bytes,
        host_bandwidth=_HOST_MEMORY_BANDWIDTH,
        num_cpus=num_cpus,
        notes=notes,
        kind="cpu",
    )


def by_memory(memory: float, why: str) -> tuple[Device, tuple[str, ...]]:
    """A GPU known by its memory alone, with the speeds of a typical one."""
    typical = min(
        (CATALOGUE[name] for name in _TYPICAL),
        key=lambda one: abs(math.log(one.memory_bytes / memory)),
    )
    device = replace(
        typical,
        name=f"{round(memory / USABLE / GIB)}GB",
        memory_bytes=int(memory),
        free_bytes=int(memory),
    )
    return device, (f"{why}: its speeds are taken to be those of {typical.name}.",)


def usual_link(device: Device, count: int) -> Link:
    """What a machine of such GPUs has between them, unless it is said."""
    if count == 1:
        return "none"
    return "nvlink" if device.switched else "pcie"


# ------------------------------------------------------------------------------ finding


def of_machine(
    machine: Machine,
    usage: Sequence[Usage] = (),
    *,
    cpu_ranks: int = 2,
    host_free_bytes: int | None = None,
    nvme_free_bytes: int | None = None,
) -> Cluster:
    """Make the cluster of this machine: one rank for each GPU, or CPU ranks without any.

    Args:
        machine: what was found.
        usage: of each GPU now; what other processes hold cannot be planned with.
        cpu_ranks: how many, where there is no GPU.
        host_free_bytes: memory of the host that can still be taken.
        nvme_free_bytes: of a fast local disk.
    """
    if not machine.gpus:
        return _cpu_ranks(cpu_ranks, host_memory_bytes=host_free_bytes, num_cpus=machine.num_cpus)
    known = [_known(gpu) for gpu in machine.gpus]
    devices = [device for device, _ in known]
    notes = dict.fromkeys(note for _, several in known for note in several)
    for index, now in enumerate(usage):
        devices[index] = replace(devices[index], free_bytes=now.free_bytes)
    fast = machine.link == "NVLink" and all(device.nvlink for device in devices)
    link: Link = "nvlink" if fast else "pcie"
    return Cluster(
        devices=tuple(devices),
        link=link if len(devices) > 1 else "none",
        host_memory_bytes=host_free_bytes,
        nvme_bytes=nvme_free_bytes,
        notes=(*notes, *_held(devices, usage), *_uneven(devices)),
    )


_cpu_ranks = cpu_ranks


def of_nodes(nodes: Mapping[str, Cluster]) -> Cluster:
    """Make one cluster of several machines; of what they differ in the least counts.

    Args:
        nodes: what each is, by its name, in the order of the ranks.
    """
    first, *others = nodes.values()
    if not others:
        return first
    devices = [device for node in nodes.values() for device in node.devices]
    links = {node.link for node in nodes.values()}
    made = Cluster(
        devices=tuple(devices),
        link=next((link for link in _SLOWEST_FIRST if link in links), "none"),
        nodes=len(nodes),
        host_memory_bytes=_least(node.host_memory_bytes for node in nodes.values()),
        host_bandwidth=first.host_bandwidth,
        num_cpus=_least(node.num_cpus for node in nodes.values()),
        notes=(*_notes_of(nodes), *_uneven(devices), *_scarce(nodes)),
        kind=first.kind,
    )
    return networked(made)


_SLOWEST_FIRST: tuple[Link, ...] = ("cpu", "pcie", "nvlink")
_ALIKE = 0.9
"""Nodes whose host memory differs by less are alike: each has something else to hold."""


def _least(figures: Iterable[int | None]) -> int | None:
    return min((one for one in figures if one is not None), default=None)


def _notes_of(nodes: Mapping[str, Cluster]) -> Iterator[str]:
    """What is said of the nodes: of all of them once, else with the name."""
    said = {name: set(node.notes) - set(_uneven(node.devices)) for name, node in nodes.items()}
    everywhere = set.intersection(*said.values())
    yield from sorted(everywhere)
    for name, notes in said.items():
        yield from (f"On {name}: {note}" for note in sorted(notes - everywhere))


def _scarce(nodes: Mapping[str, Cluster]) -> Iterator[str]:
    """Sentences about nodes that have less host memory or fewer cores than others."""
    memory = {name: node.host_memory_bytes or 0 for name, node in nodes.items()}
    least, most = min(memory, key=memory.__getitem__), max(memory.values())
    if memory[least] < _ALIKE * most:
        yield (
            f"The nodes differ: {least} has the least host memory free, {memory[least] / GIB:.1f}"
            f" GiB to {most / GIB:.1f} GiB of another, and no more is planned with on any."
        )
    cores = {name: node.num_cpus or 0 for name, node in nodes.items()}
    fewest, most = min(cores, key=cores.__getitem__), max(cores.values())
    if cores[fewest] < most:
        yield (
            f"The nodes differ: {fewest} has {cores[fewest]} cores to {most} of another, and all"
            " ranks wait for its ranks."
        )


def _known(gpu: Gpu) -> tuple[Device, tuple[str, ...]]:
    """A found GPU under its driver's name, with the speeds that the catalogue has for it."""
    notes: tuple[str, ...] = ()
    share = _instance(gpu.name)
    device = lookup(gpu.name, memory_bytes=gpu.memory_bytes if share == 1 else None)
    if device is None:
        device, notes = by_memory(gpu.memory_bytes, f"{gpu.name} is not in the catalogue")
    bandwidth = device.memory_bandwidth
    return replace(
        device,
        name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        free_bytes=gpu.memory_bytes,
        flops=MappingProxyType({kind: share * peak for kind, peak in device.flops.items()}),
        memory_bandwidth=bandwidth * (gpu.memory_bytes / device.memory_bytes if share < 1 else 1),
    ), notes


def _instance(name: str) -> float:
    """The share of a GPU's seven slices that a MIG instance has: "MIG 3g.40gb"."""
    slices = re.search(r"MIG ([1-7])g\.", name)
    return int(slices[1]) / 7 if slices else 1.0


def _held(devices: Sequence[Device], usage: Sequence[Usage]) -> Iterator[str]:
    """Sentences about memory that other processes hold."""
    for index, (device, now) in enumerate(zip(devices, usage, strict=False)):
        if now.holders:
            free, whole = now.free_bytes / GIB, device.memory_bytes / GIB
            yield (
                f"GPU {index} has {free:.1f} of {whole:.1f} GiB free, and no more is planned "
                f"with: {', '.join(now.holders)} runs on it."
            )


def _uneven(devices: Sequence[Device]) -> Iterator[str]:
    """A sentence about GPUs that differ."""
    names = Counter(device.name for device in devices)
    if len(names) > 1:
        least = min(devices, key=lambda device: device.free_bytes)
        slow = min(devices, key=lambda device: device.reached("bf16"))
        kinds = " and ".join(f"{count} x {name}" for name, count in names.items())
        yield (
            f"The GPUs differ ({kinds}); all ranks hold equal shares and wait for each other, so "
            f"{least.name} with {least.free_bytes / GIB:.1f} GiB free bounds the memory and "
            f"{slow.name} the speed."
        )
