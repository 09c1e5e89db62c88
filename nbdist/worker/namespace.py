"""Predefined names of a rank's namespace: accelerator, rank, device, report, send and save."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import torch
from IPython.display import display

from nbdist.errors import OptionError
from nbdist.protocol import messages, serialization
from nbdist.worker.engines import accelerator_patch
from nbdist.worker.memory import memory_probe, oom_advice
from nbdist.worker.operations import RankContext
from nbdist.worker.operations.save import CheckpointSaver
from nbdist.worker.profiling import kineto, profile_window
from nbdist.worker.report import Reporter

if TYPE_CHECKING:
    from pathlib import Path

    from accelerate import Accelerator

    from nbdist.strategies import Options
    from nbdist.worker.engines.auto_strategy import AutoStrategy
    from nbdist.worker.kernel import RankKernel

FLUSH_S = 10.0
"""Time that the end of a cell waits for copies of reported device tensors."""


def initial_names(
    *, rank: int, local_rank: int, world_size: int, accelerator: Accelerator
) -> dict[str, Any]:
    """Return the predefined names of a rank; the user may overwrite any of them."""
    return {
        "accelerator": accelerator,
        "rank": rank,
        "local_rank": local_rank,
        "world_size": world_size,
        "device": accelerator.device,
        "torch": torch,
    }


def add_kernel_functions(
    kernel: RankKernel,
    *,
    run_dir: Path,
    bulk: Path,
    spare: Path,
    checkpoints: str,
    cwd: Path,
) -> None:
    """Add `report`, `send` and `save` to the namespace and set the kernel's callbacks."""
    kineto.quiet()
    reporter = Reporter(MessagePublisher(kernel).report)
    kernel.before_reply = functools.partial(reporter.flush, FLUSH_S)
    kernel.on_cell_end = _after_code
    kernel.profile_context = profile_window.ProfileContext(
        rank=kernel.shell.user_ns["rank"],
        folder=run_dir,
        cell_of=kernel.shell.compile.format_code_name,
        publish=functools.partial(kernel.publish, messages.PROFILE_RESULT),
        show_progress=kernel.publish_phase,
    )
    kernel.oom_advice_for = oom_advice.advice_for
    sender = Sender(kernel, [bulk, spare])
    saver = CheckpointSaver(checkpoints, cwd, MessagePublisher(kernel).saved, kernel.warn_async)
    kernel.set_checkpoint_root = saver.set_root
    kernel.shell.push({"report": reporter.report, "send": sender.send, "save": saver.save})
    kernel.operation_context = RankContext(
        variables=kernel.shell.user_ns,
        predefined=dict(kernel.shell.user_ns),
        initial_environ=dict(os.environ),
        reporter=reporter,
        on_phase=kernel.publish_phase,
        begin_save=saver.begin,
        barrier=kernel.collective_barrier,
        folder=run_dir,
    )


def _after_code() -> None:
    accelerator_patch.restore_shared_states()
    memory_probe.on_cell_end()
    profile_window.on_cell_end()


def publish_auto_choice(kernel: RankKernel, chooser: AutoStrategy) -> None:
    """Display the decision of `auto` below the cell and send it to the notebook's kernel."""

    def show(text: str, page: str) -> None:
        display({"text/plain": text, "text/html": page}, raw=True)

    def tell(chosen: Options) -> None:
        kernel.publish(messages.AUTO_DECISION, messages.AutoDecision(options=chosen.to_json()))

    chooser.show, chooser.tell = show, tell


class MessagePublisher:
    """Publisher of nbdist's own messages on iopub; thread-safe."""

    def __init__(self, kernel: RankKernel) -> None:
        self._kernel = kernel

    def report(self, rows: list[dict[str, float]]) -> None:
        """Send rows of metrics; the reporter never calls this concurrently."""
        encoded = [{k: messages.to_json_number(v) for k, v in row.items()} for row in rows]
        self._kernel.publish(messages.METRICS_REPORT, messages.MetricsReport(rows=encoded))

    def saved(self, content: messages.SaveStatus) -> None:
        """Send the status of a save."""
        self._kernel.publish(messages.SAVE_STATUS, content)


class Sender:
    """Implementation of the user's `send`."""

    def __init__(self, kernel: RankKernel, folders: list[Path]) -> None:
        """Create a sender that writes to the first folder with enough space."""
        self._kernel = kernel
        self._folders = folders

    def send(self, name: str, value: object) -> None:
        """Set the notebook variable `name` to `value` while the cell is still running.

        Tensors arrive as CPU tensors of the same dtype and shape. Blocks until the value is
        copied; does not wait for the notebook.

        Raises:
            OptionError: `name` is not a Python identifier.
            PayloadError: the value cannot be transferred; the message names the part.
        """
        if not str(name).isidentifier():
            msg = f"send({name!r}, ...): the name must be a Python identifier, such as 'sample'."
            raise OptionError(msg)
        path = serialization.write_payload_to_free_folder({name: value}, self._folders)
        self._kernel.publish(messages.SENT_VALUE, messages.SentValue(name=name, path=str(path)))
