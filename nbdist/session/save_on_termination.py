"""Saves a run that is ended from outside: by SIGTERM or at a deadline; in the notebook's kernel.

All ranks stop after the same optimizer step and save a checkpoint whose manifest says what ended
the run; `Session.resume` loads it. SIGTERM may reach the kernel, a rank, the launcher or the agent
of a node. Ranks, launcher and agent report it to the kernel, and run until it ends them.

A running cell is stopped as by an interrupt, except that the ranks complete the step that they
are in. The thread that waits for the cell saves before it returns, because nbclient and papermill
shut down the kernel after a failed cell. If no thread waits for a cell, the thread that handles
the signal saves.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from IPython.core.getipython import get_ipython

from nbdist.checkpoint import location_with_password
from nbdist.errors import CellInterrupted, NbdistError, OptionError
from nbdist.number_formatting import format_seconds
from nbdist.output.sink import finished_cell
from nbdist.planner.build_model_spec import spec_from_json
from nbdist.planner.model_spec import num_trainable_params
from nbdist.protocol.messages import TERMINATION_GRACE_S
from nbdist.protocol.operations import SaveRequest
from nbdist.session.rank_activity import PreparedModelPoller
from nbdist.signal_handling import TerminationSignal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.session.cell_runner import CellRunner
    from nbdist.session.checkpoints import BackgroundSaves
    from nbdist.session.worker_group import WorkerGroup

DEADLINE = "the deadline"
"""What ends a run at its deadline; the ranks can be used again after it."""
MARGIN_S = 10.0
"""Time before a deadline to stop the ranks, besides twice the predicted time of a save."""
POLL_S = 1.0
"""Interval at which the time of a save is predicted."""
PROBE_BYTES = 32 << 20
"""Size of the file with which the speed of a disk is measured."""
BYTES_PER_PARAM = 12
"""An fp32 weight and two moments."""
CELL_ERROR_S = 2.0
"""Time for a cell to show that it was ended, before the kernel ends."""
SEND_S = 0.1
"""Time for the kernel's threads to send what was printed."""
BATCH_JOB_VARIABLES = ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST")
"""Environment variables of jobs that end with SIGTERM."""


