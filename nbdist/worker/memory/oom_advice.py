"""Out of memory becomes advice: what was held, and the lines to paste that would fit.

Runs on a rank, after a cell has failed for lack of memory: `on` looks while the cell's frames
hold what they held, and what it returns plans when they are gone. Nothing here waits for
another rank: it may be the only one that failed.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import distributed

from nbdist.display.units import GIB, gib, size
from nbdist.errors import NbdistError
from nbdist.planner import search, validation
from nbdist.protocol import messages
from nbdist.worker.engines import auto_strategy
from nbdist.worker.engines.accelerator import current
from nbdist.worker.memory import memory_probe, model_description

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.planner.result import Plan, Row
    from nbdist.worker.memory.memory_probe import Watch

log = logging.getLogger(__name__)

ROWS = 3
"""Lines to paste that are offered."""
_SMALL = GIB // 200
"""Bytes; a smaller part would read 0.00."""
_TOLD = (
    "can't allocate memory",  # torch 2.13, c10/core/impl/alloc_cpu.cpp
    "not enough memory",  # the same on Windows
    "Cannot allocate memory",  # errno ENOMEM
    "out of memory",  # CUDA's own errors, and NCCL's
)
_UNITS = {
    "bytes": 1,
    **{f"{letter}ib": 1 << 10 * power for power, letter in enumerate("kmgtpe", start=1)},
}
_ASKED = re.compile(rf"\ballocate (\d+\.?\d*) ?({'|'.join(_UNITS)})\b", re.IGNORECASE)
"""As torch 2.13 says it for a CPU and a GPU, and NumPy 2."""


def on(error: BaseException | None) -> Callable[[], messages.Advice] | None:
    """Look at an error; None for one that is not of memory, else what makes the advice."""
    if not is_out_of_memory(error):
        return None
    return functools.partial(_advice, _held(), asked_bytes(error))


def _advice(held: dict[str, int], asked: int | None) -> messages.Advice:
    """What to say below the traceback."""
    watch = memory_probe.state.watch
    lines = [_held_words(held)]
    if asked is not None:
        lines.append(f"the cell asked for {size(asked)} at once")
    if watch is not None and watch.twin is not None:
        lines += _what_fits(watch, asked or 0)
    return messages.Advice(lines=lines, held_bytes=sum(held.values()))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that memory ran out."""
    return any(
        isinstance(one, (MemoryError, torch.OutOfMemoryError))
        or (isinstance(one, (RuntimeError, OSError)) and any(word in str(one) for word in _TOLD))
        for one in _chain(error)
    )


def is_out_of_host_memory(error: BaseException | None) -> bool:
    """Whether it is the host's memory that ran out, and so Python's own too."""
    return is_out_of_memory(error) and not any(
        isinstance(one, torch.OutOfMemoryError) for one in _chain(error)
    )


def asked_bytes(error: BaseException | None) -> int | None:
    """Bytes of the allocation that failed; None where the error does not say."""
    for one in _chain(error):
        if found := _ASKED.search(str(one)):
            return int(float(found[1]) * _UNITS[found[2].lower()])
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _held() -> dict[str, int]:
    """Bytes by part: at the device's fullest moment, or in this process's memory now."""
    watch = memory_probe.state.watch
    model = watch.prepared if watch else None
    parts = memory_probe.resting(model, memory_probe.innermost(watch)) if model is not None else {}
    if torch.cuda.is_initialized():
        held = torch.cuda.memory_stats()["allocated_bytes.all.peak"]
    else:
        held = psutil.Process().memory_info().rss
    named = {name: size for name, size in parts.items() if name in validation.TOLD_APART}
    rest = max(0, held - sum(named.values()))
    return {**named, validation.REST if torch.cuda.is_initialized() else "everything else": rest}


def _held_words(held: dict[str, int]) -> str:
    """What was held, largest first: "out of memory: 23.1 GiB held: optimizer 12.1, ..."."""
    parts = sorted(held.items(), key=lambda item: -item[1])
    words = ", ".join(f"{name} {gib(part)}" for name, part in parts if part >= _SMALL)
    return f"out of memory; this rank held {gib(sum(held.values()), unit=True)}: {words}"


def _what_fits(watch: Watch, asked: int) -> list[str]:
    """Lines to paste, or why there are none.

    Args:
        watch: has the model that was prepared.
        asked: bytes of the allocation that failed; 0 where they are not known.
    """
    try:
        plan = _plan(watch)
    except (NbdistError, MemoryError, OSError) as error:
        return [f"what would fit is not known: {error}"]
    except Exception as error:
        log.exception("no plan after a failure for lack of memory")
        return [f"what would fit is not known ({type(error).__name__})"]
    present = _present(plan)
    if present is not None and present.fits:
        return [_not_the_model(present, plan.question.cluster.smallest.free_bytes, asked)]
    rows = list(_fitting(plan))
    if rows:
        return ["these would fit (%nbdist plan shows all):", *map(_pasted(plan), rows)]
    return ["no strategy fits; these changes would:", *(f"  {one}" for one in plan.advice)]


def _not_the_model(present: Row, free: int, asked: int) -> str:
    """What took the memory, where the model and its batch would have fitted."""
    expected = f"{gib(present.device_bytes)} of {gib(free, unit=True)}"
    cause = (
        f"{size(asked)} are more than there is: ask for less at once"
        if asked > free
        else "something else takes memory"
    )
    return f"the plan expects {expected} for this model and batch: {cause}"


def _plan(watch: Watch) -> Plan:
    """Plan the model that was prepared, for the micro-batch it was given last."""
    session = current()
    options, hardware = session.options, session.hardware
    assert watch.twin is not None  # noqa: S101 - the caller looked
    samples, tokens = watch.shape or (1, model_description.default_length(watch.twin))
    spec = model_description.spec_of(
        watch.twin,
        batch_size=samples,
        seq_len=tokens,
        call=watch.call,
        progress=log.info,
        kind=hardware.kind,
    )
    free = [auto_strategy.free_bytes()] * distributed.get_world_size()
    return search.search(
        search.Question(
            model=spec,
            cluster=auto_strategy.cluster(free, hardware, session.nodes),
            batch_sizes=(samples,),
            seq_len=tokens,
            precision=options.precision or "no",
            optimizer=validation.optimizer_of(watch.described, hardware.kind),
            fixed={"accumulate": watch.accumulate},
            offloads=("none", "cpu"),
        )
    )


def _present(plan: Plan) -> Row | None:
    """The row of the session's own options."""
    own = current().options
    names = (
        "backend",
        "offload",
        "offload_params",
        "activation_checkpointing",
        "replicate_across",
    )
    same = [
        row
        for row in plan.rows
        if all(getattr(row.options, name) == getattr(own, name) for name in names)
    ]
    return same[0] if same else None


def _fitting(plan: Plan) -> Iterator[Row]:
    """The best row, then the fastest ones of other backends that fit."""
    rows = sorted((row for row in plan.rows if row.fits), key=lambda row: -row.tokens_per_s)
    rows = [plan.best, *rows] if plan.best else rows
    taken: set[str] = set()
    for row in rows:
        if row.backend not in taken and len(taken) < ROWS:
            taken.add(row.backend)
            yield row


def _pasted(plan: Plan) -> Any:
    """How a row is written as a line to paste."""
    free = gib(plan.question.cluster.smallest.free_bytes, unit=True)
    return lambda row: f"  {row.command}   # predicted {gib(row.device_bytes)} of {free}"
