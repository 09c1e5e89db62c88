"""How fast the links between the ranks and their devices are; a few seconds, all ranks together.

Runs on a rank, on its main thread, while no cell runs. Collectives go over the group that is
there already: it is connected, it is what engines use, and a group of its own would take the
memory of another communicator. They are asked for as engines do, without waiting for one another.
Random generators stay as they are, and the memory is given back.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import distributed

from nbdist.errors import SessionError
from nbdist.planner.measurements import COLLECTIVES
from nbdist.state import collectives
from nbdist.worker.benchmarks import disk as benchmarks_disk
from nbdist.worker.memory.memory_probe import trim
from nbdist.worker.operations import consensus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist.planner.measurements import Collective

SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
"""Of the full tensors; the first one shows the latency."""
ROUNDS = 5
ROUND_S = 0.02
"""As long a round of one size lasts, if one collective is not longer."""
MOST = 50
"""Collectives of a round."""
SHARE_OF_MEMORY = 8
"""The buffers take no more of what is free than one part in so many."""
PRODUCT_S = 0.2
"""Of matrix products, and of copies."""
LONGEST_S = 1.0
"""Of a type that the device has no units for."""
_PRODUCT = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of a product."""
_ELEMENTWISE = {"cpu": 16 << 20, "cuda": 512 << 20}
"""Bytes, beyond what caches hold."""
_COPIED = 256 << 20
"""Bytes of a copy between host and device."""
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def measure(
    device: torch.device,
    *,
    kinds: list[str],
    disk: str | None,
    tell: Callable[[str], object],
) -> dict[str, Any]:
    """Measure together with all other ranks; plain values for a message.

    Args:
        device: this rank's own.
        kinds: types of matrix products, of `TYPES`.
        disk: a folder to write in and read from; None: no disk.
        tell: hears what is being measured.

    Raises:
        SessionError: a rank cannot; nothing has begun on any, or the same words come from all.
    """
    found: dict[str, Any] = {"device": _name(device)}
    with torch.no_grad(), _given_back(device):
        tell("collectives")
        found["curves"] = _collectives(device)
        tell("matrix products")
        found["products"] = {kind: _products(device, TYPES[kind]) for kind in kinds}
        found["memory"] = _elementwise(device)
        if device.type == "cuda":
            tell("copies between host and device")
            found["copies"] = _copies(device)
    if disk is not None:
        tell(f"the disk of {disk}")
        found["disk"] = _disk(disk)
    return found


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU rank"


@contextlib.contextmanager
def _given_back(device: torch.device) -> Iterator[None]:
    """Give back to the device and the system what measuring has taken from them."""
    held = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
    try:
        yield
    finally:
        if device.type == "cuda" and torch.cuda.memory_reserved(device) > held:
            torch.cuda.empty_cache()
        trim()


def _together(call: Callable[[], Any]) -> Any:
    """What a call gives, once it is known that none of the ranks failed.

    Raises:
        SessionError: one did.
    """
    found, error = consensus.attempt(call)
    failed = {
        rank: one for rank, one in enumerate(collectives.everyones(consensus.words(error))) if one
    }
    if failed:
        message = f"the ranks could not be measured: {consensus.said(failed, collectives.size())}"
        raise SessionError(message)
    return found


def _disk(folder: str) -> dict[str, Any]:
    """Bytes/s of this rank's share of a disk, while all ranks use it."""
    trial = benchmarks_disk.Trial(folder)
    try:
        _together(trial.open)
        return {"write": _together(trial.write), "read": _together(trial.read), **trial.told()}
    finally:
        trial.close()


# -------------------------------------------------------------------------- collectives


