"""What the kernel asks of whoever holds its ranks: one launcher here, or one on each of some nodes.

Pure. `local.Launcher` and `nodes.Nodes` are fleets; everything above is the same code for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from nbdist.cluster.allocation import Kind
    from nbdist.cluster.rank_channels import Channels, Reader
    from nbdist.hardware.discovery import Node
    from nbdist.hardware.telemetry import Now
    from nbdist.protocol import messages

Moved = Callable[[int, int], object]
"""Hears how many bytes of a file have come, and of how many."""
GONE = "gone"
"""Status of a process that has ended, or whose number is another's by now."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a session, and how it is."""

    pid: int
    status: str
    """As psutil names it, or `GONE`."""


@dataclass(frozen=True, slots=True)
class Left:
    """What processes that have ended left in the folder of their start."""

    crashes: dict[int, str] = field(default_factory=dict)
    """By rank: the stack that faulthandler wrote."""
    notes: list[tuple[int, str]] = field(default_factory=list)
    """Tracebacks of ranks that could not start, the oldest first."""


class Member(Protocol):
    """One rank's process."""

    @property
    def pid(self) -> int:
        """Its number, where it runs."""

    @property
    def created(self) -> float:
        """Its start time (psutil)."""


class Engine(Protocol):
    """Where fleets come from."""

    memory_events: Path | None
    """The OOM killer's counter; None: that of the kernel's own cgroup."""

    def check(self, world_size: int) -> None:
        """Refuse what cannot start; raises StartError."""

    def warm_up(self, kind: Kind) -> None:
        """Prepare for ranks of this kind."""

    def take(self, kind: Kind, world_size: int, progress: Callable[[str], None]) -> Fleet:
        """Hand over what can start so many ranks; the caller closes it. Raises StartError."""

    def close(self) -> None:
        """End what nobody took."""


class Fleet(Protocol):
    """Launchers that start ranks together. `listener` gets every message of theirs."""

    kind: Kind
    listener: Callable[[messages.LinkMessage], None]

    @property
    def warm(self) -> bool:
        """Whether ranks can be forked at once."""

    @property
    def alive(self) -> bool:
        """Whether it can start ranks."""

    def fits(self, kind: Kind, world_size: int) -> bool:
        """Whether it can start so many ranks of this kind."""

    def launch(self, launch: messages.Launch, key: str, reader: Reader) -> Channels:
        """Start ranks and open the channels to them.

        Args:
            launch: without folders.
            key: that signs messages.
            reader: gets them.

        Raises:
            StartError: a launcher is gone.
        """

    def send(self, message: messages.LinkMessage) -> None:
        """Send a message to the launchers.

        Raises:
            StartError: one is gone.
        """

    def wake_up(self) -> None:
        """Let launchers that are stopped go on."""

    def close(self) -> None:
        """End everything; a second call finds nothing."""

    def log_tail(self) -> str:
        """The end of what launchers and ranks wrote outside of cells."""

    def describe(self) -> list[dict[str, Any]]:
        """The launchers as plain values: pid, alive, name, node."""

    def node_of(self, rank: int) -> str:
        """The node of a rank, by name; "" on one machine."""

    def nodes(self, world_size: int) -> list[Node]:
        """The machines that so many ranks are on, with what they have; none for this one."""

    def now(self, within_s: float) -> dict[str, Now]:
        """What the nodes of the ranks hold and do, by name, of those that answer in this time."""

    def processes(self, members: Mapping[int, Member]) -> dict[str, Process]:
        """How ranks and launchers are, by name: "rank 1", "the launcher"."""

    def stacks(self, pids: Mapping[int, int], *, launchers: bool) -> dict[str, str]:
        """Python stacks of ranks, by signal: "rank1", and of "launcher" where wanted.

        Args:
            pids: by rank.
            launchers: whether theirs too.
        """

    def left(self) -> Left:
        """What the ranks of the last start have left."""

    @property
    def staging(self) -> list[Path]:
        """Where the kernel puts payload files, best first."""

    def folders(self, rank: int) -> list[str]:
        """Where a rank may write payload files, best first."""

    def shipped(
        self, file: Path, ranks: Sequence[int], told: Moved
    ) -> AbstractContextManager[dict[int, str]]:
        """Bring a file to ranks, which may be changed no more; gone at the end, here and there.

        Args:
            file: here.
            ranks: that shall have it.
            told: hears how far it is, where it has to go somewhere else.

        Yields:
            Its path, by rank.
        """

    def fetch(self, rank: int, path: str, told: Moved) -> Path:
        """Bring a payload file of a rank here; it is the caller's to delete.

        Args:
            rank: whose.
            path: where the rank has it.
            told: as of `shipped`.

        Raises:
            PayloadError: it lies outside of the session's own folders.
        """

    def see(self, folder: Path) -> None:
        """Make sure that all ranks see a folder that the kernel sees; it is made where it is none.

        Raises:
            CheckpointError: which node does not, or cannot write there.
        """

    def see_later(self, folder: Path, complain: Callable[[str], object]) -> None:
        """Look in the background whether all ranks see a folder, or what of its path there is.

        Args:
            folder: that may not be there yet.
            complain: gets the words of `see`, from any thread.
        """

    def private_folders(self) -> list[Path]:
        """Make empty folders that all ranks can write to, best first; the caller's to remove."""
