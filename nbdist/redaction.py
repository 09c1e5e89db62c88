"""Redacts secrets of the environment from text; pure.

Logs are copied into issues and chats, so the values of variables such as HF_TOKEN are removed.
"""

from __future__ import annotations

import os
import re

_WORDS = "TOKEN|KEY|SECRET|(?:PG)?PASSWORD|PASSWD|PASS|CREDENTIALS?|APIKEY|AUTH"
_NAME = re.compile(rf"(?:^|_)(?:{_WORDS})(?:_|$)", re.IGNORECASE)
_ASSIGNED = re.compile(rf"\b((?:[A-Z0-9]+_)*(?:{_WORDS})(?:_[A-Z0-9]+)*)=[^\s'\"]+")
_IN_URL = re.compile(r"(://[^/@:\s'\"]*):[^/@\s'\"]+@")
MIN_CHARS = 8
"""Minimum length of a secret: shorter values ("true", "0") occur in unrelated text."""


def is_secret(name: str) -> bool:
    """Return whether a name indicates a secret: HF_TOKEN, but not TOKENIZERS_PARALLELISM."""
    return _NAME.search(name) is not None


def redact_secrets(text: str) -> str:
    """Replace the values of this process's secret variables by their names, such as "<HF_TOKEN>".

    Also redacts any "SOME_TOKEN=..." and passwords in URLs.
    """
    secrets = [(value, name) for name, value in os.environ.items() if is_secret(name)]
    for value, name in sorted(secrets, key=lambda pair: -len(pair[0])):
        if len(value) >= MIN_CHARS:
            text = text.replace(value, f"<{name}>")
    text = _IN_URL.sub(r"\1:<redacted>@", text)
    return _ASSIGNED.sub(r"\1=<redacted>", text)
