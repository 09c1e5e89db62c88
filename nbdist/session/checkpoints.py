"""Checkpoints as the notebook's kernel sees them: save, list and load; without torch."""

from __future__ import annotations

import atexit
import math
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, overload

from nbdist import checkpoint
from nbdist.checkpoint import CheckpointSummary, Url, UrlStorage, name_validation
from nbdist.display import show_as_text
from nbdist.errors import CheckpointError
from nbdist.number_formatting import format_bytes
from nbdist.output.sink import finished_cell
from nbdist.protocol.operations import SAVE
from nbdist.session.collective_request import CollectiveRequest
from nbdist.session.progress import StatusLine

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    import torch

    from nbdist.checkpoint import PendingCheckpoint
    from nbdist.protocol import messages
    from nbdist.protocol.operations import SaveRequest
    from nbdist.session.worker_group import WorkerGroup

DEFAULT_FOLDER = "checkpoints"
"""Default root of checkpoints, next to the notebook."""
MAX_FINISHED_SAVES = 16
"""Number of finished saves to keep, so that memory does not grow with each save."""
FINISH_TIMEOUT_S = 60.0
"""Timeout for running saves when a session ends."""
PROGRESS_INTERVAL_S = 0.5
EXIT_TIMEOUT_S = 4.0
"""The same when the notebook's kernel exits: Jupyter kills it after five seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(CheckpointSummary):
    """A complete checkpoint on disk or at a URL.

    Attributes:
        step: optimizer steps taken.
        backend: backend that wrote it; any backend can load it.
    """

    seconds: float | None = None
    """Time that this session took to write it; None if another session wrote it."""

    @classmethod
    def of(cls, entry: CheckpointSummary, seconds: float | None = None) -> Checkpoint:
        """Create from a catalog entry."""
        return cls(
            seconds=seconds, **{item.name: getattr(entry, item.name) for item in fields(entry)}
        )

    def state_dict(self, prefix: str = "model.") -> dict[str, torch.Tensor]:
        """Return unsharded CPU tensors by name; imports torch.

        A tensor that is contiguous in one file is memory-mapped and read on access; writes to it
        stay in this process. Needs no session.

        Args:
            prefix: "model." for weights and buffers, "optim.state." for optimizer state.

        Raises:
            CheckpointError: the checkpoint was removed, or a file is damaged.
        """
        from nbdist.state import shard_io

        if not isinstance(self.path, Url):
            return shard_io.read_state_dict(self.path, prefix)
        with tempfile.TemporaryDirectory(prefix="nbdist-") as folder:
            download = checkpoint.CheckpointDownload(self.path, Path(folder))
            download.fetch({file.name for file in download.manifest.files})
            return shard_io.read_state_dict(download.folder, prefix)

    def __str__(self) -> str:
        took = f" in {self.seconds:.1f} s" if self.seconds is not None else ""
        took += f", from a run ended by {self.ended}" if self.ended else ""
        when = self.created.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        return (
            f"{self.name}: step {self.step}, {format_bytes(self.size_bytes)}, {self.backend},"
            f" {when}{took}"
        )


class Save:
    """A background save, running or finished."""

    def __init__(self) -> None:
        self.name = ""
        self.root: Path | Url = Path()
        self.error = ""
        """Why it failed; "" if it did not."""
        self.notes: tuple[str, ...] = ()
        """What the checkpoint does not contain."""
        self.removed: tuple[str, ...] = ()
        """Older checkpoints removed because of `keep`."""
        self.seconds = self.pause_s = 0.0
        self.path: Path | Url | None = None
        self.checkpoint: Checkpoint | None = None
        self.started_at = time.time()
        """Unix time in seconds."""
        self.size_bytes = 0
        """Estimated size of all ranks' files; 0 if not known yet."""
        self._draft: PendingCheckpoint | None = None
        self._over = threading.Event()
        self._watchers: list[Callable[[Save], object]] = []
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """True if the save has finished or failed."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> Checkpoint:
        """Wait until the checkpoint is complete, and return it.

        Raises:
            CheckpointError: the save failed; no files remain.
            TimeoutError: the save is still running.
        """
        if not self._over.wait(timeout_s):
            message = f"Saving checkpoint {self.name} did not finish within {timeout_s:g} s."
            raise TimeoutError(message)
        if self.error or self.path is None:
            raise CheckpointError(f"Checkpoint {self.name} was not saved: {self.error}")
        entries = checkpoint.storage_for(self.root).list_checkpoints()
        checkpoint_entry = next((entry for entry in entries if entry.name == self.name), None)
        if checkpoint_entry is None:
            raise CheckpointError(f"Checkpoint {self.name} was saved but has been removed since.")
        return Checkpoint.of(checkpoint_entry, self.seconds)

    def wait_shown(self, timeout_s: float = math.inf) -> Checkpoint:
        """Wait until the checkpoint is complete, and show progress below the cell.

        Raises:
            CheckpointError: the save failed; no files remain.
            TimeoutError: the save is still running.
        """
        deadline = time.monotonic() + timeout_s
        with StatusLine() as line:
            while not self._over.wait(PROGRESS_INTERVAL_S) and time.monotonic() < deadline:
                line.show(self.how_far)
        return self.wait(0)

    @property
    def how_far(self) -> str:
        """Progress as text, with the written fraction if known."""
        text, written = f"writing checkpoint {self.name}", self.written_bytes
        if written is None or not self.size_bytes:
            return text
        return f"{text}, {min(written / self.size_bytes, 1.0):.0%}"

    @property
    def written_bytes(self) -> int | None:
        """Current size of all ranks' files; None if it is not known."""
        if self._draft is None or self.done:
            return 0
        try:
            return self._draft.written_bytes()
        except (OSError, CheckpointError):
            return 0  # it has just been renamed into place

    def watch(self, watcher: Callable[[Save], object]) -> None:
        """Call `watcher` when the save has finished, on any thread; immediately if it has."""
        with self._lock:
            if not self.done:
                self._watchers.append(watcher)
                return
        watcher(self)

    def receive(self, content: messages.SaveStatus) -> None:
        """Update from a status message of rank 0."""
        self.name, self.root = content["name"], checkpoint.parse_location(content["root"])
        self.seconds, self.pause_s = content["seconds"], content["pause_s"]
        self.size_bytes = content.get("size_bytes", self.size_bytes)
        self._draft = checkpoint.storage_for(self.root).attach(self.name, content["id"])
        if content["state"] == "done":
            self.path = checkpoint.parse_location(content["path"])
            self.checkpoint = Checkpoint(
                name=self.name,
                step=content["step"],
                size_bytes=content["size_bytes"],
                backend=content["backend"],
                created=datetime.now(UTC),
                path=self.path,
                ended=content.get("ended", ""),
                seconds=self.seconds,
            )
            self.notes, self.removed = tuple(content["notes"]), tuple(content["removed"])
        if content["state"] != "running":
            self.end(content.get("error", ""))

    def discard(self) -> None:
        """Remove partial files, after all writers have stopped."""
        if self._draft is not None:
            self._draft.abort()

    def end(self, error: str) -> None:
        """Mark the save as finished; with a nonempty `error` as failed."""
        with self._lock:
            if self.done:
                return
            self.error = error
            self._over.set()
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher(self)

    def __str__(self) -> str:
        pause = f"training paused {self.pause_s:.2f} s"
        where = "" if self.root == Path.cwd() / DEFAULT_FOLDER else f" to {self.root}"
        if not self.done:
            return f"{self.name}: being written{where}; {pause}"
        if self.error:
            return f"{self.name} was not saved: {self.error}"
        lines = [f"{self.name}: saved in {self.seconds:.1f} s{where}; {pause}"]
        lines += [f"  removed: {', '.join(self.removed)}"] if self.removed else []
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    _repr_pretty_ = show_as_text


