"""The text of cells as a syntax tree with the cell's own line numbers; pure, nothing is run."""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass

_PYTHON_INSIDE = ("%%distribute", "%%time", "%%timeit", "%%capture", "%%prun")
"""Cell magics whose body is Python; that of any other is read by the magic alone."""
_NO_PYTHON = re.compile(r"^\s*(?:[%!?]|[^#'\"]*\?{1,2}\s*$)")
"""A line that belongs to IPython: a magic, a shell command, a question."""
_ASSIGNED = re.compile(r"^(\s*[\w.,\s]+=\s*)[%!].*$")
"""`files = !ls`."""


@dataclass(frozen=True, eq=False)
class Parsed:
    """One cell."""

    name: str
    """"In[3]"."""
    lines: list[str]
    tree: ast.Module

    def line(self, number: int) -> str:
        """A line as it stands there, stripped."""
        return self.lines[number - 1].strip() if 0 < number <= len(self.lines) else ""


def parsed(name: str, source: str) -> Parsed | None:
    """Parse a cell; None where it is not Python, or too deep for the parser."""
    lines = source.split("\n")
    tree = _tree(source)
    if tree is None:
        plain = _without_magics(lines)
        tree = None if plain is None else _tree("\n".join(plain))
    return None if tree is None else Parsed(name, lines, tree)


def _tree(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" in a user's string is not ours to tell
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # what no rank could run either has no lines to speak of


def _without_magics(lines: list[str]) -> list[str] | None:
    """Put `pass` in the place of IPython's own lines; None where all of it is a magic's."""
    kept: list[str] = []
    going_on = False
    for number, line in enumerate(lines):
        if line.startswith("%%"):
            if line.split()[0] not in _PYTHON_INSIDE or any(one.strip() for one in lines[:number]):
                return None
            kept.append("")
        elif going_on or _NO_PYTHON.match(line):
            indent = line[: len(line) - len(line.lstrip())]
            kept.append("" if going_on else f"{indent}pass")
            going_on = line.endswith("\\")
        else:
            kept.append(_ASSIGNED.sub(r"\1None", line))
    return kept
