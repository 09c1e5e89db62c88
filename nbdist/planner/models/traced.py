"""A model by a trace of it: any `nn.Module`, any architecture of transformers.

`Traced` holds plain numbers, so it needs no torch; the trace itself (`nbdist.planner.tracing`)
runs in a child process on fake tensors: no data, no GPU, no code of a model's author.

Every byte count is a line in the batch size, found at the batch size that was asked for and
at twice that; the sequence length is the traced one.
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
from nbdist.planner.model_spec import COMPUTES, Group, Instant, MicroBatch, Pass
from nbdist.planner.models import transformers_registry
from nbdist.planner.models.config import config_notes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from nbdist.planner.model_spec import Compute, ModelSpec, Workload

TRACE_TIMEOUT_S = 120.0
"""A trace takes about 10 s; a model without repeated blocks may take longer."""

_PLAIN_TEXT = {"input_ids", "labels", "attention_mask"}
"""Arguments that a closed form has in mind; a mask without padding changes nothing."""

Line = tuple[float, float]
Front = list[tuple[Line, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A `ModelSpec` whose figures were traced."""

    name: str
    groups: tuple[Group, ...]
    tied: bool
    element: int
    batch_size: int
    """Of the trace."""
    seq_len: int | None
    """Tokens of a sample of the trace; None for a model that does not take tokens."""
    passes: Mapping[str, Mapping[str, Any]]
    """Figures by way of computing, as `planner.tracing.trace_runs` names and makes them;
    {"error": why} where the model fails in it."""
    notes: tuple[str, ...] = ()
    depth: Literal["traced"] = "traced"

    def micro_batch(self, workload: Workload) -> MicroBatch:
        """Bytes of one micro-batch.

        Raises:
            PlanError: a sequence length, kind of device or type that was not traced, or a way
                of computing in which the model fails.
        """
        run = self._run(workload)
        batch = workload.batch_size
        return MicroBatch(
            passes=tuple(_pass(part, batch) for part in run["groups"]),
            loss=_most(run["loss"], batch),
            outputs=_at(run["outputs"], batch),
        )

    def flops(self, workload: Workload) -> float:
        """Floating point operations of one micro-batch, forward and backward."""
        parts = zip(self.groups, self._run(workload)["groups"], strict=True)
        by_sample: float = sum(group.count * part["flops"] for group, part in parts)
        return workload.batch_size * by_sample

    def to_json(self) -> dict[str, Any]:
        """Return plain fields, from which `from_json` makes it again."""
        return {
            "depth": self.depth,
            "name": self.name,
            "groups": [
                {field: getattr(group, field) for field in Group.__dataclass_fields__}
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
        """The figures for one way of computing."""
        if self.seq_len is not None and workload.seq_len != self.seq_len:
            message = (
                f"this model was traced at {self.seq_len} tokens a sample and is asked about"
                f" {workload.seq_len}; plan with seq_len={workload.seq_len} to trace it anew."
            )
            raise PlanError(message)
        checkpointing = " checkpointing" * workload.activation_checkpointing
        name = f"{workload.kind} {workload.compute}{checkpointing}"
        if name not in self.passes:
            message = f"{name!r} was not traced; this trace has {', '.join(self.passes)}."
            raise PlanError(message)
        run = self.passes[name]
        if "error" in run:
            raise PlanError(run["error"])
        return run


def from_json(fields: Mapping[str, Any]) -> Traced:
    """Rebuild from `Traced.to_json()`, or from what the child process wrote."""
    values = dict(fields)
    groups = tuple(map(_group, values.pop("groups")))
    return Traced(groups=groups, notes=tuple(values.pop("notes", ())), **values)


def _group(fields: Mapping[str, Any]) -> Group:
    """A group from plain fields, whose tuples JSON has made lists."""
    tensors = tuple((rows, elements) for rows, elements in fields["tensors"])
    return Group(**{**fields, "tensors": tensors})


def of_config(
    config: Mapping[str, Any],
    *,
    batch_size: int,
    seq_len: int,
    progress: Callable[[str], None],
    kinds: Sequence[str] = ("cuda", "cpu"),
    computes: Sequence[Compute] = COMPUTES,
) -> Traced:
    """Trace a transformers config in a child process; blocks for some seconds.

    Args:
        config: its fields, as config.json has them.
        batch_size: samples of the micro-batch; other sizes follow from it.
        seq_len: tokens of a sample.
        progress: told what the trace is doing.
        kinds: of devices, whose ways to compute are traced; one takes half the time of two.
        computes: ways to compute that are traced.

    Raises:
        PlanError: transformers has no class for it, or it cannot be traced; one sentence.
    """
    transformers_registry.check(config)
    request = {
        "config": dict(config),
        "batch_size": batch_size,
        "seq_len": seq_len,
        "kinds": list(kinds),
        "computes": list(computes),
    }
    found = from_json(_answer([sys.executable, "-m", "nbdist.planner.tracing"], request, progress))
    return replace(found, notes=(*found.notes, *config_notes(config)))


def of_module(
    module: Any,
    *,
    batch_size: int,
    seq_len: int | None,
    inputs: object = None,
    batches: Iterable[Any] | None = None,
    progress: Callable[[str], None],
    kinds: Sequence[str] = ("cuda", "cpu"),
) -> ModelSpec:
    """Look at an `nn.Module` of this process: by its closed form, or by a trace in a child.

    A transformers model has the closed form of its config where every group of its parameters
    is exactly as large, and trains as many, as the closed form says. Arguments and errors are
    those of `planner.tracing.trace_module.of_module`.
    """
    from nbdist.planner.tracing import trace_module as modules

    exact = closed_form(module) if plain(inputs) else None
    if exact is not None:
        return exact
    return from_json(
        modules.of_module(
            module,
            batch_size=batch_size,
            seq_len=seq_len,
            inputs=inputs,
            batches=batches,
            progress=progress,
            kinds=kinds,
        )
    )


def plain(inputs: object) -> bool:
    """Whether a forward gets what closed forms have in mind: text alone."""
    return inputs is None or (isinstance(inputs, dict) and inputs.keys() <= _PLAIN_TEXT)


def closed_form(module: Any) -> ModelSpec | None:
    """The closed form of a transformers model, if it is exactly this model's; in milliseconds."""
    from nbdist.planner.models import analytic
    from nbdist.planner.tracing.trace_module import groups_of

    own_class = type(module).__module__.startswith("transformers.")
    config = module.config.to_dict() if own_class and hasattr(module, "config") else {}
    config.pop("quantization_config", None)  # what its parameters are is seen below
    config["architectures"] = [type(module).__name__]
    if not analytic.knows(config):
        return None
    config["_attn_implementation"] = module.config._attn_implementation  # noqa: SLF001
    config["dtype"] = str(next(module.parameters()).dtype)
    try:
        spec = analytic.from_config(config)
    except PlanError:  # a trace may still know what to do with such a config
        return None
    return spec if _sizes(_expanded(spec)) == _sizes(groups_of(module)) else None


def _expanded(spec: ModelSpec) -> list[Mapping[str, Any]]:
    """The groups of a spec one by one."""
    return [
        {"role": group.role, "trainable": group.trainable, "frozen": group.frozen}
        for group in spec.groups
        for _ in range(group.count)
    ]


def _sizes(groups: Iterable[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    """What must be equal: roles and parameters of all groups that have some."""
    found = [(str(one["role"]), one["trainable"], one["frozen"]) for one in groups]
    return sorted(one for one in found if any(one[1:]))


def _answer(
    command: Sequence[str], request: Mapping[str, Any], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Run a child that reads JSON and writes progress lines and JSON.

    Raises:
        PlanError: it failed, or took too long.
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
                raise failed(f"it took longer than {TRACE_TIMEOUT_S:.0f} s") from None
            raise
        finally:
            timer.cancel()
            child.kill()


def _talk(
    child: subprocess.Popen[str], request: Mapping[str, Any], progress: Callable[[str], None]
) -> dict[str, Any]:
    """Hand over the request, pass on the progress, return the answer."""
    assert child.stdin and child.stdout and child.stderr  # all are pipes  # noqa: PT018, S101
    child.stdin.write(json.dumps(request))
    child.stdin.close()
    last = "nothing"
    for line in child.stderr:
        last = line.strip() or last
        if last.startswith(PROGRESS):
            progress(last.removeprefix(PROGRESS))
    written = child.stdout.read()
    if child.wait() != 0 or not written:
        raise failed(last)
    answer: dict[str, Any] = json.loads(written)
    if "error" in answer:
        raise PlanError(answer["error"])
    return answer


PROGRESS = "trace: "
"""Begins a line of the child that is for the user."""


def failed(last: str) -> PlanError:
    """The error for a child that ended without an answer."""
    message = (
        f"the model could not be traced ({last.removeprefix(PROGRESS).rstrip('.')}); give the model"
        " itself with example inputs, or plan for a size such as '7b'."
    )
    return PlanError(message)


def _pass(part: Mapping[str, Any], batch: int) -> Pass:
    """One group's figures at a batch size."""
    instants = {Instant(_at(line, batch), grads) for line, grads in part["backward"]}
    return Pass(
        saved=_at(part["saved"], batch),
        forward=_most(part["forward"], batch),
        backward=tuple(_undominated(instants)),
        gradient=_at(part["gradient"], batch),
    )


def _undominated(instants: Iterable[Instant]) -> list[Instant]:
    """Instants that no other one exceeds in both fields; the one with most bytes first."""
    left: list[Instant] = []
    for instant in sorted(instants, reverse=True):
        if not left or instant.grads > left[-1].grads:
            left.append(instant)
    return left


def _most(front: Front, batch: int) -> int:
    """The most bytes at a batch size."""
    return max((_at(line, batch) for line, _ in front), default=0)


def _at(line: Line, batch: int) -> int:
    """Bytes at a batch size."""
    constant, slope = line
    return max(0, round(constant + slope * batch))
