"""`%nbdist plan`: its parser, and the plan or the comparison with measurements."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from nbdist import strategies
from nbdist.errors import OptionError, PlanError
from nbdist.magics import arguments as magics_arguments
from nbdist.planner import ANY_DEVICES
from nbdist.planner import plan as plan_model
from nbdist.session import planner

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from IPython.core.magic_arguments import MagicArgumentParser

    from nbdist.planner.machines import MachinePlan
    from nbdist.planner.measured_comparison import MeasuredComparison
    from nbdist.planner.result import Plan
    from nbdist.session.session import Session

_SIZE = re.compile(r"[0-9]{1,9}")
_OWN_OPTIONS = {"model", "check", "json", "help"}
"""All other options are arguments of `nbdist.plan`."""


def plan_parser() -> MagicArgumentParser:
    """Return the parser of `%nbdist plan`."""
    new_parser = magics_arguments.command_parser(
        "plan", "Predict memory and speed of a model under every strategy."
    )
    add = new_parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a size such as 7b, a folder or config.json, or a variable of the notebook or the"
        " ranks; default: the prepared model",
    )
    add(
        "--check",
        action="store_true",
        help="compare prediction and measurement of the prepared model",
    )
    add(
        "--devices",
        metavar="WORDS",
        help="such as 8xH100-80GB,nvlink or 2x(8xH100,nvlink),400Gb/s; any: which machine is"
        " enough; default: this machine's",
    )
    add("--max-nodes", type=int, metavar="N", help="with --devices any: at most N nodes; default 4")
    add("--only", metavar="LIST", help="with --devices any: only these GPUs, such as T4,L4,A10")
    add(
        "-n",
        "--nproc",
        type=int,
        metavar="N",
        dest="world_size",
        help="number of ranks; default: one per device",
    )
    add("--batch-size", metavar="LIST", help="micro-batch size per rank, or several: 1,2,4")
    add("--seq-len", type=int, metavar="N", help="tokens per sample")
    add("--precision", choices=strategies.PRECISIONS, help="default: bf16")
    add("--optimizer", metavar="NAME", help="adamw, adamw_8bit, adafactor, muon, ...")
    add("--lora", type=int, metavar="RANK", help="train PEFT adapters of this rank only")
    add(
        "--target-modules",
        metavar="LIST",
        help="linear layers with an adapter, such as q_proj,v_proj or all-linear",
    )
    add(
        "--quantize",
        metavar="METHOD",
        help="frozen weights: nf4, nf4-bf16, int8; needs --lora",
    )
    add("--offload", metavar="WHERE", help="only plans with this offload: none, cpu, nvme")
    for flag in ("--offload-params", "--activation-checkpointing"):
        add(flag, action="store_true", default=None, help="only plans with it")
    add("--replicate-across", metavar="WHAT", help="only plans with this: none, nodes")
    add("--accumulate", type=int, metavar="N", help="micro-batches per optimizer step")
    magics_arguments.add_json(new_parser)
    add(
        "--drop-outputs",
        action="store_false",
        default=None,
        dest="keep_outputs",
        help="the loop keeps only the loss of a step, not the model's outputs",
    )
    return new_parser


def run_plan_command(
    options: argparse.Namespace, names: Mapping[str, Any], session: Session | None
) -> Plan | MachinePlan | MeasuredComparison:
    """Return the plan, or with --check the comparison, that `%nbdist plan` displays.

    Raises:
        UsageError: --batch-size is not a list of integers.
        OptionError: --json with --check or --devices any.
        PlanError: the model or the devices cannot be planned for.
    """
    if options.json and (options.check or options.devices == ANY_DEVICES):
        raise OptionError("--check and --devices any print no JSON. Leave out --json.")
    if options.check:
        return planner.compare_with_measured(_require_session(session))
    arguments = _arguments(options)
    plan_on_ranks = planner.find_machines if options.devices == ANY_DEVICES else planner.plan_model
    if options.model is None:
        return plan_on_ranks(_require_session(session), None, **arguments)
    if session is not None and options.model.isidentifier() and options.model not in names:
        return plan_on_ranks(session, options.model, **arguments)
    found: Plan | MachinePlan = plan_model(names.get(options.model, options.model), **arguments)
    return found


def _require_session(session: Session | None) -> Session:
    if session is None:
        raise PlanError(
            "There is no session with a prepared model. Name a model, for example"
            " %nbdist plan 7b --devices 8xA100-80GB."
        )
    return session


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `nbdist.plan` that the line sets."""
    given = {
        name: value
        for name, value in vars(options).items()
        if value is not None and name not in _OWN_OPTIONS
    }
    if (text := options.batch_size) is not None:
        parts = [part.strip() for part in text.split(",")]
        if not all(map(_SIZE.fullmatch, parts)):
            message = f"--batch-size must be a list of integers such as 1,2,4, got {text[:60]!r}."
            raise UsageError(message)
        given["batch_size"] = [int(part) for part in parts]
    if options.target_modules is not None:
        names = options.target_modules.split(",")
        given["target_modules"] = names if len(names) > 1 else names[0]
    return given
