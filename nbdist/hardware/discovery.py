"""The devices of this machine, as reported by NVML and the operating system.

Every process may use this module. It queries NVML and never imports torch, which takes seconds and
whose CUDA context would use device memory. Without a GPU, a driver or the `pynvml` module (package
nvidia-ml-py) only CPUs are reported.

The index of a GPU is its position in CUDA_VISIBLE_DEVICES if that is set, else its number in PCI
bus order, as in nvidia-smi.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from nbdist.hardware import amd

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

CGROUP_FILES = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
"""Files with limit and use of a cgroup, in versions 2 and 1."""
UNLIMITED_BYTES = 2**60  # version 1 uses a huge number for "no limit"
_INACTIVE_FILE = re.compile(r"^inactive_file (\d+)", re.MULTILINE)
DEFAULT_CPU_RANKS = 2
"""Default number of ranks on a machine without GPUs."""

DRIVER = Path("/proc/driver/nvidia/version")
"""Exists if the NVIDIA driver is loaded."""

_INDEX = re.compile(r"[0-9]{1,4}")
_BOARD = re.compile(r"-(?:SXM[0-9]?|PCIE|PCIe)(?=-|$)")  # "NVIDIA A100-SXM4-80GB"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A visible GPU, or a MIG instance of one."""

    uuid: str
    """In the form that CUDA_VISIBLE_DEVICES accepts: GPU-... or MIG-..."""
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    """Compute capability; (0, 0) if NVML does not report it."""

    @property
    def title(self) -> str:
        """Name and memory: "NVIDIA A100 80GB"."""
        name = _BOARD.sub("", self.name).replace("-", " ")
        return name if "GB" in name else f"{name} {round(self.memory_bytes / 2**30)}GB"


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices, CPUs and host memory of a machine."""

    gpus: tuple[Gpu, ...] = ()
    link: Literal["NVLink", "PCIe"] | None = None
    """Interconnect of the visible GPUs; None for fewer than two."""
    num_cpus: int = 1
    """CPUs available to this process."""
    memory_bytes: int = 0
    """Host memory, or the memory limit of this container."""
    processor: str = ""
    warnings: tuple[str, ...] = ()
    """Messages for the user about the GPUs: failures and assumptions."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json()`."""
        gpus = (Gpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in fields["gpus"])
        warnings = tuple(fields.get("warnings", ()))
        return cls(**{**fields, "gpus": tuple(gpus), "warnings": warnings})

    def describe(self) -> str:
        """Return a short summary: "4 x NVIDIA A100 80GB, NVLink", "no GPU: 2 CPU ranks"."""
        if not self.gpus:
            return f"no GPU: {DEFAULT_CPU_RANKS} CPU ranks"
        kinds = Counter(gpu.title for gpu in self.gpus)
        gpus = " + ".join(f"{count} x {title}" for title, count in kinds.items())
        return f"{gpus}, {self.link}" if self.link else gpus


@dataclass(frozen=True, slots=True)
class SessionNode:
    """A machine of a cluster that runs ranks of a session."""

    name: str
    ranks: tuple[int, ...]
    machine: Machine
    """Its GPUs are limited to those of these ranks, in rank order."""

    def describe(self) -> str:
        """Return a short summary: "4 x NVIDIA A100 80GB, NVLink, 64 cores"."""
        count = len(self.ranks)
        ranks = f"{count} CPU {'rank' if count == 1 else 'ranks'}"
        devices = self.machine.describe() if self.machine.gpus else ranks
        return f"{devices}, {self.machine.num_cpus} cores"


def nodes_to_json(nodes: Iterable[SessionNode]) -> list[dict[str, Any]]:
    """Return nodes as JSON values, without their names."""
    return [{"ranks": len(node.ranks), "machine": node.machine.to_json()} for node in nodes]


def nodes_from_json(descriptions: Iterable[Mapping[str, Any]]) -> list[SessionNode]:
    """Rebuild the list from ``nodes_to_json``; the nodes are named by their numbers."""
    nodes: list[SessionNode] = []
    first = 0
    for description in descriptions:
        ranks = tuple(range(first, first + description["ranks"]))
        machine = Machine.from_json(description["machine"])
        nodes.append(SessionNode(f"node {len(nodes)}", ranks, machine))
        first += len(ranks)
    return nodes


@dataclass(frozen=True, slots=True)
class GpuFreeMemory:
    """Current memory usage of one GPU."""

    free_bytes: int
    holders: tuple[str, ...] = ()
    """Other processes that hold memory of the GPU: "python (pid 4711)"."""


