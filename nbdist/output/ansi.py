"""Sanitizes terminal text for a notebook: keeps colours, removes other escape sequences.

A sanitized line can be shown next to another rank's line: it cannot recolour, erase or overwrite
it.
"""

from __future__ import annotations

import re

RESET = "\x1b[0m"

ESCAPE_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-9;:?<=>]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[0-Z\\^-~]|[ -/]+[0-~])?"
)
"""Any escape sequence: CSI, OSC, two-character ones, and a lone or truncated ESC."""

COLOUR_SEQUENCE = re.compile(r"\x1b\[([0-9;:]*)m")
"""Select Graphic Rendition: colours, bold, underline."""

_TEXT_COLOUR = re.compile(r"\x1b\[0*(?:[39][0-79]|38;5;\d+|38;2;\d+;\d+;\d+)m")
_UNSAFE = re.compile("[\ud800-\udfff\0]")
_STYLE_CHARS = 64


def replace_invalid_chars(text: str) -> str:
    """Replace characters that JSON or browsers reject: lone surrogates and NUL."""
    if text.isascii() and "\0" not in text:
        return text
    return _UNSAFE.sub(lambda match: "\u2400" if match[0] == "\0" else "\ufffd", text)


def strip_ansi(text: str) -> str:
    """Remove all escape sequences."""
    return ESCAPE_SEQUENCE.sub("", text) if "\x1b" in text else text


def add_style(style: str, sequence: str) -> str:
    """Return the open style after one more colour sequence; "" after a reset."""
    codes = [code.lstrip("0") for code in sequence[2:-1].split(";")]
    if not codes[-1]:
        return ""
    start = style if codes[0] else ""
    if codes == ["39"]:  # the default text colour
        start = _TEXT_COLOUR.sub("", start)
        if not start:
            return ""
    return start + sequence if len(start) < _STYLE_CHARS else sequence


def close_colours(line: str, style: str) -> tuple[str, str]:
    """Return one line with its colours opened and closed inside it, without other sequences.

    Args:
        line: text without a newline.
        style: colour sequences that earlier lines of the same stream left open.

    Returns:
        The line, and the style that it leaves open for the next one.
    """
    opened = style
    for match in COLOUR_SEQUENCE.finditer(line):
        style = add_style(style, match[0])
    text = opened + ESCAPE_SEQUENCE.sub(
        lambda match: match[0] if COLOUR_SEQUENCE.fullmatch(match[0]) else "", line
    )
    return (text + RESET if style else text), style
