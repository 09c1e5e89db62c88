"""Benchmarks collectives, matrix products, memory bandwidth, host-device copies and disks.

Runs on the main thread of all ranks between cells and takes a few seconds. Collectives use the
default process group: it is connected, engines use it, and another group would need memory for
another communicator. They are called asynchronously, as engines do. Random generators are not
changed and memory is released at the end.
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import distributed

from nbdist.errors import SessionError
from nbdist.planner.measurement_store import COLLECTIVES
from nbdist.protocol.operations import RankCalibrateReport
from nbdist.state import collectives, shards
from nbdist.worker.memory import memory_probe
from nbdist.worker.operations.collective_phases import call_on_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.planner.measurement_store import Collective
    from nbdist.protocol.operations import CalibrateRequest
    from nbdist.worker.operations import RankContext

MESSAGE_BYTES = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
"""Bytes of the full tensors; the smallest size shows the latency."""
NUM_ROUNDS = 5
ROUND_S = 0.02
"""Target duration of a round; a round has at least one collective."""
MAX_COLLECTIVES = 50
"""Maximum number of collectives in a round."""
FREE_MEMORY_DIVISOR = 8
"""The buffers use at most 1/8 of the free memory."""
MATMUL_S = 0.2
"""Duration of a benchmark of matrix products, elementwise kernels or copies."""
MAX_MATMUL_S = 1.0
"""Maximum duration, for a dtype without hardware support."""
_MATRIX_SIZES = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the matrices."""
_ELEMENTWISE = {"cpu": 16 << 20, "cuda": 512 << 20}
"""Bytes, larger than the caches."""
_COPY_BYTES = 256 << 20
"""Bytes per copy between host and device."""
CHUNK_BYTES = 8 << 20
MAX_WRITE_BYTES = 256 << 20
"""Maximum bytes that one rank writes."""
MAX_WRITE_S = 1.0
"""Maximum duration of writing to a slow disk."""
FREE_SPACE_DIVISOR = 32
"""One rank writes at most 1/32 of the free space."""
_on_all_ranks = functools.partial(
    call_on_all_ranks, raises=SessionError, prefix="The benchmark failed: "
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def calibrate(request: CalibrateRequest, context: RankContext) -> RankCalibrateReport:
    """Run all benchmarks; collective.

    Raises:
        SessionError: a benchmark failed on a rank; the same message on all ranks.
    """
    device = memory_probe.current_probe.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU rank"
    results: dict[str, Any] = {"device": name}
    if request.disk is not None:  # first: the folder may be missing on one node
        context.on_phase(f"disk of {request.disk}")
        results["disk"] = _measure_disk(Path(request.disk).expanduser())
    reserved_before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    try:
        with torch.no_grad():
            context.on_phase("collectives")
            results["curves"] = _collectives(device)
            context.on_phase("matrix products")
            results["products"] = {
                kind: _measure_matmul(device, DTYPES[kind]) for kind in request.kinds
            }
            results["memory"] = _elementwise(device)
            if device.type == "cuda":
                context.on_phase("copies between host and device")
                results["copies"] = _copies(device)
    finally:
        if device.type == "cuda" and torch.cuda.memory_reserved(device) > reserved_before:
            torch.cuda.empty_cache()
        shards.empty_pinned_cache()
        memory_probe.trim_malloc()
    return RankCalibrateReport(figures=results)


# -------------------------------------------------------------------------- collectives


def _collectives(device: torch.device) -> dict[str, list[tuple[int, float]]]:
    """Return the curve of each collective: (bytes of the full tensor, seconds)."""
    world = distributed.get_world_size()
    if world == 1:
        return {}
    limit = min(collectives.all_gather_values(_free_bytes(device))) // FREE_MEMORY_DIVISOR
    sizes = [size // (4 * world) * 4 * world for size in MESSAGE_BYTES if 2 * size <= limit]
    if not sizes:
        return {}
    # the largest full tensor and one rank's shard; filled, so they are allocated
    full, shard = _on_all_ranks(
        lambda: [
            torch.ones(max(sizes) // 4 // parts, dtype=torch.float32, device=device)
            for parts in (1, world)
        ]
    )
    return {
        name: [(size, _collective(name, full, shard, size, world)) for size in sizes]
        for name in COLLECTIVES
    }


def _collective(
    name: Collective, whole: torch.Tensor, share: torch.Tensor, size: int, world: int
) -> float:
    """Return the seconds per collective of this size on this rank: the median of a few rounds."""
    full, part = whole[: size // 4], share[: size // 4 // world]
    call: Callable[[], Any] = {
        # MAX instead of SUM, so that repetition does not change the values
        "all_reduce": lambda: distributed.all_reduce(
            full, op=distributed.ReduceOp.MAX, async_op=True
        ),
        "all_gather": lambda: distributed.all_gather_into_tensor(full, part, async_op=True),
        "reduce_scatter": lambda: distributed.reduce_scatter_tensor(
            part, full, op=distributed.ReduceOp.MAX, async_op=True
        ),
    }[name]

    def call_and_wait() -> None:
        call().wait()

    call_and_wait()  # warm-up: the first call sets up connections
    first = max(collectives.all_gather_values(_measure_seconds(call_and_wait, 1, full.device)))
    times = max(1, min(MAX_COLLECTIVES, int(ROUND_S / first)))
    rounds = NUM_ROUNDS if first < ROUND_S else 3
    durations = []
    for _ in range(rounds):
        distributed.barrier()
        durations.append(_measure_seconds(call_and_wait, times, full.device) / times)
    return statistics.median(durations)


# ---------------------------------------------------------------------------- computing


def _measure_matmul(device: torch.device, kind: torch.dtype) -> float:
    """Return the FLOP/s of large matrix products in a dtype, while all ranks compute."""
    side = _MATRIX_SIZES[device.type]
    generator = torch.Generator(device).manual_seed(0)
    # Random numbers: with constant ones a GPU draws less power and is faster.
    a, b = _on_all_ranks(
        lambda: [
            torch.randn(side, side, generator=generator, device=device).to(kind) for _ in range(2)
        ]
    )
    distributed.barrier()
    return 2 * side**3 / _seconds_of(lambda: a @ b, device)


def _elementwise(device: torch.device) -> float:
    """Return the bytes/s of a kernel that reads one tensor and writes a new one."""
    size = min(_ELEMENTWISE[device.type], _free_bytes(device) // FREE_MEMORY_DIVISOR)
    source = _on_all_ranks(lambda: torch.ones(size // 4, dtype=torch.float32, device=device))
    distributed.barrier()
    return 2 * size / _seconds_of(lambda: source * 0.5, device)


def _copies(device: torch.device) -> dict[str, float]:
    """Return the bytes/s between host and device, by direction and kind of host memory."""
    size = min(_COPY_BYTES, _free_bytes(device) // FREE_MEMORY_DIVISOR)
    on_device = _on_all_ranks(lambda: torch.ones(size, dtype=torch.uint8, device=device))
    bandwidths = {}
    for kind, pinned in (("pinned", True), ("pageable", False)):
        host = _on_all_ranks(
            functools.partial(torch.ones, size, dtype=torch.uint8, pin_memory=pinned)
        )
        distributed.barrier()
        for direction, (target, source) in {
            "to_device": (on_device, host),
            "to_host": (host, on_device),
        }.items():
            copy = functools.partial(target.copy_, source, non_blocking=True)
            bandwidths[f"{direction}_{kind}"] = size / _seconds_of(copy, device)
    return bandwidths


# -------------------------------------------------------------------------------- time


def _seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a repeated call, after a warm-up call."""
    _measure_seconds(call, 1, device)
    durations: list[float] = []
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < MATMUL_S or (
        len(durations) < NUM_ROUNDS and elapsed < MAX_MATMUL_S
    ):
        durations.append(_measure_seconds(call, 1, device))
    return statistics.median(durations)


def _measure_seconds(call: Callable[[], object], times: int, device: torch.device) -> float:
    """Return the seconds of several calls, including their work on the device."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        call()
    synchronize(device)
    return time.perf_counter() - start


def _free_bytes(device: torch.device) -> int:
    """Return the free bytes of this rank's device; CPU ranks share the host's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) // distributed.get_world_size()


# -------------------------------------------------------------------------------- disk


def _measure_disk(folder: Path) -> dict[str, Any]:
    """Return the bytes/s of writing and reading a file while all ranks do; and the file system.

    Raises:
        SessionError: the folder cannot be written to or has too little free space.
    """
    chunk = mmap.mmap(-1, CHUNK_BYTES)  # aligned, which direct I/O requires
    chunk.write(os.urandom(CHUNK_BYTES))  # some file systems compress
    file, size = _on_all_ranks(lambda: _open_trial_file(folder))
    fd, written, is_direct = file.fileno(), 0, True

    def write() -> float:
        nonlocal written
        start = time.perf_counter()
        while written < size and time.perf_counter() - start < MAX_WRITE_S:
            written += os.write(fd, chunk)
        os.fsync(fd)
        return written / (time.perf_counter() - start)

    def read() -> float:
        left = written
        os.lseek(fd, 0, os.SEEK_SET)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        while left > 0 and (count := os.readv(fd, [chunk])):
            left -= count
        return written / (time.perf_counter() - start)

    with chunk, file:
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        except OSError:  # not supported here: fsync and fadvise are used instead
            is_direct = False
        speeds = {"write": _on_all_ranks(write), "read": _on_all_ranks(read)}
    return {**speeds, "filesystem": _filesystem_of(folder), "direct": is_direct}


def _open_trial_file(folder: Path) -> tuple[Any, int]:
    """Return a new file, and the number of bytes to write to it."""
    limit = shutil.disk_usage(folder).free // FREE_SPACE_DIVISOR
    size = min(MAX_WRITE_BYTES, limit // CHUNK_BYTES * CHUNK_BYTES)
    if not size:
        raise OSError(f"Not enough free space in {folder} to benchmark its disk. Free some.")
    return tempfile.TemporaryFile(dir=folder, buffering=0), size


def _filesystem_of(folder: Path) -> str:
    """Return the file system of a folder, such as "ext4 on /dev/nvme0n1p1"."""
    resolved = folder.resolve()
    partitions = psutil.disk_partitions(all=True)
    around = [mount for mount in partitions if resolved.is_relative_to(mount.mountpoint)]
    around.sort(key=lambda mount: len(mount.mountpoint))  # of two at one place, the later
    return f"{around[-1].fstype} on {around[-1].device}" if around else "unknown"
