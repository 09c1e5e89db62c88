"""Export of the prepared model to a folder for `from_pretrained`; runs on a rank.

    checking    select the model, plan what `save_pretrained` would write, check the target folder
    preparing   rank 0 creates a temporary folder with the configs and preallocated files
    writing     each rank writes its own shard of each tensor in place
    finishing   rank 0 renames the folder

No tensor is gathered, except those that transformers derives from others when it saves: each
group of these is gathered on one rank, in batches of at most `BATCH_BYTES` per rank.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nbdist.checkpoint import atomic_folder
from nbdist.checkpoint.manifest import SAFETENSORS_DTYPES
from nbdist.checkpoint.safetensors_file import StoredTensor, build_header
from nbdist.errors import CheckpointError
from nbdist.state import collectives, hf_export_plan, parallel_writer, reshard
from nbdist.state.shards import total_bytes
from nbdist.worker.operations.transaction import CHECKING_PHASE, ByteProgress, Transaction
from nbdist.worker.training.model_state import ModelTensors, select_model, whole_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from nbdist.state.hf_export_plan import DerivedTensors, ExportOutline, OutputTensor

BATCH_BYTES = 256 << 20
"""Maximum size of the whole tensors gathered on a rank at a time; a larger one goes alone."""
_OF_TEXT = "PreTrainedTokenizerBase"
_OF_SEVERAL = "ProcessorMixin"
_OF_SIGNALS = frozenset({"ImageProcessingMixin", "FeatureExtractionMixin"})


@dataclass(slots=True, kw_only=True)
class RankExportReport:
    """Result of an export on this rank."""

    model: str = ""
    tensors: int = 0
    files: list[str] = field(default_factory=list)
    """Names of the files that contain tensors."""
    size_bytes: int = 0
    """Total size of the tensors in all files."""
    gathered_bytes: int = 0
    """Bytes that this rank sent to other ranks."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds."""
    companions: list[str] = field(default_factory=list)
    """Variables that were saved with the model: tokenizer, processor."""
    notes: list[str] = field(default_factory=list)
    how: str = ""
    """Expression that loads the folder."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for a message."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OutputFile:
    """Layout of an output file."""

    head: bytes
    offsets: Mapping[str, int]
    """Tensor name -> offset of its first byte."""
    size_bytes: int


class ModelExport:
    """Export of one model."""

    def __init__(
        self,
        target: str,
        *,
        names: Mapping[str, Any],
        on_phase: Callable[[str], None],
        dtype: str | None = None,
        max_shard_size: str = "5GB",
        overwrite: bool = False,
        model: str | None = None,
    ) -> None:
        """Set up an export.

        Args:
            target: absolute path of the output folder.
            names: the user's variables.
            on_phase: called with the name of each phase and with progress texts.
            dtype: name of the torch dtype for floating-point tensors; None keeps their dtype.
            max_shard_size: maximum size of a file, for example "5GB".
            overwrite: replace the folder if it exists and is not empty.
            model: name of the variable with the model; None selects the only prepared model.
        """
        self._target, self._names, self._tell = Path(target), names, on_phase
        self._dtype: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
        self._max, self._overwrite, self._model = max_shard_size, overwrite, model
        self._folder: Path | None = None
        """Temporary folder; set on rank 0 only."""
        self._first = collectives.rank() == 0
        self._phase = Transaction("Export", on_phase, CheckpointError)
        self.report = RankExportReport(seconds=self._phase.seconds)

    def run(self) -> RankExportReport:
        """Write the folder; returns when it is on disk under its final name.

        Raises:
            CheckpointError: the export failed; raised on all ranks, and partial output is removed.
        """
        with self._phase(CHECKING_PHASE):
            living = ModelTensors(select_model(self._model, self._names))
            model = living.to_meta()
            outline = hf_export_plan.plan_export(model, living.parameter_keys(), self._dtype)
            sharing = hf_export_plan.assign_to_files(outline, self._max)
            files = {name: _file(targets) for name, targets in sharing.items()}
            self._summarise(model, outline, files)
            atomic_folder.check_target(self._target, overwrite=self._overwrite)
        with self._phase("comparing"):
            _check_same(collectives.all_gather_values(_fingerprint(files)))
        try:
            with self._phase("preparing"):
                if self._first:
                    self._prepare(model, living.widest_dtype, files, sharing)
            folder = Path(collectives.all_gather_values(str(self._folder))[0])
            with self._phase("writing"):
                self._write(folder, living, model, outline, files)
            with self._phase("finishing"):
                if self._folder is not None:
                    atomic_folder.commit(self._folder, self._target, overwrite=self._overwrite)
        except BaseException:
            if self._folder is not None:
                atomic_folder.abort(self._folder)
            raise
        return self.report

    def _summarise(
        self, model: nn.Module, outline: ExportOutline, files: Mapping[str, _OutputFile]
    ) -> None:
        """Fill the report with the planned content and the expression that loads it."""
        name, location = type(model).__name__, repr(str(self._target))
        self.report.model, self.report.tensors = name, len(outline.targets)
        self.report.files = list(files)
        self.report.size_bytes = sum(
            target.numel * target.dtype.itemsize for target in outline.targets
        )
        if outline.left_out:
            self.report.notes.append(f"not exported, not a tensor: {', '.join(outline.left_out)}")
        if hf_export_plan.is_adapter_only(model):
            self.report.how = f"peft.PeftModel.from_pretrained(base, {location})"
        elif hf_export_plan.has_from_pretrained(model):
            self.report.how = f"{name}.from_pretrained({location})"
        else:
            self.report.how = f"huggingface_hub.load_torch_model(model, {location}) fills a model"

    def _prepare(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        files: Mapping[str, _OutputFile],
        sharing: Mapping[str, list[OutputTensor]],
    ) -> None:
        """Write everything except the tensors and preallocate the files for them; on rank 0."""
        self._folder = folder = atomic_folder.create_temporary(self._target)
        hf_export_plan.write_configs(model, folder, self._dtype or dtype)
        for name, value in find_processors(self._names, self.report.notes).items():
            value.save_pretrained(str(folder))
            self.report.companions.append(name)
        if len(files) > 1:
            kind = next(iter(files)).rsplit("-", 3)[0]
            text = json.dumps(hf_export_plan.weight_index(model, sharing), indent=2, sort_keys=True)
            (folder / f"{kind}.safetensors.index.json").write_text(text + "\n")
        for name, file in files.items():
            atomic_folder.preallocate(folder / name, file.head, file.size_bytes)
        atomic_folder.sync_files(folder)

    def _write(
        self,
        folder: Path,
        model_tensors: ModelTensors,
        model: nn.Module,
        outline: ExportOutline,
        files: Mapping[str, _OutputFile],
    ) -> None:
        """Write this rank's shards to all files."""
        places = {
            name: (folder / file, offset)
            for file, planned in files.items()
            for name, offset in planned.offsets.items()
        }
        direct = [
            parallel_writer.TensorFileRegion(
                *places[target.name],
                target.dtype,
                target.key,
                target.start,
                target.start + target.numel,
            )
            for target in outline.targets
            if target.key
        ]
        order = parallel_writer.stagger_by_rank(
            direct, collectives.rank(), collectives.group_size()
        )
        progress = ByteProgress(self._tell, "writing", total_bytes(model_tensors.owned_shards))
        with parallel_writer.OpenFiles() as opened:
            error = _caught(
                lambda: parallel_writer.write_shards(
                    opened, order, model_tensors.owned_shards, on_progress=progress
                )
            )
            kinds = {target.name: target.dtype for target in outline.targets}
            for number, by_rank in enumerate(rounds := _rounds(outline.groups, model_tensors)):
                self._tell(f"computing, {number / len(rounds):.0%}")
                tensors = self._gathered(model_tensors, by_rank)
                own_groups = by_rank[collectives.rank()]
                put = functools.partial(_put, opened, model, own_groups, tensors, places, kinds)
                # A rank that cannot write continues: the others need it in the next all-to-all.
                error = error or _caught(put)
            if error is not None:
                raise error

    def _gathered(
        self, model_tensors: ModelTensors, by_rank: Sequence[Sequence[DerivedTensors]]
    ) -> dict[str, torch.Tensor]:
        """Gather the whole source tensors of this rank's groups, by key; a collective."""
        needed = {key for groups in by_rank for group in groups for key in group.sources.values()}
        own_keys = {key for group in by_rank[collectives.rank()] for key in group.sources.values()}
        share = {key: shard for key, shard in model_tensors.owned_shards.items() if key in needed}
        room = {
            key: torch.empty(model_tensors.owned_shards[key].shape, dtype=model_tensors.dtypes[key])
            for key in own_keys
        }
        target = {key: whole_shard(tensor) for key, tensor in room.items()}
        self.report.gathered_bytes += reshard.reshard(share, target)
        return room