def discover_machine() -> Machine:
    """Find the GPUs that CUDA_VISIBLE_DEVICES leaves visible, and count the CPUs.

    Initialises no device. Results without a failure are cached for the life of the process.
    """
    nvml = import_pynvml()
    key = nvml, amd.visible_devices(os.environ), os.environ.get("CUDA_DEVICE_ORDER")
    seen = _answers.get(key, _NvmlQueryResult())
    if nvml and key not in _answers:
        try:
            with open_nvml(nvml):
                seen = _query_gpus(*key)
            if not seen.failures:
                _answers[key] = seen
        except nvml.NVMLError as error:
            maker, tool = ("AMD", "amd-smi") if amd.is_rocm() else ("NVIDIA", "nvidia-smi")
            reason = f"{maker}'s driver does not respond ({error}), so no GPU is used; run {tool}"
            is_loaded = DRIVER.exists() or (amd.is_rocm() and amd.DRIVER.exists())
            seen = _NvmlQueryResult(failures=(reason,) if is_loaded else ())
    return Machine(
        seen.gpus,
        seen.link,
        _num_cpus(),
        host_memory_bytes(),
        _processor(),
        (*seen.failures, *seen.notes),
    )


def import_pynvml() -> Any:
    """Return the NVML module, on ROCm AMD's library in its form; None if it is not installed."""
    if amd.is_rocm():
        return amd.import_amdsmi()
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def host_fingerprint(machine: Machine) -> str:
    """Return a description of the hardware without its host name: "Xeon @ 2.5GHz, 2 cores"."""
    return f"{machine.processor}, {machine.num_cpus} cores"


@lru_cache(maxsize=1)
def _processor() -> str:
    """Processor name from /proc/cpuinfo, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))


class _NvmlQueryResult(NamedTuple):
    gpus: tuple[Gpu, ...] = ()
    link: Literal["NVLink", "PCIe"] | None = None
    failures: tuple[str, ...] = ()
    """Messages about GPUs that are not used."""
    notes: tuple[str, ...] = ()


_answers: dict[tuple[Any, str | None, str | None], _NvmlQueryResult] = {}
"""Successful queries by module and environment."""


def _failures(nvml: Any) -> tuple[type[Exception], ...]:
    mismatch = getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError)
    return (nvml.NVMLError, mismatch)  # pynvml 13.615: an older driver cannot list processes


@contextmanager
def open_nvml(nvml: Any) -> Iterator[None]:
    """Context manager that initialises NVML and shuts it down."""
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _query_gpus(nvml: Any, visible: str | None, order: str | None) -> _NvmlQueryResult:
    """Return the working visible GPUs, their interconnect, and messages about the others."""
    boards, failures = _gpu_handles(nvml)
    chosen = _visible(nvml, visible, boards)
    problems = [failures[index] for index in failures if visible is None or index in chosen]
    handles, gpus = [], []
    for name, handle in chosen.items():
        if handle is None:
            continue
        try:
            gpus.append(_gpu(nvml, handle))
            handles.append(handle)
        except nvml.NVMLError as error:
            problems.append(_excluded_gpu_message(name, error))
    if len({gpu.uuid for gpu in gpus}) < len(gpus):  # CUDA shows no GPU if one is listed twice
        return _NvmlQueryResult(failures=tuple(problems))
    notes = _device_order_warning(nvml, visible, order, boards)
    instances = [i for i, gpu in enumerate(gpus) if gpu.uuid.startswith("MIG-")]
    if instances and len(gpus) > 1:
        # CUDA shows a process a single compute instance, and no whole GPU beside it
        first = instances[0]
        notes.append(
            f"{gpus[first].name} is the only one of {len(gpus)} devices that is used: CUDA shows a"
            " single MIG instance to a process; select another with CUDA_VISIBLE_DEVICES"
        )
        handles, gpus = [handles[first]], [gpus[first]]
    return _NvmlQueryResult(tuple(gpus), _link(nvml, handles), tuple(problems), tuple(notes))


def _gpu_handles(nvml: Any) -> tuple[list[Any], dict[int | str, str]]:
    """Handles in NVML order, None for a GPU that fails, and a message for each failure."""
    handles: list[Any] = []
    failures: dict[int | str, str] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError as error:
            failures[index] = _excluded_gpu_message(index, error)
            handle = None
        handles.append(handle)
    return handles, failures


def _excluded_gpu_message(name: int | str, error: Exception) -> str:
    gpu = f"GPU {name}" if isinstance(name, int) else name
    return f"{gpu} fails ({error}) and is not used; run nvidia-smi"


def _visible(nvml: Any, visible: str | None, boards: Sequence[Any]) -> dict[int | str, Any]:
    """Handles by number or UUID, in the order of CUDA_VISIBLE_DEVICES; None for one that fails.

    As in CUDA, an invalid entry ends the list.
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
        # keep duplicates: the caller rejects a GPU that is listed twice
        chosen[name if name not in chosen else f"entry {number}"] = _instance(nvml, handle)
    return chosen


