"""One run of an experiment tracker per start of the ranks, fed by `report()`.

A thread reads the means over ranks and the events of a session, and passes them to the process that
writes the run (`tracker_process`). An error of the tracker ends the run and nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import math
import os
import select
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from nbdist.cluster.launcher_process import remove_launch_variables
from nbdist.errors import OptionError
from nbdist.hardware import process_identity
from nbdist.output.sink import finished_cell
from nbdist.redaction import redact_secrets
from nbdist.session.metrics import UnsentPoints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.session.metrics import Metrics, TrainingEvents

TRACKERS = {
    "tensorboard": "DIR",
    "trackio": "PROJECT",
    "wandb": "PROJECT",
    "mlflow": "EXPERIMENT",
}
"""What follows the name of each tracker. The names are those of Accelerate and of the packages."""
INTERVAL_S = 0.5
"""New rows are passed on at this interval."""
RANK_WAIT_S = 5.0
"""A step waits this long for ranks that have not reported it: a client may not replace a point."""
CLOSE_TIMEOUT_S = 30.0
"""Time for the client to finish a run before its process is ended."""


@dataclass(frozen=True, slots=True)
class Tracker:
    """A tracker and where it writes."""

    name: str
    target: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "tensorboard:DIR".

        Raises:
            OptionError: not a known tracker, or one whose package is not installed.
        """
        name, _, target = text.partition(":")
        if name not in TRACKERS or not target:
            known = ", ".join(f"{key}:{value}" for key, value in TRACKERS.items())
            raise OptionError(f"track must be one of {known}, got {text!r}.")
        if importlib.util.find_spec(name) is None:
            package = "mlflow-skinny" if name == "mlflow" else name
            raise OptionError(
                f"track = {text!r} needs the package {package}, which is not installed. Run"
                f" %pip install {package}."
            )
        if name == "tensorboard":
            target = str(Path(target).expanduser().absolute())
        return cls(name, target)

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return f"{self.name}:{self.target}"


class TrackedRun:
    """A run that is being written. Starting it takes milliseconds; the imports run in its process.

    Args:
        tracker: the tracker.
        metrics: the rows that arrive after the start of the run are written.
        events: events to write, also earlier ones.
        config: returns the options of the session, or None while auto has not chosen them.
    """

    def __init__(
        self,
        tracker: Tracker,
        metrics: Metrics,
        events: TrainingEvents,
        config: Callable[[], Mapping[str, Any] | None],
    ) -> None:
        self.tracker, self._config = tracker, config
        self._has_config = self._timed_out = False
        self._points, self._events = UnsentPoints(metrics, wait_s=RANK_WAIT_S), events
        self._last_event = -math.inf
        self._sink = finished_cell()
        """Below the cell that started the run."""
        self._closing = threading.Event()
        kernel = process_identity.ProcessIdentity.current_process()
        env = remove_launch_variables(os.environ) | {
            # the next session ends it if the kernel is killed and the client hangs
            process_identity.KERNEL_VARIABLE: kernel.to_json()
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nbdist.session.tracker_process"],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Jupyter's interrupt signals the process group of the kernel
        )
        self._send({"tracker": tracker.name, "target": tracker.target})
        self._thread = threading.Thread(target=self._run, name="nbdist-tracking", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self, *, wait: bool = True) -> None:
        """Write what has arrived and finish the run; with `wait`, within `CLOSE_TIMEOUT_S`.

        Otherwise the exit of this process waits.
        """
        self._closing.set()
        if not wait:
            return
        atexit.unregister(self.close)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._timed_out = True
            self._process.kill()  # the thread then reads the end of its replies
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing.wait(INTERVAL_S):
                self._show_replies()
                self._send_new()
            self._send_new(wait_for_ranks=False)
            assert self._process.stdin is not None  # noqa: S101 - for mypy
            self._process.stdin.close()
            self._show_replies(until_end=True)
        except _TrackerEndedError:
            pass  # shown
        except OSError:  # a broken pipe: the reason is in the last reply
            with contextlib.suppress(_TrackerEndedError):
                self._show_replies(until_end=True)
        finally:
            with contextlib.suppress(OSError), self._process:  # closes the pipes and waits
                pass

    def _send_new(self, *, wait_for_ranks: bool = True) -> None:
        """Send the options once they are known, and the events and steps that are new."""
        if not self._has_config and (config := self._config()) is not None:
            self._has_config = True
            # types that every tracker accepts as hyperparameters
            plain = {
                name: value if isinstance(value, bool | int | float) else str(value)
                for name, value in config.items()
                if value is not None
            }
            self._send({"config": plain})
        for event in self._events.to_list():
            if event.time > self._last_event:
                self._last_event = event.time
                self._send({"event": event.kind, "text": event.text, "step": event.step})
        rows: dict[int, dict[str, float]] = {}
        new_points = self._points.pop_ready(now=None if wait_for_ranks else math.inf)
        for name, points in new_points.items():
            for step, _, value in points.tolist():
                rows.setdefault(int(step), {})[name] = value
        for step in sorted(rows):
            self._send({"values": rows[step], "step": step})

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None  # noqa: S101 - for mypy
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _show_replies(self, *, until_end: bool = False) -> None:
        """Show where the run is, or why it has ended.

        Raises:
            _TrackerEndedError: it has ended with an error, which was shown.
        """
        replies = self._process.stdout
        assert replies is not None  # noqa: S101 - for mypy
        while until_end or select.select([replies], [], [], 0)[0]:
            line = replies.readline()
            if not line:
                break
            reply = json.loads(line)
            if url := reply.get("url"):
                self._show(f"tracking to {self.tracker}: {url}")
            elif "error" in reply:
                self._fail(reply["error"])
        else:
            return
        code = self._process.wait()
        if self._timed_out:
            self._fail(f"it has not finished the run within {CLOSE_TIMEOUT_S:.0f} s")
        elif code:
            self._fail(f"its process ended with exit code {code}")

    def _fail(self, reason: str) -> None:
        self._show(f"stopped tracking to {self.tracker}, the session continues: {reason}")
        raise _TrackerEndedError

    def _show(self, line: str) -> None:
        self._sink.write("stderr", redact_secrets(f"nbdist: {line}\n"))
        self._sink.flush()


class _TrackerEndedError(Exception):
    """The process of a tracker has ended with an error."""
