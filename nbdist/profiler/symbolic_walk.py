"""What a cell's code does, in order and with the functions it calls in place; pure, nothing is run.

Each node of the tree that a run would come by becomes an `Event`: it knows the loops it is in,
also those of the callers, and the conditions it stands under. A function's body comes where it is
called, with its parameters under the caller's names; what is never called has no events.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.profiler.cell_parser import Parsed

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp

_DEEPEST = 6
"""Calls inside one another that are followed."""
_MOST_EVENTS = 100_000
"""Functions that call one another many times over would make millions; half of a loop is not
looked at."""
_NO_GRAD = frozenset({"no_grad", "inference_mode"})
_SOMETIMES = ast.Constant(value="in an error, or in one case of several")
"""The condition of a block that has none in its text."""


@dataclass(frozen=True, eq=False)
class Frame:
    """A loop that is being run."""

    node: Loop | ast.comprehension
    cell: Parsed
    names: Mapping[str, str]
    conditions: int
    """How many of an event's conditions stand outside of the loop."""


@dataclass(frozen=True, eq=False)
class Event:
    """A node that a run comes by."""

    node: ast.AST
    cell: Parsed
    root: Parsed
    """The cell that was run; `cell` is where the text stands."""
    loops: tuple[Frame, ...]
    conditions: tuple[ast.expr, ...]
    names: Mapping[str, str]
    """Parameters of the function it stands in -> what the caller calls them."""
    no_grad: bool = False

    def name(self, node: ast.AST | None) -> str:
        """The last part of a dotted name, as the outermost caller has it; "" for anything else."""
        return last_name(node, self.names)

    def inside(self, frame: Frame) -> bool:
        """Whether it is in that run of the loop."""
        return frame in self.loops

    def asked(self, frame: Frame) -> tuple[ast.expr, ...]:
        """Conditions between the loop and it."""
        return self.conditions[frame.conditions :]


