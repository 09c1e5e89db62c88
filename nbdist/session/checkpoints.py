"""Checkpoints as the notebook's kernel sees them: begun, listed, loaded; without torch."""

from __future__ import annotations

import atexit
import math
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from nbdist import checkpoint
from nbdist.checkpoint import Remote, Url, names
from nbdist.errors import CheckpointError
from nbdist.operations.switch import size
from nbdist.output.sink import PinnedScreen
from nbdist.output.status_line import StatusLine
from nbdist.paths import expanded
from nbdist.protocol import messages
from nbdist.session.recovery import Transaction

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from nbdist.checkpoint import Draft, Entry
    from nbdist.session.worker_group import Gang

    Listen = Callable[[Callable[[str], object] | None], None]

FOLDER = "checkpoints"
"""Of all checkpoints, beside the notebook."""
REMEMBERED = 16
"""Saves that are over and still known, so that a long session does not grow with each save."""
FINISH_S = 60.0
"""How long the end of a session waits for the save that runs."""
SHOWN_EVERY_S = 0.5
EXIT_S = 4.0
"""The same at the end of the notebook's kernel: Jupyter kills it after five seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint on the disk."""

    name: str
    step: int
    """Optimizer steps taken."""
    size_bytes: int
    backend: str
    """That wrote it; any can load it."""
    created: datetime
    path: Path | Url
    seconds: float | None = None
    """That this session took to write it; None for another session's."""

    @classmethod
    def of(cls, entry: Entry, seconds: float | None = None) -> Checkpoint:
        """Take over what the folder says."""
        return cls(
            name=entry.name,
            step=entry.step,
            size_bytes=entry.size_bytes,
            backend=entry.backend,
            created=entry.created,
            path=entry.path,
            seconds=seconds,
        )

    def state_dict(self, prefix: str = "model.") -> dict[str, torch.Tensor]:
        """Whole tensors on the CPU by name; imports torch, at this moment.

        A tensor that lies in one piece in a file is read when it is looked at; what is written
        into it stays in this process. Needs no session.

        Args:
            prefix: "model." weights and buffers, "optim.state." state of the optimizer.

        Raises:
            CheckpointError: it is not there any more, or a file is damaged.
        """
        from nbdist.state import shard_io

        if not isinstance(self.path, Url):
            return shard_io.state_dict(self.path, prefix)
        with tempfile.TemporaryDirectory(prefix="nbdist-") as folder:
            brought = checkpoint.Brought(self.path, Path(folder))
            brought.bring({one.name for one in brought.manifest.files})
            return shard_io.state_dict(brought.folder, prefix)

    def __str__(self) -> str:
        """Say it on one line."""
        took = f" in {self.seconds:.1f} s" if self.seconds is not None else ""
        when = self.created.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        return (
            f"{self.name}: step {self.step}, {size(self.size_bytes)}, {self.backend}, {when}{took}"
        )


