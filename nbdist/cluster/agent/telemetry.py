"""Measures this node's usage on request of the kernel.

Runs in the agent on its own thread: NVML can be slow, and the agent's main thread forwards
messages. NVML is closed after some idle time.
"""

from __future__ import annotations

import logging
import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from nbdist.hardware import discovery
from nbdist.hardware.telemetry import GpuMonitor, UsageSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Ranks = Mapping[int, tuple[str, int | None]]

log = logging.getLogger(__name__)

IDLE_S = 5.0
"""Idle time before NVML is closed; panels request usage every second."""


class UsageMonitor:
    """Measures usage, one request at a time.

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
            try:
                self._on_result(number, self._now(ranks).to_json())
            except Exception:  # a driver reset must not end the thread
                log.exception("cannot read the devices")

    def _now(self, ranks: Ranks) -> UsageSnapshot:
        devices = [(uuid, () if pid is None else (pid,)) for uuid, pid in ranks.values()]
        readings = self._monitor.read_gpus(devices)
        return UsageSnapshot(
            discovery.host_free_memory_bytes(), dict(zip(ranks, readings, strict=True))
        )
