"""The page "How we test", made from the faults table and the figures of the last benchmark.

python website/testing.py           # write docs/figures.json from build/bench.json
"""

from __future__ import annotations

import json
import re
import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.faults import fault_rows, fault_table  # noqa: E402 - `python FILE` needs the path

BENCH = ROOT / "build" / "bench.json"
FIGURES = ROOT / "docs" / "figures.json"
"""The committed figures of `make bench`: date, machine and rows of each group of benchmarks."""
_TEXT = """\
# How we test

This page is made from the tests and from the last figures in the repository, when the site is
built.

| what | how many | command |
|---|---|---|
| test functions | {tests} | `make test`, `make nightly` |
| faults, each with a test | {faults} | `make faults` |
| benchmark figures with a bar | {figures} | `make bench` |
| notebooks, executed by tests | {notebooks} | `make wide` |

All these run on CPU ranks with gloo. [Another page](gpu.md) lists what has been verified on a GPU,
and how.

## Faults

[The table of faults](faults.md) lists what can go wrong, what nbdist does then, and the test that
shows it.

| | faults | tests |
|---|---|---|
{groups}

## Random faults

[A test](../tests/faults/test_chaos.py) trains, saves, switches and loads, and draws
faults from a list: Stop in Python code, during training, a save or a load; one rank that raises an
error; processes that are killed. After each fault the session is used again, and the losses must
equal those of a run without faults. A failed run prints its seed.

## The planner compared with the allocator

Errors of the planned memory in percent, compared with the peak that torch's allocator reports.

{planner}

[The planner's page](planner.md#validation) explains the table, and where the planner is wrong.

## Comparison with other tools

The same faults in four tools that run a notebook's code on two processes.
[The comparison](faults-compared.md) explains the letters in parentheses, and how it was measured.

{compared}

## Benchmark

The last figures of each benchmark. After ±: half the 95 % confidence interval. A bar is missed if
the value misses it by more.

{bench}
"""


def page() -> str:
    """Return the page."""
    tests = fault_table.marked()
    rows = fault_rows.ROWS
    groups = []
    for letter, title in fault_rows.GROUPS.items():
        own = [row.id for row in rows if row.id.startswith(letter)]
        names = {test for name in own for test in tests.get(name, [])}
        groups.append(f"| {title} | {len(own)} | {len(names)} |")
    return _TEXT.format(
        tests=f"{_test_functions():,}",
        faults=len(rows),
        figures=sum(len(group["rows"]) for group in _figures().values()),
        notebooks=len(list((ROOT / "notebooks").glob("*.ipynb"))),
        groups="\n".join(groups),
        planner=_table_of("planner.md", "| | cases | median"),
        compared=_table_of("faults-compared.md", "| | nbdist |"),
        bench=_bench(),
    )


def _test_functions() -> int:
    modules = (ROOT / "tests").rglob("test_*.py")
    return sum(len(re.findall(r"^def test_", path.read_text(), re.MULTILINE)) for path in modules)


def _table_of(name: str, begin: str) -> str:
    """Return the table of a page that begins with this text."""
    text = (ROOT / "docs" / name).read_text()
    return text[text.index(begin) :].partition("\n\n")[0]


def _figures() -> dict[str, dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = json.loads(FIGURES.read_text())
    return groups


def _bench() -> str:
    """Return a table of figures for each day and machine, the last day first."""
    runs: dict[str, list[str]] = {}
    for group in sorted(_figures().values(), key=itemgetter("date"), reverse=True):
        runs.setdefault(f"{group['date']}, {group['machine']}.", []).extend(
            f"| {row['name']} | {_value(row)} | {row['bar']} | {_verdict(row)} | {row['detail']} |"
            for row in group["rows"]
        )
    head = "| what | value | bar | | made of |\n|---|---|---|---|---|\n"
    return "\n\n".join(f"{when}\n\n{head}" + "\n".join(rows) for when, rows in runs.items())


def _value(row: dict[str, Any]) -> str:
    noise = f" ± {row['noise']:.2g}" if row["noise"] else ""
    return "" if row["value"] is None else f"{row['value']:.3g}{noise} {row['unit']}"


def _verdict(row: dict[str, Any]) -> str:
    return f"not measured: {row['skipped']}" if row["skipped"] else "" if row["holds"] else "missed"


def main() -> None:
    """Write docs/figures.json from the last benchmarks on this machine."""
    FIGURES.write_text(BENCH.read_text())


if __name__ == "__main__":
    main()
