"""Tensors that a checkpoint stores by reference to the files that `from_pretrained` has read.

A frozen tensor is stored by reference if a tensor with the same shape and digest is in the
safetensors files of the base model. Tensors are matched by digest and not by name: peft renames the
parameters of the base, and a digest also notices any change since `from_pretrained`.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from nbdist.checkpoint import BaseReference, TensorMetadata
from nbdist.checkpoint.name_validation import printable
from nbdist.errors import CheckpointError
from nbdist.number_formatting import format_bytes
from nbdist.state import collectives, tensor_digest
from nbdist.state.shards import Shard, ShardPiece
from nbdist.state.tensor_index import TensorIndex, add_safetensors, find_safetensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

    from nbdist.checkpoint import Manifest
    from nbdist.state.shards import ShardMap

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class StoredByReference:
    """Frozen tensors that are not written to a checkpoint."""

    bases: tuple[BaseReference, ...] = ()
    keys: dict[str, TensorMetadata] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class _FileTensor(NamedTuple):
    """A tensor of the files, with its digest after a cast to a dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: int


def bases_of(model: nn.Module) -> list[str]:
    """Return the repositories or absolute paths that the modules of a model were loaded from."""
    names = dict.fromkeys(getattr(module, "name_or_path", None) for module in model.modules())
    found = [name for name in names if isinstance(name, str) and name]
    return [str(Path(name).resolve()) if Path(name).is_dir() else name for name in found]


def find_references(frozen: ShardMap, bases: Iterable[str]) -> StoredByReference:
    """Find the tensors of the base models that equal frozen tensors; a collective.

    Each rank reads a part of the base's tensors, at the first call only.

    Args:
        frozen: owned shards of the frozen parameters.
        bases: repositories or absolute paths of their base models, the same on all ranks.
    """
    found = StoredByReference()
    if not frozen:
        return found
    digests = tensor_digest.global_digests(frozen)
    identities = {
        key: (tuple(shard.shape), shard.dtype, digests[key]) for key, shard in frozen.items()
    }
    kinds = frozenset((shape, dtype) for shape, dtype, _ in identities.values())
    missing, reasons = dict(identities), []
    known = [(name, revision) for name in bases for revision in _revisions(name)]
    for name, revision in collectives.all_gather_values(known)[0]:
        if not missing:
            break
        tensors, reason = _file_tensors(name, revision, kinds)
        stored = {(item.shape, item.dtype, item.digest): item.name for item in tensors}
        same = {key: stored[it] for key, it in missing.items() if it in stored}
        missing = {key: it for key, it in missing.items() if key not in same}
        if same:
            found.bases += (BaseReference(name=name, revision=revision, tensors=same),)
            found.notes.append(
                f"{_count(frozen, same)} stored by reference to {_label(name, revision)}; --full"
                " stores them in the checkpoint"
            )
        reasons.append(reason or f"not equal to the tensors of {_label(name, revision)}")
    if missing:
        why = " and ".join(reasons) or "their model was not loaded with from_pretrained"
        found.notes.append(f"{_count(frozen, missing)} stored by value: {why}")
    found.keys = {
        key: TensorMetadata(shape=shape, dtype=str(dtype).removeprefix("torch."), digest=value)
        for key, (shape, dtype, value) in identities.items()
        if key not in missing
    }
    return found


def _file_tensors(
    name: str, revision: str, kinds: frozenset[tuple[tuple[int, ...], torch.dtype]]
) -> tuple[list[_FileTensor], str]:
    """Return the tensors of a base with these shapes and dtypes; a collective.

    Returns:
        The tensors, and why there are none.
    """
    share: tuple[_FileTensor, ...] = ()
    reason = ""
    try:
        states = [(path, path.stat()) for path in files_of(name, revision)]
        files = tuple((path, state.st_size, state.st_mtime_ns) for path, state in states)
        share = _share_of(files, kinds, collectives.rank(), collectives.group_size())
    except (CheckpointError, OSError) as error:
        log.info("cannot read a base model", exc_info=True)
        reason = str(error).removesuffix(".")
    shares, reasons = zip(*collectives.all_gather_values((share, reason)), strict=True)
    if any(reasons):
        return [], next(filter(None, reasons))
    return [item for items in shares for item in items], ""


@functools.lru_cache(maxsize=4)  # the sizes and times are part of the key: a changed file is read
def _share_of(
    files: tuple[tuple[Path, int, int], ...],
    kinds: frozenset[tuple[tuple[int, ...], torch.dtype]],
    rank: int,
    world_size: int,
) -> tuple[_FileTensor, ...]:
    """Return this rank's share of the tensors of a base."""
    index = _open([path for path, _, _ in files])
    wanted = {shape for shape, _ in kinds}
    names = [name for name, entry in sorted(index.keys.items()) if entry.shape in wanted]
    items = []
    for name in names[rank::world_size]:
        entry = index.keys[name]
        tensor = _shard(index, name, entry.shape)
        for shape, dtype in kinds:
            if shape == entry.shape:
                value = tensor_digest.local_digests({name: tensor}, dtypes={name: dtype})[name]
                items.append(_FileTensor(name, shape, dtype, value))
    return tuple(items)


