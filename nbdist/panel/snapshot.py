"""The session at this moment, as plain values: what the widget, the HTML and the text show.

Made on the panel's thread, in about a millisecond; asks the ranks nothing.
"""

from __future__ import annotations

import contextlib
import re
import time
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import nbdist
from nbdist.display import panel_units
from nbdist.hardware.telemetry import Reading
from nbdist.output.ansi import clean, plain
from nbdist.output.sink import kernel_here
from nbdist.panel.devices import Seat
from nbdist.panel.protocol import (
    CheckpointView,
    DeviceView,
    Header,
    MarkView,
    NodeView,
    Notice,
    Picture,
    ProgressView,
    Queued,
    RankView,
    State,
)
from nbdist.session.progress import share_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.panel.devices import Devices
    from nbdist.panel.plan_view import Predicted
    from nbdist.panel.profile_view import Profiled
    from nbdist.protocol import messages
    from nbdist.session.cell import Cell
    from nbdist.session.events import Mark
    from nbdist.session.session import Session

MAX_LINE_CHARS = 300
MAX_CHECKPOINTS = 100
MAX_MARKS = 100
PATIENCE_S = 3.0
"""A rank that goes on for so long after Stop is named."""
_KERNEL_ID = re.compile(r"kernel-(.+)\.json")


def draw(
    session: Session,
    devices: Devices,
    predicted: Predicted,
    profiled: Profiled,
    *,
    queue: Sequence[Queued] = (),
    notice: Notice | None = None,
) -> Picture:
    """Look at the session.

    Args:
        session: the one shown.
        devices: what is known of its devices.
        predicted: the plan.
        profiled: where the step goes.
        queue: commands that wait.
        notice: something to be told.
    """
    ended = session.state in {"stopped", "dead"}
    return Picture(
        header=header(session),
        nodes=_nodes(devices, ended=ended),
        devices=_devices(devices, predicted, ended=ended),
        strategies=predicted.strategies,
        profile=profiled.now(session),
        ranks=_ranks(session),
        checkpoints=_checkpoints(session),
        progress=_progress(session),
        queue=list(queue),
        marks=[
            MarkView(step=one.step, time=one.time, kind=one.kind, text=_short(one))
            for one in session.marks.all()[-MAX_MARKS:]
        ],
        notice=notice,
    )


def _short(mark: Mark) -> str:
    """Words for a narrow place: of a switch what changes, without the ranks that stay."""
    if mark.kind != "switch":
        return mark.text
    return mark.text.rpartition(": ")[2].replace("->", "\N{RIGHTWARDS ARROW}")


# ---------------------------------------------------------------------------- header


def header(session: Session) -> Header:
    """The line on top."""
    options = session.options
    state, words, since = _state(session)
    named = {options.backend, f"precision {options.precision}", f"offload {options.offload}"}
    rest = [one for one in options.describe().split(", ") if one not in named]
    rest += ["auto: not decided yet"] if session.undecided else []
    return Header(
        backend="auto" if session.undecided else options.backend,
        world_size=session.world_size,
        precision=options.precision or "no",
        offload=options.offload,
        options=", ".join(rest),
        place=session.place,
        state=state,
        words=words,
        since=since,
        started=session.started,
        kernel_id=kernel_id(),
        version=nbdist.__version__,
    )


def _state(session: Session) -> tuple[State, str, float | None]:
    """What the session does, in one word and in several, and since when."""
    work, cell = session.activity.now, session.running
    if session.state == "dead" or session.state == "stopped":  # noqa: PLR1714 - for mypy
        words = session.death.headline if session.death else "stopped"
        return session.state, words, session.since
    if work is not None and work.kind != "planning":
        kind: State = "running" if work.kind == "calibrating" else work.kind
        return kind, work.text, work.since
    if cell is not None:
        words = " \N{MIDDLE DOT} ".join(
            part for part in (_running(cell), session.standstill) if part
        )
        return "running", words, cell.began
    if session.state == "new":
        return "new", "not started", None
    last, marks = session.last, session.marks.all()
    gone_on = bool(marks) and marks[-1].time > session.since  # a switch, say
    if last is not None and last.stopped and not gone_on:
        return "interrupted", f"cell {last.count} was interrupted", session.since
    return "ready", "ready", session.since


def _running(cell: Cell) -> str:
    """What a cell does, and who does not hear of Stop."""
    if not cell.interrupted_at:
        return f"running cell {cell.count}"
    silent = cell.pending
    if time.time() - cell.interrupted_at < PATIENCE_S or not silent:
        return f"stopping cell {cell.count}"
    ranks = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, sorted(silent)))}"
    verb = "do" if len(silent) > 1 else "does"
    return f"cell {cell.count}: {ranks} {verb} not answer Stop; Restart ends the ranks"


def kernel_id() -> str | None:
    """This kernel as Jupyter's REST API names it, by its connection file."""
    if kernel_here() is None:
        return None
    with contextlib.suppress(ImportError, RuntimeError, OSError):
        from ipykernel.connect import get_connection_file

        found = _KERNEL_ID.search(get_connection_file())
        return found[1] if found else None
    return None  # one without a connection file


# ---------------------------------------------------------------------------- devices


