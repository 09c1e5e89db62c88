"""Truncates a single very long text (one `print`, value or error) on the rank.

Encoding, sending, parsing and searching a text each take several times its size in memory. Output
with many lines is limited by the notebook's kernel instead.
"""

from __future__ import annotations

MAX_CHARS = 10_000_000
"""Maximum length in characters of a printed text or value."""
MAX_ERROR_CHARS = 100_000
"""Maximum length of an exception's message and of each part of its traceback."""
KEPT_CHARS = 20_000
"""Characters kept at each end; the notebook's kernel shows no more of a line."""


def truncate(text: str, *, longest: int = MAX_CHARS) -> str:
    """Return the text; if it is too long, its two ends and a line with its size."""
    if len(text) <= longest:
        return text
    return (
        f"{text[:KEPT_CHARS]}\n{text[-KEPT_CHARS:]}\n"
        f"[Truncated {len(text) / 1e6:.1f} MB to the first and last {KEPT_CHARS:,} characters.]\n"
    )