def files_of(name: str, revision: str) -> list[Path]:
    """Return the safetensors files of a base model on this machine.

    Raises:
        CheckpointError: there are none.
    """
    folder = Path(name) if Path(name).is_absolute() else _snapshots(name) / revision
    if not folder.is_dir() or (folder != Path(name) and not revision):
        raise CheckpointError(f"{_label(name, revision)} is not on this machine.")
    if not (paths := find_safetensors(folder)):
        raise CheckpointError(f"{_label(name, revision)} has no safetensors files.")
    return paths


def _revisions(name: str) -> list[str]:
    """Return the commits of a repository on this machine, the newest first; "" for a folder."""
    # transformers 5.23 does not record which commit from_pretrained has loaded.
    snapshots = [] if Path(name).is_absolute() else list(_snapshots(name).glob("*"))
    snapshots.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    return [folder.name for folder in snapshots] or [""]


def _snapshots(name: str) -> Path:
    """Return the folder of a repository's commits in the cache of Hugging Face."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=name, repo_type="model")
    return Path(constants.HF_HUB_CACHE, folder, "snapshots")


def different_from(manifest: Manifest, live: ShardMap) -> list[str]:
    """Return the keys of references in a checkpoint that have other live values; a collective."""
    stored = {key: manifest.aliases.get(key, key) for key in live}
    referenced = {key: shard for key, shard in live.items() if stored[key] in manifest.referenced}
    expected = {key: manifest.keys[stored[key]] for key in referenced}
    # Engines keep frozen weights in different dtypes: compare in the dtype of the checkpoint.
    dtypes = {key: getattr(torch, tensor.dtype) for key, tensor in expected.items()}
    actual = tensor_digest.global_digests(referenced, dtypes=dtypes) if referenced else {}
    return [stored[key] for key, tensor in expected.items() if actual[key] != tensor.digest]


def check_names(manifest: Manifest, live: Iterable[str], problem: str) -> None:
    """Raise if a checkpoint does not match because the models have another base.

    Raises:
        CheckpointError: the bases differ. The message has both names.
    """
    other = [base for base in manifest.bases if base.name not in live]
    if live and other:
        raise CheckpointError(
            f"The checkpoint needs the base model {_label(other[0].name, other[0].revision)}, but"
            f" the prepared model was made from {' and '.join(live)}: {problem}. Prepare a model"
            f" from {other[0].name}."
        )


def open_references(manifest: Manifest, keys: Iterable[str], live: Iterable[str]) -> TensorIndex:
    """Open the files of base models; return an index of the tensors with these keys.

    Raises:
        CheckpointError: a base model is missing, has changed, or is not the one of the prepared
            models.
    """
    index, keys = TensorIndex(), list(keys)
    for base in manifest.bases:
        wanted = {key: base.tensors[key] for key in keys if key in base.tensors}
        if not wanted:
            continue
        differs = (
            f"{len(wanted)} of {len(base.tensors)} frozen tensors differ, for example"
            f" {printable(next(iter(wanted)))}"
        )
        label = _label(base.name, base.revision)
        check_names(manifest, live, differs)
        try:
            files = _open(files_of(base.name, base.revision))
        except CheckpointError as error:
            raise CheckpointError(
                f"The checkpoint stores frozen tensors by reference. {error} Prepare a model from"
                f" {label} (from_pretrained): {differs}."
            ) from error
        changed = [
            key for key, name in wanted.items() if not _equals(files, name, manifest.keys[key])
        ]
        if changed:
            raise CheckpointError(
                f"The base model {label} has changed since the checkpoint was saved:"
                f" {len(changed)} of {len(base.tensors)} tensors differ, for example"
                f" {printable(changed[0])}. Restore its files and load again."
            )
        for key, name in wanted.items():
            dtype = files.keys[name].dtype
            index.add_tensor(key, manifest.keys[key].shape, dtype, *files.parts[name])
    return index


def _equals(files: TensorIndex, name: str, saved: TensorMetadata) -> bool:
    if name not in files.keys:
        return False
    tensor = _shard(files, name, saved.shape)
    if sum(piece.stop - piece.start for piece in tensor.pieces) != saved.numel:
        return False
    dtype = getattr(torch, saved.dtype)
    return tensor_digest.local_digests({"": tensor}, dtypes={"": dtype})[""] == saved.digest


def _open(paths: list[Path]) -> TensorIndex:
    index = TensorIndex()
    add_safetensors(index, paths, {}, prefix="")
    return index


def _shard(index: TensorIndex, name: str, shape: tuple[int, ...]) -> Shard:
    """Return the elements of a tensor; they are read when they are accessed."""
    pieces = tuple(
        ShardPiece(part.start, part.stop, part.fetch(part.start, part.stop))
        for part in index.parts[name]
        if part.stop > part.start
    )
    return Shard(shape=shape, dtype=index.keys[name].dtype, pieces=pieces)


def _count(frozen: ShardMap, keys: Mapping[str, object]) -> str:
    """Return how many frozen parameters these are."""
    total = sum(torch.Size(frozen[key].shape).numel() * frozen[key].dtype.itemsize for key in keys)
    return f"{len(keys)} frozen parameters ({format_bytes(total)}) are"


def _label(name: str, revision: str) -> str:
    return f"{name} at revision {revision[:12]}" if revision else name
