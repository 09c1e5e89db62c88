"""Tracing a module that lives in this process: a rank's, or a user's kernel.

A forked child sees the module without a copy of its data, puts fake tensors in the place of
its own references, traces, and writes the figures into a pipe. The parent's module, random
state and data loader stay as they are; the child calls neither CUDA nor a collective.

Where torch's backward threads have run already (a GPU is in use), a forked child has no
backward: the trace then runs in this process, on a copy of the module whose tensors are fake
from the start.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from nbdist.errors import PlanError
from nbdist.planner.tracing import build_model, subprocess_worker, trace_runs
from nbdist.planner.tracing import fsdp_groups as module_groups
from nbdist.planner.tracing.build_model import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from nbdist.planner.tracing.trace_runs import Batch

TIMEOUT_S = 120.0
"""For one trace; it takes about 10 s."""
_NO_BACKWARD = "fork-based multiprocessing"
"""Of torch's message that a forked child has no backward."""


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return name, role and parameters of each FSDP group of a module; nothing is run."""
    return [
        {"name": group.name, "role": group.role} | group.counts()
        for group in module_groups.groups(module)
    ]


def of_module(
    module: nn.Module,
    *,
    batch_size: int,
    seq_len: int | None = None,
    inputs: object = None,
    batches: Iterable[Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
    kinds: Sequence[str] = trace_runs.KINDS,
) -> dict[str, Any]:
    """Trace a module; the fields of a `plan.traced.Traced`. Blocks for about ten seconds.

    Args:
        module: on any device, not yet prepared by an engine. It is left as it is.
        batch_size: of the trace; of `inputs`, their first dimension.
        seq_len: tokens of a sample, where a transformers model takes tokens.
        inputs: example input: a tensor, or a tuple or dict of arguments; its values are
            not read.
        batches: a data loader whose first batch is the example; it is fetched in the child,
            so that the loader's position stays.
        progress: told what the trace is doing.
        kinds: of devices, whose ways to compute are traced.

    Raises:
        PlanError: no example input is known, it cannot be traced, or it took too long; one
            sentence.
    """

    def work(say: Callable[[str], None], *, copied: bool) -> dict[str, Any]:
        own = _without_data(module) if copied else module
        sample, size, length = _example(own, inputs, batches, batch_size, seq_len)
        asked = trace_runs.Asked(batch_size=size, seq_len=length, kinds=kinds)
        return subprocess_worker.figures(own, sample.batch, asked, say) | {
            "notes": list(sample.notes)
        }

    fields = _in_child(lambda say: work(say, copied=False), progress, TIMEOUT_S)
    if _NO_BACKWARD in str(fields.get("error")):
        fields = work(progress, copied=True)
    if "error" in fields:
        raise PlanError(fields["error"])
    params = subprocess_worker.size(subprocess_worker.model_params(fields))
    return fields | {"name": f"{type(module).__name__}, {params}"}


def _example(
    module: nn.Module,
    inputs: object,
    batches: Iterable[Any] | None,
    batch_size: int,
    seq_len: int | None,
) -> tuple[Sample, int, int | None]:
    """Return a batch, its size, and tokens of a sample where it holds tokens."""
    build_model.without_tracing_branches()
    build_model.with_grouped_experts(module)
    if inputs is None and batches is not None:
        torch.manual_seed(0)  # of the child: a sampler may draw
        inputs = next(iter(batches))
    if inputs is not None:
        batch = _arguments(inputs)
        length = _tokens(batch)
        return Sample(batch, length is not None), _first_dimension(batch), length
    sample = build_model.sample_for(module, batch_size, seq_len or build_model.SEQ_LEN)
    return sample, batch_size, (seq_len or build_model.SEQ_LEN) if sample.has_tokens else None


def _arguments(inputs: object) -> Batch:
    """Take a batch apart as a cell does: model(**dict), model(*tuple) or model(tensor).

    Of a list, as a data loader gives for (picture, label), the first is the input.
    """
    if hasattr(inputs, "keys"):
        return (), dict(inputs)  # type: ignore[call-overload]
    if isinstance(inputs, tuple):
        return inputs, {}
    return (inputs[0] if isinstance(inputs, list) else inputs,), {}


def _first_dimension(batch: Batch) -> int:
    """Samples of a batch.

    Raises:
        PlanError: it holds no tensor with a dimension.
    """
    sizes = [
        one.shape[0] for one in tree_leaves(batch) if isinstance(one, torch.Tensor) and one.dim()
    ]
    if not sizes:
        message = "the example input holds no tensor; give inputs=(tensor, ...) or a dict of them."
        raise PlanError(message)
    return int(sizes[0])


def _tokens(batch: Batch) -> int | None:
    """Tokens of a sample, where a batch holds them."""
    ids = batch[1].get("input_ids")
    return int(ids.shape[-1]) if isinstance(ids, torch.Tensor) else None


def _without_data(module: nn.Module) -> nn.Module:
    """Copy a module whose tensors become fake while it is copied."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    with mode:
        for tensor in (*module.parameters(), *module.buffers()):
            empty = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = (
                nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
            )
        return copy.deepcopy(module, memo)


def _in_child(
    work: Callable[[Callable[[str], None]], dict[str, Any]],
    progress: Callable[[str], None],
    timeout_s: float,
) -> dict[str, Any]:
    """Run work in a forked child; lines of JSON come back, the last one is the answer."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _be_child(work, writer)
    os.close(writer)
    try:
        return _answer(reader, progress, time.monotonic() + timeout_s)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _be_child(work: Callable[[Callable[[str], None]], dict[str, Any]], writer: int) -> NoReturn:
    """Do the work and end without the parent's exit handlers."""

    def write(message: Mapping[str, Any]) -> None:
        os.write(writer, json.dumps(message).encode() + b"\n")

    answer: dict[str, Any] = {"error": "the trace ended without an answer; try it once more."}
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, sys.__stdout__.fileno() if sys.__stdout__ else 1)
        os.dup2(silence, sys.__stderr__.fileno() if sys.__stderr__ else 2)
        answer = work(lambda text: write({"progress": text}))
    except PlanError as error:
        answer = {"error": str(error)}
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything
        told = f"{type(error).__name__}: {error}"
        answer = {"error": f"the model could not be traced ({told}); give other example inputs."}
    finally:
        _write_all(writer, json.dumps(answer).encode() + b"\n")
        os._exit(0)


def _write_all(writer: int, text: bytes) -> None:
    """Write more than a pipe holds at once."""
    while text:
        text = text[os.write(writer, text) :]


def _answer(reader: int, progress: Callable[[str], None], deadline: float) -> dict[str, Any]:
    """Read lines until the answer.

    Raises:
        PlanError: it did not come in time.
    """
    pending = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            message = "the trace of the model took too long; give smaller example inputs."
            raise PlanError(message)
        read = os.read(reader, 1 << 16)
        if not read:
            message = (
                "the model could not be traced: the child process that did it died, perhaps for"
                " lack of memory; give smaller example inputs."
            )
            return {"error": message}
        *lines, pending = (pending + read).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "progress" not in message:
                return dict(message)
            progress(message["progress"])
