"""Checks of this machine: limits, ports, environment variables, leftovers of sessions, GPUs."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import sys
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from nbdist.cluster import launcher_process, run_dir
from nbdist.cluster.allocation import format_names
from nbdist.doctor.finding import (
    is_secret_name,
    note,
    ok,
    problem,
    redacted_variable,
)
from nbdist.hardware import amd, discovery, process_identity
from nbdist.number_formatting import format_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

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
    *, ranks: int | None = None, checkpoints: Path | str | None = None
) -> Iterator[Finding]:
    """Check the limits of this machine.

    Args:
        ranks: number of ranks of the session. Default: that of a new session.
        checkpoints: folder of checkpoints, or their URL without a password. Default: the folder
            of a new session.
    """
    ranks = ranks or len(discovery.discover_machine().gpus) or discovery.DEFAULT_CPU_RANKS
    yield check_shared_memory(_disk_space(run_dir.SHARED_MEMORY))
    yield check_file_descriptors(
        launcher_process.descriptor_limit(), launcher_process.descriptors_needed(ranks), ranks
    )
    yield check_host_memory(
        discovery.host_free_memory_bytes(), discovery.host_memory_bytes(), ranks
    )
    if isinstance(checkpoints, str):
        yield ok("checkpoints", f"written to {checkpoints}")
    else:
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
    space, nearest = _disk_space(folder), _nearest_folder(folder)
    if space is None or not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
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
    nearest = _nearest_folder(folder)
    if not os.access(nearest, os.R_OK):
        return None
    usage = shutil.disk_usage(nearest)
    return DiskSpace(usage.total, usage.free)


def _nearest_folder(folder: Path) -> Path:
    """Return a folder, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


# -- ports -----------------------------------------------------------------------------------------

LOOPBACK = "127.0.0.1"
LOOPBACK_TIMEOUT_S = 1.0


def check_ports(pids: Iterable[int] = ()) -> Iterator[Finding]:
    """Check loopback and list listeners that other machines can reach.

    Args:
        pids: process ids of the launcher, the ranks and their children.
    """
    error = loopback_error()
    if error:
        do = "ranks connect over loopback: allow it in the firewall and bring up the interface lo"
        yield problem("loopback", f"{LOOPBACK} does not work: {error}", do)
    else:
        yield ok("loopback", f"{LOOPBACK} works")
    if session := exposed_listeners(pids):
        message = (
            "the session listens on addresses that other machines can reach:"
            f" {format_names(session)}"
        )
        do = "close it if code in a cell opened it; otherwise report this as a bug of nbdist"
        yield problem("ports", message, do)
    else:
        yield ok("ports", "launcher and ranks listen on loopback only")
    if kernel := exposed_listeners([os.getpid()]):
        message = (
            f"this kernel listens on addresses that other machines can reach:"
            f" {format_names(kernel)}"
        )
        do = "opened by Jupyter or a library: start kernels with ip 127.0.0.1"
        yield note("ports", message, do)


def loopback_error() -> str:
    """Return why loopback does not work, or "" if a byte was received."""
    try:
        with (
            closing(socket.create_server((LOOPBACK, 0))) as server,
            closing(socket.create_connection(server.getsockname(), LOOPBACK_TIMEOUT_S)) as client,
        ):
            server.settimeout(LOOPBACK_TIMEOUT_S)
            with closing(server.accept()[0]) as connection:
                client.sendall(b"x")
                connection.settimeout(LOOPBACK_TIMEOUT_S)
                received = connection.recv(1)
                return "" if received == b"x" else "the received byte differs from the sent one"
    except OSError as error:
        return str(error)


def exposed_listeners(pids: Iterable[int]) -> list[str]:
    """Return non-loopback listening addresses of processes: "0.0.0.0:29500 (pid 4711)"."""
    addresses = []
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            list_connections = getattr(process, "net_connections", None) or process.connections
            for connection in list_connections("inet"):  # psutil 6 renamed it
                if connection.status != psutil.CONN_LISTEN:
                    continue
                address = ipaddress.ip_address(connection.laddr.ip.partition("%")[0])
                if not (getattr(address, "ipv4_mapped", None) or address).is_loopback:
                    addresses.append(f"{connection.laddr.ip}:{connection.laddr.port} (pid {pid})")
    return addresses


