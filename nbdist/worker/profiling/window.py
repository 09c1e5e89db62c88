"""Lifecycle of a profile on a rank: records after a warm-up until the step times are stable.

``optimizer_hooks`` calls the window at steps of prepared optimizers, on the main thread. Errors in
the profiler are reported to the user and do not affect the training.
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
from nbdist.worker.interrupt.step_gate import step_gate
from nbdist.worker.memory import memory_probe
from nbdist.worker.profiling import kineto
from nbdist.worker.profiling.memory import CpuStepMemory, GpuStepMemory
from nbdist.worker.profiling.optimizer_hooks import active_window
from nbdist.worker.profiling.recorder import StepRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nbdist.profiler.measurements import RankProfile, WindowEndReason
    from nbdist.worker.profiling.window_sync import WindowSync

log = logging.getLogger(__name__)

MIN_STEPS = 5
"""Minimum number of steps for stable step times."""
DEFAULT_STEPS = 10
"""Maximum number of steps if none was requested."""
END_WAIT_STEPS = 3
"""Steps for which a rank waits for the deciding rank to set the end."""
STABLE_SPREAD = 0.03
"""Relative standard deviation below which step times are stable."""
PROGRESS_INTERVAL_S = 0.5
NO_STEP_ERROR = (
    "the cell has no optimizer step that can be profiled; profile a cell that calls step() of"
    " an optimizer from accelerator.prepare()."
)
USER_PROFILER_ERROR = (
    "the cell uses its own torch profiler, and only one can run at a time; profile a cell without"
    " it."
)
USER_PROFILER_NOTE = "Recording ended early because the cell started its own torch profiler."
TOO_FEW_STEPS_ERROR = (
    "the cell made only {made}; a profile needs two or three for the warm-up and at least one to"
    " record."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileContext:
    """Context of a rank that a window needs."""

    rank: int
    folder: Path
    """Private folder of the session, the same on all ranks."""
    cell_of: Callable[[str], tuple[str, str] | None]
    """IPython's `compile.format_code_name`."""
    publish: Callable[[messages.ProfileResult], object]
    show_progress: Callable[[str], object]
    """Reports the progress."""


