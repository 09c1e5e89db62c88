"""The devices of a session and what they hold and do, once a second, while a panel is open.

Those of this machine are read here (`readings`); those of nodes their agents read, and each node
sends one answer for all of its ranks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nbdist.hardware import discovery
from nbdist.hardware.telemetry import Gauge, Reading
from nbdist.panel.protocol import MAX_SAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nbdist.hardware.discovery import Machine, Node
    from nbdist.hardware.telemetry import Now
    from nbdist.session.placement import Placement

log = logging.getLogger(__name__)

EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Seat:
    """A device of the session, and the ranks on it."""

    name: str
    ranks: tuple[int, ...]
    uuid: str = ""
    """Of a GPU; empty for a CPU rank."""
    capacity_bytes: int | None = None
    node: str = ""
    """Empty on this machine."""


def seats(
    placement: Placement, found: Machine | None = None, nodes: Sequence[Node] = ()
) -> list[Seat]:
    """The devices of a session; a CPU rank counts as one, with its share of the host's memory."""
    if nodes:
        return [seat for node in nodes for seat in _of_node(node)]
    if placement.devices is None:
        share = None if placement.away else discovery.host_bytes() // placement.nproc
        return [_cpu_seat(rank, share) for rank in range(placement.nproc)]
    known = {gpu.uuid: gpu for gpu in (found or discovery.found()).gpus}
    return [
        Seat(known[uuid].title, (rank,), uuid, known[uuid].memory_bytes)
        if uuid in known
        else Seat(f"GPU {index}", (rank,), uuid)
        for rank, (index, uuid) in enumerate(zip(placement.devices, placement.visible, strict=True))
    ]


def _of_node(node: Node) -> Iterator[Seat]:
    """The devices of one node."""
    if not node.machine.gpus:
        share = node.machine.memory_bytes // len(node.ranks)
        yield from (_cpu_seat(rank, share, node.name) for rank in node.ranks)
    for rank, gpu in zip(node.ranks, node.machine.gpus, strict=False):
        yield Seat(gpu.title, (rank,), gpu.uuid, gpu.memory_bytes, node.name)


def _cpu_seat(rank: int, share: int | None, node: str = "") -> Seat:
    return Seat(f"CPU rank {rank}", (rank,), "", share, node)


@dataclass
class Moment:
    """All devices at one moment."""

    time: float
    """Unix seconds."""
    readings: list[Reading] = field(default_factory=list)
    nodes: Mapping[str, Now] = field(default_factory=dict)
    """What each node that answers has said, by name."""


def _no_nodes(_within_s: float) -> dict[str, Now]:
    """All ranks are on this machine."""
    return {}


class Devices:
    """The session's devices; samples in a thread of its own between `open` and `close`.

    Args:
        pids: gives the ranks' processes, by rank.
        placement: gives where the ranks are.
        nodes: gives the nodes they are on; none for this machine.
        ask: gives what each node says now, of those that answer within so many seconds.
        nvml: a module with the functions of `pynvml`, for tests.
    """

    def __init__(
        self,
        pids: Callable[[], Mapping[int, int]],
        placement: Callable[[], Placement],
        *,
        nodes: Callable[[], Sequence[Node]] = list,
        ask: Callable[[float], Mapping[str, Now]] = _no_nodes,
        nvml: Any = None,
    ) -> None:
        """Look at nothing yet."""
        self._pids, self._placement, self._nodes, self._ask = pids, placement, nodes, ask
        self._gauge = Gauge(nvml=nvml)
        self._seated: tuple[object, list[Seat]] = (None, [])
        self._sampled: frozenset[tuple[int, int]] = frozenset()
        """Ranks and processes of the last sample."""
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
        placed = self._placement(), self._nodes()
        if self._seated[0] != placed:
            self._seated = (placed, seats(placed[0], nodes=placed[1]))
            self.forget()
        return self._seated[1]

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes that the devices are on; none for this machine."""
        return self._nodes()

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
        try:
            return self._sample()
        finally:
            self._gauge.close()

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._closed.is_set():
                try:
                    self._sample()
                except Exception:  # a driver that is reset must not end the panel
                    log.exception("the devices could not be read")
                due = max(due + EVERY_S, time.monotonic())
                self._closed.wait(due - time.monotonic())
        finally:
            self._gauge.close()

    def _sample(self) -> Moment:
        pids, places = dict(self._pids()), self.seats
        living = frozenset(pids.items())
        if living and living != self._sampled:  # new ranks: their peaks are still to be seen
            self._sampled = living
            self.peaks.clear()
            self.peaks_now.clear()
        if self._nodes():
            moment = self._told_by_nodes(places)
        else:
            own = ({pids[rank] for rank in seat.ranks if rank in pids} for seat in places)
            uuids = (seat.uuid for seat in places)
            moment = Moment(time.time(), self._gauge.read(zip(uuids, own, strict=True)))
        for place, reading in enumerate(moment.readings):
            used = reading.used_bytes or 0
            for peaks in (self.peaks, self.peaks_now):
                peaks[place] = max(peaks.get(place, 0), used)
        self.history.append(moment)
        return moment

    def _told_by_nodes(self, places: Sequence[Seat]) -> Moment:
        """What the nodes say; a node that does not answer leaves its devices unknown."""
        told = self._ask(EVERY_S)
        by_rank = {rank: one for now in told.values() for rank, one in now.readings.items()}
        readings = [by_rank.get(seat.ranks[0], Reading()) for seat in places]
        return Moment(time.time(), readings, told)
