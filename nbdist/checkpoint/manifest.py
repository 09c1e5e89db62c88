"""The manifest of a checkpoint: metadata of its tensors and files (`manifest.json`).

Listing checkpoints reads only this file, and it contains no code. It is written last, so a
folder with a manifest is complete.
"""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from nbdist.checkpoint import json_validation
from nbdist.checkpoint.names import is_data_file_name, printable
from nbdist.checkpoint.safetensors_header import MAX_NDIM, TORCH_NAMES
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.checkpoint.json_validation import JsonValue

FORMAT_VERSION = 1
"""Increased when an older nbdist cannot read newer checkpoints."""
MAX_BYTES = 64 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """Name, size and checksum of a file of a checkpoint."""

    name: str
    size_bytes: int
    crc32: int
    """zlib CRC-32 of the whole file, including the header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMetadata:
    """Metadata of a full (unsharded) tensor."""

    shape: tuple[int, ...]
    dtype: str
    """Name of the torch dtype, such as "float32"."""
    digest: int
    """64-bit digest of the content. It does not depend on how the tensor is sharded."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """A parameter group of an optimizer."""

    options: Mapping[str, JsonValue]
    names: tuple[str, ...]
    """Parameter names of the unwrapped model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMetadata:
    """Metadata of an optimizer, without its state tensors."""

    prefix: str
    """Prefix of its keys, such as "optim"."""
    kind: str
    """Qualified name of its class, such as "torch.optim.adamw.AdamW"."""
    defaults: Mapping[str, JsonValue]
    groups: tuple[ParamGroup, ...]
    counts: Mapping[str, Mapping[str, float]]
    """Scalar state: parameter name -> state name ("step") -> value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Metadata of a checkpoint."""

    backend: str
    world_size: int
    step: int
    """Optimizer steps taken."""
    keys: Mapping[str, TensorMetadata]
    files: tuple[CheckpointFile, ...]
    samples: int = 0
    """Samples processed by all ranks."""
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    """Options of the backend."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version at the time of saving. Always includes "nbdist"."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Additional key of a tied tensor -> key under which it is stored."""
    optimizers: tuple[OptimizerMetadata, ...] = ()
    schedulers: tuple[JsonValue, ...] = ()
    rng: tuple[JsonValue, ...] = ()
    """RNG states of Python and NumPy of each rank. Those of torch are in a file."""
    positions: tuple[JsonValue, ...] = ()
    """Position of each data loader."""
    extra: Mapping[str, JsonValue] = field(default_factory=dict)
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    """Unique ID of the save. Saving again under the same name creates another ID."""

    @property
    def size_bytes(self) -> int:
        """Total size of the files, without the manifest."""
        return sum(file.size_bytes for file in self.files)

    def to_json(self) -> bytes:
        """Return the content of `manifest.json`.

        Raises:
            CheckpointError: a value cannot be stored, for example an instance of a class, or
                `from_json` would reject it.
        """
        try:
            text = json.dumps(_tree(self), separators=(",", ":"), allow_nan=False).encode()
            _read(text)  # fail on saving rather than on loading
        except json_validation.ValidationError as error:
            raise CheckpointError(
                f"Cannot write the manifest: {error}. Use only numbers and strings there."
            ) from error
        return text

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Parse and validate the content of `manifest.json`, which may be untrusted.

        Raises:
            CheckpointError: the manifest is invalid or was written by a newer nbdist.
        """
        try:
            return _read(text)
        except json_validation.ValidationError as error:
            raise CheckpointError(f"Invalid manifest: {error}. Load another checkpoint.") from error


def _tree(manifest: Manifest) -> dict[str, JsonValue]:
    """Convert a manifest to a JSON value."""
    own: dict[str, Callable[[Any], JsonValue]] = {
        "created": datetime.isoformat,
        "keys": lambda keys: {name: tensor_to_json(key) for name, key in keys.items()},
        "files": lambda files: [file_to_json(file) for file in files],
        "optimizers": lambda optimizers: [_optimizer_tree(optimizer) for optimizer in optimizers],
    }
    tree: dict[str, JsonValue] = {"format": FORMAT_VERSION}
    for name in _FIELDS:
        if name != "format":
            value = getattr(manifest, name)
            tree[name] = (
                own[name](value) if name in own else json_validation.to_json_value(value, name)
            )
    return tree


def tensor_to_json(key: TensorMetadata) -> JsonValue:
    """Convert the metadata of a tensor to a JSON value."""
    return {"shape": list(key.shape), "dtype": key.dtype, "digest": f"{key.digest:016x}"}


def file_to_json(file: CheckpointFile) -> dict[str, JsonValue]:
    """Convert the metadata of a file to a JSON value."""
    return {"name": file.name, "bytes": file.size_bytes, "crc32": f"{file.crc32:08x}"}


def _optimizer_tree(optimizer: OptimizerMetadata) -> JsonValue:
    return {
        "prefix": optimizer.prefix,
        "kind": optimizer.kind,
        "defaults": json_validation.to_json_value(optimizer.defaults, "defaults"),
        "groups": [
            {
                "options": json_validation.to_json_value(group.options, "options"),
                "names": list(group.names),
            }
            for group in optimizer.groups
        ],
        "counts": json_validation.to_json_value(optimizer.counts, "counts"),
    }


def _read(text: bytes) -> Manifest:
    if len(text) > MAX_BYTES:
        raise json_validation.ValidationError(f"larger than {MAX_BYTES >> 20} MiB")
    tree = json_validation.loads(text)
    _check_format(tree)
    fields = _MANIFEST(tree, "")
    del fields["format"]
    manifest = Manifest(**fields)
    _check_whole(manifest)
    return manifest


def _check_format(tree: object) -> None:
    """Check the format version before any other field, since other versions have other fields.

    Raises:
        CheckpointError: the format is newer than this nbdist supports.
    """
    if type(tree) is not dict or type(tree.get("format")) is not int:
        raise json_validation.ValidationError("format is missing")
    if tree["format"] > FORMAT_VERSION:
        versions = tree.get("versions")
        version = versions.get("nbdist") if type(versions) is dict else None
        is_short = type(version) is str and version.isprintable() and len(version) < 32  # noqa: PLR2004
        suffix = f" ({version})" if is_short else ""
        raise CheckpointError(
            f"The checkpoint was written by a newer nbdist{suffix} in format {tree['format']}."
            f" This nbdist reads format {FORMAT_VERSION}. Upgrade nbdist."
        )
    if tree["format"] != FORMAT_VERSION:
        raise json_validation.ValidationError(
            f"the checkpoint format must be {FORMAT_VERSION}, got {tree['format']}"
        )


def _check_whole(manifest: Manifest) -> None:
    """Check constraints that involve several fields."""
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise json_validation.ValidationError(f"files lists {printable(twice)} twice")
    for name, target in manifest.aliases.items():
        if target not in manifest.keys or name in manifest.keys:
            raise json_validation.ValidationError(
                f"aliases maps {printable(name)} to {printable(target)}: the target must be in"
                " keys, the alias must not"
            )


def _file_name(value: object, where: str) -> str:
    if not is_data_file_name(value):
        raise json_validation.ValidationError(
            f"{where} is not a valid file name: {printable(value)}"
        )
    return str(value)


def file_from_json(value: object, where: str) -> CheckpointFile:
    """Validate the metadata of a file, as returned by ``file_to_json``.

    Raises:
        ValidationError: the value is invalid.
    """
    fields = _FILE(value, where)
    return CheckpointFile(name=fields["name"], size_bytes=fields["bytes"], crc32=fields["crc32"])


def tensor_from_json(value: object, where: str) -> TensorMetadata:
    """Validate the metadata of a tensor, as returned by ``tensor_to_json``.

    Raises:
        ValidationError: the value is invalid.
    """
    key = TensorMetadata(**_KEY(value, where))
    if key.numel >= json_validation.MAX_COUNT:
        raise json_validation.ValidationError(f"{where}.shape has too many elements")
    return key


def _when(value: object, where: str) -> datetime:
    try:
        time = datetime.fromisoformat(json_validation.text(value, where))
    except ValueError as error:
        raise json_validation.ValidationError(
            f"{where} must be a time, got {printable(value)}"
        ) from error
    if time.tzinfo is None:
        raise json_validation.ValidationError(f"{where} must be a time with a time zone")
    return time


def _hex_id(value: object, where: str) -> str:
    json_validation.hex_digits(32)(value, where)
    return str(value)


def _made(
    kind: Callable[..., T], check: json_validation.Check[dict[str, Any]]
) -> json_validation.Check[T]:
    """Return a check that validates a JSON object and constructs `kind` from its fields."""
    return lambda value, where: kind(**check(value, where))


_PLAIN_BY_NAME = json_validation.mapping(json_validation.text, json_validation.json_value)
_NUMBERS = json_validation.mapping(json_validation.text, json_validation.number)
_FILE = json_validation.fields(
    {"name": _file_name, "bytes": json_validation.count, "crc32": json_validation.hex_digits(8)}
)
_KEY = json_validation.fields(
    {
        "shape": json_validation.sequence(json_validation.count, at_most=MAX_NDIM),
        "dtype": json_validation.one_of(TORCH_NAMES),
        "digest": json_validation.hex_digits(16),
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
        "groups": json_validation.sequence(_made(ParamGroup, _GROUP)),
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
    "keys": json_validation.mapping(json_validation.text, tensor_from_json),
    "files": json_validation.sequence(file_from_json),
    "aliases": json_validation.mapping(json_validation.text, json_validation.text),
    "optimizers": json_validation.sequence(_made(OptimizerMetadata, _OPTIMIZER)),
    "schedulers": json_validation.sequence(json_validation.json_value),
    "rng": json_validation.sequence(json_validation.json_value),
    "positions": json_validation.sequence(json_validation.json_value),
    "extra": _PLAIN_BY_NAME,
}
_MANIFEST = json_validation.fields(_FIELDS)
