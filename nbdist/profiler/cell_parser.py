"""Parsing of notebook cells with IPython magics. Line numbers are preserved; nothing is run."""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass

_PYTHON_INSIDE = ("%%distribute", "%%time", "%%timeit", "%%capture", "%%prun")
"""Cell magics whose body is Python."""
_NO_PYTHON = re.compile(r"^\s*(?:[%!?]|[^#'\"]*\?{1,2}\s*$)")
"""A line of IPython syntax: a magic, a shell command or a help request."""
_ASSIGNED = re.compile(r"^(\s*[\w.,\s]+=\s*)[%!].*$")
"""An assignment from a magic or shell command, such as `files = !ls`."""


@dataclass(frozen=True, eq=False)
class ParsedCell:
    """A parsed cell."""

    name: str
    """Name of the cell, such as "In[3]"."""
    lines: list[str]
    tree: ast.Module

    def source_line(self, number: int) -> str:
        """Return the stripped text of a line, or "" if there is none."""
        return self.lines[number - 1].strip() if 0 < number <= len(self.lines) else ""


def parse_cell(name: str, source: str) -> ParsedCell | None:
    """Parse a cell. Return None if it is not Python or nested too deeply for the parser."""
    lines = source.split("\n")
    tree = _tree(source)
    if tree is None:
        stripped = _without_magics(lines)
        tree = None if stripped is None else _tree("\n".join(stripped))
    return None if tree is None else ParsedCell(name, lines, tree)


def _tree(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes ("\d") in the user's strings
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _without_magics(lines: list[str]) -> list[str] | None:
    """Replace lines of IPython syntax with `pass`. Return None if the body is not Python."""
    kept: list[str] = []
    continued = False
    for number, line in enumerate(lines):
        if line.startswith("%%"):
            if line.split()[0] not in _PYTHON_INSIDE or any(
                text.strip() for text in lines[:number]
            ):
                return None
            kept.append("")
        elif continued or _NO_PYTHON.match(line):
            indent = line[: len(line) - len(line.lstrip())]
            kept.append("" if continued else f"{indent}pass")
            continued = line.endswith("\\")
        else:
            kept.append(_ASSIGNED.sub(r"\1None", line))
    return kept
