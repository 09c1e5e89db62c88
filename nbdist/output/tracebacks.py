"""The errors of several ranks as one traceback: root cause first, equal ones once.

Pure; runs in the notebook's kernel, used by the cell when its ranks have answered. An error
is a cause, or it is secondary (a collective that failed because a peer was gone), or it is
an interrupt. Secondary errors are one line each below the cause.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nbdist.output.ansi import clean, plain, rank_label

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nbdist.protocol.messages import RankError

Kind = Literal["cause", "secondary", "interrupt"]

MAX_TRACEBACKS = 4
"""Different tracebacks that are shown in full; further ones are a line each."""

_MAX_CHARS = 300
_BOLD, _RESET = "\x1b[1m", "\x1b[0m"
_ORDER: tuple[Kind, ...] = ("cause", "secondary", "interrupt")


@dataclass(frozen=True, slots=True)
class Secondary:
    """A message that says no more than: somebody else failed."""

    pattern: str
    source: str
    """Library, version and place it comes from."""


SECONDARY = (
    # Tried with two gloo ranks on torch 2.13.0+cpu, one of which exits or is late:
    Secondary(r"Connection closed by peer", "gloo in torch 2.13: transport/tcp/pair.cc:553"),
    Secondary(
        r"gloo/transport/\S+\] (?:Read|Write|writev) error .*: (?:Connection reset|Broken pipe)",
        "gloo in torch 2.13: transport/tcp/pair.cc:537",
    ),
    Secondary(
        r"Timed out waiting \d+ms for (?:recv|send) operation to complete",
        "gloo in torch 2.13: transport/tcp/unbound_buffer.cc:78",
    ),
    Secondary(r"Application timeout caused pair closure", "gloo in torch 2.13, after a timeout"),
    Secondary(r"Ranks? [\d, ]+failed to pass monitoredBarrier", "torch 2.13: ProcessGroupGloo.cpp"),
    Secondary(r"^DistNetworkError: .*Connection was likely closed", "torch 2.13: TCPStore recv"),
    Secondary(r"^Dist\w*Error: .*(?:Broken pipe|reset by peer)", "torch 2.13: TCPStore send"),
    Secondary(
        r"the connections between the ranks were cut", "our worker/collective_check.py, for Stop"
    ),
    # Read in the libraries' strings and sources; not tried here:
    Secondary(r"Remote peer closed the connection", "gloo in torch 2.13: strings of libtorch_cpu"),
    Secondary(r"Gloo connectFullMesh failed with", "torch 2.13: strings of libtorch_cpu"),
    Secondary(r"^DistStoreError: .*timeout after \d+ms", "torch 2.x: TCPStore wait"),
    Secondary(r"remote process exited or there was a network error", "NCCL 2.19-2.27 by torch"),
    Secondary(r"ncclRemoteError: A call failed possibly due to", "torch 2.x: NCCLUtils"),
    Secondary(r"NCCL communicator was aborted", "torch 2.x: NCCLUtils"),
    Secondary(r"Watchdog caught collective operation timeout", "torch 2.x: ProcessGroupNCCL"),
)
"""Checked against the last exception and those it was raised from."""

_SECONDARY = re.compile("|".join(f"(?:{entry.pattern})" for entry in SECONDARY))
_PEER = re.compile(r"^(?:ConnectionResetError|BrokenPipeError|ConnectionAbortedError|EOFError)\b")
_PEER_FRAMES = re.compile(r"/(?:torch/distributed|deepspeed/comm)/")
"""Python's own connection errors are a peer's only where these packages raise them."""

_EXCEPTION_LINE = re.compile(r"^(?:\w+\.)*\w+: .*")
_FRAME = re.compile(r"\s*File (.+?):(\d+)(?:, in |\s*$)")
_VARYING = re.compile(
    r"0x[0-9a-fA-F]+"
    r"|\bpid[ =:]*\d+"
    r"|/tmp/\S*"
    r"|\[[0-9a-fA-F.:]+\]:\d+"
    r"|\b127\.0\.0\.1:\d+"
)


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that failed in the same way."""

    kind: Kind
    ranks: tuple[int, ...]
    error: RankError
    """The earliest of them."""

    @property
    def label(self) -> str:
        """The ranks for people: "rank 1", "ranks 0-3"."""
        return _ranks(self.ranks)


def grouped(errors: Sequence[RankError]) -> list[Group]:
    """Put equal errors together; causes first, then by time.

    Equal means: same exception, message and traceback, apart from colours, addresses,
    process ids, temp files and ports.
    """
    found: dict[tuple[Kind, tuple[str, ...]], list[RankError]] = {}
    for error in sorted(errors, key=lambda error: (error.at, error.rank)):
        found.setdefault((_kind(error), _signature(error)), []).append(error)
    groups = [
        Group(kind, tuple(sorted(error.rank for error in same)), same[0])
        for (kind, _), same in found.items()
    ]
    return sorted(groups, key=lambda group: _ORDER.index(group.kind))  # stable: time is kept


