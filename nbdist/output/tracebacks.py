"""Formats the errors of several ranks as one traceback: root cause first, equal ones merged.

An error is a cause, secondary (a collective that failed because another rank was gone) or an
interrupt. Secondary errors are shown in one line each below the cause.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nbdist.output.ansi import replace_invalid_chars, strip_ansi
from nbdist.rank_sets import describe_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.protocol.messages import RankError

ErrorKind = Literal["cause", "secondary", "interrupt"]

MAX_TRACEBACKS = 4
"""Maximum number of full tracebacks; further ones are shown in one line each."""
CALL_COMMENT = "# @nbdist.distribute: "
"""Begins the code that calls a distributed function; its name follows."""

_MAX_CHARS = 300
_OWN_FOLDER = f"{Path(__file__).resolve().parents[1]}/"
"""Folder of the package. The ranks use the same installation."""
_BOLD, _RESET = "\x1b[1m", "\x1b[0m"
_ORDER: tuple[ErrorKind, ...] = ("cause", "secondary", "interrupt")


_SECONDARY_ERRORS = (
    # Tested with two gloo ranks on torch 2.13.0+cpu, one of which exits or is late.
    # gloo, transport/tcp/pair.cc:553 and :537, transport/tcp/unbound_buffer.cc:78, and a timeout:
    r"Connection closed by peer",
    r"gloo/transport/\S+\] (?:Read|Write|writev) error .*: (?:Connection reset|Broken pipe)",
    r"Timed out waiting \d+ms for (?:recv|send) operation to complete",
    r"Application timeout caused pair closure",
    # ProcessGroupGloo.cpp:
    r"Ranks? [\d, ]+failed to pass monitoredBarrier",
    # TCPStore recv and send:
    r"^DistNetworkError: .*Connection was likely closed",
    r"^Dist\w*Error: .*(?:Broken pipe|reset by peer)",
    # our worker/collective_check.py, for Stop:
    r"the connections between the ranks were cut",
    # From the libraries' strings and sources; not tested.
    # torch 2.13, strings of libtorch_cpu:
    r"Remote peer closed the connection",
    r"Gloo connectFullMesh failed with",
    # torch 2.x, TCPStore wait:
    r"^DistStoreError: .*timeout after \d+ms",
    # NCCL 2.19-2.27 by torch:
    r"remote process exited or there was a network error",
    # torch 2.x, NCCLUtils and ProcessGroupNCCL:
    r"ncclRemoteError: A call failed possibly due to",
    r"NCCL communicator was aborted",
    r"Watchdog caught collective operation timeout",
)
"""Messages that only indicate the failure of another rank.

Matched against the last exception and the chained ones.
"""
_SECONDARY = re.compile("|".join(f"(?:{pattern})" for pattern in _SECONDARY_ERRORS))
_PEER = re.compile(r"^(?:ConnectionResetError|BrokenPipeError|ConnectionAbortedError|EOFError)\b")
_PEER_FRAMES = re.compile(r"/(?:torch/distributed|deepspeed/comm)/")
"""Python's connection errors are secondary only if these packages raise them."""

