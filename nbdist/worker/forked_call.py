"""A question answered in a forked child, so that nothing of this rank changes by it.

Looking at a data set moves its position and the random state, and may take for ever; the
child has copies of both and a deadline.
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


def answered(question: Callable[[], Any], *, within_s: float) -> Any:
    """Return what `question()` returns in a child process, as JSON has it.

    None where it raises, returns nothing that JSON can hold, or takes too long. A CUDA context
    does not survive a fork: a question that needs it raises.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads; the child waits for none of them.
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
    """The child's life: it never returns, and ends without the parent's exit handlers."""
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        torch.set_num_threads(1)  # the parent's threads of OpenMP did not come along
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(question()).encode())
    finally:
        os._exit(0)


def _read(reading: int, deadline: float) -> bytes:
    """Everything until the child's end; empty where the time is up before."""
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
        return None  # the child was ended while it wrote
