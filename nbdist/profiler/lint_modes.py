"""Remarks on the model's mode and precision around a training loop; pure."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from nbdist.profiler.lint_finding import remark
from nbdist.profiler.training_loops import OPTIMIZER_CLASS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.profiler.lint_finding import Remark
    from nbdist.profiler.symbolic_walk import Event
    from nbdist.profiler.training_loops import StepLoop


_MODEL = re.compile(r"^(?:ddp_|fsdp_)?(?:model|net|network)$")
_MAGIC = re.compile(r"%%distribute\b.*--precision[ =]+fp16\b")


def modes(loop: StepLoop, before: Sequence[Event]) -> Iterator[Remark]:
    """`model.eval()`, and nothing that makes it train again."""
    first = before.index(loop.events[0])
    outer = loop.frame if not loop.events[0].loops else loop.events[0].loops[0]
    last = {_mode_of(one): one for one in before[:first]}
    repeated = [one for one in before if one.inside(outer) and _mode_of(one)]
    for name in _trained(loop, before):
        inside = [one for one in repeated if _mode_of(one) == name]
        event = inside[0] if inside else last.get(name)
        if event is None or not all(_is_eval(one) for one in (*inside, event)):
            continue
        yield remark(
            event,
            "train_mode",
            f"{name}.eval(), and no {name}.train() before the next step: dropout is off and"
            " batch norm keeps its averages",
            f"{name}.train() before the loop",
            "likely",
            "training",
        )


def _trained(loop: StepLoop, before: Sequence[Event]) -> list[str]:
    """Models whose parameters the loop's optimizers have, as far as names tell."""
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
            prepared |= {event.name(one) for one in node.args}
        elif OPTIMIZER_CLASS.search(name):
            optimized |= _owners(event, node)
    known = optimized & called or prepared & called
    return sorted((known or {one for one in called if _MODEL.search(one)}) - frozen - {""})


def _owners(event: Event, call: ast.Call) -> set[str]:
    """Whose parameters() an optimizer is given."""
    inside = [one for one in ast.walk(call) if isinstance(one, ast.Attribute)]
    return {event.name(one.value) for one in inside if one.attr == "parameters"}


def _mode_of(event: Event) -> str:
    """The model whose mode a call sets; "" for any other event."""
    node = event.node
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ""
    return event.name(node.func.value) if node.func.attr in {"eval", "train"} else ""


def _is_eval(event: Event) -> bool:
    node = event.node
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    no = [one for one in node.args if isinstance(one, ast.Constant) and one.value is False]
    return node.func.attr == "eval" or bool(no)


def half_precision(before: Sequence[Event]) -> Iterator[Remark]:
    """Where fp16 is asked for; whether bf16 is there, the hardware tells."""
    root = before[-1].root
    if root.lines and _MAGIC.search(root.lines[0]):
        yield _fp16(before[-1], line=1)
    for event in before:
        if isinstance(event.node, ast.Call) and _asks_fp16(event, event.node):
            yield _fp16(event)


def _asks_fp16(event: Event, call: ast.Call) -> bool:
    given = {one.arg: one.value for one in call.keywords}
    name = event.name(call.func)
    if name == "Accelerator":
        said = given.get("mixed_precision")
        return isinstance(said, ast.Constant) and said.value == "fp16"
    if name.endswith("TrainingArguments"):
        said = given.get("fp16")
        return isinstance(said, ast.Constant) and said.value is True
    if name == "autocast":
        placed = [one for one in call.args if isinstance(one, ast.Attribute)]
        return any(event.name(one) in {"float16", "half"} for one in (given.get("dtype"), *placed))
    if name == "from_pretrained":
        return any(
            event.name(given.get(key)) in {"float16", "half"} for key in ("dtype", "torch_dtype")
        )
    return False


def _fp16(event: Event, line: int | None = None) -> Remark:
    made = remark(
        event,
        "fp16",
        "fp16 overflows above 65504, scales the loss for it and skips steps; bf16 has the range of"
        " fp32 at the same speed",
        "--precision bf16 in the %%distribute line",
        "likely",
        "precision",
    )
    if line is None:
        return made
    root = event.root
    return replace(made, cell=root.name, line=line, source=root.line(line))
