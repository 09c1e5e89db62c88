"""The names that a rank's namespace has from the start, and their way to the kernel."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from IPython.display import display

from nbdist.errors import OptionError
from nbdist.protocol import messages, serialization
from nbdist.worker.engines import accelerator as accelerators
from nbdist.worker.memory import memory_probe, oom_advice
from nbdist.worker.operations.save import Saver
from nbdist.worker.profiling import kineto, requests, window
from nbdist.worker.report import Reporter

if TYPE_CHECKING:
    from pathlib import Path

    from accelerate import Accelerator

    from nbdist.strategies import Options
    from nbdist.worker.engines.auto_strategy import Chooser
    from nbdist.worker.kernel import RankKernel

FLUSH_S = 10.0
"""How long the end of a cell waits for copies of reported device tensors."""


@dataclass(slots=True, kw_only=True)
class Beginning:
    """What a rank has from its start, before any cell: what differs later is the user's."""

    names: dict[str, Any]
    """The user's namespace."""
    environ: dict[str, str]
    reporter: Reporter


def initial(
    *, rank: int, local_rank: int, world_size: int, accelerator: Accelerator
) -> dict[str, Any]:
    """Names for a new rank; the user may overwrite any of them."""
    return {
        "accelerator": accelerator,
        "rank": rank,
        "local_rank": local_rank,
        "world_size": world_size,
        "device": accelerator.device,
        "torch": torch,
    }


def connect(
    kernel: RankKernel,
    *,
    run_dir: Path,
    bulk: Path,
    spare: Path,
    checkpoints: str,
    cwd: Path,
) -> None:
    """Add `report`, `send` and `save`, which need the rank's kernel."""
    kineto.quiet()
    reporter = Reporter(Publisher(kernel).report)
    kernel.before_reply = functools.partial(reporter.flush, FLUSH_S)
    kernel.after_code = _after_code
    kernel.surroundings = window.Surroundings(
        rank=kernel.shell.user_ns["rank"],
        folder=run_dir,
        cell_of=kernel.shell.compile.format_code_name,
        publish=functools.partial(kernel.publish, messages.PROFILED),
        tell=kernel.tell_phase,
    )
    kernel.advice_on = oom_advice.on
    sender = Sender(kernel, [bulk, spare])
    kernel.saver = Saver(checkpoints, cwd, Publisher(kernel).saved, kernel.complain_later)
    kernel.shell.push({"report": reporter.report, "send": sender.send, "save": kernel.saver.save})
    kernel.beginning = Beginning(
        names=dict(kernel.shell.user_ns), environ=dict(os.environ), reporter=reporter
    )


def _after_code() -> None:
    accelerators.restore_shared_states()
    memory_probe.cell_ended()
    requests.cell_ended()


def show_choice(kernel: RankKernel, chooser: Chooser) -> None:
    """Let what auto chose be displayed below the cell, and told to the notebook's kernel."""

    def show(text: str, page: str) -> None:
        display({"text/plain": text, "text/html": page}, raw=True)

    def tell(chosen: Options) -> None:
        kernel.publish(messages.CHOSEN, messages.Chosen(options=chosen.to_json()))

    chooser.show, chooser.tell = show, tell


class Publisher:
    """Publishes the session's own messages on iopub, from any thread."""

    def __init__(self, kernel: RankKernel) -> None:
        """Publish through `kernel`."""
        self._kernel = kernel

    def report(self, rows: list[dict[str, float]]) -> None:
        """Send rows; the reporter never calls this twice at once."""
        encoded = [{k: messages.finite_or_text(v) for k, v in row.items()} for row in rows]
        self._kernel.publish(messages.REPORT, messages.Report(rows=encoded))

    def saved(self, content: messages.Saved) -> None:
        """Say how far a save is."""
        self._kernel.publish(messages.SAVED, content)


class Sender:
    """The user's `send`."""

    def __init__(self, kernel: RankKernel, folders: list[Path]) -> None:
        """Write values into the first of `folders` with room."""
        self._kernel = kernel
        self._folders = folders

    def send(self, name: str, value: object) -> None:
        """Put `value` into the notebook as variable `name` while the cell still runs.

        Tensors arrive as CPU tensors of the same dtype and shape. Blocks for one copy of
        the value; does not wait for the notebook.

        Raises:
            PayloadError: a value that cannot be moved; the message says where it is.
        """
        if not str(name).isidentifier():
            msg = f"send({name!r}, ...): the name must be a Python identifier, such as 'sample'."
            raise OptionError(msg)
        path = serialization.write_where_room({name: value}, self._folders)
        self._kernel.publish(messages.SEND, messages.Send(name=name, path=str(path)))
