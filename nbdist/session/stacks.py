"""Stacks of every thread of the ranks, including ranks that do not reply.

Runs in the notebook's kernel. A rank's control thread is asked first. If C code holds the GIL, or
the rank is still starting, a signal makes faulthandler write to a file.
"""

from __future__ import annotations

import re
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from nbdist.errors import SessionError
from nbdist.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.session.worker_group import WorkerGroup

ANSWER_S = 2.0
"""Timeout for each of the two ways."""
_CELL = re.compile(r'File "[^"]*/ipykernel_\d+/(\d+\.py)"')


def rank_stacks(workers: WorkerGroup, cells: Mapping[str, int]) -> dict[int, str]:
    """Return the Python stacks of all threads, by rank; takes at most four seconds.

    Args:
        workers: the worker group.
        cells: cell numbers by the file name of their code.
    """
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
    answers: SimpleQueue[tuple[int, str, Any]] = SimpleQueue()
    requests: list[str] = []
    texts: dict[int, str] = {}
    try:
        ranks = range(len(workers.rank_processes))
        requests.append(
            workers.queue_request(
                ranks, "control", messages.STACKS, {}, lambda *answer: answers.put(answer)
            )
        )
        workers.wake()
        deadline = time.monotonic() + ANSWER_S
        while len(texts) < len(ranks):
            rank, channel, message = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            if channel == "control":
                content: Any = message["content"]
                texts[rank] = content["error" if content.get("status") == "error" else "text"]
    except (Empty, SessionError):
        return texts  # timeout, or the ranks are ending
    finally:
        workers.drop_requests(requests)
    return texts