class RunTermination:
    """Stops and saves the run of one session when it is ended from outside."""

    def __init__(
        self,
        workers: WorkerGroup,
        cells: CellRunner,
        saves: BackgroundSaves,
        lock: threading.RLock,
    ) -> None:
        self.cause = ""
        """What is ending the run, while it is stopped and saved; else ""."""
        self.deadline: float | None = None
        """Unix time at which the run ends."""
        self._workers, self._cells, self._saves, self._lock = workers, cells, saves, lock
        self._outcome, self._until, self._guard = "", 0.0, threading.Lock()
        self._closed = threading.Event()
        self._prediction = SavePrediction(workers, saves)
        self._warned = False

    # -- life

    def start(self) -> None:
        """Handle SIGTERM, if this is the main thread, and watch the deadline."""
        self._closed.set()
        self._closed, self._screen = threading.Event(), finished_cell()
        if self not in _live:
            _live.append(self)
        if not _handlers and threading.current_thread() is threading.main_thread():
            _handlers.append(TerminationSignal(_on_sigterm))
        threading.Thread(
            target=self._watch, args=(self._closed,), name="nbdist-deadline", daemon=True
        ).start()

    def close(self) -> None:
        """Stop to handle SIGTERM and the deadline."""
        self._closed.set()
        if self in _live:
            _live.remove(self)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not _live and _handlers:
            _handlers.pop().close()

    # -- the end of a run

    def end(self, cause: str, *, grace_s: float = TERMINATION_GRACE_S) -> bool:
        """Stop the ranks and save, once; on a thread of its own.

        Args:
            cause: what ends the run.
            grace_s: time for it.

        Returns:
            True if a cell was stopped by it and reports the checkpoint.
        """
        with self._guard:
            if not self.cause:
                self._outcome, self._until = "", time.monotonic() + grace_s
                self.cause = cause
                self._cells.print_line(f"nbdist: {cause}: stopping after this step, then saving")
                self._cells.stop_after_step(grace_s / 3)
        if not self._lock.acquire(timeout=max(self._remaining_s(), 0.0)):
            if self.cause and not self._outcome:
                self._print(
                    f"Ended by {cause}; no checkpoint was saved: the ranks did not stop in time"
                )
            return False
        try:
            if self._outcome or not self.cause:  # the thread of the cell has saved
                return True
            if (cell := self._cells.running_cell) is not None:  # in the background
                cell.finished.wait(max(self._remaining_s(), 0.0))
            with contextlib.suppress(NbdistError):  # reported by the save
                self._cells.resync_ranks()
            self._print(self.save_once())
            return False
        finally:
            self._lock.release()

    def finish(self) -> None:
        """Allow the use of the ranks again, or of new ones."""
        self.cause = self._outcome = ""

    def finish_saved_deadline(self) -> None:
        """Allow the use of the ranks if the checkpoint of a deadline has been saved."""
        if self.cause == DEADLINE and self._outcome:
            self.finish()

    def save_once(self) -> str:
        """Save if the run is being ended and was not saved yet; the caller holds the lock.

        Returns:
            What happened; "" if the run is not being ended.
        """
        if not self.cause or self._outcome:
            return self._outcome
        request = SaveRequest(
            root=location_with_password(self._saves.checkpoints.root),
            name=f"ended-{datetime.now().astimezone():%Y%m%d-%H%M%S}",
            ended=self.cause,
        )
        try:
            save = self._saves.start_save(request, self._workers)
            saved = save.wait(max(self._remaining_s(), 1.0))
        except (NbdistError, TimeoutError, KeyboardInterrupt) as error:
            self._outcome = f"Ended by {self.cause}; no checkpoint was saved: {error}"
        else:
            self._outcome = (
                f"Ended by {self.cause}: all ranks stopped after step {saved.step} and saved"
                f" checkpoint {saved.name}. To continue in a new session or after %nbdist restart,"
                " prepare the model, then use %nbdist resume; a Trainer takes"
                f" train(resume_from_checkpoint={str(saved.path)!r})."
            )
        return self._outcome

    @contextlib.contextmanager
    def save_after_cell(self) -> Iterator[None]:
        """Save after the cell in this context, if it was stopped because the run is ended.

        Raises:
            CellInterrupted: the cell was stopped; the message contains the checkpoint.
        """
        try:
            yield
        except CellInterrupted:
            if not (outcome := self.save_once()):
                raise
            if (cell := self._cells.last_cell) is not None:
                cell.termination = outcome
            raise CellInterrupted(outcome) from None
        except NbdistError:
            self.save_once()
            raise

    def _remaining_s(self) -> float:
        return self._until - time.monotonic()

    def _print(self, text: str) -> None:
        self._screen.write("stderr", f"nbdist: {text}\n")
        self._screen.flush()

    # -- before the end

    def _watch(self, closed: threading.Event) -> None:
        """Warn if a save takes longer than the time there will be for it; end at the deadline."""
        in_batch_job = any(name in os.environ for name in BATCH_JOB_VARIABLES)
        while not closed.wait(POLL_S):
            if self.deadline is None and not in_batch_job:
                continue
            predicted_s = self._prediction.seconds() or 0.0
            if self.deadline is None:
                if predicted_s > TERMINATION_GRACE_S:
                    self._warn(
                        predicted_s,
                        f"the usual {TERMINATION_GRACE_S:.0f} s between SIGTERM and SIGKILL",
                    )
                continue
            left_s = self.deadline - time.time()
            if 0 < left_s < predicted_s:
                self._warn(predicted_s, f"the {format_seconds(left_s)} before the deadline")
            if left_s < MARGIN_S + 2 * predicted_s:
                self.deadline = None
                self.end(DEADLINE, grace_s=max(left_s, MARGIN_S))
                if self.cause == DEADLINE:
                    self.finish()

    def _warn(self, predicted_s: float, available: str) -> None:
        if not self._warned:
            self._warned = True
            self._print(
                f"a save is predicted to take {format_seconds(predicted_s)}, longer than"
                f" {available}. Save earlier with %nbdist save NAME or set %config NbDist.deadline"
            )


