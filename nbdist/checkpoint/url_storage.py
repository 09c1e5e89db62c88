"""Checkpoints at a URL: listed, written, removed; pure.

<url>/
    step-1000/
        <32 hex>/             one save, with the files that a checkpoint in a folder has
            manifest.json     comes last: a save without it is listed by nobody
            .owner.json       whose it is, while it is written
            part-00000.json   what a rank has written, until all have

What lies at a URL has neither locks nor renames. So no save touches files of another: one that
takes a name lies beside the one that had it, the newest whole one counts, and the other is
removed after that. What dead processes left goes with the next save.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from dataclasses import dataclass, field
from pathlib import PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any

from nbdist.checkpoint import json_validation, rank_reports
from nbdist.checkpoint.catalog import Entry, described, missing
from nbdist.checkpoint.manifest import MAX_BYTES, Manifest
from nbdist.checkpoint.names import MANIFEST, checked, is_name, is_part, part, shown
from nbdist.checkpoint.url import Url, in_words
from nbdist.checkpoint.writer import Writer
from nbdist.errors import CheckpointError
from nbdist.hardware.process_identity import ABANDONED_S, OWNER, Owner

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from nbdist.checkpoint.manifest import FilePart, Key
    from nbdist.checkpoint.rank_reports import Told
    from nbdist.checkpoint.safetensors_header import Stored

_DEPTH = 3
"""Parts of a file's path below the URL."""
_ID = json_validation.bits(32)
_OURS = re.compile(r"[a-z]+-[0-9]{5,9}-[0-9]+\.safetensors|\.trial-[0-9a-f]{16}")
_tried: set[Url] = set()
"""URLs to which this process has written."""


@dataclass(frozen=True, slots=True)
class _Save:
    """What lies there of one save."""

    url: Url
    name: str
    files: dict[str, int] = field(default_factory=dict)
    """Name -> bytes."""


class Remote:
    """All checkpoints below a URL."""

    def __init__(self, root: Url) -> None:
        """Ask nothing yet."""
        self.root = root
        self._manifests: dict[Url, Manifest] = {}
        """Those read before: nobody changes one."""

    def entries(self) -> list[Entry]:
        """List the whole checkpoints, the newest last; raises CheckpointError."""
        whole = self._whole(self._saves())
        return [described(one.url, one.name, manifest) for one, manifest in whole]

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[tuple[Url, Manifest]]:
        """Find a checkpoint; raises CheckpointError. Nothing keeps others from removing it."""
        checked(name)
        saves = self._saves()
        found = self._whole([one for one in saves if one.name == name])
        if not found:
            raise missing(self.root, name, [one.name for one, _ in self._whole(saves)])
        ((one, manifest),) = found
        yield one.url, manifest

    def begin(self, name: str, *, overwrite: bool, size_bytes: int) -> RemoteDraft:  # noqa: ARG002 - nobody tells how much room there is
        """Begin a save; remove what dead processes left.

        Raises:
            CheckpointError: a name that is not allowed or taken, or nothing can be written.
        """
        checked(name)
        saves = self._saves()
        self.check_free(name, saves, overwrite=overwrite)
        for one in saves:
            with contextlib.suppress(CheckpointError), in_words("it stays"):
                if self._is_dead(one):
                    _remove(one)
        draft = self.draft(name, secrets.token_hex(16))
        draft.begin()
        return draft

    def prove(self) -> None:
        """Make sure that checkpoints can be written there, from here; raises CheckpointError."""
        draft = self.draft("trial", secrets.token_hex(16))
        draft.begin()
        draft.abort()

    def draft(self, name: str, number: str) -> RemoteDraft:
        """A save that a rank has begun."""
        return RemoteDraft(self, name, number)

    def keep(self, count: int, *, written: str) -> list[str]:
        """Remove the oldest checkpoints beyond `count`; give the names of those removed.

        Raises:
            CheckpointError: they cannot be.
        """
        found = [one for one, _ in self._whole(self._saves())]
        found.sort(key=lambda one: one.name == written)  # stable: the written one last
        with in_words(f"old checkpoints at {self.root} cannot be removed"):
            for one in found[:-count]:
                _remove(one)
        return [one.name for one in found[:-count]]

    def check_free(
        self, name: str, saves: Sequence[_Save] | None = None, *, overwrite: bool
    ) -> None:
        """Refuse a name that a whole checkpoint has; raises CheckpointError."""
        if overwrite:
            return
        there = self._saves() if saves is None else saves
        if self._whole([one for one in there if one.name == name]):
            raise CheckpointError(
                f"{self.root / name} exists; save under another name, or with --overwrite"
                " (overwrite=True) to replace it."
            )

    def remove_older(self, name: str, manifest: Manifest) -> None:
        """Remove what had this name before."""
        for one in self._saves():
            before = self._manifest(one) if one.name == name else None
            if before is not None and before.created < manifest.created:
                _remove(one)

    def _whole(self, saves: Sequence[_Save]) -> list[tuple[_Save, Manifest]]:
        """Of each name the newest whole save, the newest last."""
        found: dict[str, tuple[_Save, Manifest]] = {}
        for one in saves:
            manifest = self._manifest(one)
            if manifest is None or not _complete(one, manifest.files):
                continue
            if one.name not in found or found[one.name][1].created < manifest.created:
                found[one.name] = one, manifest
        return sorted(found.values(), key=lambda one: (one[1].created, one[1].step, one[0].name))

    def _saves(self) -> list[_Save]:
        """All saves, whole or not."""
        found: dict[tuple[str, str], _Save] = {}
        for path, size_bytes in _listed(self.root).items():
            parts = path.split("/")
            if len(parts) != _DEPTH or not is_name(parts[0]) or not _is_id(parts[1]):
                continue
            name, number, file = parts
            url = self.root / name / number
            found.setdefault((name, number), _Save(url, name)).files[file] = size_bytes
        saves = list(found.values())
        there = {one.url for one in saves}
        self._manifests = {url: one for url, one in self._manifests.items() if url in there}
        return saves

    def _manifest(self, save: _Save) -> Manifest | None:
        """Read what a save says of itself; None where it does not, or not yet in full."""
        if not 0 < save.files.get(MANIFEST, 0) <= MAX_BYTES:
            return None
        if save.url not in self._manifests:
            with contextlib.suppress(CheckpointError):
                self._manifests[save.url] = Manifest.from_json(content(save.url / MANIFEST))
        return self._manifests.get(save.url)

    def _is_dead(self, save: _Save) -> bool:
        """Whether it will never be whole: its process is gone, or it has long been left alone.

        Without its signature, which comes first and goes last, it is what is left of one.
        """
        if MANIFEST in save.files or OWNER not in save.files:
            return MANIFEST not in save.files
        with contextlib.suppress(CheckpointError):
            owner = Owner.from_json(content(save.url / OWNER))
            if owner is not None and owner.can_be_asked:
                return owner.ended
            return _age_s(save) > ABANDONED_S
        return False


