"""One result of a check, with its remedy, and the formatting shared by all checks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Level = Literal["problem", "note", "ok"]
LEVELS: tuple[Level, ...] = ("problem", "note", "ok")
"""Severities, worst first. A problem breaks something, a note is worth knowing."""

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
"""Wider than in `redaction`: hiding too much is harmless, and reports are pasted into issues."""
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "***"
_MAX_VALUE_CHARS = 60


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check."""

    level: Level
    topic: str
    says: str
    """One sentence without a full stop, or a few words."""
    do: str = ""
    """The remedy; empty if none is needed."""


def ok(topic: str, says: str) -> Finding:
    """Return a finding without a problem."""
    return Finding("ok", topic, says)


def note(topic: str, says: str, do: str) -> Finding:
    """Return a finding that is worth knowing."""
    return Finding("note", topic, says, do)


def problem(topic: str, says: str, do: str) -> Finding:
    """Return a finding about something that does not work."""
    return Finding("problem", topic, says, do)


def is_secret_name(name: str) -> bool:
    """Return whether a variable of this name may hold a secret."""
    return _SECRET.search(name) is not None


def redacted_variable(name: str, value: str) -> str:
    """Format a variable as NAME=value, with secrets and passwords in URLs replaced by ***."""
    text = _HIDDEN if is_secret_name(name) else _IN_URL.sub(_HIDDEN, value)
    text = text if text.isprintable() else repr(text)
    return f"{name}={text if len(text) <= _MAX_VALUE_CHARS else text[:_MAX_VALUE_CHARS] + '...'}"
