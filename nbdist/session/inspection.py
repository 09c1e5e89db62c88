"""Values of expressions on ranks, also while a cell runs; runs in the notebook's kernel."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from nbdist import rank_sets
from nbdist.errors import OptionError, SessionError
from nbdist.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.session.worker_group import WorkerGroup


def inspect(
    workers: WorkerGroup, expression: str, ranks: Sequence[int], *, timeout_s: float
) -> dict[int, str]:
    """Return the text of an expression's value, by rank; as `Session.inspect`."""
    try:
        compile(expression, "<inspect>", "eval")
    except SyntaxError as error:
        message = f"Expected a Python expression, got {expression!r}: {error.msg}."
        raise OptionError(message) from None
    answers: SimpleQueue[tuple[int, str, Any]] = SimpleQueue()
    request = workers.queue_request(
        ranks,
        "control",
        messages.INSPECT,
        messages.InspectRequest(expression=expression, within_s=timeout_s),
        lambda *answer: answers.put(answer),
    )
    workers.wake()
    texts: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(texts) < len(ranks):
            rank, channel, message = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            if (channel, message["header"]["msg_type"]) == ("iopub", messages.INSPECTED):
                texts[rank] = message["content"]["text"]
    except Empty:
        workers.cancel_unanswerable("inspect")
        missing = rank_sets.describe_ranks(set(ranks) - texts.keys())
        raise SessionError(
            f"No value from {missing} within {timeout_s:.0f} s: a rank evaluates an expression"
            " only before an optimizer step, at a prompt, or when no cell runs. Try again then."
        ) from None
    finally:
        workers.drop_requests([request])
    return dict(sorted(texts.items()))
