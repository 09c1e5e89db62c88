"""Remarks on the DataLoaders that a training loop takes its batches from; pure."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nbdist.profiler.dataloader_calls import HARMLESS, Followed
from nbdist.profiler.lint_finding import remark

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.profiler.dataloader_calls import Source
    from nbdist.profiler.lint_finding import Remark
    from nbdist.profiler.symbolic_walk import Event
    from nbdist.profiler.training_loops import StepLoop

OF_TRAINER = "dataloader_num_workers"
"""What a Trainer calls it."""
_BY_PLACE = 3
"""Dataset, batch size, shuffle; nobody gives more by their place."""
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
"""Words of code that divides its data by itself."""
_OF_ALL = frozenset(
    {"RandomSampler", "SequentialSampler", "SubsetRandomSampler", "WeightedRandomSampler"}
)
"""Samplers that take from all samples on every rank."""


def look(loop: StepLoop, before: Sequence[Event]) -> Iterator[Remark]:
    """What its loader lacks; the first two only a profile can weigh."""
    followed = Followed(loop, before)
    sure = bool(followed.sources)
    for one in followed.likely:
        given = {key.arg: key.value for key in one.call.keywords}
        if None in given or len(one.call.args) > _BY_PLACE:
            continue  # **options: anything may be in them
        workers = given.get("num_workers")
        if workers is None or _is(workers, 0):
            yield remark(
                one.event,
                "num_workers",
                "num_workers=0: the loop makes each batch itself, and nothing computes meanwhile",
                "num_workers=4, persistent_workers=True",
                "worth a look",
                "data",
            )
        if given.get("pin_memory") is None or _is(given["pin_memory"], value=False):
            yield remark(
                one.event,
                "pin_memory",
                "without pin_memory a copy to the GPU cannot run beside the computing",
                "pin_memory=True",
                "worth a look",
                "copies",
            )
        if sure and _takes_all(given, one.event, before):
            yield from _unsharded(one, before)


def of_trainer(trains: Event, before: Sequence[Event]) -> Remark:
    """A Trainer makes its loader by itself, so its arguments are told; a profile weighs it."""
    arguments = [
        one
        for one in before
        if isinstance(one.node, ast.Call) and one.name(one.node.func).endswith("TrainingArguments")
    ]
    return remark(
        arguments[-1] if arguments else trains,
        "num_workers",
        "the Trainer's loader has no workers: it makes each batch itself, and nothing computes"
        " meanwhile",
        f"{OF_TRAINER}=4 in TrainingArguments",
        "worth a look",
        "data",
    )


def _takes_all(given: Mapping[str | None, ast.expr], at: Event, before: Sequence[Event]) -> bool:
    """Whether its samplers, where it is given some, leave nothing to other ranks."""
    for key in ("sampler", "batch_sampler"):
        if key not in given:
            continue
        made = [given[key], *_written(at.name(given[key]), before)]
        calls = {_called(one, at) for node in made for one in ast.walk(node)}
        if not calls & _OF_ALL:
            return False
    return True


def _written(name: str, before: Sequence[Event]) -> list[ast.expr]:
    """What a variable was last assigned."""
    found = [
        one.node.value
        for one in before
        if isinstance(one.node, ast.Assign) and name in map(one.name, one.node.targets)
    ]
    return found[-1:] if name else []


def _called(node: ast.AST, at: Event) -> str:
    return at.name(node.func) if isinstance(node, ast.Call) else ""


def _unsharded(one: Source, before: Sequence[Event]) -> Iterator[Remark]:
    """A loader that nothing divides: every rank gets all samples."""
    if not HARMLESS.issuperset(one.way.through):
        return  # prepared, or in the hands of a function that may do it
    for event in before:
        if _word(event.node) in _SHARES:
            return
        call = event.node
        if isinstance(call, ast.Call) and event.name(call.func) not in HARMLESS:
            given = [*call.args, *(one.value for one in call.keywords)]
            given = [one.value if isinstance(one, ast.Starred) else one for one in given]
            if any(
                event.name(inner) in one.way.names for part in given for inner in ast.walk(part)
            ):
                return
    name = one.way.names[-1] if one.way.names else "the loop's DataLoader"
    yield remark(
        one.event,
        "sharding",
        f"{name} is not prepared: each rank trains on all samples, and the ranks on the same ones",
        f"{name} = accelerator.prepare({name})"
        if one.way.names
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
