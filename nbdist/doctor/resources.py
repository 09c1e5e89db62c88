"""Checks of machine limits: shared memory, file descriptors, memory, disk and private folders."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nbdist.cluster import launcher_process, run_dir
from nbdist.doctor.finding import is_writable, note, ok, problem
from nbdist.hardware import discovery
from nbdist.number_formatting import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.doctor.finding import Finding

MIN_SHM_BYTES = 256 * 2**20
"""Docker's default is 64 MiB, in which the first DataLoader with workers dies of a bus error."""
BASE_BYTES_PER_RANK = 2**30
"""Memory of a CPU rank with torch, transformers and deepspeed loaded, without a model."""
LITTLE_DISK, SOME_DISK = 2**30, 10 * 2**30
DEFAULT_DESCRIPTOR_LIMIT = 1024


class DiskSpace(NamedTuple):
    """Size and free space of a disk or of shared memory, in bytes."""

    total_bytes: int
    free_bytes: int


def check_resources(
    *, ranks: int | None = None, checkpoints: Path | None = None
) -> Iterator[Finding]:
    """Check the limits of this machine.

    Args:
        ranks: number of ranks of the session. Default: that of a new session.
        checkpoints: checkpoint folder. Default: that of a new session.
    """
    ranks = ranks or len(discovery.discover_machine().gpus) or discovery.DEFAULT_CPU_RANKS
    yield check_shared_memory(_disk_space(run_dir.SHARED_MEMORY))
    yield check_file_descriptors(
        launcher_process.descriptor_limit(), launcher_process.descriptors_needed(ranks), ranks
    )
    yield check_host_memory(
        discovery.host_free_memory_bytes(), discovery.host_memory_bytes(), ranks
    )
    yield check_disk_space("checkpoints", checkpoints or Path.cwd() / "checkpoints")
    yield check_disk_space("temp folder", Path(tempfile.gettempdir()))
    yield check_socket_folder(run_dir.private_folder_roots())


def check_shared_memory(space: DiskSpace | None) -> Finding:
    """Check shared memory, which DataLoader workers, push and pull use."""
    topic, where = "shared memory", run_dir.SHARED_MEMORY
    if space is None:
        message = f"{where} is missing: DataLoader workers fail, push and pull are slower"
        return problem(topic, message, "mount a tmpfs there")
    message = (
        f"{format_bytes(space.free_bytes)} of {format_bytes(space.total_bytes)} free in {where}"
    )
    grow = "start the container with --shm-size=8g or --ipc=host (Kubernetes: an emptyDir, Memory)"
    if space.total_bytes < MIN_SHM_BYTES:
        return problem(topic, f"{message}: DataLoader workers die of a bus error", grow)
    if space.free_bytes < run_dir.MIN_PAYLOAD_BYTES:
        return note(topic, f"{message}: push and pull use the temp folder, which is slower", grow)
    return ok(topic, message)


def check_file_descriptors(limit: int, need: int, ranks: int) -> Finding:
    """Check the limit of open files: the kernel opens sockets for each rank, a rank many files."""
    message = f"at most {limit} per process; {ranks} ranks need {need}"
    do = "run `ulimit -n 4096` in the shell that starts Jupyter"
    if limit < need:
        return problem("descriptors", message, do)
    if limit < DEFAULT_DESCRIPTOR_LIMIT:
        return note("descriptors", f"{message}, not counting DataLoaders and data files", do)
    return ok("descriptors", message)


def check_host_memory(free: int, total: int, ranks: int) -> Finding:
    """Check the free memory of the host or container."""
    message = f"{format_bytes(free)} of {format_bytes(total)} free on this machine or container"
    need = ranks * BASE_BYTES_PER_RANK
    if free < need:
        message = f"{message}; {ranks} ranks need about {format_bytes(need)} without a model"
        do = "end other programs, raise the container's limit, or use fewer ranks"
        return problem("memory", message, do)
    return ok("memory", message)


def check_disk_space(topic: str, folder: Path) -> Finding:
    """Check the disk of a folder, which may not exist yet."""
    space = _disk_space(folder)
    if space is None or not is_writable(folder):
        return problem(topic, f"{folder} is not writable", "choose another folder")
    message = f"{format_bytes(space.free_bytes)} free in {folder}"
    if space.free_bytes < LITTLE_DISK:
        return problem(
            topic, message, "free disk space: a checkpoint takes at least 12 bytes per parameter"
        )
    if space.free_bytes < SOME_DISK:
        return note(topic, message, "a checkpoint of a model with 1 B parameters takes 12 GB")
    return ok(topic, message)


def check_socket_folder(folders: list[Path]) -> Finding:
    """Check for a parent of private session folders that other users cannot tamper with."""
    best = next((folder for folder in folders if not run_dir.unsafe_folder_reason(folder)), None)
    if best is None:
        reasons = "; ".join(
            f"{folder}: {run_dir.unsafe_folder_reason(folder)}" for folder in folders
        )
        do = "set TMPDIR to a folder of your own; not needed if you are the only user"
        return note("private folders", f"no folder is safe from other users: {reasons}", do)
    return ok("private folders", f"in {best}, mode 0700")


def _disk_space(folder: Path) -> DiskSpace | None:
    """Disk space at the folder, or at its nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.R_OK):
        return None
    usage = shutil.disk_usage(folder)
    return DiskSpace(usage.total, usage.free)
