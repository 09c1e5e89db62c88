"""Pages that the documentation site makes from the repository."""

from __future__ import annotations

from pathlib import Path

from website import reference

DECISIONS = Path(__file__).parents[2] / "docs" / "decisions"


def test_all_decisions_are_listed() -> None:
    page = reference.decisions_page()
    assert "31. [A debugger and `input()` on every rank](0031-debugger.md)" in page
    assert page.count("](") == len(list(DECISIONS.glob("[0-9]*.md")))
