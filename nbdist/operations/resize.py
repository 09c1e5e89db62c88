"""A switch that needs new ranks, as the notebook's kernel sees it; one transaction.

old ranks write everything into a private folder in shared memory; nothing is changed
old ranks are ended, new ones started; the launcher stays
new ranks make everything again and compare it with what was written
(or: ranks with the old options are started and make it again from the same files)
the folder is removed
"""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from nbdist.errors import CellInterrupted, SessionError, SwitchError
from nbdist.operations.switch import SwitchReport, differences
from nbdist.protocol import messages
from nbdist.session.recovery import Transaction
from nbdist.session.suppress_interrupt import not_stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nbdist.output.status_line import StatusLine
    from nbdist.session.config import Choice
    from nbdist.session.worker_group import Gang


def needed(before: Choice, then: Choice) -> bool:
    """Whether living ranks cannot switch: their number or devices differ, or NVMe folders do.

    The launcher makes and removes the folder of an offload, around the ranks' life.
    """
    return (
        before.placement != then.placement
        or before.options.offload_path != then.options.offload_path
    )


@dataclass(slots=True, kw_only=True)
class Handover:
    """One change of ranks."""

    gang: Gang
    before: Choice
    then: Choice
    reset_optimizer: bool
    line: StatusLine
    """Shows what goes on."""
    listen: Callable[[Callable[[str], object] | None], None]
    """Told who hears of the ranks' phases."""
    start: Callable[[Choice, Callable[[str], None]], object]
    """Starts ranks; told who hears of its progress."""
    lost: bool = False
    """Whether neither the new nor the old ranks could be made."""
    _going_back: bool = False
    _seconds: dict[str, float] = field(default_factory=dict)

    def run(self) -> SwitchReport:
        """Hand everything over to new ranks.

        Stop ends what the ranks do, not the change of ranks itself, nor the way back.

        Raises:
            SwitchError: what failed and why; ranks with the old options have everything, or
                where that failed too, the message names the folder with the files.
        """
        folders = self.gang.fleet.private_folders()
        kept: Path | None = None
        try:
            with not_stopped(lambda: self._show("cannot be stopped half-way")):
                return self._run(folders)
        except _Lost as error:
            kept, self.lost = error.folder, True
            raise SwitchError(str(error)) from error.__cause__
        finally:
            self.listen(None)
            for folder in folders:
                if folder != kept:
                    shutil.rmtree(folder, ignore_errors=True)

    def _run(self, folders: list[Path]) -> SwitchReport:
        self.listen(self._show)
        for folder in folders:
            self.gang.remove_at_end(folder)
        left = self._ask(
            self.before,
            messages.LEAVE,
            messages.LeaveRequest(
                options=self.then.options.to_json(),
                world_size=self.then.placement.nproc,
                reset_optimizer=self.reset_optimizer,
                folders=[str(folder) for folder in folders],
            ),
        )
        (folder,) = [one for one in folders if str(one) == left[0]["folder"]]
        try:
            arrived = self._renew(self.then, folder)
        except (SwitchError, SessionError) as error:
            self._go_back(error, folder, left[0]["not_carried"])
        report = self._report(left, arrived)
        self._show(f"done in {report.total_s:.1f} s")
        return report

    def _renew(self, choice: Choice, folder: Path) -> list[dict[str, Any]]:
        """End the ranks, start others and let them make everything again."""
        self.gang.remove_at_end(folder, remove=False)  # a failed start ends the launcher too
        with self._timed("ending the ranks"):
            self.gang.halt()
        with self._timed("starting ranks"):
            self.start(choice, self._show)
        self.gang.remove_at_end(folder)
        request = messages.ArriveRequest(folder=str(folder), world_size=self.before.placement.nproc)
        return self._ask(choice, messages.ARRIVE, request)

    def _go_back(self, error: Exception, folder: Path, not_carried: dict[str, str]) -> NoReturn:
        """Start ranks with the old options.

        Raises:
            SwitchError: always: the error that led here.
        """
        self._show("going back")
        self._going_back = True
        try:
            self._renew(self.before, folder)
        except (SwitchError, SessionError) as second:
            self.gang.remove_at_end(folder, remove=False)
            message = (
                f"{_sentence(error)} The ranks of before could not be made again either:"
                f" {_sentence(second)} The state is kept in {folder}, a checkpoint in its folder"
                " 'state'; copy it, then use %nbdist restart."
            )
            raise _Lost(message, folder) from error
        message = (
            f"{_sentence(error)} Everything goes on under {self.before.describe()}, in new ranks"
        )
        if not_carried:
            message += f", without {', '.join(not_carried)}, which cannot leave their process"
        message += "."
        raise SwitchError(message) from error

    def _ask(self, choice: Choice, kind: str, content: Any) -> list[dict[str, Any]]:
        """Let all ranks do their half; returns their reports.

        Raises:
            SwitchError: one of them could not.
            RankDied: one of them ended.
        """
        work = Transaction(
            self.gang,
            range(choice.placement.nproc),
            kind,
            raises=SwitchError,
            show=self._show,
            stoppable=not self._going_back,
            # Old ranks agree on an error; a new one that fails leaves others waiting.
            alone=kind == messages.ARRIVE,
        )
        try:
            replies = work.ask(content)
        except (SwitchError, CellInterrupted) as error:
            if isinstance(error, CellInterrupted) and kind == messages.LEAVE:
                raise  # nothing is changed
            gone = self.gang.gone()
            ended = f" (rank {', '.join(map(str, gone))} ended)" if gone else ""
            raise SwitchError(f"{error}{ended}") from error
        reports = [replies[rank]["report"] for rank in sorted(replies)]
        for phase in reports[0]["seconds"]:
            self._seconds[phase] = max(one["seconds"].get(phase, 0.0) for one in reports)
        return reports

    def _report(self, left: list[dict[str, Any]], arrived: list[dict[str, Any]]) -> SwitchReport:
        remarks = [*left[0]["will_differ"], *arrived[0]["will_differ"]]
        return SwitchReport(
            before=self.before.describe(),
            after=self.then.describe(),
            seconds=dict(self._seconds),
            state_bytes=sum(one["state_bytes"] for one in left),
            moved_bytes=sum(one["state_bytes"] for one in left),
            verified=arrived[0]["verified"],
            carried=tuple(left[0]["carried"]),
            bound=(),
            not_carried=left[0]["not_carried"],
            will_differ=(*differences(self.before.options, self.then.options), *remarks),
            notes=tuple(dict.fromkeys(note for one in left for note in one["notes"])),
        )

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        self._show(what)
        yield
        self._seconds[what] = time.monotonic() - began

    def _show(self, what: str) -> None:
        now, then = self.before, self.then
        title = f"{now.placement.nproc} ranks, {now.options.backend}"
        after = f"{then.placement.nproc} ranks, {then.options.backend}"
        self.line.show(f"nbdist: {title} -> {after}: {what}")


class _Lost(Exception):  # noqa: N818 - tells `run` alone
    """Neither the new nor the old ranks could be made."""

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


def _sentence(error: Exception) -> str:
    """The words of an error, with a full stop."""
    text = str(error).strip()
    return text if text.endswith(".") else f"{text}."
