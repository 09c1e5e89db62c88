"""Remarks on the DataLoaders that a training loop takes its batches from; pure."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nbdist.profile.remark import remark

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.profile.loops import StepLoop
    from nbdist.profile.remark import Remark
    from nbdist.profile.walk import Event

_HARMLESS = frozenset(
    {"cycle", "enumerate", "iter", "islice", "len", "next", "print", "tqdm", "trange", "zip"}
)
"""What may take a loader and leave it as it is."""
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


def look(loop: StepLoop, before: Sequence[Event]) -> Iterator[Remark]:
    """What its loader lacks; the first two only a profile can weigh."""
    made = _made(before)
    used = _used(loop, before) & made.keys()
    certain = bool(used)
    if not used and len(made) == 1:  # through ways that names do not show
        used = set(made)
    for name in sorted(used):
        event, call = made[name]
        given = {one.arg: one.value for one in call.keywords}
        if None in given or len(call.args) > _BY_PLACE:
            continue  # **options: anything may be in them
        workers = given.get("num_workers")
        if workers is None or _is(workers, 0):
            yield remark(
                event,
                "num_workers",
                "num_workers=0: the loop makes each batch itself, and nothing computes meanwhile",
                "num_workers=4, persistent_workers=True",
                "worth a look",
                "data",
            )
        if given.get("pin_memory") is None or _is(given["pin_memory"], value=False):
            yield remark(
                event,
                "pin_memory",
                "without pin_memory a copy to the GPU cannot run beside the computing",
                "pin_memory=True",
                "worth a look",
                "copies",
            )
        if certain and not given.keys() & {"sampler", "batch_sampler"}:
            yield from _unsharded(name, event, before)


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


def _unsharded(name: str, made: Event, before: Sequence[Event]) -> Iterator[Remark]:
    """A loader that nothing divides: every rank gets all samples."""
    for event in before:
        if _word(event.node) in _SHARES:
            return
        call = event.node
        if isinstance(call, ast.Call) and event.name(call.func) not in _HARMLESS:
            given = [*call.args, *(one.value for one in call.keywords)]
            given = [one.value if isinstance(one, ast.Starred) else one for one in given]
            if any(event.name(one) == name for part in given for one in ast.walk(part)):
                return  # prepared, or in the hands of a function that may do it
    yield remark(
        made,
        "sharding",
        f"{name} is not prepared: each rank trains on all samples, and the ranks on the same ones",
        f"{name} = accelerator.prepare({name})",
        "likely",
        "sharded",
    )


def _made(before: Sequence[Event]) -> dict[str, tuple[Event, ast.Call]]:
    """Variable -> the DataLoader call that it was made by."""
    found: dict[str, tuple[Event, ast.Call]] = {}
    for event in before:
        node = event.node
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if event.name(node.value.func) == "DataLoader":
                found |= {event.name(one): (event, node.value) for one in targets}
    return found


def _used(loop: StepLoop, before: Sequence[Event]) -> set[str]:
    """Names in what the loop goes through, or that it calls next() on."""
    frame = loop.frame
    sources: list[ast.AST] = [] if isinstance(frame.node, ast.While) else [frame.node.iter]
    sources += [call for event, call in loop.calls() if event.name(call.func) == "next"]
    names = {
        frame.names.get(one.id, one.id)
        for source in sources
        for one in ast.walk(source)
        if isinstance(one, ast.Name)
    }
    for event in before:  # batches = iter(loader)
        node = event.node
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if any(event.name(one) in names for one in node.targets):
            names |= {event.name(one) for one in node.value.args}
    return names


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
