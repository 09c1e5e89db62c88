"""Takes a snapshot of the session as plain values, which the widget, the HTML and the text show.

Runs on the panel's thread in about a millisecond and sends no request to the ranks.
"""

from __future__ import annotations

import contextlib
import re
import time
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from nbdist._version import __version__
from nbdist.display.units import truncate
from nbdist.hardware.telemetry import GpuReading
from nbdist.output.ansi import replace_invalid_chars, strip_ansi
from nbdist.output.sink import get_kernel
from nbdist.panel.devices import DeviceSlot
from nbdist.panel.protocol import (
    CheckpointView,
    DeviceView,
    EventMarkView,
    HeaderView,
    NodeView,
    NoticeView,
    PanelState,
    ProgressView,
    QueuedCommand,
    RankView,
    SessionState,
)
from nbdist.session.progress import parse_fraction_done

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nbdist.panel.devices import DeviceSampler
    from nbdist.panel.plan_view import PlanView
    from nbdist.panel.profile_view import ProfileViewCache
    from nbdist.protocol import messages
    from nbdist.session.cell import Cell
    from nbdist.session.session import Session
    from nbdist.session.training_events import TrainingEvent

MAX_LINE_CHARS = 300
MAX_CHECKPOINTS = 100
MAX_MARKS = 100
INTERRUPT_TIMEOUT_S = 3.0
"""A rank that has not responded to an interrupt after this time is named."""
_KERNEL_ID = re.compile(r"kernel-(.+)\.json")


def take_snapshot(
    session: Session,
    devices: DeviceSampler,
    predicted: PlanView,
    profiled: ProfileViewCache,
    *,
    queue: Sequence[QueuedCommand] = (),
    notice: NoticeView | None = None,
) -> PanelState:
    """Return a snapshot of the session.

    Args:
        session: the session to show.
        devices: its devices.
        predicted: the plan.
        profiled: the profile.
        queue: waiting commands.
        notice: a message to show.
    """
    ended = session.state in {"stopped", "dead"}
    return PanelState(
        header=header_view(session),
        nodes=_nodes(devices, ended=ended),
        devices=_devices(devices, predicted, ended=ended),
        strategies=predicted.strategies,
        profile=profiled.current_view(session),
        ranks=_ranks(session),
        checkpoints=_checkpoints(session),
        progress=_progress(session),
        queue=list(queue),
        marks=[
            EventMarkView(step=mark.step, time=mark.time, kind=mark.kind, text=_short(mark))
            for mark in session.events.to_list()[-MAX_MARKS:]
        ],
        notice=notice,
    )


def _short(mark: TrainingEvent) -> str:
    """Short text of a mark: of a switch only what changes."""
    if mark.kind != "switch":
        return mark.text
    return mark.text.rpartition(": ")[2].replace("->", "\N{RIGHTWARDS ARROW}")


# ---------------------------------------------------------------------------- header


def header_view(session: Session) -> HeaderView:
    """Return the header line."""
    options = session.options
    state, words, since = _state(session)
    shown = {options.backend, f"precision {options.precision}", f"offload {options.offload}"}
    others = [option for option in options.describe().split(", ") if option not in shown]
    others += ["auto: not decided yet"] if session.undecided else []
    return HeaderView(
        backend="auto" if session.undecided else options.backend,
        world_size=session.world_size,
        precision=options.precision or "no",
        offload=options.offload,
        options=", ".join(others),
        place=session.place,
        state=state,
        words=words,
        since=since,
        started=session.started_at,
        kernel_id=jupyter_kernel_id(),
        version=__version__,
    )


def _state(session: Session) -> tuple[SessionState, str, float | None]:
    """State of the session, its description, and its start time."""
    work, cell = session.operation.progress, session.running
    if session.state == "dead" or session.state == "stopped":  # noqa: PLR1714 - for mypy
        words = session.death.headline if session.death else "stopped"
        return session.state, words, session.state_since
    if work is not None and work.kind != "planning":
        kind: SessionState = "running" if work.kind == "calibrating" else work.kind
        return kind, work.text, work.started_at
    if cell is not None:
        words = " \N{MIDDLE DOT} ".join(
            part for part in (_running(cell), session.standstill) if part
        )
        return "running", words, cell.started_at
    if session.state == "new":
        return "new", "not started", None
    last, marks = session.last, session.events.to_list()
    has_newer_event = bool(marks) and marks[-1].time > session.state_since  # for example a switch
    if last is not None and last.is_interrupted and not has_newer_event:
        return "interrupted", f"cell {last.count} was interrupted", session.state_since
    return "ready", "ready", session.state_since


def _running(cell: Cell) -> str:
    """Description of a running cell, with the ranks that do not respond to an interrupt."""
    if not cell.interrupted_at:
        return f"running cell {cell.count}"
    unresponsive = cell.pending
    if time.time() - cell.interrupted_at < INTERRUPT_TIMEOUT_S or not unresponsive:
        return f"stopping cell {cell.count}"
    ranks = f"rank{'s' * (len(unresponsive) > 1)} {', '.join(map(str, sorted(unresponsive)))}"
    verb = "do" if len(unresponsive) > 1 else "does"
    return f"cell {cell.count}: {ranks} {verb} not respond to Stop; Restart ends the ranks"


