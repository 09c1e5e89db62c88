"""What killed sessions have left on this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nbdist.cluster import orphan_cleanup, run_dir
from nbdist.doctor.finding import listed, note, ok
from nbdist.hardware import process_identity, shm_cleanup

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nbdist.doctor.finding import Finding

TOPIC = "leftovers"


def look(
    found: orphan_cleanup.Leftovers | None = None, *, shm: Path = shm_cleanup.FOLDER
) -> Iterator[Finding]:
    """Name what is ours and will go, and what may be and stays.

    Args:
        found: what is certainly ours.
        shm: shared memory, where files of unknown processes may lie.
    """
    found = orphan_cleanup.find() if found is None else found
    kinds = {
        "processes": found.processes,
        "folders": found.folders,
        "shared tensors": found.shared,
    }
    if found:
        says = "; ".join(f"{name}: {listed(some)}" for name, some in kinds.items() if some)
        do = "nothing: the next start (%load_ext, %%distribute) ends and removes them"
        yield note(TOPIC, f"of sessions that were killed, {says}", do)
    else:
        yield ok(TOPIC, "none of killed sessions")
    unknown = [path for path in shm.glob("nccl-*") if _is_mine(path)]
    unknown += [
        path for root in run_dir.roots() for path in root.glob("nbdist-*") if _unknown(path)
    ]
    unknown = shm_cleanup.unused(unknown)
    if unknown:
        says = f"whose these are cannot be told from here: {listed(unknown)}"
        do = "if nothing of yours runs in another container or machine, remove them by hand"
        yield note(TOPIC, says, do)


def _unknown(folder: Path) -> bool:
    """Whether it is a session's, of this user, and its maker cannot be asked."""
    of = process_identity.of(folder) if process_identity.is_private(folder) else None
    return of is not None and not of.can_be_asked


def _is_mine(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False
