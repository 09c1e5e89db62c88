"""Profiles of a session: requests them, collects the measurements, shows the results.

Runs in the notebook's kernel, without torch. A profile requested while no cell runs waits here and
is sent with the next cell, so that no profile outlives a cell on a rank.
"""

from __future__ import annotations

import logging
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Self

from nbdist import rank_sets
from nbdist.errors import OptionError, ProfileError
from nbdist.paths import expand_user
from nbdist.profiler.measurements import RankProfile
from nbdist.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.profiler.profile import Profile
    from nbdist.session.cell import Cell
    from nbdist.session.worker_group import WorkerGroup

MAX_PROFILE_S = 30.0
"""Maximum duration of the recording."""
MAX_STEPS = 1000
RESULT_TIMEOUT_S = 3.0
"""Timeout for a rank's measurements after the end of its cell."""
OTHER_RANKS_TIMEOUT_S = 15.0
"""Timeout for the other ranks' measurements after those of the first rank."""
WAIT_S = 0.05

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Options of a profile."""

    steps: int | None = None
    """Steps to record; None: until the figures are stable."""
    trace: Path | None = None
    """Folder for the traces of all ranks."""
    memory: bool = True

    @classmethod
    def parse(cls, profile: object) -> Self | None:
        """Parse the `profile` argument of `Session.run`; None means no profile.

        Raises:
            OptionError: neither a bool nor the arguments of `create`, or one is not allowed.
        """
        if profile is None or profile is False:
            return None
        known = [item.name for item in fields(cls)]
        if profile is True:
            return cls.create()
        if isinstance(profile, Mapping) and profile.keys() <= set(known):
            return cls.create(**profile)
        raise OptionError(
            f"profile must be True, False or a dict of {', '.join(known)} such as"
            f' {{"steps": 10}}, got {profile!r}.'
        )

    @classmethod
    def create(
        cls,
        steps: int | None = None,
        trace: object = None,
        memory: object = True,  # noqa: FBT002 - as Session.profile has it
    ) -> Self:
        """Validate the options and create the folder.

        Raises:
            OptionError: a number of steps that is not allowed, or a folder that is not writable.
        """
        if steps is not None and (type(steps) is not int or not 1 <= steps <= MAX_STEPS):
            raise OptionError(
                f"--steps must be an integer from 1 to {MAX_STEPS}, got {steps}. Leave it out to"
                " stop when the figures are stable."
            )
        if not isinstance(trace, (str, os.PathLike, NoneType)) or trace == "":
            message = f"--trace must be a folder, got {trace!r}. Leave it out for no traces."
            raise OptionError(message)
        if not isinstance(memory, bool):
            raise OptionError(f"memory must be True or False, got {memory!r}.")
        if trace is None:
            return cls(steps=steps, memory=memory)
        folder = Path.cwd() / expand_user(trace)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return cls(steps=steps, trace=folder, memory=memory)
        except OSError as error:
            raise OptionError(
                f"Cannot write to --trace {folder}: {error.strerror or error}. Use a writable"
                " folder."
            ) from None


@dataclass(slots=True, kw_only=True)
class ProfileRun:
    """One profile, from the request to the result."""

    options: ProfileOptions
    requested_at: float = field(default_factory=time.time)
    """Unix time in seconds."""
    replaces: bool = False
    """True if it replaces a profile that waited for its cell."""
    cell: Cell | None = None
    """The profiled cell; None while waiting for the next one."""
    sources: Sequence[tuple[str, str]] = ()
    """Code of the last cells, the profiled one last: "In[3]" and its text."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    ranks: tuple[int, ...] = ()
    text: str = ""
    figures: dict[int, RankProfile] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)
    """Why ranks have no measurements, one sentence each."""
    first_result_at: float = 0.0
    """Monotonic time of the first rank's measurements."""
    finished_at: float = 0.0
    """Monotonic time when the cell was first seen to be finished."""
    is_building: bool = False

    @property
    def is_armed(self) -> bool:
        """True if it waits for the next cell."""
        return self.cell is None

    @property
    def fraction_done(self) -> float | None:
        """Progress from 0 to 1, or None if unknown."""
        known = self.text.rpartition(" ")[2]
        if self.options.steps is None or not known.isdigit():
            return None
        return min(1.0, int(known) / self.options.steps)

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks without measurements or refusal."""
        return tuple(sorted(set(self.ranks) - self.figures.keys() - self.refusals.keys()))

    def take_refusal_notes(self) -> list[str]:
        """Return why ranks have no measurements, grouped by reason."""
        reasons: dict[str, list[int]] = {}
        for rank, reason in sorted(self.refusals.items()):
            reasons.setdefault(reason, []).append(rank)
        return [f"{rank_sets.describe_ranks(ranks)}: {reason}" for reason, ranks in reasons.items()]

    def __str__(self) -> str:
        instead = " This replaces the profile requested before." if self.replaces else ""
        if self.cell is None:
            return (
                "the next %%distribute cell will be profiled; the result appears below it."
                f"{instead}"
            )
        return (
            f"profiling the running cell In[{self.cell.count}]; the result appears below that"
            f" cell. %nbdist profile --show shows it again.{instead}"
        )


class SessionProfiler:
    """The profiles of a session, one at a time."""

    build_profile: Callable[[ProfileRun], Profile]
    """Builds a profile from the ranks' measurements, on its own thread; set by `Session`."""

    def __init__(self, workers: WorkerGroup) -> None:
        self.current_run: ProfileRun | None = None
        """The profile that is armed or in progress."""
        self.profiles: list[Profile] = []
        self._workers = workers
        self._lock = threading.Lock()

    def arm(self, options: ProfileOptions) -> ProfileRun:
        """Profile the next cell; replaces a profile that is already armed.

        Raises:
            ProfileError: a profile is in progress.
        """
        with self._lock:
            if busy := self.busy_reason():
                raise ProfileError(busy)
            self.current_run = ProfileRun(
                options=options,
                text="armed: the next cell will be profiled",
                replaces=self.current_run is not None,
            )
            return self.current_run

    def start_recording(self, ranks: Sequence[int], cell: Cell | None) -> ProfileRun | None:
        """Send the armed profile to the ranks; return None if there is none.

        Args:
            ranks: ranks to profile.
            cell: the cell that runs on them; None for the cell that is sent next.

        Raises:
            ProfileError: no rank can profile now.
        """
        run = self.current_run
        if run is None or not run.is_armed:
            return None
        run.ranks, run.text, run.cell = tuple(ranks), "profiling: warm-up", cell
        request = messages.ProfileRequest(
            id=run.id,
            ranks=list(ranks),
            cell="" if cell is None else cell.request_id,
            running=cell is not None,
            steps=run.options.steps,
            limit_s=MAX_PROFILE_S,
            trace="" if run.options.trace is None else str(run.options.trace),
            memory=run.options.memory,
        )
        try:
            replies: dict[int, messages.ProfileStartReply] = self._workers.request_all(
                ranks, messages.PROFILE, request, channel="control"
            )
        except BaseException:
            self.current_run = None
            raise
        refused = {
            rank: reply["error"] for rank, reply in replies.items() if reply["status"] == "refused"
        }
        run.refusals |= refused
        if len(refused) == len(run.ranks):
            self.current_run = None
            raise ProfileError(" ".join(run.take_refusal_notes()))
        return run

    def update_progress(self, text: str) -> None:
        """Store rank 0's progress; called on the reader thread."""
        if self.current_run is not None and not self.current_run.is_armed:
            self.current_run.text = text

    def add_rank_measurements(self, rank: int, content: messages.ProfileResult) -> None:
        """Store a rank's measurements; called on the reader thread."""
        with self._lock:
            run = self.current_run
            if run is None or run.id != content["id"]:
                return  # too late
            if "figures" in content:
                run.figures[rank] = RankProfile.from_json(content["figures"])
                run.first_result_at = run.first_result_at or time.monotonic()
            else:
                run.refusals[rank] = content["error"]
        self.tick()

    def tick(self) -> None:
        """Finish the profile if it is complete or overdue; called on the reader thread."""
        with self._lock:
            run = self.current_run
            if run is None or run.cell is None or run.is_building:
                return
            now = time.monotonic()
            if run.cell.finished.is_set():
                run.finished_at = run.finished_at or now
            is_overdue = (run.finished_at and now - run.finished_at > RESULT_TIMEOUT_S) or (
                run.first_result_at and now - run.first_result_at > OTHER_RANKS_TIMEOUT_S
            )
            if run.missing_ranks and not is_overdue:
                return
            run.refusals |= dict.fromkeys(run.missing_ranks, "no measurements received in time.")
            run.is_building, run.text = True, "profiling: analyzing"
        threading.Thread(target=self._end, args=(run,), name="nbdist-profile", daemon=True).start()

    def abort(self, reason: str) -> None:
        """Drop the profile in progress, because its ranks have ended; an armed one stays."""
        with self._lock:
            run = self.current_run
            if run is None or run.cell is None or run.is_building:
                return
            self.current_run = None
        run.cell.print_line(f"nbdist: no profile: {reason}")

    def _end(self, run: ProfileRun) -> None:
        """Build and show the profile; on its own thread, since it queries the ranks."""
        cell = run.cell
        assert cell is not None  # noqa: S101 - checked by `tick`
        try:
            if run.figures:
                profile = self.build_profile(run)
                self.profiles.append(profile)
                cell.show_bundle({"text/plain": str(profile), "text/html": profile._repr_html_()})
            else:
                cell.print_line(f"nbdist: no profile: {' '.join(run.take_refusal_notes())}")
        except Exception as error:  # noqa: BLE001 - must not disturb the training
            _log.exception("profile failed")
            cell.print_line(f"nbdist: the profile failed: {type(error).__name__}: {error}")
        finally:
            self.current_run = None
            self._workers.wake()  # lets the reader thread render output of background cells

    def show_pending(self, cell: Cell) -> None:
        """Wait for the profile of a finished cell and show it."""
        while (run := self.current_run) is not None and run.cell is cell:
            cell.render_pending(WAIT_S)
        cell.render_pending(0)

    def busy_reason(self) -> str:
        """Return why no other profile can be requested now; "" if one can."""
        if self.current_run is None or self.current_run.is_armed:
            return ""
        return (
            f"A profile is in progress ({self.current_run.text}). Wait for its result before"
            " starting another one."
        )
