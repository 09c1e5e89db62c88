"""Text without the secrets of the environment; pure.

Logs are copied into issues and chats. What stands in a variable such as HF_TOKEN does not
belong there, whoever has printed it.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_WORDS = "TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASS|CREDENTIALS?|APIKEY"
_NAME = re.compile(rf"(?:^|_)(?:{_WORDS})(?:_|$)", re.IGNORECASE)
_ASSIGNED = re.compile(rf"\b((?:[A-Z0-9]+_)*(?:{_WORDS})(?:_[A-Z0-9]+)*)=[^\s'\"]+")
_IN_URL = re.compile(r"(://[^/@:\s'\"]*):[^/@\s'\"]+@")
MIN_CHARS = 8
"""Of a value: shorter ones ("true", "0") stand in texts that have nothing to do with them."""


def is_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret: HF_TOKEN, and not TOKENIZERS_PARALLELISM."""
    return _NAME.search(name) is not None


def redacted(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Put "<HF_TOKEN>" in the place of that variable's value.

    So too of any "SOME_TOKEN=...", and of the password in a URL.

    Args:
        text: of any length.
        environ: whose secrets; by default this process's.
    """
    environ = os.environ if environ is None else environ
    secrets = [(value, name) for name, value in environ.items() if is_secret(name)]
    for value, name in sorted(secrets, key=lambda one: -len(one[0])):
        if len(value) >= MIN_CHARS:
            text = text.replace(value, f"<{name}>")
    text = _IN_URL.sub(r"\1:<redacted>@", text)
    return _ASSIGNED.sub(r"\1=<redacted>", text)
