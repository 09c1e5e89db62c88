"""Model specs from traces: any `nn.Module`, any transformers architecture.

`TracedModel` holds plain numbers and needs no torch; the trace (`nbdist.planner.tracing`) runs in a
child process on fake tensors: no data, no GPU, no code of the model's author. It takes a few
seconds, so the result is kept in the user's cache folder, by a hash of the config and of everything
else that the figures depend on.

Every byte count is linear in the batch size, fitted at the requested batch size and twice that; the
sequence length is that of the trace.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nbdist import paths, rank_python
from nbdist.errors import PlanError
from nbdist.planner import measurement_store
from nbdist.planner.model_spec import (
    COMPUTE_MODES,
    HALF_MODES,
    BackwardPeakCandidate,
    LayerActivations,
    LayerGroup,
    MicroBatchActivations,
    WeightShape,
)
from nbdist.planner.models import analytic, fused_loss
from nbdist.planner.models.autograd_tape import HALF_BYTES, worst_moments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from nbdist.planner.model_spec import ComputeMode, ModelSpec, Workload
    from nbdist.planner.models.decoder import DecoderSpec
    from nbdist.planner.tracing.batch_size_fit import LinearFit, ParetoFront

TRACE_TIMEOUT_S = 120.0
"""A trace takes about 10 s; a model without repeated blocks may take longer."""
PROGRESS_PREFIX = "trace: "
"""Prefix of the child's progress lines."""
FIRST_TRACE = (
    "tracing the model takes a few seconds the first time; later plans of it reuse the trace"
)
UNCACHED_TRACE = "tracing the model takes a few seconds; this trace is not kept"
MAX_CACHED_TRACES = 64
"""Traces that the cache folder keeps, of about 20 kB each; the oldest are deleted."""
_FORMAT = 18
"""Version of the cached figures; part of a trace's key."""

_PLAIN_TEXT = {"input_ids", "labels", "attention_mask"}
"""Arguments covered by analytic specs; a mask without padding changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """A `ModelSpec` with traced figures."""

    name: str
    groups: tuple[LayerGroup, ...]
    tied: bool
    element: int
    trainable_element: int
    batch_size: int
    """Batch size of the trace."""
    seq_len: int | None
    """Tokens per sample of the trace; None for a model without tokens."""
    passes: Mapping[str, Mapping[str, Any]]
    """Figures by run name, see `tracing.trace_variants`; {"error": reason} if it fails in that
    compute mode."""
    notes: tuple[str, ...] = ()
    depth: Literal["traced"] = "traced"

    def micro_batch_activations(self, workload: Workload) -> MicroBatchActivations:
        """Return the activations of one micro-batch.

        Raises:
            PlanError: a sequence length, device kind or compute mode that was not traced, or a
                compute mode in which the model fails.
        """
        run = _activations(self._run(workload), workload.batch_size)
        root, *others = run.layers
        first = self.groups[0]
        tied_tensor = None if first.tied_tensor is None else first.tensors[first.tied_tensor]
        if workload.frozen_saves == "linear" and tied_tensor and tied_tensor.trainable:
            # To the gradient of ZeRO-3's linear layer autograd adds in place, see `AutogradTape`.
            width = HALF_BYTES if workload.compute in HALF_MODES else self.element
            less = tied_tensor.num_elements * width
            before = first.trainable - tied_tensor.num_elements
            moments = tuple(
                moment._replace(held_bytes=moment.held_bytes - less * (moment.num_grads == before))
                for moment in root.backward_moments
            )
            run = replace(run, layers=(replace(root, backward_moments=moments), *others))
        return run if workload.keep_outputs else replace(run, output_bytes=0)

    def flops(self, workload: Workload) -> float:
        """Return the floating point operations of one micro-batch, forward and backward."""
        parts = zip(self.groups, self._run(workload)["groups"], strict=True)
        by_sample: float = sum(group.count * part["flops"] for group, part in parts)
        return workload.batch_size * by_sample

    def to_json(self) -> dict[str, Any]:
        """Return plain fields, from which `from_json` restores the spec."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return plain | {"groups": [asdict(group) for group in self.groups]}

    def _run(self, workload: Workload) -> Mapping[str, Any]:
        if self.seq_len is not None and workload.seq_len != self.seq_len:
            raise PlanError(
                f"This model was traced with {self.seq_len} tokens per sample, not"
                f" {workload.seq_len}. Plan with seq_len={workload.seq_len} to trace it again."
            )
        checkpointing = " checkpointing" * workload.activation_checkpointing
        compute = workload.compute
        if compute == "half_shards" and not any(compute in name for name in self.passes):
            compute = "half"  # the same without images or sound
        name = f"{workload.kind} {compute}{checkpointing}"
        if name not in self.passes:
            raise PlanError(f"{name!r} was not traced. This trace has {', '.join(self.passes)}.")
        run = self.passes[name]
        if "error" in run:
            raise PlanError(run["error"])
        return run


