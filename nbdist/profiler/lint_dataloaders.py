"""Lint checks of the DataLoaders of a training loop."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nbdist.profiler.dataloader_calls import PASSTHROUGH_CALLS, LoaderTracer
from nbdist.profiler.lint_finding import finding_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.profiler.dataloader_calls import DataLoaderCall
    from nbdist.profiler.lint_finding import LintFinding
    from nbdist.profiler.symbolic_walk import AstEvent
    from nbdist.profiler.training_loops import TrainingLoop

TRAINER_WORKERS_ARGUMENT = "dataloader_num_workers"
"""Name of `num_workers` in transformers' TrainingArguments."""
_BY_PLACE = 3
"""Usual positional arguments: dataset, batch size, shuffle."""
_SHARES = frozenset(
    {
        "DistributedSampler",
        "num_processes",
        "process_index",
        "rank",
        "local_rank",
        "shard",
        "split_between_processes",
        "split_dataset_by_node",
        "world_size",
    }
)
"""Names that occur in code that shards its data manually."""
_OF_ALL = frozenset(
    {"RandomSampler", "SequentialSampler", "SubsetRandomSampler", "WeightedRandomSampler"}
)
"""Samplers that draw from all samples on every rank."""


def lint_dataloaders(loop: TrainingLoop, before: Sequence[AstEvent]) -> Iterator[LintFinding]:
    """Check the loaders of a loop for missing workers, pinned memory and sharding.

    Only a profile can confirm the first two.
    """
    tracer = LoaderTracer(loop, before)
    sure = bool(tracer.sources)
    for source in tracer.likely_calls:
        given = {key.arg: key.value for key in source.call.keywords}
        if None in given or len(source.call.args) > _BY_PLACE:
            continue  # the contents of **options are unknown
        workers = given.get("num_workers")
        if workers is None or _is(workers, 0):
            yield finding_at(
                source.event,
                "num_workers",
                "num_workers=0: the main process loads each batch, and training waits meanwhile",
                "num_workers=4, persistent_workers=True",
                "worth a look",
                "data",
            )
        if given.get("pin_memory") is None or _is(given["pin_memory"], value=False):
            yield finding_at(
                source.event,
                "pin_memory",
                "without pin_memory, copies to the GPU cannot overlap with computation",
                "pin_memory=True",
                "worth a look",
                "copies",
            )
        if sure and _takes_all(given, source.event, before):
            yield from _unsharded(source, before)


def lint_trainer_dataloader(trains: AstEvent, before: Sequence[AstEvent]) -> LintFinding:
    """Check the loader of a transformers Trainer. Only a profile can confirm the finding."""
    # The Trainer creates the loader, so the finding refers to its TrainingArguments.
    arguments = [
        event
        for event in before
        if isinstance(event.node, ast.Call)
        and event.name(event.node.func).endswith("TrainingArguments")
    ]
    return finding_at(
        arguments[-1] if arguments else trains,
        "num_workers",
        "the Trainer's DataLoader has no workers: the main process loads each batch, and training"
        " waits meanwhile",
        f"{TRAINER_WORKERS_ARGUMENT}=4 in TrainingArguments",
        "worth a look",
        "data",
    )


def _takes_all(
    given: Mapping[str | None, ast.expr], at: AstEvent, before: Sequence[AstEvent]
) -> bool:
    """Return whether the loader draws from all samples: no sampler, or one that does not shard."""
    for key in ("sampler", "batch_sampler"):
        if key not in given:
            continue
        made = [given[key], *_written(at.name(given[key]), before)]
        calls = {_called(inner, at) for node in made for inner in ast.walk(node)}
        if not calls & _OF_ALL:
            return False
    return True


def _written(name: str, before: Sequence[AstEvent]) -> list[ast.expr]:
    """Return the last value assigned to a variable, if there is one."""
    values = [
        event.node.value
        for event in before
        if isinstance(event.node, ast.Assign) and name in map(event.name, event.node.targets)
    ]
    return values[-1:] if name else []


def _called(node: ast.AST, at: AstEvent) -> str:
    return at.name(node.func) if isinstance(node, ast.Call) else ""


def _unsharded(loader_call: DataLoaderCall, before: Sequence[AstEvent]) -> Iterator[LintFinding]:
    """Report a loader that is not sharded, so that every rank gets all samples."""
    if not PASSTHROUGH_CALLS.issuperset(loader_call.path.via_functions):
        return  # prepared, or passed to a function that may shard it
    for event in before:
        if _word(event.node) in _SHARES:
            return
        call = event.node
        if isinstance(call, ast.Call) and event.name(call.func) not in PASSTHROUGH_CALLS:
            arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
            arguments = [
                value.value if isinstance(value, ast.Starred) else value for value in arguments
            ]
            if any(
                event.name(inner) in loader_call.path.names
                for part in arguments
                for inner in ast.walk(part)
            ):
                return
    name = loader_call.path.names[-1] if loader_call.path.names else "the loop's DataLoader"
    yield finding_at(
        loader_call.event,
        "sharding",
        f"{name} is not prepared: it is not sharded, so every rank trains on the same samples",
        f"{name} = accelerator.prepare({name})"
        if loader_call.path.names
        else "accelerator.prepare(DataLoader(...))",
        "likely",
        "sharded",
    )


def _word(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.name if isinstance(node, ast.alias) else ""


def _is(node: ast.AST, value: object) -> bool:
    return (
        isinstance(node, ast.Constant) and node.value == value and type(node.value) is type(value)
    )
