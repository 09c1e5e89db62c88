"""What tests look at inside of a session: no public attribute gives it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from nbdist.session.worker_group import WorkerGroup

if TYPE_CHECKING:
    from nbdist import Session
    from nbdist.session.cell_runner import CellRunner
    from nbdist.session.interrupt import InterruptEscalation


def workers(session: Session) -> WorkerGroup:
    """The ranks of a session as its kernel reaches them."""
    return session._workers


def cell_runner(session: Session) -> CellRunner:
    return session._cells


def escalation(session: Session) -> InterruptEscalation | None:
    """What counts the Stops of the request or cell that runs."""
    joint = workers(session).collective_request
    return joint.escalation if joint is not None else cell_runner(session).escalation


def num_stops(session: Session) -> int:
    """How often Stop was pressed."""
    found = escalation(session)
    return 0 if found is None else found.num_interrupts


def silent_workers() -> WorkerGroup:
    """Ranks that are up and never answer."""
    made = WorkerGroup(
        None,  # type: ignore[arg-type]  # nothing is started
        on_message=print,
        on_idle=bool,
        on_death=print,
        on_notice=print,
        on_termination=print,
    )
    made._channels = SimpleNamespace(send_request=lambda *_, **__: None, wake=lambda: None)  # type: ignore[assignment]
    made._is_running = True
    return made
