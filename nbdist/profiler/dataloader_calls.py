"""Static search for the DataLoader calls that a training loop takes its batches from.

The iterable of the loop is traced back through variables, wrappers and `prepare` to the call that
created it, so that it is not confused with other loaders of the notebook. Nothing is run.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbdist.profiler.symbolic_walk import FunctionNode, last_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nbdist.profiler.symbolic_walk import AstEvent
    from nbdist.profiler.training_loops import TrainingLoop

PASSTHROUGH_CALLS = frozenset(
    {"cycle", "enumerate", "iter", "islice", "len", "next", "print", "tqdm", "trange", "zip"}
)
"""Functions that may take a loader and do not shard or change it."""
_NO_LOADER = frozenset({"range", "trange"})
_PLACES = ("batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn")
"""Positional arguments of DataLoader after the dataset."""
_NO_LOADERS_OF = frozenset({"np", "numpy", "random", "torch"})
"""Modules whose functions do not return loaders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPath:
    """Path from a loop back to the call that created its loader."""

    names: tuple[str, ...] = ()
    """Variables that the loader was assigned to, the one used by the loop first."""
    via_functions: tuple[str, ...] = ()
    """Functions that the loader was passed through."""
    variable: str = ""
    """Module-level variable of the loader itself, without a wrapper such as `iter()`."""
    prepare: str = ""
    """Function that prepared it for that variable, such as "accelerator.prepare"."""


@dataclass(frozen=True, eq=False)
class DataLoaderCall:
    """A call of DataLoader whose batches a loop uses."""

    event: AstEvent
    call: ast.Call
    path: LoaderPath


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLoaderSource:
    """Source code of a DataLoader call in a cell."""

    cell: str
    """Name of the cell, such as "In[2]"."""
    line: int
    call: str
    """Code of the call, such as "DataLoader(rows, batch_size=8)"."""
    holder: str = ""
    """Variable to assign the loader to. "" if the call is in a function or is not assigned, so
    that a call elsewhere would not replace the loader."""
    prepare: str = ""

    def with_arguments(self, keywords: Mapping[str, bool | int]) -> str:
        """Return code that creates the loader with other arguments, or a comment where to do so."""
        call = ast.parse(self.call, mode="eval").body
        if not self.holder or not isinstance(call, ast.Call):
            return f"# {self.cell}, line {self.line}: {_instruction(keywords)}"
        positional = zip(_PLACES, call.args[1:], strict=False)
        arguments: dict[str | None, ast.expr] = dict(positional)
        arguments |= {keyword.arg: keyword.value for keyword in call.keywords}
        arguments |= {name: ast.Constant(value) for name, value in keywords.items()}
        call.args = call.args[:1]
        call.keywords = [ast.keyword(arg=name, value=value) for name, value in arguments.items()]
        code = ast.unparse(call)
        return f"{self.holder} = {f'{self.prepare}({code})' if self.prepare else code}"


def rebuild_instruction(text: DataLoaderSource | None, **keywords: bool | int) -> str:
    """Return code that creates the loader with other arguments, or a comment with the change."""
    return text.with_arguments(keywords) if text else f"# {_instruction(keywords)}"


def _instruction(keywords: Mapping[str, bool | int]) -> str:
    words = ", ".join(f"{name}={value}" for name, value in keywords.items())
    return f"DataLoader(..., {words})"


