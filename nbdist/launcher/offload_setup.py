"""Prepares an offload before the ranks are forked: DeepSpeed's ops, and a folder for NVMe offload.

Runs on the launcher's main thread. DeepSpeed itself compiles the ops of an offload at their first
use (1-4 minutes each) on all ranks at once, and a killed build blocks every later one forever
(torch 2.13 leaves a file `lock`). Here each op is built in its own process, under a lock that is
released with its holder, in a folder of nbdist. The launcher then loads the ops, so that forked
ranks have them and build nothing.

Plain ZeRO needs no ops, not even on CPUs: see `worker.engines.cpu_patches`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from nbdist import paths
from nbdist.errors import StartError
from nbdist.hardware import deepspeed_requirements, process_identity
from nbdist.launcher import device_visibility, process_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nbdist.strategies import Options

BUILD_TIMEOUT_S: Final = 1800.0
"""Timeout of one build; the slowest observed took 262 s on a busy machine with two cores."""
TICK_S: Final = 1.0
"""Interval of progress messages."""
END_S: Final = 10.0
"""Time for a build process to end its compilers."""
BUILT_FILE: Final = "nbdist-built"
"""File in an op's folder that marks its build as complete."""

_BUILDERS: Final = {
    "cpu_adam": "CPUAdamBuilder",
    "pin_memory": "PinMemoryBuilder",
    "async_io": "AsyncIOBuilder",
}


def build_missing_ops(
    ops: Sequence[str],
    *,
    progress: Callable[[str], None],
    shown: Mapping[str, str] = os.environ,
) -> None:
    """Build missing ops and load all of them into this process.

    Sets TORCH_EXTENSIONS_DIR and DS_ACCELERATOR for this process and its children, also without
    ops. A build blocks for minutes.

    Args:
        ops: names from ``Strategy.required_ops``, in loading order.
        progress: called about once a second with a line of text during a build.
        shown: environment variables that show the ranks their GPUs; default: this process's.

    Raises:
        StartError: a tool or library is missing, or a build failed or timed out.
    """
    kind = os.environ["DS_ACCELERATOR"] = "cuda" if device_visibility.is_gpu(shown) else "cpu"
    if not ops:
        return
    folder = _folder(kind)
    _check_owner(folder)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    missing = [op for op in ops if not (folder / op / BUILT_FILE).exists()]
    if missing:
        os.environ["PATH"] = deepspeed_requirements.build_search_path()
        if text := deepspeed_requirements.missing_requirements(missing, kind):
            raise StartError(text)
        with build_lock(folder, progress=progress, limit_s=BUILD_TIMEOUT_S) as lock:
            for op in missing:
                if not (folder / op / BUILT_FILE).exists():
                    environ = {**os.environ, **shown}
                    _build(op, folder / op, environ, lock=lock, progress=progress)
    for op in ops:
        _load(op, folder / op)


def _check_owner(folder: Path) -> None:
    """Raise if others can write to the folder: libraries in it are loaded and executed."""
    for path in (folder, *folder.parents):
        if path == paths.cache_dir().parent:
            return
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # not created yet
            status = path.stat()
            if status.st_uid not in {os.geteuid(), 0} or status.st_mode & 0o022:
                raise StartError(
                    f"{str(path)!r} can be written to by others, and code built there is executed."
                    " Make it private (chmod go-w), or set NBDIST_CACHE_DIR to a private folder."
                )


def _folder(kind: str) -> Path:
    """Return the folder for builds of this Python, torch, DeepSpeed and processor."""
    version = f"py{sys.version_info.major}.{sys.version_info.minor}"
    torch, deepspeed = (importlib.metadata.version(name) for name in ("torch", "deepspeed"))
    processor = platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):  # builds depend on them
                processor = hashlib.sha256(line.encode()).hexdigest()[:8]
                break
    name = f"{version}-torch{torch}-deepspeed{deepspeed}-{kind}-{processor}"
    return paths.cache_dir() / "extensions" / name


