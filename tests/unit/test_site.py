"""Pages that the documentation site makes from the repository."""

from __future__ import annotations

from pathlib import Path

from tests.faults import fault_rows
from website import reference, testing

DECISIONS = Path(__file__).parents[2] / "docs" / "decisions"


def test_all_decisions_are_listed() -> None:
    page = reference.decisions_page()
    assert "31. [A debugger and `input()` on every rank](0031-debugger.md)" in page
    assert page.count("](") == len(list(DECISIONS.glob("[0-9]*.md")))


def test_the_page_of_the_magics_shows_how_each_command_is_written() -> None:
    lines = reference.magics_page().splitlines()
    assert "%nbdist checkpoints [-h] [--dir ROOT] [--json]" in lines
    assert "%nbdist switch [options] [NAME]" in lines


def test_the_page_how_we_test_is_made_from_the_table_of_faults() -> None:
    assert f"| {len(fault_rows.ROWS)} | `make faults` |" in testing.page()
