"""Examples of the pages and docstrings, as cells of a notebook.

An example is a block of Python or of magics. `<!-- not executed: REASON -->` before a block of a
page says why no test can execute it.
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(
    r"(?:<!-- not executed: (?P<reason>.*?) -->\n)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_SECTION = re.compile(r"^Examples?:\n((?:[ ]+.*\n|\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """One block."""

    place: str
    """Page or module."""
    line: int
    text: str
    reason: str = ""
    """Why it is not executed."""

    @property
    def cells(self) -> list[str]:
        """Its cells: each line with a cell magic begins another one."""
        return [
            part for part in re.split(r"^(?=%%)", self.text, flags=re.MULTILINE) if part.strip()
        ]


def pages() -> list[Path]:
    """Return the pages that users read."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def of_page(path: Path) -> list[Example]:
    text = path.read_text()
    return [
        Example(
            str(path.relative_to(ROOT)),
            text[: match.start("text")].count("\n") + 1,
            match["text"],
            match["reason"] or "",
        )
        for match in _BLOCK.finditer(text)
        if match["language"] == "python" or (not match["language"] and match["text"][0] == "%")
    ]


@cache
def of_docstrings() -> list[Example]:
    found = []
    for path in sorted((ROOT / "nbdist").rglob("*.py")):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if "Example" in source else ():
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node) or ""
                for section in _SECTION.findall(text + "\n"):
                    line = getattr(node, "lineno", 1)
                    place = str(path.relative_to(ROOT))
                    found.append(Example(place, line, inspect.cleandoc(section) + "\n"))
    return found
