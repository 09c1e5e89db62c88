"""Exceptions of nbdist; pure, used by every process.

    NbdistError
    |-- OptionError          an option, name or value that is not allowed (also ValueError)
    |-- PlanError            a model or a device that cannot be planned for (also ValueError)
    |-- SessionError         not possible in the session's current state
    |   |-- SessionBusy      a cell is still running on the ranks
    |   |-- StartError       launcher or ranks failed to start
    |   `-- RankDied         a rank or the launcher ended; the ranks' variables are lost
    |-- ProfileError         profiling is not possible now
    |-- SwitchError          the training state cannot be moved to another backend
    |-- CheckpointError      a checkpoint cannot be written, read or trusted
    |   `-- NotEmptyError    the folder of an export is not empty
    |-- PayloadError         a value that cannot be moved between kernel and ranks (also TypeError)
    |-- CollectiveMismatch   ranks called different collectives (also RuntimeError)
    |-- CellSyntaxError      the cell is not valid Python; nothing was sent (magics only)
    `-- CellError            the cell raised on at least one rank

`CellInterrupted` is a KeyboardInterrupt: the cell was interrupted, the ranks keep their variables.

Each message contains what was given, what is allowed and what to do. Notebooks show the message
without nbdist's own frames.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbdist.protocol.messages import RankError


class NbdistError(Exception):
    """Base class of all exceptions that nbdist raises deliberately."""

    def _render_traceback_(self) -> list[str]:
        """Show only the message in IPython, without nbdist's frames."""
        return [f"{type(self).__name__}: {self}"]


class OptionError(NbdistError, ValueError):
    """An option, name or value that is not allowed."""


class PlanError(NbdistError, ValueError):
    """A model, a workload or a device that the planner cannot plan for."""


class SessionError(NbdistError):
    """Not possible in the session's current state."""


class SessionBusy(SessionError):  # noqa: N818 - reads as the state it names
    """A cell is still running on the ranks."""


class StartError(SessionError):
    """The launcher or the ranks failed to start."""


class RankDied(SessionError):  # noqa: N818 - reads as the event it names
    """A rank or the launcher ended; the ranks' variables are lost.

    Attributes:
        headline: process, exit and what to do; without stack and last output.
    """

    def __init__(self, headline: str, *, details: str = "") -> None:
        super().__init__(f"{headline}\n{details}" if details else headline)
        self.headline = headline


class SwitchError(NbdistError):
    """The training state cannot be moved to another backend; the old one is still in place."""


class ProfileError(NbdistError):
    """Profiling is not possible now; the training continues."""


class CheckpointError(NbdistError):
    """A checkpoint cannot be written, read or trusted."""


class NotEmptyError(CheckpointError):
    """The target folder is not empty; `overwrite` replaces its files."""


class PayloadError(NbdistError, TypeError):
    """A value cannot be moved between the kernel and the ranks."""


class CollectiveMismatch(NbdistError, RuntimeError):  # noqa: N818 - reads as the event it names
    """Ranks called different collectives; none was started, and the process group is intact."""

    @property
    def _render_traceback_(self) -> list[str]:  # type: ignore[override]
        """Hide this method from IPython, which then shows the traceback with the cell's line."""
        raise AttributeError


class CellSyntaxError(NbdistError):
    """A `%%distribute` cell is not valid Python; nothing was sent to the ranks."""

    def _render_traceback_(self) -> list[str]:
        """Show position and caret as IPython does for its own cells."""
        return str(self).splitlines()


class CellError(NbdistError):
    """A cell raised on at least one rank.

    Attributes:
        errors: the error of each rank that failed, by rank.
    """

    def __init__(self, message: str, *, errors: dict[int, RankError], rendered: list[str]) -> None:
        super().__init__(message)
        self.errors = errors
        self._rendered = rendered

    def _render_traceback_(self) -> list[str]:
        """Show the ranks' own tracebacks, grouped, root cause first."""
        return self._rendered


class CellInterrupted(KeyboardInterrupt):
    """The cell was interrupted on all ranks; their variables are kept."""

    def _render_traceback_(self) -> list[str]:
        """Show one line in IPython."""
        return [f"KeyboardInterrupt: {self}"]
