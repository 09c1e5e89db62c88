"""What the machine gives: shared memory, descriptors, memory, disk, and a place for sockets."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nbdist.cluster import file_limits, run_dir
from nbdist.doctor.finding import note, ok, problem, size, writable
from nbdist.hardware import discovery

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.doctor.finding import Finding

SMALL_SHM = 256 * 2**20
"""Containers give 64 MiB, in which the first loader with workers dies of a bus error."""
RANK_BYTES = 2**30
"""A CPU rank with torch, transformers and deepspeed loaded, before any model."""
LITTLE_DISK, SOME_DISK = 2**30, 10 * 2**30
USUAL_DESCRIPTORS = 1024


class Room(NamedTuple):
    """Of a disk or of shared memory."""

    total: int
    free: int


def look(*, ranks: int | None = None, checkpoints: Path | None = None) -> Iterator[Finding]:
    """Look at this machine.

    Args:
        ranks: of the session. Default: as many as a new one would have.
        checkpoints: where they lie. Default: as for a new session.
    """
    ranks = ranks or len(discovery.found().gpus) or discovery.CPU_RANKS
    yield shared_memory(_room(run_dir.SHARED_MEMORY))
    yield descriptors(file_limits.descriptor_limit(), file_limits.descriptors_needed(ranks), ranks)
    yield memory(discovery.host_free_bytes(), discovery.host_bytes(), ranks)
    yield disk("checkpoints", checkpoints or Path.cwd() / "checkpoints")
    yield disk("temp folder", Path(tempfile.gettempdir()))
    yield sockets(run_dir.roots())


def shared_memory(room: Room | None) -> Finding:
    """Loaders with workers, push and pull go through it."""
    topic, where = "shared memory", run_dir.SHARED_MEMORY
    if room is None:
        says = f"{where} is missing: loaders with workers cannot work, push and pull are slower"
        return problem(topic, says, "mount a tmpfs there")
    says = f"{size(room.free)} of {size(room.total)} free in {where}"
    grow = "start the container with --shm-size=8g or --ipc=host (Kubernetes: an emptyDir, Memory)"
    if room.total < SMALL_SHM:
        return problem(topic, f"{says}: loaders with workers die of a bus error", grow)
    if room.free < run_dir.MIN_BULK_BYTES:
        return note(topic, f"{says}: push and pull go through the temp folder, slower", grow)
    return ok(topic, says)


def descriptors(limit: int, need: int, ranks: int) -> Finding:
    """Each rank opens sockets in the kernel, and many files itself."""
    says = f"at most {limit} in a process; {ranks} ranks need {need}"
    do = "say `ulimit -n 4096` in the shell that starts Jupyter"
    if limit < need:
        return problem("descriptors", says, do)
    if limit < USUAL_DESCRIPTORS:
        return note("descriptors", f"{says}, without loaders and data", do)
    return ok("descriptors", says)


def memory(free: int, total: int, ranks: int) -> Finding:
    """Of the host, or what the container may take."""
    says = f"{size(free)} of {size(total)} free for this machine or container"
    if free < ranks * RANK_BYTES:
        says = f"{says}; {ranks} ranks take about {size(ranks * RANK_BYTES)} before any model"
        do = "end something, raise the container's limit, or use fewer ranks"
        return problem("memory", says, do)
    return ok("memory", says)


def disk(topic: str, folder: Path) -> Finding:
    """Of a folder that need not be there yet."""
    room = _room(folder)
    if room is None or not writable(folder):
        return problem(topic, f"{folder} cannot be written", "choose another folder")
    says = f"{size(room.free)} free in {folder}"
    if room.free < LITTLE_DISK:
        return problem(topic, says, "make room: a checkpoint takes 12 bytes a parameter and more")
    if room.free < SOME_DISK:
        return note(topic, says, "a checkpoint of 1 B parameters takes 12 GB")
    return ok(topic, says)


def sockets(folders: list[Path]) -> Finding:
    """The private folder of a session must be short and safe."""
    best = next((folder for folder in folders if not run_dir.danger(folder)), None)
    if best is None:
        reasons = "; ".join(f"{folder}: {run_dir.danger(folder)}" for folder in folders)
        do = "set TMPDIR to a folder of your own; alone on the machine you need do nothing"
        return note("private folders", f"no place is safe from other users: {reasons}", do)
    return ok("private folders", f"in {best}, mode 0700")


def _room(folder: Path) -> Room | None:
    """Of the folder, or of the one that it would be made in."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.R_OK):
        return None
    usage = shutil.disk_usage(folder)
    return Room(usage.total, usage.free)
