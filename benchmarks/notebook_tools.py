"""The four that run code on two processes from a notebook, started the way their manuals show.

A contender turns the same few lines of Python into the cell that its user would type. The
lines find `rank`, `dist`, `torch`, `os`, `time`, and `lingers`: whether a rank that has nothing
more to do must wait, because its process would end.
"""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import rival_packages
from kernels import Kernel
from starts import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = """
import os, time, torch, torch.distributed as dist
rank, lingers = dist.get_rank(), {lingers}
"""
LAUNCHER = """
from accelerate import PartialState, notebook_launcher
def training():
    PartialState(cpu=True)
{lines}
notebook_launcher(training, args=(), num_processes=2, use_port="{port}")
"""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to run code on several processes."""

    name: str
    kernel: Callable[[], Kernel]
    start: Callable[[Kernel], object]
    cell: Callable[[str], str]
    """The cell that runs these lines on both ranks."""


def contenders(others: rival_packages.Rivals) -> list[Contender]:
    return [
        Contender("nbdist", lambda: Kernel(sys.executable), start_nbdist, magic("%%distribute")),
        Contender(
            "nbdistributed",
            others.kernel,
            rival_packages.start_nbdistributed,
            magic("%%distributed"),
        ),
        Contender("ipyparallel", others.kernel, rival_packages.start_ipyparallel, magic("%%px")),
        Contender("notebook_launcher", others.kernel, start_launcher, launched),
    ]


def magic(line: str) -> Callable[[str], str]:
    """Cells that begin with this line; ranks outlive them."""
    return lambda lines: line + NAMES.format(lingers=False) + lines


def launched(lines: str) -> str:
    """A cell that makes a function of the lines and launches it."""
    body = textwrap.indent(NAMES.format(lingers=True) + lines, "    ")
    return LAUNCHER.format(lines=body, port=free_port())


def start_nbdist(kernel: Kernel) -> None:
    kernel.run("%load_ext nbdist")
    kernel.run("%%distribute -n 2\npass")


def start_launcher(kernel: Kernel) -> None:
    """Its imports only: processes live as long as the function that is launched."""
    kernel.run("from accelerate import notebook_launcher")