class ProfileWindow:
    """One profile of this rank, from the request to the published result."""

    def __init__(
        self, request: messages.ProfileRequest, agreement: WindowSync, around: ProfileContext
    ) -> None:
        self._request, self._agreement, self._around = request, agreement, around
        self._lock = threading.RLock()
        self._seen = 0
        """Steps since the request."""
        self._optimizer: weakref.ref[Any] | None = None
        self._recording: StepRecorder | None = None
        self._counting: CpuStepMemory | GpuStepMemory | None = None
        self._figures: RankProfile | None = None
        self._last_progress = 0.0
        self._late = 0
        """Steps after this rank was ready to end without a decision of the deciding rank."""
        agreement.announce_step(step_gate.num_steps_begun)

    # -- the main thread

    def on_step_begin(self) -> None:
        """Handle the start of an optimizer step."""
        with self._catch_errors():
            if self._recording is not None:
                self._recording.on_step_begin()
            elif self._counting is not None:
                self._counting.before_step()

    def on_step_end(self, optimizer: Any) -> None:
        """Handle the end of an optimizer step."""
        with self._catch_errors():
            if self._recording is not None:
                self._recording.on_optimizer_end()
            if self._optimizer is None or self._optimizer() is optimizer:
                self._on_step(optimizer)

    def on_cell_end(self) -> None:
        """Handle the end of the cell, successful or not: publish the result so far."""
        with self._catch_errors():
            if self._figures is not None:
                self._figures.notes.append(
                    "No complete step followed the window, so the memory was not measured."
                )
                self._close()
            elif self._recording is not None and self._recording.num_steps:
                self._stop_recording("cell")
            else:
                self._close(self._too_few())

    def _give_way(self) -> None:
        """Publish the result so far because the cell starts its own profiler."""
        with self._catch_errors():
            if self._recording is None:
                return
            if not self._recording.num_steps:
                self._close(USER_PROFILER_ERROR)
                return
            self._stop_recording("cell", USER_PROFILER_NOTE)

    # -- any thread

    def expire(self) -> None:
        """Cancel the profile if there was no step before the time limit."""
        with self._catch_errors():
            if active_window.window is self and not self._seen:
                self._close(NO_STEP_ERROR)

    # -- inside

    def _on_step(self, optimizer: Any) -> None:
        self._seen += 1
        if self._counting is not None:
            self._end_counting()
        elif self._recording is not None:
            self._recording.on_step_end()
            self._tell()
            if (ended := self._find_end()) is not None:
                self._stop_recording(ended)
        elif self._may_begin():
            if kineto.has_user_profiler():
                self._close(USER_PROFILER_ERROR)
                return
            self._optimizer = weakref.ref(optimizer)
            self._recording = StepRecorder(
                self._around.cell_of,
                rank=self._around.rank,
                trace=self._request["trace"],
                give_way=self._give_way,
            )

    def _may_begin(self) -> bool:
        begin, probe = self._agreement.begin_step, memory_probe.probe_state.probe
        return (
            begin is not None
            and step_gate.num_steps_begun >= begin
            and not (probe and probe.has_begun)
        )

    def _find_end(self) -> WindowEndReason | None:
        """Return why the window ends now, or None. The deciding rank sets the end a step ahead."""
        recording, requested = self._recording, self._request
        if recording is None or not recording.num_steps:
            return None
        if requested["steps"] and recording.num_steps >= requested["steps"]:
            return "steps"
        end = self._agreement.end_step
        if end is not None and step_gate.num_steps_begun >= end:
            return self._end_reason()
        if end is None and self._can_end():
            if not self._agreement.is_leader:
                # The deciding rank may not take part, or may be at another step.
                late = self._late = self._late + 1
                return self._end_reason() if late > END_WAIT_STEPS else None
            self._agreement.announce_end(step_gate.num_steps_begun + 1)
        return None

    def _can_end(self) -> bool:
        """Return whether the window can end after one more step."""
        seconds = self._recording.step_seconds if self._recording is not None else []
        requested = self._request
        if not seconds:
            return False
        if sum(seconds) + seconds[-1] >= requested["limit_s"]:
            return True
        if requested["steps"]:
            return False
        return len(seconds) >= DEFAULT_STEPS - 1 or _are_stable(seconds)

    def _end_reason(self) -> WindowEndReason:
        seconds = self._recording.step_seconds if self._recording is not None else []
        if sum(seconds) >= self._request["limit_s"]:
            return "time"
        return "stable" if len(seconds) < DEFAULT_STEPS else "steps"

    def _stop_recording(self, ended: WindowEndReason, *notes: str) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        with contextlib.closing(recording):
            if ended != "cell":
                recording.wait_for_device()
            recording.stop()
            self._figures = recording.measurements(ended)
            self._figures.notes += notes
        if ended == "cell" or not self._request["memory"]:
            self._close()
        else:
            self._begin_counting()

    def _begin_counting(self) -> None:
        """Measure the memory of the next step."""
        probe = memory_probe.probe_state.probe
        model = probe.prepared_model if probe is not None else None
        if probe is None or model is None or self._figures is None:
            self._close()
            return
        with _note_errors(self._figures):
            if self._figures.kind == "cuda":
                self._counting = GpuStepMemory(
                    probe, model, self._around.cell_of, self._request["trace"], self._around.rank
                )
            elif (reason := memory_probe.why_not_counted(probe)) is None:
                self._counting = CpuStepMemory(probe, model, self._around.cell_of)
            else:
                self._figures.notes.append(reason)
        if self._counting is None:
            self._close()

    def _end_counting(self) -> None:
        counting, self._counting = self._counting, None
        if counting is None or self._figures is None:
            return
        counting.stop()
        with _note_errors(self._figures):
            # torch.compile may have been used for the first time in this step.
            if self._figures.kind == "cpu" and compile_detection.is_compile_active():
                self._figures.notes.append(memory_probe.COMPILE_NOTE)
            else:
                self._figures.memory = counting.measurements()
        self._close()

    def _tell(self) -> None:
        if (
            self._recording is not None
            and time.monotonic() - self._last_progress > PROGRESS_INTERVAL_S
        ):
            self._last_progress = time.monotonic()
            self._around.show_progress(f"profiling: step {self._recording.num_steps + 1}")

    def _too_few(self) -> str:
        if not self._seen:
            return NO_STEP_ERROR
        made = "one optimizer step" if self._seen == 1 else f"{self._seen} optimizer steps"
        return TOO_FEW_STEPS_ERROR.format(made=made)

    def _close(self, error: str = "") -> None:
        """Publish the measurements or an error, once, and remove the instrumentation."""
        if active_window.window is self:
            active_window.window = None
            try:
                self._remove()
            finally:
                self._around.publish(self._result(error))

    def _result(self, error: str) -> messages.ProfileResult:
        if error or self._figures is None:
            return messages.ProfileResult(id=self._request["id"], error=error)
        return messages.ProfileResult(id=self._request["id"], figures=self._figures.to_json())

    def _remove(self) -> None:
        recording, self._recording = self._recording, None
        counting, self._counting = self._counting, None
        with contextlib.ExitStack() as stack:
            if recording is not None:
                stack.callback(recording.close)
            if counting is not None:
                stack.callback(counting.stop)

    @contextlib.contextmanager
    def _catch_errors(self) -> Iterator[None]:
        """Catch and report errors of the profiler. KeyboardInterrupt is raised again."""
        with self._lock:
            try:
                yield
            except Exception as error:
                log.exception("The profiler failed; training continues")
                try:
                    self._close(f"the profiler failed ({type(error).__name__}: {error}).")
                except Exception:
                    log.exception("The profiler could not be removed completely")
            except BaseException:  # an interrupt
                self._close("the profile was interrupted.")
                raise


@contextlib.contextmanager
def _note_errors(figures: RankProfile) -> Iterator[None]:
    """Catch errors of the memory measurement and add a note to `figures`."""
    try:
        yield
    except Exception:
        log.exception("The memory measurement failed")
        figures.notes.append("The memory of a step could not be measured. See the log.")


def _are_stable(seconds: list[float]) -> bool:
    if len(seconds) < MIN_STEPS:
        return False
    return statistics.pstdev(seconds) < STABLE_SPREAD * statistics.fmean(seconds)
