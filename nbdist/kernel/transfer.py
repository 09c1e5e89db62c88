"""push, pull and send: variables through files in shared memory, never through messages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbdist import payload, wire
from nbdist.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.engines.run_dir import RunDir
    from nbdist.kernel.gang import Gang


def push(values: Mapping[str, object], ranks: Sequence[int], gang: Gang) -> int:
    """Bind `values` on `ranks`; returns the bytes, written once for all of them."""
    path = payload.write_where_room(dict(values), _folders(gang.run_dir))
    try:
        gang.ask(ranks, wire.PUSH, wire.PushRequest(path=str(path)), raises=PayloadError)
        return path.stat().st_size
    finally:
        path.unlink(missing_ok=True)


def pull(
    names: Sequence[str],
    rank: int,
    gang: Gang,
    *,
    as_numpy: bool,
    gather: Callable[[str, Sequence[Path]], str],
) -> dict[str, Any]:
    """Fetch variables of one rank, by name.

    Args:
        names: of them.
        rank: whose.
        gang: all ranks.
        as_numpy: arrays in the place of tensors.
        gather: lets all ranks write a prepared model into one file; which no rank can alone.
    """
    folders = _folders(gang.run_dir)
    request = wire.PullRequest(names=list(names), folders=[str(f) for f in folders])
    reply: wire.FileReply = gang.ask([rank], wire.PULL, request, raises=PayloadError)[rank]
    if "prepared" not in reply:
        return received(reply["path"], gang.run_dir, as_numpy=as_numpy)
    values: dict[str, Any] = {}
    for name in reply["prepared"]:
        values |= received(gather(name, folders), gang.run_dir, as_numpy=as_numpy)
    if others := [name for name in names if name not in values]:
        values |= pull(others, rank, gang, as_numpy=as_numpy, gather=gather)
    return values


def received(path: str, run_dir: RunDir, *, as_numpy: bool = False) -> dict[str, Any]:
    """Read a payload file that a rank wrote, and delete it."""
    file = Path(path)
    if file.parent not in _folders(run_dir):
        msg = f"A rank named {path}, which lies outside of this session's own folders."
        raise PayloadError(msg)
    values: dict[str, Any] = payload.read(file, as_numpy=as_numpy, delete=True)
    return values


def _folders(run_dir: RunDir) -> list[Path]:
    """Where payload files may lie, best first: shared memory, then the temp folder."""
    return [run_dir.bulk, run_dir.path]
