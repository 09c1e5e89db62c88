"""`--json` of `%nbdist status`, `plan`, `profile` and `checkpoints`: one JSON document each.

docs/json.md lists the fields. The number in `schema` changes if a field is removed or changes
its meaning.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from nbdist._version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.plan_types import PlanRow
    from nbdist.planner.result import Plan
    from nbdist.session.checkpoints import Checkpoints
    from nbdist.session.session import Session


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
