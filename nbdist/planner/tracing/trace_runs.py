"""All the micro-batches that a plan asks about, traced: ways to compute, kinds of device.

Runs in a child process, whose copy of the model it takes apart.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from nbdist.errors import PlanError
from nbdist.planner.tracing import cuda_semantics, fake_tensors, fit, tracer
from nbdist.planner.tracing import fsdp_groups as module_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from nbdist.planner.tracing.fsdp_groups import Group

COMPUTES = ("full", "half", "autocast", "half_autocast")
KINDS = ("cuda", "cpu")
HALF = {"half", "half_autocast"}
AUTOCAST = {"autocast", "half_autocast"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be traced."""

    batch_size: int
    seq_len: int | None
    """Tokens of a sample; None where the model does not take tokens."""
    computes: Sequence[str] = COMPUTES
    kinds: Sequence[str] = KINDS


Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a forward, by place and by name."""


def traced(
    model: nn.Module, batch: Batch, asked: Asked, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Return the fields of a `plan.traced.Traced`.

    Args:
        model: is taken apart: blocks are dropped and tensors become fake. Its tensors may be
            on any device and are not read.
        batch: of the batch size that was asked for; its tensors are not read either.
        asked: what to trace.
        progress: told what is going on.

    Raises:
        PlanError: no parameter trains.
        Exception: of any kind, where the model fails in every way of computing; where it fails
            in some, `passes` has {"error": a sentence} in their place.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise PlanError("no parameter of this model trains; set requires_grad on some, then plan.")
    model.train()
    run = _Runs(model, batch, asked, progress)
    passes = _passes(run, asked)
    return {
        "depth": "traced",
        "name": type(model).__name__,
        "tied": run.tied,
        "element": run.element,
        "batch_size": asked.batch_size,
        "seq_len": asked.seq_len,
    } | _by_group(run.found, passes)


def _passes(run: _Runs, asked: Asked) -> dict[str, dict[str, Any]]:
    """Trace all ways of computing, without and with activation checkpointing."""
    passes: dict[str, dict[str, Any]] = {}
    errors: dict[tuple[str, str], Exception] = {}
    ways = list(itertools.product(asked.kinds, asked.computes))
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint_activations(run.model, run.blocks)
        for way in ways:
            name = key(*way, checkpointing=checkpointing)
            if way not in errors:  # what fails without checkpointing fails with it
                try:
                    passes[name] = run.figured(*way)
                except Exception as error:  # noqa: BLE001 - a user's module may raise anything
                    errors[way] = error
            if way in errors:
                passes[name] = {"error": _failure(run.model, way[1], errors[way])}
        if len(errors) == len(ways):
            raise errors[ways[0]]
    return passes


def _failure(model: nn.Module, compute: str, error: Exception) -> str:
    """What to say of a model that fails in one way of computing."""
    return (
        f"its forward or backward fails {_WAYS[compute]} ({reason(model, error)}); take another"
        " backend or precision, or let the model follow the type of its parameters"
    )


_WAYS = {
    "full": "without mixed precision",
    "half": "with parameters in 16 bits",
    "autocast": "under autocast",
    "half_autocast": "with parameters in 16 bits under autocast",
}
"""How a model computes, for a reader."""


def reason(model: nn.Module, error: Exception) -> str:
    """What a model raised on tensors without data, in a line."""
    kind = type(error).__name__
    if kind in {"DataDependentOutputException", "DynamicOutputShapeException"}:
        kind = "its shapes depend on the values of tensors"
    first = (str(error).strip() or "no reason given").splitlines()[0]
    return f"{type(model).__name__} on tensors without data: {kind}: {first}"


def key(kind: str, compute: str, *, checkpointing: bool) -> str:
    """Name of one way to run a micro-batch."""
    return f"{kind} {compute}{' checkpointing' * checkpointing}"


class _Runs:
    """A model cut short, ready to be run in different ways."""

    def __init__(
        self, model: nn.Module, batch: Batch, asked: Asked, progress: Callable[[str], None]
    ) -> None:
        """Find the groups and drop what another block stands for."""
        self.model, self.asked, self.progress = model, asked, progress
        first = next(one for one in model.parameters() if one.is_floating_point())
        self.element = first.element_size()
        self.tied = module_groups.is_tied(model)
        self.found = module_groups.shorten(model, module_groups.groups(model))
        self.blocks = [group.starts[0] for group in self.found if group.role == "block"]
        self._types = {
            parameter: parameter.dtype for group in self.found for parameter in group.owned
        }
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._half: bool | None = None
        self._batch = fake_tensors.like(batch, self.mode)

    def figured(self, kind: str, compute: str) -> dict[str, Any]:
        """Trace one way at two batch sizes."""
        self._become(half=compute in HALF)
        size = self.asked.batch_size
        self.progress(f"tracing {compute} for {kind}")
        one, other = (self._parts(kind, compute, times * size) for times in (1, 2))
        return fit.fit(one, size, other, 2 * size)

    def _parts(self, kind: str, compute: str, size: int) -> fit.Parts:
        """Trace one micro-batch."""
        self.model.zero_grad(set_to_none=True)
        batch = fake_tensors.batched(self._batch, self.mode, self.asked.batch_size, size)
        behaviour = cuda_semantics.behaviour() if kind == "cuda" else contextlib.nullcontext()
        with self.mode, behaviour:
            step = _step(self.model, compute)
            return fit.parts(tracer.record(self.model, self.found, batch, step))

    def _become(self, *, half: bool) -> None:
        """Make the parameters fake, of the type that they are used in."""
        if self._half == half:
            return
        made = fake_tensors.fill(self.model, self.mode, self._types, half=half)
        for group in self.found:
            group.owned = [made[one] for one in group.owned]
        self._types = {made[old]: dtype for old, dtype in self._types.items()}
        self._half = half


def _step(model: nn.Module, compute: str) -> Callable[[Batch], tuple[torch.Tensor, Any]]:
    """The forward of a micro-batch as an engine runs it."""

    def step(batch: Batch) -> tuple[torch.Tensor, Any]:
        args, kwargs = _cast(batch, torch.bfloat16) if compute in HALF else batch
        if compute not in AUTOCAST:
            outputs = model(*args, **kwargs)
            return loss_of(outputs), outputs
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(*args, **kwargs)
        outputs = _cast(outputs, torch.float32)
        return loss_of(outputs), outputs

    return step


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Cast the floating point tensors among some values."""
    return tree_map_only(
        torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, values
    )