def _collectives(device: torch.device) -> dict[str, list[tuple[int, float]]]:
    """Curve of each collective: size of the full tensor, seconds of one."""
    world = distributed.get_world_size()
    if world == 1:
        return {}
    room = min(collectives.everyones(_free(device))) // SHARE_OF_MEMORY
    sizes = [size // (4 * world) * 4 * world for size in SIZES if 2 * size <= room]
    if not sizes:
        return {}
    whole, share = _together(lambda: _buffers(max(sizes), world, device))
    return {
        name: [(size, _collective(name, whole, share, size, world)) for size in sizes]
        for name in COLLECTIVES
    }


def _buffers(size: int, world: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest full tensor, and one rank's share of it; touched, so that they are there."""
    whole = torch.ones(size // 4, dtype=torch.float32, device=device)
    share = torch.ones(size // 4 // world, dtype=torch.float32, device=device)
    return whole, share


def _collective(
    name: Collective, whole: torch.Tensor, share: torch.Tensor, size: int, world: int
) -> float:
    """Seconds of one collective of this size on this rank: median of a few rounds."""
    full, part = whole[: size // 4], share[: size // 4 // world]
    call: Callable[[], Any] = {
        # the largest, so that the numbers stay the same however often it is done
        "all_reduce": lambda: distributed.all_reduce(
            full, op=distributed.ReduceOp.MAX, async_op=True
        ),
        "all_gather": lambda: distributed.all_gather_into_tensor(full, part, async_op=True),
        "reduce_scatter": lambda: distributed.reduce_scatter_tensor(
            part, full, op=distributed.ReduceOp.MAX, async_op=True
        ),
    }[name]

    def one() -> None:
        call().wait()

    one()  # the first makes what the others use
    first = max(collectives.everyones(_timed(one, 1, full.device)))
    times = max(1, min(MOST, int(ROUND_S / first)))
    rounds = ROUNDS if first < ROUND_S else 3
    taken = []
    for _ in range(rounds):
        distributed.barrier()
        taken.append(_timed(one, times, full.device) / times)
    return statistics.median(taken)


# ---------------------------------------------------------------------------- computing


def _products(device: torch.device, kind: torch.dtype) -> float:
    """FLOP/s of large matrix products in a type, while all ranks compute.

    The numbers are random, for a GPU computes equal ones with less power and so faster.
    """
    side = _PRODUCT[device.type]
    generator = torch.Generator(device).manual_seed(0)

    def matrix() -> torch.Tensor:
        return torch.randn(side, side, generator=generator, device=device).to(kind)

    one, other = _together(lambda: (matrix(), matrix()))
    distributed.barrier()
    return 2 * side**3 / _seconds_of(lambda: one @ other, device)


def _elementwise(device: torch.device) -> float:
    """Bytes/s of a kernel that reads one tensor and writes another, new each time as in a loop."""
    size = min(_ELEMENTWISE[device.type], _free(device) // SHARE_OF_MEMORY)
    source = _together(lambda: torch.ones(size // 4, dtype=torch.float32, device=device))
    distributed.barrier()
    return 2 * size / _seconds_of(lambda: source * 0.5, device)


def _copies(device: torch.device) -> dict[str, float]:
    """Bytes/s between host and device, by direction and kind of the host's memory."""
    size = min(_COPIED, _free(device) // SHARE_OF_MEMORY)
    there = _together(lambda: torch.ones(size, dtype=torch.uint8, device=device))
    found = {}
    for words, pinned in (("pinned", True), ("pageable", False)):
        host = _together(functools.partial(_host, size, pinned=pinned))
        distributed.barrier()
        for way, (target, source) in {
            "to_device": (there, host),
            "to_host": (host, there),
        }.items():
            copy = _copying(target, source)
            found[f"{way}_{words}"] = size / _seconds_of(copy, device)
    return found


def _host(size: int, *, pinned: bool) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned).fill_(1)


def _copying(target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=True)


# -------------------------------------------------------------------------------- time


def _seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Median time of a call, repeated for a while."""
    _timed(call, 1, device)
    taken: list[float] = []
    since = time.perf_counter()
    while (spent := time.perf_counter() - since) < PRODUCT_S or (
        len(taken) < ROUNDS and spent < LONGEST_S
    ):
        taken.append(_timed(call, 1, device))
    return statistics.median(taken)


def _timed(call: Callable[[], object], times: int, device: torch.device) -> float:
    """Seconds of so many calls, to the end of what they have begun on the device."""
    _finish(device)
    since = time.perf_counter()
    for _ in range(times):
        call()
    _finish(device)
    return time.perf_counter() - since


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> int:
    """Bytes that this rank can still take of its device; CPU ranks share the host's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available) // distributed.get_world_size()
