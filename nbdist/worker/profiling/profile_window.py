"""Lifecycle of a profile on a rank: records after a warm-up until the step times are stable.

``optimizer_step_gate`` calls the window at steps of prepared optimizers, on the main thread. Errors
in the profiler are reported to the user and do not affect the training.
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
from nbdist.worker.memory import memory_probe
from nbdist.worker.optimizer_step_gate import optimizer_step_gate
from nbdist.worker.profiling import kineto
from nbdist.worker.profiling.recorder import CpuStepMemory, GpuStepMemory, StepRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nbdist.profiler.measurements import RankProfile, WindowEndReason
    from nbdist.worker.stacks import CellNamer

log = logging.getLogger(__name__)

LEAD_STEPS = {True: 2, False: 1}
"""Whether the cell is already running -> steps from the request until recording starts. By then
all ranks of a running loop have received the request."""
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
    cell_of: CellNamer
    publish: Callable[[messages.ProfileResult], object]
    show_progress: Callable[[str], object]


def start_profile(
    request: messages.ProfileRequest,
    context: ProfileContext,
    *,
    running: str | None,
    over: str | None,
) -> messages.ProfileStartReply:
    """Arm a profile of the steps of a cell. Called on the control thread.

    Args:
        running: request ID of the running cell, if any.
        over: request ID of the last finished cell.
    """
    if request["running"] and request["cell"] == over:
        error = "the requested cell has already finished; profile the next one."
        return messages.ProfileStartReply(status="refused", error=error)
    if optimizer_step_gate.listener is not None and running is not None:
        error = "a profile is already running; wait until its verdict is shown."
        return messages.ProfileStartReply(status="refused", error=error)
    window = ProfileWindow(request, context)
    optimizer_step_gate.listener = window
    if request["running"]:
        timer = threading.Timer(request["limit_s"], window.expire)
        timer.daemon = True
        timer.start()
    return messages.ProfileStartReply(status="ok")


class SharedStepFiles:
    """Steps by which the ranks agree when to record, in files of the session's private folder.

    Ranks that train together are at most one step apart, so small files are sufficient: each rank
    writes its step at the time of the request, and the first rank writes the step after which all
    ranks end.
    """

    def __init__(self, folder: Path, profile: str) -> None:
        self._path = folder / f"profile-{''.join(filter(str.isalnum, profile))}"

    def write(self, name: str, step: int) -> None:
        """Set a step; readers see the whole number."""
        temporary = self._path.with_suffix(f".{name}.new")
        temporary.write_text(str(step))
        temporary.replace(self._path.with_suffix(f".{name}"))

    def read(self, name: str) -> int | None:
        """Return a step; None until it is set."""
        with contextlib.suppress(OSError, ValueError):
            return int(self._path.with_suffix(f".{name}").read_text())
        return None


class ProfileWindow:
    """One profile of this rank, from the request to the published result."""

    def __init__(self, request: messages.ProfileRequest, context: ProfileContext) -> None:
        self._request, self._context = request, context
        self._lock = threading.RLock()
        self._seen_steps = 0
        """Steps since the request."""
        self._optimizer: weakref.ref[Any] | None = None
        """The optimizer whose steps are the steps of the window."""
        self._recorder: StepRecorder | None = None
        self._memory: CpuStepMemory | GpuStepMemory | None = None
        self._figures: RankProfile | None = None
        self._last_progress = 0.0
        self._late_steps = 0
        """Steps after this rank was ready to end without a decision of the deciding rank."""
        self._begin: int | None = None
        self._shared = SharedStepFiles(context.folder, request["id"])
        self._shared.write(str(context.rank), optimizer_step_gate.num_steps_begun)

    # -- the main thread

    def on_step_begin(self) -> None:
        """Handle the start of an optimizer step."""
        with self._catch_errors():
            if self._recorder is not None:
                self._recorder.on_step_begin()
            elif self._memory is not None:
                self._memory.before_step()

    def on_step_end(self, optimizer: Any) -> None:
        """Handle the end of an optimizer step."""
        with self._catch_errors():
            if self._recorder is not None:
                self._recorder.on_optimizer_end()
            if self._optimizer is not None and self._optimizer() is not optimizer:
                return
            self._seen_steps += 1
            if self._memory is not None:
                self._end_memory()
            elif self._recorder is not None:
                self._recorder.on_step_end()
                if time.monotonic() - self._last_progress > PROGRESS_INTERVAL_S:
                    self._last_progress = time.monotonic()
                    self._context.show_progress(f"profiling: step {self._recorder.num_steps + 1}")
                if (ended := self._find_end(self._recorder)) is not None:
                    self._stop_recording(ended)
            elif self._may_begin():
                if kineto.has_user_profiler():
                    self._close(USER_PROFILER_ERROR)
                    return
                self._optimizer = weakref.ref(optimizer)
                self._recorder = StepRecorder(
                    self._context.cell_of,
                    rank=self._context.rank,
                    trace=self._request["trace"],
                    give_way=self._yield_to_user_profiler,
                )

    def on_cell_end(self) -> None:
        """Handle the end of the cell, successful or not: publish the result so far."""
        with self._catch_errors():
            if self._figures is not None:
                self._figures.notes.append(
                    "No complete step followed the window, so the memory was not measured."
                )
                self._close()
            elif self._recorder is not None and self._recorder.num_steps:
                self._stop_recording("cell")
            elif not self._seen_steps:
                self._close(NO_STEP_ERROR)
            else:
                steps_text = (
                    "one optimizer step"
                    if self._seen_steps == 1
                    else f"{self._seen_steps} optimizer steps"
                )
                self._close(TOO_FEW_STEPS_ERROR.format(made=steps_text))

    def _yield_to_user_profiler(self) -> None:
        """Publish the result so far because the cell starts its own profiler."""
        with self._catch_errors():
            if self._recorder is None:
                return
            if self._recorder.num_steps:
                self._stop_recording("cell", USER_PROFILER_NOTE)
            else:
                self._close(USER_PROFILER_ERROR)

    # -- any thread

    def expire(self) -> None:
        """Cancel the profile if there was no step before the time limit."""
        with self._catch_errors():
            if optimizer_step_gate.listener is self and not self._seen_steps:
                self._close(NO_STEP_ERROR)

    # -- inside

    def _may_begin(self) -> bool:
        """Return whether all ranks start recording; the window opens one step later."""
        if self._begin is None:
            steps = [self._shared.read(str(rank)) for rank in self._request["ranks"]]
            known = [step for step in steps if step is not None]
            if len(known) < len(steps):
                return False
            self._begin = max(known) + LEAD_STEPS[self._request["running"]]
        probe = memory_probe.current_probe.probe
        is_measured = probe is not None and probe.has_begun
        return optimizer_step_gate.num_steps_begun >= self._begin and not is_measured

    def _find_end(self, recorder: StepRecorder) -> WindowEndReason | None:
        """Return why the window ends now, or None. The first rank sets the end a step ahead."""
        seconds, requested = recorder.step_seconds, self._request["steps"]
        if not seconds:
            return None
        if requested and recorder.num_steps >= requested:
            return "steps"
        reason: WindowEndReason = "stable" if len(seconds) < DEFAULT_STEPS else "steps"
        if sum(seconds) >= self._request["limit_s"]:
            reason = "time"
        end = self._shared.read("end")
        if end is not None:
            return reason if optimizer_step_gate.num_steps_begun >= end else None
        can_end = sum(seconds) + seconds[-1] >= self._request["limit_s"]
        if not requested:
            can_end = (
                can_end
                or len(seconds) >= DEFAULT_STEPS - 1
                or (
                    len(seconds) >= MIN_STEPS
                    and statistics.pstdev(seconds) < STABLE_SPREAD * statistics.fmean(seconds)
                )
            )
        if not can_end:
            return None
        if self._context.rank == min(self._request["ranks"]):
            self._shared.write("end", optimizer_step_gate.num_steps_begun + 1)
            return None
        # The deciding rank may not take part, or may be at another step.
        self._late_steps += 1
        return reason if self._late_steps > END_WAIT_STEPS else None

    def _stop_recording(self, ended: WindowEndReason, *notes: str) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        with contextlib.closing(recorder):
            if ended != "cell":
                recorder.wait_for_device()
            recorder.stop()
            self._figures = recorder.measurements(ended)
            self._figures.notes += notes
        probe = memory_probe.current_probe.probe
        model = probe.prepared_model if probe is not None else None
        if ended != "cell" and self._request["memory"] and probe is not None and model is not None:
            cell_of = self._context.cell_of
            with _note_errors(self._figures):
                if self._figures.kind == "cuda":
                    trace, rank = self._request["trace"], self._context.rank
                    self._memory = GpuStepMemory(probe, model, cell_of, trace, rank)
                elif (reason := memory_probe.why_not_counted(probe)) is None:
                    self._memory = CpuStepMemory(probe, model, cell_of)
                else:
                    self._figures.notes.append(reason)
        if self._memory is None:
            self._close()

    def _end_memory(self) -> None:
        memory, self._memory = self._memory, None
        if memory is None or self._figures is None:
            return
        memory.stop()
        with _note_errors(self._figures):
            # torch.compile may have been used for the first time in this step.
            if self._figures.kind == "cpu" and memory_probe.is_compile_active():
                self._figures.notes.append(memory_probe.COMPILE_NOTE)
            else:
                self._figures.memory = memory.measurements()
        self._close()

    def _close(self, error: str = "") -> None:
        """Publish the measurements or an error, once, and remove the instrumentation."""
        if optimizer_step_gate.listener is not self:
            return
        optimizer_step_gate.listener = None
        recorder, self._recorder = self._recorder, None
        memory, self._memory = self._memory, None
        with contextlib.ExitStack() as stack:
            result = messages.ProfileResult(id=self._request["id"], error=error)
            if not error and self._figures is not None:
                figures = self._figures.to_json()
                result = messages.ProfileResult(id=self._request["id"], figures=figures)
            stack.callback(self._context.publish, result)
            if recorder is not None:
                stack.callback(recorder.close)
            if memory is not None:
                stack.callback(memory.stop)

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
    try:
        yield
    except Exception:
        log.exception("The memory measurement failed")
        figures.notes.append("The memory of a step could not be measured. See the log.")