def loss_of(outputs: Any) -> torch.Tensor:
    """Return the loss that a model returned, or a mean of what it returned.

    Raises:
        PlanError: nothing that it returned has a gradient.
    """
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    means = [one.mean() for one in tree_leaves(outputs) if _has_gradient(one)]
    if not means:
        message = (
            "the model's output has no gradient; give inputs for which it returns a loss or a"
            " tensor that depends on its parameters."
        )
        raise PlanError(message)
    return torch.stack(means).sum() if len(means) > 1 else means[0]


def _has_gradient(value: object) -> bool:
    """Whether it is a tensor that backward can begin at."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def checkpoint_activations(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Recompute the blocks in the backward; a transformers model does it in its own way."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if callable(enable):
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    wanted = frozenset(map(id, blocks))
    apply_activation_checkpointing(model, check_fn=lambda module: id(module) in wanted)


def _by_group(found: Sequence[Group], passes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Put what was traced in the order of the forward, equal neighbours together."""
    failed = {name: run for name, run in passes.items() if "error" in run}
    passes = {name: run for name, run in passes.items() if name not in failed}
    order = _forward_order(found, next(iter(passes.values())))
    times = [len(group.times) for group in found]
    passes = {name: fit.deepened(run, times) for name, run in passes.items()}
    parts = {
        name: {part["place"]: _without_place(part) for part in run["groups"]}
        for name, run in passes.items()
    }
    nothing = {"saved": (0, 0), "gradient": (0, 0), "forward": [], "backward": [], "flops": 0}
    rows = [
        _Row(found[place], 1, [by_place.get(place, nothing) for by_place in parts.values()])
        for place in order
    ]
    merged = _merged(rows)
    return {
        "groups": [
            {"name": name, "role": row.group.role, "count": row.count} | row.group.counts()
            for name, row in zip(_names(merged), merged, strict=True)
        ],
        "passes": {
            name: {
                "groups": [row.parts[column] for row in merged],
                "loss": run["loss"],
                "outputs": run["outputs"],
            }
            for column, (name, run) in enumerate(passes.items())
        }
        | failed,
    }


@dataclass(frozen=True, slots=True)
class _Row:
    """A group of the whole model, or several equal neighbours."""

    group: Group
    count: int
    parts: list[dict[str, Any]]
    """Its figures in every run."""


def _merged(rows: Sequence[_Row]) -> list[_Row]:
    """Put neighbours together that have equal parameters and save the same.

    Inside of them the first and the last of a list may hold a little less than the others:
    of each moment the larger is taken.
    """
    merged: list[_Row] = []
    for row in rows:
        if merged and _same(merged[-1]) == _same(row):
            last = merged.pop()
            both = zip(last.parts, row.parts, strict=True)
            row = _Row(row.group, last.count + 1, [_larger(a, b) for a, b in both])  # noqa: PLW2901
        merged.append(row)
    return merged


def _same(row: _Row) -> list[Any]:
    """What neighbours must share."""
    group = row.group
    own = [(part["saved"], part["flops"]) for part in row.parts]
    return [group.stack, group.role, group.counts(), own]


def _larger(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The worst moments of two groups."""
    worst = {name: fit.pareto({*one[name], *other[name]}) for name in ("forward", "backward")}
    return one | worst | {"gradient": max(one["gradient"], other["gradient"], key=sum)}


def _forward_order(found: Sequence[Group], run: dict[str, Any]) -> list[int]:
    """Index into `found` for every group of the whole model, in forward order.

    A list of blocks stands where its first one does; groups that did not run come after the
    root.
    """
    began = {part["place"]: number for number, part in enumerate(run["groups"])}
    first = {group.stack: began.get(place, 0) for place, group in reversed([*enumerate(found)])}
    places = [
        (first[group.stack], time, place)
        for place, group in enumerate(found)
        for time in group.times
    ]
    return [place for *_, place in sorted(places)]


def _names(merged: Sequence[_Row]) -> list[str]:
    """Tell the first and the last block of a list from the others, where they differ."""
    stacks = [row.group.stack for row in merged]
    names = []
    for number, row in enumerate(merged):
        single = row.count == 1 and stacks.count(row.group.stack) > 1
        first = single and stacks.index(row.group.stack) == number
        last = single and row.group.stack not in stacks[number + 1 :]
        names.append("first " * first + "last " * last + row.group.name)
    return names


def _without_place(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name != "place"}