@contextlib.contextmanager
def build_lock(folder: Path, *, progress: Callable[[str], None], limit_s: float) -> Iterator[int]:
    """Hold the folder's lock; the operating system releases it when its last holder ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / "nbdist-lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StartError(
            f"Cannot write to {str(folder)!r} ({error}). Set NBDIST_CACHE_DIR to a folder."
        ) from error
    start = time.monotonic()
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                waited_s = time.monotonic() - start
                if waited_s > limit_s:
                    raise StartError(
                        f"Waited {waited_s:.0f} s for another session that builds DeepSpeed's ops"
                        f" in {str(folder)!r}. Start again when it has ended, or set"
                        " NBDIST_CACHE_DIR to another folder."
                    ) from error
                progress(
                    f"waiting for another session that builds DeepSpeed's ops: {waited_s:.0f} s"
                )
                time.sleep(TICK_S)
        yield lock
    finally:
        os.close(lock)


def _build(
    op: str,
    folder: Path,
    environ: Mapping[str, str],
    *,
    lock: int,
    progress: Callable[[str], None],
) -> None:
    """Build one op in a child process that inherits the lock and ends with this process.

    The child sees the ranks' GPUs: without one, DeepSpeed builds async_io for the CPU.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # The lock is held, so no build is running: torch's own lock file is from a killed build.
    (folder / "lock").unlink(missing_ok=True)
    log = folder / "build.log"
    command = [sys.executable, "-m", "nbdist.launcher.offload_setup", op]
    start = time.monotonic()
    with log.open("wb") as out:
        child = subprocess.Popen(  # noqa: S603
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            pass_fds=(lock,),
            start_new_session=True,
        )
    try:
        while child.poll() is None:
            elapsed = time.monotonic() - start
            if elapsed > BUILD_TIMEOUT_S:
                raise StartError(
                    f"Building DeepSpeed's {op} took more than {BUILD_TIMEOUT_S:.0f} s. See {log}."
                )
            progress(f"building DeepSpeed's {op}, once (1-4 minutes): {elapsed:.0f} s")
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(TICK_S)
    finally:
        child.terminate()  # it ends its compilers first
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    if child.returncode != 0 or not (folder / f"{op}.so").exists():
        raise StartError(f"Cannot build DeepSpeed's {op} ({_last_line(log)}). See {log}.")
    (folder / BUILT_FILE).touch()


def _last_line(log: Path) -> str:
    """Return the most informative line of a build log: the last error, else the last line."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    output = [line.strip() for line in lines if line.strip()]
    errors = [line for line in output if "error" in line.lower()]
    return (errors or output or ["no output"])[-1][:300]


def _load(op: str, folder: Path) -> None:
    """Import a built op and register it with DeepSpeed, so that ranks find it loaded."""
    from deepspeed.ops.op_builder import builder

    loaded = builder.OpBuilder._loaded_ops  # noqa: SLF001
    if op in loaded:
        return
    library = folder / f"{op}.so"
    loader = importlib.machinery.ExtensionFileLoader(op, str(library))
    spec = importlib.util.spec_from_file_location(op, library, loader=loader)
    try:  # from its file, without initialising a device
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        loader.exec_module(module)
    except ImportError as error:
        (folder / BUILT_FILE).unlink(missing_ok=True)
        raise StartError(
            f"Cannot load DeepSpeed's {op} ({error}). Start again to rebuild it."
        ) from error
    loaded[op] = module
    if op == "pin_memory":
        # deepspeed 0.19: async_io resolves symbols of pin_memory in the global table.
        from deepspeed.ops.op_builder import PinMemoryBuilder

        PinMemoryBuilder().load(verbose=False)


@contextlib.contextmanager
def create_nvme_folder(options: Options) -> Iterator[Options]:
    """Yield the options with the session's own folder in place of the user's; remove it at the end.

    DeepSpeed leaves gigabytes of swap files behind. Options without NVMe offload are yielded
    unchanged.

    Raises:
        StartError: the user's folder is not writable.
    """
    if options.offload_path is None:
        yield options
        return
    parent = Path(options.offload_path).expanduser().absolute()
    prefix = f"nbdist-{socket.gethostname()}-"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for folder in parent.glob(f"{prefix}*"):
            if process_identity.is_abandoned(folder):  # its launcher was killed
                shutil.rmtree(folder, ignore_errors=True)
        own = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))
        process_identity.ProcessIdentity.current_process().write_owner_file(own)
    except OSError as error:
        raise StartError(
            f"Cannot write to {str(parent)!r} for offload {options.offload}: {error}."
        ) from error
    try:
        yield replace(options, offload=f"nvme:{own}")
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _main(op: str) -> None:
    # When the parent ends it, or dies, this process first ends its compilers: ninja puts each into
    # its own process group, and a remaining one would write into the next build.
    process_tree.adopt_orphans()
    signal.signal(signal.SIGTERM, _end_compilers)
    process_tree.die_with_parent(signal.SIGTERM)
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder(_BUILDERS[op]).load(verbose=True)


def _end_compilers(*_: object) -> NoReturn:
    process_tree.end_descendants()
    os._exit(1)


if __name__ == "__main__":
    _main(sys.argv[1])
