"""DeepSpeed's compiled ops: built once, kept, loaded before the ranks are forked.

Runs in the launcher, on its main thread. DeepSpeed compiles the ops of an offload at their
first use (1-4 minutes each), on all ranks at once, and a build killed half-way makes every
later one wait for ever (torch 2.13 leaves a file `lock`). Here they are built in a process
of their own, one at a time under a lock that ends with its holder, into a folder of
nbdist's, and are then loaded, so that forked ranks have them and build nothing.

Plain ZeRO needs no op (`worker.engines.cpu` says why it needs none on a CPU either).
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
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from nbdist.errors import StartError
from nbdist.hardware import deepspeed_requirements
from nbdist.launcher import device_visibility, process_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

LIMIT_S: Final = 1800.0
"""For the build of one op; the slowest seen took 262 s on a loaded machine of two cores."""
TICK_S: Final = 1.0
"""Between two progress lines."""
END_S: Final = 10.0
"""For a building process to end its compilers."""
BUILT: Final = "nbdist-built"
"""File in an op's folder that says its build came to an end."""

_BUILDERS: Final = {
    "cpu_adam": "CPUAdamBuilder",
    "pin_memory": "PinMemoryBuilder",
    "async_io": "AsyncIOBuilder",
}


def ensure(
    ops: Sequence[str],
    *,
    progress: Callable[[str], None],
    shown: Mapping[str, str] = os.environ,
    limit_s: float = LIMIT_S,
) -> None:
    """Build the ops that are missing and load all of them into this process.

    Sets TORCH_EXTENSIONS_DIR and DS_ACCELERATOR for this process and its children, with
    no ops too. Blocks for minutes when something has to be built.

    Args:
        ops: names as `Strategy.extensions` gives them, in the order of loading.
        progress: is given a line of text about once a second during a build.
        shown: environment variables that show the ranks their GPUs; default: a rank asks.
        limit_s: for the build of one op.

    Raises:
        StartError: a tool or library is missing, or a build failed or took too long.
    """
    kind = os.environ["DS_ACCELERATOR"] = "cuda" if device_visibility.is_gpu(shown) else "cpu"
    if not ops:
        return
    folder = deepspeed_requirements.cache_dir() / "extensions" / _key(kind)
    _check_owner(folder)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    missing = [op for op in ops if not (folder / op / BUILT).exists()]
    if missing:
        _check_tools(missing, kind)
        with _locked(folder, progress=progress, limit_s=limit_s) as lock:
            for op in missing:
                if not (folder / op / BUILT).exists():
                    environ = {**os.environ, **shown}
                    _build(op, folder / op, environ, lock=lock, progress=progress, limit_s=limit_s)
    for op in ops:
        _load(op, folder / op)


def _check_owner(folder: Path) -> None:
    """Refuse a folder that others may write to: what lies there is loaded, and so is run."""
    for path in (folder, *folder.parents):
        if path == deepspeed_requirements.cache_dir().parent:
            return
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # not there yet
            found = path.stat()
            if found.st_uid not in {os.geteuid(), 0} or found.st_mode & 0o022:
                message = (
                    f"{str(path)!r} can be written to by others, and what is built there is run;"
                    " make it yours alone (chmod go-w), or set NBDIST_CACHE_DIR to a folder that"
                    " is."
                )
                raise StartError(message)


def _key(kind: str) -> str:
    """Name the folder of builds that fit this Python, torch, DeepSpeed, and processor."""
    version = f"py{sys.version_info.major}.{sys.version_info.minor}"
    torch, deepspeed = (importlib.metadata.version(name) for name in ("torch", "deepspeed"))
    return f"{version}-torch{torch}-deepspeed{deepspeed}-{kind}-{_processor()}"


def _processor() -> str:
    """Return a short hash of the processor's features: builds use all of them."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return hashlib.sha256(line.encode()).hexdigest()[:8]
    return platform.machine()


def _check_tools(ops: Sequence[str], kind: str) -> None:
    """Put this environment's programs on PATH, and say what a build would miss."""
    os.environ["PATH"] = deepspeed_requirements.search_path()
    if text := deepspeed_requirements.missing(ops, kind):
        raise StartError(text)


