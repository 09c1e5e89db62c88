"""Builds a profile from the ranks' measurements; runs in the notebook's kernel, without torch.

Meanwhile a rank describes the prepared model, while its cell runs, by its closed form: tracing
would delay the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist import rank_sets as rank_names
from nbdist.errors import NbdistError
from nbdist.protocol import messages
from nbdist.session import planner

if TYPE_CHECKING:
    from nbdist.planner.model_spec import ModelSpec
    from nbdist.profiler.report import Profile
    from nbdist.session.profiler import ProfileRun
    from nbdist.session.session_view import SessionView
    from nbdist.session.worker_group import WorkerGroup

REPLY_TIMEOUT_S = 2.0
"""Timeout for a rank's reply; a running rank replies within milliseconds."""


def build_profile(session: SessionView, workers: WorkerGroup, run: ProfileRun) -> Profile:
    """Build the profile from the measurements and the session's model, options and cells."""
    from nbdist.planner import fit_measurements
    from nbdist.profiler import lint
    from nbdist.profiler.profile_data import ProfiledConfig
    from nbdist.profiler.report import Profile

    cluster, spec = planner.cluster_spec(session), _spec(session, workers, min(run.figures))
    setting = ProfiledConfig(options=session.options, cluster=cluster, model_spec=spec)
    figures = [run.figures[rank] for rank in sorted(run.figures)]
    code = lint.read_training_cell(run.sources)
    profile = Profile.of(
        figures,
        setting,
        remarks=lint.lint_cell(code, figures, bf16=session.hardware.bf16),
        loader_text=code.loader if code else None,
        before=session.profiles[-1] if session.profiles else None,
        notes=_absent(run, session.world_size),
    )
    if spec is not None:
        fit_measurements.learn_from_profile(
            profile.ranks, spec=spec, options=session.options, cluster=cluster
        )
    return profile


def _absent(run: ProfileRun, world_size: int) -> list[str]:
    """Return which ranks are missing from the profile, and why."""
    others = sorted(set(range(world_size)) - set(run.ranks))
    missing = [f"{rank_names.describe_ranks(others)} did not run this cell."] if others else []
    return missing + run.take_refusal_notes()


def _spec(session: SessionView, workers: WorkerGroup, rank: int) -> ModelSpec | None:
    """Return the prepared model for the planner; None if it has no closed form."""
    from nbdist.planner import load_model

    content = messages.ModelRequest(
        name=None, batch_size=None, seq_len=None, kind=session.hardware.kind, quick=True
    )
    try:
        reply: messages.ModelReply = workers.request_all(
            [rank], messages.MODEL, content, channel="control", patience_s=REPLY_TIMEOUT_S
        )[rank]
        return load_model.spec_from_json(reply["spec"])
    except NbdistError:  # no closed form, no answer in time, or the rank has just ended
        return None