def summary(groups: Sequence[Group]) -> str:
    """One line for the exception: "ValueError: bad batch (rank 1)"."""
    first = groups[0]
    line = f"{_message(first.error)} ({first.label})"
    more = [group for group in groups[1:] if group.kind == "cause"]
    if more:
        line += "".join(f"; {group.error.ename} ({group.label})" for group in more[:MAX_TRACEBACKS])
    return line


def render(groups: Sequence[Group], *, ranks: Sequence[int] = ()) -> list[str]:
    """Lines with ANSI colours, as IPython shows them.

    Args:
        groups: from `grouped`.
        ranks: all ranks of the cell, so that the header tells who finished.
    """
    first = groups[0]
    full = [group for group in groups if group.kind == first.kind]
    lines: list[str] = []
    shown: dict[tuple[str, ...], Group] = {}
    for index, group in enumerate(full):
        lines += _shown(group, shown, note=_finished(groups, ranks) if index == 0 else "")
    folded = [_folded(group, first) for group in groups if group.kind != first.kind]
    return [*lines, *([""] if folded else []), *folded]


def reminder(groups: Sequence[Group]) -> list[str]:
    """Lines for errors whose tracebacks were shown while other ranks still ran."""
    first = groups[0]
    folded = [_folded(group, first) for group in groups if group.kind != first.kind]
    return [f"{summary(groups)}: shown above", *folded]


def _shown(group: Group, shown: dict[tuple[str, ...], Group], *, note: str) -> list[str]:
    """A group in full, or in a line where its frames stand above already."""
    label = group.label
    frames = _frames_of(group.error)
    twin = shown.get(frames)
    space = [""] if shown else []
    if twin is not None or len(shown) >= MAX_TRACEBACKS:
        where = f", at the same place as {twin.label}" if twin else ""
        return [*space, f"{_BOLD}{label}{where}:{_RESET} {_message(group.error)}"]
    shown[frames] = group
    return [*space, f"{_BOLD}{label}{note}:{_RESET}", *_user_frames(group.error.traceback)]


def _finished(groups: Sequence[Group], ranks: Iterable[int]) -> str:
    """Say which ranks finished, where there are any."""
    failed = {rank for group in groups for rank in group.ranks}
    rest = tuple(rank for rank in ranks if rank not in failed)
    return f" ({_ranks(rest)} finished)" if rest else ""


def _folded(group: Group, first: Group) -> str:
    """One line on an error that follows from another, or on an interrupt."""
    if group.kind == "interrupt":
        return f"{group.label} {'was' if len(group.ranks) == 1 else 'were'} interrupted"
    lost = "lost its connection" if len(group.ranks) == 1 else "lost their connections"
    return f"{group.label} then {lost} to {first.label}: {_message(group.error)}"


def _kind(error: RankError) -> Kind:
    if error.ename == "KeyboardInterrupt":
        return "interrupt"
    told = [f"{error.ename}: {plain(error.evalue)}"]
    told += [line for item in error.traceback for line in _exception_lines(item)]
    if any(_SECONDARY.search(line) for line in told):
        return "secondary"
    if _PEER.match(told[0]) and any(_PEER_FRAMES.search(plain(i)) for i in error.traceback):
        return "secondary"
    return "cause"


def _exception_lines(item: str) -> list[str]:
    """Lines such as "RuntimeError: ..." of a chained traceback; no source lines."""
    text = plain(item).lstrip("\n")
    return [text] if _EXCEPTION_LINE.match(text) and not _FRAME.match(text) else []


def _signature(error: RankError) -> tuple[str, ...]:
    texts = (error.ename, error.evalue, *_user_frames(error.traceback))
    return tuple(_normal(text) for text in texts)


def _frames_of(error: RankError) -> tuple[str, ...]:
    """Type and frames without the message: where it happened."""
    return (error.ename, *(_normal(item) for item in _user_frames(error.traceback)[:-1]))


def _normal(text: str) -> str:
    return _VARYING.sub("*", plain(text))


def _user_frames(traceback: Sequence[str]) -> list[str]:
    """A traceback without frames of nbdist and ipykernel."""
    return [clean(item) for item in traceback if not _is_ours(item)]


def _is_ours(item: str) -> bool:
    found = _FRAME.match(plain(item).split("\n", 1)[0])
    if not found:
        return False
    path = str(Path(found[1]).expanduser())
    return path.startswith(_own_folder()) or "/site-packages/ipykernel/" in path


@lru_cache(maxsize=1)
def _own_folder() -> str:
    """The package's folder; the ranks run on the same installation."""
    return f"{Path(__file__).resolve().parents[1]}/"


def _message(error: RankError) -> str:
    """Exception and the first line of its message."""
    text = clean(plain(error.evalue)).strip().split("\n", 1)[0]
    if len(text) > _MAX_CHARS:
        text = text[:_MAX_CHARS] + "..."
    return f"{error.ename}: {text}" if text else error.ename


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s'[: len(ranks) > 1]} {rank_label(ranks)}"
