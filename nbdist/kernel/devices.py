"""The devices of this machine, and which of them a session takes.

Runs in the notebook's kernel, asks NVML and never torch: importing torch there costs
seconds, and a CUDA context in the kernel would take device memory. No GPU, no driver, or
no `pynvml` (package nvidia-ml-py): the session rehearses on CPU ranks.

GPUs are counted as torch counts them: a GPU's index is its place in CUDA_VISIBLE_DEVICES,
where that is set. `Placement.visible` names the same GPUs for the ranks' environment by
UUID, since CUDA's own order (fastest first) is not NVML's (by PCI bus).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from nbdist import strategies
from nbdist.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

CPU_RANKS = 2
"""Default number of ranks where no GPU is."""

_INDEX = re.compile(r"[0-9]{1,4}")
_BOARD = re.compile(r"-(?:SXM[0-9]?|PCIE|PCIe)(?=-|$)")  # "NVIDIA A100-SXM4-80GB"
_FP8_PACKAGES = ("transformer_engine", "torchao")


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

    def describe(self) -> str:
        """Describe in a few words: "4 x NVIDIA A100 80GB, NVLink", "no GPU: 2 CPU ranks"."""
        if not self.gpus:
            return f"no GPU: {CPU_RANKS} CPU ranks"
        kinds = Counter(gpu.title for gpu in self.gpus)
        gpus = " + ".join(f"{count} x {title}" for title, count in kinds.items())
        return f"{gpus}, {self.link}" if self.link else gpus


@dataclass(frozen=True, slots=True)
class Placement:
    """Which devices a session's ranks run on."""

    nproc: int
    devices: tuple[int, ...] | None
    """Index of each rank's GPU, as torch counts them in this kernel; None for CPU ranks."""
    visible: tuple[str, ...] = ()
    """The same GPUs for the ranks' CUDA_VISIBLE_DEVICES; empty for CPU ranks."""

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """What the ranks compute on."""
        return "cpu" if self.devices is None else "cuda"

    def describe(self) -> str:
        """Describe in a few words: "4 ranks on GPUs 0,1,2,3", "2 CPU ranks"."""
        ranks = "rank" if self.nproc == 1 else "ranks"
        if self.devices is None:
            return f"{self.nproc} CPU {ranks}"
        gpus = "GPU" if self.nproc == 1 else "GPUs"
        return f"{self.nproc} {ranks} on {gpus} {','.join(map(str, self.devices))}"


# ---------------------------------------------------------------------------- finding


def found(*, nvml: Any = None, environ: Mapping[str, str] = os.environ) -> Machine:
    """Find the GPUs that CUDA_VISIBLE_DEVICES leaves visible, and count the CPUs.

    Asks the driver once for each value of CUDA_VISIBLE_DEVICES; initialises no device.

    Args:
        nvml: a module with the functions of `pynvml`, for tests.
        environ: where CUDA_VISIBLE_DEVICES is read.
    """
    nvml = nvml or _pynvml()
    gpus, link = _asked(nvml, environ.get("CUDA_VISIBLE_DEVICES")) if nvml else ((), None)
    return Machine(gpus, link, _num_cpus())


def _pynvml() -> ModuleType | None:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


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
        with _opened(nvml):
            handles = _visible(nvml, visible)
            return tuple(_gpu(nvml, handle) for handle in handles), _link(nvml, handles)
    except nvml.NVMLError:
        return (), None  # no driver, no GPU, or a driver that is broken for CUDA too


@contextmanager
def _opened(nvml: Any) -> Iterator[None]:
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


# ---------------------------------------------------------------------------- choosing


