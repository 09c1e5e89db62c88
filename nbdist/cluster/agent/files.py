"""File transfers between a node and the kernel, limited to the session's two private folders.

Runs in the agent on its main thread, one chunk at a time.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.cluster.protocol import CHUNK_BYTES, MIN_FREE_BYTES

if TYPE_CHECKING:
    from nbdist.cluster.run_dir import RunDir


class TransferFiles:
    """Files in the private folders of a launcher."""

    def __init__(self, run_dir: RunDir) -> None:
        """Remember the folders, preferred first."""
        self._folders = [run_dir.payload_dir, run_dir.path]

    def create_file(self, name: str, size: int) -> str:
        """Create an empty file in the first folder with enough space; return its path.

        Raises:
            OSError: the file cannot be created.
        """
        for folder in self._folders:
            if shutil.disk_usage(folder).free > size + MIN_FREE_BYTES:
                break
        path = folder / Path(name).name
        path.touch(mode=0o600, exist_ok=False)
        return str(path)

    def append_chunk(self, path: str, chunk: bytes) -> int:
        """Append to a file; return the number of bytes.

        Raises:
            OSError: no space, or the path is outside the folders.
        """
        with self._own(path).open("ab") as file:
            return file.write(chunk)

    def remove_file(self, path: str) -> bool:
        """Remove a file; return whether it existed."""
        file = self._own(path)
        existed = file.exists()
        file.unlink(missing_ok=True)
        return existed

    def file_size_bytes(self, path: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            OSError: no such file, or the path is outside the folders.
        """
        return self._own(path).stat().st_size

    def read_chunk(self, path: str, offset: int) -> bytes:
        """Read one chunk of a file.

        Raises:
            OSError: no such file, or the path is outside the folders.
        """
        with self._own(path).open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES)

    def shared_folder_error(self, path: str, text: str) -> str:
        """Return why a folder that the kernel has written to cannot be used here; "" if it can.

        Args:
            path: a file that the kernel has created in the folder.
            text: content of the file.
        """
        file = Path(path)
        try:
            same = file.read_text() == text
        except OSError:
            same = False
        if not same:
            return f"{file.parent} is not the same folder there as on the notebook's machine"
        try:
            (trial := file.with_name(f"{file.name}-{secrets.token_hex(8)}")).touch(exist_ok=False)
            trial.unlink()
        except OSError as error:
            return f"{file.parent} is not writable there ({error.strerror})"
        return ""

    def _own(self, path: str) -> Path:
        """Return the path if it is in the session's folders.

        Raises:
            PermissionError: it is not.
        """
        file = Path(path)
        if file.parent not in self._folders or file.is_symlink():
            raise PermissionError(f"{path} is outside this session's folders")
        return file
