"""Export of the prepared model to a folder for `from_pretrained`; runs on a rank.

    checking    select the model, plan what `save_pretrained` would write, check the target folder
    preparing   rank 0 creates a temporary folder with the configs and preallocated files
    writing     each rank writes its own shard of each tensor in place
    finishing   rank 0 renames the folder

No tensor is gathered, except those that transformers derives from others when it saves: each
group of these is gathered on one rank, and a rank holds one group at a time.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from nbdist.checkpoint import durable_io
from nbdist.checkpoint.manifest import SAFETENSORS_DTYPES
from nbdist.checkpoint.safetensors_writer import StoredTensor, build_header
from nbdist.errors import CheckpointError
from nbdist.protocol.operations import RankExportReport
from nbdist.state import collectives, hf_export_plan, reshard, shard_io
from nbdist.state.shards import total_bytes
from nbdist.worker.operations.collective_phases import (
    CHECKING_PHASE,
    ByteProgress,
    CollectivePhases,
    try_call,
)
from nbdist.worker.training.generation import too_large_tokenizer
from nbdist.worker.training.training_state import ModelTensors, select_model, whole_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from nbdist.protocol.operations import ExportRequest
    from nbdist.state.hf_export_plan import ExportPlan, OutputTensor
    from nbdist.worker.operations import RankContext

_COMPANIONS = {
    "processor": {"ProcessorMixin"},
    "tokenizer": {"PreTrainedTokenizerBase"},
    "image_processor": {"ImageProcessingMixin", "FeatureExtractionMixin"},
}
"""Variable name to prefer -> names of transformers base classes to look for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OutputFile:
    head: bytes
    offsets: Mapping[str, int]
    """Tensor name -> offset of its first byte."""
    size_bytes: int


def export(request: ExportRequest, context: RankContext) -> RankExportReport:
    """Write the folder; returns when it is on disk under its final name; a collective.

    Raises:
        CheckpointError: the export failed; raised on all ranks, and partial output is removed.
    """
    phase = CollectivePhases("Export", context.on_phase, CheckpointError)
    report = RankExportReport(seconds=phase.seconds)
    target = Path(request.folder)
    dtype: torch.dtype | None = None if request.dtype is None else getattr(torch, request.dtype)
    with phase(CHECKING_PHASE):
        tensors = ModelTensors(select_model(request.model, context.variables))
        model = tensors.to_meta()
        outline = hf_export_plan.plan_export(model, tensors.parameter_keys(), dtype)
        assigned = hf_export_plan.assign_to_files(outline, request.max_shard_size)
        files = {name: _plan_file(outputs) for name, outputs in assigned.items()}
        _fill_report(report, model, outline, target)
        if problem := too_large_tokenizer(model, context.variables):
            report.notes.append(problem)
        report.files = list(files)
        durable_io.check_target(target, overwrite=request.overwrite)
    with phase("comparing"):
        planned = [(name, file.head, file.size_bytes) for name, file in files.items()]
        digest = hashlib.sha256(repr(planned).encode()).hexdigest()
        if len(set(collectives.all_gather_values(digest))) > 1:
            raise CheckpointError(
                "The ranks have different models and cannot export one together. Prepare the same"
                " model on all ranks."
            )
    temporary: Path | None = None
    try:
        with phase("preparing"):
            if collectives.rank() == 0:
                temporary = durable_io.create_temporary(target)
                hf_export_plan.write_configs(model, temporary, dtype or tensors.widest_dtype)
                for name, value in find_processors(context.variables, report.notes).items():
                    value.save_pretrained(str(temporary))
                    report.companions.append(name)
                if len(files) > 1:
                    kind = next(iter(files)).rsplit("-", 3)[0]
                    index = hf_export_plan.weight_index(model, assigned)
                    text = json.dumps(index, indent=2, sort_keys=True)
                    (temporary / f"{kind}.safetensors.index.json").write_text(text + "\n")
                for name, file in files.items():
                    durable_io.preallocate(temporary / name, file.head, file.size_bytes)
                durable_io.sync_files(temporary)
        folder = Path(collectives.all_gather_values(str(temporary))[0])
        with phase("writing"):
            report.gathered_bytes = _write(
                {
                    name: (folder / file, offset)
                    for file, layout in files.items()
                    for name, offset in layout.offsets.items()
                },
                tensors,
                model,
                outline,
                on_phase=context.on_phase,
            )
        with phase("finishing"):
            if temporary is not None:
                durable_io.commit_folder(temporary, target, overwrite=request.overwrite)
    except BaseException:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return report


