"""Records what a session runs on its ranks, for `%nbdist script`.

A notebook cell is one `CellRun`: the code for the ranks, and the pushes, saves, exports, loads and
switches that it made. JupyterLab and VS Code name the cell in the metadata of their request, so
that the last run of a cell replaces the one before; other front ends do not, and each run counts.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from nbdist.errors import CellInterrupted
from nbdist.output.sink import get_shell
from nbdist.output.tracebacks import CALL_COMMENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbdist.session.cell import CellResult

MAX_RUNS = 1_000
"""Number of runs of which the text is kept."""
MAX_LITERAL = 200
"""Maximum length of a pushed value that is written into a script."""

CALL_NAMES = frozenset({"_function", "_result"})
"""Names of the variables with a distributed function that is called, and with its value."""

deleted_cells: set[str] = set()
"""Ids of the cells that were deleted from the notebook; kept by `note_notebook_cell`."""


@dataclass(slots=True, kw_only=True)
class Command:
    """Something that a cell did with the session, besides code for the ranks."""

    kind: Literal["push", "save", "export", "load", "switch", "call"]
    name: str
    """Of the variable, checkpoint, folder or function; the change of a switch."""
    text: str = ""
    """A pushed value as Python source, else its type; keyword arguments of a save or export."""
    is_literal: bool = False


@dataclass(slots=True, kw_only=True)
class RankCode:
    """Code that was sent to ranks."""

    code: str
    ranks: tuple[int, ...]
    world_size: int
    result: CellResult | None = None
    """Of a background cell that may still run; a result keeps all output."""
    error: str = ""
    """Name of the exception that it raised."""
    was_interrupted: bool = False


@dataclass(slots=True, kw_only=True)
class CellRun:
    """One run of a notebook cell."""

    cell_id: str
    number: int
    tags: tuple[str, ...] = ()
    parts: list[Command | RankCode] = field(default_factory=list)

    @property
    def code(self) -> list[RankCode]:
        """The code for the ranks."""
        return [part for part in self.parts if isinstance(part, RankCode)]

    @property
    def error(self) -> str:
        """Name of the exception of its code; "" if it did not fail."""
        for part in self.code:
            if part.result is not None and part.result.done:  # a background cell that has ended
                names = {error.ename for error in part.result.errors.values()}
                part.was_interrupted = "KeyboardInterrupt" in names
                part.error = "".join(sorted(names - {"KeyboardInterrupt"})[:1])
                part.result = None
        return next((part.error for part in self.code if part.error), "")


class CellHistory:
    """The runs of notebook cells since the ranks were started, oldest first."""

    def __init__(self) -> None:
        self.runs: list[CellRun] = []
        self.num_dropped = 0
        """Number of runs whose code is no longer kept."""
        self._unnamed = itertools.count()
        self._request: object = None

    def clear(self) -> None:
        """Forget all runs: new ranks have none of their variables."""
        self.runs.clear()
        self.num_dropped, self._request = 0, None

    @contextlib.contextmanager
    def record_code(
        self, code: str, ranks: Sequence[int], world_size: int, number: int | None
    ) -> Iterator[RankCode]:
        """Add code, which runs in this context."""
        part = RankCode(code=code, ranks=tuple(ranks), world_size=world_size)
        first, _, _ = code.partition("\n")
        if first.startswith(CALL_COMMENT):
            self._add(Command(kind="call", name=first.removeprefix(CALL_COMMENT)), number)
        else:
            self._add(part, number)
        try:
            yield part
        except CellInterrupted:  # it took too long in the notebook; it did not fail
            part.was_interrupted = True
            raise
        except BaseException as error:
            ranks_errors = getattr(error, "errors", None) or {}
            names = [each.ename for each in ranks_errors.values()]
            part.error = names[0] if names else type(error).__name__
            raise

    def add_pushes(self, values: Mapping[str, object]) -> None:
        """Add variables that were pushed to the ranks."""
        for name, value in values.items():
            if name in CALL_NAMES:
                continue
            literal = _literal(value)
            text = literal or type(value).__name__
            self._add(Command(kind="push", name=name, text=text, is_literal=bool(literal)))

    def add_command(
        self, kind: Literal["save", "export", "load", "switch"], name: str, **keywords: object
    ) -> None:
        """Add a command of the notebook, with the options that a script repeats."""
        text = "".join(f", {key}={value!r}" for key, value in keywords.items() if value is not None)
        self._add(Command(kind=kind, name=name, text=text))

    def _add(self, part: Command | RankCode, number: int | None = None) -> None:
        if self.runs:
            _ = self.runs[-1].error
        request, metadata, count = _notebook_request()
        if request is None or request != self._request:
            cell_id = str(metadata.get("cellId") or f"run {next(self._unnamed)}")
            count = number or count or (self.runs[-1].number if self.runs else 0) + 1
            self.runs.append(
                CellRun(cell_id=cell_id, number=count, tags=tuple(metadata.get("tags") or ()))
            )
            self._request = request
            self.num_dropped += len(self.runs[:-MAX_RUNS])
            del self.runs[:-MAX_RUNS]
        run = self.runs[-1]
        run.number = number or run.number
        run.parts.append(part)


def note_notebook_cell(info: object) -> None:
    """Keep track of the cells deleted from the notebook; called before each cell runs.

    JupyterLab 4.6 names them once, with the next request.
    """
    deleted_cells.update(_notebook_request()[1].get("deletedCells") or ())
    deleted_cells.discard(getattr(info, "cell_id", None) or "")


def _notebook_request() -> tuple[str | None, Mapping[str, Any], int]:
    """Return id, metadata and number of the cell that runs in the notebook."""
    shell = get_shell()
    parent: Mapping[str, Any] = getattr(shell, "get_parent", dict)() or {}
    # IPython 9.18 increments execution_count before the cell runs, older versions after it.
    count = len(shell.user_ns["_ih"]) - 1 if shell and parent else 0
    return parent.get("header", {}).get("msg_id"), parent.get("metadata", {}), count


def _literal(value: object) -> str:
    """Return a plain value as Python source; "" for others and long ones."""
    if not isinstance(value, (str, int, float, bool, type(None), list, tuple, dict)):
        return ""
    if isinstance(value, (str, list, tuple, dict)) and len(value) > MAX_LITERAL:
        return ""
    text = json.dumps(value) if isinstance(value, str) else repr(value)
    try:
        return text if len(text) <= MAX_LITERAL and ast.literal_eval(text) == value else ""
    except (ValueError, SyntaxError):
        return ""
