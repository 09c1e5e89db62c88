"""A switch that needs new ranks, as one transaction; the notebook's side.

1. The old ranks write their state into a private folder in shared memory.
2. The old ranks are ended and new ones started; the launcher stays.
3. The new ranks restore the state and verify its digests. On failure, ranks with the old options
   are started and restore it from the same files.
4. The folder is removed.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from nbdist.errors import CellInterrupted, SessionError, SwitchError
from nbdist.operations.switch import SwitchReport, describe_numeric_differences
from nbdist.protocol import messages
from nbdist.session.recovery import TransactionalRequest
from nbdist.signals import suppress_interrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nbdist.output.status_line import StatusLine
    from nbdist.session.config import SessionConfig
    from nbdist.session.worker_group import WorkerGroup


def needs_new_ranks(before: SessionConfig, new_config: SessionConfig) -> bool:
    """Return whether a switch needs new ranks: their number, devices or NVMe folder changes.

    The launcher creates and removes an offload folder when ranks start and end.
    """
    return (
        before.placement != new_config.placement
        or before.options.offload_path != new_config.options.offload_path
    )


@dataclass(slots=True, kw_only=True)
class RankResize:
    """One replacement of the ranks."""

    worker_group: WorkerGroup
    before: SessionConfig
    after: SessionConfig
    reset_optimizer: bool
    status_line: StatusLine
    """Shows the progress."""
    subscribe_progress: Callable[[Callable[[str], object] | None], None]
    """Sets the callback for progress of the ranks."""
    start_ranks: Callable[[SessionConfig, Callable[[str], None]], object]
    """Starts ranks; takes a choice and a callback for its progress."""
    are_ranks_lost: bool = False
    """True if neither new nor old ranks could be restored."""
    _going_back: bool = False
    _seconds: dict[str, float] = field(default_factory=dict)

    def run(self) -> SwitchReport:
        """Move the state to new ranks.

        An interrupt affects the ranks' work, but not the replacement itself or its rollback.

        Raises:
            SwitchError: the cause; ranks with the old options have the state, or if the rollback
                failed too, the message contains the folder with the files.
        """
        folders = self.worker_group.launcher_group.make_private_folders()
        kept: Path | None = None
        try:
            with suppress_interrupt(lambda: self._show("cannot be interrupted now")):
                return self._run(folders)
        except _RollbackFailed as error:
            kept, self.are_ranks_lost = error.folder, True
            raise SwitchError(str(error)) from error.__cause__
        finally:
            self.subscribe_progress(None)
            for folder in folders:
                if folder != kept:
                    shutil.rmtree(folder, ignore_errors=True)

    def _run(self, folders: list[Path]) -> SwitchReport:
        self.subscribe_progress(self._show)
        for folder in folders:
            self.worker_group.set_folder_cleanup(folder)
        old_reports = self._ask(
            self.before,
            messages.RESIZE_SAVE,
            messages.ResizeSaveRequest(
                options=self.after.options.to_json(),
                world_size=self.after.placement.nproc,
                reset_optimizer=self.reset_optimizer,
                folders=[str(folder) for folder in folders],
            ),
        )
        (folder,) = [path for path in folders if str(path) == old_reports[0]["folder"]]
        try:
            new_reports = self._renew(self.after, folder)
        except (SwitchError, SessionError) as error:
            self._go_back(error, folder, old_reports[0]["not_carried"])
        report = self._report(old_reports, new_reports)
        self._show(f"done in {report.total_s:.1f} s")
        return report

    def _renew(self, choice: SessionConfig, folder: Path) -> list[dict[str, Any]]:
        """End the ranks, start new ones and let them restore the state."""
        # A failed start also ends the launcher, which must not remove the state then.
        self.worker_group.set_folder_cleanup(folder, remove=False)
        with self._timed("ending the ranks"):
            self.worker_group.stop_ranks()
        with self._timed("starting ranks"):
            self.start_ranks(choice, self._show)
        self.worker_group.set_folder_cleanup(folder)
        request = messages.ResizeLoadRequest(
            folder=str(folder), world_size=self.before.placement.nproc
        )
        return self._ask(choice, messages.RESIZE_LOAD, request)

    def _go_back(self, error: Exception, folder: Path, not_carried: dict[str, str]) -> NoReturn:
        """Start ranks with the old options.

        Raises:
            SwitchError: always, because of `error`.
        """
        self._show("rolling back")
        self._going_back = True
        try:
            self._renew(self.before, folder)
        except (SwitchError, SessionError) as second:
            self.worker_group.set_folder_cleanup(folder, remove=False)
            message = (
                f"{_sentence(error)} The old ranks could not be restored either:"
                f" {_sentence(second)} The state is kept in {folder}, as a checkpoint in its"
                " subfolder 'state'. Copy it, then use %nbdist restart."
            )
            raise _RollbackFailed(message, folder) from error
        message = f"{_sentence(error)} Rolled back to {self.before.describe()}, in new ranks"
        if not_carried:
            message += f", without {', '.join(not_carried)}, which cannot be moved to new processes"
        message += "."
        raise SwitchError(message) from error

    def _ask(self, choice: SessionConfig, kind: str, content: Any) -> list[dict[str, Any]]:
        """Send a request to all ranks; return their reports.

        Raises:
            SwitchError: a rank failed.
            RankDied: a rank ended.
        """
        work = TransactionalRequest(
            self.worker_group,
            range(choice.placement.nproc),
            kind,
            raises=SwitchError,
            show=self._show,
            stoppable=not self._going_back,
            # Old ranks agree on an error; a new rank that fails leaves others waiting.
            alone=kind == messages.RESIZE_LOAD,
        )
        try:
            replies = work.send_and_wait(content)
        except (SwitchError, CellInterrupted) as error:
            if isinstance(error, CellInterrupted) and kind == messages.RESIZE_SAVE:
                raise  # nothing was changed
            gone = self.worker_group.exited_ranks()
            ended = f" (rank {', '.join(map(str, gone))} ended)" if gone else ""
            raise SwitchError(f"{error}{ended}") from error
        reports = [replies[rank]["report"] for rank in sorted(replies)]
        for phase in reports[0]["seconds"]:
            self._seconds[phase] = max(report["seconds"].get(phase, 0.0) for report in reports)
        return reports

    def _report(self, unmoved: list[dict[str, Any]], arrived: list[dict[str, Any]]) -> SwitchReport:
        remarks = [*unmoved[0]["will_differ"], *arrived[0]["will_differ"]]
        return SwitchReport(
            before=self.before.describe(),
            after=self.after.describe(),
            seconds=dict(self._seconds),
            state_bytes=sum(report["state_bytes"] for report in unmoved),
            moved_bytes=sum(report["state_bytes"] for report in unmoved),
            verified=arrived[0]["verified"],
            carried=tuple(unmoved[0]["carried"]),
            bound=(),
            not_carried=unmoved[0]["not_carried"],
            will_differ=(
                *describe_numeric_differences(self.before.options, self.after.options),
                *remarks,
            ),
            notes=tuple(dict.fromkeys(note for report in unmoved for note in report["notes"])),
        )

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        self._show(what)
        yield
        self._seconds[what] = time.monotonic() - began

    def _show(self, what: str) -> None:
        now, then = self.before, self.after
        title = f"{now.placement.nproc} ranks, {now.options.backend}"
        after = f"{then.placement.nproc} ranks, {then.options.backend}"
        self.status_line.show(f"nbdist: {title} -> {after}: {what}")


class _RollbackFailed(Exception):  # noqa: N818 - control flow, handled by `run`
    """Neither new nor old ranks could be restored; handled by `run`."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


def _sentence(error: Exception) -> str:
    """Return the message of an error, with a full stop."""
    text = str(error).strip()
    return text if text.endswith(".") else f"{text}."
