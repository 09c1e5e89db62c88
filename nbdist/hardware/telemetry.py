"""Current memory, load and power of the GPUs and processes of this machine.

Used by the kernel while a panel is open, and by a node agent while the kernel requests it. Reads
NVML and never initialises CUDA or imports torch. A value that NVML does not report is None. NVML
reports host process ids: in a container with its own process ids, processes cannot be matched, and
the reading carries a note. For a CPU rank the memory is the resident memory of its process.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import asdict, dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Self

import psutil

from nbdist.hardware import discovery
from nbdist.hardware.discovery import GpuFreeMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from nbdist.hardware.discovery import SessionNode

    Ranks = Mapping[int, tuple[str, int | None]]

log = logging.getLogger(__name__)

IDLE_S = 5.0
"""Idle time before a node closes NVML; panels request usage every second."""
_KB = 1024  # NVML reports throughput in KB
_LINK_FIELDS = ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX")
_ALL_LINKS = 0xFFFFFFFF
"""Scope of a field value: sum over all links (NVML's UINT_MAX)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """State of one device at one moment. Values that are not available are None."""

    used_bytes: int | None = None
    """Memory in use by the session's ranks."""
    others_bytes: int = 0
    holders: tuple[str, ...] = ()
    utilization: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    pcie_tx: float | None = None
    pcie_rx: float | None = None
    nvlink_tx: float | None = None
    nvlink_rx: float | None = None
    note: str = ""

    @property
    def memory_bytes(self) -> int | None:
        """Memory in use by all processes."""
        return None if self.used_bytes is None else self.used_bytes + self.others_bytes


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """State of a node at one moment."""

    host_free_bytes: int
    readings: dict[int, GpuReading] = field(default_factory=dict)
    """By rank, of the rank's device."""

    def gpu_memory_usage(self, node: SessionNode) -> tuple[GpuFreeMemory, ...]:
        """Return the memory usage of a node's GPUs; memory of its own ranks counts as free."""
        readings = [self.readings.get(rank, GpuReading()) for rank in node.ranks]
        return tuple(
            GpuFreeMemory(gpu.memory_bytes - reading.others_bytes, reading.holders)
            for gpu, reading in zip(node.machine.gpus, readings, strict=False)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json()`."""
        readings = {
            int(rank): GpuReading(**{**reading, "holders": tuple(reading["holders"])})
            for rank, reading in fields["readings"].items()
        }
        return cls(int(fields["host_free_bytes"]), readings)


class GpuMonitor:
    """Reads devices and processes. Opens NVML at the first GPU and keeps it open until `close`."""

    def __init__(self) -> None:
        self._open: Any = None
        self._processes: dict[int, psutil.Process] = {}
        self._nvlink_counts: dict[str, tuple[float, list[int]]] = {}
        """By GPU the time and values of the last read of its cumulative counters."""

    def close(self) -> None:
        """Shut NVML down; the next read opens it again."""
        if self._open is not None:
            self._open.nvmlShutdown()
            self._open = None

    def read_gpus(self, devices: Iterable[tuple[str, Collection[int]]]) -> list[GpuReading]:
        """Read the current state of devices.

        Args:
            devices: for each rank the UUID of its GPU, or "" for a CPU rank, and its processes.
        """
        pids_by_gpu = [(uuid, set(own)) for uuid, own in devices]
        session_pids = {pid for _, own in pids_by_gpu for pid in own}
        self._processes = {
            pid: self._processes[pid] for pid in session_pids & self._processes.keys()
        }
        return [self._gpu(uuid, own) if uuid else self._process(own) for uuid, own in pids_by_gpu]

    def _driver(self) -> Any:
        """Return NVML, initialised; None if it is missing or does not respond."""
        nvml = self._open or discovery.import_pynvml()
        if self._open is None and nvml is not None:
            try:
                nvml.nvmlInit()
            except nvml.NVMLError:
                return None
            self._open = nvml
        return self._open

    def _gpu(self, uuid: str, own: set[int]) -> GpuReading:
        nvml = self._driver()
        if nvml is None:
            return GpuReading()

        def query(call: Callable[[], Any]) -> Any:
            try:
                return call()
            except (nvml.NVMLError, AttributeError):
                return None  # not supported by this GPU, driver or instance

        handle = query(lambda: nvml.nvmlDeviceGetHandleByUUID(uuid))
        if handle is None:
            return GpuReading(note="NVML does not respond for this device")
        memory = query(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        total_used = None if memory is None else int(memory.total) - int(memory.free)
        running = query(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        rates = query(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        power = query(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        limit = query(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        sent = query(lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES))
        received = query(
            lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
        )
        over_links = query(lambda: self._nvlink_bytes_per_s(nvml, uuid, handle)) or (None, None)
        return GpuReading(
            utilization=None if rates is None else rates.gpu / 100,
            power_w=None if power is None else power / 1000,  # NVML: milliwatts
            power_limit_w=None if limit is None else limit / 1000,
            temperature_c=query(
                lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            ),
            pcie_tx=None if sent is None else float(sent) * _KB,
            pcie_rx=None if received is None else float(received) * _KB,
            nvlink_tx=over_links[0],
            nvlink_rx=over_links[1],
            **_memory_by_owner(total_used, running, own),
        )

    def _nvlink_bytes_per_s(
        self, nvml: Any, uuid: str, handle: Any
    ) -> tuple[float | None, float | None]:
        """Return bytes per second sent and received over all links since the last call."""
        fields = [(getattr(nvml, name), _ALL_LINKS) for name in _LINK_FIELDS]
        answers = nvml.nvmlDeviceGetFieldValues(handle, fields)
        if any(answer.nvmlReturn != nvml.NVML_SUCCESS for answer in answers):
            return None, None
        now, counts = time.monotonic(), [int(answer.value.ullVal) * _KB for answer in answers]
        since, before = self._nvlink_counts.get(uuid, (now, counts))
        self._nvlink_counts[uuid] = now, counts
        if now <= since:
            return None, None
        sent, received = (
            max(0, new - old) / (now - since) for new, old in zip(counts, before, strict=True)
        )
        return sent, received

    def _process(self, own: set[int]) -> GpuReading:
        """Read a CPU rank: resident memory, and CPU utilization since the last call."""
        if not own:
            return GpuReading()
        pid = min(own)
        try:
            process = self._processes.get(pid)
            if process is None:
                process = self._processes[pid] = psutil.Process(pid)
            share = process.cpu_percent() / 100 / (psutil.cpu_count() or 1)
            return GpuReading(
                used_bytes=int(process.memory_info().rss), utilization=min(1.0, share)
            )
        except psutil.Error:
            return GpuReading()  # it has just ended


def _memory_by_owner(
    total_used: int | None, running: Sequence[Any] | None, own: set[int]
) -> dict[str, Any]:
    """Split the memory in use between this session and other processes, if NVML reports it."""
    if total_used is None:
        return {"note": "NVML does not report the memory of this device"}
    known = list(running or ())
    ours = [process for process in known if process.pid in own]
    foreign = [process for process in known if process.pid not in own]
    if own and discovery.hides_processes(running, own):
        note = "NVML cannot tell this session's processes from others here: all memory is counted"
        return {"used_bytes": total_used, "note": f"{note} as the session's own"}
    used = sum(int(process.usedGpuMemory) for process in ours)
    foreign_used = [process.usedGpuMemory for process in foreign]
    others = total_used - used if None in foreign_used else sum(map(int, foreign_used))
    return {
        "used_bytes": used,
        "others_bytes": max(0, others),
        "holders": tuple(discovery.process_name(process.pid) for process in foreign),
    }


class NodeUsageMonitor:
    """Measures a node's usage for its agent, one request at a time, on its own thread.

    NVML can be slow, and the agent's main thread forwards messages. NVML is closed after some idle
    time.

    Args:
        answer: called with the id of a request and its result, on the measuring thread.
    """

    def __init__(self, answer: Callable[[int, dict[str, Any]], None]) -> None:
        self._on_result = answer
        self._monitor = GpuMonitor()
        self._requests: SimpleQueue[tuple[int, Ranks] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def request_usage(self, number: int, ranks: Ranks) -> None:
        """Request a measurement. Not allowed after `close`.

        Args:
            number: id of the request.
            ranks: per rank the UUID of its GPU, or "", and its process id if it has one yet.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="watch", daemon=True)
            self._thread.start()
        self._requests.put((number, ranks))

    def close(self) -> None:
        """Close NVML and end the thread."""
        self._requests.put(None)

    def _serve(self) -> None:
        idle_s: float | None = None
        while True:
            try:
                request = self._requests.get(timeout=idle_s)
            except Empty:
                self._monitor.close()
                idle_s = None
                continue
            if request is None:
                self._monitor.close()
                return
            idle_s = IDLE_S
            number, ranks = request
            devices = [(uuid, () if pid is None else (pid,)) for uuid, pid in ranks.values()]
            try:
                readings = dict(zip(ranks, self._monitor.read_gpus(devices), strict=True))
                usage = NodeUsage(discovery.host_free_memory_bytes(), readings)
                self._on_result(number, usage.to_json())
            except Exception:  # a driver reset must not end the thread
                log.exception("cannot read the devices")
