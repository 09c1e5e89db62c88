"""What the GPUs and processes of this machine hold and do now.

In the kernel while a panel is open, in the agent of a node while the kernel asks. NVML is asked and
never CUDA: no context, no torch. Every figure is None where NVML does not have it. Of processes
NVML tells host pids: in a container with pids of its own nothing can be told apart, and the reading
says so. A CPU rank is its process's resident memory.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

import psutil

from nbdist.hardware import discovery
from nbdist.hardware.discovery import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from nbdist.hardware.discovery import Node

_KB = 1024
_LINK_FIELDS = ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX")
_ALL_LINKS = 0xFFFFFFFF
"""Scope of a field value: the sum of all links (NVML's UINT_MAX)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One device at one moment. What nobody tells is None."""

    used_bytes: int | None = None
    """By the session's ranks."""
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
        """Of the device, by anybody."""
        return None if self.used_bytes is None else self.used_bytes + self.others_bytes


@dataclass(frozen=True, slots=True)
class Now:
    """A node at one moment."""

    host_free_bytes: int
    readings: dict[int, Reading] = field(default_factory=dict)
    """Of each rank's device, by rank."""

    def usage(self, node: Node) -> tuple[Usage, ...]:
        """Memory of a node's GPUs; what its own ranks hold counts as free."""
        known = [self.readings.get(rank, Reading()) for rank in node.ranks]
        return tuple(
            Usage(gpu.memory_bytes - one.others_bytes, one.holders)
            for gpu, one in zip(node.machine.gpus, known, strict=False)
        )

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        readings = {rank: _told(one) for rank, one in self.readings.items()}
        return {"host_free_bytes": self.host_free_bytes, "readings": readings}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Read what `to_json` made."""
        readings = {
            int(rank): Reading(**{**one, "holders": tuple(one.get("holders", ()))})
            for rank, one in given["readings"].items()
        }
        return cls(int(given["host_free_bytes"]), readings)


def _told(reading: Reading) -> dict[str, Any]:
    """What is known of it: a node sends one for each rank, every second."""
    nothing = asdict(Reading())
    return {name: value for name, value in asdict(reading).items() if value != nothing[name]}


class Gauge:
    """Reads devices and processes; NVML is open from the first GPU that is read until `close`.

    Args:
        nvml: a module with the functions of `pynvml`, for tests.
    """

    def __init__(self, *, nvml: Any = None) -> None:
        """Look at nothing yet."""
        self._nvml = nvml
        self._open: Any = None
        self._processes: dict[int, psutil.Process] = {}
        self._links = LinkCounters()

    def close(self) -> None:
        """Let NVML go; the next `read` opens it again."""
        if self._open is not None:
            self._open.nvmlShutdown()
            self._open = None

    def read(self, devices: Iterable[tuple[str, Collection[int]]]) -> list[Reading]:
        """Read devices at this moment.

        Args:
            devices: the UUID of each GPU, or "" for a CPU rank, and the processes of its ranks.
        """
        asked = [(uuid, set(own)) for uuid, own in devices]
        living = {pid for _, own in asked for pid in own}
        self._processes = {pid: self._processes[pid] for pid in living & self._processes.keys()}
        return [self._gpu(uuid, own) if uuid else self._process(own) for uuid, own in asked]

    def _gpu(self, uuid: str, own: set[int]) -> Reading:
        nvml = self._driver()
        return _gpu(nvml, uuid, own, self._links) if nvml else Reading()

    def _driver(self) -> Any:
        """NVML, initialised; None where there is none or it does not answer."""
        nvml = self._open or self._nvml or discovery.pynvml()
        if self._open is None and nvml is not None:
            try:
                nvml.nvmlInit()
            except nvml.NVMLError:
                return None
            self._open = nvml
        return self._open

    def _process(self, own: set[int]) -> Reading:
        """A CPU rank: resident memory, and its share of the cores since the last time."""
        if not own:
            return Reading()
        pid = min(own)
        try:
            process = self._processes.get(pid)
            if process is None:
                process = self._processes[pid] = psutil.Process(pid)
            share = process.cpu_percent() / 100 / (psutil.cpu_count() or 1)
            return Reading(used_bytes=int(process.memory_info().rss), utilization=min(1.0, share))
        except psutil.Error:
            return Reading()  # it has just ended


def _gpu(nvml: Any, uuid: str, own: set[int], links: LinkCounters) -> Reading:
    """One GPU, or MIG instance, as NVML tells it."""

    def asked(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except (nvml.NVMLError, AttributeError):
            return None  # this board, driver or instance does not tell

    handle = asked(lambda: nvml.nvmlDeviceGetHandleByUUID(uuid))
    if handle is None:
        return Reading(note="NVML does not answer for this device")
    memory = asked(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    total_used = None if memory is None else int(memory.total) - int(memory.free)
    running = asked(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    rates = asked(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    power = asked(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    limit = asked(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    sent = asked(lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES))
    heard = asked(lambda: nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES))
    over_links = asked(lambda: links.rates(nvml, uuid, handle)) or (None, None)
    return Reading(
        utilization=None if rates is None else rates.gpu / 100,
        power_w=None if power is None else power / 1000,
        power_limit_w=None if limit is None else limit / 1000,
        temperature_c=asked(
            lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        ),
        pcie_tx=None if sent is None else float(sent) * _KB,
        pcie_rx=None if heard is None else float(heard) * _KB,
        nvlink_tx=over_links[0],
        nvlink_rx=over_links[1],
        **_told_apart(total_used, running, own),
    )


def _told_apart(
    total_used: int | None, running: Sequence[Any] | None, own: set[int]
) -> dict[str, Any]:
    """This session's share of the memory, and that of others, as far as NVML tells."""
    if total_used is None:
        return {"note": "NVML does not tell this device's memory"}
    known = list(running or ())
    ours = [one for one in known if one.pid in own]
    foreign = [one for one in known if one.pid not in own]
    if own and discovery.hides_processes(running, own):
        note = "NVML does not tell this session's processes from others here: all counts as its own"
        return {"used_bytes": total_used, "note": note}
    used = sum(int(one.usedGpuMemory) for one in ours)
    told = [one.usedGpuMemory for one in foreign]
    others = total_used - used if None in told else sum(map(int, told))
    return {
        "used_bytes": used,
        "others_bytes": max(0, others),
        "holders": tuple(discovery.process_name(one.pid) for one in foreign),
    }


class LinkCounters:
    """Rates out of NVLink's counters, which only grow."""

    def __init__(self) -> None:
        """Nothing is counted yet."""
        self._before: dict[str, tuple[float, list[int]]] = {}

    def rates(self, nvml: Any, uuid: str, handle: Any) -> tuple[float | None, float | None]:
        """Bytes a second sent and received over all links since the last call."""
        fields = [(getattr(nvml, name), _ALL_LINKS) for name in _LINK_FIELDS]
        answers = nvml.nvmlDeviceGetFieldValues(handle, fields)
        if any(one.nvmlReturn != nvml.NVML_SUCCESS for one in answers):
            return None, None
        now, counts = time.monotonic(), [int(one.value.ullVal) * _KB for one in answers]
        since, before = self._before.get(uuid, (now, counts))
        self._before[uuid] = now, counts
        if now <= since:
            return None, None
        sent, heard = (
            max(0, new - old) / (now - since) for new, old in zip(counts, before, strict=True)
        )
        return sent, heard