def placement(
    nproc: int | str | None, gpus: str | Sequence[int] | None, machine: Machine
) -> Placement:
    """Choose the devices of a session's ranks.

    Args:
        nproc: number of ranks (-n). Default: one for each GPU; without a GPU 2.
        gpus: indices of GPUs (--gpus), "0,2" or a sequence; "none" or an empty sequence
            for CPU ranks. Default: every visible GPU, of which -n N takes the first N.
        machine: from `found()`.

    Raises:
        OptionError: more ranks than devices, an unknown GPU, or a contradiction.
    """
    wanted = None if nproc is None else parse_nproc(nproc)
    chosen = _chosen_gpus(gpus, machine)
    if not chosen:
        return Placement(_cpu_ranks(wanted, machine), None)
    if wanted is not None and wanted > len(chosen):
        raise OptionError(
            f"{wanted} ranks need {wanted} GPUs and there are {len(chosen)}"
            f" ({_listed(chosen)}); use -n {len(chosen)} or fewer,"
            f" or --gpus none for a rehearsal on CPU ranks."
        )
    if wanted is not None and gpus is not None and wanted != len(chosen):
        raise OptionError(
            f"-n {wanted} contradicts --gpus {_listed(chosen)}, which are {len(chosen)} devices;"
            f" leave one of the two out."
        )
    devices = tuple(chosen[:wanted])
    return Placement(len(devices), devices, tuple(machine.gpus[i].uuid for i in devices))


def parse_nproc(given: int | str) -> int:
    """Read a number of ranks: a whole number from 1.

    Raises:
        OptionError: anything else.
    """
    text = str(given).strip()
    if isinstance(given, bool) or not _INDEX.fullmatch(text) or int(text) < 1:
        message = f"-n {_short(given)} is not a number of ranks; use a whole number from 1."
        raise OptionError(message)
    return int(text)


def parse_gpus(text: str) -> tuple[int, ...]:
    """Read "0,2" in the order given; "none" is the empty tuple.

    Raises:
        OptionError: not of this form.
    """
    if text.strip() == "none":
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(map(_INDEX.fullmatch, parts)):
        message = (
            f"--gpus {_short(text)} is not a list of GPUs; use indices such as --gpus 0,2,"
            f" or --gpus none for CPU ranks."
        )
        raise OptionError(message)
    return tuple(map(int, parts))


def hardware(placement: Placement, machine: Machine) -> strategies.Hardware:
    """Say what the strategies must know of the devices; imports no engine."""
    gpus = [machine.gpus[index] for index in placement.devices or ()]
    weakest = min((gpu.capability for gpu in gpus), default=(0, 0))
    return strategies.Hardware(
        kind=placement.kind,
        bf16=weakest >= (8, 0),
        fp8=weakest >= (8, 9) and any(map(_installed, _FP8_PACKAGES)),
        world_size=placement.nproc,
        deepspeed=_installed("deepspeed"),
    )


def _chosen_gpus(gpus: str | Sequence[int] | None, machine: Machine) -> tuple[int, ...]:
    if gpus is None:
        return tuple(range(len(machine.gpus)))
    chosen = parse_gpus(gpus) if isinstance(gpus, str) else tuple(gpus)
    for index in chosen:
        if isinstance(index, bool) or not isinstance(index, int):
            message = f"GPU {_short(index)} is not an index; use whole numbers such as [0, 2]."
            raise OptionError(message)
        if not 0 <= index < len(machine.gpus):
            raise OptionError(_unknown_gpu(index, machine))
    if len(set(chosen)) != len(chosen):
        message = f"--gpus {_listed(chosen)} names a GPU twice; each rank needs its own."
        raise OptionError(message)
    return chosen


def _unknown_gpu(index: int, machine: Machine) -> str:
    if not machine.gpus:
        return f"GPU {index} is not visible: there is none here; leave --gpus out for CPU ranks."
    there = _listed(range(len(machine.gpus)))
    return f"GPU {index} is not visible; use --gpus with some of {there}."


def _cpu_ranks(wanted: int | None, machine: Machine) -> int:
    """Number of CPU ranks: a rehearsal may crowd the CPUs, but not drown them."""
    if wanted is None:
        return CPU_RANKS
    most = max(8, 4 * machine.num_cpus)
    if wanted > most:
        raise OptionError(
            f"{wanted} CPU ranks are too many for {machine.num_cpus} CPUs, each is a process"
            f" with torch loaded; use -n {most} or fewer."
        )
    return wanted


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _listed(indices: Sequence[int]) -> str:
    return ",".join(map(str, indices))


def _short(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 40 else f"{text[:37]}..."  # noqa: PLR2004 - a line's share
