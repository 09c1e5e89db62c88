"""Finds the call in the cells that creates the DataLoader of a loop. Nothing is run."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_WRAPPERS = frozenset({"cycle", "enumerate", "iter", "islice", "next", "tqdm", "zip"})
"""Functions that take a loader and return its batches."""
_NO_LOADER = frozenset({"range", "trange", "randn", "rand", "randint", "ones", "zeros", "arange"})
"""Functions that return something else to iterate over."""
_POSITIONAL = ("batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn")
"""Positional arguments of DataLoader after the dataset."""
_TRAINING_ARGUMENTS = {
    "batch_size": "per_device_train_batch_size",
    "num_workers": "dataloader_num_workers",
    "persistent_workers": "dataloader_persistent_workers",
    "pin_memory": "dataloader_pin_memory",
}
"""Argument of DataLoader -> its name in transformers' TrainingArguments."""
_SHARDS = re.compile(
    r"sampler\s*=|DistributedSampler|split_|shard|\b(?:local_)?rank\b|world_size|num_processes"
    r"|process_index"
)
"""Matches code that may shard its data manually."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLoaderCall:
    """The call in a cell that creates the DataLoader of a loop."""

    cell: str
    """Name of the cell, such as "In[2]"."""
    line: int
    text: str
    """Stripped text of the line."""
    call: str
    """Code of the call, such as "DataLoader(rows, batch_size=8)". A call of TrainingArguments if a
    transformers Trainer creates the loader."""
    holder: str = ""
    """Variable to assign the loader to. "" if the call is in a function or is not assigned, so
    that a call elsewhere would not replace the loader."""
    prepare: str = ""
    """Function that prepared it for that variable, such as "accelerator.prepare"."""
    may_be_sharded: bool = False
    """Whether the code prepares the loader, or may shard its samples itself."""

    @property
    def is_trainer(self) -> bool:
        """True if a transformers Trainer creates the loader."""
        return self.call.split("(")[0].endswith("TrainingArguments")


def loader_code(source: DataLoaderCall | None, **keywords: bool | int) -> str:
    """Return code that creates the loader with other arguments, or a comment with the change."""
    if source is None:
        return f"# {_call_text('DataLoader', keywords)}"
    where = f"# {source.cell}, line {source.line}: "
    if source.is_trainer:
        named = {_TRAINING_ARGUMENTS[name]: value for name, value in keywords.items()}
        return where + _call_text("TrainingArguments", named)
    call = ast.parse(source.call, mode="eval").body
    if not source.holder or not isinstance(call, ast.Call):
        return where + _call_text("DataLoader", keywords)
    # Positional arguments become keywords, so that the new ones replace them by name.
    arguments: dict[str | None, ast.expr] = dict(zip(_POSITIONAL, call.args[1:], strict=False))
    arguments |= {keyword.arg: keyword.value for keyword in call.keywords}
    arguments |= {name: ast.Constant(value) for name, value in keywords.items()}
    call.args = call.args[:1]
    call.keywords = [ast.keyword(arg=name, value=value) for name, value in arguments.items()]
    code = ast.unparse(call)
    return f"{source.holder} = {f'{source.prepare}({code})' if source.prepare else code}"


def _call_text(function: str, keywords: Mapping[str, bool | int]) -> str:
    words = ", ".join(f"{name}={value}" for name, value in keywords.items())
    return f"{function}(..., {words})"


def find_trainer_arguments(
    cells: Sequence[tuple[str, str, ast.Module]],
) -> DataLoaderCall | None:
    """Return the last call of TrainingArguments.

    Args:
        cells: name, source and syntax tree of each cell.
    """
    for name, source, tree in reversed(cells):
        for call in calls(tree):
            if last_name(call.func).endswith("TrainingArguments"):
                return _source_of(call, name, source)
    return None


def find_loader(
    cells: Sequence[tuple[str, str, ast.Module]], iterables: Sequence[ast.expr], *, trains: bool
) -> DataLoaderCall | None:
    """Return the only DataLoader call that some expressions lead back to.

    Args:
        cells: name, source and syntax tree of each cell, oldest first.
        iterables: the expressions that loops of the last cell take their batches from.
        trains: whether the loops train; otherwise a function does, which may have its own loader.
    """
    loaders = {"DataLoader"}
    local: set[int] = set()
    for node in (node for _, _, tree in cells for node in ast.walk(tree)):
        if isinstance(node, ast.alias) and node.name == "DataLoader" and node.asname:
            loaders.add(node.asname)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            local |= {id(inner) for inner in ast.walk(node)}
    search = _DataLoaderCallFinder(
        [pair for _, _, tree in cells for pair in _assignments(tree, local)], loaders
    )
    for iterable in iterables:
        search.trace(iterable, len(search.assigned))
    found = list(search.found.values())
    created = [(call, name, source) for name, source, tree in cells for call in calls(tree)]
    if not found and (search.is_lost or not trains):
        # The loader comes out of a function: it is the only one of the cells, if there is one.
        found = [(call, "", "") for call, *_ in created if last_name(call.func) in loaders]
    if len(found) != 1:
        return None
    call, holder, prepare = found[0]
    unknown = [item for item in call.args if isinstance(item, ast.Starred)]
    if unknown or any(item.arg is None for item in call.keywords):
        return None  # *args or **options may contain the argument to change
    name, source = next((name, source) for other, name, source in created if other is call)
    shards = any(_SHARDS.search(source) for _, source, _ in cells)
    return _source_of(
        call,
        name,
        source,
        holder="" if id(call) in local else holder,
        prepare=prepare,
        may_be_sharded=not trains or search.is_lost or search.is_prepared or shards,
    )


def _source_of(call: ast.Call, cell: str, source: str, **fields: Any) -> DataLoaderCall:
    text = source.split("\n")[call.lineno - 1].strip()
    code = ast.unparse(call)
    return DataLoaderCall(cell=cell, line=call.lineno, text=text, call=code, **fields)


@dataclass
class _DataLoaderCallFinder:
    """Traces expressions back to calls of DataLoader, through variables and `prepare`."""

    assigned: list[tuple[str, ast.expr]]
    """Variables and the values assigned to them, in order."""
    loaders: set[str]
    """Names of DataLoader in the cells."""
    found: dict[int, tuple[ast.Call, str, str]] = field(default_factory=dict)
    """Id of a call -> the call, variable of the loader, function that prepared it for that."""
    is_lost: bool = False
    """Whether an expression could not be traced."""
    is_prepared: bool = False

    def trace(self, node: ast.expr, until: int, holder: str = "", prepare: str = "") -> None:
        """Trace an expression.

        Args:
            node: the expression.
            until: number of assignments before it.
            holder: outermost variable of the loader itself, without a wrapper such as `iter()`.
            prepare: function that prepared it for that variable.
        """
        name = last_name(node.func if isinstance(node, ast.Call) else node)
        if not isinstance(node, ast.Call):
            for at in reversed(range(until)):
                if name and self.assigned[at][0] == name:
                    value = self.assigned[at][1]
                    is_wrapped = isinstance(value, ast.Call) and last_name(value.func) in _WRAPPERS
                    self.trace(value, at, holder or ("" if is_wrapped else name), prepare)
                    return
            self.is_lost = True
        elif name in self.loaders:
            self.found.setdefault(id(node), (node, holder, prepare))
        elif name.startswith("prepare"):
            self.is_prepared = True
            for argument in node.args:
                self.trace(argument, until, holder, ast.unparse(node.func) if holder else "")
        elif name in _WRAPPERS:
            for argument in node.args:
                self.trace(argument, until, holder, prepare)
        elif name not in _NO_LOADER:
            self.is_lost = True


def _assignments(tree: ast.Module, local: set[int]) -> Iterator[tuple[str, ast.expr]]:
    """Yield variables with their values, as far as they can be paired, without local ones."""
    nodes = [
        node for node in ast.walk(tree) if isinstance(node, ast.Assign) and id(node) not in local
    ]
    for node in sorted(nodes, key=lambda node: node.lineno):
        for target in node.targets:
            targets = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
            values: Sequence[ast.expr] = [node.value] * len(targets)
            match node.value:
                case ast.Tuple(elts=items) if len(items) == len(targets) > 1:
                    values = items
                case ast.Call(func=func, args=items) if len(items) == len(targets) > 1:
                    # `prepare` returns its arguments in the same order
                    values = [ast.Call(func, [item], []) for item in items]
            yield from zip(map(last_name, targets), values, strict=True)


def calls(node: ast.AST) -> Iterator[ast.Call]:
    """Yield all calls inside a node."""
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.Call))


def last_name(node: ast.AST | None) -> str:
    """Return the last part of a dotted name, or "" for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
