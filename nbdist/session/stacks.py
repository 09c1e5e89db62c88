"""What every thread of the ranks is doing now, also where a rank does not answer.

Runs in the notebook's kernel. A rank's control thread is asked first. Where C code holds the
interpreter, or the rank has not come so far, a signal makes faulthandler write to a file.
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

    from nbdist.session.worker_group import Gang

ANSWER_S = 2.0
"""For each of the two ways."""
_CELL = re.compile(r'File "[^"]*/ipykernel_\d+/(\d+\.py)"')


def of_ranks(gang: Gang, cells: Mapping[str, int]) -> dict[int, str]:
    """The Python stacks of all threads, by rank; takes four seconds at most.

    Args:
        gang: the ranks.
        cells: numbers of the session's cells by the name of their code's file.
    """
    answered = _asked(gang)
    silent = {rank: pid for rank, pid in gang.pids.items() if rank not in answered}
    written = gang.fleet.stacks(silent, launchers=False) if silent else {}
    return {
        rank: answered[rank] if rank in answered else named(written[f"rank{rank}"], cells)
        for rank in sorted(gang.pids)
    }


def of_start(gang: Gang) -> str:
    """The stacks of the launcher and of the ranks that it has forked, for an error message."""
    parts = gang.fleet.stacks(gang.pids, launchers=True)
    return "\n".join(f"-- {name} --\n{text}" for name, text in parts.items())


def named(dump: str, cells: Mapping[str, int]) -> str:
    """A dump of faulthandler, the main thread first, with cells by their numbers."""
    blocks = reversed(dump.split("\n\n"))  # the oldest thread is the last
    text = "\n\n".join(blocks)
    return _CELL.sub(lambda cell: f"In[{cells.get(cell[1], '?')}]", text)


def _asked(gang: Gang) -> dict[int, str]:
    """Ask the ranks' control threads."""
    answers: SimpleQueue[tuple[int, str, Any]] = SimpleQueue()
    requests: list[str] = []
    told: dict[int, str] = {}
    try:
        ranks = range(len(gang.members))
        requests.append(
            gang.post(ranks, "control", messages.STACKS, {}, lambda *answer: answers.put(answer))
        )
        gang.wake()
        deadline = time.monotonic() + ANSWER_S
        while len(told) < len(ranks):
            rank, channel, message = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            if channel == "control":
                content: Any = message["content"]
                told[rank] = content["error" if content.get("status") == "error" else "text"]
    except (Empty, SessionError):
        return told  # the time is up, or the ranks are being ended
    finally:
        gang.forget(requests)
    return told
