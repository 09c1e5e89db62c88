"""Results of `%nbdist` commands: the plan, the text of `status`, and what `--json` prints.

docs/json.md lists the fields of the JSON documents. The number in `schema` changes if a field is
removed or changes its meaning.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from nbdist._version import __version__
from nbdist.errors import OptionError, PlanError
from nbdist.number_formatting import format_gib
from nbdist.planner import ANY_DEVICES
from nbdist.planner import plan as plan_model
from nbdist.session import planner

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from nbdist.hardware.discovery import SessionNode
    from nbdist.hardware.telemetry import NodeUsage
    from nbdist.planner.measured_comparison import MeasuredComparison
    from nbdist.planner.plan_types import PlanRow
    from nbdist.planner.result import MachinePlan, Plan
    from nbdist.session.checkpoints import Checkpoints
    from nbdist.session.session import Session

_SIZE = re.compile(r"[0-9]{1,9}")
_OWN_OPTIONS = {"model", "check", "json", "help"}
"""All other options are arguments of `nbdist.plan`."""


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


# -- status, and JSON documents


def status_lines(session: Session) -> Iterator[str]:
    """Yield a line for the session, its nodes and each rank, with current memory use on nodes."""
    yield str(session)
    if session.death is not None:
        yield f"  {str(session.death).splitlines()[0]}"
    report = session.status()
    if report["standstill"]:
        yield f"  {report['standstill']}"
    for launcher in report["launchers"]:
        if launcher["unresponsive"]:
            name = launcher["name"].removeprefix("the ")
            yield f"  {name}: pid {launcher['pid']}, {launcher['unresponsive']}"
    is_running = session.state in {"ready", "running"}
    usages = session.nodes_now() if is_running else {}
    first = {node.ranks[0]: node for node in session.nodes}
    readings = {
        rank: reading for usage in usages.values() for rank, reading in usage.readings.items()
    }
    for member in report["ranks"]:
        if node := first.get(member["rank"]):
            yield f"  {_node(node, usages.get(node.name))}" if is_running else f"  node {node.name}"
        reading = readings.get(member["rank"])
        life = member["unresponsive"] or ("alive" if member["alive"] else "ended")
        used = None if reading is None else reading.used_bytes
        holds = "" if used is None else f", {format_gib(used, unit=True)}"
        yield f"  rank {member['rank']}: pid {member['pid']}, {member['device']}, {life}{holds}"


def _node(node: SessionNode, now: NodeUsage | None) -> str:
    """Return the heading of a node: its hardware and its host memory use."""
    if now is None:
        return f"node {node.name}: {node.describe()}, not responding"
    whole = node.machine.memory_bytes
    used = f"{format_gib(whole - now.host_free_bytes)} of {format_gib(whole, unit=True)}"
    return f"node {node.name}: {node.describe()}, host memory {used}"


def status_document(session: Session) -> str:
    """Return the state of a session and of each rank."""
    fields = {
        "description": session.describe(),
        "step": session.metrics.last_step,
        "checkpoint_root": str(session.checkpoints.root),
    }
    return _document("status", session.status() | fields)


def plan_document(plan: Plan) -> str:
    """Return all rows of a plan and the one to use."""
    question = plan.question
    fields = {
        "world_size": question.world_size,
        "seq_len": question.seq_len,
        "precision": question.precision,
        "notes": question.notes,
        "advice": plan.advice,
        "best": None if plan.best is None else _plan_row(plan.best),
        "rows": [_plan_row(row) for row in plan.rows],
    }
    return _document("plan", fields)


def profile_document(fields: Mapping[str, Any]) -> str:
    """Return the verdict, the advice and the measurements of a profile, from its `to_json()`."""
    return _document("profile", fields)


def checkpoints_document(checkpoints: Checkpoints) -> str:
    """Return the complete checkpoints of a folder or URL, newest last."""
    entries = [
        {
            "name": entry.name,
            "step": entry.step,
            "size_bytes": entry.size_bytes,
            "backend": entry.backend,
            "created": entry.created.isoformat(),
            "path": str(entry.path),
        }
        for entry in checkpoints
    ]
    fields = {
        "root": str(checkpoints.root),
        "error": checkpoints.list_error,
        "checkpoints": entries,
    }
    return _document("checkpoints", fields)


def _plan_row(row: PlanRow) -> dict[str, Any]:
    plain = {name: value for name, value in row.to_dict().items() if not name.startswith("memory.")}
    return plain | {"memory": dict(row.memory), "command": row.command}


def _document(kind: str, fields: Mapping[str, Any]) -> str:
    head = {"schema": f"nbdist.{kind}/1", "nbdist": __version__}
    return json.dumps(_finite(head | dict(fields)), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