def jupyter_kernel_id() -> str | None:
    """Return the id of this kernel in Jupyter's REST API, from its connection file."""
    if get_kernel() is None:
        return None
    with contextlib.suppress(ImportError, RuntimeError, OSError):
        from ipykernel.connect import get_connection_file

        match = _KERNEL_ID.search(get_connection_file())
        return match[1] if match else None
    return None  # a kernel without a connection file


# ---------------------------------------------------------------------------- devices


def _devices(devices: DeviceSampler, predicted: PlanView, *, ended: bool) -> list[DeviceView]:
    seats, latest = devices.device_slots, devices.latest_snapshot
    readings = [] if latest is None or ended else latest.readings
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
            peak_bytes=devices.peak_bytes.get(place) or None,
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
            note=_note(predicted, devices.strategy_peak_bytes.get(place, 0), reading.note),
        )
        for place, (seat, reading) in enumerate(
            zip_longest(seats, readings, fillvalue=GpuReading())
        )
        if isinstance(seat, DeviceSlot)
    ]


def _nodes(devices: DeviceSampler, *, ended: bool) -> list[NodeView]:
    latest = devices.latest_snapshot
    usage = {} if latest is None or ended else latest.nodes
    return [
        NodeView(
            name=node.name,
            words=node.describe(),
            host_bytes=node.machine.memory_bytes,
            host_used_bytes=node.machine.memory_bytes - usage[node.name].host_free_bytes
            if node.name in usage
            else None,
        )
        for node in devices.nodes
    ]


def _note(predicted: PlanView, peak: int, text: str) -> str:
    """Notes on a device: from its reading, and on a peak above the prediction."""
    expected, error = predicted.device_bytes, predicted.stated_error
    notes = [text] if text else []
    if expected and error is not None and peak > expected * (1 + error):
        notes.append(
            f"the peak is {peak / expected - 1:.0%} above the prediction, whose stated error is"
            f" {error:.0%}: %nbdist plan --check shows which part"
        )
    return "; ".join(notes)


# ---------------------------------------------------------------------------- ranks


def _ranks(session: Session) -> list[RankView]:
    work = session.operation.progress
    if session.state == "new" and (work is None or work.kind != "starting"):
        return []  # no rank was started yet
    members = {member["rank"]: member for member in session.status()["ranks"]}
    nodes = {rank: node.name for node in session.nodes for rank in node.ranks}
    rank_activity, cell = session.rank_activity.latest_replies(), session.running
    views = []
    for rank in range(session.world_size):
        member, log = members.get(rank), session.logs.get(rank)
        answer = rank_activity.get(rank)
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
                line=truncate(strip_ansi(replace_invalid_chars(log.last_line())), MAX_LINE_CHARS)
                if log
                else "",
                written=log.written if log else 0,
                where=_where(answer) if answer and state in {"running", "waiting"} else "",
            )
        )
    return views


def _where(answer: messages.RankActivityReply) -> str:
    """Cell, line, code and collective; only the collective outside of a cell's code."""
    if not answer["cell"]:
        return answer["collective"]
    place = f"{answer['cell']} line {answer['line']}: {answer['source']}"
    return f"{place} \N{MIDDLE DOT} {answer['collective']}" if answer["collective"] else place


# ---------------------------------------------------------------------------- checkpoints


def _checkpoints(session: Session) -> list[CheckpointView]:
    """The checkpoints, newest last, followed by failed and running saves."""
    checkpoints = session.checkpoints
    known = checkpoints.cached
    written = {checkpoint.name: checkpoint.created.timestamp() for checkpoint in known}
    views = [
        CheckpointView(
            name=checkpoint.name,
            step=checkpoint.step,
            size_bytes=checkpoint.size_bytes,
            backend=checkpoint.backend,
            saved=checkpoint.created.timestamp(),
            seconds=checkpoint.seconds,
            path=str(checkpoint.path),
            state="done",
            problem="",
        )
        for checkpoint in known[-MAX_CHECKPOINTS:]
    ]
    # a complete checkpoint may be listed before its ranks have reported it
    running = [
        save for save in session.saves_running() if written.get(save.name, 0.0) < save.started_at
    ]
    for state, saves in (
        ("failed", list(checkpoints.failed_saves)[-3:]),
        ("running", running),
    ):
        views += [
            CheckpointView(
                name=save.name,
                step=None,
                size_bytes=0,
                backend=session.backend,
                saved=save.started_at,
                seconds=None,
                path=str(save.root / save.name),
                state=state,  # type: ignore[typeddict-item]
                problem=save.error,
            )
            for save in saves
        ]
    return views


def _progress(session: Session) -> ProgressView | None:
    work = session.operation.progress
    if work is not None:
        return ProgressView(text=work.text, share=work.fraction_done, since=work.started_at)
    for save in session.saves_running():
        share = parse_fraction_done(save.how_far)
        return ProgressView(text=save.how_far, share=share, since=save.started_at)
    profiling = session.profiling
    if profiling is not None:
        return ProgressView(
            text=profiling.text, share=profiling.fraction_done, since=profiling.requested_at
        )
    return None


def changed_keys(before: PanelState | None, now: PanelState) -> dict[str, Any]:
    """Return the top-level keys of the state that differ, with their new values."""
    old: Any = before or {}
    new: Any = now
    return {key: value for key, value in new.items() if key not in old or old[key] != value}


def make_notice(kind: Any, text: str) -> NoticeView:
    """Return a notice with the current time."""
    return NoticeView(kind=kind, text=replace_invalid_chars(text), time=time.time())
