"""Intervals and boxes: each is cut into the other without a loss."""

from __future__ import annotations

import random

import numpy as np
import pytest

from nbdist.state.shards import Chunk, chunk_to_intervals, interval_to_chunks

RANDOM = random.Random(0)  # noqa: S311 - cases of a test
SHAPES = [tuple(RANDOM.randint(1, 5) for _ in range(RANDOM.randint(1, 5))) for _ in range(200)]


def elements(shape: tuple[int, ...], box: Chunk) -> list[int]:
    """Flat indices of a box, the slow way."""
    flat = np.arange(int(np.prod(shape))).reshape(shape)
    return flat[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].ravel().tolist()


def test_an_interval_is_the_boxes_it_is_cut_into() -> None:
    for shape in SHAPES * 10:
        numel = int(np.prod(shape))
        start = RANDOM.randint(0, numel)
        stop = RANDOM.randint(start, numel)
        found = interval_to_chunks(shape, start, stop)
        assert [i for box in found for i in elements(shape, box)] == list(range(start, stop))
        assert len(found) <= 2 * len(shape) - 1
        assert sum(box.numel for box in found) == stop - start
        joined = [span for box in found for span in chunk_to_intervals(shape, box)]
        assert len(joined) == len(found)  # each is one piece of memory
        assert [i for span in joined for i in range(*span)] == list(range(start, stop))


def test_any_box_is_the_intervals_it_covers() -> None:
    for shape in SHAPES * 5:
        offsets = tuple(RANDOM.randint(0, length - 1) for length in shape)
        sizes = tuple(
            RANDOM.randint(0, length - begin) for length, begin in zip(shape, offsets, strict=True)
        )
        box = Chunk(offsets, sizes)
        found = list(chunk_to_intervals(shape, box))
        assert [i for span in found for i in range(*span)] == elements(shape, box)
        assert len(set(found)) == len(found)


def test_whole_tensors_are_one_box() -> None:
    for shape in [(), (1,), (3, 4), (1, 1, 1), (2, 3, 4, 5)]:
        numel = int(np.prod(shape))
        assert interval_to_chunks(shape, 0, numel) == [Chunk((0,) * len(shape), shape)]
        assert list(chunk_to_intervals(shape, Chunk((0,) * len(shape), shape))) == [(0, numel)]


def test_an_empty_interval_has_no_chunk() -> None:
    assert interval_to_chunks((0, 3), 0, 0) == []
    assert interval_to_chunks((4,), 2, 2) == []
    assert list(chunk_to_intervals((0, 3), Chunk((0, 0), (0, 3)))) == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 13)])
def test_an_interval_outside_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=r"^Interval .* exceeds"):
        interval_to_chunks((3, 4), start, stop)


@pytest.mark.parametrize("box", [Chunk((0, 2), (1, 3)), Chunk((-1, 0), (1, 1)), Chunk((0,), (1,))])
def test_a_box_outside_is_refused(box: Chunk) -> None:
    with pytest.raises(ValueError, match=r"exceeds a tensor|argument"):
        list(chunk_to_intervals((3, 4), box))


def test_large_tensors_cost_nothing() -> None:
    shape = (1_000_000, 1_000_000, 1_000)
    found = interval_to_chunks(shape, 123_456_789, 10**15 - 7)
    assert sum(box.numel for box in found) == 10**15 - 7 - 123_456_789
    assert len(found) <= 5
