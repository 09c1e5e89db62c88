"""Entry point of the launcher: `python -m nbdist.launcher LINK_FD RUN_DIR`.

The main thread imports, then forks ranks whenever the kernel asks: forking and torch
elastic's signal handlers need the main thread. A second thread reads the link: it ends the
ranks on `Halt`, and everything when the kernel is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import time
from pathlib import Path
from queue import Empty

from nbdist.hardware import shm_cleanup
from nbdist.launcher import crash_dump, device_visibility, process_tree
from nbdist.launcher.kernel_link import Link
from nbdist.protocol import messages

FIRST = (
    "torch",
    "torch.distributed",
    "accelerate",
    "ipykernel.kernelapp",
    "ipykernel.debugger",
    "IPython.core.completerlib",
    "IPython.core.debugger",
)
"""What every rank needs; ranks can be forked once these are in."""
THEN = [
    "torch._dynamo",
    "transformers.modeling_utils",
    "deepspeed",
    # What deepspeed 0.19's first engine imports, 2-3 s.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch.utils.cpp_extension",
    "deepspeed.runtime.superoffload.superoffload_stage3",
]
"""What many cells import; done while nothing else is asked for.

Nothing that looks for a GPU at its import and remembers the answer, as
`deepspeed.ops.triton_ops` does (0.19.8): the launcher sees none.
"""
QUIET_S = 0.2
"""Without a request for this long, one of them is imported."""


log = logging.getLogger("nbdist.launcher")
"""Its messages go to stderr, which is the launcher's log."""


def next_launch(link: Link) -> messages.Launch:
    """Wait for a request; warm up further in the meantime.

    Between the end of ranks and a request for new ones is a moment in which nothing is asked for;
    an import that began then would delay a restart by seconds.
    """
    while THEN:
        with contextlib.suppress(Empty):  # nothing is asked for: wanted
            return link.launches.get(timeout=QUIET_S)
        name = THEN.pop(0)
        try:
            importlib.import_module(name)
        except ImportError as error:
            log.warning("%s: %s; a cell that needs it will say so", name, error)
        except Exception:  # a library may want a GPU at its import
            log.exception("%s; a cell that needs it will say so", name)
    return link.launches.get()


def main() -> None:
    """Serve launches until the kernel is gone."""
    started = time.monotonic()
    device_visibility.hide()
    # Stop is a signal, and Ray (2.60) starts its workers, and so their children, with it blocked
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    crash_dump.install(sys.argv[2], "launcher")
    process_tree.adopt_orphans()
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # no warning at each start
    run_dir = Path(sys.argv[2])
    link = Link(int(sys.argv[1]), run_dir, [os.environ["NBDIST_BULK_DIR"]])
    link.take_signals()
    os.register_at_fork(after_in_parent=link.take_signals)
    shm_cleanup.note_forks(run_dir)
    for name in FIRST:
        importlib.import_module(name)
    from nbdist.launcher import fork

    link.send(messages.Warm(time.monotonic() - started))
    while True:
        launch = next_launch(link)
        try:
            ended = fork.run(launch, link)
        except Exception as error:
            log.exception("the ranks were not started")
            ended = messages.Ended(launch.generation, error=f"{type(error).__name__}: {error}")
        process_tree.end_descendants()
        process_tree.reap()
        shm_cleanup.remove_left(run_dir)
        link.send(ended)


if __name__ == "__main__":
    main()
