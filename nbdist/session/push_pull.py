"""push, pull and send: move variables through files in shared memory, not through messages.

To and from the nodes of a cluster the files are copied, with a status line.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

from nbdist.errors import CellInterrupted, PayloadError
from nbdist.number_formatting import format_bytes
from nbdist.protocol import messages, serialization
from nbdist.protocol.operations import PULL_MODEL, PullModelRequest
from nbdist.session.collective_request import CollectiveRequest
from nbdist.session.progress import StatusLine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from nbdist.cluster.launcher_process import TransferCallback
    from nbdist.session.worker_group import WorkerGroup

SHOW_AFTER_S = 0.5
"""Shorter transfers show no status line."""
PROGRESS_INTERVAL_S = 0.25


def push_variables(values: Mapping[str, object], ranks: Sequence[int], workers: WorkerGroup) -> int:
    """Bind `values` on `ranks`; return their size in bytes, written once for all ranks."""
    file = serialization.write_payload_to_free_folder(
        dict(values), workers.launcher_group.run_dir.folders
    )
    size = file.stat().st_size
    with (
        _TransferStatus("push") as callback,
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
) -> dict[str, Any]:
    """Fetch variables of one rank, by name; of a prepared model, its state dict."""
    values: dict[str, Any] = {}
    while others := [name for name in names if name not in values]:
        request = messages.PullRequest(
            names=others, folders=workers.launcher_group.payload_folders(rank)
        )
        reply: messages.PayloadFileReply = workers.request_all(
            [rank], messages.PULL, request, raises=PayloadError
        )[rank]
        if "prepared" not in reply:
            return values | _pull_file(rank, reply["path"], workers, as_numpy=as_numpy)
        for name in reply["prepared"]:  # all ranks write it into one payload file of rank 0
            folders = workers.launcher_group.payload_folders(0)
            with StatusLine("pull") as line:
                reports = CollectiveRequest(workers, PULL_MODEL, line.show).run(
                    PullModelRequest(name=name, folders=folders)
                )
                line.show("done")
            values |= _pull_file(0, reports[0].path, workers, as_numpy=as_numpy)
    return values


def _pull_file(rank: int, path: str, workers: WorkerGroup, *, as_numpy: bool) -> dict[str, Any]:
    with _TransferStatus("pull") as callback:
        return read_payload_file(rank, path, workers, callback, as_numpy=as_numpy)


def read_payload_file(
    rank: int,
    path: str,
    workers: WorkerGroup,
    on_progress: TransferCallback = lambda _done, _total: None,
    *,
    as_numpy: bool = False,
) -> dict[str, Any]:
    """Read a payload file that a rank wrote, and delete it."""
    file: Path = workers.launcher_group.fetch_file(rank, path, on_progress)
    values: dict[str, Any] = serialization.read_payload(file, as_numpy=as_numpy, delete=True)
    return values


class _TransferStatus:
    """Status line of a file on its way to or from a node; called with each chunk."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._line = StatusLine(doing)
        self._began = time.monotonic()
        self._due = self._began + SHOW_AFTER_S
        self._shown = False
        self._done = self._total = 0

    def __call__(self, done: int, total: int) -> None:
        """Update the number of transferred bytes."""
        self._done, self._total = done, total
        now = time.monotonic()
        if now >= self._due and done < total:
            self._due, self._shown = now + PROGRESS_INTERVAL_S, True
            self._line.show(
                f"{format_bytes(done)} of {format_bytes(total)}, {self._rate(now)},"
                f" {done / total:.0%}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Show the result if progress was shown.

        Raises:
            CellInterrupted: the transfer was interrupted.
        """
        half_way = self._done < self._total
        stopped = "interrupted"
        if half_way:
            stopped = f"interrupted after {format_bytes(self._done)} of {format_bytes(self._total)}"
        if self._shown:
            now = time.monotonic()
            done = f"{format_bytes(self._done)} in {now - self._began:.1f} s, {self._rate(now)}"
            self._line.show(stopped if half_way else done)
        with self._line:
            if kind is KeyboardInterrupt:
                may_have_arrived = self._doing == "push" and not half_way
                outcome = (
                    "the ranks may have the values"
                    if may_have_arrived
                    else "no variable was changed"
                )
                raise CellInterrupted(f"The {self._doing} was {stopped}; {outcome}.") from None

    def _rate(self, now: float) -> str:
        return f"{format_bytes(int(self._done / max(now - self._began, 1e-6)))}/s"
