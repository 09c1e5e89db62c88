"""`%nbdist plan`: the line read, and the plan or the check that it asks for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

import nbdist
from nbdist import strategies
from nbdist.errors import PlanError
from nbdist.magics import arguments as magics_arguments
from nbdist.session import planner

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from IPython.core.magic_arguments import MagicArgumentParser

    from nbdist.planner.result import Plan
    from nbdist.planner.validation import Check
    from nbdist.session.session import Session

_SIZE = re.compile(r"[0-9]{1,9}")
FIXED = (
    "offload",
    "offload_params",
    "activation_checkpointing",
    "replicate_across",
    "accumulate",
)
"""Options that the search takes as given."""


def parser() -> MagicArgumentParser:
    """The options of `%nbdist plan`."""
    made = magics_arguments.command(
        "plan", "Predicted memory and speed of a model under every strategy."
    )
    add = made.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a size such as 7b, a folder or config.json, a variable of the notebook or of the"
        " ranks; default: the model that the ranks have prepared",
    )
    add("--check", action="store_true", help="the prepared model: predicted beside measured")
    add(
        "--devices",
        metavar="WORDS",
        help="as 8xH100-80GB,nvlink or 2x(8xH100,nvlink),400Gb/s; default: those found here",
    )
    add("-n", "--nproc", type=int, metavar="N", help="number of ranks; default: one a device")
    add("--batch-size", metavar="LIST", help="micro-batch of a rank, or several as 1,2,4")
    add("--seq-len", type=int, metavar="N", help="tokens of a sample")
    add("--precision", choices=strategies.PRECISIONS, help="default: bf16")
    add("--optimizer", metavar="NAME", help="adamw, adamw_8bit, sgd, adafactor, ...")
    add("--offload", metavar="WHERE", help="search with this one only: none, cpu, nvme")
    add("--offload-params", action="store_true", default=None, help="search with it only")
    add(
        "--activation-checkpointing",
        action="store_true",
        default=None,
        help="search with it only",
    )
    add("--replicate-across", metavar="WHAT", help="search with this one only: none, nodes")
    add("--accumulate", type=int, metavar="N", help="micro batches in one optimizer step")
    return made


def run(line: str, names: Mapping[str, Any], session: Session | None) -> Plan | Check | str:
    """Do what `%nbdist plan LINE` asks.

    Args:
        line: what stands behind `plan`.
        names: variables of the notebook.
        session: the current one, or None.

    Returns:
        Something to display.

    Raises:
        UsageError: the line cannot be read.
        PlanError: the model or the devices cannot be planned for.
    """
    asked = parser().parse_args(magics_arguments.words(line, "plan"))
    if asked.help:
        return str(parser().format_help())
    if asked.check:
        return planner.check(_needed(session))
    arguments = _arguments(asked)
    if asked.model is None:
        return planner.plan(_needed(session), None, **arguments)
    if asked.model in names:
        return nbdist.plan(names[asked.model], **arguments)
    if session is not None and asked.model.isidentifier():
        return planner.plan(session, asked.model, **arguments)
    return nbdist.plan(asked.model, **arguments)


def _needed(session: Session | None) -> Session:
    """The session, or an error that says what can be planned without one."""
    if session is None:
        message = (
            "there is no session with a prepared model; name what to plan, for example"
            " %nbdist plan 7b --devices 8xA100-80GB."
        )
        raise PlanError(message)
    return session


def _arguments(asked: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `nbdist.plan` that the line gives."""
    given = {
        "devices": asked.devices,
        "world_size": asked.nproc,
        "seq_len": asked.seq_len,
        "precision": asked.precision,
        "optimizer": asked.optimizer,
        **{name: getattr(asked, name) for name in FIXED},
    }
    if asked.batch_size is not None:
        given["batch_size"] = _sizes(asked.batch_size)
    return {name: value for name, value in given.items() if value is not None}


def _sizes(text: str) -> list[int]:
    """Read "1,2,4"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(map(_SIZE.fullmatch, parts)):
        message = f"--batch-size {text[:60]} is not a list of sizes; use numbers such as 1,2,4."
        raise UsageError(message)
    return [int(part) for part in parts]
