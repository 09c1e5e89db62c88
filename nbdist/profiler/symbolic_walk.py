"""Walks the syntax trees of cells in execution order, without running them.

Each visited node becomes an ``AstEvent`` with its enclosing loops and conditions, including those
of callers. Function bodies are inlined at their calls, with parameters mapped to the names of the
caller; functions that are never called are skipped.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.profiler.cell_parser import ParsedCell

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
LoopNode = ast.For | ast.AsyncFor | ast.While
ComprehensionNode = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp

_DEEPEST = 6
"""Maximum depth of inlined calls."""
_MOST_EVENTS = 100_000
"""Maximum number of events. Repeated nested calls could create millions of them; a truncated walk
is discarded."""
_NO_GRAD = frozenset({"no_grad", "inference_mode"})
_SOMETIMES = ast.Constant(value="in an error, or in one case of several")
"""Condition of blocks without a test, such as an exception handler."""


@dataclass(frozen=True, eq=False)
class LoopFrame:
    """One execution of a loop."""

    node: LoopNode | ast.comprehension
    cell: ParsedCell
    names: Mapping[str, str]
    conditions: int
    """Number of conditions outside of the loop."""


@dataclass(frozen=True, eq=False)
class AstEvent:
    """A visited node."""

    node: ast.AST
    cell: ParsedCell
    """The cell whose source contains the node."""
    root: ParsedCell
    """The cell that was executed; differs from `cell` for inlined functions."""
    loops: tuple[LoopFrame, ...]
    conditions: tuple[ast.expr, ...]
    names: Mapping[str, str]
    """Parameters of the enclosing function -> names in the caller."""
    no_grad: bool = False

    def name(self, node: ast.AST | None) -> str:
        """Return the last part of a dotted name, in terms of the caller; "" if not a name."""
        return last_name(node, self.names)

    def is_inside(self, frame: LoopFrame) -> bool:
        """Return whether the event is in this execution of a loop."""
        return frame in self.loops

    def conditions_inside(self, frame: LoopFrame) -> tuple[ast.expr, ...]:
        """Return the conditions between the loop and the event."""
        return self.conditions[frame.conditions :]


def last_name(node: ast.AST | None, names: Mapping[str, str]) -> str:
    """Return the last part of a dotted name, or "" for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


