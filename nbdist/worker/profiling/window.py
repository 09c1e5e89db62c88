"""When a profile records on this rank: after a warm-up, until the figures are stable.

`steps` tells of the steps of prepared optimizers, on the main thread. What fails here is told
in a sentence, and training goes on as it would have without.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbdist.protocol import messages
from nbdist.worker.engines import compile_detection
from nbdist.worker.interrupt.step_gate import gate
from nbdist.worker.memory import memory_probe
from nbdist.worker.profiling import kineto
from nbdist.worker.profiling.memory import Counting, History
from nbdist.worker.profiling.optimizer_hooks import slot
from nbdist.worker.profiling.recorder import Recording

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nbdist.profiler.measurements import Ended, RankFigures
    from nbdist.worker.profiling.window_sync import Agreement

log = logging.getLogger(__name__)

FEWEST_STEPS = 5
"""Before step times can be called stable."""
MOST_STEPS = 10
"""Where no number was asked for."""
PATIENCE_STEPS = 3
"""For which a rank waits for rank 0's word on the end."""
STABLE = 0.03
"""Relative spread of step times."""
TOLD_EVERY_S = 0.5
NO_STEP = (
    "the cell made no optimizer step that could be profiled; profile a cell that calls step() of"
    " an optimizer from accelerator.prepare()."
)
OTHER_PROFILER = (
    "the cell runs a profiler of its own, and torch has room for one; profile a cell without it."
)
ENDED_BY_OTHER = "the window ended where the cell started a profiler of its own."
TOO_FEW = (
    "the cell made {made} before it ended; a profile needs more: two or three warm up, and at least"
    " one is recorded."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a window needs of its rank."""

    rank: int
    folder: Path
    """Private to the session, the same on all ranks."""
    cell_of: Callable[[str], tuple[str, str] | None]
    """IPython's `compile.format_code_name`."""
    publish: Callable[[messages.Profiled], object]
    tell: Callable[[str], object]
    """Says how far it is, for all ranks."""


class Window:
    """One profile of this rank, from the request to what is published."""

    def __init__(
        self, asked: messages.ProfileRequest, agreement: Agreement, around: Surroundings
    ) -> None:
        """Wait for steps."""
        self._asked, self._agreement, self._around = asked, agreement, around
        self._lock = threading.RLock()
        self._seen = 0
        """Steps since it was asked for."""
        self._optimizer: weakref.ref[Any] | None = None
        self._recording: Recording | None = None
        self._counting: Counting | History | None = None
        self._figures: RankFigures | None = None
        self._told_at = 0.0
        self._late = 0
        """Steps for which rank 0 has not said what this rank could say."""
        agreement.asked(gate.entered)

    # -- the main thread

    def step_begins(self) -> None:
        """A prepared optimizer is about to use gradients."""
        with self._harmless():
            if self._recording is not None:
                self._recording.step_begins()
            elif self._counting is not None:
                self._counting.before_step()

    def step_ended(self, optimizer: Any) -> None:
        """A prepared optimizer has used them."""
        with self._harmless():
            if self._recording is not None:
                self._recording.optimizer_ended()
            if self._optimizer is None or self._optimizer() is optimizer:
                self._on_step(optimizer)

    def cell_ended(self) -> None:
        """The code of the cell is over, in whatever way: publish what there is."""
        with self._harmless():
            if self._figures is not None:
                self._figures.notes.append(
                    "no whole step followed the window, so its memory was not counted."
                )
                self._close()
            elif self._recording is not None and self._recording.steps:
                self._stop_recording("cell")
            else:
                self._close(self._too_few())

    def _give_way(self) -> None:
        """The cell starts a profiler of its own, which wins: publish what there is."""
        with self._harmless():
            if self._recording is None:
                return
            if not self._recording.steps:
                self._close(OTHER_PROFILER)
                return
            self._stop_recording("cell", ENDED_BY_OTHER)

    # -- any thread

    def expire(self) -> None:
        """Give up where no step has come in all this time."""
        with self._harmless():
            if slot.window is self and not self._seen:
                self._close(NO_STEP)

    # -- inside

    def _on_step(self, optimizer: Any) -> None:
        self._seen += 1
        if self._counting is not None:
            self._end_counting()
        elif self._recording is not None:
            self._recording.step_ended()
            self._tell()
            if (ended := self._ended()) is not None:
                self._stop_recording(ended)
        elif self._may_begin():
            if kineto.is_running():
                self._close(OTHER_PROFILER)
                return
            self._optimizer = weakref.ref(optimizer)
            self._recording = Recording(
                self._around.cell_of,
                rank=self._around.rank,
                trace=self._asked["trace"],
                give_way=self._give_way,
            )

    def _may_begin(self) -> bool:
        begin, watch = self._agreement.begin, memory_probe.state.watch
        return begin is not None and gate.entered >= begin and not (watch and watch.begun)

    def _ended(self) -> Ended | None:
        """Why the window is over now; rank 0 says so a step before."""
        recording, asked = self._recording, self._asked
        if recording is None or not recording.steps:
            return None
        if asked["steps"] and recording.steps >= asked["steps"]:
            return "steps"
        end = self._agreement.end
        if end is not None and gate.entered >= end:
            return self._why()
        if end is None and self._enough():
            if not self._agreement.decides:
                # rank 0 takes no part, or is another number of steps away
                late = self._late = self._late + 1
                return self._why() if late > PATIENCE_STEPS else None
            self._agreement.end_after(gate.entered + 1)
        return None

    def _enough(self) -> bool:
        """Whether one step more is enough."""
        seconds = self._recording.seconds if self._recording is not None else []
        asked = self._asked
        if not seconds:
            return False
        if sum(seconds) + seconds[-1] >= asked["limit_s"]:
            return True
        if asked["steps"]:
            return False
        return len(seconds) >= MOST_STEPS - 1 or _are_stable(seconds)

    def _why(self) -> Ended:
        seconds = self._recording.seconds if self._recording is not None else []
        if sum(seconds) >= self._asked["limit_s"]:
            return "time"
        return "stable" if len(seconds) < MOST_STEPS else "steps"

    def _stop_recording(self, ended: Ended, *notes: str) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        with contextlib.closing(recording):
            if ended != "cell":
                recording.wait_for_device()
            recording.stop()
            self._figures = recording.figures(ended)
            self._figures.notes += notes
        if ended == "cell" or not self._asked["memory"]:
            self._close()
        else:
            self._begin_counting()

    def _begin_counting(self) -> None:
        """Count the memory of the step that comes."""
        watch = memory_probe.state.watch
        model = watch.prepared if watch is not None else None
        if watch is None or model is None or self._figures is None:
            self._close()
            return
        with _noted(self._figures):
            if self._figures.kind == "cuda":
                self._counting = History(
                    watch, model, self._around.cell_of, self._asked["trace"], self._around.rank
                )
            elif (reason := memory_probe.why_not_counted(watch)) is None:
                self._counting = Counting(watch, model, self._around.cell_of)
            else:
                self._figures.notes.append(reason)
        if self._counting is None:
            self._close()

    def _end_counting(self) -> None:
        counting, self._counting = self._counting, None
        if counting is None or self._figures is None:
            return
        counting.stop()
        with _noted(self._figures):
            if (
                self._figures.kind == "cpu" and compile_detection.in_use()
            ):  # it came in this very step
                self._figures.notes.append(memory_probe.NOT_SEEN)
            else:
                self._figures.memory = counting.figures()
        self._close()

    def _tell(self) -> None:
        if self._recording is not None and time.monotonic() - self._told_at > TOLD_EVERY_S:
            self._told_at = time.monotonic()
            self._around.tell(f"profiling: step {self._recording.steps + 1}")

    def _too_few(self) -> str:
        if not self._seen:
            return NO_STEP
        made = "one optimizer step" if self._seen == 1 else f"{self._seen} optimizer steps"
        return TOO_FEW.format(made=made)

    def _close(self, error: str = "") -> None:
        """Publish once, figures or why there are none, and remove everything."""
        if slot.window is self:
            slot.window = None
            try:
                self._remove()
            finally:
                self._around.publish(self._told(error))

    def _told(self, error: str) -> messages.Profiled:
        if error or self._figures is None:
            return messages.Profiled(id=self._asked["id"], error=error)
        return messages.Profiled(id=self._asked["id"], figures=self._figures.to_json())

    def _remove(self) -> None:
        recording, self._recording = self._recording, None
        counting, self._counting = self._counting, None
        with contextlib.ExitStack() as both:
            if recording is not None:
                both.callback(recording.close)
            if counting is not None:
                both.callback(counting.stop)

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Let profiling fail without the user's training; Stop goes through."""
        with self._lock:
            try:
                yield
            except Exception as error:
                log.exception("the profile failed; training goes on")
                try:
                    self._close(f"the profile failed ({type(error).__name__}: {error}).")
                except Exception:
                    log.exception("the profile was told, and not removed whole")
            except BaseException:  # Stop, in the middle of it
                self._close("Stop was pressed while the profile was made.")
                raise


@contextlib.contextmanager
def _noted(figures: RankFigures) -> Iterator[None]:
    """Say with the figures that the memory of a step could not be counted, where that fails."""
    try:
        yield
    except Exception:
        log.exception("memory could not be counted")
        figures.notes.append("the memory of a step could not be counted; see the log.")


def _are_stable(seconds: list[float]) -> bool:
    if len(seconds) < FEWEST_STEPS:
        return False
    return statistics.pstdev(seconds) < STABLE * statistics.fmean(seconds)
