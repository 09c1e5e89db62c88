"""Messages that the docs quote are messages of the package."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["troubleshooting", "profile", "clusters"]
_VARIES = re.compile(r"[0-9…_/']|\.\.\.|[A-Z]{2,}|^[A-Z]$|^[KMGT]i?B$")
"""Words of a quote that a message fills in: numbers, names, paths, sizes."""
_MIN_WORDS = 3


@cache
def messages() -> str:
    """All strings of the package; fields of f-strings are left out."""
    texts = []
    for path in (ROOT / "nbdist").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "\0" for v in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(" ".join(text.split()) for text in texts)


def fixed_part(quote: str) -> str:
    """The longest run of words that no value can fill in."""
    runs: list[list[str]] = [[]]
    for word in quote.replace("`", "").split():
        if _VARIES.search(word):
            runs.append([])
        else:
            runs[-1].append(word)
    return " ".join(max(runs, key=len)).strip(".,;:()")


@pytest.mark.parametrize("page", PAGES)
def test_a_quoted_message_is_printed_by_the_package(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    quotes = re.findall(r'"([^"\n]{12,}(?:\n[^"\n]+)?)"', prose)
    assert quotes, "this page quotes messages"
    parts = [fixed_part(quote) for quote in quotes]
    checked = [part for part in parts if len(part.split()) >= _MIN_WORDS]
    assert [part for part in checked if part not in messages()] == []
