"""The checks, in the order in which they run: the most decisive first.

A check yields pairs: whether a bar holds (None: only reported), and what was measured in words. It
takes its session from the lab. `items` are the rows of docs/gpu.md that it decides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import importlib.util
import itertools
import json
import math
import os
import shutil
import signal
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import rank_code

from nbdist import CellError, CellInterrupted, RankDied
from nbdist.errors import StartError, SwitchError
from nbdist.hardware import discovery
from nbdist.planner import prediction_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from worker import Lab

    from nbdist import Session

    Finding = tuple[bool | None, str]
    Findings = Generator[Finding, None, None]
    Run = Callable[[Lab], Findings]

MIB = 1 << 20
NEAR_BYTES = 64 * MIB
"""Two readings of a device's memory that mean the same may differ by this."""
STOP_S = 10.0
"""From Stop to the prompt."""
REPORTED_S = 15.0
"""Until a hang or a death is reported."""
SMALL = rank_code.TINY | {"hidden": 256, "layers": 4, "length": 128, "batch": 4}
BACKENDS = ("zero2", "zero1", "zero3", "fsdp2", "ddp", "fsdp1")
FALLS = "the loss falls by at least 0.7 of plain torch's"


class Skip(Exception):  # noqa: N818 - no error
    """A check cannot run here; says why."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One check of the table."""

    name: str
    bar: str
    run: Run
    items: str = ""
    cost: int = 15
    """Seconds that it is expected to take, with new ranks."""
    gpus: int = 1

    @property
    def limit(self) -> int:
        """Seconds after which it is killed."""
        return 60 + 3 * self.cost


CHECKS: list[Check] = []


def check(items: str = "", cost: int = 15, gpus: int = 1) -> Callable[[Run], Run]:
    """Add a function to the checks; its name and docstring are the check's name and bar."""

    def added(run: Run) -> Run:
        bar = " ".join((run.__doc__ or "").split()).rstrip(".")
        CHECKS.append(Check(run.__name__.replace("_", "-"), bar, run, items, cost, gpus))
        return run

    return added


# ---------------------------------------------------------------------------- helpers


def mib(count: float) -> str:
    return f"{count / MIB:,.0f} MiB"


def values(session: Session, code: str) -> dict[int, Any]:
    """The value of a cell on each rank; nothing is shown."""
    return dict(session.run(code, output="none").values)


def value(session: Session, code: str) -> Any:
    """The value of a cell on rank 0."""
    return values(session, code)[0]


def prepared(lab: Lab, sizes: dict[str, int] | None = None, **options: Any) -> Session:
    """A session that has trained three steps."""
    session = lab.session(fresh=True, **options)
    session.run(f"prepare({sizes or SMALL!r})\ntrain(3)", output="none")
    return session


def until(happened: Callable[[], object], limit_s: float) -> float:
    """Seconds until something is so; infinite where it is not in time."""
    began = time.monotonic()
    while not happened():
        if time.monotonic() - began > limit_s:
            return math.inf
        time.sleep(0.05)
    return time.monotonic() - began


def stopped(session: Session, code: str, when: Callable[[], object]) -> tuple[float, int, str]:
    """Run a cell and press Stop when something is so, and again after 5 s, three times at most.

    Returns seconds from the first Stop to the prompt, the number of Stops, and what was reported.
    """
    presses: list[float] = []
    over = threading.Event()

    def press() -> None:
        until(lambda: over.is_set() or when(), 3 * REPORTED_S)
        while len(presses) < 3 and not over.is_set():
            presses.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
            over.wait(5)

    thread = threading.Thread(target=press)
    words = "the cell ended by itself"
    thread.start()
    try:
        session.run(code, output="none")
    except CellInterrupted as error:
        words = str(error)
    finally:
        ended = time.monotonic()
        over.set()
        thread.join()
    return ended - presses[0] if presses else math.inf, len(presses), words


def after(session: Session, seconds: float) -> Callable[[], bool]:
    """Whether the cell has been running for so long."""
    return lambda: (
        session.running is not None and time.time() - session.running.started_at > seconds
    )


def usable(session: Session, loss: float | None = None) -> Findings:
    """All ranks compute together; the model, if any, has the same loss and trains on."""
    expected = float(sum(range(1, session.world_size + 1)))
    sums = values(session, "total(rank + 1)")
    yield all(one[0] == expected for one in sums.values()), "the process group works"
    if loss is None:
        return
    now, *more = value(session, "train(3)")
    same = abs(now - loss) <= 0.02 * abs(loss)
    yield same, f"loss {loss:.4f} before, {now:.4f} after"
    yield more[-1] < now, f"trains on to {more[-1]:.4f}"