class Checkpoints(Sequence[Checkpoint]):
    """The complete checkpoints of a folder or URL, newest last; a live view.

    The folder need not exist.
    """

    def __init__(self, root: Path | Url) -> None:
        self.root = root
        self.failed_saves: deque[Save] = deque(maxlen=MAX_FINISHED_SAVES)
        """The last saves of this session that failed."""
        self._seconds: dict[Path | Url, float] = {}
        self._seen: tuple[Path, int] | None = None
        self._entries: list[Checkpoint] = []
        self.list_error = ""
        """Why a URL could not be listed; the previous list is used then."""

    def set_root(self, root: Path | Url) -> None:
        """Change the folder or URL."""
        if root != self.root:
            self.root, self.list_error = root, ""
            self._seen, self._entries = None, []

    def _now(self) -> list[Checkpoint]:
        """List the checkpoints; a folder is read again only if its mtime changed."""
        if isinstance(self.root, Url):
            try:
                entries = checkpoint.storage_for(self.root).list_checkpoints()
            except CheckpointError as error:
                self.list_error = str(error)
                return self._entries
            self.list_error = ""
        else:
            try:
                stamp = self.root, self.root.stat().st_mtime_ns
            except OSError:
                return []
            if stamp == self._seen:
                return self._entries
            self._seen = stamp
            entries = checkpoint.storage_for(self.root).list_checkpoints()
        self._entries = [Checkpoint.of(entry, self._seconds.get(entry.path)) for entry in entries]
        return self._entries

    @property
    def cached(self) -> list[Checkpoint]:
        """The same, without a request for a URL: what was listed before or saved since."""
        return list(self._entries) if isinstance(self.root, Url) else list(self._now())

    def newest(self, *, within_s: float) -> Checkpoint | None:
        """Return the newest checkpoint, or None.

        If reading takes longer than `within_s`, the previous list is used.
        """
        read: list[list[Checkpoint]] = []
        reading = threading.Thread(target=lambda: read.append(self.cached), daemon=True)
        reading.start()
        reading.join(within_s)
        return next(reversed(read[0] if read else self._entries), None)

    def add_save(self, save: Save) -> None:
        """Record a finished save."""
        if save.error:
            self.failed_saves.append(save)
        elif save.path is not None:
            self._seconds[save.path] = save.seconds
            self._seen = None
            if save.root == self.root and (saved := save.checkpoint) is not None:
                others = [
                    other
                    for other in self._entries
                    if other.name not in {saved.name, *save.removed}
                ]
                self._entries = [*others, saved]

    @overload
    def __getitem__(self, which: int | str) -> Checkpoint: ...
    @overload
    def __getitem__(self, which: slice) -> Sequence[Checkpoint]: ...
    def __getitem__(self, which: int | str | slice) -> Checkpoint | Sequence[Checkpoint]:
        """Return one checkpoint by position or name, or a slice.

        Raises:
            IndexError: no such position.
            KeyError: no such name.
        """
        if not isinstance(which, str):
            return self._now()[which]
        match = next((item for item in self._now() if item.name == which), None)
        if match is None:
            raise KeyError(which)
        return match

    def __len__(self) -> int:
        """Return the number of checkpoints."""
        return len(self._now())

    def __iter__(self) -> Iterator[Checkpoint]:
        """Iterate over the checkpoints, newest last."""
        return iter(list(self._now()))

    def __repr__(self) -> str:
        number = len(self)
        lines = [f"{self.root}: {number} checkpoint{'s' * (number != 1)}"]
        lines += [f"  {item}" for item in self.cached]
        lines += [f"  {self.list_error}"] if self.list_error else []
        lines += [f"  {save}" for save in self.failed_saves]
        return "\n".join(lines)