class Save:
    """A save that goes on in the background, or is over."""

    def __init__(self) -> None:
        """Know nothing of it yet."""
        self.name = ""
        self.root: Path | Url = Path()
        self.error = ""
        """Why it failed."""
        self.notes: tuple[str, ...] = ()
        """What is not in the checkpoint."""
        self.removed: tuple[str, ...] = ()
        """Older checkpoints that `keep` did not count."""
        self.seconds = self.pause_s = 0.0
        self.path: Path | Url | None = None
        self.made: Checkpoint | None = None
        """What it has made."""
        self.began = time.time()
        """Unix seconds."""
        self.size_bytes = 0
        """About what all ranks will write; 0 where it is not known yet."""
        self._draft: Draft | None = None
        self._over = threading.Event()
        self._watchers: list[Callable[[Save], object]] = []
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> Checkpoint:
        """Wait until the checkpoint is there, and return it.

        Raises:
            CheckpointError: it failed; nothing of it is left.
            TimeoutError: it still runs.
        """
        if not self._over.wait(timeout_s):
            message = f"the save of {self.name} still runs after {timeout_s:g} s."
            raise TimeoutError(message)
        if self.error or self.path is None:
            raise CheckpointError(f"checkpoint {self.name} was not saved: {self.error}")
        there = checkpoint.place(self.root).entries()
        found = next((one for one in there if one.name == self.name), None)
        if found is None:
            raise CheckpointError(f"checkpoint {self.name} was saved, and removed since.")
        return Checkpoint.of(found, self.seconds)

    def wait_shown(self, timeout_s: float = math.inf) -> Checkpoint:
        """`wait`, and show below the cell how far it is.

        Raises:
            CheckpointError: it failed; nothing of it is left.
            TimeoutError: it still runs.
        """
        deadline = time.monotonic() + timeout_s
        with StatusLine() as line:
            while not self._over.wait(SHOWN_EVERY_S) and time.monotonic() < deadline:
                line.show(f"nbdist: {self.how_far}")
        return self.wait(0)

    @property
    def how_far(self) -> str:
        """In words, with the share that is on its way to the disk."""
        words, written = f"writing checkpoint {self.name}", self.written_bytes
        if written is None or not self.size_bytes:
            return words
        return f"{words}, {min(written / self.size_bytes, 1.0):.0%}"

    @property
    def written_bytes(self) -> int | None:
        """What its files have now, of all ranks; None where it cannot be looked up."""
        if self._draft is None or self.done:
            return 0
        try:
            return self._draft.size_bytes()
        except (OSError, CheckpointError):
            return 0  # it has just got its name

    def watch(self, watcher: Callable[[Save], object]) -> None:
        """Call `watcher` once it is over, on any thread; at once where it is."""
        with self._lock:
            if not self.done:
                self._watchers.append(watcher)
                return
        watcher(self)

    def receive(self, content: messages.Saved) -> None:
        """Take what rank 0 says of it."""
        self.name, self.root = content["name"], checkpoint.located(content["root"])
        self.seconds, self.pause_s = content["seconds"], content["pause_s"]
        self.size_bytes = content.get("size_bytes", self.size_bytes)
        self._draft = checkpoint.place(self.root).draft(self.name, content["id"])
        if content["state"] == "done":
            self.path = checkpoint.located(content["path"])
            self.made = Checkpoint(
                name=self.name,
                step=content["step"],
                size_bytes=content["size_bytes"],
                backend=content["backend"],
                created=datetime.now(UTC),
                path=self.path,
                seconds=self.seconds,
            )
            self.notes, self.removed = tuple(content["notes"]), tuple(content["removed"])
        if content["state"] != "running":
            self.end(content.get("error", ""))

    def discard(self) -> None:
        """Remove what is left of it; once nobody writes any more."""
        if self._draft is not None:
            self._draft.abort()

    def end(self, error: str) -> None:
        """It is over."""
        with self._lock:
            if self.done:
                return
            self.error = error
            self._over.set()
            watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher(self)

    def __str__(self) -> str:
        """Say it in a few lines."""
        pause = f"training paused {self.pause_s:.2f} s"
        where = "" if self.root == Path.cwd() / FOLDER else f" to {self.root}"
        if not self.done:
            return f"{self.name}: being written{where}; {pause}"
        if self.error:
            return f"{self.name} was not saved: {self.error}"
        lines = [f"{self.name}: saved in {self.seconds:.1f} s{where}; {pause}"]
        lines += [f"  removed: {', '.join(self.removed)}"] if self.removed else []
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: FBT001 - IPython's
        printer.text("Save(...)" if cycle else str(self))


class Checkpoints(Sequence[Checkpoint]):
    """The whole checkpoints of a folder or at a URL, the newest last; as it is now."""

    def __init__(self, root: Path | Url) -> None:
        """Look at a folder, which need not exist."""
        self.root = root
        self.failed: deque[Save] = deque(maxlen=REMEMBERED)
        """The last saves of this session that failed."""
        self._seconds: dict[Path | Url, float] = {}
        self._seen: tuple[Path, int] | None = None
        self._entries: list[Checkpoint] = []
        self.problem = ""
        """Why a URL could not be listed; then those are given that were seen before."""

    def move(self, root: Path | Url) -> None:
        """Look somewhere else from now on."""
        if root != self.root:
            self.root, self.problem = root, ""
            self._seen, self._entries = None, []

    def _now(self) -> list[Checkpoint]:
        """Read the folder where a name in it has changed; a URL each time."""
        if isinstance(self.root, Url):
            return self._at(self.root)
        try:
            seen = self.root, self.root.stat().st_mtime_ns
        except OSError:
            return []
        if seen != self._seen:
            found = checkpoint.entries(self.root)
            self._entries = [Checkpoint.of(one, self._seconds.get(one.path)) for one in found]
            self._seen = seen
        return self._entries

    def _at(self, url: Url) -> list[Checkpoint]:
        """List a URL."""
        try:
            found = checkpoint.place(url).entries()
        except CheckpointError as error:
            self.problem = str(error)
        else:
            self._entries = [Checkpoint.of(one, self._seconds.get(one.path)) for one in found]
            self.problem = ""
        return self._entries

    @property
    def known(self) -> list[Checkpoint]:
        """The same, of a URL without asking it: those that were listed, or saved since."""
        return list(self._entries) if isinstance(self.root, Url) else list(self._now())

    def newest(self, *, within_s: float) -> Checkpoint | None:
        """The newest; where the folder cannot be read in this time, of those seen before."""
        read: list[list[Checkpoint]] = []
        reading = threading.Thread(target=lambda: read.append(self.known), daemon=True)
        reading.start()
        reading.join(within_s)
        return next(reversed(read[0] if read else self._entries), None)

    def add(self, save: Save) -> None:
        """Take note of a save that is over."""
        if save.error:
            self.failed.append(save)
        elif save.path is not None:
            self._seconds[save.path] = save.seconds
            self._seen = None
            if save.root == self.root and (made := save.made) is not None:
                others = [
                    one for one in self._entries if one.name not in {made.name, *save.removed}
                ]
                self._entries = [*others, made]

    @overload
    def __getitem__(self, which: int | str) -> Checkpoint: ...
    @overload
    def __getitem__(self, which: slice) -> Sequence[Checkpoint]: ...
    def __getitem__(self, which: int | str | slice) -> Checkpoint | Sequence[Checkpoint]:
        """One by its place or its name, or several.

        Raises:
            IndexError: no such place.
            KeyError: no such name.
        """
        if not isinstance(which, str):
            return self._now()[which]
        found = next((one for one in self._now() if one.name == which), None)
        if found is None:
            raise KeyError(which)
        return found

    def __len__(self) -> int:
        """How many there are."""
        return len(self._now())

    def __iter__(self) -> Iterator[Checkpoint]:
        """The newest last."""
        return iter(list(self._now()))

    def __repr__(self) -> str:
        """One on a line."""
        lines = [f"{self.root}: {len(self)} checkpoints", *(f"  {one}" for one in self.known)]
        lines += [f"  {self.problem}"] if self.problem else []
        lines += [f"  {save}" for save in self.failed]
        return "\n".join(lines)


