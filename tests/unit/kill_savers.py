"""A process that kills its own savers: `python kill_savers.py ROOT KILLS`, run by a test.

Each saver writes checkpoints under an old and under new names until it is killed. After
each kill, what is listed must be whole, and a checkpoint "best" must be among it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import small_checkpoints

from nbdist import checkpoint
from nbdist.checkpoint import FolderStorage

NUMEL = 500_000
FILES = 2


def save(root: Path, name: str, seed: int) -> None:
    """Write a checkpoint whose files all say which save they are of."""
    draft = FolderStorage(root).begin(name, overwrite=True)
    for rank in range(FILES):
        part = small_checkpoints.write(
            draft.location / f"model-{rank:05d}-0.safetensors", seed, NUMEL
        )
        draft.write_report(rank, [part], {})
    parts = small_checkpoints.files_of(draft, FILES)
    made = small_checkpoints.manifest(parts, step=seed, world_size=FILES)
    draft.commit(name, made, overwrite=True)
    FolderStorage(root).remove_oldest(3, written=name)


def save_on(root: Path, first: int) -> None:
    """Save until killed; "best" comes first, so that it is never among the oldest."""
    for seed in range(first, first + 1_000_000):
        save(root, "best" if seed % 2 else f"step-{seed}", seed)


def check(root: Path) -> list[str]:
    """What is listed, after all of it was read; "best" must be there."""
    found = FolderStorage(root).list_checkpoints()
    for one in found:
        manifest = checkpoint.verify_files(one.path)
        assert len({file.crc32 for file in manifest.files}) == 1, "files of two saves"
        assert FolderStorage(root).find(one.name) == one.path
    names = [one.name for one in found]
    assert "best" in names, names
    return names


def main(root: Path, kills: int) -> None:
    """Print what was listed after each kill, and what was left over, as JSON."""
    dice = random.Random(0)  # noqa: S311 - any moments
    begin = time.monotonic()
    save(root, "best", 1)
    save(root, "step-0", 0)
    one_save_s = (time.monotonic() - begin) / 2
    seen, leftovers = [], 0
    for number in range(kills):
        child = os.fork()
        if not child:
            save_on(root, 10 * number + 3)
        time.sleep(dice.uniform(0, 3 * one_save_s))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        leftovers += any(path.name.startswith((".tmp", ".old")) for path in root.iterdir())
        seen.append(check(root))
    FolderStorage(root).begin("last").abort()
    hidden = [path.name for path in root.iterdir() if path.is_dir() and path.name[0] == "."]
    print(json.dumps({"seen": seen, "leftovers": leftovers, "hidden": hidden}))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
