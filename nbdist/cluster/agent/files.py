"""Files of a node that come from the kernel or go to it, in its two private folders alone.

Runs in the agent, on its one thread: a chunk at a time.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.cluster.protocol import CHUNK_BYTES

if TYPE_CHECKING:
    from nbdist.cluster.run_dir import RunDir

ROOM_BYTES = 64 << 20
"""Left free in shared memory."""


class Files:
    """Files in the private folders of a launcher."""

    def __init__(self, run_dir: RunDir) -> None:
        """Know the folders, best first."""
        self._folders = [run_dir.bulk, run_dir.path]

    def receive(self, name: str, size: int) -> str:
        """Make an empty file in the first folder with room; returns its path.

        Raises:
            OSError: it cannot be made.
        """
        for folder in self._folders:
            if shutil.disk_usage(folder).free > size + ROOM_BYTES:
                break
        path = folder / Path(name).name
        path.touch(mode=0o600, exist_ok=False)
        return str(path)

    def take(self, path: str, chunk: bytes) -> int:
        """Add to a file; returns the bytes.

        Raises:
            OSError: no room, or not here.
        """
        with self._own(path).open("ab") as file:
            return file.write(chunk)

    def remove(self, path: str) -> bool:
        """Remove a file; whether it was there."""
        file = self._own(path)
        there = file.exists()
        file.unlink(missing_ok=True)
        return there

    def size(self, path: str) -> int:
        """Bytes of a file.

        Raises:
            OSError: there is none, or not here.
        """
        return self._own(path).stat().st_size

    def read(self, path: str, offset: int) -> bytes:
        """One chunk of a file.

        Raises:
            OSError: there is none, or not here.
        """
        with self._own(path).open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES)

    def sees(self, path: str, text: str) -> str:
        """Why a folder that the kernel has written to cannot be used here; "" where it can.

        Args:
            path: of a file that the kernel has made in it.
            text: what it holds.
        """
        file = Path(path)
        try:
            same = file.read_text() == text
        except OSError:
            same = False
        if not same:
            return f"{file.parent} is another folder there than where the notebook runs, or none"
        try:
            (mine := file.with_name(f"{file.name}-{secrets.token_hex(8)}")).touch(exist_ok=False)
            mine.unlink()
        except OSError as error:
            return f"{file.parent} cannot be written there ({error.strerror})"
        return ""

    def _own(self, path: str) -> Path:
        """A path, if it lies in these folders.

        Raises:
            PermissionError: it does not.
        """
        file = Path(path)
        if file.parent not in self._folders or file.is_symlink():
            raise PermissionError(f"{path} lies outside of this session's own folders")
        return file
