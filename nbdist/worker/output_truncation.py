"""One text of hundreds of megabytes, cut on the rank: nobody reads it, and the kernel pays for it.

A text costs several times its size wherever it is encoded, sent, parsed and searched. Output of
many lines is the kernel's to cut, which counts them; this is about a single `print`, value or
error.
"""

from __future__ import annotations

LONGEST = 10_000_000
"""Characters of one printed text or value that are sent whole."""
LONGEST_ERROR = 100_000
"""Characters of an exception's message, and of each part of its traceback."""
KEPT = 20_000
"""Characters of each end; the kernel shows no more of a line."""


def shortened(text: str, *, longest: int = LONGEST) -> str:
    """The text, or its two ends and a last line that says how long it was."""
    if len(text) <= longest:
        return text
    return (
        f"{text[:KEPT]}\n{text[-KEPT:]}\n"
        f"[a text of {len(text) / 1e6:.1f} MB; only its first and last {KEPT:,} characters]\n"
    )
