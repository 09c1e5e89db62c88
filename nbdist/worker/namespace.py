"""Predefined names of a rank's namespace: accelerator, rank, device, report, send and save."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from IPython.display import display

from nbdist.errors import OptionError
from nbdist.protocol import messages, serialization
from nbdist.worker.operations import RankContext
from nbdist.worker.operations.save import CheckpointSaver
from nbdist.worker.profiling import kineto, profile_window
from nbdist.worker.report import Reporter

if TYPE_CHECKING:
    from nbdist.worker.engines.auto_strategy import AutoStrategy
    from nbdist.worker.kernel import RankKernel


def add_kernel_functions(kernel: RankKernel, launch: messages.LaunchRanksRequest) -> None:
    """Add `report`, `send` and `save` to the namespace, and what the kernel needs for them."""
    run_dir, cwd = Path(launch.run_dir), Path(launch.cwd or Path.cwd())
    # The notebook's kernel accepts payload files from the launcher's two folders only, not from
    # the run folder of a single start.
    sender = Sender(kernel, [Path(launch.bulk_dir), run_dir.parent])

    def publish_rows(rows: list[dict[str, float]]) -> None:
        encoded = [{k: messages.to_json_number(v) for k, v in row.items()} for row in rows]
        kernel.publish(messages.METRICS_REPORT, messages.MetricsReport(rows=encoded))

    kineto.quiet()
    reporter = Reporter(publish_rows)
    publish_save = functools.partial(kernel.publish, messages.SAVE_STATUS)
    kernel.saver = saver = CheckpointSaver(launch.checkpoints, cwd, publish_save, kernel.warn_async)
    kernel.profile_context = profile_window.ProfileContext(
        rank=kernel.shell.user_ns["rank"],
        folder=run_dir,
        cell_of=kernel.shell.compile.format_code_name,
        publish=functools.partial(kernel.publish, messages.PROFILE_RESULT),
        show_progress=kernel.publish_phase,
    )
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


def publish_auto_choice(kernel: RankKernel, chooser: AutoStrategy) -> None:
    """Display the decision of `auto` below the cell and send it to the notebook's kernel."""
    chooser.show = lambda text, page: display({"text/plain": text, "text/html": page}, raw=True)
    chooser.tell = lambda chosen: kernel.publish(
        messages.AUTO_DECISION, messages.AutoDecision(options=chosen.to_json())
    )


class Sender:
    """Implementation of the user's `send`.

    Args:
        folders: candidates for payload files; the first one with enough space is used.
    """

    def __init__(self, kernel: RankKernel, folders: list[Path]) -> None:
        self._kernel, self._folders = kernel, folders

    def send(self, name: str, value: object) -> None:
        """Set the notebook variable `name` to `value` while the cell is still running.

        Tensors arrive as CPU tensors of the same dtype and shape. Blocks until the value is
        copied; does not wait for the notebook.

        Raises:
            OptionError: `name` is not a Python identifier.
            PayloadError: the value cannot be transferred; the message names the part.
        """
        if not str(name).isidentifier():
            raise OptionError(
                f"send({name!r}, ...): the name must be a Python identifier, such as 'sample'."
            )
        path = serialization.write_payload_to_free_folder({name: value}, self._folders)
        self._kernel.publish(messages.SENT_VALUE, messages.SentValue(name=name, path=str(path)))
