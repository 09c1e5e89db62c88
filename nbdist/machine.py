"""The devices of this machine, as NVML and the operating system tell them; pure.

Any process may ask. NVML is asked and never torch: importing torch costs seconds, and a CUDA
context would take device memory. No GPU, no driver, or no `pynvml` (package nvidia-ml-py):
there are CPUs only.

GPUs are counted as torch counts them: a GPU's index is its place in CUDA_VISIBLE_DEVICES,
where that is set.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from types import ModuleType

CGROUP = Path("/sys/fs/cgroup")
CPU_RANKS = 2
"""Default number of ranks where no GPU is."""

_INDEX = re.compile(r"[0-9]{1,4}")
_BOARD = re.compile(r"-(?:SXM[0-9]?|PCIE|PCIe)(?=-|$)")  # "NVIDIA A100-SXM4-80GB"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU, or MIG instance of one."""

    uuid: str
    """As CUDA_VISIBLE_DEVICES takes it: GPU-... or MIG-..."""
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    """Compute capability; (0, 0) where NVML does not say."""

    @property
    def title(self) -> str:
        """Name with memory: "NVIDIA A100 80GB"."""
        name = _BOARD.sub("", self.name).replace("-", " ")
        return name if "GB" in name else f"{name} {round(self.memory_bytes / 2**30)}GB"


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found here."""

    gpus: tuple[Gpu, ...] = ()
    link: Literal["NVLink", "PCIe"] | None = None
    """Between the visible GPUs; None for fewer than two."""
    num_cpus: int = 1
    """CPUs that this process may run on."""
    memory_bytes: int = 0
    """Of the host, or what this container may take."""
    processor: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Read what `to_json` made."""
        gpus = (Gpu(**{**one, "capability": tuple(one["capability"])}) for one in given["gpus"])
        return cls(**{**given, "gpus": tuple(gpus)})

    def describe(self) -> str:
        """Describe in a few words: "4 x NVIDIA A100 80GB, NVLink", "no GPU: 2 CPU ranks"."""
        if not self.gpus:
            return f"no GPU: {CPU_RANKS} CPU ranks"
        kinds = Counter(gpu.title for gpu in self.gpus)
        gpus = " + ".join(f"{count} x {title}" for title, count in kinds.items())
        return f"{gpus}, {self.link}" if self.link else gpus


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of a cluster that ranks of a session are on."""

    name: str
    ranks: tuple[int, ...]
    machine: Machine
    """With the GPUs of these ranks alone, in their order."""

    def describe(self) -> str:
        """Describe in a few words: "4 x NVIDIA A100 80GB, NVLink, 64 cores"."""
        count = len(self.ranks)
        ranks = f"{count} CPU {'rank' if count == 1 else 'ranks'}"
        devices = self.machine.describe() if self.machine.gpus else ranks
        return f"{devices}, {self.machine.num_cpus} cores"


def to_runs(nodes: Iterable[Node]) -> list[dict[str, Any]]:
    """Nodes as plain values; those in a row that are alike once, with their number.

    Without names and the GPUs' UUIDs, by which no two are alike.
    """
    nameless = ((_without_uuids(one.machine), len(one.ranks)) for one in nodes)
    return [
        {"nodes": len(list(alike)), "ranks": ranks, "machine": machine.to_json()}
        for (machine, ranks), alike in groupby(nameless)
    ]


def _without_uuids(machine: Machine) -> Machine:
    return replace(machine, gpus=tuple(replace(gpu, uuid="") for gpu in machine.gpus))


def from_runs(told: Iterable[Mapping[str, Any]]) -> list[Node]:
    """Read what `to_runs` made; the nodes are named by their numbers."""
    nodes: list[Node] = []
    first = 0
    for one in told:
        machine = Machine.from_json(one["machine"])
        for _ in range(one["nodes"]):
            ranks = tuple(range(first, first + one["ranks"]))
            nodes.append(Node(f"node {len(nodes)}", ranks, machine))
            first += len(ranks)
    return nodes


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory of one GPU at this moment."""

    free_bytes: int
    holders: tuple[str, ...] = ()
    """Other processes that hold memory of it: "python (pid 4711)"."""


def found(*, nvml: Any = None, environ: Mapping[str, str] = os.environ) -> Machine:
    """Find the GPUs that CUDA_VISIBLE_DEVICES leaves visible, and count the CPUs.

    Asks the driver once for each value of CUDA_VISIBLE_DEVICES; initialises no device.

    Args:
        nvml: a module with the functions of `pynvml`, for tests.
        environ: where CUDA_VISIBLE_DEVICES is read.
    """
    nvml = nvml or pynvml()
    gpus, link = _asked(nvml, environ.get("CUDA_VISIBLE_DEVICES")) if nvml else ((), None)
    return Machine(gpus, link, _num_cpus(), host_bytes(), _processor())


