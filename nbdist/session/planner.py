"""What the magics say about the models of a session's ranks: a plan, or a check of one.

Runs in the notebook's kernel. The ranks describe the model and tell what they measured; the
arithmetic is done here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.errors import PlanError
from nbdist.hardware.telemetry import Now
from nbdist.output.status_line import StatusLine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nbdist.planner.cluster_spec import Cluster
    from nbdist.planner.result import Plan
    from nbdist.planner.validation import Check
    from nbdist.protocol import messages
    from nbdist.session.session import Session


def plan(
    session: Session, name: str | None = None, *, quick: bool = False, **arguments: Any
) -> Plan:
    """Plan a model of the ranks: a variable, or the one prepared last.

    Micro-batch, ranks, precision and accumulation are the session's own where `arguments` do
    not say otherwise.

    Args:
        session: whose ranks have the model.
        name: a variable of the ranks that holds an nn.Module.
        quick: by the model's closed form or not at all; milliseconds.
        arguments: of `nbdist.plan`.

    Raises:
        PlanError: no such model, or one that cannot be planned.
    """
    from nbdist.planner import local_devices

    cluster = (
        local_devices.cluster(arguments["devices"], arguments.get("world_size"))
        if "devices" in arguments
        else machine(session)
    )
    batch_size = arguments.get("batch_size")
    with StatusLine() as line:
        line.show("nbdist: looking at the model")
        seen = session.model_spec(
            name,
            batch_size=batch_size[0] if isinstance(batch_size, (list, tuple)) else batch_size,
            seq_len=arguments.get("seq_len"),
            kind=cluster.kind,
            quick=quick,
        )
    own = {} if "devices" in arguments else {"world_size": session.world_size}
    return planned_for(session, seen, {**own, **arguments, "devices": cluster})


def peeked(session: Session, seen: messages.ModelReply) -> Plan:
    """Plan what `Session.peek` has found on the ranks while their cell runs.

    Raises:
        PlanError: nothing that can be planned.
    """
    if seen["status"] == "error":
        raise PlanError(seen["error"])
    devices = machine(session)
    return planned_for(session, seen, {"devices": devices, "world_size": session.world_size})


def planned_for(session: Session, seen: messages.ModelReply, arguments: Mapping[str, Any]) -> Plan:
    """Plan a model as rank 0 describes it, for this session where `arguments` say nothing else."""
    from nbdist.planner import load_model, validation
    from nbdist.planner import plan as planned

    own = {
        "batch_size": seen["batch_size"],
        "seq_len": seen["seq_len"],
        "precision": session.options.precision or "no",
    }
    if "optimizer" not in arguments:
        kind = arguments["devices"].kind
        own["optimizer"] = validation.optimizer_of(seen["optimizer"], kind).name
    if session.options.accumulate > 1:
        own["accumulate"] = session.options.accumulate
    return planned(load_model.spec_from_json(seen["spec"]), **{**own, **arguments})


def machine(session: Session) -> Cluster:
    """The session's devices as the planner sees them; what its own ranks hold counts as free."""
    from nbdist.planner import local_devices

    nodes = session.nodes
    if not nodes:
        own = {rank["pid"] for rank in session.status()["ranks"]}
        return local_devices.found(session.world_size, kind=session.hardware.kind, own=own)
    now = session.nodes_now()
    silent = {node.name: Now(node.machine.memory_bytes) for node in nodes if node.name not in now}
    now = silent | now
    return local_devices.on_nodes(
        [(node, now[node.name].usage(node), now[node.name].host_free_bytes) for node in nodes]
    )


def check(session: Session) -> Check:
    """Put what the ranks have measured beside what the planner predicts for it.

    Raises:
        PlanError: nothing was measured yet, or the model cannot be planned.
    """
    from nbdist.planner import load_model, validation

    found = {rank: one for rank, one in session.measured().items() if one is not None}
    if not found:
        message = (
            "nothing was measured yet: the ranks measure themselves in the third optimizer step"
            " after accelerator.prepare()."
        )
        raise PlanError(message)
    one = found[min(found)]
    seen = session.model_spec(
        batch_size=one.batch_size, seq_len=one.seq_len, kind=session.hardware.kind
    )
    spec, nodes = load_model.spec_from_json(seen["spec"]), session.hardware.nodes
    return validation.check(spec, session.options, found, nodes=nodes)
