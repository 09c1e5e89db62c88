from __future__ import annotations

from nbdist.output.ansi import close_colours, replace_invalid_chars, strip_ansi


def test_only_colours_are_left() -> None:
    text = "\x1b]0;title\x07a\x1b[2K\x1b[31mb\x1b[Hc\x1b[0m\x1b(Bd\x1b7\x1b"
    assert close_colours(text, "") == ("a\x1b[31mbc\x1b[0md", "")
    assert strip_ansi(text) == "abcd"


def test_a_style_is_closed_and_carried() -> None:
    line, style = close_colours("\x1b[1m\x1b[31mx", "")
    assert (line, style) == ("\x1b[1m\x1b[31mx\x1b[0m", "\x1b[1m\x1b[31m")
    assert close_colours("y\x1b[m", style) == ("\x1b[1m\x1b[31my\x1b[m", "")
    assert close_colours("z", "") == ("z", "")


def test_a_colour_that_was_ended_is_not_carried() -> None:
    assert close_colours("\x1b[32m1\x1b[39m x", "") == ("\x1b[32m1\x1b[39m x", "")
    assert close_colours("\x1b[38;5;28;01mfor\x1b[39;00m x", "")[1] == ""
    assert close_colours("\x1b[1m\x1b[32mx\x1b[39m", "")[1] == "\x1b[1m\x1b[39m"


def test_a_style_stays_short_whatever_is_piled_up() -> None:
    style = ""
    for _ in range(1000):
        _, style = close_colours("\x1b[31m\x1b[42m", style)
    assert len(style) < 200
    assert style.startswith("\x1b[")


def test_clean_leaves_good_text_alone() -> None:
    text = "caf\u00e9 \U0001f600"
    assert replace_invalid_chars(text) == text
    assert replace_invalid_chars("\ud83d") == "\ufffd"
