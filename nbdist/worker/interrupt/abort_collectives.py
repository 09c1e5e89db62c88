"""Ending what ranks are waiting for in a collective; runs on the control thread of each rank.

A collective that waits for a rank which never comes ends only when its process group does. The
release is the same on CPU and GPU ranks: all process groups are aborted, then the connections
between the ranks are closed.

    NCCL (torch 2.13)   `abort` ends its kernels and closes its connections; all ranks must call it
    gloo (torch 2.13)   has no `abort`: the call does nothing, and closing its sockets ends its
                        collectives within milliseconds

The order matters: NCCL's watchdog takes a connection that is closed before the abort for an error.
The groups stay in torch's registry, because FSDP2 and DeepSpeed look them up by name and rank
while `worker.operations.recover` takes their engines apart and makes new groups. A second release
is harmless.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import distributed
from torch.distributed import distributed_c10d

from nbdist.worker import rendezvous_store as stores

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch._C._distributed_c10d import Store


Address = tuple[str, int]
TOLD_S = dt.timedelta(seconds=1.5)
"""For the other ranks to publish their connections; one that is stopped does not, and one that is
late closes the connections by itself."""
ABORT_S = 20.0
"""For NCCL's abort, which waits for its kernels to end. torch's own limit is that of the group."""


def release(pids: Iterable[int], name: str) -> int:
    """End all collectives of this rank; returns how many connections were closed.

    Args:
        pids: processes of all ranks.
        name: of this release, the same on all ranks.

    Raises:
        RuntimeError: a group was not aborted; the connections are closed nevertheless.
    """
    try:
        abort_groups()
    finally:
        closed = _close(_ends_of_others(pids, name))
    return closed


def release_together(name: str) -> None:
    """Do the same where all ranks come here, on their main threads.

    Args:
        name: of this release, the same on all ranks.

    Raises:
        RuntimeError: a group was not aborted.
    """
    abort_groups()
    _close(_published(stores.store(), name))


def abort_groups() -> None:
    """Abort every process group, and leave all of them in torch's registry.

    Raises:
        RuntimeError: one could not be aborted, or not in time.
    """
    errors: list[BaseException] = []

    def abort() -> None:
        try:
            _abort_groups()
        except Exception as error:  # noqa: BLE001 - raised again on the thread that waits
            errors.append(error)

    # A thread of its own: NCCL's abort may hang, and this rank must answer then.
    thread = threading.Thread(target=abort, name="nbdist-abort", daemon=True)
    thread.start()
    thread.join(ABORT_S)
    if thread.is_alive():
        message = f"aborting the process groups takes more than {ABORT_S:.0f} s"
        raise RuntimeError(message)
    if errors:
        message = f"the process groups could not be aborted: {errors[0]}"
        raise RuntimeError(message) from errors[0]


def _abort_groups() -> None:
    names: dict[Any, str] = dict(distributed_c10d._world.pg_names)  # noqa: SLF001
    # the order in which torch 2.13's own _abort_process_group goes
    groups = sorted(names, key=names.__getitem__, reverse=True)
    with _nccl_calls_grouped(groups):
        for group in groups:
            group.abort()


@contextlib.contextmanager
def _nccl_calls_grouped(groups: Iterable[distributed.ProcessGroup]) -> Iterator[None]:
    """Let the aborts of several NCCL communicators not wait for one another.

    https://github.com/pytorch/pytorch/issues/119797
    """
    backends = (_nccl_backend(group) for group in groups)
    backend = next((found for found in backends if found is not None), None)
    if backend is None:
        yield
        return
    backend._group_start()  # noqa: SLF001
    try:
        yield
    finally:
        backend._group_end()  # noqa: SLF001


def _nccl_backend(group: distributed.ProcessGroup) -> Any:
    """NCCL's part of a group; None where it has none, as on CPU ranks."""
    try:
        backend = group._get_backend(torch.device("cuda"))  # noqa: SLF001
    except RuntimeError:
        return None
    return backend if hasattr(backend, "_group_start") else None


def _ends_of_others(pids: Iterable[int], name: str) -> set[Address]:
    """The other ranks' own ends of their connections."""
    store = stores.store()
    if not isinstance(store, stores.NodeStore):
        with contextlib.suppress(psutil.AccessDenied):  # /proc may be mounted with hidepid
            others = [pid for pid in pids if pid != os.getpid()]
            return {own for pid in others for own, _, _ in _connections(pid)}
    return _published(store, name)


def _published(store: Store, name: str) -> set[Address]:
    """The same as the other ranks say: on several nodes, a process number means nothing."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    keys = [f"release/{name}/{number}" for number in range(world_size)]
    own = [end for end, _, _ in _connections(os.getpid())]
    store.set(keys[rank], json.dumps(own))
    with contextlib.suppress(RuntimeError):  # some are silent: use what is there
        store.wait(keys, TOLD_S)
    others = [key for key in keys if key != keys[rank] and store.check([key])]
    return {(ip, port) for key in others for ip, port in json.loads(store.get(key))}


def _close(theirs: set[Address]) -> int:
    """Close this rank's connections to these ends; returns how many."""
    return sum(_shut(fd) for _, other, fd in _connections(os.getpid()) if other in theirs)


def _connections(pid: int) -> list[tuple[Address, Address, int]]:
    """TCP connections of a process: own end, other end, descriptor."""
    with contextlib.suppress(psutil.NoSuchProcess):  # its connections went with it
        found: list[Any] = psutil.Process(pid).net_connections("tcp")
        return [(_address(one.laddr), _address(one.raddr), one.fd) for one in found if one.raddr]
    return []


def _address(end: Any) -> Address:
    """Address and port; IPv4 may come through sockets of IPv6."""
    return end.ip.removeprefix("::ffff:"), end.port


def _shut(fd: int) -> bool:
    """End a connection whose descriptor torch owns, from beside it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as beside:
        beside.shutdown(socket.SHUT_RDWR)
        return True
    return False  # it was closed meanwhile, which is what was wanted
