"""push, pull and send: variables through files in shared memory, never through messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.errors import PayloadError
from nbdist.protocol import messages, serialization
from nbdist.session.transfer_progress import Moving

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from nbdist.cluster.interfaces import Moved
    from nbdist.session.worker_group import Gang


def _untold(_done: int, _total: int) -> None:
    """Show nothing: a value of send() comes while the cell has the screen."""


def push(values: Mapping[str, object], ranks: Sequence[int], gang: Gang) -> int:
    """Bind `values` on `ranks`; returns the bytes, written once for all of them."""
    file = serialization.write_where_room(dict(values), gang.fleet.staging)
    size = file.stat().st_size
    with Moving("push") as told, gang.fleet.shipped(file, ranks, told) as paths:
        requests = {rank: messages.PushRequest(path=path) for rank, path in paths.items()}
        gang.ask_each(requests, messages.PUSH, raises=PayloadError)
    return size


def pull(
    names: Sequence[str],
    rank: int,
    gang: Gang,
    *,
    as_numpy: bool,
    gather: Callable[[str, Sequence[str]], str],
) -> dict[str, Any]:
    """Fetch variables of one rank, by name.

    Args:
        names: of them.
        rank: whose.
        gang: all ranks.
        as_numpy: arrays in the place of tensors.
        gather: lets all ranks write a prepared model into one file of rank 0; which no rank
            can alone.
    """
    request = messages.PullRequest(names=list(names), folders=gang.fleet.folders(rank))
    reply: messages.FileReply = gang.ask([rank], messages.PULL, request, raises=PayloadError)[rank]
    if "prepared" not in reply:
        return _pulled(rank, reply["path"], gang, as_numpy=as_numpy)
    values: dict[str, Any] = {}
    for name in reply["prepared"]:
        gathered = gather(name, gang.fleet.folders(0))
        values |= _pulled(0, gathered, gang, as_numpy=as_numpy)
    if others := [name for name in names if name not in values]:
        values |= pull(others, rank, gang, as_numpy=as_numpy, gather=gather)
    return values


def _pulled(rank: int, path: str, gang: Gang, *, as_numpy: bool) -> dict[str, Any]:
    with Moving("pull") as told:
        return received(rank, path, gang, told, as_numpy=as_numpy)


def received(
    rank: int, path: str, gang: Gang, told: Moved = _untold, *, as_numpy: bool = False
) -> dict[str, Any]:
    """Read a payload file that a rank wrote, and delete it."""
    file: Path = gang.fleet.fetch(rank, path, told)
    values: dict[str, Any] = serialization.read(file, as_numpy=as_numpy, delete=True)
    return values
