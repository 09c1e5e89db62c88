"""Calls a function in a forked child process, without side effects on this rank.

Reading from a data set changes its position and the random state, and may block forever; the
child has copies of both and a timeout.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_CHUNK = 1 << 16


def call_in_fork(question: Callable[[], Any], *, within_s: float) -> Any:
    """Call a function in a forked child and return its result, passed as JSON.

    Returns None if it raises, returns a value that JSON cannot represent, or times out. A CUDA
    context does not survive a fork, so a call that needs it raises.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns about a fork in a threaded process; the child uses none of its locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _answer(question, writing)
    os.close(writing)
    try:
        return _parsed(_read(reading, time.monotonic() + within_s))
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _answer(question: Callable[[], Any], writing: int) -> NoReturn:
    """Run in the child: write the result, then exit without the parent's exit handlers."""
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        torch.set_num_threads(1)  # the parent's OpenMP threads do not survive a fork
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(question()).encode())
    finally:
        os._exit(0)


def _read(reading: int, deadline: float) -> bytes:
    """Return everything that the child writes; empty on timeout."""
    pieces: list[bytes] = []
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([reading], [], [], left)[0]:
            continue
        piece = os.read(reading, _CHUNK)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
    return b""


def _parsed(answer: bytes) -> Any:
    try:
        return json.loads(answer) if answer else None
    except ValueError:
        return None  # the child was killed while it wrote
