"""The prepared model as a folder that `from_pretrained` reads; runs on a rank.

    checking    which model, what `save_pretrained` would write of it, is the place free
    preparing   rank 0 makes the folder beside its place, configurations and empty files in it
    writing     each rank writes its own share of each tensor where it belongs
    finishing   rank 0 gives the folder its name

Nothing is gathered, but for tensors that transformers computes from others when it saves:
each group of these goes to one rank, whole, a few at a time.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nbdist.checkpoint import atomic_folder, safetensors_header
from nbdist.errors import CheckpointError
from nbdist.state import collectives, hf_format, parallel_writer, reshard
from nbdist.state.shards import bytes_of
from nbdist.worker.operations.transaction import CHECKING, Phases, Told
from nbdist.worker.training.model_state import whole
from nbdist.worker.training.prepared_model_view import Living, chosen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from nbdist.state.hf_format import Group, Outline, Target

BATCH_BYTES = 256 << 20
"""Of whole tensors on a rank at a time; a single larger one is alone."""
_OF_TEXT = "PreTrainedTokenizerBase"
_OF_SEVERAL = "ProcessorMixin"
_OF_SIGNALS = frozenset({"ImageProcessingMixin", "FeatureExtractionMixin"})


@dataclass(slots=True, kw_only=True)
class Report:
    """What an export did on this rank."""

    model: str = ""
    tensors: int = 0
    files: list[str] = field(default_factory=list)
    """With tensors."""
    size_bytes: int = 0
    """Of all tensors in the files."""
    gathered_bytes: int = 0
    """Sent by this rank to others."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase."""
    companions: list[str] = field(default_factory=list)
    """Variables that were saved along: tokenizer, processor."""
    notes: list[str] = field(default_factory=list)
    how: str = ""
    """How the folder is loaded."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for a message."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file before anything is in it."""

    head: bytes
    offsets: Mapping[str, int]
    """Tensor -> its first byte."""
    size_bytes: int