def from_json(plain: Mapping[str, Any]) -> TracedModel:
    """Restore from `TracedModel.to_json()`, or from the child process's answer."""
    values = dict(plain)
    # JSON has turned tuples into lists.
    groups = tuple(
        LayerGroup(
            **group
            | {
                "tensors": tuple(WeightShape(*each) for each in group["tensors"]),
                "quantized_tensors": tuple(group["quantized_tensors"]),
            }
        )
        for group in values.pop("groups")
    )
    return TracedModel(groups=groups, notes=tuple(values.pop("notes", ())), **values)


def _activations(run: Mapping[str, Any], batch: int) -> MicroBatchActivations:
    def at(line: LinearFit) -> int:
        constant, slope = line
        return max(0, round(constant + slope * batch))

    def peak(front: ParetoFront) -> int:
        return max((at(line) for line, _ in front), default=0)

    layers: list[LayerActivations] = []
    for part in run["groups"]:
        # Peaks from the use of each matrix on; what precedes the first one counts as its.
        forward: ParetoFront = part["forward"]
        by_matrix: list[ParetoFront] = [[] for _ in range(max([1, *(n for _, n in forward)]))]
        for line, number in forward:
            by_matrix[max(1, number) - 1].append((line, number))
        gradients = part["gradients"]
        # The gradients of a root without a backward are made in that of other groups.
        backward = part["backward"] or [(part["saved"], grads) for _, grads in gradients[-1:]]
        layers.append(
            LayerActivations(
                saved_bytes=at(part["saved"]),
                input_bytes=at(part["input"]),
                forward_peaks=tuple(map(peak, by_matrix)),
                backward_moments=worst_moments(
                    BackwardPeakCandidate(at(line), grads) for line, grads in backward
                ),
                input_grad_bytes=at(part["gradient"]),
                gradient_moments=tuple(
                    BackwardPeakCandidate(at(line), grads) for line, grads in gradients
                ),
            )
        )
    return MicroBatchActivations(
        layers=tuple(layers),
        loss_bytes=peak(run["loss"]),
        output_bytes=at(run["outputs"]),
        batch_bytes=at(run["batch"]),
    )


