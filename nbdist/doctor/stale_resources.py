"""Check for processes, folders and shared memory that killed sessions left on this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nbdist.cluster import orphan_cleanup, run_dir
from nbdist.doctor.finding import note, ok, summarize_list
from nbdist.hardware import process_identity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.doctor.finding import Finding

TOPIC = "leftovers"


def check_stale_resources(
    found: orphan_cleanup.OrphanResources | None = None, *, shm: Path = process_identity.SHM_FOLDER
) -> Iterator[Finding]:
    """List leftovers that the next start removes, and those of unknown origin, which it keeps.

    Args:
        found: leftovers that certainly belong to nbdist. Default: search for them.
        shm: shared memory folder, in which files of unknown processes may be.
    """
    found = orphan_cleanup.find_orphans() if found is None else found
    kinds = {
        "processes": found.processes,
        "folders": found.folders,
        "shared tensors": found.shared_memory_files,
    }
    if found:
        message = "; ".join(
            f"{name}: {summarize_list(resources)}" for name, resources in kinds.items() if resources
        )
        do = "no action needed: the next start (%load_ext, %%distribute) removes them"
        yield note(TOPIC, f"left by killed sessions: {message}", do)
    else:
        yield ok(TOPIC, "none")
    unknown = [path for path in shm.glob("nccl-*") if _is_owned_by_user(path)]
    unknown += [
        path
        for root in run_dir.private_folder_roots()
        for path in root.glob("nbdist-*")
        if _unknown(path)
    ]
    unknown = process_identity.filter_unused(unknown)
    if unknown:
        message = f"the owner of these is not visible from here: {summarize_list(unknown)}"
        do = (
            "if none of your processes runs in another container or on another machine, remove them"
        )
        yield note(TOPIC, message, do)


def _unknown(folder: Path) -> bool:
    """Return whether a session folder of this user has an owner that is not visible from here."""
    owner = process_identity.read_owner(folder) if process_identity.is_private(folder) else None
    return owner is not None and not owner.is_checkable


def _is_owned_by_user(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False
