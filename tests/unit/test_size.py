"""The size of the package stays within a budget; `python tests/unit/test_size.py` prints it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUDGET = {
    "lines in nbdist/": 71_462,
    "files in nbdist/": 257,
    "functions per 1,000 code lines": 80,
    "lines in tests/ and benchmarks/": 51_944,
}
"""Largest value of each figure. Lower a limit when the package has shrunk; raise none without a
reason in docs/decisions/."""


def sources(*folders: str) -> list[str]:
    """Return the text of all modules in these folders of the repository."""
    return [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")]


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of all lines that belong to docstrings, those of attributes included."""
    strings = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    return {n for text in strings for n in range(text.lineno, (text.end_lineno or 0) + 1)}


def code_lines(source: str) -> int:
    """Return the number of lines that are neither blank, comment nor docstring."""
    documented = docstring_lines(ast.parse(source))
    lines = enumerate(source.splitlines(), start=1)
    return sum(
        number not in documented and bool(line.strip()) and not line.lstrip().startswith("#")
        for number, line in lines
    )


def functions(source: str) -> int:
    nodes = ast.walk(ast.parse(source))
    return sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)


def figures() -> dict[str, int]:
    package = sources("nbdist")
    code = sum(map(code_lines, package))
    return {
        "lines in nbdist/": sum(len(source.splitlines()) for source in package),
        "files in nbdist/": len(package),
        "functions per 1,000 code lines": round(1000 * sum(map(functions, package)) / code),
        "lines in tests/ and benchmarks/": sum(
            len(source.splitlines()) for source in sources("tests", "benchmarks")
        ),
    }


def test_package_stays_within_its_budget() -> None:
    found = figures()
    assert found.keys() == BUDGET.keys()
    assert not {name: value for name, value in found.items() if value > BUDGET[name]}


if __name__ == "__main__":
    for name, value in figures().items():
        print(f"{name:34}{value:>8,}   budget {BUDGET[name]:,}")  # noqa: T201 - its output
