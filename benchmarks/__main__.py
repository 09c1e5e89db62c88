"""`make bench`: nbdist beside what else there is, and the planner beside what was measured.

    python benchmarks [cells] [starts] [values] [checkpoints] [saving] [exporting] [switching]
    python benchmarks [training] [nodes] [scale] [profile] [profiling] [gains] [panel] [weight]
    python benchmarks [faults] [plan_speed] [plan_memory] [plan_published] [plan_choice] [loading]

Prints a table and replaces the rows of these groups in build/bench.json. The exit status is 1 when
a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import advice_speedups
import bottlenecks
import cells
import checkpoints
import exporting
import faults
import kernel_memory
import loading
import nodes
import open_panel
import plan_choice
import plan_memory
import plan_published
import plan_speed
import profiling
import push_pull_values
import results
import saving
import scale
import starts
import switching
import training
from rival_packages import Rivals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUILD = Path(__file__).parents[1] / "build"


@cache
def others() -> Rivals:
    """The rivals, installed at their first use."""
    return Rivals.installed(BUILD)


GROUPS: dict[str, Callable[[], Iterator[results.Row]]] = {
    "cells": lambda: cells.measure(others()),
    "starts": lambda: starts.measure(others(), BUILD),
    "values": lambda: push_pull_values.measure(others()),
    "checkpoints": lambda: checkpoints.measure(BUILD),
    "saving": lambda: saving.measure(BUILD),
    "exporting": lambda: exporting.measure(BUILD),
    "loading": lambda: loading.measure(BUILD),
    "switching": lambda: switching.measure(BUILD),
    "training": lambda: training.measure(BUILD),
    "nodes": lambda: nodes.measure(BUILD),
    "profile": lambda: bottlenecks.measure(BUILD),
    "profiling": profiling.measure,
    "gains": advice_speedups.measure,
    "scale": scale.measure,
    "panel": open_panel.measure,
    "weight": kernel_memory.measure,
    "faults": lambda: faults.measure(others(), BUILD / "faults"),
    "plan_speed": plan_speed.measure,
    "plan_memory": plan_memory.measure,
    "plan_published": plan_published.measure,
    "plan_choice": plan_choice.measure,
}


def main() -> int:
    """Measure the groups asked for, all by default."""
    parser = argparse.ArgumentParser(description="measure nbdist beside its rivals")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    chosen = parser.parse_args().groups or list(GROUPS)
    if unknown := set(chosen) - GROUPS.keys():
        parser.error(f"no such group: {', '.join(unknown)}")
    BUILD.mkdir(exist_ok=True)
    rows: list[results.Row] = []
    for name in chosen:
        begin = time.monotonic()
        measured = list(GROUPS[name]())
        rows += measured
        results.write(name, measured, BUILD / "bench.json")
        print(results.table(measured))
        print(f"==> {name}: {time.monotonic() - begin:.0f} s", flush=True)
    print(results.machine())
    print(results.table(rows))
    print(f"==> {BUILD / 'bench.json'}")
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
