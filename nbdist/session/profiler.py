"""Profiles of a session: asked for, collected from the ranks, shown below the cell.

Runs in the notebook's kernel, without torch. What is asked for while no cell runs waits here and
goes to the ranks with the next cell, so that nothing of it outlives a cell on a rank.
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

from nbdist import rank_sets as rank_names
from nbdist.errors import OptionError, ProfileError
from nbdist.paths import expanded
from nbdist.profiler.measurements import RankFigures
from nbdist.protocol import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nbdist.profiler.report import Profile
    from nbdist.session.cell import Cell
    from nbdist.session.worker_group import Gang

    Judge = Callable[["Profiling"], Profile]

LIMIT_S = 30.0
"""The longest window."""
MOST_STEPS = 1000
LATE_S = 3.0
"""After the end of its cell, what a rank has measured is waited for so long."""
OTHERS_S = 15.0
"""After the first rank's figures, those of the others are waited for so long."""
WAIT_S = 0.05

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a profile is asked for with."""

    steps: int | None = None
    """Of the window; None: until the figures are stable."""
    trace: Path | None = None
    """Folder for the traces of all ranks."""
    memory: bool = True

    @classmethod
    def given(cls, profile: object) -> Self | None:
        """Read what `Session.run` is given as `profile`; None: no profile.

        Raises:
            OptionError: neither a truth nor the arguments of `of`, or one of these is not allowed.
        """
        if profile is None or profile is False:
            return None
        known = [one.name for one in fields(cls)]
        if profile is True:
            return cls.of()
        if isinstance(profile, Mapping) and profile.keys() <= set(known):
            return cls.of(**profile)
        message = (
            f"profile={profile!r}: give True, False, or a dict of {', '.join(known)}, as"
            ' profile={"steps": 10}.'
        )
        raise OptionError(message)

    @classmethod
    def of(
        cls,
        steps: int | None = None,
        trace: str | os.PathLike[str] | None = None,
        memory: bool = True,  # noqa: FBT001, FBT002 - as Session.profile has it
    ) -> Self:
        """Check what is asked for, and make the folder.

        Raises:
            OptionError: a number of steps that no window can have, a folder that cannot be
                written.
        """
        if steps is not None and (type(steps) is not int or not 1 <= steps <= MOST_STEPS):
            message = (
                f"--steps {steps}: a profile takes 1 to {MOST_STEPS} optimizer steps; leave it"
                " out to stop when the figures are stable."
            )
            raise OptionError(message)
        _check_types(trace, memory)
        folder = None if trace is None else Path.cwd() / expanded(trace)
        if folder is not None:
            _check_writable(folder)
        return cls(steps=steps, trace=folder, memory=memory)


def _check_types(trace: object, memory: object) -> None:
    """Raise OptionError for what is no folder's name, or no truth."""
    if not isinstance(trace, (str, os.PathLike, NoneType)) or trace == "":
        message = f"--trace {trace!r}: name a folder for the traces, or leave it out."
        raise OptionError(message)
    if not isinstance(memory, bool):
        message = f"memory={memory!r}: give True or False."
        raise OptionError(message)


