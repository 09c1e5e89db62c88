"""Inspects ranks: their stacks, and values of expressions; runs in the notebook's kernel.

For stacks a rank's control thread is asked first. If C code holds the GIL, or the rank is still
starting, a signal makes faulthandler write to a file.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

from nbdist import rank_sets
from nbdist.errors import OptionError, SessionError
from nbdist.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.session.worker_group import WorkerGroup

ANSWER_S = 2.0
"""Timeout for each of the two ways to get stacks."""
_CELL = re.compile(r'File "[^"]*/ipykernel_\d+/(\d+\.py)"')


def inspect(
    workers: WorkerGroup, expression: str, ranks: Sequence[int], *, timeout_s: float
) -> dict[int, str]:
    """Return the text of an expression's value, by rank; as `Session.inspect`."""
    try:
        compile(expression, "<inspect>", "eval")
    except SyntaxError as error:
        text = f"Expected a Python expression, got {expression!r}: {error.msg}."
        raise OptionError(text) from None
    request = messages.InspectRequest(expression=expression, within_s=timeout_s)
    texts: dict[int, str] = {}
    for rank, channel, message in workers.answers_within(
        timeout_s, ranks, messages.INSPECT, request
    ):
        if (channel, message["header"]["msg_type"]) == ("iopub", messages.INSPECTED):
            content: Any = message["content"]
            texts[rank] = content["text"]
        if len(texts) == len(ranks):
            return dict(sorted(texts.items()))
    workers.cancel_unanswerable("inspect")
    missing = rank_sets.describe_ranks(set(ranks) - texts.keys())
    raise SessionError(
        f"No value from {missing} within {timeout_s:.0f} s: a rank evaluates an expression"
        " only before an optimizer step, at a prompt, or when no cell runs. Try again then."
    )


def rank_stacks(workers: WorkerGroup, cells: Mapping[str, int]) -> dict[int, str]:
    """Return the Python stacks of all threads, by rank; takes at most four seconds."""
    answered = _request_stacks(workers)
    silent = {rank: pid for rank, pid in workers.pids.items() if rank not in answered}
    written = workers.launcher_group.dump_stacks(silent, launchers=False) if silent else {}
    return {
        rank: answered[rank] if rank in answered else format_stacks(written[f"rank{rank}"], cells)
        for rank in sorted(workers.pids)
    }


def startup_stacks(workers: WorkerGroup) -> str:
    """Return the stacks of launcher and starting ranks, for an error message."""
    parts = workers.launcher_group.dump_stacks(workers.pids, launchers=True)
    return "\n".join(f"-- {name} --\n{text}" for name, text in parts.items())


def format_stacks(dump: str, cells: Mapping[str, int]) -> str:
    """Format a faulthandler dump: main thread first, cells by number."""
    blocks = reversed(dump.split("\n\n"))  # the main thread is the last
    text = "\n\n".join(blocks)
    return _CELL.sub(lambda cell: f"In[{cells.get(cell[1], '?')}]", text)


def _request_stacks(workers: WorkerGroup) -> dict[int, str]:
    texts: dict[int, str] = {}
    ranks = range(len(workers.rank_processes))
    with contextlib.suppress(SessionError):  # the ranks are ending
        for rank, channel, message in workers.answers_within(ANSWER_S, ranks, messages.STACKS, {}):
            if channel == "control":
                content: Any = message["content"]
                texts[rank] = content["error" if content.get("status") == "error" else "text"]
            if len(texts) == len(ranks):
                break
    return texts