class BackgroundSaves:
    """All saves of a session.

    Args:
        root: folder or URL of all checkpoints. Default: "checkpoints" in the working directory.

    Raises:
        CheckpointError: as `check_root`.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self._user_root = None if root is None else check_root(root)
        self._default_root = Path.cwd() / DEFAULT_FOLDER
        self.checkpoints = Checkpoints(self._user_root or self._default_root)
        self.last_seconds: float | None = None
        """Time of the last save of this session."""
        self._saves: dict[str, Save] = {}
        self._lock = threading.Lock()

    @property
    def root_for_ranks(self) -> str:
        """The root that is sent to the ranks; "" for the default."""
        return "" if self._user_root is None else checkpoint.location_with_password(self._user_root)

    def use_working_folder(self) -> None:
        """Update the default root to the current working directory, when ranks start."""
        self._default_root = Path.cwd() / DEFAULT_FOLDER
        self.checkpoints.set_root(self._user_root or self._default_root)

    def set_root(self, root: str | os.PathLike[str] | None) -> None:
        """Change the root; arguments as for the class."""
        self._user_root = None if root is None else check_root(root)
        self.checkpoints.set_root(self._user_root or self._default_root)

    def update_status(self, content: messages.SaveStatus) -> None:
        """Update a save from a status message of rank 0; called on the reader thread."""
        with self._lock:
            save = self._saves.setdefault(content["id"], Save())
        if content["state"] == "running":
            # Registered after the launcher's handler, so that this one is called first.
            atexit.unregister(self.wait_for_running)
            atexit.register(self.wait_for_running, EXIT_TIMEOUT_S)
        save.receive(content)
        if save.done:
            self.last_seconds = self.last_seconds if save.error else save.seconds
            self.checkpoints.add_save(save)
            with self._lock:  # keep the last ones: `start_save` may ask for a save after its end
                finished = [number for number, other in self._saves.items() if other.done]
                for number in finished[:-MAX_FINISHED_SAVES]:
                    del self._saves[number]
            if not self.running_saves():
                atexit.unregister(self.wait_for_running)

    def start_save(self, request: SaveRequest, workers: WorkerGroup) -> Save:
        """Have the ranks copy their state and start to write it.

        Raises:
            CheckpointError: nothing was written.
        """
        with StatusLine(f"checkpoint {name_validation.check_name(request.name)}") as line:
            reports = CollectiveRequest(workers, SAVE, line.show).run(request)
        with self._lock:
            save = self._saves.setdefault(reports[0].id, Save())
        if not save.name:
            save.name, save.root = request.name, checkpoint.parse_location(request.root)
        return save

    def running_saves(self) -> list[Save]:
        """Return the saves that have not finished."""
        with self._lock:
            return [save for save in self._saves.values() if not save.done]

    def wait_for_running(self, within_s: float = FINISH_TIMEOUT_S) -> None:
        """Wait for running saves before the ranks are ended; an interrupt ends the wait."""
        for save in self.running_saves():
            with suppress(TimeoutError, CheckpointError, KeyboardInterrupt):
                if not save.done:
                    save.wait_shown(within_s)

    def fail_running(self, reason: str) -> None:
        """Mark running saves as failed, because their ranks have ended."""
        for save in self.running_saves():
            save.end(reason)
            self.checkpoints.add_save(save)

    def remove_partial_saves(self) -> None:
        """Remove the files of failed saves, after the ranks have ended."""
        for save in self.checkpoints.failed_saves:
            if isinstance(save.root, Url):
                save.discard()
            elif save.root.is_dir():
                checkpoint.FolderStorage(save.root).remove_abandoned()


def show_when_done(save: Save) -> None:
    """Print the result of a save below the current cell, once it has finished."""
    screen = finished_cell()

    def show(over: Save) -> None:
        screen.write("stderr" if over.error else "stdout", f"nbdist: checkpoint {over}\n")
        screen.flush()

    save.watch(show)


def check_writable_async(url: Url, on_warning: Callable[[str], object]) -> None:
    """Check in the background that checkpoints can be written to a URL."""

    def prove() -> None:
        try:
            UrlStorage(url).check_writable()
        except CheckpointError as error:
            on_warning(str(error))

    threading.Thread(target=prove, name="nbdist-url", daemon=True).start()


def checkpoint_hint(checkpoint: Checkpoint | None) -> str:
    """Return how to continue from a checkpoint; "" for None."""
    if checkpoint is None:
        return ""
    return (
        f"The last checkpoint is {checkpoint.name!r} at step {checkpoint.step}: use %nbdist"
        f" restart, run the cell that calls prepare(), then %nbdist load {checkpoint.name}."
    )


def resume_hint(checkpoint: Checkpoint | None) -> str:
    """Return how to resume a run that was ended from outside; "" for any other checkpoint."""
    if checkpoint is None or not checkpoint.ended:
        return ""
    return (
        f"Checkpoint {checkpoint.name} at step {checkpoint.step} is from a run ended"
        f" by {checkpoint.ended}: prepare the model, then use %nbdist resume"
    )


def parse_root(root: str | os.PathLike[str]) -> Path | Url:
    """Parse a folder or URL; a folder is made absolute.

    Raises:
        CheckpointError: it is empty.
    """
    if isinstance(root, str) and not root.strip():
        raise CheckpointError(
            f"Invalid checkpoint folder {root!r}. Use a folder such as checkpoints, or a URL such"
            " as s3://bucket/path."
        )
    return checkpoint.parse_location(root, Path.cwd())


def check_root(root: str | os.PathLike[str]) -> Path | Url:
    """Parse a folder or URL and check that it is supported.

    Raises:
        CheckpointError: empty, a URL that fsspec does not support, or whose package is missing.
    """
    where = parse_root(root)
    if isinstance(where, Url):
        where.open_filesystem()
    return where
