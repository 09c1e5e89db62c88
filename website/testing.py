"""The page "How we test", made from the faults table and the figures of the last benchmark.

python website/testing.py           # write docs/figures.json from build/bench.json
"""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.faults import fault_rows, fault_table  # noqa: E402 - `python FILE` needs the path

BENCH = ROOT / "build" / "bench.json"
FIGURES = ROOT / "docs" / "figures.json"
"""The committed figures: machine, date and the rows of `make bench`."""
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

Everything runs on CPU ranks with gloo. [Another page](gpu.md) lists what has been verified for
GPUs, and how.

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
[The comparison](faults-compared.md) explains the letters, and how it was measured.

{compared}

## Figures of the last benchmark

After ±: half the 95 % confidence interval. A bar is missed if the value misses it by more.

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
        figures=len(_figures()["rows"]),
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


def _figures() -> dict[str, object]:
    figures: dict[str, object] = json.loads(FIGURES.read_text())
    return figures


def _bench() -> str:
    """Return the table of figures, with machine and date."""
    figures = _figures()
    rows = [
        f"| {row['name']} | {_value(row)} | {row['bar']} | {_verdict(row)} | {row['detail']} |"
        for row in figures["rows"]  # type: ignore[attr-defined]
    ]
    head = "| what | value | bar | | made of |\n|---|---|---|---|---|\n"
    return f"{figures['date']}, {figures['machine']}.\n\n{head}" + "\n".join(rows)


def _value(row: dict[str, object]) -> str:
    noise = f" ± {row['noise']:.2g}" if row["noise"] else ""
    return "" if row["value"] is None else f"{row['value']:.3g}{noise} {row['unit']}"


def _verdict(row: dict[str, object]) -> str:
    return f"not measured: {row['skipped']}" if row["skipped"] else "" if row["holds"] else "missed"


def main() -> None:
    """Write docs/figures.json from the last benchmark on this machine."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import results

    date = datetime.fromtimestamp(BENCH.stat().st_mtime, tz=UTC)
    document = {
        "date": f"{date:%Y-%m-%d}",
        "machine": re.sub(r", load [\d.]+", "", results.machine()),
        "rows": json.loads(BENCH.read_text()),
    }
    FIGURES.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
