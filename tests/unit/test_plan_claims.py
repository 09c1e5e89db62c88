"""The articles must be answered: each claim beside what the planner computes."""

from __future__ import annotations

import pytest
from article_claims import CLAIMS, EIGHT, PRO, Claim, seventy_fits


@pytest.mark.parametrize("one", CLAIMS, ids=lambda one: f"claim {one.number}")
def test_planner_answers(one: Claim) -> None:
    answer = one.ask()
    assert answer.says
    assert one.why
    assert answer.agrees == (one.verdict == "agrees"), answer.says


@pytest.mark.parametrize("machine", [EIGHT, "8xH100-80GB,nvlink", PRO])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused", "adamw_8bit"])
def test_seventy_b_fits_neither_eight_of_80_gb_nor_four_of_96(machine: str, optimizer: str) -> None:
    assert seventy_fits(machine, optimizer=optimizer) == []


def test_seventy_b_does_fit_where_there_is_room() -> None:
    assert "fsdp2" in seventy_fits("4x8xH100-80GB,nvlink,8x400Gb")
    assert "ddp" not in seventy_fits("4x8xH100-80GB,nvlink,8x400Gb")
