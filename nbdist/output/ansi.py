"""Terminal text made safe for a notebook: colours kept, everything else that moves removed.

Pure; used by the output modules of the notebook's kernel. A line that leaves this module
can be put next to another rank's line: it cannot recolour, erase or overwrite it.
"""

from __future__ import annotations

import re

RESET = "\x1b[0m"

ESCAPE = re.compile(
    r"\x1b(?:\[[0-9;:?<=>]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[0-Z\\^-~]|[ -/]+[0-~])?"
)
"""Any escape sequence: CSI, OSC, two-character ones, and a lone or cut-off ESC."""

COLOUR = re.compile(r"\x1b\[([0-9;:]*)m")
"""Select Graphic Rendition: colours, bold, underline."""

_UNSAFE = re.compile("[\ud800-\udfff\0]")
_STYLE_CHARS = 64


def clean(text: str) -> str:
    """Replace what JSON or a browser refuses: lone surrogates and NUL."""
    if text.isascii() and "\0" not in text:
        return text
    return _UNSAFE.sub(lambda found: "\u2400" if found[0] == "\0" else "\ufffd", text)


def plain(text: str) -> str:
    """Remove every escape sequence."""
    return ESCAPE.sub("", text) if "\x1b" in text else text


def colours_only(text: str) -> str:
    """Remove escape sequences that move, erase or report; keep colours."""
    return ESCAPE.sub(lambda found: found[0] if COLOUR.fullmatch(found[0]) else "", text)


def add_style(style: str, sequence: str) -> str:
    """Style that is open after one more colour sequence; "" when it resets."""
    codes = sequence[2:-1].split(";")
    if codes[-1] in ("", "0"):
        return ""
    start = "" if codes[0] in ("", "0") else style
    return start + sequence if len(start) < _STYLE_CHARS else sequence


def contained(line: str, style: str) -> tuple[str, str]:
    """One line with its colours opened and closed inside it.

    Args:
        line: text without a newline.
        style: colour sequences that earlier lines of the same stream left open.

    Returns:
        The line, and the style that it leaves open for the next one.
    """
    if not style and "\x1b" not in line:
        return line, ""
    opened = style
    for found in COLOUR.finditer(line):
        style = add_style(style, found[0])
    text = opened + colours_only(line)
    return (text + RESET if style else text), style


def size(num_bytes: int) -> str:
    """A size for people: "812 B", "12.3 MB"."""
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:  # noqa: PLR2004 - the step between the units
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"


def rank_label(ranks: tuple[int, ...]) -> str:
    """Ranks in short: "0", "0-3", "0,2-3"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
