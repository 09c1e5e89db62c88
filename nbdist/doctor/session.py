"""The session of this kernel, where there is one: does it live."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbdist.doctor.finding import ok, problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.doctor.finding import Finding
    from nbdist.session.session import Session

TOPIC = "session"


def look(session: Session | None) -> Iterator[Finding]:
    """Say what runs; nothing is asked of the ranks, which may be busy."""
    if session is None:
        yield ok(TOPIC, "none; a %%distribute cell starts one")
        return
    if session.death is not None:
        yield problem(TOPIC, f"{session.death}", "%nbdist restart, then %nbdist load NAME")
        return
    ended = [one["rank"] for one in session.status()["ranks"] if not one["alive"]]
    if ended:
        yield problem(TOPIC, f"ranks {ended} have ended", "%nbdist restart")
        return
    yield ok(TOPIC, f"{session.describe()}, {session.state}")
