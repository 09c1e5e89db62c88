"""Model specs from traces: any `nn.Module`, any transformers architecture.

`TracedModel` holds plain numbers and needs no torch; the trace (`nbdist.planner.tracing`) runs in a
child process on fake tensors: no data, no GPU, no code of the model's author.

Every byte count is linear in the batch size, fitted at the requested batch size and twice that; the
sequence length is that of the trace.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from nbdist.errors import PlanError
from nbdist.planner.model_spec import (
    COMPUTE_MODES,
    BackwardMoment,
    LayerActivations,
    LayerGroup,
    MicroBatchActivations,
)
from nbdist.planner.models import transformers_registry
from nbdist.planner.models.config import config_notes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from nbdist.planner.model_spec import ComputeMode, ModelSpec, Workload

TRACE_TIMEOUT_S = 120.0
"""A trace takes about 10 s; a model without repeated blocks may take longer."""

_PLAIN_TEXT = {"input_ids", "labels", "attention_mask"}
"""Arguments covered by analytic specs; a mask without padding changes nothing."""

LinearFit = tuple[float, float]
ParetoFront = list[tuple[LinearFit, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """A `ModelSpec` with traced figures."""

    name: str
    groups: tuple[LayerGroup, ...]
    tied: bool
    element: int
    batch_size: int
    """Batch size of the trace."""
    seq_len: int | None
    """Tokens per sample of the trace; None for a model without tokens."""
    passes: Mapping[str, Mapping[str, Any]]
    """Figures by run name, see `tracing.trace_runs`; {"error": reason} if the model fails in that
    compute mode."""
    notes: tuple[str, ...] = ()
    depth: Literal["traced"] = "traced"

    def micro_batch_activations(self, workload: Workload) -> MicroBatchActivations:
        """Return the activations of one micro-batch.

        Raises:
            PlanError: a sequence length, device kind or compute mode that was not traced, or a
                compute mode in which the model fails.
        """
        run = self._run(workload)
        batch = workload.batch_size
        return MicroBatchActivations(
            layers=tuple(_pass(part, batch) for part in run["groups"]),
            loss_bytes=_most(run["loss"], batch),
            output_bytes=_at(run["outputs"], batch),
        )

    def flops(self, workload: Workload) -> float:
        """Return the floating point operations of one micro-batch, forward and backward."""
        parts = zip(self.groups, self._run(workload)["groups"], strict=True)
        by_sample: float = sum(group.count * part["flops"] for group, part in parts)
        return workload.batch_size * by_sample

    def to_json(self) -> dict[str, Any]:
        """Return plain fields, from which `from_json` restores the spec."""
        return {
            "depth": self.depth,
            "name": self.name,
            "groups": [
                {field: getattr(group, field) for field in LayerGroup.__dataclass_fields__}
                for group in self.groups
            ],
            "tied": self.tied,
            "element": self.element,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "passes": dict(self.passes),
            "notes": list(self.notes),
        }

    def _run(self, workload: Workload) -> Mapping[str, Any]:
        """Figures of one compute mode."""
        if self.seq_len is not None and workload.seq_len != self.seq_len:
            message = (
                f"This model was traced with {self.seq_len} tokens per sample, not"
                f" {workload.seq_len}. Plan with seq_len={workload.seq_len} to trace it again."
            )
            raise PlanError(message)
        checkpointing = " checkpointing" * workload.activation_checkpointing
        name = f"{workload.kind} {workload.compute}{checkpointing}"
        if name not in self.passes:
            message = f"{name!r} was not traced. This trace has {', '.join(self.passes)}."
            raise PlanError(message)
        run = self.passes[name]
        if "error" in run:
            raise PlanError(run["error"])
        return run


def from_json(fields: Mapping[str, Any]) -> TracedModel:
    """Restore from `TracedModel.to_json()`, or from the child process's answer."""
    values = dict(fields)
    groups = tuple(map(_group, values.pop("groups")))
    return TracedModel(groups=groups, notes=tuple(values.pop("notes", ())), **values)


def _group(fields: Mapping[str, Any]) -> LayerGroup:
    """Restore a group from plain fields; JSON has turned tuples into lists."""
    tensors = tuple((rows, elements) for rows, elements in fields["tensors"])
    return LayerGroup(**{**fields, "tensors": tensors})


def trace_config(
    config: Mapping[str, Any],
    *,
    batch_size: int,
    seq_len: int,
    progress: Callable[[str], None],
    kinds: Sequence[str] = ("cuda", "cpu"),
    computes: Sequence[ComputeMode] = COMPUTE_MODES,
) -> TracedModel:
    """Trace a transformers config in a child process; blocks for some seconds.

    Args:
        config: fields of the config.json.
        batch_size: samples per micro-batch; other sizes are extrapolated.
        seq_len: tokens per sample.
        progress: called with progress messages.
        kinds: device kinds to trace; one takes half the time of two.
        computes: compute modes to trace.

    Raises:
        PlanError: transformers has no class for it, or it cannot be traced.
    """
    transformers_registry.check_model_type(config)
    request = {
        "config": dict(config),
        "batch_size": batch_size,
        "seq_len": seq_len,
        "kinds": list(kinds),
        "computes": list(computes),
    }
    command = [sys.executable, "-m", "nbdist.planner.tracing"]
    spec = from_json(_answer(command, request, progress))
    return replace(spec, notes=(*spec.notes, *config_notes(config)))


