"""What a checkpoint says about itself: `manifest.json`; pure.

Looking at a checkpoint reads this file alone, and nothing in it is code. It is written
last: a folder that has it has everything it names.
"""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from nbdist.checkpoint import json_validation
from nbdist.checkpoint.names import is_file, shown
from nbdist.checkpoint.safetensors_header import MAX_NDIM, TORCH_NAMES
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.checkpoint.json_validation import Plain

FORMAT = 1
"""Rises when an older nbdist could not read what is written."""
MAX_BYTES = 64 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """One file of a checkpoint, as it was written."""

    name: str
    size_bytes: int
    crc32: int
    """Of all its bytes, header included; zlib's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One tensor of the state, whole, wherever its parts lie."""

    shape: tuple[int, ...]
    dtype: str
    """As torch names it: "float32"."""
    digest: int
    """64 bits that do not depend on how the tensor was cut."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A parameter group of an optimizer."""

    options: Mapping[str, Plain]
    names: tuple[str, ...]
    """Its parameters, as the bare model names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """An optimizer, without the tensors of its state."""

    prefix: str
    """Of its keys: "optim"."""
    kind: str
    """Its class: "torch.optim.adamw.AdamW"."""
    defaults: Mapping[str, Plain]
    groups: tuple[Group, ...]
    counts: Mapping[str, Mapping[str, float]]
    """Parameter -> name -> scalar state ("step")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that a checkpoint says about itself."""

    backend: str
    world_size: int
    step: int
    """Optimizer steps taken."""
    keys: Mapping[str, Key]
    files: tuple[FilePart, ...]
    samples: int = 0
    """Samples seen, of all ranks."""
    options: Mapping[str, Plain] = field(default_factory=dict)
    """Of the strategy."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version that wrote this; "nbdist" always."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further key of a tied tensor -> the key it is stored under."""
    optimizers: tuple[Optimizer, ...] = ()
    schedulers: tuple[Plain, ...] = ()
    rng: tuple[Plain, ...] = ()
    """Of each rank: Python's and NumPy's generators; torch's are in a file."""
    positions: tuple[Plain, ...] = ()
    """Where each data loader stands."""
    extra: Mapping[str, Plain] = field(default_factory=dict)
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    """Of this very save: a later one under the same name has another."""

    @property
    def size_bytes(self) -> int:
        """All files, without the manifest."""
        return sum(file.size_bytes for file in self.files)

    def to_json(self) -> bytes:
        """Give the content of `manifest.json`.

        Raises:
            CheckpointError: it holds what a manifest cannot keep, for example an object of a
                class, or what `from_json` would refuse.
        """
        try:
            text = json.dumps(_tree(self), separators=(",", ":"), allow_nan=False).encode()
            _read(text)  # whatever is written can be read again
        except json_validation.Refused as error:
            raise CheckpointError(
                f"the checkpoint cannot be described: {error}; keep plain numbers and text there."
            ) from error
        return text

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Read the content of `manifest.json`, whoever wrote it.

        Raises:
            CheckpointError: not a manifest, or one of a newer nbdist.
        """
        try:
            return _read(text)
        except json_validation.Refused as error:
            raise CheckpointError(
                f"the manifest cannot be trusted: {error}; take another checkpoint."
            ) from error


def _tree(manifest: Manifest) -> dict[str, Plain]:
    """The manifest as JSON has it."""
    own: dict[str, Callable[[Any], Plain]] = {
        "created": datetime.isoformat,
        "keys": lambda keys: {name: key_tree(key) for name, key in keys.items()},
        "files": lambda files: [file_tree(file) for file in files],
        "optimizers": lambda optimizers: [_optimizer_tree(one) for one in optimizers],
    }
    tree: dict[str, Plain] = {"format": FORMAT}
    for name in _FIELDS:
        if name != "format":
            value = getattr(manifest, name)
            tree[name] = own[name](value) if name in own else json_validation.to_plain(value, name)
    return tree


def key_tree(key: Key) -> Plain:
    """One tensor as JSON has it."""
    return {"shape": list(key.shape), "dtype": key.dtype, "digest": f"{key.digest:016x}"}


def file_tree(file: FilePart) -> dict[str, Plain]:
    """One file as JSON has it."""
    return {"name": file.name, "bytes": file.size_bytes, "crc32": f"{file.crc32:08x}"}


def _optimizer_tree(one: Optimizer) -> Plain:
    return {
        "prefix": one.prefix,
        "kind": one.kind,
        "defaults": json_validation.to_plain(one.defaults, "defaults"),
        "groups": [
            {
                "options": json_validation.to_plain(group.options, "options"),
                "names": list(group.names),
            }
            for group in one.groups
        ],
        "counts": json_validation.to_plain(one.counts, "counts"),
    }


def _read(text: bytes) -> Manifest:
    if len(text) > MAX_BYTES:
        raise json_validation.Refused(f"it is larger than {MAX_BYTES >> 20} MiB")
    tree = json_validation.loads(text)
    _check_format(tree)
    found = _MANIFEST(tree, "")
    del found["format"]
    manifest = Manifest(**found)
    _check_whole(manifest)
    return manifest


def _check_format(tree: object) -> None:
    """Look at the version first: a newer manifest may differ in everything else.

    Raises:
        CheckpointError: written by a newer nbdist.
    """
    if type(tree) is not dict or type(tree.get("format")) is not int:
        raise json_validation.Refused("format is missing")
    if tree["format"] > FORMAT:
        versions = tree.get("versions")
        by = versions.get("nbdist") if type(versions) is dict else None
        name = f" ({by})" if type(by) is str and by.isprintable() and len(by) < 32 else ""  # noqa: PLR2004
        raise CheckpointError(
            f"the checkpoint was written by a newer nbdist{name} in format {tree['format']};"
            f" this one reads format {FORMAT}: upgrade nbdist."
        )
    if tree["format"] != FORMAT:
        raise json_validation.Refused(f"format has {tree['format']} where {FORMAT} belongs")


def _check_whole(manifest: Manifest) -> None:
    """What no field says alone."""
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise json_validation.Refused(f"files has {shown(twice)} twice")
    for name, target in manifest.aliases.items():
        if target not in manifest.keys or name in manifest.keys:
            raise json_validation.Refused(f"aliases has {shown(name)} for {shown(target)}")


def _file_name(value: object, where: str) -> str:
    if not is_file(value):
        raise json_validation.Refused(f"{where} has {shown(value)}, which is no name for a file")
    return str(value)


def read_file(value: object, where: str) -> FilePart:
    """Check what `file_tree` made.

    Raises:
        Refused: it is something else.
    """
    found = _FILE(value, where)
    return FilePart(name=found["name"], size_bytes=found["bytes"], crc32=found["crc32"])


def read_key(value: object, where: str) -> Key:
    """Check what `key_tree` made.

    Raises:
        Refused: it is something else.
    """
    key = Key(**_KEY(value, where))
    if key.numel >= json_validation.MAX_COUNT:
        raise json_validation.Refused(f"{where}.shape has more elements than any disk")
    return key


def _when(value: object, where: str) -> datetime:
    try:
        found = datetime.fromisoformat(json_validation.text(value, where))
    except ValueError as error:
        raise json_validation.Refused(f"{where} has {shown(value)} where a time belongs") from error
    if found.tzinfo is None:
        raise json_validation.Refused(f"{where} has a time without its zone")
    return found


def _hex_id(value: object, where: str) -> str:
    json_validation.bits(32)(value, where)
    return str(value)


def _made(
    kind: Callable[..., T], check: json_validation.Check[dict[str, Any]]
) -> json_validation.Check[T]:
    """Check an object and make it what it is here."""
    return lambda value, where: kind(**check(value, where))


_PLAIN_BY_NAME = json_validation.mapping(json_validation.text, json_validation.plain)
_NUMBERS = json_validation.mapping(json_validation.text, json_validation.number)
_FILE = json_validation.fields(
    {"name": _file_name, "bytes": json_validation.count, "crc32": json_validation.bits(8)}
)
_KEY = json_validation.fields(
    {
        "shape": json_validation.sequence(json_validation.count, at_most=MAX_NDIM),
        "dtype": json_validation.one_of(TORCH_NAMES),
        "digest": json_validation.bits(16),
    }
)
_GROUP = json_validation.fields(
    {"options": _PLAIN_BY_NAME, "names": json_validation.sequence(json_validation.text)}
)
_OPTIMIZER = json_validation.fields(
    {
        "prefix": json_validation.text,
        "kind": json_validation.text,
        "defaults": _PLAIN_BY_NAME,
        "groups": json_validation.sequence(_made(Group, _GROUP)),
        "counts": json_validation.mapping(json_validation.text, _NUMBERS),
    }
)
_FIELDS: dict[str, json_validation.Check[Any]] = {
    "format": json_validation.count,
    "id": _hex_id,
    "created": _when,
    "versions": json_validation.mapping(json_validation.text, json_validation.text),
    "backend": json_validation.text,
    "world_size": json_validation.count,
    "options": _PLAIN_BY_NAME,
    "step": json_validation.count,
    "samples": json_validation.count,
    "keys": json_validation.mapping(json_validation.text, read_key),
    "files": json_validation.sequence(read_file),
    "aliases": json_validation.mapping(json_validation.text, json_validation.text),
    "optimizers": json_validation.sequence(_made(Optimizer, _OPTIMIZER)),
    "schedulers": json_validation.sequence(json_validation.plain),
    "rng": json_validation.sequence(json_validation.plain),
    "positions": json_validation.sequence(json_validation.plain),
    "extra": _PLAIN_BY_NAME,
}
_MANIFEST = json_validation.fields(_FIELDS)