def _check_writable(folder: Path) -> None:
    """Make a folder for traces; raises OptionError where that or writing there fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        message = (
            f"--trace {folder}: traces cannot be written there ({error.strerror or error}); name"
            " a folder that can be written."
        )
        raise OptionError(message) from None


@dataclass(slots=True, kw_only=True)
class Profiling:
    """One profile, from being asked for to its verdict."""

    wish: Wish
    since: float = field(default_factory=time.time)
    """Unix seconds."""
    replaces: bool = False
    """Another one that waited for its cell is forgotten."""
    cell: Cell | None = None
    """That is profiled; None as long as the next one is waited for."""
    sources: Sequence[tuple[str, str]] = ()
    """Code of the last cells, the profiled one last: "In[3]" and its text."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    ranks: tuple[int, ...] = ()
    text: str = ""
    """How far it is."""
    figures: dict[int, RankFigures] = field(default_factory=dict)
    refusals: dict[int, str] = field(default_factory=dict)
    """Why ranks have no figures, a sentence each."""
    first_at: float = 0.0
    """When the first rank had told its figures, by the monotonic clock."""
    over_at: float = 0.0
    """When its cell was first seen to be over."""
    judging: bool = False

    @property
    def armed(self) -> bool:
        """Whether the next cell will be profiled."""
        return self.cell is None

    @property
    def share(self) -> float | None:
        """Done, from 0 to 1, where that is known."""
        known = self.text.rpartition(" ")[2]
        if self.wish.steps is None or not known.isdigit():
            return None
        return min(1.0, int(known) / self.wish.steps)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that have told nothing yet."""
        return tuple(sorted(set(self.ranks) - self.figures.keys() - self.refusals.keys()))

    @property
    def late(self) -> bool:
        """Whether who has told nothing yet is waited for no more."""
        now = time.monotonic()
        after_cell = self.over_at and now - self.over_at > LATE_S
        return bool(after_cell or (self.first_at and now - self.first_at > OTHERS_S))

    def refused(self) -> list[str]:
        """Say once why ranks have no figures."""
        reasons: dict[str, list[int]] = {}
        for rank, why in sorted(self.refusals.items()):
            reasons.setdefault(why, []).append(rank)
        return [f"{rank_names.words(ranks)}: {why}" for why, ranks in reasons.items()]

    def __str__(self) -> str:
        """Say what happens now."""
        instead = " It takes the place of the profile that waited." if self.replaces else ""
        if self.cell is None:
            return f"the next %%distribute cell is profiled; its verdict appears below it.{instead}"
        return (
            f"the cell In[{self.cell.count}] is profiled while it runs; the verdict appears below"
            f" that cell, and %nbdist profile --show repeats it.{instead}"
        )


class Profiler:
    """The profiles of one session, one at a time."""

    def __init__(self, gang: Gang, judge: Judge) -> None:
        """Profile nothing yet; `judge` puts the ranks' figures together, on a thread of its own."""
        self.now: Profiling | None = None
        """What is armed or under way."""
        self.done: list[Profile] = []
        self._gang = gang
        self._judge = judge
        self._lock = threading.Lock()

    def arm(self, wish: Wish) -> Profiling:
        """Have the next cell profiled; a wish that waits already is replaced.

        Raises:
            ProfileError: a profile is under way.
        """
        with self._lock:
            if busy := self.why_busy():
                raise ProfileError(busy)
            self.now = Profiling(
                wish=wish,
                text="armed: the next cell is profiled",
                replaces=self.now is not None,
            )
            return self.now

    def begin(self, ranks: Sequence[int], cell: Cell | None) -> Profiling | None:
        """Tell the ranks what waits: `cell` runs on them, or the next one; None: nothing waits.

        Raises:
            ProfileError: no rank can profile now.
        """
        one = self.now
        if one is None or not one.armed:
            return None
        one.ranks, one.text, one.cell = tuple(ranks), "profiling: warm-up", cell
        replies: dict[int, messages.ProfileReply] = {}
        try:
            for rank in ranks:
                request = self._request(one, rank)
                replies |= self._gang.ask([rank], messages.PROFILE, request, channel="control")
        except BaseException:
            self.now = None
            raise
        refused = {
            rank: reply["error"] for rank, reply in replies.items() if reply["status"] == "refused"
        }
        one.refusals |= refused
        if len(refused) == len(one.ranks):
            self.now = None
            raise ProfileError(" ".join(one.refused()))
        return one

    def _request(self, one: Profiling, rank: int) -> messages.ProfileRequest:
        return messages.ProfileRequest(
            id=one.id,
            ranks=list(one.ranks),
            cell="" if one.cell is None else one.cell.requests[rank],
            running=one.cell is not None,
            steps=one.wish.steps,
            limit_s=LIMIT_S,
            trace="" if one.wish.trace is None else str(one.wish.trace),
            memory=one.wish.memory,
        )

    def hear(self, text: str) -> None:
        """Take how far rank 0 is; on the reader thread."""
        if self.now is not None and not self.now.armed:
            self.now.text = text

    def receive(self, rank: int, content: messages.Profiled) -> None:
        """Take what a rank has measured; on the reader thread."""
        with self._lock:
            one = self.now
            if one is None or one.id != content["id"]:
                return  # it came too late
            if "figures" in content:
                one.figures[rank] = RankFigures.from_json(content["figures"])
                one.first_at = one.first_at or time.monotonic()
            else:
                one.refusals[rank] = content["error"]
        self.tick()

    def tick(self) -> None:
        """End the profile that is complete or late; on the reader thread, now and then."""
        with self._lock:
            one = self.now
            if one is None or one.cell is None or one.judging:
                return
            if one.cell.finished.is_set():
                one.over_at = one.over_at or time.monotonic()
            if one.missing and not one.late:
                return
            one.refusals |= dict.fromkeys(one.missing, "it has not told what it measured.")
            one.judging, one.text = True, "profiling: judging"
        threading.Thread(target=self._end, args=(one,), name="nbdist-profile", daemon=True).start()

    def give_up(self, why: str) -> None:
        """Forget the profile that is under way: its ranks are gone. A wish stays."""
        with self._lock:
            one = self.now
            if one is None or one.cell is None or one.judging:
                return
            self.now = None
        one.cell.tell(f"nbdist: nothing was profiled: {why}")

    def _end(self, one: Profiling) -> None:
        """Judge and show; on a thread of its own, since the ranks are asked about the model."""
        cell = one.cell
        assert cell is not None  # noqa: S101 - `tick` has seen it
        try:
            if one.figures:
                profile = self._judge(one)
                self.done.append(profile)
                cell.show(shown(profile))
            else:
                cell.tell(f"nbdist: nothing was profiled: {' '.join(one.refused())}")
        except Exception as error:  # noqa: BLE001 - the training goes on, and the user is told
            _log.exception("no verdict")
            cell.tell(f"nbdist: the profile has no verdict: {type(error).__name__}: {error}")
        finally:
            self.now = None
            self._gang.wake()  # the reader thread shows what belongs to a cell in the background

    def show_owed(self, cell: Cell) -> None:
        """Let a cell that is over end with its verdict."""
        while self._owes(cell):
            cell.pump(WAIT_S)
        cell.pump(0)

    def _owes(self, cell: Cell) -> bool:
        one = self.now
        return one is not None and one.cell is cell

    def why_busy(self) -> str:
        """Why no other profile can be asked for now; "" where it can."""
        if self.now is None or self.now.armed:
            return ""
        return (
            f"a profile is under way ({self.now.text}); its verdict comes first, then ask for the"
            " next one."
        )


def shown(profile: Profile) -> dict[str, str]:
    """A profile as a mime bundle."""
    return {"text/plain": str(profile), "text/html": profile._repr_html_()}
