"""The error family; pure, used by every process.

    NbdistError
    |-- OptionError          an option, name or value that is not allowed (also ValueError)
    |-- PlanError            a model or a device that cannot be planned for (also ValueError)
    |-- SessionError         the session cannot do this now
    |   |-- SessionBusy      a cell is still running on the ranks
    |   |-- StartError       launcher or ranks did not come up
    |   `-- RankDied         a rank or the launcher ended; the ranks' variables are gone
    |-- ProfileError         nothing can be profiled now
    |-- SwitchError          a model's training state cannot be taken to another engine
    |-- CheckpointError      a checkpoint cannot be written, read or trusted
    |-- PayloadError         a value that cannot be moved between kernel and ranks (also TypeError)
    |-- CollectiveMismatch   ranks called collectives that do not fit (also RuntimeError)
    |-- CellSyntaxError      the cell's text is not Python; nothing was sent (magics only)
    `-- CellError            the cell raised on at least one rank

`CellInterrupted` is a KeyboardInterrupt: Stop was pressed, the ranks keep their variables.

Each message says what was given, what is allowed and what to do. In a notebook it is
shown alone, without our own frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.protocol.messages import RankError


class NbdistError(Exception):
    """Base of all errors that nbdist raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Show one sentence in IPython: our own frames say nothing to a user."""
        return [f"{type(self).__name__}: {self}"]


class OptionError(NbdistError, ValueError):
    """An option, a name or a value that is not allowed."""


class PlanError(NbdistError, ValueError):
    """A model, a workload or a device that the planner cannot plan for."""


class SessionError(NbdistError):
    """The session cannot do this in its present state."""


class SessionBusy(SessionError):  # noqa: N818 - reads as the state it names
    """A cell is still running on the ranks."""


class StartError(SessionError):
    """The launcher or the ranks did not come up."""


class RankDied(SessionError):  # noqa: N818 - reads as the event it names
    """A rank or the launcher ended; the variables of the ranks are gone.

    Attributes:
        headline: who ended, how, and what to do; without its stack and its last lines.
    """

    def __init__(self, headline: str, *, details: str = "") -> None:
        """Keep the one sentence apart from the lines below it."""
        super().__init__(f"{headline}\n{details}" if details else headline)
        self.headline = headline


class SwitchError(NbdistError):
    """A training state that cannot be taken to another engine; the old one is in place."""


class ProfileError(NbdistError):
    """Nothing can be profiled now; the training goes on."""


class CheckpointError(NbdistError):
    """A checkpoint that cannot be written, read or trusted."""


class NotEmptyError(CheckpointError):
    """Files are where a folder is to be written; with `overwrite` it takes their place."""


class PayloadError(NbdistError, TypeError):
    """A value that cannot be moved between the kernel and the ranks."""


class CollectiveMismatch(NbdistError, RuntimeError):  # noqa: N818 - reads as what it says
    """Ranks called collectives that do not fit together; nothing was sent, the group is usable."""

    @property
    def _render_traceback_(self) -> list[str]:  # type: ignore[override]
        """Let IPython show the cell's own line: to it this is no method of ours."""
        raise AttributeError


class CellSyntaxError(NbdistError):
    """The text of a `%%distribute` cell is not Python; no rank has seen it."""

    def _render_traceback_(self) -> list[str]:
        """Show place and caret as IPython does for a cell of its own."""
        return str(self).splitlines()


class CellError(NbdistError):
    """A cell raised on at least one rank.

    Attributes:
        errors: the error of each rank that failed, by rank.
    """

    def __init__(self, message: str, *, errors: dict[int, RankError], rendered: list[str]) -> None:
        """Keep the errors by rank and the text a notebook shows."""
        super().__init__(message)
        self.errors = errors
        self._rendered = rendered

    def _render_traceback_(self) -> list[str]:
        """Show the ranks' own tracebacks, grouped, root cause first."""
        return self._rendered


class CellInterrupted(KeyboardInterrupt):
    """Stop was pressed; the cell ended on all ranks and their variables are kept."""

    def _render_traceback_(self) -> list[str]:
        """Show one line in IPython."""
        return [f"KeyboardInterrupt: {self}"]
