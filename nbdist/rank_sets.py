"""Sets of ranks as a user writes and reads them: "0,2-3"; pure, used by the kernel."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nbdist.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PART = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_SHOWN = 40


def chosen(
    ranks: str | Sequence[int] | int | None, world_size: int, *, option: str = "--ranks"
) -> tuple[int, ...]:
    """Give the ranks that were asked for, ascending, each once; None means all.

    Raises:
        OptionError: as `parse_ranks`, or something else than whole numbers.
    """
    if ranks is None:
        return tuple(range(world_size))
    if isinstance(ranks, str):
        return parse_ranks(ranks, world_size, option=option)
    wanted = [ranks] if isinstance(ranks, int) else list(ranks)
    for rank in wanted:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise _malformed(rank, world_size, option)
        _check(rank, world_size, option)
    if not wanted:
        raise _malformed(ranks, world_size, option)
    return tuple(sorted(set(wanted)))


def parse_ranks(text: str, world_size: int, *, option: str = "--ranks") -> tuple[int, ...]:
    """Read "0,2-3" (spaces allowed around the numbers): (0, 2, 3), ascending, each once.

    Raises:
        OptionError: not of this form, or a rank outside of the session.
    """
    wanted: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip(" "))
        if match is None:
            raise _malformed(text, world_size, option)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise _malformed(text, world_size, option)
        _check(first, world_size, option)
        _check(last, world_size, option)
        wanted.update(range(first, last + 1))
    return tuple(sorted(wanted))


def words(ranks: Iterable[int]) -> str:
    """Write ranks as part of a sentence: "rank 0", "ranks 0-1"."""
    named = list(ranks)
    return f"rank{'' if len(named) == 1 else 's'} {label(named)}"


def label(ranks: Iterable[int]) -> str:
    """Write ranks as short as they can be read back: "0-3", "0,2-3"; "" for none."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _check(rank: int, world_size: int, option: str) -> None:
    if not 0 <= rank < world_size:
        there = label(range(world_size))
        ranks = "ranks" if world_size > 1 else "rank"
        message = (
            f"rank {rank} is not in this session (world_size {world_size}: {ranks} {there})."
            f" Use {option} {there}."
        )
        raise OptionError(message)


def _malformed(given: object, world_size: int, option: str) -> OptionError:
    text = repr(given)
    text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    return OptionError(
        f"{option} {text} is not a list of ranks; allowed are numbers and ranges of them"
        f" from {label(range(world_size))}, such as {option} {label(range(world_size))}."
    )
