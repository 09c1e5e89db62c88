"""What the text of a cell alone tells about its training loop; pure, nothing is run.

`remarks` reads the cells, `confirmed` asks the profile; a remark that a profile could prove and
has not proved is not shown.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nbdist.profiler import lint_dataloaders, lint_loops, lint_modes
from nbdist.profiler.cell_parser import parsed
from nbdist.profiler.dataloader_calls import Followed, text_of
from nbdist.profiler.lint_confirmation import confirmed
from nbdist.profiler.symbolic_walk import events
from nbdist.profiler.training_loops import step_loops

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.profiler.dataloader_calls import LoaderText
    from nbdist.profiler.lint_finding import Remark
    from nbdist.profiler.symbolic_walk import Event

__all__ = ["confirmed", "loader", "remarks"]

_MOST_CELLS = 64
"""Those of before define what the last one calls."""


def remarks(cells: Sequence[tuple[str, str]]) -> list[Remark]:
    """Look at the training loops that the last cell runs.

    Args:
        cells: name and text, the oldest first: [("In[3]", "..."), ...]. What the earlier ones
            define is known; loops that they ran are not judged again.
    """
    try:
        all_events = _events(cells)
        found = list(_found(all_events)) if all_events else []
    except RecursionError:
        return []  # thousands of brackets: nobody's training loop
    unique = {(one.kind, one.cell, one.line): one for one in reversed(found)}
    return sorted(unique.values(), key=lambda one: (one.cell, one.line))


def loader(cells: Sequence[tuple[str, str]]) -> LoaderText | None:
    """The call that made the only loader of the last cell's loops; None where it is not clear."""
    try:
        all_events = _events(cells)
        loops = step_loops(all_events, all_events[-1].root) if all_events else []
        made = {id(one.call): one for loop in loops for one in Followed(loop, all_events).likely}
    except RecursionError:
        return None
    return text_of(*made.values()) if len(made) == 1 else None


def _events(cells: Sequence[tuple[str, str]]) -> list[Event]:
    """What running the cells comes by; nothing where the last one cannot be read."""
    read = [parsed(name, source) for name, source in cells[-_MOST_CELLS:]]
    known = [one for one in read if one is not None]
    if not known or read[-1] is None:
        return []
    found = events(known)
    return found if found and found[-1].root is known[-1] else []


def _found(all_events: list[Event]) -> Iterator[Remark]:
    loops = step_loops(all_events, all_events[-1].root)
    for loop in loops:
        yield from lint_loops.look(loop, all_events)
        yield from lint_modes.modes(loop, all_events)
        yield from lint_dataloaders.look(loop, all_events)
    trains = _trains(all_events)
    if trains:
        yield lint_dataloaders.of_trainer(trains, all_events)
    if loops or trains:
        yield from lint_modes.half_precision(all_events)


def _trains(all_events: list[Event]) -> Event | None:
    """Where a Trainer of transformers does the loop; None where none does."""
    return next(
        (
            one
            for one in all_events
            if isinstance(one.node, ast.Call)
            and one.root is all_events[-1].root
            and one.name(one.node.func) == "train"
            and "trainer" in one.name(getattr(one.node.func, "value", None)).lower()
        ),
        None,
    )
