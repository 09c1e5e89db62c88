"""The process that writes the run of a tracker: `python -m nbdist.session.tracker_process`.

Accelerate's trackers import torch, and their clients patch the process that they run in, so they
run outside of the notebook's kernel. One JSON message per line arrives on stdin: first the tracker,
then options, rows and events. The end of stdin finishes the run. Replies go to stdout: the URL of
the run, or the error that ended it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

FINISH_TIMEOUT_S = 60
"""After the end of stdin the process is ended if the client has not finished within this time."""


def main() -> None:
    """Write one run; exit with 1 after an error."""
    # Clients print, and ask for a login: they get neither the messages nor the replies.
    messages, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    try:
        _write_run(messages, replies)
    except BaseException as error:  # noqa: BLE001 - wandb raises SystemExit, clients raise anything
        _reply(replies, {"error": f"{type(error).__name__}: {error}".strip()})
        sys.exit(1)


def _write_run(messages: IO[str], replies: IO[str]) -> None:
    first = json.loads(messages.readline())
    tracker = make_tracker(first["tracker"], first["target"])
    tracker.start()
    if tracker.name == "wandb":
        # wandb 0.31 drops rows whose step is below the last one; as a metric a step may repeat
        tracker.tracker.define_metric("*", step_metric="step")
    _reply(replies, {"url": str(getattr(tracker.tracker, "url", None) or "")})
    for line in messages:
        message = json.loads(line)
        if "config" in message:
            tracker.store_init_configuration(message["config"])
        elif "event" in message:
            log_event(tracker, message["event"], message["text"], message["step"])
        else:
            log_row(tracker, message["values"], message["step"])
    signal.alarm(FINISH_TIMEOUT_S)
    tracker.finish()


def make_tracker(name: str, target: str) -> GeneralTracker:
    """Return Accelerate's tracker, not started; `target` is its project, experiment or folder."""
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState(cpu=True)  # the trackers create one; on a GPU it would select the device
    tracker_class = LOGGER_TYPE_TO_CLASS[name]
    if tracker_class.requires_logging_directory:
        name = time.strftime("%Y-%m-%d_%H-%M-%S")
        # with a number if another run has begun in this second
        names = (name, *(f"{name}-{number}" for number in range(2, 1000)))
        unused = next(item for item in names if not Path(target, item).exists())
        return tracker_class(unused, target)
    return tracker_class(target)


def log_row(tracker: GeneralTracker, values: dict[str, float], step: int) -> None:
    """Write the metrics of one step."""
    if tracker.name == "wandb":
        tracker.log({**values, "step": step})
    else:
        tracker.log(values, step=step)


def log_event(tracker: GeneralTracker, kind: str, text: str, step: int) -> None:
    """Write a switch, save, load or restart as text."""
    if tracker.name == "mlflow":  # its metrics are numbers only (Accelerate 1.15 drops others)
        import mlflow

        mlflow.set_tag(f"event {time.time():.3f}", f"step {step}: {kind}: {text}")
    else:
        values: dict[str, Any] = {f"event/{kind}": text}
        log_row(tracker, values, step)


def _reply(replies: IO[str], reply: dict[str, str]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
