"""What GPUs and CPU ranks hold and do now, once a second, while a panel is open.

NVML is asked and never CUDA: no context, no torch. Every figure is None where NVML does not have
it. Of processes NVML tells host pids: in a container with pids of its own nothing can be told
apart, and the reading says so. CPU ranks are their processes' resident memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from nbdist import machine
from nbdist.panel.protocol import MAX_SAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nbdist.kernel.devices import Placement

log = logging.getLogger(__name__)

EVERY_S = 1.0
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
class Seat:
    """A device of the session, and the ranks on it."""

    name: str
    ranks: tuple[int, ...]
    uuid: str = ""
    """Of a GPU; empty for a CPU rank."""
    capacity_bytes: int | None = None


def seats(placement: Placement, found: machine.Machine | None = None) -> list[Seat]:
    """The devices of a session; a CPU rank counts as one, with its share of the host's memory."""
    if placement.devices is None:
        share = None if placement.away else host_bytes() // placement.nproc
        return [Seat(f"CPU rank {rank}", (rank,), "", share) for rank in range(placement.nproc)]
    known = {gpu.uuid: gpu for gpu in (found or machine.found()).gpus}
    return [
        Seat(known[uuid].title, (rank,), uuid, known[uuid].memory_bytes)
        if uuid in known
        else Seat(f"GPU {index}", (rank,), uuid)
        for rank, (index, uuid) in enumerate(zip(placement.devices, placement.visible, strict=True))
    ]


def host_bytes() -> int:
    """Memory of this machine, or of this container."""
    total = int(psutil.virtual_memory().total)
    try:
        limit = (machine.CGROUP / "memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


@dataclass
class Moment:
    """All devices at one moment."""

    time: float
    """Unix seconds."""
    readings: list[Reading] = field(default_factory=list)


class Devices:
    """The session's devices; samples in a thread of its own between `open` and `close`.

    Args:
        pids: gives the ranks' processes, by rank.
        placement: gives where the ranks are.
        nvml: a module with the functions of `pynvml`, for tests.
    """

    def __init__(
        self,
        pids: Callable[[], Mapping[int, int]],
        placement: Callable[[], Placement],
        *,
        nvml: Any = None,
    ) -> None:
        """Look at nothing yet."""
        self._pids, self._placement = pids, placement
        self._nvml = nvml
        self._seated: tuple[Placement | None, list[Seat]] = (None, [])
        self._sampled: frozenset[int] = frozenset()
        """Processes of the ranks in the last sample."""
        self._processes: dict[int, psutil.Process] = {}
        self._links = LinkCounters()
        self.history: deque[Moment] = deque(maxlen=MAX_SAMPLES)
        self.peaks: dict[int, int] = {}
        """Place of a device -> most bytes of the session's ranks that were seen."""
        self.peaks_now: dict[int, int] = {}
        """The same since the strategy began."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def seats(self) -> list[Seat]:
        """The devices now."""
        placement = self._placement()
        if self._seated[0] != placement:
            self._seated = (placement, seats(placement))
            self.forget()
        return self._seated[1]

    @property
    def latest(self) -> Moment | None:
        """The last sample."""
        return self.history[-1] if self.history else None

    def forget(self) -> None:
        """Other ranks or devices: what was seen says nothing of them."""
        self.history.clear()
        self.peaks.clear()
        self.peaks_now.clear()

    def strategy_changed(self) -> None:
        """Another engine: what it takes at most is still to be seen."""
        self.peaks_now.clear()

    def open(self) -> None:
        """Begin to sample."""
        if self._thread is None:
            self._closed.clear()
            self._thread = threading.Thread(target=self._run, name="nbdist-devices", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(2 * EVERY_S)
            self._thread = None

    def look(self) -> Moment:
        """Take one sample now."""
        with self._driver() as nvml:
            return self._sample(nvml)

    def _run(self) -> None:
        while not self._closed.is_set():
            with self._driver() as nvml:
                self._sample_on(nvml)

    def _sample_on(self, nvml: Any) -> None:
        """Sample until the end, or until a switch has brought other devices."""
        places, due = self.seats, time.monotonic()
        while not self._closed.is_set() and self.seats is places:
            try:
                self._sample(nvml)
            except Exception:  # a driver that is reset must not end the panel
                log.exception("the devices could not be read")
            due = max(due + EVERY_S, time.monotonic())
            self._closed.wait(due - time.monotonic())

    @contextlib.contextmanager
    def _driver(self) -> Iterator[Any]:
        """NVML, initialised; None where no rank is on a GPU or there is no driver."""
        if not any(seat.uuid for seat in self.seats):
            yield None
            return
        nvml = self._nvml or machine.pynvml()
        if nvml is not None:
            try:
                nvml.nvmlInit()
            except nvml.NVMLError:
                nvml = None
        try:
            yield nvml
        finally:
            if nvml is not None:
                nvml.nvmlShutdown()

    def _sample(self, nvml: Any) -> Moment:
        pids, places = dict(self._pids()), self.seats
        moment, living = Moment(time.time()), frozenset(pids.values())
        self._processes = {pid: self._processes[pid] for pid in living & self._processes.keys()}
        if living and living != self._sampled:  # new ranks: their peaks are still to be seen
            self._sampled = living
            self.peaks.clear()
            self.peaks_now.clear()
        for seat in places:
            own = {pids[rank] for rank in seat.ranks if rank in pids}
            if seat.uuid:
                moment.readings.append(
                    _gpu(nvml, seat.uuid, own, self._links) if nvml else Reading()
                )
            else:
                moment.readings.append(self._process(next(iter(own), None)))
        for place, reading in enumerate(moment.readings):
            used = reading.used_bytes or 0
            for peaks in (self.peaks, self.peaks_now):
                peaks[place] = max(peaks.get(place, 0), used)
        self.history.append(moment)
        return moment

    def _process(self, pid: int | None) -> Reading:
        """A CPU rank: resident memory, and its share of the cores since the last sample."""
        if pid is None:
            return Reading()
        try:
            process = self._processes.get(pid)
            if process is None:
                process = self._processes[pid] = psutil.Process(pid)
            share = process.cpu_percent() / 100 / (psutil.cpu_count() or 1)
            return Reading(used_bytes=int(process.memory_info().rss), utilization=min(1.0, share))
        except psutil.Error:
            return Reading()  # it has just ended


# ---------------------------------------------------------------------------- NVML


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
    hidden = running is None or any(one.usedGpuMemory is None for one in ours)
    # Pids of the host, which this container does not have: a rank may be among them.
    hidden = hidden or (not ours and not all(psutil.pid_exists(one.pid) for one in foreign))
    if own and hidden:
        note = "NVML does not tell this session's processes from others here: all counts as its own"
        return {"used_bytes": total_used, "note": note}
    used = sum(int(one.usedGpuMemory) for one in ours)
    told = [one.usedGpuMemory for one in foreign]
    others = total_used - used if None in told else sum(map(int, told))
    return {
        "used_bytes": used,
        "others_bytes": max(0, others),
        "holders": tuple(machine.process_name(one.pid) for one in foreign),
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
