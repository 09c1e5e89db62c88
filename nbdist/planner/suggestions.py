"""What to change where nothing fits: each change is tried out on the model of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from nbdist.display.units import gib

if TYPE_CHECKING:
    from nbdist.planner.result import Row
    from nbdist.planner.search import Question

Fastest = Callable[["Question"], "Row | None"]
"""The best row of a question, or None where nothing fits."""

MOST_RANKS = 1024
LORA_RANK = 16
NOTHING_HELPS = (
    f"nothing tried makes it fit: neither a micro-batch of 1, nor LoRA, nor {MOST_RANKS} of"
    " these devices; take a smaller model, a shorter sequence or larger devices."
)


def smallest_changes(question: Question, fastest: Fastest) -> Iterator[str]:
    """Say which single changes make the model fit, smallest first.

    A smaller micro-batch, activation checkpointing and offload where the user had fixed them
    otherwise, LoRA, and more devices of the same kind.
    """
    changes = (_smaller_batch, _freed_options, _lora, _more_devices)
    found = [sentence for change in changes for sentence in change(question, fastest)]
    yield from found or [NOTHING_HELPS]


def _smaller_batch(question: Question, fastest: Fastest) -> Iterator[str]:
    """The largest smaller micro-batch; accumulation keeps the batch of an optimizer step."""
    before = min(question.batch_sizes)
    size = before
    while size > 1:
        size //= 2
        row = fastest(replace(question, batch_sizes=(size,)))
        if row is not None:
            times = -(-before // size) * row.options.accumulate
            yield f"micro-batch {size} with --accumulate {times}: {_words(row)}"
            return


def _freed_options(question: Question, fastest: Fastest) -> Iterator[str]:
    """Each option that the user had fixed, searched instead."""
    names = {"activation_checkpointing": "activation checkpointing", "offload": "offload"}
    for key in ("activation_checkpointing", "offload", "backend"):
        if key not in question.fixed:
            continue
        fixed = {name: value for name, value in question.fixed.items() if name != key}
        row = fastest(replace(question, fixed=fixed))
        if row is not None:
            yield f"another choice of {names.get(key, key)}: {_words(row)}"


def _lora(question: Question, fastest: Fastest) -> Iterator[str]:
    """Train low-rank adapters only (Hu et al. 2021), where the closed form knows the model."""
    adapted = getattr(question.model, "with_lora", None)
    if adapted is None:
        return
    row = fastest(replace(question, model=adapted(LORA_RANK)))
    if row is not None:
        yield f"LoRA of rank {LORA_RANK} instead of all parameters: {_words(row)}"


def _more_devices(question: Question, fastest: Fastest) -> Iterator[str]:
    """The smallest power-of-two multiple of the devices."""
    ranks = question.world_size
    while ranks * 2 <= MOST_RANKS:
        ranks *= 2
        row = fastest(replace(question, cluster=question.cluster.resized(ranks)))
        if row is not None:
            yield f"{ranks} of these devices instead of {question.world_size}: {_words(row)}"
            return


def _words(row: Row) -> str:
    """Where a change leads: "zero3, offload cpu fits with 18.4 GiB a device"."""
    return f"{row.variant} fits with {gib(row.device_bytes, unit=True)} a device"
