"""Freeing ranks that are stuck in a collective; runs on the control thread of each rank.

A collective that waits for a rank which never comes ends only when its connections do. gloo
(torch 2.13) has no way to end one collective: `abort` leaves it waiting while DDP or a cell's
variable holds the group. Closing the sockets between the ranks frees all of them in
milliseconds. NCCL (torch 2.13) has `abort`, which has to be called on all ranks. The groups are
of no use afterwards; `rank.renew` makes new ones.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import socket
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import distributed
from torch.distributed import distributed_c10d

from nbdist.rank import store as stores

if TYPE_CHECKING:
    from collections.abc import Iterable


Address = tuple[str, int]
TOLD_S = dt.timedelta(seconds=1.5)
"""For the ranks of other nodes to say what connects them; one that is stopped does not."""


def release(pids: Iterable[int], name: str) -> int:
    """Close what connects this rank with others; returns how many connections.

    Args:
        pids: processes of all ranks.
        name: of this release, the same on all ranks.
    """
    store = stores.store()
    if isinstance(store, stores.NodeStore):
        theirs = _told(store, name)
    else:
        theirs = {own for pid in pids if pid != os.getpid() for own, _, _ in _connections(pid)}
    closed = sum(_shut(fd) for _, other, fd in _connections(os.getpid()) if other in theirs)
    if torch.cuda.is_initialized():
        distributed_c10d._abort_process_group()  # noqa: SLF001 - torch 2.13 has no public name
    return closed


def _told(store: stores.NodeStore, name: str) -> set[Address]:
    """Own ends of the other ranks' connections, as they say: a process number is a node's own."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    keys = [f"release/{name}/{one}" for one in range(world_size)]
    own = [end for end, _, _ in _connections(os.getpid())]
    store.set(keys[rank], json.dumps(own))
    with contextlib.suppress(distributed.DistStoreError):  # some are silent: the others are freed
        store.wait(keys, TOLD_S)
    others = [key for key in keys if key != keys[rank] and store.check([key])]
    return {(ip, port) for key in others for ip, port in json.loads(store.get(key))}


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
