"""The wait for ranks that start: who is there, who is missing, why they never came.

Runs in the notebook's kernel, on the thread that starts the session.
"""

from __future__ import annotations

from dataclasses import dataclass
from queue import Empty
from typing import TYPE_CHECKING, Any

from nbdist import rank_sets as ranks_of
from nbdist.cluster import local
from nbdist.errors import StartError
from nbdist.protocol import messages
from nbdist.redaction import redacted
from nbdist.session import failure_causes, stacks

if TYPE_CHECKING:
    from collections.abc import Callable

    from nbdist.session.worker_group import Gang

START_S = 120.0
"""Without any sign of launcher or ranks for this long, a start has failed."""
IMPORT_S = 900.0
"""The same while the launcher imports, which takes minutes from a network disk."""
STILL_S = 5.0
"""How often a start that takes long says who is missing."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank's process."""

    pid: int
    created: float
    device: str


class Arrival:
    """One start of ranks.

    Args:
        gang: that starts them; its channels are open.
        world_size: how many.
        progress: gets what is waited for, as text.
    """

    def __init__(self, gang: Gang, world_size: int, progress: Callable[[str], None]) -> None:
        """Wait for nothing yet."""
        self._gang, self._world_size, self._progress = gang, world_size, progress
        self._joined: dict[int, Member] = {}

    def wait(self) -> list[Member]:
        """Return once each rank's output is heard and each rank has passed the barrier.

        Raises:
            StartError: who ended and how, or that nothing was heard; with what it said.
        """
        gang, world = self._gang, range(self._world_size)
        gang.post(world, "shell", messages.JOIN, {}, lambda *sign: gang.signs.put(sign))
        gang.wake()
        heard: set[int] = set()
        while len(heard) < len(world) or len(self._joined) < len(world):
            match self._next_sign():
                case messages.Progress(text=text):
                    self._progress(text)
                case messages.Warm():
                    self._progress("starting the ranks")
                case messages.Ended(generation=gang.generation | local.LAUNCHER_GONE) as ended:
                    raise StartError(self._why(ended))
                case messages.RankEnded(generation=gang.generation, code=int()):
                    raise StartError(self._why(None))
                case int(rank):
                    heard.add(rank)
                case (int(rank), "shell", message):
                    self._joined[rank] = Member(**message["content"])
        return [self._joined[rank] for rank in world]

    def _next_sign(self) -> Any:
        """Wait for a sign of launcher or ranks; say what is missing if that takes long."""
        waited = 0.0
        while waited < (patience_s := START_S if self._gang.warm else IMPORT_S):
            try:
                return self._gang.signs.get(timeout=STILL_S)
            except Empty:
                waited += STILL_S
            if self._gang.ends:  # torch elastic was quicker, and is silent about code 0
                raise StartError(self._why(None))
            self._progress(f"{self._missing()} for {waited:.0f} s")
        msg = (
            f"The ranks gave no sign for {patience_s:.0f} s. {self._gang.log_words()}\n"
            f"What the processes are doing:\n{stacks.of_start(self._gang)}"
        )
        raise StartError(msg)

    def _missing(self) -> str:
        """What a start waits for."""
        if not self._gang.warm:
            return "the launcher warms up"
        missing = set(range(self._world_size)) - self._joined.keys()
        return f"starting the ranks; nothing heard of {ranks_of.words(sorted(missing))}"

    def _why(self, ended: messages.Ended | None) -> str:
        death = self._gang.death(ended)
        notes = self._gang.left().notes
        if death.rank is not None:  # what it wrote itself says more than a peer's
            notes = sorted(notes, key=lambda note: note[0] != death.rank)
        said = redacted(notes[0][1]) if notes else ""
        detail = f"It said:\n{said}" if said else self._gang.log_words()
        stack = failure_causes.stack_words(death.stack, {})
        stack = f" It was at (innermost first):\n{stack}\n" if stack else " "
        return f"The ranks did not start: {death.said}.{stack}{detail}"