def spec_from_module(
    module: Any,
    *,
    batch_size: int,
    seq_len: int | None,
    inputs: object = None,
    batches: Iterable[Any] | None = None,
    progress: Callable[[str], None],
    kinds: Sequence[str] = ("cuda", "cpu"),
) -> ModelSpec:
    """Return the spec of an `nn.Module` of this process: analytic, or traced in a child.

    The analytic spec of a transformers model's config is used if every group has exactly as many
    parameters and trainable parameters as in the module. For arguments and errors see
    `tracing.trace_module`.
    """
    from nbdist.planner.tracing import trace_module as modules

    exact = find_analytic_spec(module) if is_text_only(inputs) else None
    if exact is not None:
        return exact
    return from_json(
        modules.trace_in_child(
            module,
            batch_size=batch_size,
            seq_len=seq_len,
            inputs=inputs,
            batches=batches,
            progress=progress,
            kinds=kinds,
        )
    )


def is_text_only(inputs: object) -> bool:
    """Return whether a forward gets only text, as analytic specs assume."""
    return inputs is None or (isinstance(inputs, dict) and inputs.keys() <= _PLAIN_TEXT)


def find_analytic_spec(module: Any) -> ModelSpec | None:
    """Return the analytic spec of a transformers model if it matches exactly; milliseconds."""
    from nbdist.planner.models import analytic
    from nbdist.planner.tracing.trace_module import describe_groups

    own_class = type(module).__module__.startswith("transformers.")
    config = module.config.to_dict() if own_class and hasattr(module, "config") else {}
    config.pop("quantization_config", None)  # its effect on parameters is compared below
    config["architectures"] = [type(module).__name__]
    if not analytic.is_supported(config):
        return None
    config["_attn_implementation"] = module.config._attn_implementation  # noqa: SLF001
    config["dtype"] = str(next(module.parameters()).dtype)
    try:
        spec = analytic.spec_from_config(config)
    except PlanError:  # a trace may still handle such a config
        return None
    return spec if _sizes(_expanded(spec)) == _sizes(describe_groups(module)) else None


def _expanded(spec: ModelSpec) -> list[Mapping[str, Any]]:
    """The groups of a spec one by one."""
    return [
        {"role": group.role, "trainable": group.trainable, "frozen": group.frozen}
        for group in spec.groups
        for _ in range(group.count)
    ]


def _sizes(groups: Iterable[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    """Roles and parameter counts of all groups with parameters, for comparison."""
    sizes = [(str(group["role"]), group["trainable"], group["frozen"]) for group in groups]
    return sorted(size for size in sizes if any(size[1:]))


def _answer(
    command: Sequence[str], request: Mapping[str, Any], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Run a child that reads JSON and writes progress lines and JSON.

    Raises:
        PlanError: it failed or timed out.
    """
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(  # noqa: S603 - our own module
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    ) as child:
        timer = threading.Timer(TRACE_TIMEOUT_S, child.kill)
        timer.start()
        begin = time.monotonic()
        try:
            return _talk(child, request, progress)
        except PlanError:
            if time.monotonic() - begin >= TRACE_TIMEOUT_S:
                raise trace_failure(f"timeout after {TRACE_TIMEOUT_S:.0f} s") from None
            raise
        finally:
            timer.cancel()
            child.kill()


def _talk(
    child: subprocess.Popen[str], request: Mapping[str, Any], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Send the request, forward the progress, return the answer."""
    assert child.stdin and child.stdout and child.stderr  # all are pipes  # noqa: PT018, S101
    child.stdin.write(json.dumps(request))
    child.stdin.close()
    last = "nothing"
    for line in child.stderr:
        last = line.strip() or last
        if last.startswith(PROGRESS_PREFIX):
            progress(last.removeprefix(PROGRESS_PREFIX))
    output = child.stdout.read()
    if child.wait() != 0 or not output:
        raise trace_failure(last)
    answer: dict[str, Any] = json.loads(output)
    if "error" in answer:
        raise PlanError(answer["error"])
    return answer


PROGRESS_PREFIX = "trace: "
"""Prefix of the child's progress lines."""


def trace_failure(last: str) -> PlanError:
    """Return the error for a child that ended without an answer."""
    message = (
        f"Cannot trace the model ({last.removeprefix(PROGRESS_PREFIX).rstrip('.')}). Give the model"
        " itself with example inputs, or plan for a size such as '7b'."
    )
    return PlanError(message)


def _pass(part: Mapping[str, Any], batch: int) -> LayerActivations:
    """Activations of one group at a batch size."""
    instants = {BackwardMoment(_at(line, batch), grads) for line, grads in part["backward"]}
    return LayerActivations(
        saved_bytes=_at(part["saved"], batch),
        forward_peak_bytes=_most(part["forward"], batch),
        backward_moments=tuple(_undominated(instants)),
        input_grad_bytes=_at(part["gradient"], batch),
    )


def _undominated(instants: Iterable[BackwardMoment]) -> list[BackwardMoment]:
    """Moments that no other one exceeds in both fields, the largest first."""
    best: list[BackwardMoment] = []
    for instant in sorted(instants, reverse=True):
        if not best or instant.num_grads > best[-1].num_grads:
            best.append(instant)
    return best


def _most(front: ParetoFront, batch: int) -> int:
    """Peak bytes at a batch size."""
    return max((_at(line, batch) for line, _ in front), default=0)


def _at(line: LinearFit, batch: int) -> int:
    """Bytes at a batch size."""
    constant, slope = line
    return max(0, round(constant + slope * batch))
