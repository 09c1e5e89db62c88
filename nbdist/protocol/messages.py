"""Every message between the kernel, the launcher and the ranks; pure.

Kernel <-> launcher: one JSON object a line over a socket pair that only these two hold.
Its end means that the kernel is gone, and the launcher ends with everything it started.

    Launch        kernel -> launcher   start ranks
    Halt          kernel -> launcher   end the ranks, keep the launcher warm
    Warm          launcher -> kernel   imports are done
    RemoveAtEnd   kernel -> launcher   a folder to remove too when the kernel is gone
    Progress      launcher -> kernel   a long step (DeepSpeed's first build), as text
    Born          launcher -> kernel   a rank was forked
    RankEnded     launcher -> kernel   a rank's process ended, in the order of their ends
    Ended         launcher -> kernel   the ranks ended; exit code or signal of those that failed

Kernel <-> rank: signed Jupyter messages over ipc sockets in a 0700 directory. Cells are
plain `execute_request`s with `CellNote` in their metadata. Added to the Jupyter protocol:

    nbdist_join_request/_reply    shell    did the first barrier pass?
    nbdist_push_request/_reply    shell    variables out of a payload file
    nbdist_pull_request/_reply    shell    variables into a payload file
    nbdist_model_request/_reply   shell    what the planner must know of a model on a rank
    nbdist_switch_request/_reply  shell    another engine for the living models
    nbdist_leave_request/_reply   shell    everything into files, for ranks that take over
    nbdist_arrive_request/_reply  shell    everything out of the files of the ranks before
    nbdist_export_request/_reply  shell    the prepared model as a folder
    nbdist_gather_request/_reply  shell    the prepared model into a payload file, by all ranks
    nbdist_save_request/_reply    shell    begin to write a checkpoint
    nbdist_load_request/_reply    shell    a checkpoint into the prepared models
    nbdist_foreign_request/_reply  shell   what something else wrote, into the prepared model
    nbdist_bandwidth_request/_reply  shell  how fast links, devices and a disk are
    nbdist_measured_request/_reply  control  a rank's own peak of memory
    nbdist_model_request/_reply   control  the prepared model, while its cell runs
    nbdist_where_request/_reply   control  the line and the collective that a cell is at
    nbdist_hold_request/_reply    control  begin no optimizer step: Stop was pressed
    nbdist_release_request/_reply  control  free a rank that is stuck in a collective
    nbdist_renew_request/_reply   shell    a new process group in place of a broken one
    nbdist_stacks_request/_reply  control  what every thread of a rank is doing
    nbdist_profile_request/_reply  control  record some steps of a cell, running or about to come
    interrupt_request             control  Jupyter's own, with the request to interrupt
    nbdist_report                 iopub    rows of report(), from a rank
    nbdist_send                   iopub    one value of send(), in a payload file
    nbdist_chosen                 iopub    the options that auto chose, from rank 0
    nbdist_saved                  iopub    a checkpoint was begun, is there, or failed; from rank 0
    nbdist_phase                  iopub    what a long request is doing, from rank 0
    nbdist_profiled               iopub    what a rank has recorded, or why it has nothing
    nbdist_advice                 iopub    why memory ran out on a rank, and what would fit
"""

from __future__ import annotations

import json
import math
import signal
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

JOIN = "nbdist_join_request"
PUSH = "nbdist_push_request"
PULL = "nbdist_pull_request"
MODEL = "nbdist_model_request"
LEAVE = "nbdist_leave_request"
ARRIVE = "nbdist_arrive_request"
SWITCH = "nbdist_switch_request"
EXPORT = "nbdist_export_request"
GATHER = "nbdist_gather_request"
FOREIGN = "nbdist_foreign_request"
BANDWIDTH = "nbdist_bandwidth_request"
MEASURED = "nbdist_measured_request"
WHERE = "nbdist_where_request"
HOLD = "nbdist_hold_request"
RELEASE = "nbdist_release_request"
RENEW = "nbdist_renew_request"
STACKS = "nbdist_stacks_request"
PROFILE = "nbdist_profile_request"
SAVE = "nbdist_save_request"
LOAD = "nbdist_load_request"
REPORT = "nbdist_report"
SEND = "nbdist_send"
CHOSEN = "nbdist_chosen"
ADVICE = "nbdist_advice"
PHASE = "nbdist_phase"
SAVED = "nbdist_saved"
PROFILED = "nbdist_profiled"

