"""Suggests changes when nothing fits, each checked against the memory model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from nbdist.display.units import format_gib

if TYPE_CHECKING:
    from nbdist.planner.plan_request import PlanRequest
    from nbdist.planner.plan_table import PlanRow

FastestRowSearch = Callable[["PlanRequest"], "PlanRow | None"]
"""Returns the best row of a request, or None if nothing fits."""

MAX_RANKS = 1024
SUGGESTED_LORA_RANK = 16
NO_CHANGE_FITS = (
    f"No tested change makes it fit: neither a micro-batch of 1, nor LoRA, nor {MAX_RANKS} of"
    " these devices. Use a smaller model, a shorter sequence or larger devices."
)


def suggest_changes(question: PlanRequest, fastest: FastestRowSearch) -> Iterator[str]:
    """Yield the single changes that make the model fit, smallest first.

    Tries a smaller micro-batch, searching activation checkpointing, offload and backend if the
    user fixed them, LoRA, and more devices of the same kind.
    """
    changes = (_smaller_batch, _freed_options, _lora, _more_devices)
    suggestions = [sentence for change in changes for sentence in change(question, fastest)]
    yield from suggestions or [NO_CHANGE_FITS]


def _smaller_batch(question: PlanRequest, fastest: FastestRowSearch) -> Iterator[str]:
    """Largest smaller micro-batch; accumulation keeps the batch size of an optimizer step."""
    before = min(question.batch_sizes)
    size = before
    while size > 1:
        size //= 2
        row = fastest(replace(question, batch_sizes=(size,)))
        if row is not None:
            accumulate = -(-before // size) * row.options.accumulate
            yield f"micro-batch {size} with --accumulate {accumulate}: {_words(row)}"
            return


def _freed_options(question: PlanRequest, fastest: FastestRowSearch) -> Iterator[str]:
    """Search each option that the user fixed."""
    names = {"activation_checkpointing": "activation checkpointing", "offload": "offload"}
    for key in ("activation_checkpointing", "offload", "backend"):
        if key not in question.fixed_options:
            continue
        fixed = {name: value for name, value in question.fixed_options.items() if name != key}
        row = fastest(replace(question, fixed_options=fixed))
        if row is not None:
            yield f"another choice of {names.get(key, key)}: {_words(row)}"


def _lora(question: PlanRequest, fastest: FastestRowSearch) -> Iterator[str]:
    """Train only low-rank adapters (Hu et al. 2021), if the model has an analytic spec."""
    adapted = getattr(question.model, "with_lora", None)
    if adapted is None:
        return
    row = fastest(replace(question, model=adapted(SUGGESTED_LORA_RANK)))
    if row is not None:
        yield f"LoRA of rank {SUGGESTED_LORA_RANK} instead of all parameters: {_words(row)}"


def _more_devices(question: PlanRequest, fastest: FastestRowSearch) -> Iterator[str]:
    """Smallest power-of-two multiple of the devices."""
    ranks = question.world_size
    while ranks * 2 <= MAX_RANKS:
        ranks *= 2
        row = fastest(replace(question, cluster=question.cluster.with_num_ranks(ranks)))
        if row is not None:
            yield f"{ranks} of these devices instead of {question.world_size}: {_words(row)}"
            return


def _words(row: PlanRow) -> str:
    """Describe the result of a change: "zero3, offload cpu fits with 18.4 GiB a device"."""
    return f"{row.variant} fits with {format_gib(row.device_bytes, unit=True)} a device"
