"""The manifest of a checkpoint (`manifest.json`), and the reports of the ranks that write it.

Listing checkpoints reads only the manifest, and it contains no code. It is written last, so a
folder with a manifest is complete. Both files may come from strangers: pydantic checks every field
of these dataclasses, without converting types and without unknown fields.
"""

import json
import math
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)

from nbdist.checkpoint.name_validation import is_data_file_name, printable
from nbdist.errors import CheckpointError

FORMAT_VERSION: Final = 2
"""Increased when an older nbdist cannot read newer checkpoints. Format 1 has neither references nor
state dicts of optimizers."""
MAX_BYTES = 64 << 20
MAX_DEPTH = 32
"""Deepest nesting of a value that nbdist does not interpret."""
_FIELD_DEPTH = 6
"""Deepest nesting of a field: manifest, optimizers, optimizer, groups, group, options."""
MAX_TEXT_CHARS = 1024
_MAX_COUNT = 1 << 62
_MAX_INT = 1 << 64  # torch seeds are unsigned 64-bit integers
_MAX_VERSION_CHARS = 32
_FLOAT = "$float"
"""Key that encodes inf and nan, which JSON lacks: {"$float": "inf"}."""
_STRICT = ConfigDict(strict=True, extra="forbid")
MAX_NDIM = 64
SAFETENSORS_DTYPES: dict[str, tuple[str, int]] = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "float32": ("F32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
"""Name of a torch dtype -> its name in a file and bytes per element (safetensors 0.8)."""


def _check(is_valid: Callable[[Any], bool], rule: str) -> AfterValidator:
    def validate(value: Any) -> Any:
        if not is_valid(value):
            raise ValueError(rule)
        return value

    return AfterValidator(validate)


def _parse_hex(value: object, digits: int) -> int:
    if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
        raise ValueError(f"must be {digits} hexadecimal digits")
    return int(value, 16)


def _decode(value: Any, depth: int = 0) -> Any:
    """Check a value that nbdist does not interpret, and decode inf and nan."""
    if depth > MAX_DEPTH:
        raise ValueError(f"must not be nested deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        return [_decode(item, depth + 1) for item in value]
    if isinstance(value, dict):
        if value.keys() != {_FLOAT}:
            return {name: _decode(item, depth + 1) for name, item in value.items()}
        if value[_FLOAT] not in ("inf", "-inf", "nan"):
            raise ValueError("must be inf, -inf or nan")
        return float(value[_FLOAT])
    if isinstance(value, int) and not -_MAX_INT < value < _MAX_INT:
        raise ValueError("is too large for an integer")
    return value


def to_json_value(value: Any, where: str, depth: int = 0) -> Any:
    """Encode a value for JSON, with inf and nan.

    Args:
        value: None, bool, int, float, str, or lists, tuples and dicts of them.
        where: name of the value for the message of the error.
        depth: containers that the value is in.

    Raises:
        ValueError: the value contains something else, or is nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"{where} is nested deeper than {MAX_DEPTH}")
    if isinstance(value, (list, tuple)):
        return [to_json_value(item, f"{where}[{at}]", depth + 1) for at, item in enumerate(value)]
    if isinstance(value, Mapping):
        if _FLOAT in value or not all(type(name) is str for name in value):
            raise ValueError(f"{where} has keys that are not strings or are reserved ({_FLOAT})")
        return {
            name: to_json_value(item, f"{where}.{name}" if where else name, depth + 1)
            for name, item in value.items()
        }
    if type(value) is float and not math.isfinite(value):
        return {_FLOAT: repr(value)}
    if type(value) is int and not -_MAX_INT < value < _MAX_INT:
        raise ValueError(f"{where} is too large for an integer")
    if value is None or type(value) in {bool, int, float, str}:
        return value
    raise ValueError(
        f"{where} must be a number, string, boolean or null, got {type(value).__name__}"
    )


Count = Annotated[int, Field(ge=0, lt=_MAX_COUNT)]
Text = Annotated[
    str,
    _check(
        lambda text: len(text) <= MAX_TEXT_CHARS and text.isprintable(),
        f"must be printable text of at most {MAX_TEXT_CHARS} characters",
    ),
]
FileName = Annotated[str, _check(is_data_file_name, "is not a valid file name")]
DtypeName = Annotated[
    str,
    _check(
        SAFETENSORS_DTYPES.__contains__, f"must be one of {', '.join(sorted(SAFETENSORS_DTYPES))}"
    ),
]
Shape = Annotated[
    tuple[Count, ...],
    Field(max_length=MAX_NDIM),
    _check(lambda shape: math.prod(shape) < _MAX_COUNT, "has too many elements"),
]
Time = Annotated[AwareDatetime, PlainSerializer(datetime.isoformat)]
SaveId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Crc32 = Annotated[
    int,
    BeforeValidator(lambda value: _parse_hex(value, 8)),
    PlainSerializer(lambda value: f"{value:08x}"),
]
Digest = Annotated[
    int,
    BeforeValidator(lambda value: _parse_hex(value, 16)),
    PlainSerializer(lambda value: f"{value:016x}"),
]
JsonValue = Annotated[Any, BeforeValidator(_decode)]
"""A JSON value that nbdist stores but does not interpret. Tuples are read back as lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """Name, size and checksum of a file of a checkpoint."""

    __pydantic_config__ = _STRICT

    name: FileName
    size_bytes: Annotated[Count, Field(alias="bytes")]
    crc32: Crc32
    """zlib CRC-32 of the whole file, including the header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMetadata:
    """Metadata of a full (unsharded) tensor."""

    __pydantic_config__ = _STRICT

    shape: Shape
    dtype: DtypeName
    """Name of the torch dtype, such as "float32"."""
    digest: Digest
    """64-bit digest of the content. It does not depend on how the tensor is sharded."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """A parameter group of an optimizer."""

    __pydantic_config__ = _STRICT

    options: Mapping[Text, JsonValue]
    names: tuple[Text, ...]
    """Parameter names of the unwrapped model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMetadata:
    """Metadata of an optimizer, without its state tensors."""

    __pydantic_config__ = _STRICT

    prefix: Text
    """Prefix of its keys, such as "optim"."""
    kind: Text
    """Qualified name of its class, such as "torch.optim.adamw.AdamW"."""
    defaults: Mapping[Text, JsonValue]
    groups: tuple[ParamGroup, ...]
    counts: Mapping[Text, Mapping[Text, Annotated[float, BeforeValidator(_decode)]]]
    """Scalar state: parameter name -> state name ("step") -> value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseReference:
    """Tensors that are stored by reference to the safetensors files of a base model."""

    __pydantic_config__ = _STRICT

    name: Text
    """Repository, or absolute path of a folder."""
    revision: Annotated[str, Field(pattern="^[0-9a-f]{0,64}$")]
    """Commit of the repository; "" for a folder."""
    tensors: Mapping[Text, Text]
    """Key in the checkpoint -> name of the tensor in the files. Its digest is in `keys`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Metadata of a checkpoint."""

    __pydantic_config__ = _STRICT

    backend: Text
    world_size: Count
    step: Count
    """Optimizer steps taken."""
    keys: Mapping[Text, TensorMetadata]
    files: tuple[CheckpointFile, ...]
    samples: Count = 0
    """Samples processed by all ranks."""
    options: Mapping[Text, JsonValue] = field(default_factory=dict)
    versions: Mapping[Text, Text] = field(default_factory=dict)
    """Package -> version at the time of saving. Always includes "nbdist"."""
    aliases: Mapping[Text, Text] = field(default_factory=dict)
    """Additional key of a tied tensor -> key under which it is stored."""
    bases: tuple[BaseReference, ...] = ()
    """Base models of tensors that are stored by reference."""
    optimizers: tuple[OptimizerMetadata, ...] = ()
    state_dicts: tuple[JsonValue, ...] = ()
    """State dicts of optimizers that cannot be resharded, without tensors; of each rank, or only of
    rank 0 if they are equal on all ranks."""
    schedulers: tuple[JsonValue, ...] = ()
    rng: tuple[JsonValue, ...] = ()
    """RNG states of Python and NumPy of each rank. Those of torch are in a file."""
    positions: tuple[JsonValue, ...] = ()
    """Position of each data loader."""
    extra: Mapping[Text, JsonValue] = field(default_factory=dict)
    created: Time = field(default_factory=lambda: datetime.now(UTC))
    id: SaveId = field(default_factory=lambda: secrets.token_hex(16))
    """Unique ID of the save. Saving again under the same name creates another ID."""
    format: Literal[1, 2] = FORMAT_VERSION

    @property
    def size_bytes(self) -> int:
        """Total size of the files, without the manifest."""
        return sum(file.size_bytes for file in self.files)

    @property
    def referenced(self) -> dict[str, BaseReference]:
        """Key -> base model, for tensors that are stored by reference."""
        return {key: base for base in self.bases for key in base.tensors}

    def to_json(self) -> bytes:
        """Return the content of `manifest.json`.

        Raises:
            CheckpointError: a value cannot be stored, for example an instance of a class, or
                `from_json` would reject it.
        """
        try:
            text = _to_json(self)
            _parse_manifest(text)  # fail on saving rather than on loading
        except ValueError as error:
            raise CheckpointError(
                f"Cannot write the manifest: {_reason(error)}. Use only numbers and strings there."
            ) from error
        return text

    @classmethod
    def from_json(cls, text: bytes) -> "Manifest":
        """Parse and validate the content of `manifest.json`, which may be untrusted.

        Raises:
            CheckpointError: the manifest is invalid or was written by a newer nbdist.
        """
        try:
            return _parse_manifest(text)
        except ValueError as error:
            raise CheckpointError(
                f"Invalid manifest: {_reason(error)}. Load another checkpoint."
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWriteReport:
    """Report of a rank in a draft, when it has written its files or has failed."""

    __pydantic_config__ = _STRICT

    files: tuple[CheckpointFile, ...] = ()
    keys: Mapping[Text, TensorMetadata] = field(default_factory=dict)
    """Tensors of which the rank wrote a part. The digest is of that part."""
    error: Text = ""
    """Why the rank failed, or ""."""

    def to_json(self) -> bytes:
        """Return the content of the report's file. A partly written file is not valid JSON."""
        return _to_json(self)

    @classmethod
    def from_json(cls, text: bytes) -> "RankWriteReport | None":
        """Parse a report, or return None if it is incomplete."""
        try:
            report: RankWriteReport = _type_adapter(cls).validate_json(text)
        except ValidationError:
            return None
        return report


def merge_tensors(reports: Iterable[RankWriteReport]) -> dict[str, TensorMetadata]:
    """Merge the tensors of all reports. The digest of a tensor is the sum over its parts."""
    merged: dict[str, TensorMetadata] = {}
    for report in reports:
        for name, key in report.keys.items():
            digest = key.digest + (merged[name].digest if name in merged else 0)
            merged[name] = TensorMetadata(
                shape=key.shape, dtype=key.dtype, digest=digest % (1 << 64)
            )
    return merged


@dataclass(frozen=True, slots=True, kw_only=True)
class _ManifestFormat:
    """The fields that manifests of all versions have."""

    __pydantic_config__ = ConfigDict(strict=True, extra="ignore")

    format: int
    versions: Any = None


_type_adapters: dict[type, TypeAdapter[Any]] = {}


def _type_adapter(kind: type) -> TypeAdapter[Any]:
    # Built on first use: it takes milliseconds, and most sessions read no checkpoint.
    if kind not in _type_adapters:
        _type_adapters[kind] = TypeAdapter(kind)
    return _type_adapters[kind]


def _to_json(value: Manifest | RankWriteReport) -> bytes:
    tree = _type_adapter(type(value)).dump_python(value, by_alias=True)
    # The depth of a value counts from its field: those of parameter groups are the deepest.
    encoded = to_json_value(tree, "", depth=-_FIELD_DEPTH)
    return json.dumps(encoded, separators=(",", ":"), allow_nan=False).encode()


def _parse_manifest(text: bytes) -> Manifest:
    if len(text) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
    # The format comes first, since other versions have other fields.
    head: _ManifestFormat = _type_adapter(_ManifestFormat).validate_json(text)
    if head.format > FORMAT_VERSION:
        version = head.versions.get("nbdist") if isinstance(head.versions, dict) else None
        suffix = ""
        if isinstance(version, str) and version.isprintable() and len(version) < _MAX_VERSION_CHARS:
            suffix = f" ({version})"
        raise CheckpointError(
            f"The checkpoint was written by a newer nbdist{suffix} in format {head.format}."
            f" This nbdist reads format {FORMAT_VERSION}. Upgrade nbdist."
        )
    manifest: Manifest = _type_adapter(Manifest).validate_json(text)
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"files lists {printable(twice)} twice")
    if unknown := manifest.referenced.keys() - manifest.keys.keys():
        raise ValueError(f"bases lists {printable(min(unknown))}, which is not in keys")
    for alias, target in manifest.aliases.items():
        if target not in manifest.keys or alias in manifest.keys:
            raise ValueError(
                f"aliases maps {printable(alias)} to {printable(target)}: the target must be in"
                " keys, the alias must not"
            )
    return manifest


def _reason(error: ValueError) -> str:
    """Describe an error on one line: the path in the document, the rule, and what was given."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_context=False)[0]
    given = first["input"]
    shown = printable(given) if isinstance(given, (int, float, str)) else type(given).__name__
    reason = first["msg"].removeprefix("Value error, ")
    path = ""  # such as "files[0].name"
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            name = part if part.isidentifier() else printable(part)
            path += f".{name}" if path else name
    return f"{path or 'the document'}: {reason}, got {shown}"
