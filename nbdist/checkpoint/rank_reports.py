"""Reports of the ranks in a checkpoint draft: one file per rank, written when it has finished.

A rank that saves in the background cannot join collectives, so the ranks exchange results and
errors through files in the draft.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbdist.checkpoint import json_validation
from nbdist.checkpoint.manifest import (
    CheckpointFile,
    TensorMetadata,
    file_from_json,
    file_to_json,
    tensor_from_json,
    tensor_to_json,
)
from nbdist.checkpoint.names import rank_report_name
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

_WRAP = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Report of one rank."""

    files: tuple[CheckpointFile, ...] = ()
    keys: Mapping[str, TensorMetadata] = field(default_factory=dict)
    """Tensors of which the rank wrote a part. The digest is of that part."""
    error: str = ""
    """Why the rank failed, or ""."""


def write_report(
    tmp: Path,
    rank: int,
    parts: Sequence[CheckpointFile],
    *,
    keys: Mapping[str, TensorMetadata] | None = None,
) -> None:
    """Write the report of a rank. Call it after all its files are written and synced.

    Raises:
        OSError: the report cannot be written.
    """
    _write_report_text(tmp, rank, report_text(parts, keys))


def write_failure(tmp: Path, rank: int, why: str) -> None:
    """Report that a rank has failed. Falls back to an empty marker file if the disk is full."""
    try:
        _write_report_text(tmp, rank, report_text(error=why))
    except OSError as error:
        # An empty file needs no disk space; its name carries the errno.
        with suppress(OSError):
            (tmp / f"{rank_report_name(rank)}.failed-{error.errno or 0}").touch()


def report_text(
    parts: Sequence[CheckpointFile] = (),
    keys: Mapping[str, TensorMetadata] | None = None,
    error: str | None = None,
) -> str:
    """Return the content of a report file. A partly written file is not valid JSON."""
    why = ""
    if error is not None:
        why = (
            "".join(char if char.isprintable() else " " for char in error)[
                : json_validation.MAX_TEXT_CHARS
            ]
            or "?"
        )
    tree = {"files": list(map(file_to_json, parts)), "keys": _tree(keys or {}), "error": why}
    return json.dumps(tree, separators=(",", ":"))


def parse_report(text: bytes) -> RankReport | None:
    """Parse a report, or return None if it is incomplete."""
    with suppress(json_validation.ValidationError):
        return RankReport(**_REPORT_FIELDS(json_validation.loads(text), ""))
    return None


def read_report(tmp: Path, rank: int) -> RankReport | None:
    """Read the report of a rank, or return None if there is none yet."""
    with suppress(OSError):
        if (report_read := parse_report((tmp / rank_report_name(rank)).read_bytes())) is not None:
            return report_read
    for path in tmp.glob(f"{rank_report_name(rank)}.failed-*"):
        number = path.name.rpartition("-")[2]
        reason = os.strerror(int(number)) if number.isdecimal() else "no reason given"
        return RankReport(error=f"rank {rank} cannot write there ({reason}, errno {number})")
    return None


def collect_files(tmp: Path, world_size: int) -> tuple[CheckpointFile, ...]:
    """Read the reports of all ranks and return their files, ordered by rank.

    Raises:
        CheckpointError: ranks have not reported or have failed; lists them.
    """
    reports = {rank: read_report(tmp, rank) for rank in range(world_size)}
    missing = [rank for rank, entry in reports.items() if entry is None or entry.error]
    if missing:
        ranks = ", ".join(map(str, missing))
        raise CheckpointError(f"No complete report of rank {ranks} in {tmp}. Save again.")
    return tuple(file for entry in reports.values() if entry is not None for file in entry.files)


def merge_tensors(everyone: Iterable[RankReport]) -> dict[str, TensorMetadata]:
    """Merge the tensors of all reports. The digest of a tensor is the sum over its parts."""
    merged: dict[str, TensorMetadata] = {}
    for entry in everyone:
        for name, key in entry.keys.items():
            previous = merged.get(name)
            digest = key.digest + (previous.digest if previous is not None else 0)
            merged[name] = TensorMetadata(shape=key.shape, dtype=key.dtype, digest=digest % _WRAP)
    return merged


def _write_report_text(tmp: Path, rank: int, text: str) -> None:
    # No fsync: the committing process reads the report now and copies it into the manifest.
    (tmp / rank_report_name(rank)).write_text(text)


def _tree(found: Mapping[str, TensorMetadata]) -> json_validation.JsonValue:
    return {name: tensor_to_json(key) for name, key in found.items()}


_REPORT_FIELDS = json_validation.fields(
    {
        "files": json_validation.sequence(file_from_json),
        "keys": json_validation.mapping(json_validation.text, tensor_from_json),
        "error": json_validation.text,
    }
)
