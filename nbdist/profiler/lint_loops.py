"""Remarks on what a training loop does in each round; pure."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nbdist.profiler.lint_finding import remark
from nbdist.profiler.training_loops import is_optimizer, optimizer_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.profiler.lint_finding import Remark, Sure
    from nbdist.profiler.symbolic_walk import Event, Frame
    from nbdist.profiler.training_loops import StepLoop

_SHOWING = frozenset({"print", "set_postfix", "set_description", "info", "write"})
_TAKING = frozenset({"cpu", "numpy", "tolist"})
_NUMBERS = frozenset({"float", "int"})
_ON_THE_HOST = frozenset({"math", "np", "numpy", "pd", "random", "statistics", "time"})
"""Modules whose functions give numbers and arrays of the host."""
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
"""Words of conditions that hold in each round, on some rank."""
_TOLD = frozenset(
    {
        "accumulate",
        "no_sync",
        "require_backward_grad_sync",
        "set_gradient_accumulation_boundary",
        "set_requires_gradient_sync",
    }
)
"""Ways to tell an engine of accumulation."""


def look(loop: StepLoop, before: Sequence[Event]) -> Iterator[Remark]:
    """All remarks on one loop, of whose cell and those of before all events are known."""
    optimizers = optimizer_names(before)
    yield from _syncs(loop)
    yield from _gradients_kept(loop, optimizers)
    yield from _gradients_zeroed(loop)
    yield from _accumulated(loop)


# -- waiting for the device


def _syncs(loop: StepLoop) -> Iterator[Remark]:
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
        yield remark(
            event,
            "sync",
            f"{what} in every step: on a GPU it waits until the device has done all that was"
            " launched, and nothing is launched meanwhile",
            _instead(call, in_report=id(call) in reported),
            "certain" if _is_item_of_tensor(loop, event, call) else "likely",
            "line",
        )


def _waits(loop: StepLoop, event: Event, call: ast.Call) -> str:
    """What of a call waits for the device, in words; "" for nothing."""
    name = event.name(call.func)
    if isinstance(call.func, ast.Attribute) and not call.args:
        if name == "item" and not _of_the_host(loop, event, call.func.value):
            return ".item()"
        if name in _TAKING and loop.is_tensor(event, call.func.value):
            return f".{name}()"
    given = [*call.args, *(one.value for one in call.keywords)]
    if name in _NUMBERS and isinstance(call.func, ast.Name):
        return f"{name}() of a tensor" if any(loop.is_tensor(event, one) for one in given) else ""
    if name in _SHOWING and any(loop.shows_tensor(event, one) for one in given):
        return f"{name}() of a tensor"
    return ""


def _of_the_host(loop: StepLoop, event: Event, node: ast.AST) -> bool:
    """Whether numpy or the like has made it, which no device is waited for."""
    root = _root(node)
    if isinstance(root, ast.Name) and not isinstance(node, ast.Name):
        return root.id in _ON_THE_HOST or _of_the_host(loop, event, root)
    made = [
        one.node.value
        for one in loop.events
        if isinstance(one.node, ast.Assign)
        and any(
            isinstance(target, ast.Name) and one.name(target) == event.name(node)
            for target in one.node.targets
        )
    ]
    roots = [_root(one) for one in made if isinstance(one, ast.Call)]
    of_host = [one for one in roots if isinstance(one, ast.Name) and one.id in _ON_THE_HOST]
    return bool(made) and len(of_host) == len(made)


def _root(node: ast.AST) -> ast.AST:
    """The first name of a chain: `np` of np.mean(x)[0]."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def _is_item_of_tensor(loop: StepLoop, event: Event, call: ast.Call) -> bool:
    """Whether it is `.item()`, of what the model has made on its device."""
    item = isinstance(call.func, ast.Attribute) and call.func.attr == "item"
    return item and loop.is_tensor(event, call.func.value)  # type: ignore[attr-defined]


def _instead(call: ast.Call, *, in_report: bool) -> str:
    if in_report and isinstance(call.func, ast.Attribute):
        return f"report() takes the tensor itself and does not wait: {ast.unparse(call.func.value)}"
    return (
        "report(loss=loss) shows it without waiting; or keep loss.detach() and read it after the"
        " loop, or in every 50th step"
    )


