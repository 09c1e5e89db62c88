"""Samples the devices of a session once per second while a panel is open.

Devices of this machine are read here. Devices of cluster nodes are read by the node agents; each
node sends one reply for all its ranks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.hardware import discovery
from nbdist.hardware.telemetry import GpuMonitor, GpuReading
from nbdist.panel.protocol import MAX_SAMPLES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.hardware.discovery import SessionNode
    from nbdist.hardware.telemetry import NodeUsage
    from nbdist.session.device_placement import DevicePlacement
    from nbdist.session.session import Session

log = logging.getLogger(__name__)

SAMPLE_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class DeviceWithRanks:
    """A device of the session, and the ranks on it."""

    name: str
    ranks: tuple[int, ...]
    uuid: str = ""
    """UUID of a GPU; empty for a CPU rank."""
    capacity_bytes: int | None = None
    node: str = ""
    """Empty on this machine."""


def device_slots(
    placement: DevicePlacement, nodes: Sequence[SessionNode] = ()
) -> list[DeviceWithRanks]:
    """Return the devices of a session.

    Each CPU rank counts as a device with an equal share of the host memory.
    """
    slots: list[DeviceWithRanks] = []
    for node in nodes:
        if not node.machine.gpus:
            share = node.machine.memory_bytes // len(node.ranks)
            slots += [_cpu_slot(rank, share, node.name) for rank in node.ranks]
        for rank, gpu in zip(node.ranks, node.machine.gpus, strict=False):
            slots.append(DeviceWithRanks(gpu.title, (rank,), gpu.uuid, gpu.memory_bytes, node.name))
    if nodes:
        return slots
    if placement.devices is None:
        each = None if placement.is_remote else discovery.host_memory_bytes() // placement.nproc
        return [_cpu_slot(rank, each) for rank in range(placement.nproc)]
    gpus = {gpu.uuid: gpu for gpu in discovery.discover_machine().gpus}
    return [
        DeviceWithRanks(gpus[uuid].title, (rank,), uuid, gpus[uuid].memory_bytes)
        if uuid in gpus
        else DeviceWithRanks(f"GPU {index}", (rank,), uuid)
        for rank, (index, uuid) in enumerate(
            zip(placement.devices, placement.visible_devices, strict=True)
        )
    ]


def _cpu_slot(rank: int, share: int | None, node: str = "") -> DeviceWithRanks:
    return DeviceWithRanks(f"CPU rank {rank}", (rank,), "", share, node)


@dataclass
class DeviceSnapshot:
    """Readings of all devices at one moment."""

    time: float
    """Unix time in seconds."""
    readings: list[GpuReading] = field(default_factory=list)
    nodes: Mapping[str, NodeUsage] = field(default_factory=dict)
    """Reply of each node that responded, by name."""


class DeviceSampler:
    """Devices of a session, sampled by a thread between ``start`` and ``stop``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._monitor = GpuMonitor()
        self._placed: tuple[object, list[DeviceWithRanks]] = (None, [])
        self._sampled: frozenset[tuple[int, int]] = frozenset()
        """Ranks and process ids of the last sample."""
        self.history: deque[DeviceSnapshot] = deque(maxlen=MAX_SAMPLES)
        self.peak_bytes: dict[int, int] = {}
        """Index of a device -> peak of the session's memory in bytes."""
        self.strategy_peak_bytes: dict[int, int] = {}
        """The same since the last change of the strategy."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def device_slots(self) -> list[DeviceWithRanks]:
        """The current devices."""
        placed = self._session.placement, self.nodes
        if self._placed[0] != placed:
            self._placed = (placed, device_slots(placed[0], nodes=placed[1]))
            self.clear_samples()
        return self._placed[1]

    @property
    def nodes(self) -> Sequence[SessionNode]:
        """The nodes of the devices; empty for this machine."""
        return self._session.nodes

    @property
    def latest_snapshot(self) -> DeviceSnapshot | None:
        """The last sample, if there is one."""
        return self.history[-1] if self.history else None

    def clear_samples(self) -> None:
        """Clear samples and peaks, which belong to other ranks or devices."""
        self.history.clear()
        self.peak_bytes.clear()
        self.strategy_peak_bytes.clear()

    def start(self) -> None:
        """Start the thread."""
        if self._thread is None:
            self._closed.clear()
            self._thread = threading.Thread(target=self._run, name="nbdist-devices", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(2 * SAMPLE_INTERVAL_S)
            self._thread = None

    def sample_once(self) -> DeviceSnapshot:
        """Take one sample."""
        try:
            return self._sample()
        finally:
            self._monitor.close()

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._closed.is_set():
                try:
                    self._sample()
                except Exception:  # a driver reset must not end the panel
                    log.exception("the devices could not be sampled")
                due = max(due + SAMPLE_INTERVAL_S, time.monotonic())
                self._closed.wait(due - time.monotonic())
        finally:
            self._monitor.close()

    def _sample(self) -> DeviceSnapshot:
        pids = {rank["rank"]: rank["pid"] for rank in self._session.status()["ranks"]}
        slots = self.device_slots
        processes = frozenset(pids.items())
        if processes and processes != self._sampled:  # new ranks: reset the peaks
            self._sampled = processes
            self.peak_bytes.clear()
            self.strategy_peak_bytes.clear()
        usage: Mapping[str, NodeUsage] = {}
        if self.nodes:
            usage = self._session.nodes_now(SAMPLE_INTERVAL_S)
            by_rank: dict[int, GpuReading] = {}
            for node_usage in usage.values():
                by_rank |= node_usage.readings
            # devices of a node that does not reply are unknown
            readings = [by_rank.get(slot.ranks[0], GpuReading()) for slot in slots]
        else:
            own_pids = ({pids[rank] for rank in slot.ranks if rank in pids} for slot in slots)
            uuids = (slot.uuid for slot in slots)
            readings = self._monitor.read_gpus(zip(uuids, own_pids, strict=True))
        for index, reading in enumerate(readings):
            used = reading.used_bytes or 0
            for peaks in (self.peak_bytes, self.strategy_peak_bytes):
                peaks[index] = max(peaks.get(index, 0), used)
        snapshot = DeviceSnapshot(time.time(), readings, usage)
        self.history.append(snapshot)
        return snapshot