class LoaderTracer:
    """Traces the DataLoader calls that provide the batches of a loop."""

    def __init__(self, loop: TrainingLoop, before: Sequence[AstEvent]) -> None:
        """Trace the iterable of the loop and the arguments of its calls of `next`.

        Args:
            loop: the training loop.
            before: events of all cells, those of the loop included.
        """
        self.sources: list[DataLoaderCall] = []
        self._lost = False
        """Whether the trace ended at an expression that cannot be resolved."""
        self._seen: set[tuple[str, int]] = set()
        """Names with the index of the assignment that was traced."""
        aliases = {
            item.node.asname or item.node.name: item.node.name
            for item in before
            if isinstance(item.node, ast.alias)
        }
        self._calls = {
            id(item.node): item
            for item in before
            if isinstance(item.node, ast.Call)
            and aliases.get(item.name(item.node.func), item.name(item.node.func)) == "DataLoader"
        }
        self._assigned = [
            (at, item)
            for at, item in enumerate(before)
            if isinstance(item.node, (ast.Assign, ast.AnnAssign)) and item.node.value is not None
        ]
        frame, until = loop.frame, before.index(loop.events[0])
        if not isinstance(frame.node, ast.While):
            self._follow(frame.node.iter, frame.names, until, LoaderPath())
        for event, call in loop.calls():
            if event.name(call.func) == "next":
                for argument in call.args[:1]:
                    self._follow(
                        argument,
                        event.names,
                        before.index(event),
                        LoaderPath(via_functions=("next",)),
                    )

    @property
    def likely_calls(self) -> list[DataLoaderCall]:
        """Traced calls, or the only DataLoader call of the cells if the trace failed."""
        if self.sources or not self._lost or len(self._calls) != 1:
            return self.sources
        (event,) = self._calls.values()
        assert isinstance(event.node, ast.Call)  # noqa: S101 - by construction of _calls
        return [DataLoaderCall(event, event.node, LoaderPath())]

    def _follow(self, node: ast.AST, names: Mapping[str, str], until: int, way: LoaderPath) -> None:
        """Trace an expression, evaluated before the event of index `until`."""
        if isinstance(node, ast.Starred):
            node = node.value
        if isinstance(node, ast.Call):
            self._through(node, names, until, way)
        elif name := last_name(node, names):
            self._named(name, until, way)

    def _through(
        self, call: ast.Call, names: Mapping[str, str], until: int, way: LoaderPath
    ) -> None:
        if event := self._calls.get(id(call)):
            if all(source.call is not call for source in self.sources):
                self.sources.append(DataLoaderCall(event, call, way))
            return
        name = last_name(call.func, names)
        if name in _NO_LOADER:
            return
        prepares = name.startswith("prepare") and way.variable
        path = replace(
            way,
            via_functions=(*way.via_functions, name),
            prepare=ast.unparse(call.func) if prepares else way.prepare,
        )
        num_sources = len(self.sources)
        for argument in (*call.args, *(key.value for key in call.keywords)):
            self._follow(argument, names, until, path)
        if len(self.sources) == num_sources and _root(call) not in _NO_LOADERS_OF:
            self._lost = True

    def _named(self, name: str, until: int, way: LoaderPath) -> None:
        """Trace the last value assigned to a variable."""
        for at, event in reversed(self._assigned):
            if at >= until:
                continue
            for target, value in _pairs(event.node):
                if event.name(target) == name:
                    if (name, at) in self._seen:
                        return
                    self._seen.add((name, at))
                    wraps = (
                        isinstance(value, ast.Call) and event.name(value.func) in PASSTHROUGH_CALLS
                    )
                    holds = isinstance(target, ast.Name) and not wraps
                    path = replace(way, names=(*way.names, name))
                    if holds and not way.variable and not _inside_function(event.cell.tree, target):
                        path = replace(path, variable=name)
                    self._follow_assigned(value, event, at, path)
                    return
        self._lost = True

    def _follow_assigned(self, value: ast.expr, event: AstEvent, at: int, way: LoaderPath) -> None:
        """Trace an assigned value."""
        whole = event.node.value  # type: ignore[attr-defined]
        # One of several arguments of `prepare`: record that it was passed through it.
        if value is not whole and isinstance(whole, ast.Call):
            call = ast.Call(func=whole.func, args=[value], keywords=[])
            self._through(call, event.names, at, way)
        else:
            self._follow(value, event.names, at, way)


def loader_source(source: DataLoaderCall) -> DataLoaderSource | None:
    """Return the source code of a call, or None if it has arguments such as **options."""
    call, event, way = source.call, source.event, source.path
    if any(keyword.arg is None for keyword in call.keywords) or len(call.args) > 1 + len(_PLACES):
        return None
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    runs = not _inside_function(event.cell.tree, call)
    return DataLoaderSource(
        cell=event.cell.name,
        line=call.lineno,
        call=ast.unparse(call),
        holder=way.variable if runs else "",
        prepare=way.prepare,
    )


def _pairs(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Pair the targets of an assignment with their values, as far as they can be told apart."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return [(node.target, node.value)]
    if not isinstance(node, ast.Assign):
        return []
    pairs: list[tuple[ast.expr, ast.expr]] = []
    for target in node.targets:
        if isinstance(target, (ast.Tuple, ast.List)):
            values = _each(node.value, len(target.elts))
            pairs += zip(target.elts, values, strict=True)
        else:
            pairs.append((target, node.value))
    return pairs


def _each(value: ast.expr, count: int) -> Sequence[ast.expr]:
    """Return the value of each of several targets, or the whole value for all of them."""
    given: Sequence[ast.expr] = ()
    if isinstance(value, (ast.Tuple, ast.List)):
        given = value.elts
    elif isinstance(value, ast.Call) and last_name(value.func, {}).startswith("prepare"):
        given = value.args  # `prepare` returns its arguments in the same order
    plain = len(given) == count and not any(isinstance(item, ast.Starred) for item in given)
    return given if plain else [value] * count


def _root(call: ast.Call) -> str:
    """Return the first name of the called function, such as "torch" of torch.randn()."""
    node: ast.AST = call.func
    while isinstance(node, (ast.Attribute, ast.Call)):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def _inside_function(tree: ast.Module, node: ast.AST) -> bool:
    return any(
        inner is node
        for outer in ast.walk(tree)
        if isinstance(outer, (FunctionNode, ast.Lambda, ast.ClassDef))
        for inner in ast.walk(outer)
    )