# -- environment variables -------------------------------------------------------------------------

OVERWRITTEN_VARIABLES = frozenset(
    {"CUDA_DEVICE_ORDER", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "DS_ACCELERATOR"}
)
"""Variables that nbdist sets for its ranks, whatever value they have here."""
SLOW_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for every CUDA kernel",
    "TORCH_DISTRIBUTED_DEBUG": "collectives are checked, which makes them slower",
    "NCCL_DEBUG": "NCCL writes to each rank's log",
    "NCCL_P2P_DISABLE": "GPUs communicate through host memory",
    "NCCL_SHM_DISABLE": "GPUs communicate over the network",
}
_OFF = frozenset({"", "0", "OFF", "WARN", "VERSION"})
RELEVANT_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_", "DEEPSPEED_", "DS_")


def check_environment(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check the kernel's environment. Secrets are counted but never shown.

    Args:
        environ: the environment, for tests.
    """
    stale = sorted(environ.keys() - launcher_process.remove_launch_variables(environ).keys())
    names = [name for name in stale if not name.startswith(("JPY_", "NBDIST_"))]
    if names:
        message = f"set by another launcher and not passed to the ranks: {format_names(names, 8)}"
        yield note(
            "environment",
            message,
            "no action needed, unless you also use another launcher in this notebook",
        )
    for name, effect in SLOW_VARIABLES.items():
        if environ.get(name, "").upper() not in _OFF:
            message = f"{redacted_variable(name, environ[name])}: {effect}"
            yield note("environment", message, f"unset {name} if you do not need it")
    for name in sorted(OVERWRITTEN_VARIABLES & environ.keys()):
        message = (
            f"{redacted_variable(name, environ[name])} has no effect on ranks: nbdist sets its own"
        )
        yield note("environment", message, "no action needed")
    handled = {*stale, *SLOW_VARIABLES, *OVERWRITTEN_VARIABLES}
    others = [
        name
        for name in sorted(environ)
        if name.startswith(RELEVANT_PREFIXES) and name not in handled
    ]
    if others:
        variables = [redacted_variable(name, environ[name]) for name in others]
        message = f"ranks inherit {format_names(variables, 8)}"
        yield note(
            "environment", message, "unset those that you do not need before you start Jupyter"
        )
    secrets = sum(map(is_secret_name, environ))
    yield ok(
        "environment", f"{len(environ)} variables, {secrets} of them hidden because of their names"
    )


# -- leftovers -------------------------------------------------------------------------------------


def check_stale_resources(
    found: run_dir.OrphanResources | None = None, *, shm: Path = process_identity.SHM_FOLDER
) -> Iterator[Finding]:
    """List leftovers that the next start removes, and those of unknown origin, which it keeps.

    Args:
        found: leftovers that certainly belong to nbdist. Default: search for them.
        shm: shared memory folder, in which files of unknown processes may be.
    """
    found = run_dir.find_orphans() if found is None else found
    kinds = {
        "processes": found.processes,
        "folders": found.folders,
        "shared tensors": found.shared_memory_files,
    }
    if found:
        message = "; ".join(
            f"{name}: {format_names(resources)}" for name, resources in kinds.items() if resources
        )
        do = "no action needed: the next start (%load_ext, %%distribute) removes them"
        yield note("leftovers", f"left by killed sessions: {message}", do)
    else:
        yield ok("leftovers", "none")
    unknown = []
    for path in shm.glob("nccl-*"):
        with suppress(OSError):  # already removed
            if path.lstat().st_uid == os.getuid():
                unknown.append(path)
    for root in run_dir.private_folder_roots():
        for folder in filter(process_identity.is_private, root.glob("nbdist-*")):
            owner = process_identity.read_owner(folder)
            if owner is not None and not owner.is_checkable:
                unknown.append(folder)
    unknown = process_identity.filter_unused(unknown)
    if unknown:
        message = f"the owner of these is not visible from here: {format_names(unknown)}"
        do = (
            "if none of your processes runs in another container or on another machine, remove them"
        )
        yield note("leftovers", message, do)


# -- GPUs ------------------------------------------------------------------------------------------


def check_gpus(
    *,
    own: Collection[int] = (),
    driver: Path = discovery.DRIVER,
) -> Iterator[Finding]:
    """Check the GPUs through NVML. CUDA is not used: a context would take device memory.

    Args:
        own: ids of this session's processes.
        driver: a file that exists if the driver is installed.
    """
    nvml = discovery.import_pynvml()
    cpu_ranks = f"a session has {discovery.DEFAULT_CPU_RANKS} CPU ranks"
    if nvml is None and amd.is_rocm() and amd.DRIVER.exists():
        message = "AMD's driver is installed but cannot be queried: amdsmi is missing"
        yield problem("GPUs", message, "pip install /opt/rocm/share/amd_smi")
        return
    if nvml is None and driver.exists():
        message = "the NVIDIA driver is installed but cannot be queried: pynvml is missing"
        yield problem("GPUs", message, "pip install nvidia-ml-py")
        return
    if nvml is None:
        yield ok("GPUs", f"none; {cpu_ranks}")
        return
    try:
        with discovery.open_nvml(nvml):
            num_gpus = nvml.nvmlDeviceGetCount()
            machine = discovery.discover_machine()
            yield from _visible_gpus(num_gpus, machine)
            for index, gpu in enumerate(machine.gpus):
                yield from _gpu(nvml, index, gpu, own)
    except nvml.NVMLError as error:
        if amd.is_rocm() and amd.DRIVER.exists():
            yield problem("GPUs", f"AMD's driver does not respond: {error}", "run amd-smi list")
        elif driver.exists():
            do = "run nvidia-smi: driver and libraries may differ in version, or a GPU was lost"
            yield problem("GPUs", f"the NVIDIA driver does not respond: {error}", do)
        else:
            yield ok("GPUs", f"none and no NVIDIA driver; {cpu_ranks}")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        message = "this notebook's own process has initialized CUDA and holds GPU memory"
        do = "the ranks are not affected; restart the kernel to free the memory"
        yield note("GPUs", message, do)


def _visible_gpus(installed: int, found: discovery.Machine) -> Iterator[Finding]:
    visible = amd.visible_devices(os.environ)
    if found.gpus:
        yield ok("GPUs", found.describe())
    elif not installed:
        yield ok("GPUs", f"none; a session has {discovery.DEFAULT_CPU_RANKS} CPU ranks")
    for warning in found.warnings:
        message, _, do = warning.partition("; ")
        yield problem("GPUs", message, do)
    if len(found.gpus) < installed and visible is not None:
        name = "HIP" if amd.is_rocm() and os.environ.get("HIP_VISIBLE_DEVICES") else "CUDA"
        message = f"{name}_VISIBLE_DEVICES={visible!r} shows {len(found.gpus)} of {installed} GPUs"
        make = note if found.gpus or not visible else problem
        yield make("GPUs", message, "if this is not intended, unset it before you start Jupyter")


def _gpu(nvml: Any, index: int, gpu: discovery.Gpu, own: Collection[int]) -> Iterator[Finding]:
    topic = f"GPU {index}"
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    message = f"{format_bytes(memory.free)} of {format_bytes(memory.total)} free"
    try:
        holders = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        holders = []  # not supported on some MIG instances
    others = [
        _describe_process(process.pid, process.usedGpuMemory)
        for process in holders
        if process.pid not in own
    ]
    if others:
        do = "end the processes that you no longer need, or exclude this GPU with --gpus"
        yield note(topic, f"{message}; held by {format_names(others)}", do)
    else:
        yield ok(topic, f"{message}; held by this session" if holders else message)
    if refused := discovery.refusal(nvml, gpu, own=own):
        yield problem(topic, refused.says, refused.do)


def _describe_process(pid: int, used: int | None) -> str:
    # The program's name only: its arguments may hold secrets.
    memory = "" if used is None else f", {format_bytes(used)}"
    try:
        process = psutil.Process(pid)
        return f"{process.name()} of {process.username()} (pid {pid}{memory})"
    except psutil.Error:
        return f"pid {pid} of another container (not visible from here{memory})"
