"""The devices of this machine, as NVML and the operating system report them.

Any process may ask. NVML is asked and never torch: importing torch costs seconds, and a CUDA
context would take device memory. No GPU, no driver, or no `pynvml` (package nvidia-ml-py):
there are CPUs only.

A GPU's index is its place in CUDA_VISIBLE_DEVICES where that is set, else its number by PCI
bus, which is what nvidia-smi shows.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from types import ModuleType

CGROUP = Path("/sys/fs/cgroup")
CPU_RANKS = 2
"""Default number of ranks where no GPU is."""

DRIVER = Path("/proc/driver/nvidia/version")
"""There where NVIDIA's driver is loaded."""

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
    def is_instance(self) -> bool:
        """Whether it is a MIG instance."""
        return self.uuid.startswith("MIG-")

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
    warnings: tuple[str, ...] = ()
    """What the user should know of the GPUs: which ones fail, what was assumed."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Read what `to_json` made."""
        gpus = (Gpu(**{**one, "capability": tuple(one["capability"])}) for one in given["gpus"])
        warnings = tuple(given.get("warnings", ()))
        return cls(**{**given, "gpus": tuple(gpus), "warnings": warnings})

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

    Without names, the GPUs' UUIDs and warnings, by which no two are alike.
    """
    nameless = ((_without_names(one.machine), len(one.ranks)) for one in nodes)
    return [
        {"nodes": len(list(alike)), "ranks": ranks, "machine": machine.to_json()}
        for (machine, ranks), alike in groupby(nameless)
    ]


def _without_names(machine: Machine) -> Machine:
    gpus = tuple(replace(gpu, uuid="") for gpu in machine.gpus)
    return replace(machine, gpus=gpus, warnings=())


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


def found(
    *, nvml: Any = None, environ: Mapping[str, str] = os.environ, driver: Path = DRIVER
) -> Machine:
    """Find the GPUs that CUDA_VISIBLE_DEVICES leaves visible, and count the CPUs.

    Initialises no device. An answer without a failure is kept for the life of the process.

    Args:
        nvml: a module with the functions of `pynvml`, for tests.
        environ: where CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are read.
        driver: a file that is there where the driver is.
    """
    nvml = nvml or pynvml()
    variables = environ.get("CUDA_VISIBLE_DEVICES"), environ.get("CUDA_DEVICE_ORDER")
    seen = _cached(nvml, *variables, driver) if nvml else _Seen()
    return Machine(
        seen.gpus, seen.link, _num_cpus(), host_bytes(), _processor(), (*seen.failures, *seen.notes)
    )


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


class _Seen(NamedTuple):
    """What NVML has answered."""

    gpus: tuple[Gpu, ...] = ()
    link: Literal["NVLink", "PCIe"] | None = None
    failures: tuple[str, ...] = ()
    """Sentences on GPUs that were left out."""
    notes: tuple[str, ...] = ()


_answers: dict[tuple[Any, str | None, str | None], _Seen] = {}
"""Of calls that did not fail, by module and environment."""


def _cached(nvml: Any, visible: str | None, order: str | None, driver: Path) -> _Seen:
    key = nvml, visible, order
    if key in _answers:
        return _answers[key]
    try:
        with opened(nvml):
            seen = _seen(nvml, visible, order)
    except nvml.NVMLError as error:
        failure = f"NVIDIA's driver does not answer ({error}), so no GPU is used; run nvidia-smi"
        return _Seen(failures=(failure,) if driver.exists() else ())
    if not seen.failures:
        _answers[key] = seen
    return seen


def _failures(nvml: Any) -> tuple[type[Exception], ...]:
    """What NVML raises, and pynvml 13.615 where an older driver cannot list processes."""
    return (nvml.NVMLError, getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError))


@contextmanager
def opened(nvml: Any) -> Iterator[None]:
    """Initialise NVML for a while."""
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _seen(nvml: Any, visible: str | None, order: str | None) -> _Seen:
    """The visible GPUs that work, what links them, and what there is to say of them."""
    boards, failures = _boards(nvml)
    chosen = _visible(nvml, visible, boards)
    told = [failures[index] for index in failures if visible is None or index in chosen]
    handles, gpus = [], []
    for name, handle in chosen.items():
        if handle is None:
            continue
        try:
            gpus.append(_gpu(nvml, handle))
            handles.append(handle)
        except nvml.NVMLError as error:
            told.append(_left_out(name, error))
    if len({gpu.uuid for gpu in gpus}) < len(gpus):  # as CUDA: one twice hides all
        return _Seen(failures=tuple(told))
    notes = _assumed(nvml, visible, order, boards)
    instances = [i for i, gpu in enumerate(gpus) if gpu.is_instance]
    if instances and len(gpus) > 1:
        # CUDA shows a process one compute instance, and beside it no whole GPU
        kept = instances[0]
        notes.append(
            f"{gpus[kept].name} is the only one of {len(gpus)} devices that is used: CUDA shows a"
            " process a single MIG instance; CUDA_VISIBLE_DEVICES chooses another"
        )
        handles, gpus = [handles[kept]], [gpus[kept]]
    return _Seen(tuple(gpus), _link(nvml, handles), tuple(told), tuple(notes))


def _boards(nvml: Any) -> tuple[list[Any], dict[int | str, str]]:
    """Handles in NVML's order, None for a GPU that fails, and a sentence on each of those."""
    handles: list[Any] = []
    failures: dict[int | str, str] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError as error:
            failures[index] = _left_out(index, error)
            handle = None
        handles.append(handle)
    return handles, failures