def pynvml() -> ModuleType | None:
    """NVML's module, or None where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def host(machine: Machine) -> str:
    """What tells this host from others, but no name of it: "Intel Xeon ... @ 2.5GHz, 2 cores"."""
    return f"{machine.processor}, {machine.num_cpus} cores"


@lru_cache(maxsize=1)
def _processor() -> str:
    """The processor's own name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@lru_cache(maxsize=8)
def _asked(
    nvml: Any, visible: str | None
) -> tuple[tuple[Gpu, ...], Literal["NVLink", "PCIe"] | None]:
    """The visible GPUs and what links them; nothing where NVML does not answer."""
    try:
        with opened(nvml):
            handles = _visible(nvml, visible)
            return tuple(_gpu(nvml, handle) for handle in handles), _link(nvml, handles)
    except nvml.NVMLError:
        return (), None  # no driver, no GPU, or a driver that is broken for CUDA too


@contextmanager
def opened(nvml: Any) -> Iterator[None]:
    """Initialise NVML for a while."""
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _visible(nvml: Any, visible: str | None) -> list[Any]:
    """Handles in the order of CUDA_VISIBLE_DEVICES; as in CUDA, a wrong entry ends the list."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    if visible is None:
        return [_instance(nvml, handle) for handle in handles]
    uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
    chosen: list[Any] = []
    for entry in map(str.strip, visible.split(",")):
        if _INDEX.fullmatch(entry) and int(entry) < len(handles):
            handle = handles[int(entry)]
        elif entry.startswith("MIG-"):
            handle = nvml.nvmlDeviceGetHandleByUUID(entry)
        else:
            # CUDA takes the beginning of a UUID, where only one GPU has it.
            same = [h for h, uuid in zip(handles, uuids, strict=True) if uuid.startswith(entry)]
            if not entry.startswith("GPU-") or len(same) != 1:
                break
            (handle,) = same
        chosen.append(_instance(nvml, handle))
    names = [nvml.nvmlDeviceGetUUID(handle) for handle in chosen]
    return chosen if len(set(names)) == len(names) else []  # as CUDA: one twice hides all


def _instance(nvml: Any, handle: Any) -> Any:
    """Of a GPU in MIG mode its first instance, the only one CUDA then shows; else itself."""
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0]:
            return nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0)
    except nvml.NVMLError:
        return handle  # a GPU without MIG, or already an instance
    return handle


def _gpu(nvml: Any, handle: Any) -> Gpu:
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(_whole(nvml, handle))
    except nvml.NVMLError:
        major, minor = 0, 0
    return Gpu(
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
        capability=(major, minor),
    )


def _whole(nvml: Any, handle: Any) -> Any:
    """The GPU that a MIG instance is part of; else the GPU itself."""
    if not nvml.nvmlDeviceGetUUID(handle).startswith("MIG-"):
        return handle
    return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)


def _link(nvml: Any, handles: Sequence[Any]) -> Literal["NVLink", "PCIe"] | None:
    """NVLink where each GPU reaches the next one by it."""
    if len(handles) < 2:  # noqa: PLR2004 - a link has two ends
        return None
    try:
        states = [
            nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            for one, other in pairwise(handles)
        ]
    except nvml.NVMLError:
        return "PCIe"
    return "NVLink" if all(state == nvml.NVML_P2P_STATUS_OK for state in states) else "PCIe"


def usage(machine: Machine, *, own: Collection[int] = (), nvml: Any = None) -> tuple[Usage, ...]:
    """Free memory of each GPU now, and who else holds some; empty where NVML does not answer.

    Args:
        machine: from `found()`.
        own: processes whose memory counts as free: ranks that a plan would replace.
        nvml: a module with the functions of `pynvml`, for tests.
    """
    nvml = nvml or pynvml()
    if nvml is None or not machine.gpus:
        return ()
    try:
        with opened(nvml):
            return tuple(_usage(nvml, gpu, own) for gpu in machine.gpus)
    except nvml.NVMLError:
        return ()


def _usage(nvml: Any, gpu: Gpu, own: Collection[int]) -> Usage:
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        running = []  # not told on some MIG instances
    ours = sum(one.usedGpuMemory or 0 for one in running if one.pid in own)
    others = tuple(process_name(one.pid) for one in running if one.pid not in own)
    return Usage(nvml.nvmlDeviceGetMemoryInfo(handle).free + ours, others)


def process_name(pid: int) -> str:
    """A process in words: "python (pid 4711)"."""
    import psutil  # 20 ms that a kernel need not wait for when it loads the extension

    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return f"pid {pid}"  # of another container, or ended by now


def host_free_bytes() -> int:
    """Host memory that processes can still take: of the machine, or of this container."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limit, used = (_cgroup_number(name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else min(free, max(0, limit - used))


def host_bytes() -> int:
    """Host memory of this machine, or what this container may take."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_number("memory.max")
    return total if limit is None else min(total, limit)


def _cgroup_number(name: str) -> int | None:
    """A figure of this process's memory cgroup (version 2); None for "max" or without one."""
    try:
        text = (CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
