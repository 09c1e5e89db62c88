"""All messages between the kernel, the launcher and the ranks.

Kernel <-> launcher: one JSON object per line over a socket pair that only these two hold. End of
file means that the kernel has ended; the launcher then ends with everything it started. The
messages are the dataclasses at the end of this module.

Kernel <-> rank: signed Jupyter messages over ipc sockets in a 0700 directory. Cells are plain
`execute_request`s with ``CellMetadata``. The constants below are additions to the Jupyter protocol,
with the channel of each; a request is answered on its channel with "_reply" in its name. The
operations of ``protocol.operations`` are further requests on shell. Of Jupyter's own messages,
`debug_request`, `interrupt_request` (with the id of the execute_request), and for widgets
`comm_msg` and `comm_close` are sent on control.
"""

from __future__ import annotations

import json
import math
import signal
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

PROTOCOL = 1
"""Version of the messages between kernel, launcher and ranks; another one cannot be used."""
# -- requests
JOIN = "nbdist_join_request"  # shell: wait for the first barrier
PUSH = "nbdist_push_request"  # shell: bind variables from a payload file
PULL = "nbdist_pull_request"  # shell: write variables into a payload file
MODEL = "nbdist_model_request"  # shell, and control while a cell runs: describe a model
MEASURED_MEMORY = "nbdist_measured_request"  # control: measured peak memory
RANK_ACTIVITY = "nbdist_where_request"  # control: current source line and collective
PAUSE = "nbdist_hold_request"  # control: pause before the next optimizer step, on an interrupt
ABORT_COLLECTIVES = "nbdist_release_request"  # control: abort a collective that blocks the rank
STACKS = "nbdist_stacks_request"  # control: Python stacks of all threads
PROFILE = "nbdist_profile_request"  # control: record steps of the running or the next cell
ANSWER_INPUT = "nbdist_answer_request"  # control: the user's answer to a prompt
INSPECT = "nbdist_inspect_request"  # control: queue an expression for the main thread
# -- on iopub
INSPECTED = "nbdist_inspected"  # value of an expression
METRICS_REPORT = "nbdist_report"  # metrics of report()
SENT_VALUE = "nbdist_send"  # one value of send(), in a payload file
AUTO_DECISION = "nbdist_chosen"  # options chosen by auto, from rank 0
OOM_ADVICE = "nbdist_advice"  # cause of an out-of-memory error, and what would fit
INPUT = "nbdist_input"  # a prompt of input() or of the debugger
PROGRESS = "nbdist_phase"  # progress of a long request, from rank 0
SAVE_STATUS = "nbdist_saved"  # a save has started, succeeded or failed; from rank 0
PROFILE_RESULT = "nbdist_profiled"  # profile of the rank, or an error
DEBUG_EVENT = "debug_event"  # Jupyter's own
TERMINATION = "nbdist_termination"  # the rank received SIGTERM; empty

STACKS_SIGNAL = signal.SIGRTMIN + 1
"""Makes a process dump its stacks. Not SIGUSR1 or SIGUSR2: job schedulers send them to user code
to request a checkpoint."""

TERMINATION_GRACE_S = 30.0
"""Time from SIGTERM to SIGKILL, by default of Slurm (KillWait) and Kubernetes."""

SESSION_MESSAGES = frozenset(
    {METRICS_REPORT, AUTO_DECISION, PROGRESS, SAVE_STATUS, PROFILE_RESULT, TERMINATION, DEBUG_EVENT}
)
"""Messages on iopub that are for the session, independent of their parent cell."""

CELL_METADATA_KEY = "nbdist"
"""Key of the cell metadata in an execute_request, and of a result's inline value."""


class CellMetadata(TypedDict):
    """Metadata of an execute_request about the notebook's cell."""

    count: int
    """The notebook's In[count], for tracebacks."""
    checkpoints: str
    """Location for new checkpoints, as in ``LaunchRanksRequest``."""
    ranks: list[int]
    debugs_error: bool
    """True if it debugs the error of the cell before it, whose frames are kept."""


class ExecuteRequest(TypedDict):
    """Content of an execute_request, as defined by Jupyter."""

    code: str
    silent: bool
    store_history: bool
    user_expressions: dict[str, str]
    allow_stdin: bool
    stop_on_error: bool


def make_execute_request(code: str, *, allow_stdin: bool = False) -> ExecuteRequest:
    """Return a cell for a rank: no history, and an error does not drop later cells.

    Args:
        code: source of the cell.
        allow_stdin: whether a user can answer prompts of the cell.
    """
    return ExecuteRequest(
        code=code,
        silent=False,
        store_history=False,
        user_expressions={},
        allow_stdin=allow_stdin,
        stop_on_error=False,
    )


