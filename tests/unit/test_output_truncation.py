"""One giant text keeps its ends, and says how long it was."""

from __future__ import annotations

from nbdist.worker.output_streams import KEPT_CHARS, truncate


def test_a_giant_text_keeps_its_ends_and_says_how_long_it_was() -> None:
    found = truncate("begin" + "x" * 12_000_000 + "end")
    assert found.startswith("beginx")
    assert "xend\n[Truncated 11 MiB to the " in found
    assert len(found) < 3 * KEPT_CHARS
    assert truncate("short") == "short"
