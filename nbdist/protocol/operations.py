"""Operations that all ranks carry out together: request, report and function of each.

An operation is declared here once. The notebook sends its request with
`session.collective_request`, and each rank runs its function (`RankKernel.run_operation`).
A request is answered with the rank's report or, on an error, with an `ErrorReply`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from nbdist.errors import CheckpointError, NbdistError, SessionError, SwitchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from _typeshed import DataclassInstance

RequestT = TypeVar("RequestT", bound="DataclassInstance")
ReportT = TypeVar("ReportT")


@dataclass(frozen=True, slots=True)
class Operation(Generic[RequestT, ReportT]):
    """A collective operation."""

    name: str
    """Name in messages: "switch". Several steps of one operation have the same name."""
    request: type[RequestT]
    report: type[ReportT]
    function: str
    """Function that a rank runs: "package.module:function". Called with the request and the
    `RankContext`, returns the report. It is imported when it is first used: most need torch."""
    raises: type[NbdistError]
    in_phases: bool = True
    """True if an interrupt takes effect between phases (`worker.operations.collective_phases`)."""
    fails_alone: bool = False
    """True if a rank that fails replies immediately, and the others need not finish."""
    resync: bool = True
    """True if the ranks are resynchronized after a failure."""

    @property
    def message_type(self) -> str:
        """Type of the request's message: "nbdist_switch_request"."""
        words = re.findall("[A-Z][a-z]*", self.request.__name__)
        return "_".join(["nbdist", *words]).lower()


class TimedReport(Protocol):
    """Report of an operation in phases."""

    seconds: dict[str, float]
    notes: list[str]


def slowest_phases(reports: Sequence[TimedReport]) -> dict[str, float]:
    """Return phase -> seconds of the slowest rank."""
    return {
        phase: max(report.seconds.get(phase, 0.0) for report in reports)
        for phase in reports[0].seconds
    }