class Saves:
    """All saves of a session."""

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        """Begin with none.

        Args:
            root: folder or URL of all checkpoints. Default: "checkpoints" where the notebook runs.

        Raises:
            CheckpointError: as of `checked`.
        """
        self._given = None if root is None else checked(root)
        self._beside = Path.cwd() / FOLDER
        self.checkpoints = Checkpoints(self._given or self._beside)
        self._saves: dict[str, Save] = {}
        self._lock = threading.Lock()

    @property
    def told(self) -> str:
        """What ranks are told of where checkpoints go; "" if that is left to nbdist."""
        return "" if self._given is None else checkpoint.full(self._given)

    def settle(self) -> None:
        """The ranks begin: the folder beside the notebook is the one of now."""
        self._beside = Path.cwd() / FOLDER
        self.checkpoints.move(self._given or self._beside)

    def go_to(self, root: str | os.PathLike[str] | None) -> None:
        """Have checkpoints somewhere else from now on; arguments as of the session."""
        self._given = None if root is None else checked(root)
        self.checkpoints.move(self._given or self._beside)

    def receive(self, content: messages.Saved) -> None:
        """Take what rank 0 says; on the reader thread."""
        with self._lock:
            save = self._saves.setdefault(content["id"], Save())
        if content["state"] == "running":
            # After the launcher's own: this one is called first then.
            atexit.unregister(self.finish)
            atexit.register(self.finish, EXIT_S)
        save.receive(content)
        if save.done:
            self.checkpoints.add(save)
            self._forget_oldest()
            if not self.running():
                atexit.unregister(self.finish)

    def begin(self, request: messages.SaveRequest, ranks: Sequence[int], gang: Gang) -> Save:
        """Have the ranks copy their state and begin to write it.

        Raises:
            CheckpointError: nothing was written.
        """
        title = f"nbdist: checkpoint {names.checked(request['name'])}"
        with StatusLine() as line:
            work = Transaction(
                gang,
                ranks,
                messages.SAVE,
                raises=CheckpointError,
                show=lambda text: line.show(f"{title}: {text}"),
            )
            replies = work.ask(request)
        with self._lock:
            save = self._saves.setdefault(replies[0]["id"], Save())
        if not save.name:
            save.name, save.root = request["name"], checkpoint.located(request["root"])
        return save

    def running(self) -> list[Save]:
        """Those that are not over."""
        with self._lock:
            return [save for save in self._saves.values() if not save.done]

    def _forget_oldest(self) -> None:
        """Keep the last saves that are over: `begin` may hear of one after its end."""
        with self._lock:
            over = [number for number, save in self._saves.items() if save.done]
            for number in over[:-REMEMBERED]:
                del self._saves[number]

    def finish(self, within_s: float = FINISH_S) -> None:
        """Wait for what runs before the ranks end; Stop waits no longer."""
        for save in self.running():
            with suppress(TimeoutError, CheckpointError, KeyboardInterrupt):
                if not save.done:
                    save.wait_shown(within_s)

    def give_up(self, why: str) -> None:
        """The ranks are gone: what was running has failed."""
        for save in self.running():
            save.end(why)
            self.checkpoints.add(save)

    def tidy(self) -> None:
        """Remove what was cut short; once the ranks are gone."""
        for save in self.checkpoints.failed:
            if isinstance(save.root, Url):
                save.discard()
            elif save.root.is_dir():
                checkpoint.tidy(save.root)


