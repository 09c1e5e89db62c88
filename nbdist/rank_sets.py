"""Sets of ranks as users write and read them: "0,2-3"; pure, used by the kernel."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nbdist.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_PART = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_SHOWN = 40


def resolve_ranks(
    ranks: str | Sequence[int] | int | None, world_size: int, *, option: str = "--ranks"
) -> tuple[int, ...]:
    """Return the selected ranks, sorted and unique; None selects all.

    Raises:
        OptionError: as `parse_ranks`, or values that are not integers.
    """
    if ranks is None:
        return tuple(range(world_size))
    if isinstance(ranks, str):
        return parse_ranks(ranks, world_size, option=option)
    requested = [ranks] if isinstance(ranks, int) else list(ranks)
    for rank in requested:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise _malformed(rank, world_size, option)
        _check(rank, world_size, option)
    if not requested:
        raise _malformed(ranks, world_size, option)
    return tuple(sorted(set(requested)))


def parse_ranks(text: str, world_size: int, *, option: str = "--ranks") -> tuple[int, ...]:
    """Parse "0,2-3" (spaces around numbers allowed) into (0, 2, 3), sorted and unique.

    Raises:
        OptionError: not of this form, or a rank that is not in the session.
    """
    parsed: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip(" "))
        if match is None:
            raise _malformed(text, world_size, option)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise _malformed(text, world_size, option)
        _check(first, world_size, option)
        _check(last, world_size, option)
        parsed.update(range(first, last + 1))
    return tuple(sorted(parsed))


def describe_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as part of a sentence: "rank 0", "ranks 0-1"."""
    named = list(ranks)
    return f"rank{'' if len(named) == 1 else 's'} {format_ranks(named)}"


def describe_states(states: Mapping[int, tuple[str, str, str]]) -> str:
    """Return the states of ranks, equal ones together: "rank 0 has failed; ranks 1-2 wait in x".

    Args:
        states: by rank, the verb for one rank, for several, and what follows it.
    """
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank, state in states.items():
        groups.setdefault(state, []).append(rank)
    return "; ".join(
        f"{describe_ranks(ranks)} {single if len(ranks) == 1 else several}{rest}"
        for (single, several, rest), ranks in groups.items()
    )


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in the shortest form that can be parsed: "0-3", "0,2-3"; "" for none."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _check(rank: int, world_size: int, option: str) -> None:
    if not 0 <= rank < world_size:
        valid = format_ranks(range(world_size))
        ranks = "ranks" if world_size > 1 else "rank"
        raise OptionError(
            f"Rank {rank} is not in this session (world_size {world_size}: {ranks} {valid})."
            f" Use {option} {valid}."
        )


def _malformed(value: object, world_size: int, option: str) -> OptionError:
    text = repr(value)
    text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    return OptionError(
        f"{option} must be a list of ranks or ranges within {format_ranks(range(world_size))}, got"
        f" {text}. Example: {option} {format_ranks(range(world_size))}."
    )