def find_processors(names: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Find the variables to save with a model: its tokenizer or processor.

    Args:
        names: the user's variables.
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


_COMPANIONS = {
    "processor": {_OF_SEVERAL},
    "tokenizer": {_OF_TEXT},
    "image_processor": _OF_SIGNALS,
}
"""Variable name to prefer -> names of transformers base classes to look for."""


def _file(targets: Sequence[OutputTensor]) -> _OutputFile:
    """Plan the layout of a file."""
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


def _fingerprint(files: Mapping[str, _OutputFile]) -> str:
    """Return a digest of the planned files, which must be the same on all ranks."""
    return hashlib.sha256(
        repr([(name, file.head, file.size_bytes) for name, file in files.items()]).encode()
    ).hexdigest()


def _check_same(fingerprints: Sequence[str]) -> None:
    """Raise if the ranks would not write the same files."""
    if len(set(fingerprints)) > 1:
        message = (
            "The ranks have different models and cannot export one together. Prepare the same"
            " model on all ranks."
        )
        raise CheckpointError(message)


def _rounds(
    groups: Sequence[DerivedTensors], model_tensors: ModelTensors
) -> list[list[list[DerivedTensors]]]:
    """Assign groups to ranks in rounds: round -> rank -> groups; the same on every rank."""
    sizes = {
        id(group): sum(model_tensors.tensor_bytes(key) for key in group.sources.values())
        for group in groups
    }
    rounds: list[list[list[DerivedTensors]]] = []
    remaining = sorted(groups, key=lambda group: -sizes[id(group)])
    while remaining:
        by_rank: list[list[DerivedTensors]] = [[] for _ in range(collectives.group_size())]
        loads = [0] * collectives.group_size()
        for group in list(remaining):
            rank = loads.index(min(loads))
            if loads[rank] and loads[rank] + sizes[id(group)] > BATCH_BYTES:
                continue
            by_rank[rank].append(group)
            loads[rank] += sizes[id(group)]
            remaining.remove(group)
        rounds.append(by_rank)
    return rounds


def _put(
    opened: parallel_writer.OpenFiles,
    model: nn.Module,
    groups: Sequence[DerivedTensors],
    tensors: Mapping[str, torch.Tensor],
    places: Mapping[str, tuple[Path, int]],
    kinds: Mapping[str, torch.dtype],
) -> None:
    """Compute the tensors of groups from their gathered sources and write them."""
    for group in groups:
        sources = {name: tensors[key] for name, key in group.sources.items()}
        for name, tensor in hf_export_plan.compute_tensors(model, group, sources).items():
            path, offset = places[name]
            opened.write_tensor(path, tensor, kinds[name], offset)


def _caught(attempt: Callable[[], object]) -> Exception | None:
    """Return the exception that a call raised, or None."""
    try:
        attempt()
    except Exception as error:  # noqa: BLE001 - sent to all ranks
        return error
    return None
