"""Static analysis of the training loops in notebook cells. Nothing is run.

``lint_cells`` analyzes the cells; ``confirm_findings`` compares the findings with a profile.
Findings that a profile could confirm but does not are not shown.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nbdist.profiler import lint_dataloaders, lint_loops, lint_model_settings
from nbdist.profiler.cell_parser import parse_cell
from nbdist.profiler.dataloader_calls import LoaderTracer, loader_source
from nbdist.profiler.lint_confirmation import confirm_findings
from nbdist.profiler.symbolic_walk import walk_cells
from nbdist.profiler.training_loops import find_training_loops

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.profiler.dataloader_calls import DataLoaderSource
    from nbdist.profiler.lint_finding import LintFinding
    from nbdist.profiler.symbolic_walk import AstEvent

__all__ = ["confirm_findings", "find_loader", "lint_cells"]

_MOST_CELLS = 64
"""Cells that are analyzed. Earlier ones may define functions that the last one calls."""


def lint_cells(cells: Sequence[tuple[str, str]]) -> list[LintFinding]:
    """Analyze the training loops that the last cell runs.

    Args:
        cells: name and source of the cells, oldest first: [("In[3]", "..."), ...]. Earlier cells
            only provide definitions; their loops are not analyzed.
    """
    try:
        all_events = _events(cells)
        findings = list(_found(all_events)) if all_events else []
    except RecursionError:
        return []  # thousands of nested brackets are not a training loop
    unique = {(item.kind, item.cell, item.line): item for item in reversed(findings)}
    return sorted(unique.values(), key=lambda item: (item.cell, item.line))


def find_loader(cells: Sequence[tuple[str, str]]) -> DataLoaderSource | None:
    """Return the DataLoader call of the last cell's loops, or None if it is ambiguous."""
    try:
        all_events = _events(cells)
        loops = find_training_loops(all_events, all_events[-1].root) if all_events else []
        sources = {
            id(source.call): source
            for loop in loops
            for source in LoaderTracer(loop, all_events).likely_calls
        }
    except RecursionError:
        return None
    return loader_source(*sources.values()) if len(sources) == 1 else None


def _events(cells: Sequence[tuple[str, str]]) -> list[AstEvent]:
    """Walk the cells in execution order. Returns [] if the last one cannot be parsed."""
    parsed_cells = [parse_cell(name, source) for name, source in cells[-_MOST_CELLS:]]
    known = [cell for cell in parsed_cells if cell is not None]
    if not known or parsed_cells[-1] is None:
        return []
    walked = walk_cells(known)
    return walked if walked and walked[-1].root is known[-1] else []


def _found(all_events: list[AstEvent]) -> Iterator[LintFinding]:
    loops = find_training_loops(all_events, all_events[-1].root)
    for loop in loops:
        yield from lint_loops.lint_loop(loop, all_events)
        yield from lint_model_settings.lint_eval_mode(loop, all_events)
        yield from lint_dataloaders.lint_dataloaders(loop, all_events)
    trains = _trains(all_events)
    if trains:
        yield lint_dataloaders.lint_trainer_dataloader(trains, all_events)
    if loops or trains:
        yield from lint_model_settings.lint_precision(all_events)


def _trains(all_events: list[AstEvent]) -> AstEvent | None:
    """Return the call of `trainer.train()` of a transformers Trainer, if there is one."""
    return next(
        (
            event
            for event in all_events
            if isinstance(event.node, ast.Call)
            and event.root is all_events[-1].root
            and event.name(event.node.func) == "train"
            and "trainer" in event.name(getattr(event.node.func, "value", None)).lower()
        ),
        None,
    )