class Export:
    """One export of one model."""

    def __init__(
        self,
        target: str,
        *,
        names: Mapping[str, Any],
        tell: Callable[[str], None],
        dtype: str | None = None,
        max_shard_size: str = "5GB",
        overwrite: bool = False,
        model: str | None = None,
    ) -> None:
        """Know what is wanted.

        Args:
            target: absolute path of the folder.
            names: the user's variables.
            tell: told of each phase.
            dtype: torch's name of the type of floating-point tensors; None: as trained.
            max_shard_size: of a file, as "5GB".
            overwrite: a folder that is not empty may be there.
            model: the variable that holds it; None: the only prepared one.
        """
        self._target, self._names, self._tell = Path(target), names, tell
        self._dtype: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
        self._max, self._overwrite, self._model = max_shard_size, overwrite, model
        self._folder: Path | None = None
        """That rank 0 has made."""
        self._first = collectives.rank() == 0
        self._phase = Phases("the export", tell, CheckpointError)
        self.report = Report(seconds=self._phase.seconds)

    def run(self) -> Report:
        """Write the folder; returns once it is on the disk under its name.

        Raises:
            CheckpointError: on all ranks alike; nothing of it is left.
        """
        with self._phase(CHECKING):
            living = Living(chosen(self._model, self._names))
            model = living.bare()
            outline = hf_format.outline(model, living.keys(), self._dtype)
            sharing = hf_format.shards(outline, self._max)
            files = {name: _file(targets) for name, targets in sharing.items()}
            self._summarise(model, outline, files)
            atomic_folder.check(self._target, overwrite=self._overwrite)
        with self._phase("comparing"):
            _check_same(collectives.everyones(_fingerprint(files)))
        try:
            with self._phase("preparing"):
                if self._first:
                    self._prepare(model, living.dtype, files, sharing)
            folder = Path(collectives.everyones(str(self._folder))[0])
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

    def _summarise(self, model: nn.Module, outline: Outline, files: Mapping[str, _File]) -> None:
        """Say what will be there, and how it is loaded."""
        name, at = type(model).__name__, repr(str(self._target))
        self.report.model, self.report.tensors = name, len(outline.targets)
        self.report.files = list(files)
        self.report.size_bytes = sum(one.numel * one.dtype.itemsize for one in outline.targets)
        if outline.left_out:
            self.report.notes.append(f"left out, for no tensor: {', '.join(outline.left_out)}")
        if hf_format.adapters(model):
            self.report.how = f"peft.PeftModel.from_pretrained(base, {at})"
        elif hf_format.is_pretrained(model):
            self.report.how = f"{name}.from_pretrained({at})"
        else:
            self.report.how = f"huggingface_hub.load_torch_model(model, {at}) fills a model"

    def _prepare(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        files: Mapping[str, _File],
        sharing: Mapping[str, list[Target]],
    ) -> None:
        """Write all but the tensors, and make room for these; on rank 0."""
        self._folder = folder = atomic_folder.begin(self._target)
        hf_format.describe(model, folder, self._dtype or dtype)
        for name, value in companions(self._names, self.report.notes).items():
            value.save_pretrained(str(folder))
            self.report.companions.append(name)
        if len(files) > 1:
            kind = next(iter(files)).rsplit("-", 3)[0]
            text = json.dumps(hf_format.index(model, sharing), indent=2, sort_keys=True)
            (folder / f"{kind}.safetensors.index.json").write_text(text + "\n")
        for name, file in files.items():
            atomic_folder.make_room(folder / name, file.head, file.size_bytes)
        atomic_folder.sync_files(folder)

    def _write(
        self,
        folder: Path,
        living: Living,
        model: nn.Module,
        outline: Outline,
        files: Mapping[str, _File],
    ) -> None:
        """Write this rank's share of all files."""
        places = {
            name: (folder / file, offset)
            for file, planned in files.items()
            for name, offset in planned.offsets.items()
        }
        direct = [
            parallel_writer.Slot(
                *places[one.name], one.dtype, one.key, one.start, one.start + one.numel
            )
            for one in outline.targets
            if one.key
        ]
        order = parallel_writer.rotated(direct, collectives.rank(), collectives.size())
        told = Told(self._tell, "writing", bytes_of(living.share))
        with parallel_writer.Files() as opened:
            error = _caught(lambda: parallel_writer.write(opened, order, living.share, told=told))
            kinds = {one.name: one.dtype for one in outline.targets}
            for number, by_rank in enumerate(rounds := _rounds(outline.groups, living)):
                self._tell(f"computing, {number / len(rounds):.0%}")
                tensors = self._gathered(living, by_rank)
                mine = by_rank[collectives.rank()]
                put = functools.partial(_put, opened, model, mine, tensors, places, kinds)
                # A rank that cannot write goes on: the others wait for it in the next exchange.
                error = error or _caught(put)
            if error is not None:
                raise error

    def _gathered(
        self, living: Living, by_rank: Sequence[Sequence[Group]]
    ) -> dict[str, torch.Tensor]:
        """Whole tensors that this rank's groups are computed from, by key; a collective."""
        needed = {key for some in by_rank for one in some for key in one.sources.values()}
        mine = {key for one in by_rank[collectives.rank()] for key in one.sources.values()}
        share = {key: shard for key, shard in living.share.items() if key in needed}
        room = {key: torch.empty(living.share[key].shape, dtype=living.dtypes[key]) for key in mine}
        target = {key: whole(one) for key, one in room.items()}
        self.report.gathered_bytes += reshard.move(share, target)
        return room