def _devices(devices: Devices, predicted: Predicted, *, ended: bool) -> list[DeviceView]:
    seats, latest = devices.seats, devices.latest
    known = [] if latest is None or ended else latest.readings
    return [
        DeviceView(
            name=seat.name,
            node=seat.node,
            kind="cuda" if seat.uuid else "cpu",
            ranks=list(seat.ranks),
            capacity_bytes=seat.capacity_bytes,
            predicted=list(predicted.parts),
            predicted_bytes=predicted.device_bytes,
            stated_error=predicted.stated_error,
            used_bytes=reading.used_bytes,
            peak_bytes=devices.peaks.get(place) or None,
            others_bytes=reading.others_bytes,
            holders=list(reading.holders),
            utilization=reading.utilization,
            power_w=reading.power_w,
            power_limit_w=reading.power_limit_w,
            temperature_c=reading.temperature_c,
            pcie_tx=reading.pcie_tx,
            pcie_rx=reading.pcie_rx,
            nvlink_tx=reading.nvlink_tx,
            nvlink_rx=reading.nvlink_rx,
            note=_note(predicted, devices.peaks_now.get(place, 0), reading.note),
        )
        for place, (seat, reading) in enumerate(zip_longest(seats, known, fillvalue=Reading()))
        if isinstance(seat, Seat)
    ]


def _nodes(devices: Devices, *, ended: bool) -> list[NodeView]:
    latest = devices.latest
    told = {} if latest is None or ended else latest.nodes
    return [
        NodeView(
            name=node.name,
            words=node.describe(),
            host_bytes=node.machine.memory_bytes,
            host_used_bytes=node.machine.memory_bytes - told[node.name].host_free_bytes
            if node.name in told
            else None,
        )
        for node in devices.nodes
    ]


def _note(predicted: Predicted, peak: int, told: str) -> str:
    """What a reader of the bar must know."""
    expected, error = predicted.device_bytes, predicted.stated_error
    notes = [told] if told else []
    if expected and error is not None and peak > expected * (1 + error):
        notes.append(
            f"the peak is {peak / expected - 1:.0%} above the prediction, whose stated error is"
            f" {error:.0%}: %nbdist plan --check tells which part"
        )
    return "; ".join(notes)


# ---------------------------------------------------------------------------- ranks


def _ranks(session: Session) -> list[RankView]:
    work = session.activity.now
    if session.state == "new" and (work is None or work.kind != "starting"):
        return []  # none were ever started
    members = {member["rank"]: member for member in session.status()["ranks"]}
    nodes = {rank: node.name for node in session.nodes for rank in node.ranks}
    whereabouts, cell = session.whereabouts.now(), session.running
    views = []
    for rank in range(session.world_size):
        member, log = members.get(rank), session.logs.get(rank)
        answer = whereabouts.get(rank)
        if session.state == "dead" or (member is not None and not member["alive"]):
            state: Any = "dead"
        elif session.state == "stopped":
            state = "ended"
        elif member is None:
            state = "starting"
        elif cell is None or rank not in cell.pending:
            state = "ready"
        else:
            state = "waiting" if answer and answer["collective"] else "running"
        views.append(
            RankView(
                rank=rank,
                pid=member["pid"] if member else None,
                device=member["device"] if member else "",
                node=nodes.get(rank, ""),
                state=state,
                line=panel_units.cut(plain(clean(log.last_line())), MAX_LINE_CHARS) if log else "",
                written=log.written if log else 0,
                where=_where(answer) if answer and state in {"running", "waiting"} else "",
            )
        )
    return views


def _where(answer: messages.WhereReply) -> str:
    """Cell, line, code and collective; empty outside of a cell's code."""
    if not answer["cell"]:
        return answer["collective"]
    place = f"{answer['cell']} line {answer['line']}: {answer['source']}"
    return f"{place} \N{MIDDLE DOT} {answer['collective']}" if answer["collective"] else place


# ---------------------------------------------------------------------------- checkpoints


def _checkpoints(session: Session) -> list[CheckpointView]:
    """The newest last; those that run or failed behind them."""
    checkpoints = session.checkpoints
    known = checkpoints.known
    written = {one.name: one.created.timestamp() for one in known}
    views = [
        CheckpointView(
            name=one.name,
            step=one.step,
            size_bytes=one.size_bytes,
            backend=one.backend,
            saved=one.created.timestamp(),
            seconds=one.seconds,
            path=str(one.path),
            state="done",
            problem="",
        )
        for one in known[-MAX_CHECKPOINTS:]
    ]
    # one that is whole may be listed before its ranks have said so
    running = [one for one in session.saves_running() if written.get(one.name, 0.0) < one.began]
    for state, saves in (
        ("failed", list(checkpoints.failed)[-3:]),
        ("running", running),
    ):
        views += [
            CheckpointView(
                name=save.name,
                step=None,
                size_bytes=0,
                backend=session.backend,
                saved=save.began,
                seconds=None,
                path=str(save.root / save.name),
                state=state,  # type: ignore[typeddict-item]
                problem=save.error,
            )
            for save in saves
        ]
    return views


def _progress(session: Session) -> ProgressView | None:
    work = session.activity.now
    if work is not None:
        return ProgressView(text=work.text, share=work.share, since=work.since)
    for save in session.saves_running():
        share = share_in(save.how_far)
        return ProgressView(text=save.how_far, share=share, since=save.began)
    profiling = session.profiling
    if profiling is not None:
        return ProgressView(text=profiling.text, share=profiling.share, since=profiling.since)
    return None


def changed(before: Picture | None, now: Picture) -> dict[str, Any]:
    """Keys of the picture that differ, whole."""
    old: Any = before or {}
    new: Any = now
    return {key: value for key, value in new.items() if key not in old or old[key] != value}


def notice(kind: Any, text: str) -> Notice:
    """A notice of this moment."""
    return Notice(kind=kind, text=clean(text), time=time.time())