def distinct_notes(reports: Iterable[TimedReport]) -> tuple[str, ...]:
    """Return the notes of all ranks, equal ones once."""
    return tuple(dict.fromkeys(note for report in reports for note in report.notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRequest:
    """Move the prepared models to another engine."""

    options: dict[str, Any]
    """Validated `strategies.Options.to_json()`."""
    reset_optimizer: bool


@dataclass(slots=True, kw_only=True)
class RankSwitchReport:
    """Result of a switch, or of one half of a resize, on a rank."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds."""
    state_bytes: int = 0
    """Size of this rank's shards of weights and optimizer state."""
    sent_bytes: int = 0
    """Bytes that this rank sent to other ranks, or wrote to the folder."""
    verified: int = 0
    """Number of tensors whose digest is unchanged."""
    bound: list[str] = field(default_factory=list)
    """The user's variables that were rebound to new objects."""
    carried: list[str] = field(default_factory=list)
    not_carried: dict[str, str] = field(default_factory=dict)
    """Variable -> reason."""
    will_differ: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    folder: str = ""
    """Folder with the files of a resize."""


SWITCH = Operation(
    "switch",
    SwitchRequest,
    RankSwitchReport,
    "nbdist.worker.operations.switch:switch",
    SwitchError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeSaveRequest:
    """Write the state for new ranks, without changing it."""

    options: dict[str, Any]
    """Validated `strategies.Options.to_json()` of the new ranks."""
    world_size: int
    """Number of new ranks."""
    reset_optimizer: bool
    folders: list[str]
    """Private, empty folders; the first with enough space is used."""


RESIZE_SAVE = Operation(
    "switch",
    ResizeSaveRequest,
    RankSwitchReport,
    "nbdist.worker.operations.resize:save_for_resize",
    SwitchError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeLoadRequest:
    """Restore the state written by the previous ranks."""

    folder: str
    world_size: int
    """Number of previous ranks."""


RESIZE_LOAD = Operation(
    "switch",
    ResizeLoadRequest,
    RankSwitchReport,
    "nbdist.worker.operations.resize:load_after_resize",
    SwitchError,
    fails_alone=True,  # the kernel then ends all new ranks
    resync=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildRequest:
    """Rebuild the prepared models and, if needed, the process groups."""

    era: int
    """Number of this rebuild, the same on all ranks."""
    groups: bool
    """True to rebuild the process groups too: they are broken, or the ranks out of sync."""


@dataclass(slots=True, kw_only=True)
class RankRebuildReport:
    """Result of a rebuild on a rank."""

    seconds: float = 0.0
    bound: list[str] = field(default_factory=list)
    """The user's variables that were rebound to new objects."""
    stale: list[str] = field(default_factory=list)
    """The user's variables that hold an old group: a cell must create them again."""


REBUILD_MODELS = Operation(
    "recovery",
    RebuildRequest,
    RankRebuildReport,
    "nbdist.worker.operations.recover:rebuild_models",
    SwitchError,
    resync=False,  # it is the resynchronization
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Start to save a checkpoint; the files are written after the report."""

    root: str = field(repr=False)
    """Absolute path or URL; a URL may contain a password."""
    name: str
    overwrite: bool = False
    keep: int | None = None
    """Number of checkpoints to keep; None: all."""
    full: bool = False
    """Store frozen tensors of a base model too, and not by reference."""
    ended: str = ""
    """What ended the run from outside: "SIGTERM"; "" if nothing did."""


@dataclass(slots=True, kw_only=True)
class RankSaveReport:
    """Start of a save on a rank: the state is copied."""

    id: str
    """As in ``messages.SaveStatus``."""


SAVE = Operation(
    "save",
    SaveRequest,
    RankSaveReport,
    "nbdist.worker.operations.save:save",
    CheckpointError,
    in_phases=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """Load a checkpoint into the prepared models."""

    path: str
    """Absolute path or URL."""
    id: str
    """Id in the manifest, to detect that the checkpoint was replaced."""
    weights_only: bool
    """Leave optimizers, schedulers, generators and loaders unchanged."""
    reset_optimizer: bool = False
    """Start with new optimizer state."""


@dataclass(slots=True, kw_only=True)
class RankLoadReport:
    """Result of a load on a rank."""

    step: int = 0
    backend: str = ""
    """Backend that wrote the checkpoint."""
    world_size: int = 0
    """Number of ranks that wrote the checkpoint."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds."""
    read_bytes: int = 0
    verified: int = 0
    """Number of tensors whose digest equals the saved one."""
    loaded: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Differences from the saved state, with the reason."""


LOAD = Operation(
    "load",
    LoadRequest,
    RankLoadReport,
    "nbdist.worker.operations.load:load",
    CheckpointError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportCheckpointRequest:
    """Import a checkpoint of another tool into the prepared model."""

    path: str
    """Absolute path of a folder or a file."""
    trust: bool
    """True to allow pickled code in it to run."""
    model: str | None
    """Variable that holds the model; None: the only prepared model."""
    weights_only: bool = False


@dataclass(slots=True, kw_only=True)
class RankImportReport:
    """Result of an import on a rank."""

    kind: str = ""
    """Format and tool that wrote it."""
    tensors: int = 0
    read_bytes: int = 0
    steps: float | None = None
    """Optimizer steps taken; None if the optimizer state was not loaded."""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


IMPORT = Operation(
    "load",
    ImportCheckpointRequest,
    RankImportReport,
    "nbdist.worker.operations.import_checkpoint:import_checkpoint",
    CheckpointError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """Export the prepared model as a folder for other tools."""

    folder: str
    """Absolute path."""
    dtype: str | None
    """torch name of the dtype for floating-point tensors; None: as trained."""
    max_shard_size: str
    """Maximum file size: "5GB"."""
    overwrite: bool
    """Replace the model in a folder that is not empty."""
    model: str | None
    """Variable that holds the model; None: the only prepared model."""


@dataclass(slots=True, kw_only=True)
class RankExportReport:
    """Result of an export on a rank."""

    model: str = ""
    """Class name of the model."""
    tensors: int = 0
    files: list[str] = field(default_factory=list)
    """Names of the files that contain tensors."""
    size_bytes: int = 0
    """Total size of the tensors in all files."""
    gathered_bytes: int = 0
    """Bytes that this rank sent to other ranks."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds."""
    companions: list[str] = field(default_factory=list)
    """Variables that were saved with the model: tokenizer, processor."""
    notes: list[str] = field(default_factory=list)
    how: str = ""
    """Expression that loads the folder."""


EXPORT = Operation(
    "export",
    ExportRequest,
    RankExportReport,
    "nbdist.worker.operations.export:export",
    CheckpointError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PullModelRequest:
    """Write the state dict of a prepared model into one payload file."""

    name: str
    """Variable that holds the model."""
    folders: list[str]
    """Folders for the file, best first."""


@dataclass(slots=True, kw_only=True)
class RankPullReport:
    """Result of a pull of a model on a rank."""

    path: str
    """The payload file, the same on all ranks."""


PULL_MODEL = Operation(
    "pull",
    PullModelRequest,
    RankPullReport,
    "nbdist.worker.operations.pull:pull_model",
    CheckpointError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateRequest:
    """Benchmark links, devices and a disk."""

    kinds: list[str]
    """Dtypes of the matrix products: fp32, bf16, fp16."""
    disk: str | None
    """Folder for the disk benchmark; None: no disk benchmark."""


@dataclass(slots=True, kw_only=True)
class RankCalibrateReport:
    """Benchmarks of a rank."""

    figures: dict[str, Any]
    """Result of ``worker.operations.calibrate.calibrate``."""


CALIBRATE = Operation(
    "calibration",
    CalibrateRequest,
    RankCalibrateReport,
    "nbdist.worker.operations.calibrate:calibrate",
    SessionError,
    in_phases=False,
)

OPERATIONS: tuple[Operation[Any, Any], ...] = (
    SWITCH,
    RESIZE_SAVE,
    RESIZE_LOAD,
    REBUILD_MODELS,
    SAVE,
    LOAD,
    IMPORT,
    EXPORT,
    PULL_MODEL,
    CALIBRATE,
)
"""All operations, which ranks accept."""
