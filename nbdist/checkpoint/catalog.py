"""Lookup of checkpoints in a folder. Read-only.

checkpoints/
    step-100/            a complete checkpoint: the manifest is written last
    .tmp-<32 hex>/       being written or removed; its owner file names the process
    .old-<32 hex>-best/  being replaced by a new checkpoint "best"; if the process died
                         before the second rename, "best" still refers to this folder
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.checkpoint import durable_io
from nbdist.checkpoint.names import REPLACED_PATTERN, checkpoint_path, is_checkpoint_name
from nbdist.checkpoint.reader import CheckpointReader
from nbdist.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from nbdist.checkpoint.manifest import Manifest
    from nbdist.checkpoint.url import Url

_MAX_ATTEMPTS = 5
_RETRY_DELAY_S = 0.01
_MAX_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """Summary of a checkpoint, as listed to the user."""

    name: str
    step: int
    size_bytes: int
    backend: str
    created: datetime
    path: Path | Url


def list_checkpoints(root: Path) -> list[CheckpointSummary]:
    """List the complete checkpoints of a folder, newest last.

    Incomplete folders, foreign folders and checkpoints with an invalid manifest or a wrong file
    size are skipped. Checksums are not compared; see ``verify_files``. Waits up to 1 s while
    another process renames checkpoints.
    """
    with durable_io.shared_lock(root):
        return list_checkpoints_locked(root)


def list_checkpoints_locked(root: Path) -> list[CheckpointSummary]:
    """List as ``list_checkpoints`` does. The caller must hold the lock of `root`."""
    by_name = {summary.name: summary for summary in _scan(root, aside=False)}
    for replaced in _scan(root, aside=True):
        kept = by_name.get(replaced.name)
        if kept is None or (kept.path.name != kept.name and kept.created < replaced.created):
            by_name[replaced.name] = replaced
    return sorted(
        by_name.values(), key=lambda summary: (summary.created, summary.step, summary.name)
    )


def latest_checkpoint(root: Path) -> CheckpointSummary | None:
    """Return the newest checkpoint, or None if there are none."""
    summaries = list_checkpoints(root)
    return summaries[-1] if summaries else None


def find_checkpoint(root: Path, name: str) -> Path:
    """Return the folder of a checkpoint.

    Raises:
        CheckpointError: the name is invalid, or no checkpoint has it; lists existing names.
    """
    path = checkpoint_path(root, name)
    if path.is_dir():
        return path  # opening an invalid folder raises an error with the reason
    summaries = list_checkpoints(root)
    for summary in summaries:
        if summary.name == name:
            return root / summary.path.name
    raise missing_checkpoint_error(root, name, [summary.name for summary in summaries])


def missing_checkpoint_error(root: Path | Url, name: str, available: list[str]) -> CheckpointError:
    """Build the error for a name that does not exist; it lists up to 10 names that do."""
    names = available[::-1][:_MAX_LISTED]
    more = ", ..." if len(available) > _MAX_LISTED else ""
    others = f"Available: {', '.join(names)}{more}." if names else "It contains no checkpoints."
    return CheckpointError(f"No checkpoint {name} in {root}. {others}")


def open_checkpoint(root: Path, name: str) -> CheckpointReader:
    """Open a checkpoint by name. Retries while another process is replacing it.

    Raises:
        CheckpointError: no checkpoint has this name, or it is invalid.
    """
    for _ in range(_MAX_ATTEMPTS):
        with suppress(CheckpointError):
            return CheckpointReader.open_folder(find_checkpoint(root, name))
        time.sleep(
            _RETRY_DELAY_S
        )  # another process may be between the two renames of a replacement
    return CheckpointReader.open_folder(find_checkpoint(root, name))


def summarize_folder(path: Path, name: str) -> CheckpointSummary | None:
    """Summarize the checkpoint in a folder, or return None if it is not complete."""
    try:
        with CheckpointReader.open_folder(path) as opened_folder:
            return (
                summarize_manifest(path, name, opened_folder.manifest)
                if opened_folder.is_complete()
                else None
            )
    except CheckpointError:
        return None


def replaced_checkpoints(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the folder of each checkpoint that was renamed for replacement."""
    for path in _folders(root):
        if match := REPLACED_PATTERN.fullmatch(path.name):
            yield match["name"], path


def _scan(root: Path, *, aside: bool) -> Iterator[CheckpointSummary]:
    for path in _folders(root):
        match = REPLACED_PATTERN.fullmatch(path.name)
        name = match["name"] if match else path.name
        if (
            bool(match) == aside
            and is_checkpoint_name(name)
            and (summary := summarize_folder(path, name))
        ):
            yield summary


def _folders(root: Path) -> list[Path]:
    """List the folders in `root`, without symbolic links."""
    try:
        with os.scandir(root) as items:
            return [Path(item.path) for item in items if item.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def summarize_manifest(path: Path | Url, name: str, manifest: Manifest) -> CheckpointSummary:
    """Summarize a checkpoint from its manifest."""
    return CheckpointSummary(
        name=name,
        step=manifest.step,
        size_bytes=manifest.size_bytes,
        backend=manifest.backend,
        created=manifest.created,
        path=path,
    )