STACKS_SIGNAL = signal.SIGRTMIN + 1
"""Asks a process for its stacks. SIGUSR1 and SIGUSR2 are left to the user's code: job schedulers
send them to ask for a checkpoint."""

OF_SESSION = frozenset({REPORT, CHOSEN, PHASE, SAVED, PROFILED})
"""Messages on iopub that are the session's, whatever cell they came under."""

NOTE = "nbdist"
"""Key of `CellNote` in an execute_request's metadata and of a result's inline value."""


class CellNote(TypedDict):
    """Metadata of an execute_request: what the rank should know of the notebook's cell."""

    count: int
    """The notebook's own In[count], so that tracebacks name the cell the user sees."""
    checkpoints: str
    """Where checkpoints go from now on, as in `Launch`."""


class Execute(TypedDict):
    """Content of an execute_request, as Jupyter defines it."""

    code: str
    silent: bool
    store_history: bool
    user_expressions: dict[str, str]
    allow_stdin: bool
    stop_on_error: bool


def execute(code: str) -> Execute:
    """A cell for a rank: no history, no keyboard, and a failure does not drop what follows."""
    return Execute(
        code=code,
        silent=False,
        store_history=False,
        user_expressions={},
        allow_stdin=False,
        stop_on_error=False,
    )


class Interrupt(TypedDict):
    """Content of an interrupt_request: which cell, running or still on its way."""

    request: str
    after: int
    """Number of the cell's optimizer step after which to stop; 0: at once."""


class Failed(TypedDict):
    """Answer to any request of ours that raised on a rank."""

    status: Literal["error"]
    error: str
    """One sentence."""
    ename: str
    """Type of the exception."""


class HoldReply(TypedDict):
    """A rank begins no optimizer step for a moment."""

    begun: int
    """Steps of this cell."""
    next_s: float
    """Seconds until its next one would begin."""


class PushRequest(TypedDict):
    """Bind the names of a payload file; the file stays for the other ranks."""

    path: str


class PullRequest(TypedDict):
    """Write the named variables into a payload file in the first folder with room."""

    names: list[str]
    folders: list[str]


class FileReply(TypedDict, total=False):
    """Answer to push and pull: a file, or why there is none."""

    status: Literal["ok", "error"]
    path: str
    """Of a pull: the payload file, the kernel's to delete."""
    prepared: list[str]
    """Of a pull, instead of a file: those names are prepared models, to be gathered."""
    error: str
    """One sentence."""


class ModelRequest(TypedDict):
    """Describe a model: a variable of the rank, or the one that was prepared last."""

    name: str | None
    batch_size: int | None
    """Of the micro-batch to describe it for; None: the one of its last forward, or 1."""
    seq_len: int | None
    kind: Literal["cuda", "cpu"]
    """Of the devices to plan for; a trace computes as they do."""
    quick: bool
    """By its closed form or not at all: no trace."""


class ModelReply(TypedDict, total=False):
    """A model as the planner sees it, or why it cannot be seen."""

    status: Literal["ok", "error"]
    spec: dict[str, Any]
    """`plan.spec.ModelSpec.to_json()`."""
    batch_size: int
    seq_len: int
    optimizer: dict[str, Any]
    """Class name ("class") and defaults that change its memory; empty without one."""
    error: str
    """One sentence."""


class BandwidthRequest(TypedDict):
    """Measure how fast links, devices and a disk are, all ranks together."""

    kinds: list[str]
    """Types of matrix products: fp32, bf16, fp16."""
    disk: str | None
    """A folder to write in and read from; None: no disk."""


class BandwidthReply(TypedDict, total=False):
    """What a rank has measured."""

    status: Literal["ok", "error"]
    figures: dict[str, Any]
    """As `worker.benchmarks.communication.measure` gives them."""
    error: str
    """One sentence, the same on all ranks."""


class MeasuredReply(TypedDict):
    """What a rank's training held in its third step; None before that."""

    figures: dict[str, Any] | None
    """Fields of `planner.validation.Measured`."""


