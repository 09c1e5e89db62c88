"""Check of the session of this kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.doctor.finding import ok, problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.doctor.finding import Finding
    from nbdist.session.session import Session

TOPIC = "session"


def check_session(session: Session | None) -> Iterator[Finding]:
    """Report the state of the session without a request to the ranks, which may be busy."""
    if session is None:
        yield ok(TOPIC, "none; a %%distribute cell starts one")
        return
    if session.death is not None:
        yield problem(TOPIC, f"{session.death}", "%nbdist restart, then %nbdist load NAME")
        return
    ended = [process["rank"] for process in session.status()["ranks"] if not process["alive"]]
    if ended:
        yield problem(TOPIC, f"ranks {ended} have ended", "%nbdist restart")
        return
    yield ok(TOPIC, f"{session.describe()}, {session.state}")
