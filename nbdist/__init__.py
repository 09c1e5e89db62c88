"""Run a notebook cell on every GPU, under any of Accelerate's backends.

In a notebook use `%load_ext nbdist`, then `%%distribute --backend fsdp`; in a script
`nbdist.Session`. Importing this package imports neither torch nor accelerate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# The packages `nbdist.doctor` and `nbdist.session` share their names with public functions. The
# import system binds a package to its name on first import, so import them before the functions.
import nbdist.session as _session  # noqa: F401
from nbdist._version import __version__ as __version__
from nbdist.doctor import doctor
from nbdist.planner import plan

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.doctor.diagnosis import Diagnosis
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
    from nbdist.operations.model_files import ExportReport, ForeignReport, LoadReport
    from nbdist.operations.switch import SwitchReport
    from nbdist.profiler.profile import Profile
    from nbdist.session.cell import CellResult
    from nbdist.session.checkpoints import Checkpoint, Save
    from nbdist.session.distributed_function import distribute
    from nbdist.session.session import Session

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
    "distribute",
    "doctor",
    "full_parameters",
    "generate",
    "plan",
    "session",
    "trainer_arguments",
]

_MODULES = {
    "CellResult": "nbdist.session.cell",
    "Checkpoint": "nbdist.session.checkpoints",
    "Diagnosis": "nbdist.doctor.diagnosis",
    "ExportReport": "nbdist.operations.model_files",
    "ForeignReport": "nbdist.operations.model_files",
    "LoadReport": "nbdist.operations.model_files",
    "Profile": "nbdist.profiler.profile",
    "Save": "nbdist.session.checkpoints",
    "Session": "nbdist.session.session",
    "SwitchReport": "nbdist.operations.switch",
    "distribute": "nbdist.session.distributed_function",
}


def session() -> Session | None:
    """Return the current session, or None."""
    from nbdist.session.session import current_session

    return current_session()


def trainer_arguments(
    model: Any = None, *, batch_size: int | None = None, seq_len: int | None = None
) -> dict[str, Any]:
    """Return arguments that make Hugging Face's Trainer clip gradients only as set by --clip.

    Call it in a cell on the ranks: `TrainingArguments(out, **nbdist.trainer_arguments())`. A
    Trainer follows the session's options even if this function is not called. Under --auto the
    backend is chosen here, for `model` and `seq_len`, and otherwise by the Trainer, for its first
    batch, optimizer and precision.

    Args:
        model: the model to be passed to Trainer; required under --auto.
        batch_size: micro-batch size per rank, for --auto. Default: Trainer's default, 8.
        seq_len: tokens per sample, for --auto. Default: the model's maximum, at most 2048.

    Raises:
        SessionError: not called on a rank.
        OptionError: --auto without a model.
    """
    _require_rank("trainer_arguments")
    from nbdist.worker.engines.trainer import trainer_arguments as on_rank

    return on_rank(model, batch_size=batch_size, seq_len=seq_len)


def generate(
    model: Any,
    inputs: Any,
    tokenizer: Any = None,
    *,
    batch_size: int | None = None,
    **options: Any,
) -> Any:
    """Generate with a transformers model on all ranks, each for a share of the inputs.

    Call it in a cell on all ranks with the same inputs. Every rank gets all results, in the order
    of the inputs. Dropout is off meanwhile.

    Args:
        model: a model as `accelerator.prepare()` returned it, under any backend.
        inputs: a list of texts, the tensors that a tokenizer returns, or a tensor of token ids.
        tokenizer: encodes and decodes texts.
        batch_size: number of inputs that a rank generates for at a time. Default: all of its share.
        **options: as for `model.generate()`, such as max_new_tokens.

    Returns:
        The texts including the prompts, or for tensors a tensor of padded token ids.

    Raises:
        SessionError: not called on a rank.
        OptionError: the cell does not run on all ranks, or the inputs are of another kind.
    """
    _require_rank("generate")
    from nbdist.worker.training.generation import generate as on_rank

    return on_rank(model, inputs, tokenizer, batch_size=batch_size, **options)


def full_parameters(model: Any) -> AbstractContextManager[Any]:
    """Return a context manager that gathers all parameters of a prepared model on every rank.

    Use it in a cell on all ranks: `with nbdist.full_parameters(model) as bare:`. `bare` is the
    model without its engine. Inside, each rank can read the parameters and call the model by
    itself. FSDP2 and ZeRO-3 gather in the dtype of the computation, FSDP1 in that of the weights.
    Changes to the parameters are discarded under FSDP and ZeRO-3. Under DDP, ZeRO-1 and ZeRO-2
    nothing needs to be gathered.

    Args:
        model: a model as `accelerator.prepare()` returned it.

    Raises:
        SessionError: not called on a rank.
        OptionError: the cell does not run on all ranks.
    """
    _require_rank("full_parameters")
    from nbdist.worker.training.whole_weights import full_parameters as on_rank

    return on_rank(model)


def _require_rank(function: str) -> None:
    import os

    from nbdist.errors import SessionError

    if "NBDIST_RANK" not in os.environ:
        raise SessionError(f"{function}() works only on ranks. Call it in a %%distribute cell.")


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Register `%%distribute` and `%nbdist`, and start to warm up a launcher in the background."""
    from nbdist.magics import magics

    magics.register_magics(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Remove the magics; running ranks are kept, `nbdist.session().stop()` ends them."""
    from nbdist.magics import magics

    magics.unregister_magics(ipython)


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'nbdist' has no attribute {name!r}")
    return getattr(import_module(_MODULES.get(name, "nbdist.errors")), name)
