"""Every message between the panel and its front end; pure. `widgets/src/protocol.ts` mirrors it.

Kernel -> front end, custom messages of the widget's model:

    reset     everything; answers hello. Buffer: the points of all series one after the other
    picture   top-level keys of the picture that changed, whole
    rows      new points. Buffer: for each series in turn `points` triples
    samples   once a second: what the devices do now
    answer    to a command, by its id
    log       the last lines of a rank
    beat      when nothing else was sent for BEAT_S

Front end -> kernel:

    hello     a page was opened
    command   interrupt, restart, cancel, switch, save, load, export, plan
    log       lines of a rank are wanted

A point is a triple of float64, little endian: step, unix seconds, value. A point of a step that
was sent before replaces it (a rank was late). Steps come almost in order. Numbers may be NaN or
infinite in buffers only; in JSON they are null. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

MAX_POINTS = 2000
"""Of one series in a reset."""
MAX_SAMPLES = 300
BEAT_S = 2.0
MAX_MESSAGE_CHARS = 65_536
"""Of a message of the front end; a larger one is refused."""
MAX_ID_CHARS = 64
MAX_LOG_LINES = 500

State = Literal[
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

PARTS = (
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
"""Parts of a device's memory, in the order of a bar. other: the allocator's margin."""


class Part(TypedDict):
    """One part of a bar."""

    part: str
    bytes: int


class Header(TypedDict):
    """The line on top."""

    backend: str
    world_size: int
    precision: str
    offload: str
    options: str
    """The rest of the strategy, in words."""
    place: str
    state: State
    words: str
    """The state in words: "running cell 4"."""
    since: float | None
    """Unix seconds."""
    started: float | None
    kernel_id: str | None
    """As Jupyter's REST API names this kernel; None where it is not known."""
    version: str


class NodeView(TypedDict):
    """One machine of a cluster; there are none where all ranks are on the notebook's."""

    name: str
    words: str
    """Its devices: "4 x NVIDIA A100 80GB, NVLink", "2 CPU ranks, 16 cores"."""
    host_bytes: int
    """Memory of the machine or container, of which is used by anybody:"""
    host_used_bytes: int | None


class DeviceView(TypedDict):
    """One GPU, or one CPU rank. What nobody tells is None."""

    name: str
    node: str
    """As in `NodeView.name`; empty on the notebook's machine, as for `RankView`."""
    kind: Literal["cuda", "cpu"]
    ranks: list[int]
    capacity_bytes: int | None
    predicted: list[Part]
    predicted_bytes: int | None
    stated_error: float | None
    used_bytes: int | None
    """By this session's ranks."""
    peak_bytes: int | None
    """The most of `used_bytes` that was seen since the session began."""
    others_bytes: int
    holders: list[str]
    """Other processes there."""
    utilization: float | None
    """Share of the time, from 0 to 1; of a CPU rank, share of the machine's cores."""
    power_w: float | None
    power_limit_w: float | None
    temperature_c: float | None
    pcie_tx: float | None
    """Bytes a second, as the three that follow."""
    pcie_rx: float | None
    nvlink_tx: float | None
    nvlink_rx: float | None
    note: str


class StrategyRow(TypedDict):
    """One strategy of the plan."""

    id: str
    backend: str
    words: str
    device_bytes: int
    capacity_bytes: int
    parts: list[Part]
    fits: bool
    current: bool
    recommended: bool
    tokens_per_s: float | None
    why: str
    command: str
    """The line to paste."""
    does: str
    """What the switch will do; empty for the current one."""
    arguments: dict[str, Any]
    """Of the switch command; empty where a button cannot do it."""


class Strategies(TypedDict):
    """The plan."""

    rows: list[StrategyRow]
    note: str


class Span(TypedDict):
    """One part of a step's time."""

    part: str
    """One of nbdist.profiler.measurements.PARTS."""
    seconds: float


