"""The launcher's watch over its ranks, with small processes in their place."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from nbdist.launcher import process_tree
from nbdist.launcher.process_tree import RankExitWatch
from nbdist.protocol import messages
from tests.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Callable


def rank(watch: RankExitWatch, number: int, life: Callable[[], object]) -> int:
    """Fork a process that announces itself as a rank and then lives."""
    pid = os.fork()
    if pid == 0:
        watch.announce_rank(number)
        life()
        os._exit(99)
    return pid


def ends(received: list[messages.LauncherMessage]) -> list[messages.RankExited]:
    return [message for message in received if isinstance(message, messages.RankExited)]


def born(received: list[messages.LauncherMessage]) -> dict[int, int]:
    return {one.rank: one.pid for one in received if isinstance(one, messages.RankForked)}


def collect(*pids: int) -> None:
    for pid in pids:
        os.waitpid(pid, 0)


def wait_for_ever() -> None:
    signal.pause()


@pytest.mark.fault("B9")
def test_exits_are_reported_in_order_with_codes_that_can_still_be_collected() -> None:
    received: list[messages.LauncherMessage] = []
    watch = RankExitWatch(3, received.append)
    pids = [rank(watch, 0, wait_for_ever), rank(watch, 1, lambda: os._exit(0))]
    eventually(lambda: ends(received) and len(born(received)) == 2, within_s=5)
    os.kill(pids[0], signal.SIGKILL)
    eventually(lambda: len(ends(received)) == 2, within_s=5)
    watch.close()
    exits = [(end.rank, end.code, end.generation) for end in ends(received)]
    assert exits == [(1, 0, 3), (0, -9, 3)]
    assert born(received) == dict(enumerate(pids))
    collect(*pids)


@pytest.mark.fault("B9")
def test_an_end_that_torch_elastic_collected_first_has_its_code_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received: list[messages.LauncherMessage] = []
    watch, read, write = RankExitWatch(1, received.append), *os.pipe()

    def life() -> None:
        watch.announce_rank(0)
        os.read(read, 1)
        os._exit(5)

    forked = multiprocessing.get_context("fork").Process(target=life)
    forked.start()
    eventually(lambda: received, within_s=5)
    monkeypatch.setattr(
        "nbdist.launcher.process_tree._exit_code", lambda _: forked.join()
    )  # it is quicker
    os.write(write, b"x")
    eventually(lambda: ends(received), within_s=5)
    watch.close()
    assert [end.code for end in ends(received)] == [5]
    os.close(read)
    os.close(write)


def test_a_process_that_ended_before_the_watch_has_no_exit_code() -> None:
    received: list[messages.LauncherMessage] = []
    watch = RankExitWatch(1, received.append)
    pid = os.fork()
    if pid == 0:
        os._exit(5)
    collect(pid)
    watch._sender.send(f"0 {pid}".encode())  # what it would have sent
    watch.close()
    assert [end.code for end in ends(received)] == [None]


@pytest.mark.fault("B10")
def test_output_left_unread_in_the_pipes_is_reported() -> None:
    received: list[messages.LauncherMessage] = []
    watch = RankExitWatch(1, received.append)

    def speak() -> None:
        read, write = os.pipe()
        watch.share_pipes(0, [read])
        os.write(write, b"terminate called\n")
        os.kill(os.getpid(), signal.SIGKILL)

    pid = rank(watch, 0, speak)
    eventually(lambda: ends(received), within_s=5)
    watch.close()
    assert ends(received)[0].words == "terminate called\n"
    collect(pid)


@pytest.mark.fault("B11")
def test_a_descendant_that_cannot_be_killed_is_named_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Immortal:
        pid = 4711

        def is_running(self) -> bool:
            return True

        def status(self) -> str:
            return psutil.STATUS_DISK_SLEEP

        def send_signal(self, number: int) -> None:
            """Take no notice."""

    monkeypatch.setattr(psutil.Process, "children", lambda *_, **__: [Immortal()])
    assert process_tree.end_descendants(grace_s=0.05) == [4711]
