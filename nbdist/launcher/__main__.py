"""Entry point of the launcher: `python -m nbdist.launcher LINK_FD RUN_DIR`.

The main thread imports, then forks ranks whenever the kernel asks: forking and torch
elastic's signal handlers need the main thread. A second thread reads the link: it ends the
ranks on `Halt`, and everything when the kernel is gone.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from queue import SimpleQueue

from nbdist import wire
from nbdist.launcher import family

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
THEN = ["torch._dynamo", "transformers.modeling_utils", "deepspeed"]
"""What many cells import; done while nothing else is asked for."""


log = logging.getLogger("nbdist.launcher")
"""Its messages go to stderr, which is the launcher's log."""


class Link:
    """The launcher's end of the link to the kernel."""

    def __init__(self, fd: int, folders: list[str]) -> None:
        """Take over the inherited socket and start to read it."""
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._folders = folders
        self.launches: SimpleQueue[wire.Launch] = SimpleQueue()
        threading.Thread(target=self._read, name="link", daemon=True).start()

    def send(self, message: wire.LinkMessage) -> None:
        """Send one message; a kernel that is gone is the reading thread's business."""
        try:
            self._socket.sendall(wire.to_line(message))
        except OSError as error:
            log.warning("not sent, the kernel is gone: %s (%s)", message, error)

    def close_in_rank(self) -> None:
        """Let go of the link in a forked rank: only the launcher may hold it open."""
        self._socket.close()

    def _read(self) -> None:
        with self._socket.makefile("rb") as lines:
            for line in lines:
                message = wire.from_line(line)
                if isinstance(message, wire.Launch):
                    self.launches.put(message)
                elif isinstance(message, wire.Halt):
                    family.end_descendants()
        self._kernel_is_gone()

    def _kernel_is_gone(self) -> None:
        family.end_descendants()
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # the main thread may sit in torch elastic; nothing is left to save


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
        except Exception as error:  # noqa: BLE001 - whatever it is, the kernel must hear of it
            traceback.print_exc()
            ended = wire.Ended(launch.generation, error=f"{type(error).__name__}: {error}")
        family.end_descendants()
        family.reap()
        link.send(ended)


if __name__ == "__main__":
    main()