class InterruptRequest(TypedDict):
    """Content of an interrupt_request: the cell to interrupt, which may not have arrived yet."""

    request: str
    after: int
    """Number of the optimizer step after which to interrupt; 0: immediately."""


DebuggerKind = Literal["", "breakpoint", "post-mortem"]
"""How the debugger was entered; "" outside of it."""


class InputRequest(TypedDict):
    """A prompt that a rank waits at."""

    id: int
    """Number of the prompt on this rank, repeated in the answer."""
    prompt: str
    password: bool
    """True if the answer must not be shown."""
    debugger: DebuggerKind
    """The debugger that reads a command; "" for `input()`."""
    stop: int
    """Number of times that the debugger has stopped on this rank."""


END_OF_INPUT = "\x04"
"""Text of an answer that ends the input (Ctrl-D), as in Jupyter's protocol."""


class InputAnswer(TypedDict):
    """Answer to an ``InputRequest``."""

    id: int
    text: str
    error: str
    """One sentence if the prompt could not be shown, else ""."""


class InspectRequest(TypedDict):
    """Evaluate an expression on the main thread of a rank."""

    expression: str
    within_s: float
    """The expression is dropped after this time."""


class InspectedValue(TypedDict):
    """The value of an expression, or its error."""

    text: str


class ErrorReply(TypedDict):
    """Reply to any nbdist request that raised on a rank."""

    status: Literal["error"]
    error: str
    """One sentence."""
    ename: str
    """Type of the exception."""


class PauseReply(TypedDict):
    """Reply to a pause request: the rank starts no optimizer step for a moment."""

    begun: int
    """Steps started by this cell."""
    next_s: float
    """Seconds until its next step would start."""
    is_training: bool
    """It has begun the forward or backward of its next step."""


class PushRequest(TypedDict):
    """Bind the values of a payload file to names. The file is kept for the other ranks."""

    path: str


class PullRequest(TypedDict):
    """Write the named variables into a payload file in the first folder with enough space."""

    names: list[str]
    folders: list[str]


class PayloadFileReply(TypedDict, total=False):
    """Reply to push and pull: the file, or an error."""

    status: Literal["ok", "error"]
    path: str
    """Pull: the payload file; the kernel deletes it."""
    prepared: list[str]
    """Pull, instead of a file: the names that are prepared models and must be gathered."""
    error: str
    """One sentence."""


class ModelRequest(TypedDict):
    """Describe a model: a variable of the rank, or the model that was prepared last."""

    name: str | None
    batch_size: int | None
    """Micro-batch size to describe the model for; None: that of its last forward, or 1."""
    seq_len: int | None
    kind: Literal["cuda", "cpu"]
    """Device type to plan for; a trace uses its kernels."""
    quick: bool
    """Use the analytic model only, no trace."""


class ModelReply(TypedDict, total=False):
    """Description of a model for the planner, or an error."""

    status: Literal["ok", "error"]
    spec: dict[str, Any]
    """``planner.model_spec.ModelSpec.to_json()``."""
    batch_size: int
    seq_len: int
    optimizer: dict[str, Any]
    """Class name ("class"), state, and defaults that affect memory; empty without an optimizer."""
    keep_outputs: bool
    """Whether the loop holds the model's output from one step to the next."""
    error: str
    """One sentence."""


class MeasuredMemoryReply(TypedDict):
    """Memory in use in a rank's third training step; None before it."""

    figures: dict[str, Any] | None
    """Fields of ``planner.measured_comparison.MeasuredMemory``."""


class RankActivityReply(TypedDict):
    """Current position of a rank's main thread; empty if no cell code is running."""

    cell: str
    """"In[3]"."""
    line: int
    source: str
    """Text of the line."""
    script: str
    """Line of the user's script or module that runs inside of it: "train.py line 41"."""
    called: str
    """The function called by this line that has not returned: "backward", "forward"."""
    collective: str
    """The torch.distributed call that has not returned: "all_reduce"."""
    standing: MainThreadStatus


class MainThreadStatus(TypedDict):
    """Progress of a rank's main thread."""

    waits_for: str
    """The collective that it is blocked in: "all_reduce (SUM) of float32[4]"."""
    missing: list[int]
    """Ranks that have not called this collective."""
    still_s: float
    """Seconds without progress, as far as polled."""
    sleeps: bool
    """True if the operating system reports the thread as sleeping. For display only: a rank that
    waits for NCCL spins."""
    failed: str
    """Error of a phased request that waits for agreement with the other ranks; "" without one."""
    counts: dict[str, int]
    """Number of collectives started, by process group of this rank."""
    midway: Literal["", "forward", "backward"]
    """The pass through a model that was interrupted."""


