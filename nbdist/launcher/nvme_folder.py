"""The folder of an NVMe offload: a session's own, gone when its ranks are.

Runs in the launcher, around the life of the ranks. DeepSpeed leaves its swap files behind,
gigabytes of them; a session gets a folder of its own inside the user's, and one whose
launcher was killed is removed by the next.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.errors import StartError
from nbdist.hardware import process_identity
from nbdist.hardware.process_identity import Owner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.strategies import Options


@contextlib.contextmanager
def folder(options: Options) -> Iterator[Options]:
    """Yield the options with the session's own folder in place of the user's.

    Without an offload to NVMe the options are yielded as they are.

    Raises:
        StartError: the user's folder cannot be written to.
    """
    if options.offload_path is None:
        yield options
        return
    parent = Path(options.offload_path).expanduser().absolute()
    prefix = f"nbdist-{socket.gethostname()}-"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_orphans(parent, prefix)
        own = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent))
        Owner.me().write(own)
    except OSError as error:
        message = f"cannot write to {str(parent)!r} for offload {options.offload}: {error}."
        raise StartError(message) from error
    try:
        yield replace(options, offload=f"nvme:{own}")
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _remove_orphans(parent: Path, prefix: str) -> None:
    """Remove this user's folders whose launcher has ended."""
    for found in parent.glob(f"{prefix}*"):
        if process_identity.abandoned(found):
            shutil.rmtree(found, ignore_errors=True)
