"""Temporary folder for NVMe offload, removed when the ranks end.

DeepSpeed leaves gigabytes of swap files behind. So the launcher gives each session its own folder
inside the user's folder and removes it afterwards; the next session removes that of a killed
launcher.
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
from nbdist.hardware.process_identity import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nbdist.strategies import Options


@contextlib.contextmanager
def create_nvme_folder(options: Options) -> Iterator[Options]:
    """Yield the options with the session's own folder in place of the user's.

    Options without NVMe offload are yielded unchanged.

    Raises:
        StartError: the user's folder is not writable.
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
        ProcessIdentity.current_process().write_owner_file(own)
    except OSError as error:
        message = f"Cannot write to {str(parent)!r} for offload {options.offload}: {error}."
        raise StartError(message) from error
    try:
        yield replace(options, offload=f"nvme:{own}")
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _remove_orphans(parent: Path, prefix: str) -> None:
    """Remove this user's folders whose launcher has ended."""
    for orphan in parent.glob(f"{prefix}*"):
        if process_identity.is_abandoned(orphan):
            shutil.rmtree(orphan, ignore_errors=True)
