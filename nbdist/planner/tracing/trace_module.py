"""Traces a module that lives in this process, or as a program one of a transformers config.

A forked child shares the module's data, replaces its own references with fake tensors, traces, and
writes the figures into a pipe. Module, random state and data loader of the parent are unchanged;
the child uses neither CUDA nor collectives.

If torch's backward threads have already run (a GPU is in use), autograd does not work in a forked
child: the trace then runs in this process, on a copy of the module with fake tensors.

`python -m nbdist.planner.tracing.trace_module` reads one JSON request from stdin: config,
batch_size, seq_len, computes and kinds. It writes progress lines to stderr and one JSON object to
stdout: the fields of a `TracedModel`, or {"error": message}. After a crash, the last line of stderr
is the reason.
"""

from __future__ import annotations

import contextlib
import copy
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from nbdist.errors import PlanError
from nbdist.planner.models import fused_loss
from nbdist.planner.tracing import build_model, trace_variants
from nbdist.planner.tracing.build_model import SampleBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from multiprocessing.connection import Connection

    from nbdist.planner.tracing.trace_variants import ForwardBatch

TIMEOUT_S = 120.0
"""Timeout of one trace, which takes about 10 s."""
_NO_BACKWARD = "fork-based multiprocessing"
"""Part of torch's message that autograd does not work in a forked child."""