def _left_out(name: int | str, error: Exception) -> str:
    gpu = f"GPU {name}" if isinstance(name, int) else name
    return f"{gpu} fails ({error}) and is left out; run nvidia-smi"


def _visible(nvml: Any, visible: str | None, boards: Sequence[Any]) -> dict[int | str, Any]:
    """Handles by number or UUID, in the order of CUDA_VISIBLE_DEVICES; None for one that fails.

    As in CUDA a wrong entry ends the list.
    """
    if visible is None:
        return {i: _instance(nvml, handle) for i, handle in enumerate(boards)}
    chosen: dict[int | str, Any] = {}
    for number, entry in enumerate(map(str.strip, visible.split(","))):
        name: int | str = entry
        if _INDEX.fullmatch(entry) and int(entry) < len(boards):
            name = int(entry)
            handle = boards[name]
        else:
            handle = _by_uuid(nvml, entry, boards)
            if handle is None:
                break
        # named twice, it must be seen twice
        chosen[name if name not in chosen else f"entry {number}"] = _instance(nvml, handle)
    return chosen


def _by_uuid(nvml: Any, entry: str, boards: Sequence[Any]) -> Any:
    """The GPU or MIG instance with this UUID; None where there is none."""
    if entry.startswith("MIG-"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(entry)
        except nvml.NVMLError:
            return None
    # CUDA takes the beginning of a UUID, where only one GPU has it
    working = [board for board in boards if board is not None]
    same = [board for board in working if nvml.nvmlDeviceGetUUID(board).startswith(entry)]
    return same[0] if entry.startswith("GPU-") and len(same) == 1 else None


def _assumed(nvml: Any, visible: str | None, order: str | None, boards: Sequence[Any]) -> list[str]:
    """Say which GPUs numbers in CUDA_VISIBLE_DEVICES were taken to mean, where CUDA may differ.

    CUDA counts the fastest first unless CUDA_DEVICE_ORDER is PCI_BUS_ID, and says nowhere what
    it takes for fast.
    """
    if order == "PCI_BUS_ID" or not re.search(r"(^|,)\s*[0-9]", visible or ""):
        return []
    kinds = {nvml.nvmlDeviceGetName(board) for board in boards if board is not None}
    if len(kinds) < 2:  # noqa: PLR2004 - a difference has two sides
        return []
    sentence = (
        f"CUDA_VISIBLE_DEVICES={visible} is taken to count GPUs as nvidia-smi does; CUDA may count"
        " unlike GPUs in another order: set CUDA_DEVICE_ORDER=PCI_BUS_ID before Jupyter starts"
    )
    return [sentence]


def cuda_visible_devices(uuids: Sequence[str], *, nvml: Any = None) -> str:
    """CUDA_VISIBLE_DEVICES for these GPUs, to be used with CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Numbers, since DeepSpeed (0.19.8) and torch's inductor (2.13) read the variable as such. UUIDs
    where CUDA may not count as NVML does: beside MIG instances, or a GPU that fails.

    Args:
        uuids: of GPUs of this machine.
        nvml: a module with the functions of `pynvml`, for tests.
    """
    nvml = nvml or pynvml()
    by_uuid = ",".join(uuids)
    if nvml is None:
        return by_uuid
    try:
        with opened(nvml):
            boards, failures = _boards(nvml)
            if failures or any(_in_mig_mode(nvml, board) for board in boards):
                return by_uuid
            numbers = {nvml.nvmlDeviceGetUUID(board): i for i, board in enumerate(boards)}
    except nvml.NVMLError:
        return by_uuid
    if not numbers.keys() >= set(uuids):
        return by_uuid
    return ",".join(str(numbers[uuid]) for uuid in uuids)


def _instance(nvml: Any, handle: Any) -> Any:
    """Of a GPU in MIG mode its first instance, the only one CUDA then shows; else itself."""
    if handle is None or not _in_mig_mode(nvml, handle):
        return handle
    try:
        return nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0)
    except nvml.NVMLError:
        return handle