def _by_uuid(nvml: Any, entry: str, boards: Sequence[Any]) -> Any:
    """Return the GPU or MIG instance with this UUID, or None."""
    if entry.startswith("MIG-"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(entry)
        except nvml.NVMLError:
            return None
    # CUDA accepts a unique prefix of a UUID
    working = [board for board in boards if board is not None]
    same = [board for board in working if nvml.nvmlDeviceGetUUID(board).startswith(entry)]
    return same[0] if entry.startswith("GPU-") and len(same) == 1 else None


def _device_order_warning(
    nvml: Any, visible: str | None, order: str | None, boards: Sequence[Any]
) -> list[str]:
    """Return a warning if CUDA may number the GPUs in a different order than assumed here."""
    # CUDA numbers the fastest GPU first unless CUDA_DEVICE_ORDER is PCI_BUS_ID, and does not
    # document how it ranks them.
    if order == "PCI_BUS_ID" or amd.is_rocm() or not re.search(r"(^|,)\s*[0-9]", visible or ""):
        return []
    kinds = {nvml.nvmlDeviceGetName(board) for board in boards if board is not None}
    if len(kinds) < 2:  # noqa: PLR2004 - one kind has no order
        return []
    sentence = (
        f"CUDA_VISIBLE_DEVICES={visible} is assumed to number GPUs as nvidia-smi does; CUDA may"
        " order different GPUs differently: set CUDA_DEVICE_ORDER=PCI_BUS_ID before Jupyter starts"
    )
    return [sentence]


def driver_cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports; None without a driver."""
    nvml = import_pynvml()
    if nvml is None:
        return None
    try:
        with open_nvml(nvml):
            number = int(nvml.nvmlSystemGetCudaDriverVersion_v2())  # 12080 for 12.8
    except nvml.NVMLError:
        return None
    return number // 1000, number % 1000 // 10


def cuda_visible_devices(uuids: Sequence[str]) -> str:
    """Return CUDA_VISIBLE_DEVICES for these GPUs, for use with CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Numbers, because DeepSpeed 0.19.8 and torch 2.13's inductor parse the variable as numbers.
    UUIDs where the numbering of CUDA and NVML may differ: with MIG instances or a failing GPU.

    Args:
        uuids: GPUs of this machine.
    """
    nvml = import_pynvml()
    by_uuid = ",".join(uuids)
    if nvml is None:
        return by_uuid
    try:
        with open_nvml(nvml):
            boards, failures = _gpu_handles(nvml)
            if failures or any(_in_mig_mode(nvml, board) for board in boards):
                return by_uuid
            numbers = {nvml.nvmlDeviceGetUUID(board): i for i, board in enumerate(boards)}
    except nvml.NVMLError:
        return by_uuid
    if not numbers.keys() >= set(uuids):
        return by_uuid
    return ",".join(str(numbers[uuid]) for uuid in uuids)


def _instance(nvml: Any, handle: Any) -> Any:
    """Return the first instance of a GPU in MIG mode, the only one CUDA shows; else the GPU."""
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
    uuid = nvml.nvmlDeviceGetUUID(handle)
    try:
        whole = handle
        if uuid.startswith("MIG-"):
            whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(whole)
    except nvml.NVMLError:
        major, minor = 0, 0
    try:
        memory_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError as error:
        # NVML reports no memory of a GPU that shares the host's
        if getattr(error, "value", None) != nvml.NVML_ERROR_NOT_SUPPORTED:
            raise
        memory_bytes = host_memory_bytes()
    return Gpu(uuid, nvml.nvmlDeviceGetName(handle), memory_bytes, (major, minor))


def _link(nvml: Any, handles: Sequence[Any]) -> Literal["NVLink", "PCIe"] | None:
    """Return NVLink if every GPU is connected to the next one by it."""
    if len(handles) < 2:  # noqa: PLR2004 - a link has two ends
        return None
    try:
        states = [
            nvml.nvmlDeviceGetP2PStatus(handle, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            for handle, other in pairwise(handles)
        ]
    except nvml.NVMLError:
        return "PCIe"
    return "NVLink" if all(state == nvml.NVML_P2P_STATUS_OK for state in states) else "PCIe"


def gpu_memory_usage(machine: Machine, *, own: Collection[int] = ()) -> tuple[GpuFreeMemory, ...]:
    """Return the free memory and other users of each GPU; empty if NVML does not respond.

    Args:
        machine: from ``discover_machine()``.
        own: processes whose memory counts as free: ranks that a plan would replace.
    """
    nvml = import_pynvml()
    if nvml is None or not machine.gpus:
        return ()
    try:
        with open_nvml(nvml):
            return tuple(_free_memory(nvml, gpu, own) for gpu in machine.gpus)
    except _failures(nvml):
        return ()


def _free_memory(nvml: Any, gpu: Gpu, own: Collection[int]) -> GpuFreeMemory:
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        running = None  # not reported on some MIG instances
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    unlisted = not running and memory.used > _MAX_DRIVER_BYTES
    if own and (unlisted or hides_processes(running, own)):
        return GpuFreeMemory(memory.free + memory.used, ())
    known = running or ()
    ours = sum(process.usedGpuMemory or 0 for process in known if process.pid in own)
    others = tuple(process_name(process.pid) for process in known if process.pid not in own)
    return GpuFreeMemory(memory.free + ours, others)


_MAX_DRIVER_BYTES = 1 << 30
"""Memory in use by the driver itself is below this."""


def hides_processes(running: Sequence[Any] | None, own: Collection[int]) -> bool:
    """Return True if NVML's process ids cannot be matched with those of this session.

    In a container NVML lists the host's process ids, or none.

    Args:
        running: processes on a GPU, as NVML lists them; None if it does not.
        own: process ids of this session, as seen in this container.
    """
    import psutil

    if running is None:
        return True
    ours = [process for process in running if process.pid in own]
    if ours:
        return any(process.usedGpuMemory is None for process in ours)
    return not all(psutil.pid_exists(process.pid) for process in running)


class GpuRefusal(NamedTuple):
    """The reason why a GPU accepts no further process, and the remedy."""

    says: str
    do: str


def refusal(nvml: Any, gpu: Gpu, *, own: Collection[int] = ()) -> GpuRefusal | None:
    """Check a GPU's compute mode; None if ranks can use the GPU.

    Args:
        nvml: a module with the functions of `pynvml`, initialised.
        gpu: the GPU.
        own: processes of this session.
    """
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        mode = nvml.nvmlDeviceGetComputeMode(handle)
        running = [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    except _failures(nvml):
        return None  # not reported on some MIG instances
    ask = f"ask the administrator to run: nvidia-smi -i {gpu.uuid} -c DEFAULT"
    if mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
        return GpuRefusal("its compute mode is PROHIBITED", ask)
    import psutil  # as in `process_name`

    others = [pid for pid in running if pid not in own]
    if mode != nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS or not others:
        return None
    says = "its compute mode is EXCLUSIVE_PROCESS, and"
    torch = sys.modules.get("torch")
    uses_cuda = torch is not None and torch.cuda.is_initialized()
    # in a container NVML reports a different pid for this process
    if os.getpid() in others or (uses_cuda and not any(map(psutil.pid_exists, others))):
        do = "restart the kernel and use CUDA in %%distribute cells only"
        return GpuRefusal(f"{says} this notebook's own process uses it", do)
    return GpuRefusal(f"{says} {', '.join(map(process_name, others))} uses it", ask)


def process_name(pid: int) -> str:
    """Return name and process id: "python (pid 4711)"."""
    import psutil  # takes 20 ms; not needed when the extension loads

    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return f"pid {pid}"  # in another container, or already ended


def host_free_memory_bytes() -> int:
    """Return the available host memory of the machine or, if less, of this container."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limits = cgroup_limits(find_memory_events_file())
    return min([free, *(max(0, limit - used) for limit, used in limits)])


def host_memory_bytes() -> int:
    """Return the host memory of the machine or, if less, the limit of this container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for limit, _ in cgroup_limits(find_memory_events_file()))])


def cgroup_limits(events: Path | None) -> list[tuple[int, int]]:
    """Return limit and use in bytes of a memory cgroup and of its parents, where they have a limit.

    The cgroup is that of a file from ``find_memory_events_file``. The page cache of files that are
    not in use is left out, because Linux frees it first.
    """
    found = []
    for folder in events.parents if events else ():
        for limit_file, used_file in CGROUP_FILES.items():
            limit, used = read_text(folder / limit_file), read_text(folder / used_file)
            if limit.isdecimal() and int(limit) < UNLIMITED_BYTES:
                idle = _INACTIVE_FILE.search(read_text(folder / "memory.stat"))
                found.append((int(limit), int(used or 0) - int(idle[1] if idle else 0)))
    return found


def find_memory_events_file(
    own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Path | None:
    """Return the file that counts kills by the OOM killer; None if the machine has none.

    Args:
        own: list of the process's cgroups.
        root: mount point of cgroups.
    """
    candidates = []
    for line in read_text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if "memory" in controllers.split(","):
            # In a container the path may be the host's; the mount is the cgroup itself then.
            mount = root / "memory"
            candidates += [mount / inside / "memory.oom_control", mount / "memory.oom_control"]
        elif not controllers:
            candidates += [root / inside / "memory.events", root / "memory.events"]
    return next((path for path in candidates if path.exists()), None)


def read_text(path: Path | None) -> str:
    """Return a file's stripped text; "" if it is missing or not readable by this user."""
    if path is None:
        return ""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
