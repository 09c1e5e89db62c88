"""Traces a micro-batch in all compute modes and device kinds that a plan needs.

Runs in a child process, and modifies its copy of the model.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from nbdist.errors import PlanError
from nbdist.number_formatting import format_count
from nbdist.planner.model_spec import AUTOCAST_MODES, COMPUTE_MODES, HALF_MODES, LayerGroup
from nbdist.planner.tracing import (
    batch_size_fit,
    fake_tensors,
    micro_batch_tracer,
    wrap_units,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from nbdist.planner.tracing.wrap_units import FsdpGroup

DEVICE_KINDS = ("cuda", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """Options of a trace."""

    batch_size: int
    seq_len: int | None
    """Tokens per sample; None for a model without tokens."""
    compute_modes: Sequence[str] = COMPUTE_MODES
    device_kinds: Sequence[str] = DEVICE_KINDS


_READS_VALUES = (
    "The model reads values of tensors, which are not known before it runs: conditions on them are"
    " taken as false, and selections as whole."
)

ForwardBatch = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a forward."""


def trace_module_fields(
    model: nn.Module, batch: ForwardBatch, request: TraceRequest, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Trace a module; return the fields of a `TracedModel`, or {"error": message}.

    If it fails in some compute modes only, their `passes` are {"error": message}.

    Args:
        model: modified: blocks are dropped and tensors become fake. Its tensors may be
            on any device and are not read.
        batch: batch of the requested size; its tensors are not read either.
        request: what to trace.
        progress: called with progress messages.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        message = "The model has no trainable parameter. Set requires_grad on some, then plan."
        return {"error": message}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a model's own warnings are irrelevant here
            model.train()
            run = _VariantTracer(model, batch, request, progress)
            by_group = _by_group(run.found, _passes(run, request))
    except PlanError as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything
        message = (
            f"Cannot trace the model ({trace_error_text(model, error)}). Give"
            " example inputs that its forward accepts, nbdist.plan(model, inputs=...), or plan"
            " for a size such as '7b'."
        )
        return {"error": message}
    groups: list[LayerGroup] = by_group.pop("groups")
    count = sum(group.count * (group.num_params + group.quantized) for group in groups)
    return by_group | {
        "groups": [asdict(group) for group in groups],
        "name": f"{type(model).__name__}, {format_count(count)} parameters",
        "depth": "traced",
        "tied": run.tied,
        "element": run.element,
        "trainable_element": run.trainable_element,
        "batch_size": request.batch_size,
        "seq_len": request.seq_len,
        "notes": [_READS_VALUES] if run.depends_on_values else [],
    }


def _passes(run: _VariantTracer, request: TraceRequest) -> dict[str, dict[str, Any]]:
    """Trace all compute modes, without and with activation checkpointing.

    Raises:
        Exception: of any kind, if the model fails in every compute mode.
    """
    passes: dict[str, dict[str, Any]] = {}
    errors: dict[tuple[str, str], Exception] = {}
    computes = [c for c in request.compute_modes if c != "half_shards" or run.casts_inputs]
    modes = list(itertools.product(request.device_kinds, computes))
    for checkpointing in (False, True):
        if checkpointing:
            wrap_units.add_activation_checkpointing(run.model, run.blocks)
        for mode in modes:
            name = f"{mode[0]} {mode[1]}{' checkpointing' * checkpointing}"
            if mode not in errors:  # modes that fail without checkpointing also fail with it
                try:
                    passes[name] = run.trace_figures(*mode)
                except Exception as error:  # noqa: BLE001 - a user's module may raise anything
                    errors[mode] = error
            if mode in errors:
                reason = f"{_VARIANT_NAMES[mode[1]]} ({trace_error_text(run.model, errors[mode])})"
                message = (
                    f"Forward or backward fails {reason}. Use another backend or precision, or make"
                    " the model follow the dtype of its parameters."
                )
                passes[name] = {"error": message}
        if len(errors) == len(modes):
            raise errors[modes[0]]
    return passes


_VARIANT_NAMES = {
    "full": "without mixed precision",
    "half": "with parameters in 16 bits",
    "half_shards": "with parameters in 16 bits",
    "autocast": "under autocast",
    "half_autocast": "with parameters in 16 bits under autocast",
}
"""Compute modes in error messages."""


def trace_error_text(model: nn.Module, error: Exception) -> str:
    """Describe an exception that a model raised on fake tensors, in one line."""
    kind = type(error).__name__
    if kind in {"DataDependentOutputException", "DynamicOutputShapeException"}:
        kind = "its shapes depend on tensor values"
    first = (str(error).strip() or "no reason given").splitlines()[0]
    return f"{type(model).__name__} on fake tensors: {kind}: {first}"


class _VariantTracer:
    """A shortened model, ready to be traced in different compute modes."""

    def __init__(
        self,
        model: nn.Module,
        batch: ForwardBatch,
        request: TraceRequest,
        progress: Callable[[str], None],
    ) -> None:
        """Find the groups and drop the blocks that another one represents."""
        self.model, self.request, self.progress = model, request, progress
        floating = [each for each in model.parameters() if each.is_floating_point()]
        self.element, self.trainable_element = (
            next((each.element_size() for each in floating if each.requires_grad is trained), 0)
            for trained in (False, True)
        )
        self.element = self.element or self.trainable_element
        self.tied = wrap_units.has_tied_tail(model)
        self.depends_on_values = False
        self.found = wrap_units.drop_repeated_blocks(model, wrap_units.find_fsdp_groups(model))
        self.blocks = [group.first_modules[0] for group in self.found if group.role == "block"]
        self._types = {
            parameter: parameter.dtype for group in self.found for parameter in group.own_params
        }
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._half: bool | None = None
        self._batch = fake_tensors.fake_like(batch, self.mode)
        self._embedding = next(
            (g.first_modules[0] for g in self.found if g.role == "embedding"), None
        )
        tensors = [each for each in tree_leaves(self._batch) if isinstance(each, torch.Tensor)]
        # FSDP2 casts images or sound for the embedding, which is a unit.
        self.casts_inputs = self._embedding is not None and any(
            map(torch.is_floating_point, tensors)
        )

    def trace_figures(self, kind: str, compute: str) -> dict[str, Any]:
        """Trace one compute mode at two batch sizes."""
        half = compute in HALF_MODES
        if self._half != half:
            # The parameters become fake ones of the dtype that they are used in.
            fakes = fake_tensors.replace_with_fakes(self.model, self.mode, self._types, half=half)
            for group in self.found:
                group.own_params = [fakes[parameter] for parameter in group.own_params]
            self._types = {fakes[old]: dtype for old, dtype in self._types.items()}
            self._half = half
        size = self.request.batch_size
        self.progress(f"tracing {compute} for {kind}")
        recorded, doubled = (self._parts(kind, compute, times * size) for times in (1, 2))
        return batch_size_fit.fit_two_batch_sizes(recorded, doubled, size)

    def _parts(self, kind: str, compute: str, size: int) -> batch_size_fit.MemoryTraceByGroup:
        self.model.zero_grad(set_to_none=True)
        batch = fake_tensors.with_batch_size(self._batch, self.mode, self.request.batch_size, size)
        behaviour = fake_tensors.emulate_cuda() if kind == "cuda" else contextlib.nullcontext()
        shards: Any = contextlib.nullcontext()
        if compute == "half_shards" and self._embedding is not None:
            shards = _shards_outside_forward(self.model, self._embedding)
        with self.mode, behaviour, shards:
            step = functools.partial(_run_forward, self.model, compute)
            trace = micro_batch_tracer.record_micro_batch(
                self.model, self.found, batch, step, device_kind=kind
            )
        self.depends_on_values |= trace.depends_on_values
        return batch_size_fit.split_by_group(trace)


def _run_forward(model: nn.Module, compute: str, batch: ForwardBatch) -> tuple[torch.Tensor, Any]:
    """Run the forward of a micro-batch as an engine does; return the loss and the outputs."""
    args, kwargs = _cast(batch, torch.bfloat16) if compute in HALF_MODES else batch
    if compute not in AUTOCAST_MODES:
        outputs = model(*args, **kwargs)
        return loss_of(outputs), outputs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(*args, **kwargs)
    outputs = _cast(outputs, torch.float32)
    return loss_of(outputs), outputs


@contextlib.contextmanager
def _shards_outside_forward(model: nn.Module, unit: nn.Module) -> Iterator[None]:
    """While the model runs, show a unit's parameters in fp32 outside of its own forward.

    Models cast their inputs to the dtype that they see, and FSDP2 casts those of the unit again.
    """
    used = {module: dict(module._parameters) for module in unit.modules()}  # noqa: SLF001
    shards = {
        module: {name: each.detach().float() for name, each in own.items() if each is not None}
        for module, own in used.items()
    }

    def show(parameters: Any) -> None:
        for module, own in parameters.items():
            module._parameters.update(own)  # noqa: SLF001

    def gather(_: Any, args: Any, kwargs: Any) -> Any:
        show(used)
        return _cast((args, kwargs), torch.bfloat16)

    hooks = (
        model.register_forward_pre_hook(lambda *_: show(shards)),
        unit.register_forward_pre_hook(gather, with_kwargs=True),
        unit.register_forward_hook(lambda *_: show(shards)),
        model.register_forward_hook(lambda *_: show(used), always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor,
        values,
    )


def loss_of(outputs: Any) -> torch.Tensor:
    """Return the loss that a model returned, or the mean of its outputs.

    Raises:
        PlanError: no output has a gradient.
    """
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    means = [
        leaf.mean()
        for leaf in tree_leaves(outputs)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if not means:
        raise PlanError(
            "The model's output has no gradient. Give inputs for which it returns a loss or a"
            " tensor that depends on its parameters."
        )
    return torch.stack(means).sum() if len(means) > 1 else means[0]


def _by_group(found: Sequence[FsdpGroup], passes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the figures in forward order, with equal neighbours merged."""
    failed = {name: run for name, run in passes.items() if "error" in run}
    passes = {name: run for name, run in passes.items() if name not in failed}
    order = _forward_order(found, next(iter(passes.values())))
    times = [len(group.represented_indices) for group in found]
    passes = {name: batch_size_fit.extend_to_full_depth(run, times) for name, run in passes.items()}
    parts = {
        name: {part.pop("place"): part for part in run["groups"]} for name, run in passes.items()
    }
    moments: dict[str, Any] = {"forward": [], "backward": [], "gradients": []}
    nothing = {"saved": (0, 0), "input": (0, 0), "gradient": (0, 0), "flops": 0} | moments
    rows = [
        _RepeatedGroup(
            found[place], 1, [by_place.get(place, nothing) for by_place in parts.values()]
        )
        for place in order
    ]
    merged = _merged(rows)
    # The timelines of the engines end with a group that is not a block.
    ends = [] if merged[-1].group.role != "block" else [nothing]
    return {
        "groups": [
            row.group.layer_group(name, row.count)
            for name, row in zip(_names(merged), merged, strict=True)
        ]
        + [LayerGroup(name="tail", role="tail") for _ in ends],
        "passes": {
            name: {
                "groups": [row.parts[column] for row in merged] + ends,
                "loss": run["loss"],
                "outputs": run["outputs"],
                "batch": run["batch"],
            }
            for column, (name, run) in enumerate(passes.items())
        }
        | failed,
    }


@dataclass(frozen=True, slots=True)
class _RepeatedGroup:
    group: FsdpGroup
    count: int
    parts: list[dict[str, Any]]
    """Figures of every run."""


def _merged(rows: Sequence[_RepeatedGroup]) -> list[_RepeatedGroup]:
    """Merge neighbours with equal parameters and saved bytes.

    The first and the last block of a list may hold slightly less than the others at some
    moments: the larger value is used.
    """
    merged: list[_RepeatedGroup] = []
    for row in rows:
        if merged and _same(merged[-1]) == _same(row):
            last = merged.pop()
            both = zip(last.parts, row.parts, strict=True)
            larger = [
                first
                | {
                    name: drop({*first[name], *second[name]})
                    for name, drop in (
                        ("forward", batch_size_fit.pareto_fronts),
                        ("backward", batch_size_fit.pareto_front),
                    )
                }
                | {name: max(first[name], second[name], key=sum) for name in ("input", "gradient")}
                for first, second in both
            ]
            row = _RepeatedGroup(row.group, last.count + 1, larger)  # noqa: PLW2901
        merged.append(row)
    return merged


def _same(row: _RepeatedGroup) -> list[Any]:
    """Return the key that neighbours must share."""
    group = row.group
    own = [(part["saved"], part["flops"]) for part in row.parts]
    return [group.first_block_index, group.layer_group(), own]


def _forward_order(found: Sequence[FsdpGroup], run: dict[str, Any]) -> list[int]:
    """Return indices into `found` for every group of the whole model, in forward order.

    A list of blocks is at the position of its first one; groups that did not run follow the
    root.
    """
    forward_index = {part["place"]: number for number, part in enumerate(run["groups"])}
    first = {
        group.first_block_index: forward_index.get(place, 0)
        for place, group in reversed([*enumerate(found)])
    }
    places = [
        (first[group.first_block_index], time, place)
        for place, group in enumerate(found)
        for time in group.represented_indices
    ]
    return [place for *_, place in sorted(places)]


def _names(merged: Sequence[_RepeatedGroup]) -> list[str]:
    """Tell the first and the last block of a list from the others, where they differ."""
    stacks = [row.group.first_block_index for row in merged]
    names = []
    for number, row in enumerate(merged):
        single = row.count == 1 and stacks.count(row.group.first_block_index) > 1
        first = single and stacks.index(row.group.first_block_index) == number
        last = single and row.group.first_block_index not in stacks[number + 1 :]
        names.append("first " * first + "last " * last + row.group.name)
    return names