def _each_round(event: Event, frame: Frame) -> bool:
    """Whether some rank comes by in every round of the loop."""
    return all(_holds_always(one) for one in event.asked(frame))


def _holds_always(test: ast.expr) -> bool:
    names = {one.id for one in ast.walk(test) if isinstance(one, ast.Name)}
    names |= {one.attr for one in ast.walk(test) if isinstance(one, ast.Attribute)}
    return bool(names) and names <= _OF_A_RANK and not _has_modulo(test)


def _has_modulo(test: ast.expr) -> bool:
    return any(isinstance(one, ast.Mod) for one in ast.walk(test))


# -- gradients


def _gradients_kept(loop: StepLoop, optimizers: frozenset[str]) -> Iterator[Remark]:
    """No zero_grad: each step would use the gradients of all steps before."""
    for event in loop.events:
        node = event.node
        if isinstance(node, ast.Assign) and any(event.name(one) == "grad" for one in node.targets):
            return
        if isinstance(node, ast.Call):
            if event.name(node.func) == "zero_grad":
                return
            handed = any(is_optimizer(event.name(one), optimizers) for one in node.args)
            if handed and event.name(node.func) not in {"step", "unscale_"}:
                return  # a function of somebody else may do it
    yield remark(
        loop.steps[0],
        "zero_grad",
        "no zero_grad() in the loop: every step adds its gradients to those of all steps before",
        "optimizer.zero_grad() after optimizer.step()",
        "certain",
    )


def _gradients_zeroed(loop: StepLoop) -> Iterator[Remark]:
    for event, call in loop.calls():
        if event.name(call.func) != "zero_grad":
            continue
        said = [one.value for one in call.keywords if one.arg == "set_to_none"] or call.args
        if said and isinstance(said[0], ast.Constant) and said[0].value is False:
            yield remark(
                event,
                "set_to_none",
                "set_to_none=False writes zeros over all gradients, keeps their memory, and the"
                " next backward adds instead of writing",
                "optimizer.zero_grad()",
                "certain",
            )


def _accumulated(loop: StepLoop) -> Iterator[Remark]:
    """Accumulation that the engine does not know of."""
    if any(isinstance(one.node, ast.Attribute) and one.node.attr in _TOLD for one in loop.events):
        return
    found = _guarded(loop) or _divided(loop)
    if found is None:
        return
    event, sure, count = found
    yield remark(
        event,
        "accumulate",
        "accumulation by hand: the engine does not know of it; DDP and FSDP reduce the gradients"
        " after every micro-batch, and DeepSpeed makes a step of each",
        f"%%distribute --accumulate {count or 'K'}, and `with accelerator.accumulate(model):`"
        " around the loop's body, without the `if` and the division",
        sure,
    )


def _guarded(loop: StepLoop) -> tuple[Event, Sure, int | None] | None:
    """`if step % 8 == 0: optimizer.step()`, with backwards that are not under the same condition.

    A second optimizer that trains now and then, as a GAN's generator, has its own backward there.
    """
    rare = {test for one in loop.backwards for test in one.asked(loop.frame)}
    for step in loop.steps:
        for test in step.asked(loop.frame):
            if _has_modulo(test) and test not in rare:
                return step, "certain", _number(test)
    return None


def _divided(loop: StepLoop) -> tuple[Event, Sure, int | None] | None:
    """A loop of backwards before one step, with the loss divided."""
    for one in loop.backwards:
        inner = one.loops[-1]
        if inner is loop.frame or any(step.inside(inner) for step in loop.steps):
            continue
        for event in loop.events:
            if event.inside(inner) and _divides_loss(loop, event):
                return one, "likely", _number(event.node)
    return None


def _divides_loss(loop: StepLoop, event: Event) -> bool:
    node = event.node
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return loop.is_tensor(event, node.target)
    divides = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    return divides and loop.is_tensor(event, node.left)  # type: ignore[attr-defined]


def _number(node: ast.AST) -> int | None:
    """The one whole number above 1 in an expression."""
    numbers = {
        one.value
        for one in ast.walk(node)
        if isinstance(one, ast.Constant) and type(one.value) is int and one.value > 1
    }
    return numbers.pop() if len(numbers) == 1 else None
