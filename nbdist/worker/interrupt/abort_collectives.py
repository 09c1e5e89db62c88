"""Aborts the collectives that ranks wait in; runs on the control thread of each rank.

A collective that waits for a rank that never calls it ends only when its process group is aborted.
The procedure is the same on CPU and GPU ranks: abort all process groups, then close the
connections between the ranks.

    NCCL (torch 2.13)   `abort` ends its kernels and closes its connections; all ranks must call it
    gloo (torch 2.13)   has no `abort`: the call does nothing, and closing its sockets ends its
                        collectives within milliseconds

The order matters: NCCL's watchdog reports a connection closed before the abort as an error. The
groups stay in torch's registry, because FSDP2 and DeepSpeed look them up by name and rank while
`worker.operations.recover` detaches their engines and creates new groups. A second abort is
harmless.
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

from nbdist.worker import rendezvous_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch._C._distributed_c10d import Store


Address = tuple[str, int]
PEER_REPLY_S = dt.timedelta(seconds=1.5)
"""Timeout for the other ranks to publish their connections. A suspended rank does not publish
them; a late rank closes the connections from its side."""
ABORT_S = 20.0
"""Timeout of NCCL's abort, which waits for its kernels; torch's default is the group's timeout."""


def abort_collectives(pids: Iterable[int], name: str) -> int:
    """Abort all collectives of this rank; return the number of closed connections.

    Args:
        pids: process ids of all ranks.
        name: name of this abort, the same on all ranks.

    Raises:
        RuntimeError: a group was not aborted; the connections are closed nevertheless.
    """
    try:
        abort_groups()
    finally:
        closed = _close_connections(_peer_addresses(pids, name))
    return closed


def abort_on_all_ranks(name: str) -> None:
    """Abort all collectives, called by all ranks on their main threads.

    Args:
        name: name of this abort, the same on all ranks.

    Raises:
        RuntimeError: a group was not aborted.
    """
    abort_groups()
    _close_connections(_exchange_addresses(rendezvous_store.get_store(), name))


def abort_groups() -> None:
    """Abort every process group without removing it from torch's registry.

    Raises:
        RuntimeError: aborting a group failed or timed out.
    """
    names: dict[Any, str] = dict(distributed_c10d._world.pg_names)  # noqa: SLF001
    # the same order as in torch 2.13's _abort_process_group
    groups = sorted(names, key=names.__getitem__, reverse=True)
    errors: list[BaseException] = []

    def abort() -> None:
        try:
            with _nccl_calls_grouped(groups):
                for group in groups:
                    group.abort()
        except Exception as error:  # noqa: BLE001 - raised again on the thread that waits
            errors.append(error)

    # In a thread: NCCL's abort may hang, and this rank must reply nevertheless.
    thread = threading.Thread(target=abort, name="nbdist-abort", daemon=True)
    thread.start()
    thread.join(ABORT_S)
    if thread.is_alive():
        message = f"aborting the process groups takes more than {ABORT_S:.0f} s"
        raise RuntimeError(message)
    if errors:
        message = f"the process groups could not be aborted: {errors[0]}"
        raise RuntimeError(message) from errors[0]


@contextlib.contextmanager
def _nccl_calls_grouped(groups: Iterable[distributed.ProcessGroup]) -> Iterator[None]:
    """Abort several NCCL communicators without waiting for each other.

    https://github.com/pytorch/pytorch/issues/119797
    """
    backend: Any = None
    for group in groups:
        with contextlib.suppress(RuntimeError):  # CPU ranks have no NCCL backend
            backend = group._get_backend(torch.device("cuda"))  # noqa: SLF001
        if hasattr(backend, "_group_start"):
            break
    else:
        yield
        return
    backend._group_start()  # noqa: SLF001
    try:
        yield
    finally:
        backend._group_end()  # noqa: SLF001


def _peer_addresses(pids: Iterable[int], name: str) -> set[Address]:
    """Return the local addresses of the other ranks' connections."""
    store = rendezvous_store.get_store()
    if not isinstance(store, rendezvous_store.NodeAgentStore):
        with contextlib.suppress(psutil.AccessDenied):  # /proc may be mounted with hidepid
            others = [pid for pid in pids if pid != os.getpid()]
            return {local for pid in others for local, _, _ in _connections(pid)}
    return _exchange_addresses(store, name)


def _exchange_addresses(store: Store, name: str) -> set[Address]:
    """Exchange the local addresses through the store: a pid is only valid on its node."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    keys = [f"release/{name}/{number}" for number in range(world_size)]
    addresses = [local for local, _, _ in _connections(os.getpid())]
    store.set(keys[rank], json.dumps(addresses))
    with contextlib.suppress(RuntimeError):  # some ranks do not publish: use what is available
        store.wait(keys, PEER_REPLY_S)
    others = [key for key in keys if key != keys[rank] and store.check([key])]
    return {(ip, port) for key in others for ip, port in json.loads(store.get(key))}


def _close_connections(peer_addresses: set[Address]) -> int:
    """Close this rank's connections to these addresses; return their number."""
    closed = 0
    for _, remote, fd in _connections(os.getpid()):
        # A duplicate of torch's descriptor; OSError if the connection is already closed.
        with contextlib.suppress(OSError):
            if remote in peer_addresses:
                with socket.socket(fileno=os.dup(fd)) as duplicate:
                    duplicate.shutdown(socket.SHUT_RDWR)
                closed += 1
    return closed


def _connections(pid: int) -> list[tuple[Address, Address, int]]:
    """Return the TCP connections of a process: local address, remote address, descriptor."""
    with contextlib.suppress(psutil.NoSuchProcess):
        connections: list[Any] = psutil.Process(pid).net_connections("tcp")
        return [
            (_address(connection.laddr), _address(connection.raddr), connection.fd)
            for connection in connections
            if connection.raddr
        ]
    return []


def _address(end: Any) -> Address:
    """Return address and port."""
    return end.ip.removeprefix("::ffff:"), end.port  # IPv4 on an IPv6 socket