def levels(session: Session) -> list[dict[str, int]]:
    """What each rank holds now, without gradients."""
    found = values(session, "optimizer.zero_grad()\nlevel()")
    return [found[rank] for rank in sorted(found)]


def next_loss(session: Session) -> float:
    """Loss of the weights as they are."""
    loss: float = value(session, "model(input_ids=tokens, labels=tokens).loss.item()")
    return loss


# ---------------------------------------------------------------------------- starting


@check(items="A4 A9 A10 B6 E", cost=40)
def start(lab: Lab) -> Findings:
    """Each rank computes on its own GPU, none from a bad fork; threads of all ranks <=
    cores; the launcher holds no device memory.
    """
    began = time.monotonic()
    session = lab.session()
    yield None, f"{session.describe()}, first start {time.monotonic() - began:.1f} s"
    ranks = values(session, rank_code.STANDING)
    first = ranks[0]
    yield None, f"CUDA {first['cuda']}, NCCL {first['nccl']}, sm {first['capability']}"
    kind = "cpu" if lab.rehearse else "cuda"
    good = all(one["device"].startswith(kind) and one["computed"] == 3 for one in ranks.values())
    yield good, f"devices {[one['device'] for one in ranks.values()]}"
    yield not any(one["bad_fork"] for one in ranks.values()), "no bad fork"
    threads, cores = sum(one["threads"] for one in ranks.values()), len(os.sched_getaffinity(0))
    yield threads <= max(cores, len(ranks)), f"{threads} threads on {cores} cores"
    gpus = discovery.discover_machine().gpus
    if any(gpu.uuid.startswith("MIG-") for gpu in gpus):
        yield None, "MIG: CUDA tells no UUID to compare"
    elif not lab.rehearse:
        same = all(gpus[rank].uuid.endswith(one["uuid"]) for rank, one in ranks.items())
        yield same, f"UUIDs in NVML's order: {same}"
    launchers = {one["pid"] for one in session.status()["launchers"]}
    yield not launchers & holders(), f"NVML names {len(holders())} holders"


def of_each_gpu(ask: Callable[[Any, Any], Any]) -> list[Any]:
    """What `ask(nvml, handle)` says of each visible GPU."""
    gpus = discovery.discover_machine().gpus
    nvml: Any = discovery.import_pynvml()
    if not gpus:
        return []
    with discovery.open_nvml(nvml):
        return [ask(nvml, nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)) for gpu in gpus]


def used_bytes() -> list[int]:
    """Memory in use of each GPU, by all processes."""
    return of_each_gpu(lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).used))


