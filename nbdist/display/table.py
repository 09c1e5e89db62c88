"""Tables of formatted cells as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


def text_table(rows: Sequence[Sequence[str]], text_columns: Collection[int] = ()) -> list[str]:
    """Return the lines of a table with aligned columns.

    Args:
        rows: cells, all rows of the same length. The first one may be a header.
        text_columns: indices of the left-aligned columns; numbers are right-aligned.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