def show_later(save: Save) -> None:
    """Say below the cell that runs now how a save ended, once it has."""
    screen = PinnedScreen()

    def show(over: Save) -> None:
        screen.write("stderr" if over.error else "stdout", f"nbdist: checkpoint {over}\n")
        screen.flush()

    save.watch(show)


def prove_later(url: Url, complain: Callable[[str], object]) -> None:
    """Look in the background whether checkpoints can be written to a URL."""

    def prove() -> None:
        try:
            Remote(url).prove()
        except CheckpointError as error:
            complain(str(error))

    threading.Thread(target=prove, name="nbdist-url", daemon=True).start()


def complain_later() -> Callable[[str], object]:
    """Give what says below the cell that runs now why a save would fail."""
    screen = PinnedScreen()

    def complain(why: str) -> None:
        screen.write("stderr", f"nbdist: save() would fail now: {why}\n")
        screen.flush()

    return complain


# -- load


def folder(given: str | os.PathLike[str]) -> Path | Url:
    """A folder or a URL as the user gives it; the folder is absolute.

    Raises:
        CheckpointError: neither of the two.
    """
    if isinstance(given, str) and not given.strip():
        raise CheckpointError(
            f"{given!r} names no folder; use one such as checkpoints, or a URL such as"
            " s3://bucket/path."
        )
    return Url(given) if checkpoint.is_url(given) else Path.cwd() / expanded(given)


def checked(given: str | os.PathLike[str]) -> Path | Url:
    """The same, where it can be used.

    Raises:
        CheckpointError: none, a URL that fsspec does not know, or a package for it is missing.
    """
    where = folder(given)
    if isinstance(where, Url):
        where.opened()
    return where


def is_foreign(path: Path) -> bool:
    """Whether something is there, and no nbdist has written it."""
    return path.exists() and not (path / names.MANIFEST).exists()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did."""

    name: str
    step: int
    written: str
    """By which backend, on how many ranks."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase, of the slowest rank."""
    read_bytes: int = 0
    """Of all ranks."""
    verified: int = 0
    """Tensors whose digest is the saved one."""
    loaded: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What is not as it was saved, and why."""

    @property
    def total_s(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        """Say it in a few lines."""
        lines = [
            f"{self.name} (step {self.step}, {self.written}) loaded in {self.total_s:.1f} s",
            f"  loaded: {'; '.join(self.loaded)}",
            f"  {self.verified} tensors are as they were saved; {size(self.read_bytes)} read",
        ]
        return "\n".join([*lines, *(f"  note: {one}" for one in self.notes)])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: FBT001 - IPython's
        """Show the lines where IPython shows a value."""
        printer.text("LoadReport(...)" if cycle else str(self))


def load(
    name: str,
    root: Path | Url,
    ranks: Sequence[int],
    gang: Gang,
    listen: Listen,
    *,
    weights_only: bool,
) -> LoadReport:
    """Let the ranks load a checkpoint into the models that are prepared now.

    Raises:
        CheckpointError: all is as it was, or the message says that it is not.
    """
    with checkpoint.place(root).opened(name) as (path, manifest), StatusLine() as line:
        title = f"nbdist: loading {name}"
        content = messages.LoadRequest(
            path=checkpoint.full(path), id=manifest.id, weights_only=weights_only
        )

        def show(text: str) -> None:
            line.show(f"{title}: {text}")

        listen(show)
        try:
            work = Transaction(gang, ranks, messages.LOAD, raises=CheckpointError, show=show)
            replies = work.ask(content)
        except CheckpointError:
            show("failed")
            raise
        finally:
            listen(None)
        reports = [replies[rank]["report"] for rank in ranks]
        report = _put_together(name, reports)
        line.show(f"{title}: done in {report.total_s:.1f} s")
    return report


def _put_together(name: str, reports: Sequence[Mapping[str, Any]]) -> LoadReport:
    """The reports of all ranks as one."""
    first = reports[0]
    return LoadReport(
        name=name,
        step=first["step"],
        written=f"{first['backend']} on {first['world_size']} ranks",
        seconds={
            phase: max(one["seconds"].get(phase, 0.0) for one in reports)
            for phase in first["seconds"]
        },
        read_bytes=sum(one["read_bytes"] for one in reports),
        verified=first["verified"],
        loaded=tuple(first["loaded"]),
        notes=tuple(dict.fromkeys(note for one in reports for note in one["notes"])),
    )
