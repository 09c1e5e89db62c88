"""What launcher and ranks write outside of cells: always read, and never more than a limit."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from nbdist.cluster.launcher_process import ProcessLogTail
from tests.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def log(limit: int = 1000) -> Iterator[ProcessLogTail]:
    made = ProcessLogTail(limit=limit)
    yield made
    os.close(made.write_fd)
    made.close()


def test_what_was_written_is_there_at_once() -> None:
    with log() as one:
        os.write(one.write_fd, b"torch said something\n")
        assert one.tail() == "torch said something\n"
        assert one.tail(10) == "something\n"


@pytest.mark.fault("B15")
@pytest.mark.fault("S20")
def test_a_flood_blocks_no_process_and_its_end_is_kept() -> None:
    with log() as one:
        code = "import os\nfor _ in range(256): os.write(2, b'x' * 2**20)\nos.write(2, b'the end')"
        subprocess.run([sys.executable, "-c", code], stderr=one.write_fd, check=True, timeout=60)
        eventually(lambda: one.tail().endswith("the end"), within_s=5)
        assert len(one.tail()) == 1000


def test_it_ends_although_a_process_may_still_write() -> None:
    one = ProcessLogTail()
    other = os.dup(one.write_fd)
    os.write(other, b"last words")
    os.close(one.write_fd)
    one.close()
    one.close()
    assert one.tail() == "last words"
    with pytest.raises(BrokenPipeError):
        os.write(other, b"to nobody")
    os.close(other)
