"""The panel's front end: its built files, and the messages to and from it.

`widgets/src/protocol.ts` is generated from this module by `widgets/generate_protocol.py`.

Kernel -> front end, custom messages of the widget's model:

    reset     complete state; the reply to hello. Buffer: the points of all curves, concatenated
    state     top-level keys of the state that have changed, with their complete values
    points    new points. Buffer: for each curve in turn `points` triples
    samples   once per second: current readings of the devices
    answer    reply to a command, by its id
    log       the last log lines of a rank
    heartbeat sent when nothing else was sent for ``HEARTBEAT_INTERVAL_S``

Front end -> kernel:

    hello     a page was opened
    command   interrupt, restart, cancel, switch, save, load, export, plan
    log       request for the log lines of a rank

A point is a triple of float64, little endian: step, Unix seconds, value. A point of a step that was
already sent replaces the earlier one (a rank was late). Steps arrive almost in order. Numbers may
be NaN or infinite in buffers only; in JSON they are null. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

SCRIPT = Path(__file__).parent / "static" / "panel.js"
"""`hatch_build.py` builds it from widgets/ at installation."""
STYLE = SCRIPT.with_suffix(".css")
MAX_POINTS = 2000
"""Maximum number of points per curve in a reset."""
MAX_CURVES = 200
"""Only the first names get a curve."""
MAX_SAMPLES = 300
HEARTBEAT_INTERVAL_S = 2.0
MAX_ID_CHARS = 64
MAX_SEARCH_CHARS = 256
MAX_LOG_LINES = 500

SessionState = Literal[
    "new",
    "starting",
    "ready",
    "running",
    "switching",
    "saving",
    "loading",
    "exporting",
    "interrupted",
    "dead",
    "stopped",
]
CommandName = Literal[
    "interrupt", "restart", "cancel", "switch", "save", "load", "export", "plan", "profile"
]

MEMORY_PARTS = (
    "parameters",
    "master",
    "gradients",
    "optimizer",
    "gathered",
    "activations",
    "logits",
    "buffers",
    "temporaries",
    "context",
    "other",
)
"""Parts of a device's memory, in the order of a bar. other: margin of the allocator."""


class MemoryPart(TypedDict):
    """One part of a bar."""

    part: str
    bytes: int


class HeaderView(TypedDict):
    """Header line of the panel."""

    backend: str
    world_size: int
    precision: str
    offload: str
    options: str
    """The other options of the strategy, as text."""
    place: str
    state: SessionState
    description: str
    """The state in words: "running cell 4"."""
    state_since: float | None
    """Unix time in seconds."""
    started_at: float | None
    kernel_id: str | None
    """Id of this kernel in Jupyter's REST API; None if unknown."""
    version: str


class NodeView(TypedDict):
    """One node of a cluster. Empty list if all ranks are on the notebook's machine."""

    name: str
    description: str
    """Its devices: "4 x NVIDIA A100 80GB, NVLink", "2 CPU ranks, 16 cores"."""
    host_bytes: int
    """Memory of the machine or container. The next field is the part in use by any process."""
    host_used_bytes: int | None


class DeviceView(TypedDict):
    """One GPU, or one CPU rank. Unknown values are None."""

    name: str
    node: str
    """`NodeView.name`; empty on the notebook's machine. The same holds for `RankView`."""
    kind: Literal["cuda", "cpu"]
    ranks: list[int]
    capacity_bytes: int | None
    predicted: list[MemoryPart]
    predicted_bytes: int | None
    stated_error: float | None
    used_bytes: int | None
    """Memory in use by the ranks of this session."""
    peak_bytes: int | None
    """Peak of `used_bytes` since the session started."""
    others_bytes: int
    other_processes: list[str]
    utilization: float | None
    """Share of the time, from 0 to 1. For a CPU rank: share of the machine's cores."""
    power_w: float | None
    power_limit_w: float | None
    temperature_c: float | None
    pcie_tx: float | None
    """Bytes per second, as in the next three fields."""
    pcie_rx: float | None
    nvlink_tx: float | None
    nvlink_rx: float | None
    note: str


class StrategyRow(TypedDict):
    """One strategy of the plan."""

    id: str
    backend: str
    label: str
    device_bytes: int
    capacity_bytes: int
    parts: list[MemoryPart]
    fits: bool
    current: bool
    recommended: bool
    tokens_per_s: float | None
    why: str
    command: str
    """The command to paste."""
    effect: str
    """Description of the switch; empty for the current strategy."""
    arguments: dict[str, Any]
    """Arguments of the switch command; empty if a button cannot perform it."""


class StrategiesView(TypedDict):
    """The plan."""

    rows: list[StrategyRow]
    note: str


class StepPartTime(TypedDict):
    """Duration of one part of a step."""

    part: str
    """One of `nbdist.profiler.measurements.STEP_PARTS`."""
    seconds: float


class ProfiledRank(TypedDict):
    """Breakdown of a rank's step."""

    rank: int
    step_s: float
    """Mean over the profiled window."""
    parts: list[StepPartTime]
    """In the order of the bar; the sum is the step."""
    straggler: bool
    """True for the rank that the others wait for."""
    figures: str
    """Other measurements of the rank, as text."""