def _fill_report(
    report: RankExportReport, model: nn.Module, outline: ExportPlan, target: Path
) -> None:
    name, location = type(model).__name__, repr(str(target))
    report.model, report.tensors = name, len(outline.targets)
    report.size_bytes = sum(output.numel * output.dtype.itemsize for output in outline.targets)
    if outline.left_out:
        report.notes.append(f"not exported, not a tensor: {', '.join(outline.left_out)}")
    if hf_export_plan.is_adapter_only(model):
        report.how = f"peft.PeftModel.from_pretrained(base, {location})"
    elif isinstance(model, PreTrainedModel):
        report.how = f"{name}.from_pretrained({location})"
    else:
        report.how = f"huggingface_hub.load_torch_model(model, {location}) fills a model"


def _write(
    places: Mapping[str, tuple[Path, int]],
    tensors: ModelTensors,
    model: nn.Module,
    outline: ExportPlan,
    *,
    on_phase: Callable[[str], None],
) -> int:
    """Write this rank's shards to all files; return the bytes sent to other ranks.

    Args:
        places: tensor name -> file and offset.
        model: the model on the meta device.
        outline: tensors to write, and how to compute those that are not in the model.
    """
    regions = [
        shard_io.TensorFileRegion(
            *places[output.name],
            output.dtype,
            output.key,
            output.start,
            output.start + output.numel,
        )
        for output in outline.targets
        if output.key
    ]
    own_rank, sent_bytes = collectives.rank(), 0
    # Each rank begins elsewhere, since the kernel serializes concurrent writes to a file.
    first = own_rank * len(regions) // collectives.group_size()
    regions = regions[first:] + regions[:first]
    progress = ByteProgress(on_phase, "writing", total_bytes(tensors.owned_shards))
    dtypes = {output.name: output.dtype for output in outline.targets}
    with shard_io.OpenFiles() as opened:
        _, error = try_call(
            lambda: shard_io.write_regions(
                opened, regions, tensors.owned_shards, on_progress=progress
            )
        )
        for number in range(0, len(outline.groups), collectives.group_size()):
            on_phase(f"computing, {number / len(outline.groups):.0%}")
            groups = outline.groups[number : number + collectives.group_size()]
            own_groups = groups[own_rank : own_rank + 1]  # none in the last round of some ranks
            sources = {
                key: torch.empty(tensors.owned_shards[key].shape, dtype=tensors.dtypes[key])
                for group in own_groups
                for key in group.sources.values()
            }
            needed = {key for group in groups for key in group.sources.values()}
            sent_bytes += reshard.reshard(
                {key: shard for key, shard in tensors.owned_shards.items() if key in needed},
                {key: whole_shard(tensor) for key, tensor in sources.items()},
            )
            try:
                for group in own_groups:
                    inputs = {name: sources[key] for name, key in group.sources.items()}
                    outputs = hf_export_plan.compute_tensors(model, group, inputs)
                    for name, tensor in outputs.items():
                        path, offset = places[name]
                        opened.write_tensor(path, tensor, dtypes[name], offset)
            except Exception as caught:  # noqa: BLE001 - raised below
                # A rank that cannot write continues: the others need it in the next all-to-all.
                error = error or caught
        if error is not None:
            raise error
    return sent_bytes


def find_processors(names: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Find the variables to save with a model: its tokenizer or processor.

    Args:
        notes: receives a note if several variables qualify and none is selected.

    Returns:
        Variable name -> value.
    """
    by_kind: dict[str, dict[int, tuple[str, Any]]] = {}
    for name, value in names.items():
        bases = {base.__name__ for base in type(value).__mro__} if not name.startswith("_") else ()
        for kind, class_names in _COMPANIONS.items():
            if class_names & set(bases) and hasattr(value, "save_pretrained"):
                by_kind.setdefault(kind, {}).setdefault(id(value), (name, value))
    kinds = ["processor"] if "processor" in by_kind else list(by_kind)
    selected: dict[str, Any] = {}
    for kind in kinds:
        named = dict(by_kind[kind].values())
        if len(named) > 1 and kind not in named:
            notes.append(
                f"none of {', '.join(named)} was saved with the model: name the right one {kind!r}"
            )
        elif named:
            name = kind if kind in named else next(iter(named))
            selected[name] = named[name]
    return selected


def _plan_file(targets: Sequence[OutputTensor]) -> _OutputFile:
    # Largest itemsize first: each tensor must start at a multiple of its itemsize.
    ordered = sorted(targets, key=lambda target: (-target.dtype.itemsize, target.name))
    stored = []
    for target in ordered:
        dtype = str(target.dtype).removeprefix("torch.")
        if dtype not in SAFETENSORS_DTYPES:
            raise CheckpointError(
                f"{target.name} has dtype {target.dtype}, which safetensors does not support. Set"
                " --dtype."
            )
        stored.append(StoredTensor(name=target.name, dtype=dtype, shape=target.shape))
    head = build_header(stored, metadata={"format": "pt"})
    offsets, end = {}, len(head)
    for tensor in stored:
        offsets[tensor.name] = end
        end += tensor.size_bytes
    return _OutputFile(head=head, offsets=offsets, size_bytes=end)