def _in_mig_mode(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:
        return False  # a GPU without MIG, or already an instance


def _gpu(nvml: Any, handle: Any) -> Gpu:
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(_whole(nvml, handle))
    except nvml.NVMLError:
        major, minor = 0, 0
    return Gpu(
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        memory_bytes=_memory_bytes(nvml, handle),
        capability=(major, minor),
    )


def _memory_bytes(nvml: Any, handle: Any) -> int:
    """A GPU's memory; the host's where they share it, and NVML counts none of its own."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError as error:
        if getattr(error, "value", None) == nvml.NVML_ERROR_NOT_SUPPORTED:
            return host_bytes()
        raise


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
    except _failures(nvml):
        return ()


def _usage(nvml: Any, gpu: Gpu, own: Collection[int]) -> Usage:
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        running = None  # not told on some MIG instances
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    unlisted = not running and memory.used > _DRIVERS_OWN
    if own and (unlisted or hides_processes(running, own)):
        return Usage(memory.free + memory.used, ())
    known = running or ()
    ours = sum(process.usedGpuMemory or 0 for process in known if process.pid in own)
    others = tuple(process_name(process.pid) for process in known if process.pid not in own)
    return Usage(memory.free + ours, others)


_DRIVERS_OWN = 1 << 30
"""The driver itself has less of a GPU's memory in use."""


def hides_processes(running: Sequence[Any] | None, own: Collection[int]) -> bool:
    """Whether NVML does not tell our processes from others.

    In a container it has the host's pids, which are no process here, or none.

    Args:
        running: processes on a GPU, as NVML lists them; None where it does not.
        own: pids of our processes, as this container has them.
    """
    import psutil

    if running is None:
        return True
    ours = [process for process in running if process.pid in own]
    if ours:
        return any(process.usedGpuMemory is None for process in ours)
    return not all(psutil.pid_exists(process.pid) for process in running)


class Refusal(NamedTuple):
    """Why a GPU takes no further process, and what to do."""

    says: str
    do: str


def refusal(nvml: Any, gpu: Gpu, *, own: Collection[int] = ()) -> Refusal | None:
    """Look at a GPU's compute mode; None where ranks can use it.

    Args:
        nvml: a module with the functions of `pynvml`, initialised.
        gpu: the GPU.
        own: processes of this session.
    """
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        mode = nvml.nvmlDeviceGetComputeMode(handle)
        running = [one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    except _failures(nvml):
        return None  # not told on some MIG instances
    ask = f"ask who runs the machine: nvidia-smi -i {gpu.uuid} -c DEFAULT"
    if mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
        return Refusal("its compute mode lets nobody use it", ask)
    import psutil  # as in `process_name`

    others = [pid for pid in running if pid not in own]
    if mode != nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS or not others:
        return None
    says = "its compute mode is EXCLUSIVE_PROCESS, and"
    if os.getpid() in others or (_uses_cuda() and not any(map(psutil.pid_exists, others))):
        do = "restart the kernel and use CUDA in %%distribute cells only"
        return Refusal(f"{says} this notebook's own process uses it", do)
    return Refusal(f"{says} {', '.join(map(process_name, others))} uses it", ask)


def _uses_cuda() -> bool:
    """Whether this very process does; in a container NVML tells its number on the host."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


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