@contextlib.contextmanager
def _locked(folder: Path, *, progress: Callable[[str], None], limit_s: float) -> Iterator[int]:
    """Hold the folder's lock; the kernel frees it when its last holder ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / "nbdist-lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        message = f"cannot write to {str(folder)!r} ({error}); set NBDIST_CACHE_DIR to a folder."
        raise StartError(message) from error
    try:
        _wait_for(lock, progress=progress, limit_s=limit_s)
        yield lock
    finally:
        os.close(lock)


def _wait_for(lock: int, *, progress: Callable[[str], None], limit_s: float) -> None:
    """Take the lock, or say that another session holds it for too long."""
    start = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            waited = time.monotonic() - start
            if waited > limit_s:
                message = f"another session has been building DeepSpeed's ops for {waited:.0f} s."
                raise StartError(message) from error
            progress(f"another session builds DeepSpeed's ops, waiting: {waited:.0f} s")
            time.sleep(TICK_S)
        else:
            return


def _build(
    op: str,
    folder: Path,
    environ: Mapping[str, str],
    *,
    lock: int,
    progress: Callable[[str], None],
    limit_s: float,
) -> None:
    """Build one op in its own process, which holds the lock too and ends with us.

    It sees the ranks' GPUs: DeepSpeed builds async_io for a CPU where it sees none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # We hold the lock, so nobody builds: torch's own lock file is a killed build's.
    (folder / "lock").unlink(missing_ok=True)
    log = folder / "build.log"
    command = [sys.executable, "-m", "nbdist.launcher.deepspeed_builds", op]
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
            if elapsed > limit_s:
                message = f"building DeepSpeed's {op} took more than {limit_s:.0f} s; see {log}."
                raise StartError(message)
            progress(f"building DeepSpeed's {op}, once (1-4 minutes): {elapsed:.0f} s")
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(TICK_S)
    finally:
        _end(child)
    if child.returncode != 0 or not (folder / f"{op}.so").exists():
        message = f"DeepSpeed's {op} could not be built ({_last_line(log)}); see {log}."
        raise StartError(message)
    (folder / BUILT).touch()


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a building process with its compilers; nothing where it has ended."""
    child.terminate()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _last_line(log: Path) -> str:
    """Return the line of a build's log that says most."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    errors = [line for line in said if "error" in line.lower()]
    return (errors or said or ["no output"])[-1][:300]


def _load(op: str, folder: Path) -> None:
    """Import a built op and register it with DeepSpeed, so that ranks find it loaded."""
    from deepspeed.ops.op_builder import builder

    loaded = builder.OpBuilder._loaded_ops  # noqa: SLF001
    if op in loaded:
        return
    loaded[op] = _imported(op, folder / f"{op}.so")
    if op == "pin_memory":
        # deepspeed 0.19: async_io finds symbols of this one in the global table.
        from deepspeed.ops.op_builder import PinMemoryBuilder

        PinMemoryBuilder().load(verbose=False)


def _imported(op: str, library: Path) -> ModuleType:
    """Import an extension module from its file; initialises no device."""
    loader = importlib.machinery.ExtensionFileLoader(op, str(library))
    spec = importlib.util.spec_from_file_location(op, library, loader=loader)
    try:
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        loader.exec_module(module)
    except ImportError as error:
        (library.parent / BUILT).unlink(missing_ok=True)
        message = f"DeepSpeed's {op} does not load ({error}); start again to build it anew."
        raise StartError(message) from error
    return module


def _main(op: str) -> None:
    """Build one op: the whole life of the building process.

    Ended by its parent, or by its parent's death, it ends its compilers first: ninja puts each
    into a process group of its own, and one that stayed would write into the next build.
    """
    process_tree.adopt_orphans()
    signal.signal(signal.SIGTERM, _end_compilers)
    process_tree.die_with_parent(signal.SIGTERM)
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder(_BUILDERS[op]).load(verbose=True)


def _end_compilers(*_: object) -> NoReturn:
    """End everything that this process has started, then this process."""
    process_tree.end_descendants()
    os._exit(1)


if __name__ == "__main__":
    _main(sys.argv[1])
