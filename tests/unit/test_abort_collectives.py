"""What only NCCL has in a release, on groups that note what happens to them."""

from __future__ import annotations

import datetime as dt
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.worker import process_group

if TYPE_CHECKING:
    from collections.abc import Callable

CLOSED = "sockets closed"


class Group:
    """A process group of GPU ranks: gloo for the CPU, NCCL for the GPU."""

    def __init__(self, name: str, noted: list[str], abort: Callable[[], object]) -> None:
        self.name, self._noted, self._abort = name, noted, abort

    def _get_backend(self, device: Any) -> Any:
        assert device.type == "cuda"
        return SimpleNamespace(
            _group_start=lambda: self._noted.append("group start"),
            _group_end=lambda: self._noted.append("group end"),
        )

    def abort(self) -> None:
        self._abort()
        self._noted.append(f"abort {self.name}")


class TimedBackend:
    """A backend of a process group."""

    def __init__(self, name: str, minutes: int) -> None:
        self.name = lambda: name
        self.options = SimpleNamespace(_timeout=dt.timedelta(minutes=minutes))

    def _set_default_timeout(self, timeout: dt.timedelta) -> None:
        self.options._timeout = timeout

    @property
    def minutes(self) -> float:
        return self.options._timeout.total_seconds() / 60


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(process_group, "_close_connections", lambda _: found.append(CLOSED))
    monkeypatch.setattr(process_group, "_peer_addresses", lambda *_: set())
    return found


def with_groups(monkeypatch: pytest.MonkeyPatch, *groups: Group) -> dict[Group, str]:
    names = {group: group.name for group in groups}
    monkeypatch.setattr(process_group.distributed_c10d, "_world", SimpleNamespace(pg_names=names))
    return names


def test_nccl_is_aborted_in_one_group_before_any_socket_is_closed(
    monkeypatch: pytest.MonkeyPatch, noted: list[str]
) -> None:
    groups = [Group(name, noted, lambda: None) for name in ("0", "1")]
    names = with_groups(monkeypatch, *groups)
    process_group.abort_collectives([], "first")
    assert noted == ["group start", "abort 1", "abort 0", "group end", CLOSED]
    assert list(names) == groups  # engines still look them up
    process_group.abort_collectives([], "second")
    assert noted[5:] == noted[:5]


def test_an_abort_that_fails_is_reported_and_sockets_are_closed(
    monkeypatch: pytest.MonkeyPatch, noted: list[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("NCCL error: unhandled cuda error")

    with_groups(monkeypatch, Group("0", noted, fail))
    with pytest.raises(RuntimeError, match=r"could not be aborted: NCCL error: unhandled"):
        process_group.abort_collectives([], "failing")
    assert noted == ["group start", "group end", CLOSED]


def test_an_abort_that_hangs_is_reported_in_time(
    monkeypatch: pytest.MonkeyPatch, noted: list[str]
) -> None:
    monkeypatch.setattr(process_group, "ABORT_S", 0.05)
    go_on = threading.Event()
    with_groups(monkeypatch, Group("0", noted, lambda: go_on.wait(30)))
    try:
        with pytest.raises(RuntimeError, match="takes more than"):
            process_group.abort_collectives([], "hanging")
        assert noted == ["group start", CLOSED]
    finally:
        go_on.set()
        for thread in threading.enumerate():
            if thread.name == "nbdist-abort":
                thread.join(30)


def test_a_prompt_extends_the_timeouts_of_nccl_and_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a group "cpu:gloo,cuda:nccl", which has 30 minutes, and of one "nccl", which has 10."""
    monkeypatch.setattr(
        process_group,
        "_default_timeout",
        lambda name: dt.timedelta(minutes=10 if name == "nccl" else 30),
    )
    monkeypatch.setattr(process_group, "_has_user", False)
    backends = {
        kind: TimedBackend(name, minutes)
        for kind, name, minutes in (
            ("cpu", "gloo", 30),
            ("cuda", "nccl", 30),
            ("alone", "nccl", 10),
            ("chosen by a user", "nccl", 5),
        )
    }
    group = SimpleNamespace(_device_types=list(backends), _get_backend=backends.__getitem__)
    monkeypatch.setattr(process_group, "known_groups", lambda: [group])
    process_group.set_timeouts(has_user=True)
    assert [each.minutes for each in backends.values()] == [7 * 24 * 60] * 3 + [5]
    process_group.set_timeouts(has_user=False)
    assert [each.minutes for each in backends.values()] == [30] * 3 + [5]
