"""Run a notebook cell on every GPU, under any of Accelerate's backends.

`%load_ext nbdist`, then `%%distribute --backend fsdp`; a script uses `nbdist.Session`.
Importing this brings neither torch nor accelerate into the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# The packages `nbdist.doctor` and `nbdist.session` have the names of public functions. Python binds
# a package to its name when it is first imported: that happens here, before the functions exist.
import nbdist.session as _session_package  # noqa: F401
from nbdist.doctor import doctor
from nbdist.planner import plan

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.doctor.report import Diagnosis
    from nbdist.errors import (
        CellError,
        CellInterrupted,
        CheckpointError,
        NbdistError,
        OptionError,
        PayloadError,
        PlanError,
        ProfileError,
        RankDied,
        SessionBusy,
        SessionError,
        StartError,
        SwitchError,
    )
    from nbdist.operations.export import ExportReport
    from nbdist.operations.import_checkpoint import ForeignReport
    from nbdist.operations.switch import SwitchReport
    from nbdist.profiler.report import Profile
    from nbdist.session.cell import CellResult
    from nbdist.session.checkpoints import Checkpoint, LoadReport, Save
    from nbdist.session.session import Session

__version__ = "0.1.0"

__all__ = [
    "CellError",
    "CellInterrupted",
    "CellResult",
    "Checkpoint",
    "CheckpointError",
    "Diagnosis",
    "ExportReport",
    "ForeignReport",
    "LoadReport",
    "NbdistError",
    "OptionError",
    "PayloadError",
    "PlanError",
    "Profile",
    "ProfileError",
    "RankDied",
    "Save",
    "Session",
    "SessionBusy",
    "SessionError",
    "StartError",
    "SwitchError",
    "SwitchReport",
    "doctor",
    "plan",
    "session",
    "trainer_arguments",
]

_HOMES = {
    "CellResult": "nbdist.session.cell",
    "Checkpoint": "nbdist.session.checkpoints",
    "Diagnosis": "nbdist.doctor.report",
    "ExportReport": "nbdist.operations.export",
    "ForeignReport": "nbdist.operations.import_checkpoint",
    "LoadReport": "nbdist.session.checkpoints",
    "Profile": "nbdist.profiler.report",
    "Save": "nbdist.session.checkpoints",
    "Session": "nbdist.session.session",
    "SwitchReport": "nbdist.operations.switch",
}


def session() -> Session | None:
    """The current session, or None."""
    from nbdist.session.session import current

    return current()


def trainer_arguments(
    model: Any = None, *, batch_size: int | None = None, seq_len: int | None = None
) -> dict[str, Any]:
    """Arguments with which Hugging Face's Trainer clips only where the session says --clip.

    Called in a cell on the ranks: `TrainingArguments(out, **nbdist.trainer_arguments())`. A
    Trainer takes the session's engine without them. Under --auto the engine is chosen here, for
    `model` and `seq_len`.

    Args:
        model: the one that Trainer will get; needed under --auto.
        batch_size: samples of one rank's micro-batch, for --auto. Default: Trainer's own, 8.
        seq_len: tokens of a sample, for --auto. Default: what the model takes, 2048 at most.

    Raises:
        SessionError: called anywhere else.
        OptionError: --auto, and no model.
    """
    import os

    from nbdist.errors import SessionError

    if "NBDIST_RANK" not in os.environ:
        msg = "trainer_arguments() is for the ranks: call it in a %%distribute cell."
        raise SessionError(msg)
    from nbdist.worker.engines.trainer import trainer_arguments as on_rank

    return on_rank(model, batch_size=batch_size, seq_len=seq_len)


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Add `%%distribute` and `%nbdist`; start to warm up a launcher in the background."""
    from nbdist.magics import magics

    magics.load(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Remove the magics; ranks that run are kept: `nbdist.session().stop()` ends them."""
    from nbdist.magics import magics

    magics.unload(ipython)


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    from importlib import import_module

    if name not in __all__:
        msg = f"module 'nbdist' has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(_HOMES.get(name, "nbdist.errors")), name)
