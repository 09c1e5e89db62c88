"""`make bench`: ratios of nbdist to what else there is, measured in one run on two CPU ranks.

    python tests/bench [cells] [starts] [values] [training] [weight]

Prints a table and writes build/bench.json. The exit status is 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import cells
import results
import starts
import training
import values
import weight
from rivals import Rivals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUILD = Path(__file__).parents[2] / "build"
GROUPS: dict[str, Callable[[Rivals], Iterator[results.Row]]] = {
    "cells": cells.measure,
    "starts": lambda others: starts.measure(others, BUILD),
    "values": values.measure,
    "training": lambda _: training.measure(BUILD),
    "weight": lambda _: weight.measure(),
}


def main() -> int:
    """Measure the groups asked for, all by default."""
    parser = argparse.ArgumentParser(description="measure nbdist beside its rivals")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    chosen = parser.parse_args().groups or list(GROUPS)
    if unknown := set(chosen) - GROUPS.keys():
        parser.error(f"no such group: {', '.join(unknown)}")
    BUILD.mkdir(exist_ok=True)
    others = Rivals.installed(BUILD)
    rows: list[results.Row] = []
    before = results.machine()
    for name in chosen:
        begin = time.monotonic()
        rows += GROUPS[name](others)
        print(f"==> {name}: {time.monotonic() - begin:.0f} s", flush=True)
    print(before)
    print(results.table(rows))
    results.write(rows, BUILD / "bench.json")
    print(f"==> {BUILD / 'bench.json'}")
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