class WhereReply(TypedDict):
    """Where a rank's main thread is; empty where no code of a cell runs."""

    cell: str
    """"In[3]"."""
    line: int
    source: str
    """Of that line."""
    called: str
    """The function that this line has called and that has not returned: "backward", "forward"."""
    collective: str
    """Of torch.distributed, which has not returned: "all_reduce"."""
    standing: Standing


class Standing(TypedDict):
    """Whether a rank's main thread gets on."""

    waits_for: str
    """The collective that other ranks have not called: "all_reduce (SUM) of float32[4]"."""
    missing: list[int]
    """Those ranks."""
    still_s: float
    """Since when it is at this place, as far as it was asked."""
    sleeps: bool
    """Whether the system says that it sleeps. Describes it, and decides nothing: a rank that waits
    for NCCL spins."""
    failed: str
    """In work of phases: the error with which it waits for the others to agree; "" without one."""
    counts: dict[str, int]
    """Collectives that have begun, by process group of this rank."""
    midway: Literal["", "forward", "backward"]
    """Which pass through a model was cut short."""


class ReleaseRequest(TypedDict):
    """Close what connects a rank with others; its process groups are broken then."""

    pids: list[int]
    """Processes of all ranks."""
    id: str
    """Of this release: ranks on several nodes tell one another under it what connects them."""


class ReleaseReply(TypedDict):
    """How many connections were closed."""

    closed: int


class RenewRequest(TypedDict):
    """Make the prepared models anew, and before them the process groups."""

    era: int
    """Number of this renewal."""
    groups: bool
    """Whether the groups too: they are broken, or the ranks out of step."""


class RenewReply(TypedDict, total=False):
    """What came of it on a rank."""

    status: Literal["ok", "error"]
    report: dict[str, Any]
    """Fields of `worker.operations.recover.Report`."""
    error: str
    """One sentence."""


class StacksReply(TypedDict):
    """The Python stacks of all threads of a rank, as text."""

    text: str


class ProfileRequest(TypedDict):
    """Record some optimizer steps of a cell; each rank answers by one `Profiled` later."""

    id: str
    """Of this profile; the same for all ranks."""
    ranks: list[int]
    """All that were asked."""
    cell: str
    """Request of the cell, as in `Interrupt`; of one that is to come not known yet."""
    running: bool
    """It was sent before; else it is the next one to come."""
    steps: int | None
    """None: until the figures are stable."""
    limit_s: float
    """Longest time of the window."""
    trace: str
    """Folder for traces; empty: none."""
    memory: bool
    """Whether to count the tensors of one step more."""


class ProfileReply(TypedDict, total=False):
    """The rank waits for steps, or why it does not."""

    status: Literal["ok", "refused"]
    error: str
    """One sentence."""


class Profiled(TypedDict, total=False):
    """What came of a profile on a rank; exactly one for each request that was accepted."""

    id: str
    figures: dict[str, Any]
    """`profile.figures.RankFigures.to_json()`."""
    error: str
    """One sentence, instead of figures."""


class SwitchRequest(TypedDict):
    """Give the living models another engine."""

    options: dict[str, Any]
    """`strategies.Options.to_json()`, checked."""
    reset_optimizer: bool


class SwitchReply(TypedDict, total=False):
    """What a switch did on a rank, or why all is as it was."""

    status: Literal["ok", "error"]
    report: dict[str, Any]
    """Fields of `worker.operations.switch.Report`."""
    error: str
    """One sentence, the same on all ranks."""


class ExportRequest(TypedDict):
    """Write the prepared model as a folder that others read."""

    folder: str
    """Absolute."""
    dtype: str | None
    """Of floating-point tensors, as torch names it; None: as trained."""
    max_shard_size: str
    """Of a file: "5GB"."""
    overwrite: bool
    model: str | None
    """The variable that holds it; None: the only one."""


class ExportReply(TypedDict, total=False):
    """What an export did on a rank, or why there is none."""

    status: Literal["ok", "error"]
    report: dict[str, Any]
    """Fields of `worker.operations.export.Report`."""
    error: str
    """One sentence, the same on all ranks."""


class GatherRequest(TypedDict):
    """Write the state dict of a prepared model into one payload file, all ranks together.

    Answered by a `FileReply`.
    """

    name: str
    folders: list[str]


class SaveRequest(TypedDict):
    """Begin to write a checkpoint."""

    root: str
    """Absolute."""
    name: str
    overwrite: bool
    keep: int | None


