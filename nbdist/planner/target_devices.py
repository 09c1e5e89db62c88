"""The devices to plan for: described as text such as "8xH100-80GB,nvlink", or detected.

Several machines are written with one of them in brackets: "2x(8xH100-80GB,nvlink),400Gb/s".
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

from nbdist.errors import PlanError
from nbdist.hardware import discovery
from nbdist.planner import cluster_spec
from nbdist.planner.cluster_spec import ClusterSpec, cpu_cluster, default_link
from nbdist.planner.gpu_catalog import (
    GB,
    GIB,
    TERA,
    DeviceSpec,
    GpuNameKey,
    find_gpu,
    gpu_families,
    gpus_of_family,
)
from nbdist.planner.measurement_store import (
    COLLECTIVES,
    DTYPES,
    MeasurementStore,
    is_memory_filesystem,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from nbdist.hardware.discovery import GpuFreeMemory, SessionNode

MAX_DEVICES = 100_000
"""Larger than any cluster; more is a typing error."""
MAX_MEMORY_GB = 10_000

_COUNTED = re.compile(r"(?:(-?[0-9.]+)\s*[x*]\s*)?(?:(-?[0-9.]+)\s*[x*]\s*)?(.*)", re.IGNORECASE)
_MEMORY = re.compile(r"(-?[0-9.]+|nan|inf)\s*(GI?B|TI?B)", re.IGNORECASE)
_NETWORK = re.compile(r"(?:([0-9]+)\s*[x*]\s*)?([0-9.]+)\s*(Gb|Gbps|Gb/s|Gbit/s)")
_COUNT = re.compile(r"-?[0-9.]+\s*[x*]", re.IGNORECASE)
_BRACKETS = re.compile(r"(-?[0-9.]+)\s*[x*]\s*\(([^()]+)\)\s*((?:,[^()]*)?)", re.IGNORECASE)
_BYTES = re.compile(r"(?:[0-9]+\s*[x*]\s*)?[0-9.]+\s*(?:GBps|GB/s|GB)")
_STORE = re.compile(r"([0-9.]+)\s*(GB|TB)\s+(host|ram|nvme)", re.IGNORECASE)
_LINKS = frozenset({"nvlink", "pcie"})
_MAX_CHARS = 300
_CPU = re.compile(r"(?:(-?[0-9.]+)\s*[x* ]?\s*)?cpus?", re.IGNORECASE)
_EXAMPLES = '"8xH100-80GB,nvlink", "2x24GB,pcie", "2x(8xH100-80GB,nvlink),400Gb/s" or "2xcpu"'


def parse_devices(text: str) -> ClusterSpec:
    """Parse a description of devices.

    The form is "[COUNTx]GPU[,nvlink|pcie][,HOST]", with the GPU given by name, or by memory alone
    ("24GB"). Several machines are "NODESx(ONE MACHINE)[,NETWORK]", or in short
    "NODESxCOUNTxGPU[,nvlink|pcie][,NETWORK]". NETWORK is the bandwidth into one node ("400Gb/s"
    for one adapter, "8x400Gb/s" for eight). "512GB host" and "2TB nvme" are per node. "2xcpu"
    means CPU ranks.

    Raises:
        PlanError: invalid syntax, an unknown GPU, or an invalid number.
    """
    text = str(text)
    if len(text) > _MAX_CHARS or not text.isprintable():
        # The regular expressions below take time quadratic in the length.
        raise PlanError(f"Cannot parse devices {_quote(text)}. Example: 8xH100-80GB.")
    if not set("()") & set(text):
        return _parse_machines(text)
    parts = _BRACKETS.fullmatch(text.strip())
    if parts is None:
        raise PlanError(
            f"Cannot parse devices {_quote(text)}: put one machine in brackets, the number of"
            " machines before them and the network after them."
            " Example: 2x(8xH100-80GB,nvlink),400Gb/s."
        )
    nodes, (first, *inside) = _count(parts[1], text), _split_items(parts[2])
    outside = _split_items(parts[3])[1:]
    counted = _COUNTED.fullmatch(first)
    wrong = ""
    if _CPU.fullmatch(first):
        wrong = "CPU ranks are planned for one machine only; use 4xcpu"
    elif counted is not None and counted[2]:
        wrong = f"{first} in the brackets is more than one machine; use 2x(8xH100-80GB)"
    elif networks := [word for word in inside if _NETWORK.fullmatch(word)]:
        wrong = f"{networks[0]} connects machines; put it after the brackets"
    elif links := [word for word in outside if word.lower() in _LINKS]:
        wrong = f"{links[0]} is a link inside a machine; put it in the brackets"
    if wrong:
        raise PlanError(f"Cannot parse devices {_quote(text)}: {wrong}.")
    node = _parse_machines(",".join([first, *inside]))
    check_size(nodes * node.world_size, text)
    return _apply_link_and_memory(
        replace(node, devices=node.devices * nodes, num_nodes=nodes), outside, text
    )


def _parse_machines(text: str) -> ClusterSpec:
    first, *more = _split_items(text)
    if cpu := _CPU.fullmatch(first):
        if more:
            message = f"CPU ranks do not take {more[0]!r} (devices {_quote(text)})."
            raise PlanError(f"{message} Remove {more[0]!r}.")
        ranks = _count(cpu[1], text)
        check_size(ranks, text)
        return cpu_cluster(ranks)
    counted = _COUNTED.fullmatch(first)
    assert counted is not None  # its last group matches anything  # noqa: S101
    outer, inner, name = counted.groups()
    nodes, count = (_count(outer, text), _count(inner, text)) if inner else (1, _count(outer, text))
    check_size(nodes * count, text)
    if _COUNT.match(name):
        raise PlanError(
            f"Cannot parse devices {_quote(text)}: {first} has three numbers. Give the number of"
            " machines and the GPUs of one machine. Example: 2x(8xH100-80GB,nvlink),400Gb/s."
        )
    device, notes = find_device(name, text)
    cluster = ClusterSpec(
        devices=(device,) * (nodes * count),
        link=default_link(device, nodes * count),
        num_nodes=nodes,
        notes=notes,
    )
    return _apply_link_and_memory(cluster, more, text)


def _apply_link_and_memory(cluster: ClusterSpec, more: Sequence[str], text: str) -> ClusterSpec:
    """Apply link, network and host memory to a cluster, and add notes about assumptions."""
    for word in more:
        if word.lower() in _LINKS:
            device = cluster.devices[0]
            if word.lower() == "nvlink" and not device.nvlink:
                raise PlanError(f"{device.name} has no NVLink. Use pcie.")
            if cluster.world_size > 1:
                cluster = replace(cluster, link="nvlink" if word.lower() == "nvlink" else "pcie")
        elif network := _NETWORK.fullmatch(word):
            if cluster.num_nodes == 1:
                raise PlanError(
                    f"Network {word} needs several machines, but devices {_quote(text)} is one."
                    " Example: 2x(8xH100-80GB,nvlink),400Gb/s."
                )
            speed = int(network[1] or 1) * _positive(network[2], text) * GB / 8
            cluster = replace(cluster, network_bandwidth=speed)
        elif store := _STORE.fullmatch(word):
            size = int(_positive(store[1], text) * (GB if store[2].upper() == "GB" else TERA))
            if store[3].lower() == "nvme":
                cluster = replace(cluster, nvme_bytes=size)
            else:
                cluster = replace(cluster, host_memory_bytes=size)
        else:
            raise PlanError(_unknown_word(word, text))
    has_network = cluster.num_nodes == 1 or cluster.network_bandwidth
    return cluster if has_network else cluster_spec.with_default_network(cluster)


def find_device(name: str, text: str) -> tuple[DeviceSpec, tuple[str, ...]]:
    """Return the device of a name, or a typical one with that memory."""
    if memory := _MEMORY.fullmatch(name.strip()):
        size = _positive(memory[1], text) * (1000 if memory[2].upper().startswith("T") else 1)
        if size > MAX_MEMORY_GB:
            raise PlanError(f"No GPU has {size:g} GB ({_quote(text)}). Give the memory of one GPU.")
        usable = size * cluster_spec.USABLE_MEMORY_FRACTION * GIB
        return cluster_spec.device_with_memory(usable, f"{size:g} GB does not name a GPU")
    device = find_gpu(name)
    if device is None:
        raise PlanError(_unknown_gpu(name, text))
    return device, ()


def _split_items(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def check_size(count: int, text: str) -> None:
    """Check the number of devices.

    Raises:
        PlanError: if it exceeds MAX_DEVICES.
    """
    if count > MAX_DEVICES:
        raise PlanError(
            f"Too many devices in {_quote(text)}: {count}. At most {MAX_DEVICES} are allowed."
        )


def _count(text: str | None, whole: str) -> int:
    """Parse a count; 1 if it is missing."""
    if text is None:
        return 1
    if not text.isdigit() or int(text) < 1:
        raise PlanError(
            f"Number of devices must be an integer >= 1, got {text} in {_quote(whole)}."
            f" Examples: {_EXAMPLES}."
        )
    return int(text)


def _positive(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise PlanError(f"Invalid size {text} in devices {_quote(whole)}: must be a number > 0.")
    return value


def _unknown_gpu(name: str, text: str) -> str:
    parsed = GpuNameKey.parse(name)
    if same := [device.name for device in gpus_of_family(name)]:
        known = ", ".join(same)
        return f"Unknown GPU: {parsed.family} with {parsed.memory} GB. Known: {known}."
    if not re.search(r"[0-9A-Z]", parsed.family):
        return f"No GPU named in devices {_quote(text)}. Examples: {_EXAMPLES}."
    first = gpu_families()
    if re.search(r"[0-9]\s*(nodes?|machines?)\b", text, re.IGNORECASE):
        return (
            f"Cannot parse devices {_quote(text)}. Write several machines as"
            " 2x(8xH100-80GB,nvlink),400Gb/s."
        )
    close_names = [first[key] for key in get_close_matches(parsed.family, first, n=3, cutoff=0.5)]
    hint = f"Did you mean {' or '.join(close_names)}? Or give" if close_names else "Give"
    return f"Unknown GPU {_quote(name.strip())}. {hint} its memory, as in 2x24GB,pcie."


def _unknown_word(word: str, text: str) -> str:
    close_words = get_close_matches(word.lower(), sorted(_LINKS), n=1)
    hint = f"Did you mean {close_words[0]}? " if close_words else ""
    if _BYTES.fullmatch(word):
        hint = "Give a network in bits, as in 400Gb/s, and memory with its kind, as in 512GB host. "
    return (
        f"Unknown {word!r} in devices {_quote(text)}. {hint}After the GPU, use nvlink or pcie, "
        "a network such as 8x400Gb/s, and 512GB host or 2TB nvme."
    )


def _quote(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else f"{text[:limit]}...")


# -- detected devices -----------------------------------------------------------------------


def resolve_cluster(devices: str | ClusterSpec | None, world_size: int | None) -> ClusterSpec:
    """Return the requested devices, one per rank.

    Args:
        devices: a description, a cluster, or None to detect the devices of this machine.
        world_size: number of ranks, if it differs from the number of devices.

    Raises:
        PlanError: an invalid description.
    """
    if isinstance(devices, ClusterSpec):
        resolved = devices
    elif devices is None:
        resolved = detect_local_cluster(world_size)
    elif type(devices) is str:
        resolved = parse_devices(devices)
    else:
        raise PlanError(f"devices must be text, not {devices!r}. Examples: {_EXAMPLES}.")
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


# -- calibrated devices ---------------------------------------------------------------------


def apply_calibration(figures: Sequence[Mapping[str, Any]], cluster: ClusterSpec) -> ClusterSpec:
    """Store the measurements of a calibration and return the cluster with them.

    Args:
        figures: what each rank measured in a calibration.
        cluster: the ranks, detected on this machine.
    """
    store = cluster.measurement_store
    if store is None:
        return cluster
    for name in COLLECTIVES:
        # For each size, the slowest rank's time.
        curve: dict[str, float] = {}
        for rank in figures:
            for size, seconds in rank["curves"].get(name, ()):
                curve[str(size)] = max(seconds, curve.get(str(size), 0.0))
        store.record("collective", f"{name}, {cluster.describe()}", curve, average=False)
    by_place: dict[str, list[Mapping[str, Any]]] = {}
    for rank in figures:
        place = cluster.describe() if cluster.kind == "cpu" else str(rank["device"])
        by_place.setdefault(place, []).append(rank)
    for place, ranks in by_place.items():
        _store_compute_speed(store, place, ranks)
    disks = [rank["disk"] for rank in figures if "disk" in rank]
    if disks and not is_memory_filesystem(disks[0]["filesystem"]):
        total = {
            direction: sum(disk[direction] for disk in disks) for direction in ("read", "write")
        }
        store.record("disk", str(disks[0]["filesystem"])[:200], total, average=False)
    store.save()
    return cluster.with_measurements(store)


def _store_compute_speed(
    store: MeasurementStore, place: str, figures: Sequence[Mapping[str, Any]]
) -> None:
    """Store the slowest of these ranks; data types that were not measured now are kept."""
    old = store.get("compute", place)
    values = {kind: old.values[kind] for kind in DTYPES if old and kind in old.values}
    for kind in DTYPES:
        if all(kind in rank["products"] for rank in figures):
            values[kind] = min(rank["products"][kind] for rank in figures)
    values["memory"] = min(rank["memory"] for rank in figures)
    copies = [rank["copies"]["to_device_pinned"] for rank in figures if "copies" in rank]
    if copies:
        values["host_link"] = min(copies)
    store.record("compute", place, values, average=False)


def print_progress(text: str) -> None:
    """Print the progress of a trace to stderr."""
    print(f"nbdist: {text}", file=sys.stderr)  # noqa: T201 - shown to the waiting user