def holders() -> set[int]:
    """Processes that hold memory of a GPU; in a container perhaps by others' numbers."""
    lists = of_each_gpu(lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return {process.pid for processes in lists for process in processes}


@check(items="A7")
def device_before(lab: Lab) -> Findings:
    """What was used before a rank's context, within 64 MiB of NVML."""
    session = lab.session()
    code = "from nbdist.worker.memory import memory_probe as m\nm.current_probe.device_before_bytes"
    found = values(session, code)
    for rank, before in found.items():
        idle = 0 if lab.rehearse else lab.idle_bytes[rank]
        good = abs(before - idle) <= NEAR_BYTES
        yield good, f"rank {rank}: {mib(before)}, idle {mib(idle)}"


# ---------------------------------------------------------------------------- training


def trains(lab: Lab, *, backend: str, precision: str, **options: Any) -> Findings:
    """Train, and compare with torch alone on the same data."""
    wanted = precision
    if lab.rehearse and precision == "fp16":
        precision = "no"
        yield None, "fp16 is refused on CPU ranks: rehearsed without"
    session = lab.session(backend=backend, precision=precision, fresh=True, **options)
    clip, steps = options.get("clip"), 10 if lab.rehearse else 20
    fused = clip is not None and not backend.startswith("zero")
    plain = value(session, f"plainly({SMALL!r}, {steps}, {precision!r}, {clip!r})")
    session.run(f"prepare({SMALL!r}{', fused=True' * fused})", output="none")
    losses = value(session, f"train({steps})")
    drop, expected = losses[0] - losses[-1], plain[0] - plain[-1]
    # fp8 learns more slowly in a model this small, as with Accelerate alone.
    least = (0.5 if precision == "fp8" else 0.7) * expected
    yield drop >= least, f"loss {losses[0]:.3f} to {losses[-1]:.3f}, torch {plain[-1]:.3f}"
    where = value(session, "str(next(model.parameters()).device), accelerator.mixed_precision")
    yield lab.judged(where[1] == wanted), f"{where[0]}, {where[1]}"
    yield until(lambda: len(session.metrics), 5) < 5, f"{len(session.metrics)} rows of metrics"


def add_training(backend: str, precision: str) -> None:
    """Add a check of one backend and precision; fp16 clips, with a fused optimizer where it can."""
    clip = 0.5 if precision == "fp16" else None
    run = partial(trains, backend=backend, precision=precision, clip=clip)
    fused = ", clipped, fused optimizer" if clip and not backend.startswith("zero") else ""
    items = "A5 C8" if clip else "A1" if backend in {"zero1", "zero2"} else ""
    CHECKS.append(Check(f"train-{precision}-{backend}", f"Trains{fused}; {FALLS}", run, items))


for _backend in BACKENDS:
    add_training(_backend, "bf16")


# ---------------------------------------------------------------------------- planner, profile


def planned(lab: Lab, *, backend: str) -> Findings:
    """Compare the plan of a prepared model with the allocator's own figures."""
    from nbdist.planner import measurement_store
    from nbdist.session import planner

    session = prepared(lab, lab.sizes, backend=backend, precision="bf16")
    figures = session.measured()[0]
    measurement_store.store_path().unlink(missing_ok=True)  # what this session has stored
    checked = planner.compare_with_measured(session)
    predicted = checked.allocated.predicted_bytes
    if figures is None or not figures.allocated_bytes or predicted is None:
        yield False, f"nothing was measured: {figures}"
        return
    off = (predicted - figures.allocated_bytes) / figures.allocated_bytes
    yield lab.judged(abs(off) <= 0.05), f"tensors {mib(figures.allocated_bytes)}, plan {off:+.1%}"
    peak = value(session, "torch.cuda.max_memory_allocated(device) if cuda else 0")
    if lab.rehearse or figures.device_bytes is None:
        return
    same = peak >= figures.allocated_bytes
    yield same, f"torch's own peak {mib(peak)}, reserved {mib(figures.reserved_bytes or 0)}"
    device = checked.device.predicted_bytes or 0
    off = (device - figures.device_bytes) / figures.device_bytes
    yield abs(off) <= 0.08, f"device {mib(figures.device_bytes)}, plan {off:+.1%}"
    margin = prediction_errors.margin_of(backend, "closed form", calibrated=False).total
    yield figures.device_bytes <= device * (1 + margin), f"within the margin of {margin:.1%}"


def add_planned(backend: str) -> None:
    """Add a check of one backend."""
    bar = "Tensors within 5 %, the device within 8 % (unlearned), no false fit"
    run = partial(planned, backend=backend)
    CHECKS.append(Check(f"plan-{backend}", bar, run, "A7 planner", 20))


add_planned("fsdp2")
add_planned("ddp")


@check(items="A6", cost=40)
def profiled(lab: Lab) -> Findings:
    """Parts sum to the step within 3 %; the device computes; each collective has bytes; the
    trace has kernels; 0 < MFU < 1; FLOPs within 10 %; the peak within 5 % of torch's.
    """
    session = prepared(lab, lab.sizes, precision="bf16")
    folder = lab.work / "profile"
    session.run("train(40)", output="none", profile={"steps": 10, "trace": folder})
    profile = session.profiles[-1]
    for one in profile.ranks:
        whole = sum(one.parts.values())
        yield abs(whole - one.step_s) <= 0.03 * one.step_s, f"parts {whole:.4f} of {one.step_s:.4f}"
        computed = [one.parts[part] > 0 for part in ("forward", "backward", "optimizer")]
        yield all(computed), f"forward, backward, optimizer computed: {computed}"
        if session.world_size > 1:
            moved = {kind.name: kind.bytes for kind in one.traffic}
            yield bool(moved) and all(moved.values()), f"bytes {moved}"
        yield one.memory is not None, f"memory {sorted(one.memory.parts) if one.memory else None}"
        peak = value(session, "torch.cuda.max_memory_allocated(device) if cuda else 0")
        counted = sum(one.memory.parts.values()) if one.memory else 0
        near = abs(counted - peak) <= 0.05 * peak
        yield lab.judged(near), f"counted {mib(counted)}, torch's peak {mib(peak)}"
        with gzip.open(one.trace) as file:
            events = json.load(file)["traceEvents"]
        kernels = sum(event.get("cat") == "kernel" for event in events)
        yield lab.judged(kernels > 0), f"{kernels} kernels in the trace"
    mfu, ours = profile.mfu, profile.model_flops
    yield lab.judged(mfu is not None and 0 < mfu < 1), f"MFU {mfu}"
    counted = float(value(session, rank_code.COUNTED))
    off = math.inf if ours is None else (ours - counted) / counted
    yield lab.judged(abs(off) <= 0.1), f"FLOPs {off:+.1%} of those counted"


@check(items="C6", cost=5)
def descriptors(lab: Lab) -> Findings:
    """A rank opens no more files than nbdist expects at the start."""
    from nbdist.cluster import launcher_process

    session = lab.session()
    session.run("total(1)", output="none")
    room = launcher_process.RANK_BASE + launcher_process.RANK_EACH * session.world_size
    for rank, figures in values(session, "level()").items():
        yield figures["descriptors"] <= room, f"rank {rank}: {figures['descriptors']} of {room}"


# ---------------------------------------------------------------------------- two GPUs


@check(cost=10, gpus=2)
def collectives(lab: Lab) -> Findings:
    """Five collectives of three dtypes give the right sums."""
    wrong = values(lab.session(), rank_code.COLLECTIVES)
    yield not any(wrong.values()), f"wrong: {wrong}"


@check(cost=30, gpus=2)
def contexts(lab: Lab) -> Findings:
    """A background save makes no context on GPU 0: it grows by 64 MiB more than the last at most"""
    session = prepared(lab, backend="fsdp2")
    before = used_bytes()
    session.save("contexts", overwrite=True, wait=True)
    grown = [after - b for after, b in zip(used_bytes(), before, strict=True)]
    if lab.rehearse:
        yield None, "saved"
        return
    first, *_, last = grown[: lab.ranks]
    yield first - last <= NEAR_BYTES, f"GPU 0 {mib(first)}, the last {mib(last)}"


def renewed(lab: Lab, *, backend: str) -> Findings:
    """Stop while rank 0 waits for the others in a collective; the model goes on."""
    session = prepared(lab, backend=backend)
    loss = next_loss(session)
    lines: list[str] = []

    def hang() -> bool:
        lines[:] = [session.standstill] if session.standstill else []
        return bool(lines)

    seconds, stops, words = stopped(session, rank_code.ALONE, hang)
    yield bool(lines), f"reported: {lines[0] if lines else 'nothing'}"
    yield seconds <= STOP_S, f"prompt {seconds:.1f} s after Stop ({stops}): {words}"
    yield from usable(session, loss)


for _backend in sorted(BACKENDS):
    _bar = "The hang is reported; prompt 10 s after Stop; the model trains on with the same loss"
    _run = partial(renewed, backend=_backend)
    CHECKS.append(Check(f"stop-in-collective-{_backend}", _bar, _run, "A2 A3 C1", 30, 2))


@check(items="A2", cost=25, gpus=2)
def error_in_collective(lab: Lab) -> Findings:
    """Told in 15 s; the others are freed."""
    session = prepared(lab)
    loss, began = next_loss(session), time.monotonic()
    try:
        session.run("if rank == 0:\n    raise ValueError('planted')\ntotal(1)", output="none")
        yield False, "no error was reported"
    except CellError as error:
        seconds = time.monotonic() - began
        yield "planted" in str(error), f"reported after {seconds:.1f} s: {str(error)[:80]}"
        yield seconds <= REPORTED_S, f"within {REPORTED_S:.0f} s"
    yield from usable(session, loss)


RUNS_AHEAD = """
for step in range(9):
    if rank == 0 and step == 3:
        raise ValueError("planted")
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad()
"""


@check(items="A2", cost=25, gpus=2)
def error_in_training(lab: Lab) -> Findings:
    """No rank steps without the gradients of one that fails; the model trains on."""
    session = prepared(lab)
    try:
        session.run(RUNS_AHEAD, output="none")
        yield False, "no error was reported"
    except CellError as error:
        yield "planted" in str(error), f"reported: {str(error)[:80]}"
    yield from usable(session, next_loss(session))


@check(items="B1", cost=60, gpus=2)
def stop_in_loop(lab: Lab) -> Findings:
    """Ten Stops in a loop of all_reduce: each <= 10 s."""
    session = prepared(lab)
    loss = next_loss(session)
    loop = "t = torch.ones(8, device=device)\nfor _ in range(10**7):\n    dist.all_reduce(t)"
    times = 3 if lab.rehearse else 10
    taken = [stopped(session, loop, after(session, 1))[0] for _ in range(times)]
    yield max(taken) <= STOP_S, f"slowest {max(taken):.1f} s of {len(taken)}"
    yield from usable(session, loss)


@check(cost=40, gpus=2)
def death_in_collective(lab: Lab) -> Findings:
    """Told in 15 s, memory back in 10 s, new ranks work."""
    session = lab.session(fresh=True)
    began = session.run(rank_code.ALONE, output="none", background=True)
    until(after(session, 2), 10)
    killed_at = time.monotonic()
    os.kill(session.status()["ranks"][1]["pid"], signal.SIGKILL)
    try:
        began.wait(2 * REPORTED_S)
        yield False, "the death was not reported"
    except RankDied as death:
        seconds = time.monotonic() - killed_at
        yield seconds <= REPORTED_S, f"reported after {seconds:.1f} s: {death.headline[:80]}"
    seconds = until(lambda: at_idle(lab), 10)
    yield seconds <= 10, f"memory back after {seconds:.1f} s"
    session = lab.session(fresh=True)
    yield from usable(session)


def at_idle(lab: Lab) -> bool:
    """Whether the GPUs hold what they held before the session."""
    pairs = zip(used_bytes(), lab.idle_bytes, strict=True)
    return all(now - before <= NEAR_BYTES for now, before in pairs)


@check(items="B2", cost=40, gpus=2)
def fault_in_switch(lab: Lab) -> Findings:
    """A rank fails in the exchange of a switch: reported in 60 s, all is as before."""
    session = prepared(lab, backend="fsdp2")
    loss = next_loss(session)
    session.run(rank_code.PLANTED, output="none")
    lab.changed()
    began = time.monotonic()
    try:
        session.switch("zero2")
        yield False, "the switch did not fail"
    except SwitchError as error:
        seconds = time.monotonic() - began
        yield "planted" in str(error), f"reported after {seconds:.1f} s: {str(error)[:120]}"
        yield seconds <= 60, f"{seconds:.0f} s"
    yield from usable(session, loss)
    yield session.switch("zero2").verified > 0, "the next switch works"


# ---------------------------------------------------------------------------- Stop, memory


@check(items="A2", cost=35)
def stop_on_device(lab: Lab) -> Findings:
    """Two Stops give the prompt back from a rank in cudaStreamSynchronize; new ranks work
    in 60 s.
    """
    session = lab.session()
    session.run("kept = 1", output="none")
    lab.changed()
    lines: list[str] = []

    def waits() -> bool:
        lines[:] = [session.standstill] if session.standstill else lines
        return bool(lines) or after(session, 8)()

    seconds, stops, words = stopped(session, rank_code.WAIT_FOR_THE_DEVICE, waits)
    yield None, f"before Stop: {lines or 'nothing'}"
    yield stops <= 2, f"{stops} Stops, {seconds:.1f} s: {words}"
    began = time.monotonic()
    yield from usable(lab.session(fresh=True))
    yield time.monotonic() - began <= 60, f"new ranks in {time.monotonic() - began:.1f} s"


@check(items="C2", cost=12)
def graph_capture(lab: Lab) -> Findings:
    """10 captures, each right behind report(), are valid."""
    session = lab.session()
    rows = len(session.metrics)
    failures = values(session, rank_code.CAPTURE)
    if lab.rehearse:
        yield None, "no graphs on a CPU: report() alone"
    yield not any(failures.values()), f"failures: {failures}"
    until(lambda: len(session.metrics) >= rows + 11, 5)
    arrived = sum(math.isfinite(one) for one in session.metrics["captured"])
    yield arrived == 10, f"{arrived} of 10 values arrived"


for _backend in ("ddp", "zero2", "fsdp2"):
    add_training(_backend, "fp16")


# ---------------------------------------------------------------------------- switches


def grown(first: dict[str, int], last: dict[str, int]) -> Iterator[Finding]:
    """What two visits of the same backend differ by."""
    bars = {"allocated": 16 * MIB, "pinned": NEAR_BYTES, "device": 256 * MIB}
    for name, most in bars.items():
        if name in first:
            more = last[name] - first[name]
            yield more <= most, f"{name} {mib(more)} more"
    more = last["descriptors"] - first["descriptors"]
    yield more <= 32, f"{more} more descriptors"


def every_pair() -> list[str]:
    """A walk over all 30 changes of the six backends, each once, that begins and ends at DDP."""
    names = sorted(BACKENDS)
    left = {name: [other for other in names if other != name] for name in names}
    walk, stack = [], ["ddp"]
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


def walked(lab: Lab, session: Session, walk: list[str]) -> Findings:
    """Switch along a walk; compare the last visit of each backend with its first."""
    first: dict[str, list[dict[str, int]]] = {}
    last: dict[str, list[dict[str, int]]] = {}
    loss, seconds, worst = next_loss(session), [], 0.0
    for backend in walk:
        report = session.switch(backend)
        lab.changed()
        seconds.append(report.total_s)
        if not report.verified:
            yield False, f"nothing was verified on the way to {backend}"
        now = next_loss(session)
        worst, loss = max(worst, abs(now - loss)), now
        last[backend] = levels(session)
        first.setdefault(backend, last[backend])
    yield worst <= 0.02 * abs(loss), f"{len(walk)} switches, loss moved by {worst:.4f} at most"
    yield None, f"slowest {max(seconds):.1f} s"
    for backend, before in first.items():
        for rank, figures in enumerate(before):
            for good, text in grown(figures, last[backend][rank]):
                if good is False or (backend == walk[-1] and rank == 0):
                    yield good, f"{backend}, rank {rank}: {text}"


@check(items="A11", cost=90)
def switch_matrix(lab: Lab) -> Findings:
    """All 30 switches between six backends; every tensor verified; the loss stays; device,
    page-locked memory and descriptors are back at the level of the first visit.
    """
    walk = every_pair()[1:]
    assert len(walk) == 30
    yield from walked(lab, prepared(lab), walk)


def offloaded(lab: Lab, *, backend: str, to: str) -> Findings:
    """Train with optimizer state in host memory or on a disk."""
    offload = f"nvme:{lab.work / 'nvme'}" if to == "nvme" else to
    (lab.work / "nvme").mkdir(exist_ok=True)
    try:
        yield from trains(lab, backend=backend, precision="bf16", offload=offload)
    except StartError as error:
        lab.changed()
        words = str(error).partition(" End of the log:")[0]  # the log may name anything
        if "nvcc" in words or "CUDA_HOME" in words:
            toolkit = shutil.which("nvcc") or os.environ.get("CUDA_HOME")
            yield not toolkit, f"no CUDA toolkit; refused with: {words[:200]}"
        elif "libaio" in words or "is not on PATH" in words:
            raise Skip(words) from None
        else:
            raise


for _backend, _to in (("zero2", "cpu"), ("fsdp2", "cpu"), ("zero3", "nvme")):
    _bar = f"Trains; {FALLS}" + "; without a CUDA toolkit the refusal names nvcc" * (_to == "nvme")
    _run, _cost = partial(offloaded, backend=_backend, to=_to), 30 if _backend == "fsdp2" else 90
    _items = "A8" if _to == "nvme" else "A11"
    CHECKS.append(Check(f"offload-{_to}-{_backend}", _bar, _run, _items, _cost))


for _backend in ("zero3", "fsdp1", "zero1"):
    add_training(_backend, "fp16")


@check(items="A11", cost=60)
def switch_offload(lab: Lab) -> Findings:
    """Page-locked memory is given back with the offload; a second visit holds no more."""
    session = prepared(lab, lab.sizes, backend="fsdp2")
    visits = [levels(session)[0]]
    for changes in (
        {"backend": "zero2", "offload": "cpu"},
        {"backend": "fsdp2", "offload": "none"},
    ) * 2:
        session.switch(**changes)
        lab.changed()
        session.run("train(2)", output="none")
        visits.append(levels(session)[0])
    if "pinned" in visits[0]:
        more = visits[2]["pinned"] - visits[0]["pinned"]
        yield more <= NEAR_BYTES, f"after the first: pinned {mib(more)} more"
    yield from grown(visits[2], visits[4])


@check(items="C8", cost=25)
def switch_fp16(lab: Lab) -> Findings:
    """The gradient scale goes along; the loss stays."""
    if lab.rehearse:
        yield None, "fp16 is refused on CPU ranks: rehearsed without"
    session = prepared(lab, precision="no" if lab.rehearse else "fp16")
    scale = "accelerator.scaler.get_scale() if accelerator.scaler is not None else 0.0"
    scales = [value(session, scale)]
    for backend in ("fsdp2", "zero2", "ddp"):
        loss = next_loss(session)
        session.switch(backend)
        lab.changed()
        now = next_loss(session)
        yield abs(now - loss) <= 0.02 * abs(loss), f"{backend}: loss {loss:.4f} to {now:.4f}"
        if backend != "zero2":  # DeepSpeed has a scaler of its own
            scales.append(value(session, scale))
    yield len(set(scales)) == 1, f"scales {scales}"
    yield value(session, "train(3)")[-1] < now, "trains on"


@check(cost=60)
def compiled(lab: Lab) -> Findings:
    """Trains with --compile; the loss falls by at least 0.7 of plain torch's."""
    yield from trains(lab, backend="ddp", precision="bf16", compile=True)


@check(items="C3", cost=75)
def cudagraph_pools(lab: Lab) -> Findings:
    """With --compile and CUDA graphs, two switches away and back leave no pools behind."""
    session = lab.session(fresh=True, compile=True)
    graphs = "torch._inductor.config.triton.cudagraphs = True"  # what mode="reduce-overhead" sets
    session.run(f"{graphs}\nprepare({SMALL!r})\ntrain(3)", output="none")
    visits = [levels(session)[0]]
    for backend in ("fsdp2", "ddp") * (1 if lab.rehearse else 2):
        session.switch(backend)
        lab.changed()
        session.run("train(3)", output="none")
        visits.append(levels(session)[0])
    for before, now in zip(visits[::2], visits[2::2], strict=False):
        yield from grown(before, now)


@check(items="C4", cost=75)
def switch_1b(lab: Lab) -> Findings:
    """Building is at most a third of a switch of 1.3B."""
    large = {"hidden": 2048, "layers": 24, "vocab": 32_000, "length": 512, "batch": 1}
    sizes = rank_code.TINY if lab.rehearse else large
    session = lab.session(backend="fsdp2", fresh=True)
    session.run(f"prepare({sizes!r}, on=device)\ntrain(2)", output="none")
    before = levels(session)[0]
    for backend in ("zero3", "ddp", "fsdp2"):
        report = session.switch(backend)
        lab.changed()
        phases = {name: round(seconds, 1) for name, seconds in report.seconds.items()}
        speed = report.state_bytes / MIB / report.total_s
        yield None, f"{backend}: {report.total_s:.1f} s, {speed:,.0f} MiB/s, {phases}"
        share = report.seconds.get("building", 0) / report.total_s
        yield lab.judged(share <= 1 / 3), f"building {share:.0%}"
    yield from grown(before, levels(session)[0])


@check(items="C5", cost=120, gpus=2)
def fifty_switches(lab: Lab) -> Findings:
    """After 50 switches a rank holds at most 256 MiB and 32 descriptors more than after 5."""
    session = prepared(lab, backend="fsdp2")
    steps = itertools.islice(itertools.cycle(("zero3", "zero2", "fsdp2")), 50)
    yield from walked(lab, session, [*steps, "fsdp2"][: 6 if lab.rehearse else 51])


# ---------------------------------------------------------------------------- what remains


@check(items="C7", cost=25)
def memory_history(lab: Lab) -> Findings:
    """A profile leaves a user's recording and peak alone."""
    session = lab.session(fresh=True)
    size = MIB if lab.rehearse else 8 << 30
    session.run(
        f"prepare({lab.sizes!r})\npeak = torch.empty({size}, dtype=torch.uint8, device=device)\n"
        "del peak\nif cuda:\n    torch.cuda.memory._record_memory_history()\ntrain(4)",
        output="none",
    )
    session.run("train(20)", output="none", profile={"steps": 5})
    peak = "torch.cuda.max_memory_allocated(device) if cuda else 0"
    yield lab.judged(value(session, peak) >= size), "own peak survives the third step and a profile"
    on = value(session, "torch._C._cuda_isHistoryEnabled() if cuda else False")
    yield lab.judged(on), f"recording goes on: {on}"
    memory = session.profiles[-1].ranks[0].memory
    held = value(session, "level().get('device', 0)")
    num_bytes = (memory and memory.device_bytes) or 0
    yield lab.judged(num_bytes <= held), f"profile: {mib(num_bytes)}, the device holds {mib(held)}"


@check(items="C8", cost=40)
def fp8(lab: Lab) -> Findings:
    """Trains in fp8, where torchao or Transformer Engine is there; the loss falls by at least half
    of plain torch's.
    """
    engines = [n for n in ("torchao", "transformer_engine") if importlib.util.find_spec(n)]
    if lab.rehearse or not engines:
        raise Skip("no fp8 on CPU ranks" if lab.rehearse else "neither torchao nor TE is installed")
    if discovery.discover_machine().gpus[0].capability < (8, 9):
        raise Skip(f"fp8 needs compute capability 8.9: {discovery.discover_machine().describe()}")
    yield from trains(lab, backend="ddp", precision="fp8")
    yield None, f"with {engines}"


@check(items="B4", cost=20)
def own_memory(lab: Lab) -> Findings:
    """What this session holds counts as free in a plan."""
    from nbdist.session import planner

    session = lab.session(fresh=True)
    size = MIB if lab.rehearse else 4 << 30
    session.run(f"held = torch.zeros({size}, dtype=torch.uint8, device=device)", output="none")
    for rank, device in enumerate(planner.cluster_spec(session).devices):
        idle = 0 if lab.rehearse else lab.idle_bytes[rank]
        short = device.memory_bytes - idle - device.free_bytes
        yield lab.judged(short <= size // 2), f"rank {rank}: {mib(short)} are not counted as free"


@check(cost=15)
def stop_in_kernels(lab: Lab) -> Findings:
    """Stop among long kernels: prompt in 10 s, variables kept."""
    session = lab.session()
    session.run("kept = rank", output="none")
    seconds, stops, words = stopped(session, rank_code.LONG_KERNELS, after(session, 2))
    yield seconds <= STOP_S, f"{seconds:.1f} s, {stops} Stops: {words}"
    yield value(session, "kept") == 0, "variables kept"


@check(cost=20)
def out_of_memory(lab: Lab) -> Findings:
    """Told as an OOM; the memory is back; the model trains on."""
    if lab.rehearse:
        raise Skip("a CPU rank would fill the machine's memory")
    session = prepared(lab)
    before = value(session, "torch.cuda.empty_cache()\nlevel()")
    try:
        code = "[torch.empty(1 << 30, dtype=torch.uint8, device=device) for _ in range(10_000)]"
        session.run(code, output="none")
        yield False, "the device could not be filled"
    except CellError as error:
        yield "OutOfMemory" in str(error), f"reported: {str(error)[:80]}"
    yield from grown(before, value(session, "torch.cuda.empty_cache()\nlevel()"))
    yield from usable(session, next_loss(session))


@check(cost=15)
def killed(lab: Lab) -> Findings:
    """The death is reported; memory is back in 5 s."""
    session = prepared(lab)
    lab.changed()
    os.kill(session.status()["ranks"][0]["pid"], signal.SIGKILL)
    began = time.monotonic()
    with contextlib.suppress(RankDied):
        session.run("total(1)", output="none")
        yield False, "the death was not reported"
    yield session.death is not None, f"reported: {str(session.death)[:80]}"
    seconds = until(lambda: at_idle(lab), 5)
    yield seconds <= 5, f"memory back {time.monotonic() - began:.1f} s after the kill"


@check()
def calibrate(lab: Lab) -> Findings:
    """Products, memory and copies between half of the catalogue and the peak; all memory given
    back."""
    from nbdist.planner import step_time
    from nbdist.session import planner

    session = lab.session()
    before, held = planner.cluster_spec(session), values(session, "level()")
    device, figures = before.slowest_device, session.calibrate().figures[0]
    for kind, speed in figures["products"].items():
        share = speed / device.peak_flops("no" if kind == "fp32" else kind)
        expected = speed / device.sustained_flops("no" if kind == "fp32" else kind)
        good = share <= 1 and expected >= 0.5
        yield lab.judged(good), f"{kind} {share:.2f} of the peak, {expected:.2f} of the catalogue"
    share = figures["memory"] / device.memory_bandwidth
    yield lab.judged(0.5 <= share <= 1), f"memory {share:.2f}"
    if copies := figures.get("copies"):
        share = copies["to_device_pinned"] / device.pcie
        yield lab.judged(share <= 1.05), f"page-locked copies {share:.2f} of PCIe"
    for name, curve in figures["curves"].items():
        size, seconds = curve[-1]
        ratio = seconds / step_time.collective_time_s(name, size, before)
        yield lab.judged(ratio <= 3), f"{name} {ratio:.2f} of the catalogue's time"
    kept = values(session, "level()")
    pinned = max(kept[rank].get("pinned", 0) - held[rank].get("pinned", 0) for rank in kept)
    yield pinned <= 0, f"{mib(pinned)} stay page-locked"


for _backend in ("zero2", "zero3", "zero1"):
    add_planned(_backend)


@check(items="B3", cost=130, gpus=2)
def after_renewal(lab: Lab) -> Findings:
    """Ranks that were freed from a collective are alive 90 s later."""
    session = prepared(lab)
    loss = next_loss(session)
    stopped(session, rank_code.ALONE, lambda: session.standstill)
    waited = until(lambda: session.death, 5 if lab.rehearse else 90)
    yield waited == math.inf, f"after the wait: {session.death or 'all alive'}"
    yield from usable(session, loss)


@check(items="C9")
def several_machines(_lab: Lab) -> Findings:
    """NCCL between machines, its heartbeats and the store."""
    yield from ()
    raise Skip("needs two machines with GPUs in one cluster; this script runs on one")


@check(cost=10)
def nothing_left(lab: Lab) -> Findings:
    """After stop() no process of ours, and the memory of before."""
    lab.session()
    lab.stop()
    children = psutil.Process().children(recursive=True)
    seconds = until(lambda: not any(one.is_running() for one in children), 5)
    yield seconds <= 5, f"processes gone after {seconds:.1f} s"
    seconds = until(lambda: at_idle(lab), 10)
    yield seconds <= 10, f"memory back after {seconds:.1f} s"
