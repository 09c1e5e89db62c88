"""Sets of ranks as users write and read them: "0,2-3"; pure, used by the kernel."""

from __future__ import annotations

import itertools
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

    A text is a list of ranks and ranges such as "0,2-3"; spaces around numbers are allowed.

    Raises:
        OptionError: not of this form, or a rank that is not in the session.
    """
    if ranks is None:
        return tuple(range(world_size))
    valid, wrong = format_ranks(range(world_size)), list[object]()
    if isinstance(ranks, str):
        matches = [_PART.fullmatch(part.strip(" ")) for part in ranks.split(",")]
        spans = [(int(match[1]), int(match[2] or match[1])) for match in matches if match]
        is_malformed = len(spans) < len(matches) or any(last < first for first, last in spans)
    else:
        requested = [ranks] if isinstance(ranks, int) else list(ranks)
        spans = [(rank, rank) for rank in requested]
        wrong = [rank for rank in requested if isinstance(rank, bool) or not isinstance(rank, int)]
        is_malformed = bool(wrong) or not requested
    if is_malformed:
        text = repr(wrong[0] if wrong else ranks)
        text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
        raise OptionError(
            f"{option} must be a list of ranks or ranges within {valid}, got {text}. Example:"
            f" {option} {valid}."
        )
    for rank in itertools.chain(*spans):
        if not 0 <= rank < world_size:
            known = describe_ranks(range(world_size))
            raise OptionError(
                f"Rank {rank} is not in this session (world_size {world_size}: {known})."
                f" Use {option} {valid}."
            )
    return tuple(sorted({rank for first, last in spans for rank in range(first, last + 1)}))


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