@dataclass
class _Definitions:
    """Functions and methods that the cells define."""

    functions: dict[str, tuple[FunctionNode, ParsedCell]] = field(default_factory=dict)
    methods: dict[tuple[str, str], tuple[FunctionNode, ParsedCell]] = field(default_factory=dict)
    made_of: dict[str, str] = field(default_factory=dict)
    """Variable -> class of its instance, if a cell defines the class."""

    def add(self, cell: ParsedCell) -> None:
        """Add the definitions of a cell. They replace earlier ones of the same name."""
        nodes = list(ast.walk(cell.tree))
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                methods = [item for item in node.body if isinstance(item, FunctionNode)]
                self.methods |= {(node.name, method.name): (method, cell) for method in methods}
        classes = {name for name, _ in self.methods}
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                name = last_name(node.value.func, {})
                if name in classes:
                    self.made_of |= {last_name(target, {}): name for target in node.targets}
        for node in _statements(cell.tree.body):
            if isinstance(node, FunctionNode):
                self.functions[node.name] = (node, cell)

    def called(
        self, call: ast.Call, names: Mapping[str, str]
    ) -> tuple[FunctionNode, ParsedCell] | None:
        """Return the function that is called and its cell, or None if no cell defines it."""
        if isinstance(call.func, ast.Name):
            return self.functions.get(call.func.id)
        if isinstance(call.func, ast.Attribute):
            owner = last_name(_bare(call.func.value), names)
            return self.methods.get((self.made_of.get(owner, owner), call.func.attr))
        return None


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield all statements including those of functions and blocks, but not those of classes."""
    for statement in body:
        yield statement
        if not isinstance(statement, ast.ClassDef):
            inner = [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.stmt)]
            yield from _statements(inner)


def walk_cells(cells: Sequence[ParsedCell]) -> list[AstEvent]:
    """Walk cells in execution order. Returns [] if there are too many events."""
    known, found = _Definitions(), _EventList()
    for cell in cells:
        known.add(cell)
        walker = _Walker(known, found)
        for statement in cell.tree.body:
            walker.visit(AstEvent(statement, cell, cell, (), (), {}))
    return [] if found.full else found.events


@dataclass
class _EventList:
    """Events of the walk so far."""

    events: list[AstEvent] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """True if the maximum number of events is reached."""
        return len(self.events) >= _MOST_EVENTS


@dataclass
class _Walker:
    """Visits nodes in execution order."""

    known: _Definitions
    found: _EventList
    calls: list[FunctionNode] = field(default_factory=list)
    """Functions that are being inlined, to stop at recursion."""

    def visit(self, at: AstEvent) -> None:
        """Visit a node and its children."""
        if self.found.full:
            return
        self.found.events.append(at)
        node = at.node
        if isinstance(node, (FunctionNode, ast.ClassDef, ast.Lambda)):
            return
        if isinstance(node, LoopNode):
            self._loop(at, node)
        elif isinstance(node, ComprehensionNode):
            self._comprehension(at, node)
        elif isinstance(node, (ast.If, ast.IfExp)):
            self._all(at, [node.test])
            branch = replace(at, conditions=(*at.conditions, node.test))
            self._all(branch, _listed(node.body))
            self._all(branch, _listed(node.orelse))
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            self._all(at, node.items)
            names = {last_name(_bare(item.context_expr), {}) for item in node.items}
            self._all(replace(at, no_grad=at.no_grad or bool(names & _NO_GRAD)), node.body)
        elif isinstance(node, (ast.ExceptHandler, ast.match_case)):
            self._all(replace(at, conditions=(*at.conditions, _SOMETIMES)), node.body)
        else:
            self._all(at, list(ast.iter_child_nodes(node)))
            if isinstance(node, ast.Call):
                self._follow(at, node)

    def _all(self, at: AstEvent, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(replace(at, node=node))
            if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Continue):
                # code after `if step % 8: continue` runs only in some iterations
                at = replace(at, conditions=(*at.conditions, node.test))

    def _loop(self, at: AstEvent, node: LoopNode) -> None:
        """Visit a loop."""
        # The iterable is evaluated once, the condition of `while` in every iteration.
        frame = LoopFrame(node, at.cell, at.names, len(at.conditions))
        inside = replace(at, loops=(*at.loops, frame))
        if isinstance(node, ast.While):
            self._all(inside, [node.test])
        else:
            self._all(at, [node.iter])
            self._all(inside, [node.target])
        self._all(inside, node.body)
        self._all(at, node.orelse)

    def _comprehension(self, at: AstEvent, node: ComprehensionNode) -> None:
        """Visit a comprehension as nested loops with its element in the innermost."""
        for generator in node.generators:
            self._all(at, [generator.iter])
            frame = LoopFrame(generator, at.cell, at.names, len(at.conditions))
            at = replace(at, loops=(*at.loops, frame))
            self._all(at, [generator.target, *generator.ifs])
            at = replace(at, conditions=(*at.conditions, *generator.ifs))
        element = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self._all(at, element)

    def _follow(self, at: AstEvent, call: ast.Call) -> None:
        """Inline the call of a function that a cell defines."""
        definition = self.known.called(call, at.names)
        if definition is None or definition[0] in self.calls or len(self.calls) >= _DEEPEST:
            return
        function, cell = definition
        self.calls.append(function)
        decorators = {last_name(_bare(decorator), {}) for decorator in function.decorator_list}
        inside = replace(
            at,
            cell=cell,
            names=_given(function, call, at.names),
            no_grad=at.no_grad or bool(decorators & _NO_GRAD),
        )
        self._all(inside, function.body)
        self.calls.pop()


def _given(function: FunctionNode, call: ast.Call, names: Mapping[str, str]) -> dict[str, str]:
    """Map the parameters of a function to the variables that are passed."""
    parameters = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    if isinstance(call.func, ast.Attribute) and parameters:
        owner = last_name(_bare(call.func.value), names)
        return {parameters[0]: owner} | _paired(parameters[1:], call, names)
    return _paired(parameters, call, names)


def _paired(parameters: list[str], call: ast.Call, names: Mapping[str, str]) -> dict[str, str]:
    given = dict(zip(parameters, call.args, strict=False))
    given |= {key.arg: key.value for key in call.keywords if key.arg is not None}
    return {
        name: variable for name, value in given.items() if (variable := last_name(value, names))
    }


def _listed(body: ast.expr | list[ast.stmt]) -> Sequence[ast.AST]:
    return body if isinstance(body, list) else [body]


def _bare(node: ast.AST) -> ast.AST:
    """Return the called function of a call, or the node itself."""
    return node.func if isinstance(node, ast.Call) else node
