"""Takes a snapshot of the session as plain values, which the widget, the HTML and the text show.

Runs on the panel's thread in about a millisecond and sends no request to the ranks.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbdist._version import __version__
from nbdist.hardware.telemetry import GpuReading
from nbdist.number_formatting import (
    format_bytes,
    format_duration,
    format_percent,
    format_tokens_per_s,
    truncate,
)
from nbdist.output.ansi import replace_invalid_chars, strip_ansi
from nbdist.output.sink import get_kernel
from nbdist.panel import plan_view
from nbdist.panel.commands import ARGUMENTS
from nbdist.panel.protocol import (
    AdviceView,
    CheckpointView,
    DeviceView,
    EventMarkView,
    HeaderView,
    NodeView,
    NoticeView,
    PanelState,
    ProfiledRank,
    ProfileView,
    ProgressView,
    QueuedCommand,
    RankView,
    SessionState,
    StepPartTime,
)
from nbdist.profiler.measurements import STEP_PARTS
from nbdist.profiler.profile import shown_ranks
from nbdist.session.progress import parse_fraction_done

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nbdist.panel.device_sampler import DeviceSampler
    from nbdist.panel.plan_view import PlanView
    from nbdist.profiler.advice import Advice
    from nbdist.profiler.measurements import RankProfile
    from nbdist.profiler.profile import Profile
    from nbdist.protocol import messages
    from nbdist.session.cell import Cell
    from nbdist.session.session import Session
    from nbdist.strategies import Options

log = logging.getLogger(__name__)

MAX_LINE_CHARS = 300
MAX_CHECKPOINTS = 100
MAX_MARKS = 100
INTERRUPT_TIMEOUT_S = 3.0
"""A rank that has not responded to an interrupt after this time is named."""
MAX_COLLECTIVES = 3
"""Maximum number of collectives that are listed per rank."""
MAX_TEXT_CHARS = 1000
EMPTY_PROFILE_VIEW = ProfileView(
    verdict="",
    facts="",
    outcome="",
    ranks=[],
    advice=[],
    notes=[],
    time=None,
    unavailable_reason="",
)
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
    """Return a snapshot of the session."""
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
            EventMarkView(
                step=mark.step,
                time=mark.time,
                kind=mark.kind,
                # of a switch only what changes
                text=mark.text.rpartition(": ")[2].replace("->", "\N{RIGHTWARDS ARROW}")
                if mark.kind == "switch"
                else mark.text,
            )
            for mark in session.events.to_list()[-MAX_MARKS:]
        ],
        notice=notice,
    )


# ---------------------------------------------------------------------------- header


def header_view(session: Session) -> HeaderView:
    """Return the header line."""
    options = session.options
    state, description, state_since = _state(session)
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
        description=description,
        state_since=state_since,
        started_at=session.started_at,
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
    slots, latest = devices.device_slots, devices.latest_snapshot
    readings = [] if latest is None or ended else list(latest.readings)
    readings += [GpuReading()] * (len(slots) - len(readings))  # nothing is known about the rest
    return [
        DeviceView(
            name=slot.name,
            node=slot.node,
            kind="cuda" if slot.uuid else "cpu",
            ranks=list(slot.ranks),
            capacity_bytes=slot.capacity_bytes,
            predicted=list(predicted.parts),
            predicted_bytes=predicted.device_bytes,
            stated_error=predicted.stated_error,
            used_bytes=reading.used_bytes,
            peak_bytes=devices.peak_bytes.get(index) or None,
            others_bytes=reading.others_bytes,
            other_processes=list(reading.holders),
            utilization=reading.utilization,
            power_w=reading.power_w,
            power_limit_w=reading.power_limit_w,
            temperature_c=reading.temperature_c,
            pcie_tx=reading.pcie_tx,
            pcie_rx=reading.pcie_rx,
            nvlink_tx=reading.nvlink_tx,
            nvlink_rx=reading.nvlink_rx,
            note=_note(predicted, devices.strategy_peak_bytes.get(index, 0), reading.note),
        )
        for index, (slot, reading) in enumerate(zip(slots, readings, strict=False))
    ]


def _nodes(devices: DeviceSampler, *, ended: bool) -> list[NodeView]:
    latest = devices.latest_snapshot
    usage = {} if latest is None or ended else latest.nodes
    return [
        NodeView(
            name=node.name,
            description=node.describe(),
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
        printed, is_running = log.last_line() if log else "", state in {"running", "waiting"}
        views.append(
            RankView(
                rank=rank,
                pid=member["pid"] if member else None,
                device=member["device"] if member else "",
                node=nodes.get(rank, ""),
                state=state,
                last_line=truncate(strip_ansi(replace_invalid_chars(printed)), MAX_LINE_CHARS),
                num_chars=log.written if log else 0,
                current_line=_position_text(answer) if answer and is_running else "",
            )
        )
    return views


def _position_text(answer: messages.RankActivityReply) -> str:
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
            saved_at=checkpoint.created.timestamp(),
            seconds=checkpoint.seconds,
            path=str(checkpoint.path),
            state="done",
            error="",
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
                saved_at=save.started_at,
                seconds=None,
                path=str(save.root / save.name),
                state=state,  # type: ignore[typeddict-item]
                error=save.error,
            )
            for save in saves
        ]
    return views


def _progress(session: Session) -> ProgressView | None:
    work = session.operation.progress
    if work is not None:
        return ProgressView(
            text=work.text, fraction_done=work.fraction_done, started_at=work.started_at
        )
    for save in session.saves_running():
        share = parse_fraction_done(save.how_far)
        return ProgressView(text=save.how_far, fraction_done=share, started_at=save.started_at)
    profiling = session.profiling
    if profiling is not None:
        return ProgressView(
            text=profiling.text,
            fraction_done=profiling.fraction_done,
            started_at=profiling.requested_at,
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


# ---------------------------------------------------------------------------- profile


class ProfileViewCache:
    """Cached view of the latest profile of a session."""

    def __init__(self) -> None:
        self._seen: tuple[Profile, Options] | None = None
        self._view = EMPTY_PROFILE_VIEW

    def current_view(self, session: Session) -> ProfileView:
        """Return the latest profile, and why no new one can be started, if so."""
        profiles = session.profiles
        if not profiles:
            self._seen, self._view = None, EMPTY_PROFILE_VIEW
        elif (
            self._seen is None
            or self._seen[0] is not profiles[-1]
            or self._seen[1] != session.options
        ):
            self._seen = profiles[-1], session.options
            try:
                self._view = view_from_profile(*self._seen)
            except Exception as error:  # an error in one profile must not end the panel
                log.exception("the profile could not be shown")
                verdict = f"Cannot show the profile ({type(error).__name__}: {error})."
                self._view = ProfileView(**{**EMPTY_PROFILE_VIEW, "verdict": verdict})
        return ProfileView(**{**self._view, "unavailable_reason": session.why_no_profile()})


def view_from_profile(profile: Profile, options: Options) -> ProfileView:
    """Convert a profile.

    Args:
        profile: a profile of any session.
        options: current options of the session. Advice that they already follow gets no button.
    """
    shown = shown_ranks(profile)
    num_hidden = len(profile.ranks) - len(shown)
    notes = list(profile.notes)
    if num_hidden:
        notes.append(f"and {num_hidden} more ranks: nbdist.session().profiles[-1].ranks")
    return ProfileView(
        verdict=_text(profile.verdict),
        facts=_text(", ".join(_profile_facts(profile))),
        outcome=_text(profile.advice_outcome),
        ranks=[
            ProfiledRank(
                rank=int(rank.rank),
                step_s=_finite_duration(rank.step_s),
                # not zero, in the order of the bar
                parts=[
                    StepPartTime(part=part, seconds=_finite_duration(rank.parts[part]))
                    for part in STEP_PARTS
                    if _finite_duration(rank.parts.get(part, 0.0))
                ],
                straggler=rank.rank == profile.straggler,
                figures=_text("; ".join(_rank_figures(rank))),
            )
            for rank in shown
        ],
        advice=[_advice(advice, options) for advice in profile.advice],
        notes=[_text(note) for note in notes],
        time=max((rank.ends[-1] for rank in profile.ranks if rank.ends), default=None),
        unavailable_reason="",
    )


def _text(text: str) -> str:
    return truncate(replace_invalid_chars(text), MAX_TEXT_CHARS)


def _finite_duration(number: float) -> float:
    """A duration that JSON and a bar can represent."""
    return number if math.isfinite(number) and number > 0 else 0.0


def _profile_facts(profile: Profile) -> Iterator[str]:
    """Facts about all ranks together."""
    number = profile.num_steps
    yield f"{number} step{'s' * (number != 1)} of {format_duration(profile.step_s)}"
    yield f"p50 {format_duration(profile.p50_s)}"
    yield f"p90 {format_duration(profile.p90_s)}"
    if profile.tokens_per_s > 0:
        unit = "tokens" if profile.model is not None and profile.model.seq_len > 1 else "samples"
        yield f"{format_tokens_per_s(profile.tokens_per_s)} {unit}/s"
    if profile.mfu is not None and profile.peak_flops:
        yield f"MFU {format_percent(profile.mfu)} of {profile.peak_flops / 1e12:.0f} TFLOP/s"


def _rank_figures(rank: RankProfile) -> Iterator[str]:
    """Measurements of one rank that its bar does not show."""
    steps = sorted(rank.steps)
    if steps:
        yield f"p90 {format_duration(steps[math.ceil(0.9 * len(steps)) - 1])}"
    for kind in sorted(rank.traffic, key=lambda kind: -kind.seconds)[:MAX_COLLECTIVES]:
        speed = f", {kind.bandwidth / 1e9:.1f} GB/s" if kind.bandwidth > 0 else ""
        size, duration = format_bytes(kind.bytes), format_duration(kind.seconds)
        yield f"{kind.name} {size} in {duration}{speed}"
    if rank.hidden_s > 0:
        yield f"{format_duration(rank.hidden_s)} of communication overlap with computation"
    if rank.memory is not None and rank.memory.parts:
        largest = sorted(rank.memory.parts.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest if size)
        yield f"peak memory: {parts}"


def _advice(advice: Advice, now: Options) -> AdviceView:
    # The button of an advice switches. It needs options that a switch accepts and that differ.
    allowed = ARGUMENTS["switch"]
    can_switch = all(
        hasattr(now, name) and name in allowed and allowed[name].check(value)
        for name, value in advice.changes.items()
    )
    arguments = {
        name: value
        for name, value in advice.changes.items()
        if can_switch and getattr(now, name) != value
    }
    return AdviceView(
        title=_text(advice.title),
        text=_text(f"{advice.gain_text}. {advice.why}"),
        command=_text(advice.line),
        effect=plan_view.describe_switch(now, replace(now, **arguments)) if arguments else "",
        arguments=arguments,
    )
