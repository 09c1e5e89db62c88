"""A switch that needs new ranks, as one transaction; the notebook's side.

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
from typing import TYPE_CHECKING, NoReturn

from nbdist.errors import CellInterrupted, SessionError, SwitchError
from nbdist.keyboard_interrupt import suppress_interrupt
from nbdist.operations.switch import SwitchReport, describe_numeric_differences
from nbdist.protocol.operations import (
    RESIZE_LOAD,
    RESIZE_SAVE,
    ResizeLoadRequest,
    ResizeSaveRequest,
    distinct_notes,
    slowest_phases,
)
from nbdist.session.collective_request import CollectiveRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.protocol.operations import Operation, RankSwitchReport, RequestT
    from nbdist.session.config import SessionConfig
    from nbdist.session.progress import StatusLine
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
class RankReplacement:
    """One replacement of the ranks."""

    workers: WorkerGroup
    before: SessionConfig
    after: SessionConfig
    reset_optimizer: bool
    status_line: StatusLine
    """Shows the progress."""
    start_ranks: Callable[[SessionConfig, Callable[[str], None]], object]
    """Starts ranks; takes a choice and a callback for its progress."""
    kept_folder: Path | None = None
    """Folder with the state, if neither new nor old ranks could be restored."""
    _seconds: dict[str, float] = field(default_factory=dict)

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
            with suppress_interrupt(lambda: self._show("cannot be interrupted now")):
                return self._run(folders)
        finally:
            for folder in folders:
                if folder != self.kept_folder:
                    shutil.rmtree(folder, ignore_errors=True)

    def _run(self, folders: list[Path]) -> SwitchReport:
        saved = self._request(
            RESIZE_SAVE,
            self.before,
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
        self._show(f"done in {report.total_s:.1f} s")
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
        self._show("ending the ranks")
        self.workers.stop_ranks()
        ended = time.monotonic()
        self._show("starting ranks")
        self.start_ranks(choice, self._show)
        self._seconds["ending the ranks"] = ended - start_time
        self._seconds["starting ranks"] = time.monotonic() - ended
        self.workers.set_folder_cleanup(folder)
        request = ResizeLoadRequest(folder=str(folder), world_size=self.before.placement.nproc)
        return self._request(RESIZE_LOAD, choice, request, stoppable=stoppable)

    def _roll_back(
        self, error: BaseException, folder: Path, not_carried: dict[str, str]
    ) -> NoReturn:
        """Start ranks with the old options.

        Raises:
            SwitchError: always, because of `error`.
        """
        self._show("rolling back")
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
        choice: SessionConfig,
        content: RequestT,
        *,
        stoppable: bool = True,
    ) -> list[RankSwitchReport]:
        """Send a request to all ranks; return their reports."""
        request = CollectiveRequest(
            self.workers, operation, choice.placement.nproc, self._show, stoppable=stoppable
        )
        try:
            reports = request.run(content)
        except SwitchError as error:
            exited = self.workers.exited_ranks()
            ended = f" (rank {', '.join(map(str, exited))} ended)" if exited else ""
            raise SwitchError(f"{error}{ended}") from error
        self._seconds |= slowest_phases(reports)
        return reports

    def _show(self, text: str) -> None:
        now, then = self.before, self.after
        title = f"{now.placement.nproc} ranks, {now.options.backend}"
        after = f"{then.placement.nproc} ranks, {then.options.backend}"
        self.status_line.show(f"nbdist: {title} -> {after}: {text}")


def _as_sentence(error: BaseException) -> str:
    """Return the message of an error, with a full stop."""
    text = str(error).strip()
    return text if text.endswith(".") else f"{text}."