def last_name(node: ast.AST | None, names: Mapping[str, str]) -> str:
    """The last part of a dotted name; "" for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


@dataclass
class _Known:
    """What cells define."""

    functions: dict[str, tuple[Function, Parsed]] = field(default_factory=dict)
    methods: dict[tuple[str, str], tuple[Function, Parsed]] = field(default_factory=dict)
    made_of: dict[str, str] = field(default_factory=dict)
    """Variable -> the cell's own class that it was made of."""

    def add(self, cell: Parsed) -> None:
        """Take over what a cell defines; later ones win, as when they are run."""
        nodes = list(ast.walk(cell.tree))
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                made = [one for one in node.body if isinstance(one, Function)]
                self.methods |= {(node.name, one.name): (one, cell) for one in made}
        classes = {name for name, _ in self.methods}
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                name = last_name(node.value.func, {})
                if name in classes:
                    self.made_of |= {last_name(one, {}): name for one in node.targets}
        for node in _statements(cell.tree.body):
            if isinstance(node, Function):
                self.functions[node.name] = (node, cell)

    def called(self, call: ast.Call, names: Mapping[str, str]) -> tuple[Function, Parsed] | None:
        """The function that a call means, where a cell defines it."""
        if isinstance(call.func, ast.Name):
            return self.functions.get(call.func.id)
        if isinstance(call.func, ast.Attribute):
            owner = last_name(_bare(call.func.value), names)
            return self.methods.get((self.made_of.get(owner, owner), call.func.attr))
        return None


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements outside of classes, those of functions and blocks too."""
    for one in body:
        yield one
        if not isinstance(one, ast.ClassDef):
            inner = [node for node in ast.iter_child_nodes(one) if isinstance(node, ast.stmt)]
            yield from _statements(inner)


def events(cells: Sequence[Parsed]) -> list[Event]:
    """What running these cells one after the other comes by; nothing where that is too much."""
    known, found = _Known(), _Found()
    for cell in cells:
        known.add(cell)
        walker = _Walker(known, found)
        for one in cell.tree.body:
            walker.visit(Event(one, cell, cell, (), (), {}))
    return [] if found.full else found.events


@dataclass
class _Found:
    """Events so far."""

    events: list[Event] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """No more are taken."""
        return len(self.events) >= _MOST_EVENTS


@dataclass
class _Walker:
    """Goes through the nodes in the order of running."""

    known: _Known
    found: _Found
    calls: list[Function] = field(default_factory=list)
    """Functions that are being followed, so that none is followed into itself."""

    def visit(self, at: Event) -> None:
        """Take a node and what is in it."""
        if self.found.full:
            return
        self.found.events.append(at)
        node = at.node
        if isinstance(node, (Function, ast.ClassDef, ast.Lambda)):
            return
        if isinstance(node, Loop):
            self._loop(at, node)
        elif isinstance(node, Comprehension):
            self._comprehension(at, node)
        elif isinstance(node, (ast.If, ast.IfExp)):
            self._all(at, [node.test])
            asked = replace(at, conditions=(*at.conditions, node.test))
            self._all(asked, _listed(node.body))
            self._all(asked, _listed(node.orelse))
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            self._all(at, node.items)
            names = {last_name(_bare(one.context_expr), {}) for one in node.items}
            self._all(replace(at, no_grad=at.no_grad or bool(names & _NO_GRAD)), node.body)
        elif isinstance(node, (ast.ExceptHandler, ast.match_case)):
            self._all(replace(at, conditions=(*at.conditions, _SOMETIMES)), node.body)
        else:
            self._all(at, list(ast.iter_child_nodes(node)))
            if isinstance(node, ast.Call):
                self._follow(at, node)

    def _all(self, at: Event, nodes: Sequence[ast.AST]) -> None:
        for one in nodes:
            self.visit(replace(at, node=one))
            if isinstance(one, ast.If) and isinstance(one.body[-1], ast.Continue):
                # what follows `if step % 8: continue` runs in some rounds only
                at = replace(at, conditions=(*at.conditions, one.test))

    def _loop(self, at: Event, node: Loop) -> None:
        """The iterable is made once, a condition is asked in every round."""
        frame = Frame(node, at.cell, at.names, len(at.conditions))
        inside = replace(at, loops=(*at.loops, frame))
        if isinstance(node, ast.While):
            self._all(inside, [node.test])
        else:
            self._all(at, [node.iter])
            self._all(inside, [node.target])
        self._all(inside, node.body)
        self._all(at, node.orelse)

    def _comprehension(self, at: Event, node: Comprehension) -> None:
        """Its loops are inside one another, with what it makes in the innermost."""
        for one in node.generators:
            self._all(at, [one.iter])
            frame = Frame(one, at.cell, at.names, len(at.conditions))
            at = replace(at, loops=(*at.loops, frame))
            self._all(at, [one.target, *one.ifs])
            at = replace(at, conditions=(*at.conditions, *one.ifs))
        made = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self._all(at, made)

    def _follow(self, at: Event, call: ast.Call) -> None:
        """Go into a function that a cell defines."""
        found = self.known.called(call, at.names)
        if found is None or found[0] in self.calls or len(self.calls) >= _DEEPEST:
            return
        function, cell = found
        self.calls.append(function)
        decorators = {last_name(_bare(one), {}) for one in function.decorator_list}
        inside = replace(
            at,
            cell=cell,
            names=_given(function, call, at.names),
            no_grad=at.no_grad or bool(decorators & _NO_GRAD),
        )
        self._all(inside, function.body)
        self.calls.pop()


def _given(function: Function, call: ast.Call, names: Mapping[str, str]) -> dict[str, str]:
    """Parameters that were given a variable -> its name."""
    parameters = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    if isinstance(call.func, ast.Attribute) and parameters:
        owner = last_name(_bare(call.func.value), names)
        return {parameters[0]: owner} | _paired(parameters[1:], call, names)
    return _paired(parameters, call, names)


def _paired(parameters: list[str], call: ast.Call, names: Mapping[str, str]) -> dict[str, str]:
    given = dict(zip(parameters, call.args, strict=False))
    given |= {one.arg: one.value for one in call.keywords if one.arg is not None}
    return {name: found for name, value in given.items() if (found := last_name(value, names))}


def _listed(body: ast.expr | list[ast.stmt]) -> Sequence[ast.AST]:
    return body if isinstance(body, list) else [body]


def _bare(node: ast.AST) -> ast.AST:
    """Without the call's parentheses."""
    return node.func if isinstance(node, ast.Call) else node
