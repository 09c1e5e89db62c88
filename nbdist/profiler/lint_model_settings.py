"""Lint checks of the model's training mode and precision."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from nbdist.profiler.lint_finding import finding_at
from nbdist.profiler.training_loops import OPTIMIZER_CLASS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.profiler.lint_finding import LintFinding
    from nbdist.profiler.symbolic_walk import AstEvent
    from nbdist.profiler.training_loops import TrainingLoop


_MODEL = re.compile(r"^(?:ddp_|fsdp_)?(?:model|net|network)$")
_MAGIC = re.compile(r"%%distribute\b.*--precision[ =]+fp16\b")


def lint_eval_mode(loop: TrainingLoop, before: Sequence[AstEvent]) -> Iterator[LintFinding]:
    """Report `model.eval()` without `model.train()` before the training loop."""
    first = before.index(loop.events[0])
    outer = loop.frame if not loop.events[0].loops else loop.events[0].loops[0]
    last = {_mode_of(item): item for item in before[:first]}
    repeated = [item for item in before if item.is_inside(outer) and _mode_of(item)]
    for name in _trained(loop, before):
        inside = [item for item in repeated if _mode_of(item) == name]
        event = inside[0] if inside else last.get(name)
        if event is None or not all(_is_eval(item) for item in (*inside, event)):
            continue
        yield finding_at(
            event,
            "train_mode",
            f"{name}.eval() without {name}.train() before the next step: dropout is disabled and"
            " batch norm does not update its running statistics",
            f"{name}.train() before the loop",
            "likely",
            "training",
        )


def _trained(loop: TrainingLoop, before: Sequence[AstEvent]) -> list[str]:
    """Return the names of the models that the loop trains, as far as they can be inferred."""
    called = {
        event.name(call.func)
        for event, call in loop.calls()
        if isinstance(call.func, (ast.Name, ast.Attribute)) and not event.no_grad
    }
    frozen, prepared, optimized = set(), set(), set()
    for event in before:
        if not isinstance(event.node, ast.Call):
            continue
        name, node = event.name(event.node.func), event.node
        if name == "requires_grad_" and node.args and isinstance(node.func, ast.Attribute):
            frozen.add(event.name(node.func.value))
        elif name.startswith("prepare"):
            prepared |= {event.name(argument) for argument in node.args}
        elif OPTIMIZER_CLASS.search(name):
            optimized |= _owners(event, node)
    known = optimized & called or prepared & called
    return sorted((known or {name for name in called if _MODEL.search(name)}) - frozen - {""})


def _owners(event: AstEvent, call: ast.Call) -> set[str]:
    """Return the models whose parameters() are passed to an optimizer."""
    inside = [node for node in ast.walk(call) if isinstance(node, ast.Attribute)]
    return {event.name(node.value) for node in inside if node.attr == "parameters"}


def _mode_of(event: AstEvent) -> str:
    """Return the model on which `eval()` or `train()` is called; "" for any other event."""
    node = event.node
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ""
    return event.name(node.func.value) if node.func.attr in {"eval", "train"} else ""


def _is_eval(event: AstEvent) -> bool:
    node = event.node
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    false = [item for item in node.args if isinstance(item, ast.Constant) and item.value is False]
    return node.func.attr == "eval" or bool(false)


def lint_precision(before: Sequence[AstEvent]) -> Iterator[LintFinding]:
    """Report the use of fp16. The caller checks whether the hardware supports bf16."""
    root = before[-1].root
    if root.lines and _MAGIC.search(root.lines[0]):
        yield _fp16(before[-1], line=1)
    for event in before:
        if isinstance(event.node, ast.Call) and _asks_fp16(event, event.node):
            yield _fp16(event)


def _asks_fp16(event: AstEvent, call: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    name = event.name(call.func)
    if name == "Accelerator":
        value = given.get("mixed_precision")
        return isinstance(value, ast.Constant) and value.value == "fp16"
    if name.endswith("TrainingArguments"):
        value = given.get("fp16")
        return isinstance(value, ast.Constant) and value.value is True
    if name == "autocast":
        dtypes = [given.get("dtype"), *(arg for arg in call.args if isinstance(arg, ast.Attribute))]
        return any(event.name(dtype) in {"float16", "half"} for dtype in dtypes)
    if name == "from_pretrained":
        return any(
            event.name(given.get(key)) in {"float16", "half"} for key in ("dtype", "torch_dtype")
        )
    return False


def _fp16(event: AstEvent, line: int | None = None) -> LintFinding:
    finding = finding_at(
        event,
        "fp16",
        "fp16 overflows above 65504 and needs loss scaling, which skips steps; bf16 has the range"
        " of fp32 at the same speed",
        "--precision bf16 in the %%distribute line",
        "likely",
        "precision",
    )
    if line is None:
        return finding
    root = event.root
    return replace(finding, cell=root.name, line=line, source=root.source_line(line))
