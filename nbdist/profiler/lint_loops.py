"""Lint checks of the body of a training loop: synchronization and gradients."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nbdist.profiler.lint_finding import finding_at
from nbdist.profiler.training_loops import is_optimizer, optimizer_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.profiler.lint_finding import Confidence, LintFinding
    from nbdist.profiler.symbolic_walk import AstEvent, LoopFrame
    from nbdist.profiler.training_loops import TrainingLoop

_SHOWING = frozenset({"print", "set_postfix", "set_description", "info", "write"})
_TAKING = frozenset({"cpu", "numpy", "tolist"})
_NUMBERS = frozenset({"float", "int"})
_ON_THE_HOST = frozenset({"math", "np", "numpy", "pd", "random", "statistics", "time"})
"""Modules whose functions return values in host memory."""
_OF_A_RANK = frozenset(
    {
        "accelerator",
        "is_local_main_process",
        "is_main_process",
        "local_rank",
        "process_index",
        "rank",
        "sync_gradients",
        "verbose",
    }
)
"""Names in conditions that are true in every iteration on some rank."""
_TOLD = frozenset(
    {
        "accumulate",
        "no_sync",
        "require_backward_grad_sync",
        "set_gradient_accumulation_boundary",
        "set_requires_gradient_sync",
    }
)
"""APIs that announce gradient accumulation to an engine."""


def lint_loop(loop: TrainingLoop, before: Sequence[AstEvent]) -> Iterator[LintFinding]:
    """Run all checks on one loop.

    Args:
        loop: the training loop.
        before: events of all cells, those of the loop included.
    """
    optimizers = optimizer_names(before)
    yield from _syncs(loop)
    yield from _gradients_kept(loop, optimizers)
    yield from _gradients_zeroed(loop)
    yield from _accumulated(loop)


# -- waiting for the device


def _syncs(loop: TrainingLoop) -> Iterator[LintFinding]:
    reported = {
        id(inner)
        for _, call in loop.calls()
        if isinstance(call.func, ast.Name) and call.func.id == "report"
        for inner in ast.walk(call)
    }
    lines: set[tuple[str, int]] = set()
    for event, call in loop.calls():
        what = _waits(loop, event, call)
        place = (event.cell.name, call.lineno)
        if not what or place in lines or not _each_round(event, loop.frame):
            continue
        lines.add(place)
        yield finding_at(
            event,
            "sync",
            f"{what} in every step: on a GPU it blocks until all queued kernels have finished, and"
            " no new ones are launched meanwhile",
            _instead(call, in_report=id(call) in reported),
            "certain" if _is_item_of_tensor(loop, event, call) else "likely",
            "line",
        )


def _waits(loop: TrainingLoop, event: AstEvent, call: ast.Call) -> str:
    """Describe how a call synchronizes with the device; "" if it does not."""
    name = event.name(call.func)
    if isinstance(call.func, ast.Attribute) and not call.args:
        if name == "item" and not _of_the_host(loop, event, call.func.value):
            return ".item()"
        if name in _TAKING and loop.is_tensor(event, call.func.value):
            return f".{name}()"
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    if name in _NUMBERS and isinstance(call.func, ast.Name):
        tensors = any(loop.is_tensor(event, value) for value in given)
        return f"{name}() of a tensor" if tensors else ""
    if name in _SHOWING and any(loop.has_tensor(event, value) for value in given):
        return f"{name}() of a tensor"
    return ""


def _of_the_host(loop: TrainingLoop, event: AstEvent, node: ast.AST) -> bool:
    """Return whether a value was created on the host, so that reading it does not synchronize."""
    root = _root(node)
    if isinstance(root, ast.Name) and not isinstance(node, ast.Name):
        return root.id in _ON_THE_HOST or _of_the_host(loop, event, root)
    values = [
        other.node.value
        for other in loop.events
        if isinstance(other.node, ast.Assign)
        and any(
            isinstance(target, ast.Name) and other.name(target) == event.name(node)
            for target in other.node.targets
        )
    ]
    roots = [_root(value) for value in values if isinstance(value, ast.Call)]
    of_host = [name for name in roots if isinstance(name, ast.Name) and name.id in _ON_THE_HOST]
    return bool(values) and len(of_host) == len(values)


def _root(node: ast.AST) -> ast.AST:
    """Return the first name of a chain, such as `np` of np.mean(x)[0]."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def _is_item_of_tensor(loop: TrainingLoop, event: AstEvent, call: ast.Call) -> bool:
    """Return whether the call is `.item()` of a tensor computed by the model."""
    item = isinstance(call.func, ast.Attribute) and call.func.attr == "item"
    return item and loop.is_tensor(event, call.func.value)  # type: ignore[attr-defined]


