"""Arithmetic on spans of time; pure.

A list of spans that a function returns is sorted and without overlaps.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Span = tuple[int, int]
"""Begin and end, in nanoseconds."""


def union(spans: Iterable[Span], *, gap: int = 0) -> list[Span]:
    """Moments in any of the spans; holes no longer than `gap` are filled."""
    found: list[Span] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if found and begin <= found[-1][1] + gap:
            if end > found[-1][1]:
                found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def common(one: Iterable[Span], other: Iterable[Span]) -> list[Span]:
    """Moments in both."""
    left, right = union(one), union(other)
    found: list[Span] = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            found.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def minus(one: Iterable[Span], other: Iterable[Span]) -> list[Span]:
    """Moments in the first and not in the second."""
    taken = union(other)
    found: list[Span] = []
    j = 0
    for begin, end in union(one):
        while j < len(taken) and taken[j][1] <= begin:
            j += 1
        at, k = begin, j
        while k < len(taken) and taken[k][0] < end:
            if taken[k][0] > at:
                found.append((at, taken[k][0]))
            at = max(at, taken[k][1])
            k += 1
        if at < end:
            found.append((at, end))
    return found


def touching(spans: Sequence[Span], one: Span) -> list[Span]:
    """Those of many spans, sorted and without overlaps, that share a moment with one."""
    place = max(0, bisect_left(spans, one) - 1)
    found = []
    while place < len(spans) and spans[place][0] < one[1]:
        if spans[place][1] > one[0]:
            found.append(spans[place])
        place += 1
    return found


def length(spans: Iterable[Span]) -> int:
    """Nanoseconds that spans without overlaps cover."""
    return sum(end - begin for begin, end in spans)
