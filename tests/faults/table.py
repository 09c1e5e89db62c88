"""The table of faults: which test shows which row, how it came out, and docs/faults.md.

As a plugin of pytest (loaded by tests/conftest.py for `-m fault`) it prints the table below the
run. `python tests/faults/table.py` writes docs/faults.md from the rows and the tests' marks.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.faults.rows import GROUPS, ROWS, WHY_NOT, Row  # noqa: E402 - `python FILE` needs the path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pytest

PAGE = ROOT / "docs" / "faults.md"
PROPERTY = "faults"
HEAD = """# What can go wrong

Every fault that nbdist has an answer to, what happens then, and the test that shows it. `make
faults` runs them and prints the same table with times. This page is written by `python
tests/faults/table.py`.
"""


# -- marks in the tests' sources


@cache
def marked() -> dict[str, list[tuple[Path, str]]]:
    """The tests of each row, as (file, name), found without importing them."""
    found: dict[str, list[tuple[Path, str]]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, rows in _of_module(ast.parse(path.read_text())):
            for row in sorted(rows):
                found[row].append((path.relative_to(ROOT), name))
    return dict(found)


def _of_module(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    """Each test of a module and the rows it is marked with."""
    named = {
        target.id: _rows_in([node.value])
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    everywhere = named.pop("pytestmark", set())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            rows = _rows_in(node.decorator_list) | everywhere
            for used in _names_in(node.decorator_list):  # a list of cases with marks
                rows |= named.get(used, set())
            yield node.name, rows


def _rows_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Arguments of every `pytest.mark.fault(...)` below."""
    return {
        argument.value
        for top in nodes
        for node in ast.walk(top)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault"
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


def _names_in(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.id for top in nodes for node in ast.walk(top) if isinstance(node, ast.Name)}


# -- the page


def page() -> str:
    """docs/faults.md as it must be."""
    tests, parts = marked(), [HEAD]
    for letter, title in GROUPS.items():
        rows = [row for row in ROWS if row.id.startswith(letter)]
        lines = [
            f"| {row.id} | {row.fault} | {_answer(row)} | {_shown(row, tests)} |" for row in rows
        ]
        head = "| | fault | what happens | shown by |\n|---|---|---|---|"
        parts.append("\n".join([f"## {title}\n", head, *lines, ""]))
    return "\n".join(parts)


def _answer(row: Row) -> str:
    return row.expect if row.deadline_s is None else f"{row.expect}; within {row.deadline_s:g} s"


def _shown(row: Row, tests: dict[str, list[tuple[Path, str]]]) -> str:
    if row.id in WHY_NOT:
        return f"no test: {WHY_NOT[row.id]}"
    return "<br>".join(
        f"[{name.removeprefix('test_').replace('_', ' ')}](../{path})"
        for path, name in tests.get(row.id, [])
    )


# -- the plugin


class Table:
    """Prints one line for each row and test below a run of `-m fault`."""

    def __init__(self) -> None:
        """Nothing has run yet."""
        self._seconds: dict[str, float] = defaultdict(float)
        self._outcomes: dict[str, str] = {}
        self._rows: dict[str, list[str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Let each report say which rows its test shows, also from another process."""
        for item in items:
            rows = [str(row) for mark in item.iter_markers("fault") for row in mark.args]
            item.user_properties.append((PROPERTY, rows))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the outcome and the time of one phase of a test; fixtures count too.

        The cases of a test are one line, with the worst outcome of them.
        """
        test = report.nodeid.partition("[")[0]
        self._rows[test] = next(
            (list(rows) for name, rows in report.user_properties if name == PROPERTY),  # type: ignore[call-overload]
            [],
        )
        self._seconds[test] += report.duration
        if self._outcomes.get(test, "passed") == "passed":
            self._outcomes[test] = report.outcome

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        terminalreporter.section("faults")
        for line in self.lines():
            terminalreporter.write_line(line)

    def lines(self) -> list[str]:
        """The table, as text."""
        shown = [(row, test) for row in ROWS for test, rows in self._rows.items() if row.id in rows]
        width = max((len(row.fault) for row in ROWS), default=0)
        longest = max((len(_short(test)) for _, test in shown), default=0)
        lines = [f"{'':4}{'fault':{width}}  {'test':{longest}}  deadline  outcome      s"]
        for row, test in shown:
            deadline = "" if row.deadline_s is None else f"{row.deadline_s:g} s"
            lines.append(
                f"{row.id:4}{row.fault:{width}}  {_short(test):{longest}}  {deadline:>8}"
                f"  {self._outcomes[test]:7}{self._seconds[test]:7.1f}"
            )
        rows = {row.id for row, _ in shown}
        lines.append(
            f"{len(rows)} of {len(ROWS)} rows have run; docs/faults.md says why others have no test"
        )
        return lines


def _short(test: str) -> str:
    """`x` of `tests/e2e/test_file.py::test_x`, not longer than a line."""
    return test.rpartition("::")[2].removeprefix("test_").replace("_", " ")[:60]


if __name__ == "__main__":
    PAGE.write_text(page())
