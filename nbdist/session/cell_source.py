"""The source code of a cell, and the notebook's namespace; runs in the notebook's kernel."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager

from nbdist.errors import OptionError

CELL_FILE_NAME = "<cell>"


@functools.lru_cache(maxsize=1)  # the magic checks a cell before it starts ranks, then `run` does
def check_code(code: str) -> None:
    """Check that code can run, before it is sent to the ranks.

    Raises:
        OptionError: the cell is empty.
        SyntaxError: as the notebook would raise it.
    """
    lines = [line.strip() for line in code.splitlines()]
    if all(not line or line.startswith("#") for line in lines):
        msg = "The cell is empty. Write the code for the ranks below the %%distribute line."
        raise OptionError(msg)
    if code.lstrip().startswith("%%"):
        return  # only the cell magic can parse its body
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        compile(code, CELL_FILE_NAME, "exec", flags=flags, dont_inherit=True)
    except SyntaxError:
        # Magics and !shell. Not transformed first: that costs half a millisecond per cell.
        python = TransformerManager().transform_cell(code)
        compile(python, CELL_FILE_NAME, "exec", flags=flags, dont_inherit=True)


def cell_file_name(code: str) -> str:
    """Return the file name that ipykernel gives to the code of a cell."""
    from ipykernel.compiler import get_file_name

    return Path(get_file_name(code)).name


def bind_variable(name: str, value: object) -> None:
    """Bind a variable in the notebook's namespace; do nothing in a script."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None:
        shell.push({name: value})
