"""Stop, as a front end presses it while a cell runs."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING

import pytest

from nbdist import CellInterrupted
from tests.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nbdist import Session


def press() -> None:
    """Press Stop: a notebook's front end sends this signal to its kernel."""
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def meanwhile(call: Callable[[], object]) -> Iterator[None]:
    """Run a function on a thread of its own; raise its error, and end the block after one."""
    ended = Event()

    def call_or_stop() -> None:
        try:
            call()
        except BaseException:
            if not ended.is_set():  # after the block, Stop would end pytest
                press()
            raise

    with ThreadPoolExecutor() as pool:
        called = pool.submit(call_or_stop)
        try:
            yield
        finally:
            ended.set()
    called.result()


def stopped(
    session: Session,
    code: str,
    *,
    when: Callable[[], object],
    more: Callable[[], object] | None = None,
    ranks: str | None = None,
) -> tuple[str, float]:
    """Run a cell, press Stop when something is so; what the cell printed, and how long it took."""
    pressed: list[float] = []

    def wait_and_press() -> None:
        eventually(when, within_s=30)
        pressed.append(time.monotonic())
        press()
        if more is not None:
            eventually(more, within_s=30)
            press()

    with meanwhile(wait_and_press), pytest.raises(CellInterrupted) as excinfo:
        session.run(code, ranks=ranks)
    return str(excinfo.value), time.monotonic() - pressed[0]


def runs_for(session: Session, seconds: float) -> Callable[[], bool]:
    """Whether a cell has been running for so long."""
    return lambda: (
        session.running is not None and time.time() - session.running.started_at > seconds
    )


def stopped_with(
    session: Session, code: str, *, says: str, ranks: str | None = None
) -> tuple[str, float]:
    """Run a cell on some ranks and press Stop once its standstill is reported."""

    def is_reported() -> bool:
        return says in session.standstill and says in session.status()["standstill"]

    return stopped(session, code, when=is_reported, ranks=ranks)
