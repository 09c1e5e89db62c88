"""Plans for the models of a session's ranks, comparisons with measurements, and profiles.

Runs in the notebook's kernel. The ranks describe the model and send their measurements; plan and
profile are computed here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from nbdist import rank_sets
from nbdist.errors import NbdistError, PlanError
from nbdist.hardware.telemetry import NodeUsage
from nbdist.protocol import messages
from nbdist.session.progress import StatusLine

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal

    from nbdist.planner.cluster_spec import ClusterSpec
    from nbdist.planner.measured_comparison import MeasuredComparison
    from nbdist.planner.model_spec import ModelSpec
    from nbdist.planner.result import MachinePlan, Plan
    from nbdist.profiler.profile import Profile
    from nbdist.session.lifecycle import SessionLifecycle
    from nbdist.session.model_operations import ModelOperations
    from nbdist.session.profiler import ProfileRun
    from nbdist.session.worker_group import WorkerGroup

MODEL_TIMEOUT_S = 2.0
"""Timeout for a rank's description of its model; a running rank replies within milliseconds."""


def plan_model(
    session: ModelOperations, name: str | None = None, *, quick: bool = False, **arguments: Any
) -> Plan:
    """Plan a model of the ranks: a variable, or the one prepared last.

    Micro-batch, world size, precision and accumulation default to the session's.

    Args:
        session: session whose ranks hold the model.
        name: a variable of the ranks that holds an nn.Module.
        quick: use the closed form or a cached trace only; takes milliseconds.
        arguments: of `nbdist.plan`.

    Raises:
        PlanError: no such model, or one that cannot be planned.
    """
    from nbdist.planner import target_devices

    own: dict[str, Any] = {}
    if "devices" in arguments:
        world_size = arguments.get("world_size")
        cluster = target_devices.resolve_cluster(arguments["devices"], world_size)
    else:
        cluster, own = cluster_spec(session), {"world_size": session.world_size}
    given = {**own, **arguments, "devices": cluster}
    planned: Plan = _plan_on_ranks(session, name, given, kind=cluster.kind, quick=quick)
    return planned


def find_machines(
    session: ModelOperations, name: str | None = None, **arguments: Any
) -> MachinePlan:
    """Return which machines are enough for a model of the ranks; arguments as in `plan_model`."""
    found: MachinePlan = _plan_on_ranks(session, name, arguments, kind="cuda")
    return found


def _plan_on_ranks(
    session: ModelOperations,
    name: str | None,
    arguments: Mapping[str, Any],
    *,
    kind: Literal["cuda", "cpu"],
    quick: bool = False,
) -> Any:
    """Plan a model as rank 0 describes it, computing on devices of this kind."""
    batch_size = arguments.get("batch_size")
    with StatusLine() as line:
        line.show("inspecting the model (tracing an unknown one takes a few seconds)")
        start_time = time.monotonic()
        reply = session.model_spec(
            name,
            batch_size=batch_size[0] if isinstance(batch_size, (list, tuple)) else batch_size,
            seq_len=arguments.get("seq_len"),
            kind=kind,
            quick=quick,
        )
        line.show(f"inspected the model in {time.monotonic() - start_time:.1f} s")
    return _plan(session, reply, arguments, kind)


def plan_running_model(session: SessionLifecycle, reply: messages.ModelReply) -> Plan:
    """Plan the model that `Session.model_query` found on the running ranks.

    Raises:
        PlanError: it cannot be planned.
    """
    if reply["status"] == "error":
        raise PlanError(reply["error"])
    cluster = cluster_spec(session)
    given = {"devices": cluster, "world_size": session.world_size}
    planned: Plan = _plan(session, reply, given, cluster.kind)
    return planned