def trace_config(
    config: Mapping[str, Any],
    *,
    batch_size: int,
    seq_len: int,
    progress: Callable[[str], None],
    kinds: Sequence[str] = ("cuda", "cpu"),
    computes: Sequence[ComputeMode] = COMPUTE_MODES,
) -> TracedModel:
    """Trace a transformers config in a child process, or return its cached trace.

    Blocks for a few seconds the first time.

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
    check_model_type(config)
    request = {
        "config": dict(config),
        "batch_size": batch_size,
        "seq_len": seq_len,
        "kinds": list(kinds),
        "computes": list(computes),
    }
    key = _cache_key(request)
    spec = _cached_trace(key)
    if spec is None:
        progress(FIRST_TRACE)
        fields = _trace(request, progress)
        spec = from_json(fields)
        _store_trace(key, fields)
    return replace(spec, notes=(*spec.notes, *analytic.config_notes(config)))


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
    """Return the spec of an `nn.Module` of this process: analytic, cached, or traced in a child.

    The analytic spec of a transformers model's config is used if every group has exactly as many
    parameters and trainable parameters as in the module. For arguments and errors see
    `tracing.trace_module`.
    """
    from nbdist.planner.tracing import trace_module

    micro_batch: dict[str, Any] = {
        "batch_size": batch_size,
        "seq_len": seq_len,
        "inputs": inputs,
        "kinds": kinds,
    }
    if batches is None:
        known = find_known_spec(module, **micro_batch)
        if known is not None:
            return known
    elif (exact := find_analytic_spec(module)) is not None:
        return exact
    key = _module_key(module, **micro_batch) if batches is None else None
    progress(FIRST_TRACE if key else UNCACHED_TRACE)
    fields = trace_module.trace_in_child(module, batches=batches, progress=progress, **micro_batch)
    if key:
        _store_trace(key, fields)
    return from_json(fields)


def find_known_spec(
    module: Any, *, batch_size: int, seq_len: int | None, inputs: object, kinds: Sequence[str]
) -> ModelSpec | None:
    """Return the spec of a module if that takes milliseconds: analytic, or from the cache."""
    # Analytic specs assume that the forward gets only text.
    is_text = inputs is None or (isinstance(inputs, dict) and inputs.keys() <= _PLAIN_TEXT)
    if is_text and (exact := find_analytic_spec(module)) is not None:
        return exact
    key = _module_key(module, batch_size=batch_size, seq_len=seq_len, inputs=inputs, kinds=kinds)
    return None if key is None else _cached_trace(key)


def find_analytic_spec(module: Any, *, is_frozen: bool = False) -> ModelSpec | None:
    """Return the analytic spec of a transformers or PEFT model if it matches; milliseconds.

    With `is_frozen`, frozen parameters count as trainable: the caller adds adapters.
    """
    from nbdist.planner.tracing import wrap_units

    is_adapted = hasattr(module, "get_base_model")  # peft_config is set on the base, too
    base = module.get_base_model() if is_adapted else module
    config = base.config.to_dict() if _is_own_class(base) else {}
    config.pop("quantization_config", None)  # its effect on parameters is compared below
    config["architectures"] = [type(base).__name__]
    if not analytic.is_supported(config):
        return None
    config["_attn_implementation"] = base.config._attn_implementation  # noqa: SLF001
    config["dtype"] = str(next(base.parameters()).dtype)
    try:
        spec: Any = replace(analytic.spec_from_config(config), loss=fused_loss.find_loss(base))
        spec = _with_adapters(spec, module) if is_adapted else spec
    except PlanError:  # a trace may still handle such a config
        return None
    for attribute, method in (("is_loaded_in_4bit", "nf4"), ("is_loaded_in_8bit", "int8")):
        spec = replace(spec, quantization=method) if getattr(base, attribute, False) else spec
    groups = [group.layer_group() for group in wrap_units.find_fsdp_groups(module)]
    spec = replace(spec, shards_quantized=any(group.shards_quantized for group in groups))
    planned, actual = (_comparable(each, is_frozen=is_frozen) for each in (spec.groups, groups))
    return spec if planned == actual else None


def _comparable(groups: Iterable[LayerGroup], *, is_frozen: bool) -> list[tuple[int, ...]]:
    """Return the sizes that must agree: those of each block, sorted, and the sum of the rest.

    accelerate 1.15 does not find the final norm of a PEFT model and leaves it in the root.
    """
    blocks: list[tuple[int, ...]] = []
    rest: list[tuple[int, ...]] = []
    for group in groups:
        frozen = 0 if is_frozen else group.frozen
        sizes = group.num_params - frozen, frozen, group.quantized, group.quantized_bytes
        (blocks if group.role == "block" else rest).extend([sizes] * group.count)
    return [*sorted(blocks), tuple(map(sum, zip(*rest, strict=True)))]


def _with_adapters(spec: DecoderSpec, module: Any) -> DecoderSpec:
    """Return the spec with the adapters of a PEFT model."""
    config = module.active_peft_config
    if config.peft_type != "LORA" or config.use_dora or config.lora_dropout:
        raise PlanError("Only LoRA without dropout has a closed form.")
    adapted = [name for name, each in module.named_modules() if hasattr(each, "lora_A")]
    targets = [
        shape.name
        for shape in spec.linear_shapes()
        if any(name.endswith(f".{shape.name}") for name in adapted)
    ]
    return spec.with_lora(config.r, targets)


def _is_own_class(module: Any) -> bool:
    return type(module).__module__.startswith("transformers.") and hasattr(module, "config")


# -- cached traces ---------------------------------------------------------------------------


def _module_key(
    module: Any, *, batch_size: int, seq_len: int | None, inputs: object, kinds: Sequence[str]
) -> str | None:
    """Return the key of a module's trace, or None if its class does not determine its forward."""
    base = module.get_base_model() if hasattr(module, "get_base_model") else module  # PEFT
    if not _is_own_class(base):
        return None
    import torch
    from torch.utils._pytree import tree_map_only

    plain = dict(inputs) if hasattr(inputs, "keys") else inputs  # type: ignore[call-overload]
    shapes = tree_map_only(torch.Tensor, lambda t: (tuple(t.shape), str(t.dtype)), plain)
    return _cache_key(
        {
            "class": type(module).__name__,
            "config": base.config.to_dict(),
            "attention": base.config._attn_implementation,  # noqa: SLF001
            # The text of a module names adapters, replaced submodules and changed dropout rates.
            "modules": repr(module),
            "parameters": [
                (name, tuple(each.shape), str(each.dtype), each.requires_grad)
                for name, each in module.named_parameters()
            ],
            "batch_size": batch_size,
            "seq_len": seq_len,
            "inputs": shapes,
            "kinds": list(kinds),
        }
    )


