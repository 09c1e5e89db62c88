"""Every fault has a test, and docs/faults.md is up to date."""

from __future__ import annotations

from tests.faults import fault_table
from tests.faults.fault_rows import GROUPS, ROWS

KNOWN = {row.id for row in ROWS}


def test_each_row_has_a_test() -> None:
    assert fault_table.marked().keys() == KNOWN


def test_each_row_is_there_once() -> None:
    assert len(KNOWN) == len(ROWS)
    assert {row.id[0] for row in ROWS} == set(GROUPS)
    counts = {letter: sum(row.id[0] == letter for row in ROWS) for letter in GROUPS}
    assert counts == {"A": 12, "B": 17, "C": 17, "D": 14, "E": 19, "F": 8, "G": 5, "N": 7, "S": 23}


def test_the_page_is_up_to_date() -> None:
    assert fault_table.PAGE.read_text() == fault_table.page(), (
        "run `python tests/faults/fault_table.py`"
    )