class ProfiledRank(TypedDict):
    """Where a rank's step went."""

    rank: int
    step_s: float
    """Mean over the window."""
    parts: list[Span]
    """In the order of the bar; together the step."""
    straggler: bool
    """The others wait for it."""
    figures: str
    """What else was measured on it, in words."""


class AdviceView(TypedDict):
    """What would make it faster."""

    title: str
    text: str
    """The predicted gain, and why."""
    command: str
    """The line to paste."""
    does: str
    """What the switch will do; empty where a button cannot do it."""
    arguments: dict[str, Any]
    """Of the switch command; empty where a button cannot do it."""


class ProfileView(TypedDict):
    """The latest profile; its verdict is empty before the first."""

    verdict: str
    facts: str
    """Of all ranks together: steps, tokens/s, MFU."""
    gained: str
    """What the advice that was followed last has brought."""
    ranks: list[ProfiledRank]
    advice: list[AdviceView]
    notes: list[str]
    time: float | None
    """Unix seconds of its end."""
    refused: str
    """Why no profile can be asked for now; empty where one can."""


class RankView(TypedDict):
    """One rank."""

    rank: int
    pid: int | None
    device: str
    node: str
    state: Literal["starting", "ready", "running", "waiting", "dead", "ended"]
    line: str
    written: int
    """Characters that it has printed: a log on the page that is behind is asked for again."""
    where: str


class CheckpointView(TypedDict):
    """One checkpoint."""

    name: str
    step: int | None
    size_bytes: int
    backend: str
    saved: float
    """Unix seconds."""
    seconds: float | None
    path: str
    state: Literal["done", "running", "failed"]
    problem: str


class ProgressView(TypedDict):
    """Long work."""

    text: str
    share: float | None
    since: float


class Queued(TypedDict):
    """A command that waits for the running cell."""

    id: str
    text: str


class MarkView(TypedDict):
    """A mark on the curves."""

    step: int
    time: float
    kind: Literal["switch", "save", "load", "restart"]
    text: str


class Notice(TypedDict):
    """Something to be told once."""

    kind: Literal["error", "info"]
    text: str
    time: float


class Picture(TypedDict):
    """The session at one moment."""

    header: Header
    nodes: list[NodeView]
    devices: list[DeviceView]
    strategies: Strategies
    profile: ProfileView
    ranks: list[RankView]
    checkpoints: list[CheckpointView]
    progress: ProgressView | None
    queue: list[Queued]
    marks: list[MarkView]
    notice: Notice | None


class SeriesPart(TypedDict):
    """Says whose points lie in the buffer."""

    name: str
    points: int


class DeviceSample(TypedDict):
    """What one device did in the last second."""

    memory_bytes: int | None
    utilization: float | None
    power_w: float | None


class DeviceSamples(TypedDict):
    """What one device did in the last minutes."""

    memory_bytes: list[int | None]
    utilization: list[float | None]
    power_w: list[float | None]


class SampleHistory(TypedDict):
    """The last minutes of all devices."""

    times: list[float]
    devices: list[DeviceSamples]


class Reset(TypedDict):
    """Everything."""

    kind: Literal["reset"]
    picture: Picture
    series: list[SeriesPart]
    samples: SampleHistory


class Changed(TypedDict):
    """What changed of the picture."""

    kind: Literal["picture"]
    changed: dict[str, Any]


class Rows(TypedDict):
    """New points."""

    kind: Literal["rows"]
    series: list[SeriesPart]


class Samples(TypedDict):
    """The devices now."""

    kind: Literal["samples"]
    time: float
    devices: list[DeviceSample]


class Answer(TypedDict):
    """What came of a command."""

    kind: Literal["answer"]
    id: str
    ok: bool
    text: str
    replaces: bool
    """Refused because something is there already: the same with `overwrite` replaces it."""


class Log(TypedDict):
    """The last lines of a rank, those with the searched text."""

    kind: Literal["log"]
    rank: int | None
    search: str
    lines: list[str]


class Beat(TypedDict):
    """The kernel lives."""

    kind: Literal["beat"]
    time: float


ToFront = Reset | Changed | Rows | Samples | Answer | Log | Beat
