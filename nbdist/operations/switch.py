"""Switch of the backend: on living ranks, or to new ones; the notebook's side.

A switch to new ranks is one transaction:

1. The old ranks write their state into a private folder in shared memory.
2. The old ranks are ended and new ones started; the launcher stays.
3. The new ranks restore the state and verify its digests. On failure, ranks with the old options
   are started and restore it from the same files.
4. The folder is removed.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

from nbdist.display import show_as_text
from nbdist.errors import CellInterrupted, SessionError, SwitchError
from nbdist.number_formatting import format_bytes
from nbdist.protocol.operations import (
    RESIZE_LOAD,
    RESIZE_SAVE,
    SWITCH,
    ResizeLoadRequest,
    ResizeSaveRequest,
    SwitchRequest,
    distinct_notes,
    slowest_phases,
)
from nbdist.session.collective_request import CollectiveRequest
from nbdist.session.progress import StatusLine
from nbdist.signal_handling import suppress_interrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nbdist.protocol.operations import Operation, RankSwitchReport, RequestT
    from nbdist.session.config import SessionConfig
    from nbdist.session.worker_group import WorkerGroup
    from nbdist.strategies import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchReport:
    """Result of a switch."""

    before: str
    """Ranks and strategy."""
    after: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase, of the slowest rank."""
    state_bytes: int = 0
    """Size of weights and optimizer state, over all ranks."""
    moved_bytes: int = 0
    """Bytes sent between ranks."""
    verified: int = 0
    """Number of tensors whose digest did not change."""
    carried: tuple[str, ...] = ()
    bound: tuple[str, ...] = ()
    """Variables of the ranks that were rebound."""
    not_carried: Mapping[str, str] = field(default_factory=dict)
    """Variable -> reason; only with new processes."""
    will_differ: tuple[str, ...] = ()
    """Numeric differences of the new backend, with reasons."""
    notes: tuple[str, ...] = ()
    """Warnings, in sentences."""

    @classmethod
    def nothing(cls, words: str) -> Self:
        """Return the report of a switch that changes nothing."""
        return cls(before=words, after=words)

    @property
    def total_s(self) -> float:
        """Sum over all phases in seconds."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        if self.before == self.after and not self.seconds:
            return f"{self.after}: nothing to switch"
        share = self.moved_bytes / self.state_bytes if self.state_bytes else 0.0
        lines = [
            f"{describe_change(self.before, self.after)} in {self.total_s:.1f} s",
            f"  kept: {'; '.join(self.carried)}",
        ]
        if self.verified:
            lines += [
                f"  {self.verified} tensors, {format_bytes(self.state_bytes)}, verified by digest",
                f"  {format_bytes(self.moved_bytes)} ({share:.0%}) sent between ranks",
            ]
        lines += [f"  rebound: {', '.join(self.bound)}"] if self.bound else []
        lines += [f"  not kept: {name}: {reason}" for name, reason in self.not_carried.items()]
        lines += [f"  will differ: {item}" for item in self.will_differ]
        lines += [f"  note: {item}" for item in self.notes]
        return "\n".join(lines)

    _repr_pretty_ = show_as_text


def describe_change(before: str, after: str) -> str:
    """Return "ranks: old -> new", with the ranks once if they are the same."""
    (ranks, _, old), (then, _, new) = before.partition(", "), after.partition(", ")
    return f"{ranks}: {old} -> {new}" if ranks == then else f"{before} -> {after}"


def switch_backend(
    workers: WorkerGroup,
    before: SessionConfig,
    after: SessionConfig,
    *,
    reset_optimizer: bool,
    on_late_success: Callable[[], object],
) -> SwitchReport:
    """Switch the backend on living ranks.

    Args:
        workers: the worker group.
        before: current options.
        after: new options.
        reset_optimizer: discard the optimizer state.
        on_late_success: called if the switch succeeds after an interrupt returned the prompt.

    Raises:
        SwitchError: everything was rolled back, or the message says otherwise.
    """
    now, then = before.options, after.options
    title = f"{now.describe()} -> {then.describe()}"
    with StatusLine() as line:
        request = CollectiveRequest(workers, SWITCH, lambda text: line.show(f"{title}: {text}"))
        request.late = on_late_success
        reports = request.run(
            SwitchRequest(options=then.to_json(), reset_optimizer=reset_optimizer)
        )
        first = reports[0]
        report = SwitchReport(
            before=before.describe(),
            after=after.describe(),
            seconds=slowest_phases(reports),
            state_bytes=sum(report.state_bytes for report in reports),
            moved_bytes=sum(report.sent_bytes for report in reports),
            verified=first.verified,
            carried=tuple(first.carried),
            bound=tuple(first.bound),
            will_differ=tuple(describe_numeric_differences(now, then)),
            notes=distinct_notes(reports),
        )
        line.show(f"{title} in {report.total_s:.1f} s")
    return report


def describe_numeric_differences(now: Options, new_options: Options) -> list[str]:
    """Return numeric differences of the new backend, as sentences."""
    remarks = []
    engines = now.strategy.engine, new_options.strategy.engine
    half = new_options.precision not in {None, "no"}
    if now.precision != new_options.precision:
        remarks.append(
            f"precision {now.precision} -> {new_options.precision}: losses change by the rounding"
            " of the smaller dtype; weights and optimizer state stay in fp32"
        )
    elif half and (engines[0] != engines[1] or now.strategy.level != new_options.strategy.level):
        remarks.append(
            f"{new_options.precision} arithmetic: DDP uses autocast with fp32 weights, FSDP and"
            " DeepSpeed cast the weights first; losses differ in the third digit"
        )
    offloaded = [
        options.offload != "none" and options.strategy.engine == "deepspeed"
        for options in (now, new_options)
    ]
    if offloaded[0] != offloaded[1]:
        remarks.append("DeepSpeed's CPU Adam rounds differently from torch's, by about 1e-6")
    return remarks


# -- with new ranks


@dataclass(slots=True, kw_only=True)
class RankReplacement:
    """One replacement of the ranks."""

    workers: WorkerGroup
    before: SessionConfig
    after: SessionConfig
    reset_optimizer: bool
    start_ranks: Callable[[SessionConfig, Callable[[str], None]], object]
    """Starts ranks; takes a choice and a callback for its progress."""
    kept_folder: Path | None = None
    """Folder with the state, if neither new nor old ranks could be restored."""
    _seconds: dict[str, float] = field(default_factory=dict)
    _line: StatusLine = field(init=False)

    def __post_init__(self) -> None:
        now, then = (
            f"{choice.placement.nproc} rank{'s' * (choice.placement.nproc != 1)},"
            f" {choice.options.backend}"
            for choice in (self.before, self.after)
        )
        self._line = StatusLine(f"{now} -> {then}")

    def run(self) -> SwitchReport:
        """Move the state to new ranks.

        An interrupt affects the ranks' work, but not the replacement itself or its rollback.

        Raises:
            SwitchError: the cause; ranks with the old options have the state, or if the rollback
                failed too, the message contains the folder with the files.
        """
        folders = self.workers.launcher_group.make_private_folders()
        for folder in folders:
            self.workers.set_folder_cleanup(folder)
        try:
            with (
                self._line,
                suppress_interrupt(lambda: self._line.show("cannot be interrupted now")),
            ):
                return self._run(folders)
        finally:
            for folder in folders:
                if folder != self.kept_folder:
                    shutil.rmtree(folder, ignore_errors=True)

    def _run(self, folders: list[Path]) -> SwitchReport:
        saved = self._request(
            RESIZE_SAVE,
            ResizeSaveRequest(
                options=self.after.options.to_json(),
                world_size=self.after.placement.nproc,
                reset_optimizer=self.reset_optimizer,
                folders=[str(folder) for folder in folders],
            ),
        )
        first, folder = saved[0], Path(saved[0].folder)
        try:
            loaded = self._replace_ranks(self.after, folder)
        except (SwitchError, SessionError, CellInterrupted) as error:
            self._roll_back(error, folder, first.not_carried)
        report = SwitchReport(
            before=self.before.describe(),
            after=self.after.describe(),
            seconds=self._seconds,
            state_bytes=sum(report.state_bytes for report in saved),
            moved_bytes=sum(report.state_bytes for report in saved),
            verified=loaded[0].verified,
            carried=tuple(first.carried),
            not_carried=first.not_carried,
            will_differ=(
                *describe_numeric_differences(self.before.options, self.after.options),
                *first.will_differ,
                *loaded[0].will_differ,
            ),
            notes=distinct_notes(saved),
        )
        self._line.show(f"done in {report.total_s:.1f} s")
        return report

    def _replace_ranks(
        self, choice: SessionConfig, folder: Path, *, stoppable: bool = True
    ) -> list[RankSwitchReport]:
        """End the ranks, start new ones and let them restore the state.

        Raises:
            SwitchError: a rank failed to restore it.
            SessionError: the ranks did not start, or ended.
            CellInterrupted: an interrupt ended the request.
        """
        # A failed start also ends the launcher, which must not remove the state then.
        self.workers.set_folder_cleanup(folder, remove=False)
        start_time = time.monotonic()
        self._line.show("ending the ranks")
        self.workers.stop_ranks()
        ended = time.monotonic()
        self._line.show("starting ranks")
        self.start_ranks(choice, self._line.show)
        self._seconds["ending the ranks"] = ended - start_time
        self._seconds["starting ranks"] = time.monotonic() - ended
        self.workers.set_folder_cleanup(folder)
        request = ResizeLoadRequest(folder=str(folder), world_size=self.before.placement.nproc)
        return self._request(RESIZE_LOAD, request, stoppable=stoppable)

    def _roll_back(
        self, error: BaseException, folder: Path, not_carried: dict[str, str]
    ) -> NoReturn:
        """Start ranks with the old options.

        Raises:
            SwitchError: always, because of `error`.
        """
        self._line.show("rolling back")
        try:
            self._replace_ranks(self.before, folder, stoppable=False)
        except (SwitchError, SessionError, CellInterrupted) as second:
            self.workers.set_folder_cleanup(folder, remove=False)
            self.kept_folder = folder
            raise SwitchError(
                f"{_as_sentence(error)} The old ranks could not be restored either:"
                f" {_as_sentence(second)} The state is kept in {folder}, as a checkpoint in its"
                " subfolder 'state'. Copy it, then use %nbdist restart."
            ) from error
        message = f"{_as_sentence(error)} Rolled back to {self.before.describe()}, in new ranks"
        if not_carried:
            message += f", without {', '.join(not_carried)}, which cannot be moved to new processes"
        raise SwitchError(f"{message}.") from error

    def _request(
        self,
        operation: Operation[RequestT, RankSwitchReport],
        content: RequestT,
        *,
        stoppable: bool = True,
    ) -> list[RankSwitchReport]:
        """Send a request to all ranks; return their reports."""
        request = CollectiveRequest(self.workers, operation, self._line.show, stoppable=stoppable)
        try:
            reports = request.run(content)
        except SwitchError as error:
            exited = self.workers.exited_ranks()
            ended = f" (rank {', '.join(map(str, exited))} ended)" if exited else ""
            raise SwitchError(f"{error}{ended}") from error
        self._seconds |= slowest_phases(reports)
        return reports


def _as_sentence(error: BaseException) -> str:
    """Return the message of an error, with a full stop."""
    text = str(error).strip()
    return text if text.endswith(".") else f"{text}."
