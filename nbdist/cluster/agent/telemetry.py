"""What this node holds and does now, measured while the kernel asks.

Runs in the agent, on a thread of its own: NVML may take long, and the agent's own thread passes on
messages. NVML is let go when nobody has asked for a while.
"""

from __future__ import annotations

import logging
import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from nbdist.hardware import discovery
from nbdist.hardware.telemetry import Gauge, Now

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Ranks = Mapping[int, tuple[str, int | None]]

log = logging.getLogger(__name__)

IDLE_S = 5.0
"""Panels ask every second."""


class Watch:
    """Answers one question after the other.

    Args:
        answer: gets the number of a question and its answer; called on the thread.
    """

    def __init__(self, answer: Callable[[int, dict[str, Any]], None]) -> None:
        """Measure nothing yet."""
        self._answer = answer
        self._gauge = Gauge()
        self._asked: SimpleQueue[tuple[int, Ranks] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, number: int, ranks: Ranks) -> None:
        """Ask; may not be called after `close`.

        Args:
            number: of the question.
            ranks: the UUID of each rank's GPU, "" without one, and its process, if it has one yet.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="watch", daemon=True)
            self._thread.start()
        self._asked.put((number, ranks))

    def close(self) -> None:
        """Let NVML go and end the thread."""
        self._asked.put(None)

    def _serve(self) -> None:
        idle_s: float | None = None
        while True:
            try:
                asked = self._asked.get(timeout=idle_s)
            except Empty:
                self._gauge.close()
                idle_s = None
                continue
            if asked is None:
                self._gauge.close()
                return
            idle_s = IDLE_S
            number, ranks = asked
            try:
                self._answer(number, self._now(ranks).to_json())
            except Exception:  # a driver that is reset must not end the thread
                log.exception("the devices could not be read")

    def _now(self, ranks: Ranks) -> Now:
        devices = [(uuid, () if pid is None else (pid,)) for uuid, pid in ranks.values()]
        readings = self._gauge.read(devices)
        return Now(discovery.host_free_bytes(), dict(zip(ranks, readings, strict=True)))