class SavePrediction:
    """Predicts the time of a save from the last one, or from the sizes of model and disk speed."""

    def __init__(self, workers: WorkerGroup, saves: BackgroundSaves) -> None:
        self._saves, self._model = saves, PreparedModelPoller(workers)
        self._size_bytes = 0
        self._bytes_per_s = 0.0

    def seconds(self) -> float | None:
        """Return the predicted time; None as long as nothing is known about the model."""
        if self._saves.last_seconds is not None:
            return self._saves.last_seconds
        root = self._saves.checkpoints.root
        if not isinstance(root, Path):
            return None
        if not self._size_bytes:
            reply = self._model.poll_reply()
            if reply is None:
                self._model.send_request("cpu")
                return None
            self._size_bytes = BYTES_PER_PARAM * num_trainable_params(spec_from_json(reply["spec"]))
        with contextlib.suppress(OSError):  # a save reports that the disk cannot be written
            self._bytes_per_s = self._bytes_per_s or measure_disk(root)
        return self._size_bytes / self._bytes_per_s if self._bytes_per_s else None


def measure_disk(folder: Path) -> float:
    """Return the speed in bytes/s with which a file is written and synced in a folder."""
    parent = next(path for path in (folder, *folder.parents) if path.is_dir())
    with tempfile.TemporaryFile(dir=parent) as file:
        content, begin = os.urandom(PROBE_BYTES), time.perf_counter()
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        return PROBE_BYTES / (time.perf_counter() - begin)


def parse_deadline(deadline: str | float) -> float:
    """Return the Unix time of a deadline.

    Args:
        deadline: a duration since the start of this process ("8h50m"), a clock time ("17:30"), a
            date and time ("2026-11-24T17:30"), or a Unix time.

    Raises:
        OptionError: none of these, or in the past.
    """
    now, text = datetime.now().astimezone(), str(deadline).strip()
    part = r"(?:(\d+(?:\.\d+)?)"
    duration = re.fullmatch(rf"{part}h)? *{part}m)? *{part}s)?", text, re.IGNORECASE)
    try:
        if duration and text:
            hours, minutes, seconds = (float(part or 0) for part in duration.groups())
            length = timedelta(hours=hours, minutes=minutes, seconds=seconds)
            at = datetime.fromtimestamp(psutil.Process().create_time()).astimezone() + length
        elif re.fullmatch(r"\d?\d:\d\d(:\d\d)?", text):
            at = datetime.fromisoformat(f"{now:%Y-%m-%d} {text.zfill(5)}").astimezone()
            at += timedelta(days=at <= now)
        elif re.fullmatch(r"\d+(\.\d+)?", text):
            at = datetime.fromtimestamp(float(text)).astimezone()
        else:
            at = datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError, OSError) as error:
        raise OptionError(
            f"Invalid deadline {text!r}. Use a time since the start of this kernel such as 8h50m,"
            " a clock time such as 17:30, a date and time such as 2026-11-24T17:30, or a Unix time."
        ) from error
    if at <= now:
        raise OptionError(
            f"The deadline {text} is in the past: it was at {at:%Y-%m-%d %H:%M:%S}, and it is"
            f" {now:%H:%M:%S}. Use a later one."
        )
    return at.timestamp()


_live: list[RunTermination] = []
"""Those of all sessions with ranks."""
_handlers: list[TerminationSignal] = []
"""The handler of SIGTERM of this process, once it is installed."""


def _on_sigterm() -> None:
    """Save the runs of all sessions, then end this process as without nbdist."""
    reported = threading.Event()
    if shell := get_ipython():
        shell.events.register("post_run_cell", lambda _: reported.set())
    try:
        in_cell = [termination.end("SIGTERM") for termination in tuple(_live)]
        if shell and any(in_cell):
            reported.wait(CELL_ERROR_S)
        time.sleep(SEND_S)
    finally:
        if _handlers:
            _handlers[0].deliver()
        else:  # the last session was stopped meanwhile
            os.kill(os.getpid(), signal.SIGTERM)