def trace_in_child(
    module: nn.Module,
    *,
    batch_size: int,
    seq_len: int | None = None,
    inputs: object = None,
    batches: Iterable[Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
    kinds: Sequence[str] = trace_variants.DEVICE_KINDS,
) -> dict[str, Any]:
    """Trace a module and return the fields of a `TracedModel`. Blocks for about ten seconds.

    Args:
        module: on any device, not yet prepared by an engine. It is not modified.
        batch_size: batch size of the trace; with `inputs`, their first dimension is used.
        seq_len: tokens per sample, for a transformers model that takes tokens.
        inputs: example input: a tensor, or a tuple or dict of arguments; its values are
            not read.
        batches: a data loader whose first batch is the example; it is fetched in the child,
            so that the loader's position is unchanged.
        progress: called with progress messages.
        kinds: device kinds to trace.

    Raises:
        PlanError: no example input is known, the module cannot be traced, or the trace timed
            out.
    """

    def work(say: Callable[[str], None], *, copied: bool) -> dict[str, Any]:
        target = _without_data(module) if copied else module
        example = _example(target, inputs, batches, batch_size, seq_len)
        return _trace(target, example, say, device_kinds=kinds)

    fields = call_in_fork(lambda say: work(say, copied=False), progress)
    if _NO_BACKWARD in str(fields.get("error")):
        fields = work(progress, copied=True)
    if "error" in fields:
        raise PlanError(fields["error"])
    return fields


def _trace(
    module: nn.Module,
    example: tuple[SampleBatch, int, int | None],
    progress: Callable[[str], None],
    **options: Any,
) -> dict[str, Any]:
    """Trace a module on a batch from `_example`, with options of a `TraceRequest`."""
    sample, size, length = example
    if any(fused_loss.find_loss(each) == "trl" for each in module.modules()):
        sample.batch[1]["fused_lm_head"] = True  # as TRL's trainers call the model
    request = trace_variants.TraceRequest(batch_size=size, seq_len=length, **options)
    traced = trace_variants.trace_module_fields(module, sample.batch, request, progress)
    return traced | {"notes": [*sample.notes, *traced.get("notes", ())]}


def _example(
    module: nn.Module,
    inputs: object,
    batches: Iterable[Any] | None,
    batch_size: int,
    seq_len: int | None,
) -> tuple[SampleBatch, int, int | None]:
    """Return a batch, its size, and the tokens per sample if it holds tokens."""
    build_model.prepare_for_tracing(module)
    if inputs is None and batches is not None:
        torch.manual_seed(0)  # in the child only: a sampler may draw random numbers
        inputs = next(iter(batches))
    if inputs is None:
        length = seq_len or build_model.DEFAULT_SEQ_LEN
        sample = build_model.make_sample_batch(module, batch_size, length)
        return sample, batch_size, length if sample.has_tokens else None
    batch = _arguments(inputs)
    sizes = [
        int(leaf.shape[0])
        for leaf in tree_leaves(batch)
        if isinstance(leaf, torch.Tensor) and leaf.dim()
    ]
    if not sizes:
        raise PlanError(
            "The example input holds no tensor. Give inputs=(tensor, ...) or a dict of tensors."
        )
    if sizes[0] == 0:
        raise PlanError("The example input has 0 samples. Give at least one.")
    ids = batch[1].get("input_ids")
    tokens = int(ids.shape[-1]) if isinstance(ids, torch.Tensor) else None
    return SampleBatch(batch, tokens is not None), sizes[0], tokens


def _arguments(inputs: object) -> ForwardBatch:
    """Split a batch as a cell does: model(**dict), model(*tuple) or model(tensor).

    The first item of a list is the input, as in a data loader's [image, label].
    """
    if hasattr(inputs, "keys"):
        return (), dict(inputs)  # type: ignore[call-overload]
    if isinstance(inputs, tuple):
        return inputs, {}
    return (inputs[0] if isinstance(inputs, list) else inputs,), {}


def _without_data(module: nn.Module) -> nn.Module:
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


def call_in_fork(
    work: Callable[[Callable[[str], None]], dict[str, Any]],
    progress: Callable[[str], None] = lambda _: None,
    *,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Run work in a forked child, which sends its progress and the answer as JSON.

    Returns:
        The answer; {"error": reason} if the work raises or times out, or the child dies. A CUDA
        context does not survive a fork, so work that needs it raises.
    """
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_run_child, args=(work, sending))
    deadline = time.monotonic() + timeout_s
    with warnings.catch_warnings():
        # Python 3.12 warns about a fork in a threaded process; the child uses none of its locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sending.close()
    try:
        while receiving.poll(max(0.0, deadline - time.monotonic())):
            message: dict[str, Any] = json.loads(receiving.recv_bytes())
            if "progress" not in message:
                return message
            progress(message["progress"])
    except EOFError:
        return {
            "error": "Cannot trace the model: the child process died, possibly because it ran out"
            " of memory. Give smaller example inputs."
        }
    finally:
        receiving.close()
        child.kill()
        child.join()
    return {"error": "Timeout while tracing the model. Give smaller example inputs."}


def _run_child(
    work: Callable[[Callable[[str], None]], dict[str, Any]], sending: Connection
) -> NoReturn:
    """Do the work and exit without the parent's exit handlers."""

    def send(message: Mapping[str, Any]) -> None:
        sending.send_bytes(json.dumps(message).encode())

    answer: dict[str, Any] = {"error": "The trace ended without a result. Try again."}
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        torch.set_num_threads(1)  # the parent's OpenMP threads do not survive a fork
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, sys.__stdout__.fileno() if sys.__stdout__ else 1)
        os.dup2(silence, sys.__stderr__.fileno() if sys.__stderr__ else 2)
        answer = work(lambda text: send({"progress": text}))
    except PlanError as error:
        answer = {"error": str(error)}
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything
        reason = f"{type(error).__name__}: {error}"
        answer = {"error": f"Cannot trace the model ({reason}). Give other example inputs."}
    finally:
        send(answer)
        os._exit(0)


# -- the program -----------------------------------------------------------------------------


def main() -> None:
    """Answer the request on stdin."""
    request, answer = json.load(sys.stdin), sys.stdout
    torch.set_num_threads(1)

    def progress(text: str) -> None:
        print(f"trace: {text}", file=sys.stderr, flush=True)  # noqa: T201

    progress("loading torch and transformers")
    fields: dict[str, Any]
    # Output of a model's code must not mix with the answer on stdout.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            model, notes = build_model.build_from_config(request["config"])
            example = _example(model, None, None, request["batch_size"], request["seq_len"])
            kinds, computes = request["kinds"], request["computes"]
            fields = _trace(model, example, progress, device_kinds=kinds, compute_modes=computes)
            fields["notes"] = [*notes, *fields["notes"]]
        except PlanError as error:
            fields = {"error": str(error)}
    json.dump(fields, answer)


if __name__ == "__main__":
    main()
