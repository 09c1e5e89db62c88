"""Entry point of the launcher: `python -m nbdist.launcher LINK_FD RUN_DIR`.

The main thread imports, then forks ranks whenever the kernel asks: forking and torch
elastic's signal handlers need the main thread. A second thread reads the link: it ends the
ranks on `Halt`, and everything when the kernel is gone.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import time

from nbdist import wire
from nbdist.launcher import family
from nbdist.launcher.link import Link

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
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
]
"""What many cells import; done while nothing else is asked for."""


log = logging.getLogger("nbdist.launcher")
"""Its messages go to stderr, which is the launcher's log."""


def next_launch(link: Link) -> wire.Launch:
    """Wait for a request; warm up further in the meantime."""
    while link.launches.empty() and THEN:
        name = THEN.pop(0)
        try:
            importlib.import_module(name)
        except ImportError as error:
            log.warning("%s: %s; a cell that needs it will say so", name, error)
    return link.launches.get()


def main() -> None:
    """Serve launches until the kernel is gone."""
    started = time.monotonic()
    family.adopt_orphans()
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # no warning at each start
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Stop is the ranks' business
    link = Link(int(sys.argv[1]), [sys.argv[2], os.environ["NBDIST_BULK_DIR"]])
    for name in FIRST:
        importlib.import_module(name)
    from nbdist.launcher import ranks

    link.send(wire.Warm(time.monotonic() - started))
    while True:
        launch = next_launch(link)
        try:
            ended = ranks.run(launch, link)
        except Exception as error:
            log.exception("the ranks were not started")
            ended = wire.Ended(launch.generation, error=f"{type(error).__name__}: {error}")
        family.end_descendants()
        family.reap()
        link.send(ended)


if __name__ == "__main__":
    main()