def _cache_key(described: Mapping[str, Any]) -> str:
    versions = [_FORMAT, *map(_version, ("torch", "transformers", "peft"))]
    text = json.dumps([versions, described], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _cached_trace(key: str) -> TracedModel | None:
    """Return a trace from the cache; None if there is none, or an invalid one."""
    try:
        spec = from_json(measurement_store.read_entries(_trace_file(key)))
        for run in spec.passes.values():
            if "error" not in run:
                layers = _activations(run, spec.batch_size).layers
                if len(layers) != len(spec.groups):
                    return None
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None
    return spec


def _store_trace(key: str, fields: Mapping[str, Any]) -> None:
    file = _trace_file(key)
    measurement_store.write_entries(file, dict(fields))
    with contextlib.suppress(OSError):
        files = sorted(file.parent.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)
        for old in files[MAX_CACHED_TRACES:]:
            old.unlink()


def _trace_file(key: str) -> Path:
    return paths.cache_dir() / "traces" / f"{key}.json"


# -- the child process -----------------------------------------------------------------------


def _trace(request: Mapping[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """Trace in a child with the ranks' Python."""
    python = rank_python.selected()
    command = [python.executable, "-m", "nbdist.planner.tracing.trace_module"]
    with tempfile.TemporaryDirectory(prefix="nbdist-") as folder:
        package_folder = python.link_package(Path(folder))
        environ = python.environment(os.environ, package_folder)
        path = python.import_path(sys.path, package_folder)
        environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
        return _answer(command, environ, request, progress)


def _answer(
    command: Sequence[str],
    environ: Mapping[str, str],
    request: Mapping[str, Any],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Run a child that reads JSON and writes progress lines and JSON."""
    pipe, last, begin = subprocess.PIPE, "nothing", time.monotonic()
    with subprocess.Popen(  # noqa: S603 - our own module
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environ
    ) as child:
        timer = threading.Timer(TRACE_TIMEOUT_S, child.kill)
        timer.start()
        try:
            assert child.stdin and child.stdout and child.stderr  # all are pipes  # noqa: PT018, S101
            child.stdin.write(json.dumps(request))
            child.stdin.close()
            for line in child.stderr:
                last = line.strip() or last
                if last.startswith(PROGRESS_PREFIX):
                    progress(last.removeprefix(PROGRESS_PREFIX))
            output = child.stdout.read()
            failed = child.wait() != 0 or not output
        finally:
            timer.cancel()
            child.kill()
    if failed:
        timed_out = time.monotonic() - begin >= TRACE_TIMEOUT_S
        reason = f"timeout after {TRACE_TIMEOUT_S:.0f} s" if timed_out else last
        raise PlanError(
            f"Cannot trace the model ({reason.removeprefix(PROGRESS_PREFIX).rstrip('.')}). Give the"
            " model itself with example inputs, or plan for a size such as '7b'."
        )
    answer: dict[str, Any] = json.loads(output)
    if "error" in answer:
        raise PlanError(answer["error"])
    return answer


# -- model types -----------------------------------------------------------------------------

_CONFIG_CLASS_ENTRY = re.compile(r'"([^"\n]+)"[,:]\s*"\w+Config"')
"""A model type and its config class in the mapping of transformers 5.23."""
_FILES = ("configuration_auto.py", "auto_mappings.py")
_MODEL_HINT = "give the model itself with example inputs: nbdist.plan(model, inputs=...)"


def check_model_type(config: Mapping[str, Any]) -> None:
    """Reject a config that transformers cannot build, before a process is started.

    Raises:
        PlanError: neither type nor class is given, or transformers lacks the type.
    """
    model_type = config.get("model_type")
    if model_type is None and config.get("architectures"):
        return
    if model_type is None and "_class_name" in config:
        message = f"The config belongs to {config['_class_name']} of diffusers."
        raise PlanError(f"{message} {_MODEL_HINT.capitalize()}.")
    if model_type is None:
        raise PlanError(
            "The config has neither model_type nor architectures, so its model is unknown. Use a"
            f" complete config.json of transformers, or {_MODEL_HINT}."
        )
    types = model_types() if rank_python.selected().is_own else ()  # else the child decides
    if types and str(model_type) not in types:
        close_names = get_close_matches(str(model_type), sorted(types), n=2, cutoff=0.8)
        hint = (
            f"Did you mean {' or '.join(close_names)}? Or {_MODEL_HINT}"
            if close_names
            else _MODEL_HINT.capitalize()
        )
        remote = "auto_map" in config
        code = " (its auto_map names the author's code, which is not run)" if remote else ""
        message = f"transformers {_version('transformers')} has no model_type {model_type!r}{code}."
        raise PlanError(f"{message} {hint}.")


@functools.cache
def model_types() -> frozenset[str]:
    """Return the model types of the installed transformers, parsed from its source files.

    Importing transformers would take seconds. An empty set if they cannot be read: then importing
    it decides.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return frozenset()
    folder = Path(spec.origin).parent / "models" / "auto"
    texts = [(folder / name).read_text() for name in _FILES if (folder / name).is_file()]
    return frozenset(name for text in texts for name in _CONFIG_CLASS_ENTRY.findall(text))


def _version(package: str) -> str:
    return rank_python.selected().version_of(package) or "none"
