"""From the figures of the ranks to a profile; runs in the notebook's kernel, without torch.

A rank describes the prepared model meanwhile, while its cell runs: by its closed form, so that
the verdict does not wait for a trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist import ranks as rank_names
from nbdist import wire
from nbdist.errors import NbdistError
from nbdist.kernel import planning

if TYPE_CHECKING:
    from nbdist.kernel.gang import Gang
    from nbdist.kernel.profiling import Profiling
    from nbdist.kernel.session import Session
    from nbdist.plan.spec import ModelSpec
    from nbdist.profile.result import Profile

PATIENCE_S = 2.0
"""A rank that computes answers within milliseconds; the verdict waits no longer."""


def judged(session: Session, gang: Gang, one: Profiling) -> Profile:
    """Put the figures together with what the session knows of its model, options and cells."""
    from nbdist.plan import learning
    from nbdist.profile import lint
    from nbdist.profile.result import Profile, Setting

    cluster, spec = planning.machine(session), _spec(session, gang, min(one.figures))
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
        learning.learn(made.ranks, spec=spec, options=session.options, cluster=cluster)
    return made


def _absent(one: Profiling, world_size: int) -> list[str]:
    """Say which ranks are not in the profile, and why."""
    others = sorted(set(range(world_size)) - set(one.ranks))
    said = [f"{rank_names.words(others)} did not run this cell."] if others else []
    return said + one.refused()


def _spec(session: Session, gang: Gang, rank: int) -> ModelSpec | None:
    """The prepared model as the planner sees it; None where it has no closed form."""
    from nbdist.plan import read

    content = wire.ModelRequest(
        name=None, batch_size=None, seq_len=None, kind=session.hardware.kind, quick=True
    )
    try:
        reply: wire.ModelReply = gang.ask(
            [rank], wire.MODEL, content, channel="control", patience_s=PATIENCE_S
        )[rank]
        return read.spec_from_json(reply["spec"])
    except NbdistError:  # no closed form, no answer in time, or the rank has just ended
        return None
