"""The training loops among what a cell runs: steps, backwards, tensors that live on the device."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from nbdist.profiler.symbolic_walk import last_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from nbdist.profiler.cell_parser import Parsed
    from nbdist.profiler.symbolic_walk import Event, Frame

_OPTIMIZER = re.compile(r"optim|(?:^|_)opt(?:_|\d|$)", re.IGNORECASE)
_NO_OPTIMIZER = re.compile(r"sched|prof|scaler", re.IGNORECASE)
OPTIMIZER_CLASS = re.compile(
    r"(?:Adam\w*|SGD|RMSprop|Adagrad|Adadelta|Adafactor|Lion|Muon|LAMB|LBFGS|Optimizer\w*)$"
)
_SAME_TENSOR = frozenset({"detach", "mean", "sum", "clone", "float", "abs", "max", "min", "norm"})
"""Methods of a tensor that give a tensor."""
_COLLECTED = frozenset({"gather", "gather_for_metrics", "reduce"})
"""Of an Accelerator: they give tensors of the device."""
_NO_TENSOR = frozenset({"shape", "ndim", "dtype", "device", "grad_fn", "requires_grad"})


@dataclass(frozen=True, eq=False)
class StepLoop:
    """A loop that trains: it calls backward and the step of an optimizer in each round."""

    frame: Frame
    events: Sequence[Event]
    """All that is inside."""
    steps: Sequence[Event]
    """The calls of the optimizer's step."""
    backwards: Sequence[Event]

    @property
    def cell(self) -> Parsed:
        """Where its text stands."""
        return self.frame.cell

    def calls(self) -> Iterator[tuple[Event, ast.Call]]:
        """All calls inside."""
        for one in self.events:
            if isinstance(one.node, ast.Call):
                yield one, one.node

    @cached_property
    def tensors(self) -> frozenset[str]:
        """Names of tensors that the model has made: the loss, and what comes of it or led to it."""
        made = [one for one in self.events if isinstance(one.node, (ast.Assign, ast.AugAssign))]
        written = {name for one in made for name in _written(one)}
        # what was assigned before the loop is a number, as the 8 of `loss / 8`
        names = {name for one in self.backwards for name in _losses(one)} & written
        size = -1
        while size != len(names):
            size = len(names)
            for one in made:
                names |= _spread(one, names) & written
        return frozenset(names)

    def is_tensor(self, event: Event, node: ast.AST) -> bool:
        """Whether an expression is such a tensor."""
        return _is_tensor(node, event, self.tensors)

    def shows_tensor(self, event: Event, node: ast.AST) -> bool:
        """Whether such a tensor is a part of an expression, as in an f-string."""
        if isinstance(node, (ast.JoinedStr, ast.FormattedValue, ast.Tuple, ast.List)):
            return any(self.shows_tensor(event, one) for one in ast.iter_child_nodes(node))
        return self.is_tensor(event, node)


def step_loops(events: Sequence[Event], root: Parsed) -> list[StepLoop]:
    """The training loops that running `root` comes by."""
    optimizers = optimizer_names(events)
    mine = [one for one in events if one.root is root and one.loops]
    backwards = [one for one in mine if _is_call(one, "backward")]
    found: dict[Frame, list[Event]] = {}
    for one in mine:
        if is_step(one, optimizers):
            about = next((f for f in reversed(one.loops) if _any_inside(backwards, f)), None)
            if about is not None:
                found.setdefault(about, []).append(one)
    return [
        StepLoop(
            frame,
            [one for one in mine if one.inside(frame)],
            steps,
            [one for one in backwards if one.inside(frame)],
        )
        for frame, steps in found.items()
    ]


def optimizer_names(events: Iterable[Event]) -> frozenset[str]:
    """Names that were given to optimizers."""
    names: set[str] = set()
    for one in events:
        node = one.node
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = last_name(node.value.func, {})
            if OPTIMIZER_CLASS.search(made):
                names |= {one.name(target) for target in node.targets}
    return frozenset(names - {""})


def is_optimizer(name: str, optimizers: frozenset[str]) -> bool:
    """Whether a name is that of an optimizer."""
    if name in optimizers:
        return True
    return bool(_OPTIMIZER.search(name)) and not _NO_OPTIMIZER.search(name)


def is_step(event: Event, optimizers: frozenset[str]) -> bool:
    """`optimizer.step()`, or `scaler.step(optimizer)`."""
    node = event.node
    if not isinstance(node, ast.Call) or not _is_call(event, "step"):
        return False
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    return any(is_optimizer(event.name(one), optimizers) for one in (owner, *node.args[:1]))


def _is_call(event: Event, method: str) -> bool:
    node = event.node
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return called and last_name(node.func, {}) == method  # type: ignore[attr-defined]


def _any_inside(events: Iterable[Event], frame: Frame) -> bool:
    return any(one.inside(frame) for one in events)


def _losses(backward: Event) -> set[str]:
    """The name of what `accelerator.backward(loss)` or `loss.backward()` is called on."""
    node = backward.node
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return set()
    given = node.args[0] if node.args else node.func.value
    return {backward.name(one) for one in ast.walk(given) if isinstance(one, ast.Name)} - {""}


def _spread(event: Event, names: set[str]) -> set[str]:
    """Names that an assignment adds: forth to what is made of tensors, back to what they are of."""
    node = event.node
    if not isinstance(node, (ast.Assign, ast.AugAssign)):
        return set()
    written = _written(event)
    if _is_tensor(node.value, event, frozenset(names)):
        return written
    if written & names and isinstance(node.value, (ast.Attribute, ast.Subscript)):
        return {event.name(_root(node.value))} - {""}
    return set()


def _written(event: Event) -> set[str]:
    """Names that an assignment writes."""
    node = event.node
    if not isinstance(node, (ast.Assign, ast.AugAssign)):
        return set()
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {event.name(one) for target in targets for one in _flat(target)} - {""}


def _flat(target: ast.AST) -> list[ast.AST]:
    return list(target.elts) if isinstance(target, (ast.Tuple, ast.List)) else [target]


def _root(node: ast.AST) -> ast.AST:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node


def _is_tensor(node: ast.AST, event: Event, names: frozenset[str]) -> bool:
    match node:
        case ast.Name():
            return event.name(node) in names
        case ast.Attribute(attr=attr) if attr in _NO_TENSOR:
            return False
        case ast.Attribute(value=inner) | ast.Subscript(value=inner) | ast.Starred(value=inner):
            return _is_tensor(inner, event, names)
        case ast.BinOp(left=left, right=right):
            return any(_is_tensor(one, event, names) for one in (left, right))
        case ast.Call(func=ast.Attribute(value=inner, attr=attr), args=args):
            of = args if attr in _COLLECTED else [inner] if attr in _SAME_TENSOR else []
            return any(_is_tensor(one, event, names) for one in of)
        case _:
            return False