def _plan(
    session: SessionLifecycle,
    reply: messages.ModelReply,
    arguments: Mapping[str, Any],
    kind: Literal["cuda", "cpu"],
) -> Any:
    """Return a plan with these arguments of `nbdist.plan`, by default the session's settings."""
    from nbdist.planner import build_model_spec, optimizers, plan

    own = {
        "model": build_model_spec.spec_from_json(reply["spec"]),
        "batch_size": reply["batch_size"],
        "seq_len": reply["seq_len"],
        "precision": session.options.precision or "no",
        "keep_outputs": reply["keep_outputs"],
    }
    if "optimizer" not in arguments:
        own["optimizer"] = optimizers.optimizer_from_torch(reply["optimizer"], kind)
    if session.options.accumulate > 1:
        own["accumulate"] = session.options.accumulate
    return plan(**{**own, **arguments})


def cluster_spec(session: SessionLifecycle) -> ClusterSpec:
    """Return the session's devices for the planner; memory used by its own ranks counts as free."""
    from nbdist.planner import target_devices

    nodes = session.nodes
    if not nodes:
        own = {rank["pid"] for rank in session.status()["ranks"]}
        return target_devices.detect_local_cluster(
            session.world_size, kind=session.hardware.kind, own=own
        )
    now = session.nodes_now()
    silent = {
        node.name: NodeUsage(node.machine.memory_bytes) for node in nodes if node.name not in now
    }
    now = silent | now
    return target_devices.cluster_for_session_nodes(
        [
            (node, now[node.name].gpu_memory_usage(node), now[node.name].host_free_bytes)
            for node in nodes
        ]
    )


def compare_with_measured(session: ModelOperations) -> MeasuredComparison:
    """Compare what the ranks have measured with the planner's prediction.

    Raises:
        PlanError: no measurement yet, or the model cannot be planned.
    """
    from nbdist.planner import build_model_spec, measured_comparison

    measured = {rank: memory for rank, memory in session.measured().items() if memory is not None}
    if not measured:
        raise PlanError(
            "No measurement yet: ranks measure their memory in the third optimizer step after"
            " accelerator.prepare(). Train some steps first."
        )
    first = measured[min(measured)]
    description = session.model_spec(
        batch_size=first.batch_size, seq_len=first.seq_len, kind=session.hardware.kind
    )
    spec, nodes = build_model_spec.spec_from_json(description["spec"]), session.hardware.nodes
    return measured_comparison.compare_plan_with_measurements(
        spec, session.options, measured, nodes=nodes
    )


def build_profile(session: SessionLifecycle, workers: WorkerGroup, run: ProfileRun) -> Profile:
    """Build the profile from the measurements and the session's model, options and cells."""
    from nbdist.profiler import lint, what_if
    from nbdist.profiler.profile import Profile
    from nbdist.profiler.profile_data import ProfiledConfig

    cluster, spec = cluster_spec(session), _spec(session, workers, min(run.figures))
    setting = ProfiledConfig(options=session.options, cluster=cluster, model_spec=spec)
    figures = [run.figures[rank] for rank in sorted(run.figures)]
    code = lint.read_training_cell(run.sources)
    others = sorted(set(range(session.world_size)) - set(run.ranks))
    notes = [f"{rank_sets.describe_ranks(others)} did not run this cell."] if others else []
    notes += run.take_refusal_notes()
    profile = Profile.of(
        figures,
        setting,
        remarks=lint.lint_cell(code, figures, bf16=session.hardware.bf16),
        loader_text=code.loader if code else None,
        before=session.profiles[-1] if session.profiles else None,
        notes=notes,
    )
    if spec is not None:
        what_if.learn_from_profile(
            profile.ranks, spec=spec, options=session.options, cluster=cluster
        )
    return profile


def _spec(session: SessionLifecycle, workers: WorkerGroup, rank: int) -> ModelSpec | None:
    """Return the prepared model for the planner; None if it has no closed form."""
    from nbdist.planner import build_model_spec

    content = messages.ModelRequest(
        name=None, batch_size=None, seq_len=None, kind=session.hardware.kind, quick=True
    )
    try:
        reply: messages.ModelReply = workers.request_all(
            [rank], messages.MODEL, content, channel="control", patience_s=MODEL_TIMEOUT_S
        )[rank]
        return build_model_spec.spec_from_json(reply["spec"])
    except NbdistError:  # no closed form, no answer in time, or the rank has just ended
        return None