class RemoteDraft:
    """A save that is being written to a URL by all ranks."""

    poll_s = 0.5
    """How often it is worth looking whether other ranks are done."""

    def __init__(self, place: Remote, name: str, number: str) -> None:
        """Know where it is."""
        self.id = number
        self.folder = PurePosixPath(number)
        """Of its files, in names."""
        self._place, self._name = place, name
        self._url = place.root / name / number

    def begin(self) -> None:
        """Sign it; raises CheckpointError."""
        self._place.root.opened()
        with in_words(f"{self._place.root} cannot take checkpoints"):
            self._url.make()
        self._put(OWNER, Owner.me().to_json())

    def seen(self) -> bool:
        """Yes, since this process can write there: it tries that once for each URL.

        Raises:
            CheckpointError: it cannot.
        """
        if self._place.root not in _tried:
            trial = f".trial-{secrets.token_hex(8)}"
            self._put(trial, "")
            with in_words(f"{self._place.root} does not let files be removed"):
                _remove_files(self._url, [trial])
            _tried.add(self._place.root)
        return True

    def new(self, path: PurePath, tensors: Sequence[Stored]) -> Writer:
        """Begin a file."""
        return UrlWriter(self._url / path.name, tensors)

    def report(self, rank: int, parts: Sequence[FilePart], keys: Mapping[str, Key]) -> None:
        """Say what a rank has written; the last thing that it does."""
        self._put(part(rank), rank_reports.said(parts, keys))

    def failed(self, rank: int, why: str) -> None:
        """Say that a rank will write nothing more, if that can be said."""
        with contextlib.suppress(CheckpointError):
            self._put(part(rank), rank_reports.said(error=why))

    def heard(self, ranks: Collection[int]) -> dict[int, Told]:
        """What those of these ranks say who have said something."""
        there, found = self._files(), {}
        for rank in ranks:
            if part(rank) in there and (one := rank_reports.read(content(self._url / part(rank)))):
                found[rank] = one
        return found

    def size_bytes(self) -> int | None:
        """Not told: most stores show a file when it is whole."""
        return None

    def commit(self, name: str, manifest: Manifest, *, overwrite: bool) -> Url:
        """Make it a whole checkpoint; returns where it is.

        Raises:
            CheckpointError: the name was taken meanwhile, files are missing, or nothing can be
                written.
        """
        there = self._files()
        odd = [file.name for file in manifest.files if there.get(file.name) != file.size_bytes]
        if odd:
            raise CheckpointError(
                f"{shown(odd[0])} at {self._url} is not as its rank said; save again."
            )
        self._place.check_free(name, overwrite=overwrite)
        self._put(MANIFEST, manifest.to_json().decode())
        with contextlib.suppress(CheckpointError), in_words("the rest stays"):
            self._place.remove_older(name, manifest)
            _remove_files(self._url, [one for one in there if is_part(one) or one == OWNER])
        return self._url

    def abort(self) -> None:
        """Remove it, unless it is whole; what cannot go is not listed, and goes later."""
        with contextlib.suppress(CheckpointError), in_words("the rest stays"):
            files = self._files()
            if MANIFEST not in files:
                _remove(_Save(self._url, self._name, files))

    def _files(self) -> dict[str, int]:
        """Its files by name."""
        return {path.rpartition("/")[2]: size for path, size in _listed(self._url).items()}

    def _put(self, name: str, text: str) -> None:
        system, path = (self._url / name).opened()
        with in_words(f"{self._place.root} cannot take checkpoints"):
            system.pipe_file(path, text.encode())