def _instead(call: ast.Call, *, in_report: bool) -> str:
    if in_report and isinstance(call.func, ast.Attribute):
        tensor = ast.unparse(call.func.value)
        return f"pass the tensor to report(), which does not synchronize: {tensor}"
    return (
        "report(loss=loss), which does not synchronize; or keep loss.detach() and read it after the"
        " loop or every 50 steps"
    )


def _each_round(event: AstEvent, frame: LoopFrame) -> bool:
    """Return whether some rank executes the event in every iteration of the loop."""
    return all(_holds_always(test) for test in event.conditions_inside(frame))


def _holds_always(test: ast.expr) -> bool:
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
    return bool(names) and names <= _OF_A_RANK and not _has_modulo(test)


def _has_modulo(test: ast.expr) -> bool:
    return any(isinstance(node, ast.Mod) for node in ast.walk(test))


# -- gradients


def _gradients_kept(loop: TrainingLoop, optimizers: frozenset[str]) -> Iterator[LintFinding]:
    """Report a loop without zero_grad(), which accumulates the gradients of all steps."""
    for event in loop.events:
        node = event.node
        if isinstance(node, ast.Assign) and "grad" in map(event.name, node.targets):
            return
        if isinstance(node, ast.Call):
            if event.name(node.func) == "zero_grad":
                return
            passed = any(is_optimizer(event.name(argument), optimizers) for argument in node.args)
            if passed and event.name(node.func) not in {"step", "unscale_"}:
                return  # the called function may do it
    yield finding_at(
        loop.optimizer_steps[0],
        "zero_grad",
        "no zero_grad() in the loop: gradients accumulate over all steps",
        "optimizer.zero_grad() after optimizer.step()",
        "certain",
    )


def _gradients_zeroed(loop: TrainingLoop) -> Iterator[LintFinding]:
    for event, call in loop.calls():
        if event.name(call.func) != "zero_grad":
            continue
        given = [key.value for key in call.keywords if key.arg == "set_to_none"] or call.args
        if given and isinstance(given[0], ast.Constant) and given[0].value is False:
            yield finding_at(
                event,
                "set_to_none",
                "set_to_none=False fills all gradients with zeros and keeps their memory, and the"
                " next backward adds to them",
                "optimizer.zero_grad()",
                "certain",
            )


def _accumulated(loop: TrainingLoop) -> Iterator[LintFinding]:
    """Report gradient accumulation that is not announced to the engine."""
    attributes = [item.node.attr for item in loop.events if isinstance(item.node, ast.Attribute)]
    if not _TOLD.isdisjoint(attributes):
        return
    match = _guarded(loop) or _divided(loop)
    if match is None:
        return
    event, sure, count = match
    yield finding_at(
        event,
        "accumulate",
        "manual gradient accumulation: DDP and FSDP still reduce the gradients after every"
        " micro-batch, and DeepSpeed takes an optimizer step after each",
        f"%%distribute --accumulate {count or 'K'}, and `with accelerator.accumulate(model):`"
        " around the body of the loop, without the `if` and the division",
        sure,
    )


def _guarded(loop: TrainingLoop) -> tuple[AstEvent, Confidence, int | None] | None:
    """Match `if step % 8 == 0: optimizer.step()` with a backward outside of the `if`."""
    # A second optimizer that trains every few steps, such as the generator of a GAN, has its own
    # backward under the same condition.
    rare = {
        test for backward in loop.backward_calls for test in backward.conditions_inside(loop.frame)
    }
    for step in loop.optimizer_steps:
        for test in step.conditions_inside(loop.frame):
            if _has_modulo(test) and test not in rare:
                return step, "certain", _number(test)
    return None


def _divided(loop: TrainingLoop) -> tuple[AstEvent, Confidence, int | None] | None:
    """Match an inner loop of backwards before one step, in which the loss is divided."""
    for backward in loop.backward_calls:
        inner = backward.loops[-1]
        if inner is loop.frame or any(step.is_inside(inner) for step in loop.optimizer_steps):
            continue
        for event in loop.events:
            if event.is_inside(inner) and _divides_loss(loop, event):
                return backward, "likely", _number(event.node)
    return None


def _divides_loss(loop: TrainingLoop, event: AstEvent) -> bool:
    node = event.node
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return loop.is_tensor(event, node.target)
    divides = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    return divides and loop.is_tensor(event, node.left)  # type: ignore[attr-defined]


def _number(node: ast.AST) -> int | None:
    """Return the only integer above 1 in an expression, if there is exactly one."""
    numbers = {
        item.value
        for item in ast.walk(node)
        if isinstance(item, ast.Constant) and type(item.value) is int and item.value > 1
    }
    return numbers.pop() if len(numbers) == 1 else None