class SaveReply(TypedDict, total=False):
    """The state is copied and is being written, or nothing was."""

    status: Literal["ok", "error"]
    id: str
    """As in `Saved`."""
    error: str
    """One sentence, the same on all ranks."""


class Saved(TypedDict, total=False):
    """How far a save is: begun, whole and named, or given up without a trace."""

    id: str
    state: Literal["running", "done", "failed"]
    root: str
    name: str
    seconds: float
    """Since it was asked for."""
    pause_s: float
    """Of these, training stood still."""
    path: str
    step: int
    size_bytes: int
    """While it runs about what will be written."""
    backend: str
    removed: list[str]
    """Older checkpoints that `keep` did not count."""
    notes: list[str]
    """What is not in it."""
    error: str
    """One sentence, with the rank."""


class LoadRequest(TypedDict):
    """Bring a checkpoint into the prepared models."""

    path: str
    id: str
    """Of its manifest, so that it is not another one by now."""
    weights_only: bool


class LoadReply(TypedDict, total=False):
    """What was loaded on a rank, or why all is as it was."""

    status: Literal["ok", "error"]
    report: dict[str, Any]
    """Fields of `worker.operations.load.Report`."""
    error: str
    """One sentence, the same on all ranks."""


class LeaveRequest(TypedDict):
    """Write everything that new ranks need; nothing is changed."""

    options: dict[str, Any]
    """`strategies.Options.to_json()` of the new ranks, checked."""
    world_size: int
    """Number of the new ranks."""
    reset_optimizer: bool
    folders: list[str]
    """Private and empty; the first with room is taken."""


class ArriveRequest(TypedDict):
    """Make everything again that the ranks before have written."""

    folder: str
    world_size: int
    """Number of the ranks before."""


class HandoverReply(TypedDict, total=False):
    """What came of it on a rank."""

    status: Literal["ok", "error"]
    report: dict[str, Any]
    """Fields of `worker.operations.resize.Report`."""
    error: str
    """One sentence, the same on all ranks."""


class ForeignRequest(TypedDict):
    """Load a checkpoint that something else wrote into the prepared model."""

    path: str
    """Absolute, of a folder or a file."""
    trust: bool
    """Whether code in it may run."""
    model: str | None
    """The variable that holds the model; None: the only one."""


class ForeignReply(TypedDict, total=False):
    """What was loaded on a rank, or why all is as it was."""

    status: Literal["ok", "error"]
    report: dict[str, Any]
    """Fields of `worker.operations.import_checkpoint.Report`."""
    error: str
    """One sentence, the same on all ranks."""


class Phase(TypedDict):
    """What goes on, for the user."""

    text: str


class JoinReply(TypedDict):
    """A rank is up: it has passed a barrier with all others."""

    pid: int
    created: float
    """Start time of the process (psutil), so that a reused pid is never taken for it."""
    device: str


class Report(TypedDict):
    """Rows of report(): "step", "time" (unix seconds) and scalars by name.

    JSON has no NaN or infinity: `finite_or_text` wrote them, float() reads them.
    """

    rows: list[dict[str, float | str]]


class Send(TypedDict):
    """One value of send(): the payload file is the kernel's to delete."""

    name: str
    path: str


class Chosen(TypedDict):
    """The decision of auto."""

    options: dict[str, Any]
    """`strategies.Options.to_json()`."""


class Advice(TypedDict):
    """Text to stand below the traceback of a failure for lack of memory."""

    lines: list[str]
    held_bytes: int
    """What the rank held; of several ranks the fullest one's advice is shown."""


def finite_or_text(number: float) -> float | str:
    """The number itself, or "nan", "inf", "-inf"."""
    return number if math.isfinite(number) else str(number)


@dataclass(frozen=True, slots=True)
class RankError:
    """An exception that ended a cell on one rank."""

    rank: int
    ename: str
    evalue: str
    traceback: list[str]
    """Lines as IPython renders them, with ANSI colours."""
    at: float
    """Unix seconds on the rank's clock; orders the errors of several ranks."""

    @property
    def is_stop(self) -> bool:
        """Whether it is no more than Stop."""
        return self.ename == "KeyboardInterrupt"


