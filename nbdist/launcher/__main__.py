"""Entry point of the launcher: `python -m nbdist.launcher LINK_FD RUN_DIR`.

The main thread imports the libraries and forks ranks on request: forking and torch elastic's signal
handlers need the main thread. A second thread reads the link. It ends the ranks on
``StopRanksRequest``, and everything when the kernel ends.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from queue import Empty

from nbdist._version import __version__
from nbdist.hardware import process_identity
from nbdist.launcher import device_visibility, process_tree
from nbdist.launcher.kernel_link import KernelLink
from nbdist.protocol import messages

CORE_IMPORTS = (
    "torch",
    "torch.distributed",
    "accelerate",
    "ipykernel.kernelapp",
    "ipykernel.debugger",
    "IPython.core.completerlib",
    "IPython.core.debugger",
)
"""Imports required by every rank; ranks can be forked once these are done."""
WARM_UP_IMPORTS = [
    "torch._dynamo",
    "transformers.modeling_utils",
    "deepspeed",
    # deepspeed 0.19 imports these with the first engine, which takes 2-3 s.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch.utils.cpp_extension",
    "deepspeed.runtime.superoffload.superoffload_stage3",
]
"""Imports required by many cells; done while the launcher is idle.

Contains no module that looks for a GPU at import and caches the result, such as
`deepspeed.ops.triton_ops` (0.19.8): the launcher sees no GPU.
"""
QUIET_S = 0.2
"""Idle time before the next of these imports."""


log = logging.getLogger("nbdist.launcher")
"""Writes to stderr, which is the launcher's log."""


def next_launch(link: KernelLink) -> messages.LaunchRanksRequest:
    """Wait for a launch request; import further libraries while idle."""
    # An import delays the next request by seconds, so wait a moment first: a restart ends the
    # ranks and requests new ones right after.
    while WARM_UP_IMPORTS:
        with contextlib.suppress(Empty):  # idle
            return link.launch_queue.get(timeout=QUIET_S)
        name = WARM_UP_IMPORTS.pop(0)
        try:
            importlib.import_module(name)
        except ImportError as error:
            log.warning(
                "cannot import %s: %s; a cell that needs it will raise this error", name, error
            )
        except Exception:  # a library may require a GPU at import
            log.exception("cannot import %s; a cell that needs it will raise this error", name)
    return link.launch_queue.get()


def main() -> None:
    """Serve launch requests until the kernel ends."""
    device_visibility.hide_gpus()
    # Ray 2.60 starts workers with SIGINT blocked, and children inherit the mask
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    process_tree.install_crash_dump(sys.argv[2], "launcher")
    # Python 3.12 warns at each fork of a process with threads: of ranks, of DataLoader's workers
    warnings.filterwarnings("ignore", r".*multi-threaded, use of fork", DeprecationWarning)
    process_tree.adopt_orphans()
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # silences a warning at each start
    run_dir = Path(sys.argv[2])
    link = KernelLink(int(sys.argv[1]), run_dir, Path(os.environ["NBDIST_BULK_DIR"]))
    del sys.argv[1:]  # a script in a cell would parse these
    link.send(messages.LauncherHello(messages.PROTOCOL, __version__))
    link.install_signal_actions()
    os.register_at_fork(after_in_parent=link.install_signal_actions)
    process_identity.record_forked_pids(run_dir)
    for name in CORE_IMPORTS:
        importlib.import_module(name)
    from nbdist.launcher import fork_ranks

    link.send(messages.LauncherReady())
    while True:
        launch = next_launch(link)
        try:
            ended = fork_ranks.run_ranks(launch, link)
        except Exception as error:
            log.exception("cannot start the ranks")
            ended = messages.AllRanksExited(
                launch.generation, error=f"{type(error).__name__}: {error}"
            )
        process_tree.end_descendants()
        process_tree.reap_orphans()
        process_identity.remove_orphaned_files(run_dir)
        link.send(ended)


if __name__ == "__main__":
    main()
