"""Where the ranks of one start meet: a file in their private folder, and no port.

Runs on a rank. torch's process groups exchange their addresses through a store. Its usual
TCPStore serves whoever connects; a file (0600) in a folder (0700) is out of reach for other
users. It lasts as long as the ranks, so that a group can be made anew under another prefix:

    distributed.init_process_group("gloo", store=PrefixStore("again-1", store()), ...)
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from torch.distributed import FileStore  # type: ignore[attr-defined]

_NAME = "store"
_FOLDER = "NBDIST_STORE_DIR"


def open_in(run_dir: str) -> FileStore:
    """Open the store of this start of the ranks; `store()` gives it from then on."""
    os.environ[_FOLDER] = run_dir
    return store()


@functools.cache
def store() -> FileStore:
    """Give the store of this start of the ranks, opened once a process.

    Kept for the life of the rank: torch removes the file with the last FileStore on it.
    """
    path = Path(os.environ[_FOLDER]) / _NAME
    path.touch(mode=0o600)
    return FileStore(str(path), int(os.environ["WORLD_SIZE"]))
