"""push, pull and send: move variables through files in shared memory, not through messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.errors import PayloadError
from nbdist.protocol import messages, serialization
from nbdist.session.file_transfer_status import FileTransferStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from nbdist.cluster.interfaces import TransferCallback
    from nbdist.session.worker_group import WorkerGroup


def _no_progress(_done: int, _total: int) -> None:
    """Show nothing: send() runs while the cell's output is shown."""


def push_variables(values: Mapping[str, object], ranks: Sequence[int], workers: WorkerGroup) -> int:
    """Bind `values` on `ranks`; return their size in bytes, written once for all ranks."""
    file = serialization.write_payload_where_room(
        dict(values), workers.launcher_group.staging_folders
    )
    size = file.stat().st_size
    with (
        FileTransferStatus("push") as callback,
        workers.launcher_group.ship_file(file, ranks, callback) as paths,
    ):
        requests = {rank: messages.PushRequest(path=path) for rank, path in paths.items()}
        workers.request_each(requests, messages.PUSH, raises=PayloadError)
    return size


def pull_variables(
    names: Sequence[str],
    rank: int,
    workers: WorkerGroup,
    *,
    as_numpy: bool,
    gather: Callable[[str, Sequence[str]], str],
) -> dict[str, Any]:
    """Fetch variables of one rank, by name.

    Args:
        names: names of the variables.
        rank: rank to fetch from.
        workers: the worker group.
        as_numpy: return arrays instead of tensors.
        gather: lets all ranks write a prepared model into one file of rank 0, which no rank can
            do alone.
    """
    request = messages.PullRequest(
        names=list(names), folders=workers.launcher_group.payload_folders(rank)
    )
    reply: messages.PayloadFileReply = workers.request_all(
        [rank], messages.PULL, request, raises=PayloadError
    )[rank]
    if "prepared" not in reply:
        return _pulled(rank, reply["path"], workers, as_numpy=as_numpy)
    values: dict[str, Any] = {}
    for name in reply["prepared"]:
        gathered = gather(name, workers.launcher_group.payload_folders(0))
        values |= _pulled(0, gathered, workers, as_numpy=as_numpy)
    if others := [name for name in names if name not in values]:
        values |= pull_variables(others, rank, workers, as_numpy=as_numpy, gather=gather)
    return values


def _pulled(rank: int, path: str, workers: WorkerGroup, *, as_numpy: bool) -> dict[str, Any]:
    with FileTransferStatus("pull") as callback:
        return read_payload_file(rank, path, workers, callback, as_numpy=as_numpy)


def read_payload_file(
    rank: int,
    path: str,
    workers: WorkerGroup,
    on_progress: TransferCallback = _no_progress,
    *,
    as_numpy: bool = False,
) -> dict[str, Any]:
    """Read a payload file that a rank wrote, and delete it."""
    file: Path = workers.launcher_group.fetch_file(rank, path, on_progress)
    values: dict[str, Any] = serialization.read_payload(file, as_numpy=as_numpy, delete=True)
    return values
