"""Moving a 100 MB tensor: to both ranks and back from one, beside the rivals and the floor."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import time
from multiprocessing import shared_memory
from typing import TYPE_CHECKING

import numpy as np
import rival_packages
from kernels import Kernel
from results import Row, middle, ms

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.queues import SimpleQueue
    from multiprocessing.synchronize import Event

ROUNDS = 5
ELEMENTS = 25_000_000  # of float32: 100 MB
SETUP = f"""
import time, torch
tensor = torch.randn({ELEMENTS})
array = tensor.numpy()

def seconds(move):
    begin = time.perf_counter()
    move()
    return time.perf_counter() - begin
"""
Times = dict[str, dict[str, list[float]]]
"""Seconds by direction ("push", "pull") and by who moved."""


def measure(others: rival_packages.Rivals) -> Iterator[Row]:
    """Rows about 100 MB; one transfer of each in turns."""
    with Kernel(sys.executable) as ours, others.kernel() as ipp, others.kernel() as nbd:
        prepare(ours, ipp, nbd)
        times: Times = {"push": {}, "pull": {}}
        for number in range(-1, ROUNDS):
            for direction, name, value in one_round(ours, ipp, nbd):
                if number >= 0:  # the first round touches memory for the first time
                    times[direction].setdefault(name, []).append(value)
        rival_packages.stop_ipyparallel(ipp)
    yield from rows(times)


def prepare(ours: Kernel, ipp: Kernel, nbd: Kernel) -> None:
    """Start all sessions and make the tensor in each kernel."""
    ours.run("%load_ext nbdist")
    ours.run("%%distribute -n 2\npass")
    ours.run(SETUP + "import nbdist\nsession = nbdist.session()")
    rival_packages.start_ipyparallel(ipp)
    ipp.run(SETUP + "view, broadcast = rc[:], rc.broadcast_view()")
    rival_packages.start_nbdistributed(nbd)
    nbd.run(SETUP)


def one_round(ours: Kernel, ipp: Kernel, nbd: Kernel) -> Iterator[tuple[str, str, float]]:
    """Direction, who and seconds of each transfer; the rivals by every way they have."""
    down, up = floor()
    yield "push", "floor", down
    yield "push", "nbdist", timed(ours, "session.push(tensor=tensor)")
    yield "push", "ipyparallel", timed(ipp, "view.push({'tensor': tensor}, block=True)")
    yield "push", "ipyparallel, array", timed(ipp, "view.push({'array': array}, block=True)")
    yield (
        "push",
        "ipyparallel, broadcast",
        timed(ipp, "broadcast.push({'array': array}, block=True)"),
    )
    set_it = "communication.send_to_all('set_var', {'name': 'tensor', 'value': tensor})"
    yield "push", "nbdistributed", timed(nbd, set_it)
    yield "pull", "floor", up
    yield "pull", "nbdist", timed(ours, "session.pull('tensor')")
    yield "pull", "ipyparallel", timed(ipp, "rc[0].pull('tensor', block=True)")
    yield "pull", "ipyparallel, array", timed(ipp, "rc[0].pull('array', block=True)")
    yield "pull", "nbdistributed", timed(nbd, "communication.send_to_rank(0, 'get_var', 'tensor')")


def timed(kernel: Kernel, move: str) -> float:
    """Seconds of one call inside a kernel."""
    return float(kernel.value(f"seconds(lambda: {move})"))


def rows(times: Times) -> Iterator[Row]:
    """Each direction against the floor and against the best of the rival_packages."""
    words = {"push": "100 MB tensor to two ranks", "pull": "100 MB tensor back from one rank"}
    for direction, name in words.items():
        p50 = {who: middle(values) for who, values in times[direction].items()}
        ours, bottom = p50.pop("nbdist"), p50.pop("floor")
        best = min(p50, key=p50.__getitem__)
        yield Row(
            name=f"{name}, against copies in shared memory",
            value=ours / bottom,
            unit="x",
            limit=2,
            detail=f"{ms(ours)} / {ms(bottom)}",
        )
        yield Row(
            name=f"{name}, against the best rival",
            value=ours / p50[best],
            unit="x",
            limit=0.5,
            detail=f"{ms(ours)} / {ms(p50[best])} ({best})",
        )


def floor() -> tuple[float, float]:
    """Seconds of plain copies through shared memory: in and out by two, in and out by one."""
    source = np.random.default_rng(0).standard_normal(ELEMENTS, dtype=np.float32)
    block = shared_memory.SharedMemory(create=True, size=source.nbytes)
    try:
        begin = time.perf_counter()
        shared: np.ndarray = np.ndarray(source.shape, source.dtype, buffer=block.buf)
        shared[:] = source
        copy_in = time.perf_counter() - begin
        del shared
        return copy_in + copies_out(block.name, 2), copy_in + copies_out(block.name, 1)
    finally:
        block.close()
        block.unlink()


def copies_out(name: str, readers: int) -> float:
    """Seconds until all readers, released at once, have a copy of their own."""
    context = mp.get_context("fork")
    go, done = context.Event(), context.SimpleQueue()
    processes = [context.Process(target=copy_out, args=(name, go, done)) for _ in range(readers)]
    for process in processes:
        process.start()
    for _ in processes:
        done.get()  # attached
    begin = time.perf_counter()
    go.set()
    for _ in processes:
        done.get()
    seconds = time.perf_counter() - begin
    for process in processes:
        process.join()
    return seconds


def copy_out(name: str, go: Event, done: SimpleQueue[int]) -> None:
    """Attach, wait, copy; runs in a process of its own."""
    block = shared_memory.SharedMemory(name=name)
    shared: np.ndarray = np.ndarray((ELEMENTS,), np.float32, buffer=block.buf)
    done.put(os.getpid())
    go.wait()
    shared.copy()
    done.put(os.getpid())
    os._exit(0)  # the parent owns the block; its resource tracker must not hear of this end