class AbortCollectivesRequest(TypedDict):
    """Close the connections of a rank to other ranks. This breaks its process groups."""

    pids: list[int]
    """Processes of all ranks."""
    id: str
    """Id of this request, under which ranks on several nodes exchange their connections."""


class StacksReply(TypedDict):
    """Python stacks of all threads of a rank, as text."""

    text: str


class ProfileRequest(TypedDict):
    """Record optimizer steps of a cell. Each rank replies later with a ``ProfileResult``."""

    id: str
    """Id of this profile, equal on all ranks."""
    ranks: list[int]
    """All ranks that are profiled."""
    cell: str
    """Message id of the cell's request, as in ``InterruptRequest``; unknown for the next cell."""
    running: bool
    """True to profile a cell that was sent already, False for the next one."""
    steps: int | None
    """Number of steps; None: until the measurements are stable."""
    limit_s: float
    """Maximum duration of the window."""
    trace: str
    """Folder for traces; "": none."""
    memory: bool
    """True to record the tensors of one further step."""


class ProfileStartReply(TypedDict, total=False):
    """Accepted: the rank waits for steps. Refused: the reason."""

    status: Literal["ok", "refused"]
    error: str
    """One sentence."""


class ProfileResult(TypedDict, total=False):
    """Profile of a rank; sent exactly once per accepted request."""

    id: str
    figures: dict[str, Any]
    """``profiler.measurements.RankProfile.to_json()``."""
    error: str
    """One sentence; replaces the figures."""


class SaveStatus(TypedDict, total=False):
    """Status of a save. A failed save leaves no files behind."""

    id: str
    state: Literal["running", "done", "failed"]
    root: str
    name: str
    seconds: float
    """Seconds since the request."""
    pause_s: float
    """Part of `seconds` in which training was paused."""
    path: str
    step: int
    size_bytes: int
    """While running, an estimate of the final size."""
    backend: str
    ended: str
    """What ended the run from outside; "" if nothing did."""
    removed: list[str]
    """Older checkpoints removed because of `keep`."""
    notes: list[str]
    """Parts of the state that the checkpoint does not contain."""
    error: str
    """One sentence that names the rank."""


class RankProgress(TypedDict):
    """Progress of a request, for the user."""

    text: str


class JoinReply(TypedDict):
    """A rank has started and passed a barrier with all others."""

    pid: int
    start_ticks: int
    """Start time of the process in clock ticks since boot, to detect a reused process id."""
    device: str


class MetricsReport(TypedDict):
    """Rows of report(): "step", "time" (unix seconds) and scalars by name.

    JSON has no NaN or infinity: `to_json_number` encodes them, float() decodes them.
    """

    rows: list[dict[str, float | str]]


class SentValue(TypedDict):
    """One value of send(). The kernel deletes the payload file."""

    name: str
    path: str


class AutoDecision(TypedDict):
    """Options chosen by auto."""

    options: dict[str, Any]
    """`strategies.Options.to_json()`."""


class OomAdvice(TypedDict):
    """Text shown below the traceback of an out-of-memory error."""

    lines: list[str]
    held_bytes: int
    """Memory in use on the rank. Of several ranks, the advice of the fullest is shown."""


def to_json_number(number: float) -> float | str:
    """Return a finite number as it is, else "nan", "inf" or "-inf"."""
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
    """Unix time on the rank's clock; orders the errors of several ranks."""

    @classmethod
    def from_message(cls, rank: int, message: dict[str, Any]) -> RankError:
        """Create from the error of a cell, or from an ``ErrorReply``."""
        content, at = message["content"], message["header"]["date"].timestamp()
        ename, text = content["ename"], content["evalue" if "evalue" in content else "error"]
        return cls(rank, ename, text, content.get("traceback") or [f"{ename}: {text}"], at)

    @property
    def is_interrupt(self) -> bool:
        """True if the error is only the interrupt itself."""
        return self.ename == "KeyboardInterrupt"


# -- kernel -> launcher