class AdviceView(TypedDict):
    """A suggestion to speed up training."""

    title: str
    text: str
    """The predicted gain and the reason."""
    command: str
    """The command to paste."""
    effect: str
    """Description of the switch; empty if a button cannot perform it."""
    arguments: dict[str, Any]
    """Arguments of the switch command; empty if a button cannot perform it."""


class ProfileView(TypedDict):
    """The latest profile. The verdict is empty before the first one."""

    verdict: str
    facts: str
    """Facts about all ranks together: steps, tokens/s, MFU."""
    outcome: str
    """Measured gain of the last advice that was followed."""
    ranks: list[ProfiledRank]
    advice: list[AdviceView]
    notes: list[str]
    time: float | None
    """Unix time in seconds at which it ended."""
    unavailable_reason: str
    """Why no profile can be started now; empty if one can."""


class RankView(TypedDict):
    """One rank."""

    rank: int
    pid: int | None
    device: str
    node: str
    state: Literal["starting", "ready", "running", "waiting", "dead", "ended"]
    last_line: str
    num_chars: int
    """Number of printed characters. A page whose log is behind requests it again."""
    current_line: str


class CheckpointView(TypedDict):
    """One checkpoint."""

    name: str
    step: int | None
    size_bytes: int
    backend: str
    saved_at: float
    """Unix time in seconds."""
    seconds: float | None
    path: str
    state: Literal["done", "running", "failed"]
    error: str


class ProgressView(TypedDict):
    """Progress of a long operation."""

    text: str
    fraction_done: float | None
    started_at: float


class QueuedCommand(TypedDict):
    """A command that waits for the running cell."""

    id: str
    text: str


class EventMarkView(TypedDict):
    """An event mark on the curves."""

    step: int
    time: float
    kind: Literal["switch", "save", "load", "restart"]
    text: str


class NoticeView(TypedDict):
    """A message that is shown for a short time."""

    kind: Literal["error", "info"]
    text: str
    time: float


class PanelState(TypedDict):
    """State of the session at one moment."""

    header: HeaderView
    nodes: list[NodeView]
    devices: list[DeviceView]
    strategies: StrategiesView
    profile: ProfileView
    ranks: list[RankView]
    checkpoints: list[CheckpointView]
    progress: ProgressView | None
    queue: list[QueuedCommand]
    marks: list[EventMarkView]
    notice: NoticeView | None


class CurveSlice(TypedDict):
    """Name and length of one curve in the buffer."""

    name: str
    points: int


class DeviceSample(TypedDict):
    """Readings of one device in the last second."""

    memory_bytes: int | None
    utilization: float | None
    power_w: float | None


class DeviceSamples(TypedDict):
    """Readings of one device in the last minutes."""

    memory_bytes: list[int | None]
    utilization: list[float | None]
    power_w: list[float | None]


class SampleHistory(TypedDict):
    """Readings of all devices in the last minutes."""

    times: list[float]
    devices: list[DeviceSamples]


class ResetMessage(TypedDict):
    """The complete state."""

    kind: Literal["reset"]
    state: PanelState
    series: list[CurveSlice]
    samples: SampleHistory


class PanelStateUpdate(TypedDict):
    """Changed parts of the state."""

    kind: Literal["state"]
    changed: Annotated[dict[str, Any], "Partial<PanelState>"]


class CurvePointsMessage(TypedDict):
    """New points."""

    kind: Literal["points"]
    series: list[CurveSlice]


class DeviceSamplesMessage(TypedDict):
    """Current readings of the devices."""

    kind: Literal["samples"]
    time: float
    devices: list[DeviceSample]


class CommandAnswer(TypedDict):
    """Result of a command."""

    kind: Literal["answer"]
    id: str
    ok: bool
    text: str
    can_replace: bool
    """True if the target exists: the same command with `overwrite` replaces it."""


class LogMessage(TypedDict):
    """The last log lines of a rank that contain the searched text."""

    kind: Literal["log"]
    rank: int | None
    search: str
    lines: list[str]


class HeartbeatMessage(TypedDict):
    """Heartbeat of the kernel."""

    kind: Literal["heartbeat"]
    time: float


FrontendMessage = (
    ResetMessage
    | PanelStateUpdate
    | CurvePointsMessage
    | DeviceSamplesMessage
    | CommandAnswer
    | LogMessage
    | HeartbeatMessage
)


class PageOpenedMessage(TypedDict):
    """A page was opened and needs the complete state."""

    kind: Literal["hello"]


class LogRequestMessage(TypedDict):
    """Request for the log lines of a rank, or of the launcher, that contain a text."""

    kind: Literal["log"]
    rank: int | None
    search: str


class CommandMessage(TypedDict):
    """A command; its answer has the same id."""

    kind: Literal["command"]
    id: str
    name: CommandName
    arguments: dict[str, Any]


PageMessage = PageOpenedMessage | LogRequestMessage | CommandMessage


def has_built_assets() -> bool:
    """Return whether the front end is built."""
    return SCRIPT.is_file() and STYLE.is_file()