@dataclass(frozen=True, slots=True)
class Launch:
    """Start ranks."""

    generation: int
    """Number of this start; `Ended` repeats it, so that an old end is never taken for a new one."""
    world_size: int
    devices: list[str] | None
    """UUIDs of the GPUs; None for CPU ranks."""
    options: dict[str, Any]
    """`strategies.Options.to_json()`."""
    auto: dict[str, Any] | None
    """Of the options those that auto takes as given; None: all of them are."""
    hardware: dict[str, Any]
    """`strategies.Hardware.to_json()`."""
    run_dir: str
    """Private folder (0700) of this start: sockets, connection files."""
    bulk_dir: str
    """Private folder (0700) of payload files."""
    env: dict[str, str] = field(default_factory=dict)
    """The kernel's environment at this moment, scrubbed."""
    cwd: str = ""
    path: list[str] = field(default_factory=list)
    """The kernel's sys.path, so that the user's own modules import on the ranks."""
    first: int = 0
    """Number of this launcher's first rank."""
    here: int = 0
    """How many ranks it starts; 0: all."""
    node: int = 0
    nodes: int = 1
    """Which of how many nodes it is on."""
    machines: list[dict[str, Any]] = field(default_factory=list)
    """What the nodes have, for the planner, by `machine.to_runs`; empty: all are this machine."""
    interface: str = "lo"
    """Network interface that connects the ranks."""
    checkpoints: str = ""
    """Folder or URL of all checkpoints; "": "checkpoints" in `cwd`."""
    store: str = ""
    """Where the ranks find one another: ZMQ address of the agent; "": a file in `run_dir`."""

    @property
    def ranks_here(self) -> int:
        """Number of ranks of this launcher."""
        return self.here or self.world_size


@dataclass(frozen=True, slots=True)
class Halt:
    """End the ranks, keep the launcher."""


@dataclass(frozen=True, slots=True)
class RemoveAtEnd:
    """Remove this folder too when the kernel is gone; it may be gone before."""

    folder: str
    remove: bool = True
    """False: not any more."""


@dataclass(frozen=True, slots=True)
class Warm:
    """The launcher's imports are done."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Progress:
    """A long step, for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Born:
    """A rank's process is there."""

    generation: int
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The process of one rank ended; the first of several is the cause."""

    generation: int
    rank: int
    code: int | None
    """Exit code; negative = ended by that signal; None: somebody else has collected it."""
    words: str = ""
    """What it wrote from C to stdout and stderr last, and nobody had read."""
    node: str = ""
    """Where, by name; "" on one machine."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The ranks ended, wanted or not."""

    generation: int
    exitcodes: dict[str, int] = field(default_factory=dict)
    """By rank, of those that failed first; negative = ended by that signal (as in subprocess)."""
    error: str = ""
    """The launcher's own error, where it could not start them."""
    node: str = ""
    """Where the cause lies, by name; "" on one machine."""


LinkMessage = Launch | Halt | RemoveAtEnd | Warm | Progress | Born | RankEnded | Ended
_MESSAGES = (Launch, Halt, RemoveAtEnd, Warm, Progress, Born, RankEnded, Ended)
_TYPES = {cls.__name__: cls for cls in _MESSAGES}


def death_note(run_dir: str | Path, rank: int) -> Path:
    """Where a rank that cannot start leaves its traceback."""
    return Path(run_dir) / f"rank{rank}.died"


def crash_file(folder: str | Path, name: str) -> Path:
    """Where a process writes its Python stack when a signal such as SIGSEGV ends it.

    Args:
        folder: of this start of the ranks; of the launcher, its own.
        name: "rank1", "launcher".
    """
    return Path(folder) / f"{name}.crash"


def stacks_file(folder: str | Path, name: str) -> Path:
    """Where a process writes its Python stacks when `STACKS_SIGNAL` asks for them."""
    return Path(folder) / f"{name}.stacks"


def to_line(message: LinkMessage) -> bytes:
    """One message of the link as a line of JSON."""
    return json.dumps([type(message).__name__, asdict(message)]).encode() + b"\n"


def from_line(line: bytes) -> LinkMessage:
    """Parse a line of the link.

    Raises:
        ValueError: it is none.
    """
    try:
        name, fields = json.loads(line)
        message: LinkMessage = _TYPES[name](**fields)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        msg = f"{line[:100]!r} is no message of the link ({type(error).__name__})"
        raise ValueError(msg) from error
    return message