@dataclass(frozen=True, slots=True)
class LaunchRanksRequest:
    """Start ranks."""

    generation: int
    """Number of this start, repeated in ``AllRanksExited`` to match it with its start."""
    world_size: int
    devices: list[str] | None
    """UUIDs of the GPUs; None for CPU ranks."""
    options: dict[str, Any]
    """`strategies.Options.to_json()`."""
    auto: dict[str, Any] | None
    """Options that auto takes as fixed; None: all of them."""
    hardware: dict[str, Any]
    """`strategies.Hardware.to_json()`."""
    run_dir: str
    """Private folder (0700) of this start for sockets and connection files."""
    bulk_dir: str
    """Private folder (0700) for payload files."""
    env: dict[str, str] = field(default_factory=dict)
    """The kernel's current environment without launch variables."""
    cwd: str = ""
    path: list[str] = field(default_factory=list)
    """The kernel's sys.path, so that ranks can import the user's modules."""
    first: int = 0
    """This launcher's first rank."""
    here: int = 0
    """Number of ranks that this launcher starts; 0: all."""
    node: int = 0
    nodes: int = 1
    """Number of nodes; `node` is the index of this one."""
    machines: list[dict[str, Any]] = field(default_factory=list)
    """Hardware of the nodes by ``nodes_to_json``, for the planner; empty: all are this machine."""
    interface: str = "lo"
    """Network interface between the ranks."""
    checkpoints: str = ""
    """Folder or URL for checkpoints; "": "checkpoints" in `cwd`."""
    store: str = ""
    """Rendezvous of the ranks: ZMQ address of the agent; "": a file in `run_dir`."""

    @property
    def local_world_size(self) -> int:
        """Number of ranks that this launcher starts."""
        return self.here or self.world_size


@dataclass(frozen=True, slots=True)
class StopRanksRequest:
    """End the ranks, keep the launcher."""


@dataclass(frozen=True, slots=True)
class CleanupFolderRequest:
    """Register a further folder to remove when the kernel has ended. It may no longer exist."""

    folder: str
    remove: bool = True
    """False to unregister it."""


# -- launcher -> kernel


@dataclass(frozen=True, slots=True)
class LauncherHello:
    """First message of a launcher, before its imports. Its fields do not change."""

    protocol: int
    """``PROTOCOL`` of its nbdist."""
    version: str


@dataclass(frozen=True, slots=True)
class LauncherReady:
    """The launcher has finished its imports."""


@dataclass(frozen=True, slots=True)
class LauncherProgress:
    """Status text of a long step, for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class RankForked:
    """A rank's process was forked."""

    generation: int
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class RankExited:
    """A rank's process ended. The first of several is the cause."""

    generation: int
    rank: int
    code: int | None
    """Exit code; negative: ended by that signal; None: reaped by another process."""
    words: str = ""
    """Its last unread output from C to stdout and stderr."""
    node: str = ""
    """Name of the node; "" on one machine."""


@dataclass(frozen=True, slots=True)
class AllRanksExited:
    """All ranks ended, as requested or not."""

    generation: int
    exitcodes: dict[str, int] = field(default_factory=dict)
    """By rank, of those that failed first; negative: ended by that signal (as in subprocess)."""
    error: str = ""
    """The launcher's error, if it could not start the ranks."""
    node: str = ""
    """Name of the node that caused it; "" on one machine."""


@dataclass(frozen=True, slots=True)
class TerminationNotice:
    """The launcher or the agent of a node received SIGTERM, or the node will be lost."""

    cause: str
    """Such as "SIGTERM to the launcher"."""
    grace_s: float | None = None
    """Time until it ends; None if it is not known."""


LauncherMessage = (
    LaunchRanksRequest
    | StopRanksRequest
    | CleanupFolderRequest
    | LauncherHello
    | LauncherReady
    | LauncherProgress
    | RankForked
    | RankExited
    | AllRanksExited
    | TerminationNotice
)
_TYPES = {cls.__name__: cls for cls in get_args(LauncherMessage)}


def startup_error_file(run_dir: str | Path, rank: int) -> Path:
    """Return the file for the traceback of a rank that fails to start."""
    return Path(run_dir) / f"rank{rank}.died"


def stacks_file(folder: str | Path, name: str) -> Path:
    """Return the file for the Python stacks of a process, dumped on `STACKS_SIGNAL`."""
    return Path(folder) / f"{name}.stacks"


def encode_line(message: LauncherMessage) -> bytes:
    """Encode a launcher message as a line of JSON."""
    return json.dumps([type(message).__name__, asdict(message)]).encode() + b"\n"


def decode_line(line: bytes) -> LauncherMessage:
    """Decode a line from ``encode_line``.

    Raises:
        ValueError: not a launcher message.
    """
    try:
        name, fields = json.loads(line)
        message: LauncherMessage = _TYPES[name](**fields)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        msg = f"{line[:100]!r} is not a launcher message ({type(error).__name__})"
        raise ValueError(msg) from error
    return message
