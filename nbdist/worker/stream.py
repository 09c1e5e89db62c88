"""stdout and stderr of a rank: ipykernel's, cheaper to flush and safe for any text."""

from __future__ import annotations

import logging
import os
import sys

from ipykernel.iostream import OutStream

from nbdist.worker.output_truncation import shortened


class RankStream(OutStream):
    """Skips a flush when nothing was written since the last one.

    ipykernel 7.4 flushes both streams twice a cell and waits each time for its output
    thread, about 0.3 ms: a third of what an empty cell costs.
    """

    _written = False

    def write(self, string: str) -> int | None:  # type: ignore[override]
        """Buffer text as ipykernel does, lone surrogates made visible.

        jupyter_client 8.10 cannot encode them and would lose the whole batch.
        """
        self._written = True
        try:
            string.encode()
        except UnicodeEncodeError:
            string = string.encode(errors="backslashreplace").decode()
        return super().write(shortened(string))

    def flush(self) -> None:
        """Send what was written and wait until it is sent."""
        if self._written:
            self._written = False  # before: what is written meanwhile needs a flush of its own
            super().flush()  # type: ignore[no-untyped-call]


def pipes() -> list[int]:
    """The ends that this process reads of what C code writes to stdout and stderr."""
    watched = (vars(stream).get("_fid") for stream in (sys.stdout, sys.stderr))
    return [fd for fd in watched if fd is not None]


def log_to_launcher(rank: int) -> None:
    """Let what nbdist logs on this rank go to the log of the launcher, and under no cell."""
    # ipykernel 7.4 keeps the descriptor that it has put a pipe of its own in the place of
    kept = vars(sys.stderr).get("_original_stdstream_copy") or 2
    handler = logging.StreamHandler(os.fdopen(kept, "w", closefd=False))
    handler.setFormatter(logging.Formatter(f"rank {rank}: %(message)s"))
    logging.getLogger("nbdist").addHandler(handler)
