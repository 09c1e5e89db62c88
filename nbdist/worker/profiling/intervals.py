"""Set operations on time spans. Returned lists of spans are sorted and do not overlap."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Span = tuple[int, int]
"""Start and end in nanoseconds."""


def union(spans: Iterable[Span], *, gap: int = 0) -> list[Span]:
    """Merge spans. Gaps of at most `gap` nanoseconds are filled."""
    merged: list[Span] = []
    for begin, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and begin <= merged[-1][1] + gap:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def intersection(spans: Iterable[Span], other: Iterable[Span]) -> list[Span]:
    """Return the intersection."""
    left, right = union(spans), union(other)
    overlaps: list[Span] = []
    i = j = 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if begin < end:
            overlaps.append((begin, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return overlaps


def difference(spans: Iterable[Span], other: Iterable[Span]) -> list[Span]:
    """Return the parts of the first that are not in the second."""
    taken = union(other)
    rest: list[Span] = []
    j = 0
    for begin, end in union(spans):
        while j < len(taken) and taken[j][1] <= begin:
            j += 1
        at, k = begin, j
        while k < len(taken) and taken[k][0] < end:
            if taken[k][0] > at:
                rest.append((at, taken[k][0]))
            at = max(at, taken[k][1])
            k += 1
        if at < end:
            rest.append((at, end))
    return rest


def overlapping(spans: Sequence[Span], span: Span) -> list[Span]:
    """Return the spans that overlap with `span`. They must be sorted and without overlaps."""
    index = max(0, bisect_left(spans, span) - 1)
    overlapping = []
    while index < len(spans) and spans[index][0] < span[1]:
        if spans[index][1] > span[0]:
            overlapping.append(spans[index])
        index += 1
    return overlapping


def total_ns(spans: Iterable[Span]) -> int:
    """Return the total duration in nanoseconds of spans without overlaps."""
    return sum(end - begin for begin, end in spans)