def companions(names: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Variables that belong beside a model: its tokenizer or processor.

    Args:
        names: the user's variables.
        notes: told where several could be meant.
    """
    by_kind: dict[str, dict[int, tuple[str, Any]]] = {}
    for name, value in names.items():
        bases = {base.__name__ for base in type(value).__mro__} if not name.startswith("_") else ()
        for kind, wanted in _COMPANIONS.items():
            if wanted & set(bases) and hasattr(value, "save_pretrained"):
                by_kind.setdefault(kind, {}).setdefault(id(value), (name, value))
    kinds = ["processor"] if "processor" in by_kind else list(by_kind)
    found: dict[str, Any] = {}
    for kind in kinds:
        named = dict(by_kind[kind].values())
        if len(named) > 1 and kind not in named:
            notes.append(
                f"none of {', '.join(named)} was saved along: call the one that is meant {kind!r}"
            )
        elif named:
            name = kind if kind in named else next(iter(named))
            found[name] = named[name]
    return found


_COMPANIONS = {
    "processor": {_OF_SEVERAL},
    "tokenizer": {_OF_TEXT},
    "image_processor": _OF_SIGNALS,
}
"""What a variable would be called -> classes of transformers that it may be of."""


def _file(targets: Sequence[Target]) -> _File:
    """Plan a file: large elements first, as each may begin only at a multiple of its size."""
    ordered = sorted(targets, key=lambda one: (-one.dtype.itemsize, one.name))
    stored = []
    for one in ordered:
        kind = safetensors_header.IN_FILES.get(str(one.dtype).removeprefix("torch."))
        if kind is None:
            message = (
                f"{one.name} is of {one.dtype}, which safetensors does not have; give --dtype."
            )
            raise CheckpointError(message)
        stored.append(safetensors_header.Stored(name=one.name, dtype=kind, shape=one.shape))
    head = safetensors_header.header(stored, metadata={"format": "pt"})
    offsets, at = {}, len(head)
    for tensor in stored:
        offsets[tensor.name] = at
        at += tensor.size_bytes
    return _File(head=head, offsets=offsets, size_bytes=at)


def _fingerprint(files: Mapping[str, _File]) -> str:
    """What all ranks must have planned alike."""
    return hashlib.sha256(
        repr([(name, one.head, one.size_bytes) for name, one in files.items()]).encode()
    ).hexdigest()


def _check_same(fingerprints: Sequence[str]) -> None:
    """Refuse to write where ranks would not write the same files."""
    if len(set(fingerprints)) > 1:
        message = (
            "the ranks have different models, so they cannot write one together; prepare the same"
            " model on all ranks."
        )
        raise CheckpointError(message)


def _rounds(groups: Sequence[Group], living: Living) -> list[list[list[Group]]]:
    """Share groups out to ranks, a few at a time: round -> rank -> groups; the same everywhere."""
    sizes = {id(one): sum(living.size_of(key) for key in one.sources.values()) for one in groups}
    rounds: list[list[list[Group]]] = []
    left = sorted(groups, key=lambda one: -sizes[id(one)])
    while left:
        some: list[list[Group]] = [[] for _ in range(collectives.size())]
        loads = [0] * collectives.size()
        for one in list(left):
            rank = loads.index(min(loads))
            if loads[rank] and loads[rank] + sizes[id(one)] > BATCH_BYTES:
                continue
            some[rank].append(one)
            loads[rank] += sizes[id(one)]
            left.remove(one)
        rounds.append(some)
    return rounds


def _put(
    opened: parallel_writer.Files,
    model: nn.Module,
    groups: Sequence[Group],
    tensors: Mapping[str, torch.Tensor],
    places: Mapping[str, tuple[Path, int]],
    kinds: Mapping[str, torch.dtype],
) -> None:
    """Compute the tensors of groups from whole ones, and write them."""
    for group in groups:
        sources = {name: tensors[key] for name, key in group.sources.items()}
        for name, one in hf_format.made(model, group, sources).items():
            path, offset = places[name]
            opened.put_tensor(path, one, kinds[name], offset)


def _caught(attempt: Callable[[], object]) -> Exception | None:
    """Return what a call raised."""
    try:
        attempt()
    except Exception as error:  # noqa: BLE001 - told to all ranks
        return error
    return None
