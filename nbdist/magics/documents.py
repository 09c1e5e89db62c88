"""Text of `%nbdist status`, and `--json` of `status`, `plan`, `profile` and `checkpoints`.

docs/json.md lists the fields of the JSON documents. The number in `schema` changes if a field is
removed or changes its meaning.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from nbdist._version import __version__
from nbdist.number_formatting import format_gib

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from nbdist.hardware.discovery import SessionNode
    from nbdist.hardware.telemetry import NodeUsage
    from nbdist.planner.plan_types import PlanRow
    from nbdist.planner.result import Plan
    from nbdist.session.checkpoints import Checkpoints
    from nbdist.session.session import Session


def status_lines(session: Session) -> Iterator[str]:
    """Yield a line for the session, its nodes and each rank, with current memory use on nodes."""
    yield str(session)
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
