"""Detection of training loops in cells, with their optimizer steps, backwards and tensors."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from nbdist.profiler.symbolic_walk import last_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from nbdist.profiler.cell_parser import ParsedCell
    from nbdist.profiler.symbolic_walk import AstEvent, LoopFrame

_OPTIMIZER = re.compile(r"optim|(?:^|_)opt(?:_|\d|$)", re.IGNORECASE)
_NO_OPTIMIZER = re.compile(r"sched|prof|scaler", re.IGNORECASE)
OPTIMIZER_CLASS = re.compile(
    r"(?:Adam\w*|SGD|RMSprop|Adagrad|Adadelta|Adafactor|Lion|Muon|LAMB|LBFGS|Optimizer\w*)$"
)
_SAME_TENSOR = frozenset({"detach", "mean", "sum", "clone", "float", "abs", "max", "min", "norm"})
"""Tensor methods that return a tensor."""
_COLLECTED = frozenset({"gather", "gather_for_metrics", "reduce"})
"""Accelerator methods that return tensors on the device."""
_NO_TENSOR = frozenset({"shape", "ndim", "dtype", "device", "grad_fn", "requires_grad"})


@dataclass(frozen=True, eq=False)
class TrainingLoop:
    """A loop that calls backward and an optimizer step."""

    frame: LoopFrame
    events: Sequence[AstEvent]
    """Events inside the loop."""
    optimizer_steps: Sequence[AstEvent]
    """Calls of optimizer steps."""
    backward_calls: Sequence[AstEvent]

    @property
    def cell(self) -> ParsedCell:
        """Cell whose source contains the loop."""
        return self.frame.cell

    def calls(self) -> Iterator[tuple[AstEvent, ast.Call]]:
        """Yield all calls inside the loop."""
        for event in self.events:
            if isinstance(event.node, ast.Call):
                yield event, event.node

    @cached_property
    def tensor_names(self) -> frozenset[str]:
        """Names of tensors computed by the model: losses, their inputs and derived values."""
        assignments = [
            event for event in self.events if isinstance(event.node, (ast.Assign, ast.AugAssign))
        ]
        written = {name for assignment in assignments for name in _written(assignment)}
        # A name assigned before the loop is usually a number, such as `n` in `loss / n`.
        names = {name for backward in self.backward_calls for name in _losses(backward)} & written
        size = -1
        while size != len(names):
            size = len(names)
            for assignment in assignments:
                names |= _spread(assignment, names) & written
        return frozenset(names)

    def is_tensor(self, event: AstEvent, node: ast.AST) -> bool:
        """Return whether an expression is a tensor computed by the model."""
        return _is_tensor(node, event, self.tensor_names)

    def has_tensor(self, event: AstEvent, node: ast.AST) -> bool:
        """Return whether an expression contains such a tensor, for example in an f-string."""
        if isinstance(node, (ast.JoinedStr, ast.FormattedValue, ast.Tuple, ast.List)):
            return any(self.has_tensor(event, child) for child in ast.iter_child_nodes(node))
        return self.is_tensor(event, node)


def find_training_loops(events: Sequence[AstEvent], root: ParsedCell) -> list[TrainingLoop]:
    """Return the training loops that the cell `root` executes."""
    optimizers = optimizer_names(events)
    in_loops = [event for event in events if event.root is root and event.loops]
    backwards = [event for event in in_loops if _is_call(event, "backward")]
    steps_by_loop: dict[LoopFrame, list[AstEvent]] = {}
    for event in in_loops:
        if is_optimizer_step(event, optimizers):
            loop = next((f for f in reversed(event.loops) if _any_inside(backwards, f)), None)
            if loop is not None:
                steps_by_loop.setdefault(loop, []).append(event)
    return [
        TrainingLoop(
            frame,
            [event for event in in_loops if event.is_inside(frame)],
            steps,
            [event for event in backwards if event.is_inside(frame)],
        )
        for frame, steps in steps_by_loop.items()
    ]


def optimizer_names(events: Iterable[AstEvent]) -> frozenset[str]:
    """Return the names of variables that optimizers are assigned to."""
    names: set[str] = set()
    for event in events:
        node = event.node
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = last_name(node.value.func, {})
            if OPTIMIZER_CLASS.search(called):
                names |= {event.name(target) for target in node.targets}
    return frozenset(names - {""})


def is_optimizer(name: str, optimizers: frozenset[str]) -> bool:
    """Return whether a variable name is or looks like that of an optimizer."""
    if name in optimizers:
        return True
    return bool(_OPTIMIZER.search(name)) and not _NO_OPTIMIZER.search(name)


def is_optimizer_step(event: AstEvent, optimizers: frozenset[str]) -> bool:
    """Return whether an event is `optimizer.step()` or `scaler.step(optimizer)`."""
    node = event.node
    if not isinstance(node, ast.Call) or not _is_call(event, "step"):
        return False
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    return any(is_optimizer(event.name(item), optimizers) for item in (owner, *node.args[:1]))


def _is_call(event: AstEvent, method: str) -> bool:
    node = event.node
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return called and last_name(node.func, {}) == method  # type: ignore[attr-defined]


def _any_inside(events: Iterable[AstEvent], frame: LoopFrame) -> bool:
    return any(event.is_inside(frame) for event in events)


def _losses(backward: AstEvent) -> set[str]:
    """Return the names of the loss in `accelerator.backward(loss)` or `loss.backward()`."""
    node = backward.node
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return set()
    given = node.args[0] if node.args else node.func.value
    return {backward.name(item) for item in ast.walk(given) if isinstance(item, ast.Name)} - {""}


def _spread(event: AstEvent, names: set[str]) -> set[str]:
    """Return names that are tensors because of an assignment, in either direction.

    The target is a tensor if the value is one. In `loss = output.loss`, `output` holds a tensor if
    `loss` is one.
    """
    node = event.node
    if not isinstance(node, (ast.Assign, ast.AugAssign)):
        return set()
    written = _written(event)
    if _is_tensor(node.value, event, frozenset(names)):
        return written
    if written & names and isinstance(node.value, (ast.Attribute, ast.Subscript)):
        return {event.name(_root(node.value))} - {""}
    return set()


def _written(event: AstEvent) -> set[str]:
    """Return the names that an assignment writes."""
    node = event.node
    if not isinstance(node, (ast.Assign, ast.AugAssign)):
        return set()
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {event.name(item) for target in targets for item in _flat(target)} - {""}


def _flat(target: ast.AST) -> list[ast.AST]:
    return list(target.elts) if isinstance(target, (ast.Tuple, ast.List)) else [target]


def _root(node: ast.AST) -> ast.AST:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node


def _is_tensor(node: ast.AST, event: AstEvent, names: frozenset[str]) -> bool:
    match node:
        case ast.Name():
            return event.name(node) in names
        case ast.Attribute(attr=attr) if attr in _NO_TENSOR:
            return False
        case ast.Attribute(value=inner) | ast.Subscript(value=inner) | ast.Starred(value=inner):
            return _is_tensor(inner, event, names)
        case ast.BinOp(left=left, right=right):
            return any(_is_tensor(operand, event, names) for operand in (left, right))
        case ast.Call(func=ast.Attribute(value=inner, attr=attr), args=args):
            inputs = args if attr in _COLLECTED else [inner] if attr in _SAME_TENSOR else []
            return any(_is_tensor(item, event, names) for item in inputs)
        case _:
            return False
