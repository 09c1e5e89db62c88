"""Examples of the pages and docstrings parse: Python, magics, and their options."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from nbdist.magics import arguments, magics
from tests import examples

if TYPE_CHECKING:
    from pathlib import Path

PAGES = [path for path in examples.pages() if examples.of_page(path)]
MOST_NOT_EXECUTED = 10


def check_magic(line: str) -> None:
    """Parse the line of a magic of nbdist as the magic does."""
    name, _, rest = line.partition(" ")
    if name == "%%distribute":
        magics.parse_distribute_line(rest)
    elif name == "%nbdist":
        command, _, given = arguments.without_comment(rest).strip().partition(" ")
        parser = magics.COMMANDS[command].parser
        if parser is not None:
            parser.parse_args(arguments.split_line(given.strip(), command))
    elif name == "%config":
        trait = rest.split(".")[1].split()[0]
        assert trait in magics.NbDist.class_own_traits(config=True)


def check(example: examples.Example) -> None:
    """A magic takes its line, and what is left is Python."""
    for cell in example.cells:
        for line in cell.splitlines():
            check_magic(line)
        body = cell.partition("\n")[2] if cell.startswith("%%") else cell
        ast.parse(TransformerManager().transform_cell(body))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_examples_of_a_page_parse(page: Path) -> None:
    for example in examples.of_page(page):
        check(example)


def test_examples_of_docstrings_parse() -> None:
    assert len(examples.of_docstrings()) >= 2
    for example in examples.of_docstrings():
        check(example)


def test_few_examples_are_not_executed_and_each_has_a_reason() -> None:
    left_out = [e for page in PAGES for e in examples.of_page(page) if e.reason]
    assert len(left_out) <= MOST_NOT_EXECUTED
    assert all(len(example.reason.split()) >= 3 for example in left_out)