_EXCEPTION_LINE = re.compile(r"^(?:\w+\.)*\w+: .*")
_FRAME = re.compile(r"\s*File (.+?):(\d+)(?:, in |\s*$)")
_CELL_LINE = re.compile(r"^Cell In\[\d+\], line \d+", re.MULTILINE)
_VARYING = re.compile(
    r"0x[0-9a-fA-F]+"
    r"|\bpid[ =:]*\d+"
    r"|/tmp/\S*"
    r"|\[[0-9a-fA-F.:]+\]:\d+"
    r"|\b127\.0\.0\.1:\d+"
)


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Ranks that failed in the same way."""

    kind: ErrorKind
    ranks: tuple[int, ...]
    error: RankError
    """The earliest error of the group."""

    @property
    def label(self) -> str:
        """The ranks as text: "rank 1", "ranks 0-3"."""
        return describe_ranks(self.ranks)


def group_errors(errors: Sequence[RankError]) -> list[ErrorGroup]:
    """Group equal errors; causes first, then by time.

    Errors are equal if exception, message and traceback are the same, apart from colours,
    addresses, process ids, temporary files and ports.
    """
    by_signature: dict[tuple[ErrorKind, tuple[str, ...]], list[RankError]] = {}
    for error in sorted(errors, key=lambda error: (error.at, error.rank)):
        texts = (error.ename, error.evalue, *_user_frames(error.traceback))
        by_signature.setdefault((_kind(error), tuple(map(_normalize, texts))), []).append(error)
    groups = [
        ErrorGroup(kind, tuple(sorted(error.rank for error in same)), same[0])
        for (kind, _), same in by_signature.items()
    ]
    # stable: keeps the order by time
    return sorted(groups, key=lambda group: _ORDER.index(group.kind))


def summarize_errors(groups: Sequence[ErrorGroup]) -> str:
    """Return one line for the exception: "ValueError: bad batch (rank 1)"."""
    first = groups[0]
    line = f"{_message(first.error)} ({first.label})"
    other_causes = [group for group in groups[1:] if group.kind == "cause"]
    for group in other_causes[:MAX_TRACEBACKS]:
        line += f"; {group.error.ename} ({group.label})"
    return line


def format_tracebacks(groups: Sequence[ErrorGroup], *, ranks: Sequence[int] = ()) -> list[str]:
    """Return lines with ANSI colours, in the style of IPython.

    Args:
        groups: from ``group_errors``.
        ranks: all ranks of the cell, so that the header can list those that finished.
    """
    first = groups[0]
    full = [group for group in groups if group.kind == first.kind]
    lines: list[str] = []
    shown: dict[tuple[str, ...], ErrorGroup] = {}
    failed = {rank for group in groups for rank in group.ranks}
    finished = tuple(rank for rank in ranks if rank not in failed)
    note = f" ({describe_ranks(finished)} finished)" if finished else ""
    for group in full:
        frames = _user_frames(group.error.traceback)
        # exception type and frames without the message: where the error occurred
        place = (group.error.ename, *map(_normalize, frames[:-1]))
        earlier = shown.get(place)
        lines += [""] if shown else []
        if earlier is not None or len(shown) >= MAX_TRACEBACKS:
            location = f", at the same place as {earlier.label}" if earlier else ""
            lines.append(f"{_BOLD}{group.label}{location}:{_RESET} {_message(group.error)}")
            continue
        lines += [f"{_BOLD}{group.label}{'' if shown else note}:{_RESET}", *frames]
        shown[place] = group
    folded = [_one_line_summary(group, first) for group in groups if group.kind != first.kind]
    return [*lines, *([""] if folded else []), *folded]


def format_reminder(groups: Sequence[ErrorGroup]) -> list[str]:
    """Return lines for errors whose tracebacks were shown while other ranks still ran."""
    first = groups[0]
    folded = [_one_line_summary(group, first) for group in groups if group.kind != first.kind]
    lines = _CELL_LINE.findall(strip_ansi("\n".join(first.error.traceback)))
    where = f" in {lines[-1]}" if lines else ""  # papermill shows only these lines
    return [f"{summarize_errors(groups)}{where}: shown above", *folded]


def _one_line_summary(group: ErrorGroup, first: ErrorGroup) -> str:
    """One line for a secondary error or an interrupt."""
    if group.kind == "interrupt":
        return f"{group.label} {'was' if len(group.ranks) == 1 else 'were'} interrupted"
    lost = "lost its connection" if len(group.ranks) == 1 else "lost their connections"
    return f"{group.label} then {lost} to {first.label}: {_message(group.error)}"


def _kind(error: RankError) -> ErrorKind:
    if error.ename == "KeyboardInterrupt":
        return "interrupt"
    lines = [f"{error.ename}: {strip_ansi(error.evalue)}"]
    # messages of chained exceptions, such as "RuntimeError: ...", without source lines
    texts = [strip_ansi(item).lstrip("\n") for item in error.traceback]
    lines += [text for text in texts if _EXCEPTION_LINE.match(text) and not _FRAME.match(text)]
    if any(_SECONDARY.search(line) for line in lines):
        return "secondary"
    if _PEER.match(lines[0]) and any(
        _PEER_FRAMES.search(strip_ansi(frame)) for frame in error.traceback
    ):
        return "secondary"
    return "cause"


def _normalize(text: str) -> str:
    return _VARYING.sub("*", strip_ansi(text))


def _user_frames(traceback: Sequence[str]) -> list[str]:
    """A traceback without frames of nbdist and ipykernel."""
    user_frames = []
    for item in traceback:
        first, *code = strip_ansi(item).split("\n")
        match = _FRAME.match(first)
        path = str(Path(match[1]).expanduser()) if match else ""
        is_own = path.startswith(_OWN_FOLDER) or (code and CALL_COMMENT in code[0])
        if not is_own and "/site-packages/ipykernel/" not in path:
            user_frames.append(replace_invalid_chars(item))
    return user_frames


def _message(error: RankError) -> str:
    """Exception type and the first line of its message."""
    text = replace_invalid_chars(strip_ansi(error.evalue)).strip().split("\n", 1)[0]
    if len(text) > _MAX_CHARS:
        text = text[:_MAX_CHARS] + "..."
    return f"{error.ename}: {text}" if text else error.ename
