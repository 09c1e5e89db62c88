"""The code of a cell, and the notebook's own namespace; runs in the kernel."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager

from nbdist.errors import OptionError

CELL = "<cell>"


def check(code: str) -> None:
    """Refuse code that no rank could run, before anything is sent.

    Raises:
        OptionError: nothing to run.
        SyntaxError: as the notebook would raise it.
    """
    lines = [line.strip() for line in code.splitlines()]
    if all(not line or line.startswith("#") for line in lines):
        msg = "The cell is empty: write the code for the ranks under the %%distribute line."
        raise OptionError(msg)
    if code.lstrip().startswith("%%"):
        return  # the body belongs to a cell magic, which alone can read it
    try:
        parse(code)
    except SyntaxError:
        # magics and !shell; transforming first would cost every cell half a millisecond
        parse(TransformerManager().transform_cell(code))


def parse(code: str) -> None:
    """Raise SyntaxError unless `code` is Python with top-level await."""
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    compile(code, CELL, "exec", flags=flags, dont_inherit=True)


def file_name(code: str) -> str:
    """The name of the file that a rank's ipykernel gives to the code of a cell."""
    from ipykernel.compiler import get_file_name

    return Path(get_file_name(code)).name


def bind(name: str, value: object) -> None:
    """Bind a variable in the notebook's namespace; a script has none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None:
        shell.push({name: value})
