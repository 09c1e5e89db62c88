"""From the figures of the ranks to a profile; runs in the notebook's kernel, without torch.

A rank describes the prepared model meanwhile, while its cell runs: by its closed form, so that
the verdict does not wait for a trace.
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
    from nbdist.session.profiler import Profiling
    from nbdist.session.session import Session
    from nbdist.session.worker_group import Gang

PATIENCE_S = 2.0
"""A rank that computes answers within milliseconds; the verdict waits no longer."""


def judged(session: Session, gang: Gang, one: Profiling) -> Profile:
    """Put the figures together with what the session knows of its model, options and cells."""
    from nbdist.planner import fit_measurements
    from nbdist.profiler import lint
    from nbdist.profiler.report import Profile, Setting

    cluster, spec = planner.machine(session), _spec(session, gang, min(one.figures))
    setting = Setting(options=session.options, cluster=cluster, spec=spec)
    figures = [one.figures[rank] for rank in sorted(one.figures)]
    made = Profile.of(
        figures,
        setting,
        remarks=lint.confirmed(lint.remarks(one.sources), figures, bf16=session.hardware.bf16),
        loader_text=lint.loader(one.sources),
        before=session.profiles[-1] if session.profiles else None,
        notes=_absent(one, session.world_size),
    )
    if spec is not None:
        fit_measurements.learn(made.ranks, spec=spec, options=session.options, cluster=cluster)
    return made


def _absent(one: Profiling, world_size: int) -> list[str]:
    """Say which ranks are not in the profile, and why."""
    others = sorted(set(range(world_size)) - set(one.ranks))
    said = [f"{rank_names.words(others)} did not run this cell."] if others else []
    return said + one.refused()


def _spec(session: Session, gang: Gang, rank: int) -> ModelSpec | None:
    """The prepared model as the planner sees it; None where it has no closed form."""
    from nbdist.planner import load_model

    content = messages.ModelRequest(
        name=None, batch_size=None, seq_len=None, kind=session.hardware.kind, quick=True
    )
    try:
        reply: messages.ModelReply = gang.ask(
            [rank], messages.MODEL, content, channel="control", patience_s=PATIENCE_S
        )[rank]
        return load_model.spec_from_json(reply["spec"])
    except NbdistError:  # no closed form, no answer in time, or the rank has just ended
        return None
