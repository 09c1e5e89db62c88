"""stdout and stderr of a rank: ipykernel's streams with cheaper flushes and any text."""

from __future__ import annotations

import logging
import os
import sys

from ipykernel.iostream import OutStream

from nbdist.number_formatting import format_bytes

MAX_CHARS = 10_000_000
"""Maximum length in characters of a printed text or value."""
MAX_ERROR_CHARS = 100_000
"""Maximum length of an exception's message and of each part of its traceback."""
KEPT_CHARS = 20_000
"""Characters kept at each end; the notebook's kernel shows no more of a line."""


def truncate(text: str, *, longest: int = MAX_CHARS) -> str:
    """Return the text; if it is too long, its two ends and a line with its size."""
    if len(text) <= longest:
        return text
    return (
        f"{text[:KEPT_CHARS]}\n{text[-KEPT_CHARS:]}\n"
        f"[Truncated {format_bytes(len(text))} to the first and last {KEPT_CHARS:,} characters.]\n"
    )


class BufferedOutStream(OutStream):
    """Output stream that skips a flush if nothing was written since the last one.

    ipykernel 7.4 flushes both streams twice per cell and waits each time for its output thread,
    about 0.3 ms: a third of the duration of an empty cell.
    """

    _written = False

    def write(self, string: str) -> int | None:  # type: ignore[override]
        """Buffer text as ipykernel does, with lone surrogates escaped."""
        self._written = True
        try:
            string.encode()
        except UnicodeEncodeError:  # jupyter_client 8.10 would lose the whole batch
            string = string.encode(errors="backslashreplace").decode()
        return super().write(string if len(string) <= MAX_CHARS else truncate(string))

    def flush(self) -> None:
        """Send the buffered text and wait until it is sent."""
        if self._written:
            self._written = False  # reset first: text written meanwhile needs another flush
            super().flush()  # type: ignore[no-untyped-call]


def c_output_pipes() -> list[int]:
    """Return the read ends of the pipes that capture C code's stdout and stderr."""
    fds = (vars(stream).get("_fid") for stream in (sys.stdout, sys.stderr))
    return [fd for fd in fds if fd is not None]


def log_to_launcher(rank: int) -> None:
    """Send nbdist's log messages on this rank to the launcher's log, not to a cell."""
    # ipykernel 7.4 replaces stderr by a pipe and keeps the original descriptor here
    stderr_fd = vars(sys.stderr).get("_original_stdstream_copy") or 2
    handler = logging.StreamHandler(os.fdopen(stderr_fd, "w", closefd=False))
    handler.setFormatter(logging.Formatter(f"rank {rank}: %(message)s"))
    logging.getLogger("nbdist").addHandler(handler)