class UrlWriter(Writer):
    """A file that is written to a URL as it comes; nothing of it lies on this machine."""

    def __init__(self, url: Url, tensors: Sequence[Stored]) -> None:
        """Begin it; raises CheckpointError."""
        self._url = url
        self._file: Any = None
        super().__init__(PurePosixPath(url.name), tensors)

    def abort(self) -> None:
        """Leave it: a file that no manifest names."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(Exception):  # what cannot be given up is removed with all
                file.discard()
            with contextlib.suppress(Exception):
                file.close()
        super().abort()

    def _open(self) -> None:
        system, path = self._url.opened()
        with in_words(f"{self._url} cannot be written"):
            self._file = system.open(path, "wb")

    def _take(self, content: memoryview) -> None:
        with in_words(f"{self._url} cannot be written"):
            while content:
                content = content[self._file.write(content) :]

    _send = _take

    def _settle(self) -> None:
        with in_words(f"{self._url} cannot be written"):
            self._file.close()
        self._file = None

    def _remove(self) -> None:
        """Its save is removed as a whole."""


def _listed(url: Url) -> dict[str, int]:
    """Bytes of each file below a URL, by its path from there; raises CheckpointError."""
    system, root = url.opened()
    with in_words(f"{url} cannot be listed"):
        system.invalidate_cache()
        try:
            found = system.find(root, detail=True)
        except FileNotFoundError:
            return {}
    return {path.removeprefix(root).strip("/"): about["size"] or 0 for path, about in found.items()}


def content(url: Url) -> bytes:
    """Read a small file; raises CheckpointError."""
    system, path = url.opened()
    with in_words(f"{url} cannot be read"):
        found: bytes = system.cat_file(path)
    return found


def _complete(save: _Save, files: Sequence[FilePart]) -> bool:
    return all(save.files.get(file.name) == file.size_bytes for file in files)


def _age_s(save: _Save) -> float:
    """Seconds since something was last written there; 0.0 where that is not told."""
    system, path = save.url.opened()
    try:
        newest = max(system.modified(f"{path}/{name}") for name in save.files)
        return time.time() - float(newest.timestamp())
    except Exception:  # noqa: BLE001 - not all file systems tell it, each in its own way
        return 0.0


def _remove(save: _Save) -> None:
    """Remove our files of a save, its manifest first: nobody sees half a checkpoint."""
    order = {MANIFEST: -1, OWNER: 1}
    ours = filter(_is_ours, save.files)
    _remove_files(save.url, sorted(ours, key=lambda name: order.get(name, 0)))
    for folder in (save.url, save.url.parent):
        system, path = folder.opened()
        with contextlib.suppress(Exception):  # a folder with other files, or of a store without
            system.rmdir(path)


def _remove_files(url: Url, names: Sequence[str]) -> None:
    system, path = url.opened()
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            system.rm_file(f"{path}/{name}")


def _is_ours(name: str) -> bool:
    return name in {MANIFEST, OWNER} or is_part(name) or _OURS.fullmatch(name) is not None


def _is_id(text: str) -> bool:
    try:
        return _ID(text, "") >= 0
    except json_validation.Refused:
        return False
