from __future__ import annotations

import pytest

from nbdist import rank_sets
from nbdist.errors import OptionError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", (0,)),
        ("0,2-3", (0, 2, 3)),
        ("3,1", (1, 3)),
        ("1,1,0-1", (0, 1)),
        (" 0 , 2-3 ", (0, 2, 3)),
        ("2-2", (2,)),
        ("000,03", (0, 3)),
    ],
)
def test_lists_and_ranges_are_read(text: str, expected: tuple[int, ...]) -> None:
    assert rank_sets.resolve_ranks(text, 4) == expected


@pytest.mark.fault("D7")
@pytest.mark.parametrize(
    "text",
    [
        *("", " ", ",", "0,", ",0", "0,,1", "-", "-1", "1-", "-1-2", "0--1", "2-1", "1-2-3"),
        *("0:99", "1;rm", "1 2", "0 - 1", "+1", "1.0", "1e0", "0x1", "1_0", "all", "None", "\n0"),
        *("0\n", "\u0661", "\u00b2", "\uff11", "0\u2013 1", "__import__('os')", "9" * 10_000),
    ],
)
@pytest.mark.fault("D7")
def test_anything_else_is_refused_in_one_short_sentence(text: str) -> None:
    with pytest.raises(OptionError, match=r"^--ranks must be a list of ranks") as caught:
        rank_sets.resolve_ranks(text, 4)
    assert len(str(caught.value)) < 160
    assert "Example: --ranks 0-3." in str(caught.value)


@pytest.mark.fault("D7")
@pytest.mark.parametrize(
    ("text", "outside"), [("5", 5), ("0,5", 5), ("2-5", 5), ("0-999999999", 999999999)]
)
def test_a_rank_outside_of_the_session_is_named(text: str, outside: int) -> None:
    with pytest.raises(OptionError) as caught:
        rank_sets.resolve_ranks(text, 4)
    assert str(caught.value) == (
        f"Rank {outside} is not in this session (world_size 4: ranks 0-3). Use --ranks 0-3."
    )


def test_chosen_takes_every_form_of_the_api() -> None:
    assert rank_sets.resolve_ranks(None, 3) == (0, 1, 2)
    assert rank_sets.resolve_ranks("1-2", 3) == (1, 2)
    assert rank_sets.resolve_ranks([2, 0, 2], 3) == (0, 2)
    assert rank_sets.resolve_ranks(range(2), 3) == (0, 1)
    assert rank_sets.resolve_ranks(1, 3) == (1,)


@pytest.mark.parametrize("given", [[], [0.0], ["0"], [True], True, [None]])
def test_chosen_refuses_what_is_not_a_rank(given: object) -> None:
    with pytest.raises(OptionError, match="must be a list of ranks"):
        rank_sets.resolve_ranks(given, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [[-1], [3], -1, [0, 10**30]])
def test_chosen_refuses_ranks_outside(given: object) -> None:
    with pytest.raises(OptionError, match="is not in this session"):
        rank_sets.resolve_ranks(given, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ""),
        ([0], "0"),
        ([0, 1, 2, 3], "0-3"),
        ([3, 2, 0, 0], "0,2-3"),
        ([0, 2, 4], "0,2,4"),
        ({10, 11, 5}, "5,10-11"),
    ],
)
def test_labels_are_short(given: list[int], expected: str) -> None:
    assert rank_sets.format_ranks(given) == expected
