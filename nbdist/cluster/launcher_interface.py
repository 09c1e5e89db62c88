"""Interfaces of the session to its launchers: one on this machine, or one on each of several nodes.

``local_launcher.Launcher`` and ``node_group.NodeGroup`` implement ``LauncherGroup``, so that all
code above is the same for both. What a method returns here is right for ranks on this machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nbdist.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from nbdist.cluster.allocation import DeviceType
    from nbdist.cluster.rank_channels import MessageListener, RankChannels
    from nbdist.cluster.run_dir import RunDir
    from nbdist.hardware.discovery import SessionNode
    from nbdist.hardware.telemetry import NodeUsage
    from nbdist.protocol import messages
    from nbdist.rank_python import RankPython

TransferCallback = Callable[[int, int], object]
"""Called with the number of bytes transferred and the total."""
EXITED = "gone"
"""Status of a process that has ended, or whose id was reused."""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """A process of a session and its status."""

    pid: int
    status: str
    """psutil's status, or ``EXITED``."""


@dataclass(frozen=True, slots=True)
class CrashArtifacts:
    """Files that ended processes have left in the folder of their start."""

    crashes: dict[int, str] = field(default_factory=dict)
    """Stack written by faulthandler, by rank."""
    notes: list[tuple[int, str]] = field(default_factory=list)
    """Tracebacks of ranks that failed to start, oldest first."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Process of one rank."""

    pid: int
    """Process id on the rank's machine."""
    created: float
    """Start time (psutil)."""
    device: str


class LauncherProvider(ABC):
    """Provides launcher groups."""

    def check_limits(self, world_size: int) -> None:  # noqa: B027
        """Check the limits of this machine; raises StartError. By default there are none."""

    @abstractmethod
    def acquire_launchers(
        self,
        kind: DeviceType,
        world_size: int,
        progress: Callable[[str], None],
        python: RankPython,
    ) -> LauncherGroup:
        """Return launchers for this many ranks, to be closed by the caller; raises StartError."""


class LauncherGroup(Protocol):
    """Launchers that start ranks together. `listener` is called with all their messages."""

    kind: DeviceType
    listener: Callable[[messages.LauncherMessage], None]
    run_dir: RunDir

    @property
    def is_warm(self) -> bool:
        """True if ranks can be forked without delay."""

    @property
    def is_alive(self) -> bool:
        """True if it can start ranks."""

    def can_start(self, kind: DeviceType, world_size: int) -> bool:
        """Return True if it can start this many ranks of this kind."""

    def launch(
        self, launch: messages.LaunchRanksRequest, key: str, reader: MessageListener
    ) -> RankChannels:
        """Start ranks and open the channels to them.

        Args:
            launch: the launch message, without folders.
            key: key that signs messages.
            reader: receives the ranks' messages.

        Raises:
            StartError: a launcher has ended.
        """

    def send(self, message: messages.LauncherMessage) -> None:
        """Send a message to the launchers.

        Raises:
            StartError: a launcher has ended.
        """

    def resume_stopped(self) -> None:
        """Resume stopped launchers."""

    def close(self) -> None:
        """End everything. A second call does nothing."""

    def log_tail(self) -> str:
        """Return the end of the output of launchers and ranks outside of cells."""

    def describe(self) -> list[dict[str, Any]]:
        """Return the launchers as JSON values: pid, alive, name, node."""

    def node_of(self, rank: int) -> str:  # noqa: ARG002 - one machine
        """Return the name of a rank's node; "" on one machine."""
        return ""

    def nodes_for(self, world_size: int) -> list[SessionNode]:  # noqa: ARG002 - one machine
        """Return the machines of this many ranks with their hardware; empty for this machine."""
        return []

    def node_usage(self, within_s: float) -> dict[str, NodeUsage]:  # noqa: ARG002 - no nodes
        """Return the usage of the ranks' nodes by name, of those that respond in time."""
        return {}

    def process_statuses(self, members: Mapping[int, RankProcess]) -> dict[str, ProcessStatus]:
        """Return the status of ranks and launchers, by name: "rank 1", "the launcher"."""

    def dump_stacks(self, pids: Mapping[int, int], *, launchers: bool) -> dict[str, str]:
        """Dump Python stacks by signal: of ranks ("rank1") and optionally of "launcher".

        Args:
            pids: process ids by rank.
            launchers: True to include the launchers.
        """

    def crash_artifacts(self) -> CrashArtifacts:
        """Return the crash artifacts of the last ranks."""

    def payload_folders(self, rank: int) -> list[str]:  # noqa: ARG002 - those of the kernel
        """Return the folders for a rank's payload files, preferred first."""
        return [str(folder) for folder in self.run_dir.folders]

    def check_payload_path(self, rank: int, path: str) -> None:
        """Raise PayloadError if a path that a rank has sent is outside its payload folders."""
        if str(Path(path).parent) not in self.payload_folders(rank):
            raise PayloadError(
                f"A rank sent the path {path}, which is outside this session's folders."
            )

    def ship_file(
        self, file: Path, ranks: Sequence[int], on_progress: TransferCallback
    ) -> AbstractContextManager[dict[int, str]]:
        """Copy a file to ranks. The copies are read-only; all are removed at the end.

        Args:
            file: the file on this machine.
            ranks: ranks that need it.
            on_progress: called with the progress of a transfer to other machines.

        Yields:
            Its path, by rank.
        """

    def fetch_file(self, rank: int, path: str, on_progress: TransferCallback) -> Path:
        """Copy a payload file of a rank to this machine; the caller deletes it.

        Args:
            rank: the rank.
            path: path of the file on the rank's machine.
            on_progress: called with the progress, as in ``ship_file``.

        Raises:
            PayloadError: the path is outside the session's folders.
        """

    def check_shared_folder(self, folder: Path) -> None:
        """Check that all ranks can use a folder that the kernel uses; create it if needed.

        Raises:
            CheckpointError: names a node that does not have it or cannot write to it.
        """

    def check_shared_folder_async(self, folder: Path, on_warning: Callable[[str], object]) -> None:
        """Check a folder, or its existing parent, on all nodes in the background.

        Args:
            folder: the folder, which may not exist yet.
            on_warning: called with the error message, from any thread.
        """

    def make_private_folders(self) -> list[Path]:
        """Create empty folders that all ranks can write to, preferred first; caller removes."""
