"""The process in which checks run: one session, given new ranks where a check needs others."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

import checks
import rank_code

import nbdist
from nbdist import paths

if TYPE_CHECKING:
    from pathlib import Path

DEFAULTS: dict[str, Any] = {
    "backend": "ddp",
    "precision": None,
    "offload": None,
    "activation_checkpointing": False,
    "compile": False,
    "clip": None,
}


class Lab:
    """What checks work with: the session, the devices, and a folder for files."""

    def __init__(self, work: Path, ranks: int, *, rehearse: bool) -> None:
        self.work, self.ranks, self.rehearse = work, ranks, rehearse
        self.sizes = rank_code.TINY if rehearse else rank_code.LARGE
        self.idle_bytes = checks.used_bytes()
        """Memory of each GPU in use before any session of this worker."""
        self._session: nbdist.Session | None = None
        self._options: dict[str, Any] = {}

    def session(self, *, fresh: bool = False, **options: Any) -> nbdist.Session:
        """A session with these options; its ranks are new where these differ, or with `fresh`."""
        wanted = {**DEFAULTS, "nproc": self.ranks, **options}
        session = self._session
        if session is None or session.state in {"stopped", "new"}:
            self._options = {}  # a start that fails leaves nothing to share
            session = self._session = nbdist.Session(**wanted)
            session.start()
        elif fresh or wanted != self._options or session.state != "ready":
            self._options = {}
            session.restart(**wanted)
        else:
            return session
        session.run(rank_code.PRELUDE, output="none")
        self._options = wanted
        return session

    def changed(self) -> None:
        """The session's ranks or options are not what they were: the next check gets new ones."""
        self._options = {}

    def stop(self) -> None:
        if self._session is not None:
            self._session.stop()
        self._session = None

    def judged(self, holds: bool) -> bool | None:  # noqa: FBT001 - one value in, one out
        """Whether a bar holds that only a GPU can miss or reach; None in a rehearsal."""
        return None if self.rehearse else holds


def serve(rehearse: bool, ranks: int, work: Path) -> None:  # noqa: FBT001
    """Run the checks that are named on stdin until an empty line."""
    faulthandler.register(signal.SIGUSR1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what sessions print goes to the log
    # What a plan learns here stays here; built kernels are kept for the next run.
    kernels, cache = paths.cache_dir() / "extensions", work / "cache"
    if not cache.exists():  # by an earlier worker
        kernels.mkdir(parents=True, exist_ok=True)
        cache.mkdir()
        (cache / "extensions").symlink_to(kernels)
    os.environ["NBDIST_CACHE_DIR"] = str(cache)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(names,), daemon=True).start()
    known = {check.name: check for check in checks.CHECKS}
    lab = Lab(work, ranks, rehearse=rehearse)
    while name := names.get():
        print(f"\n==== {name}", file=sys.stderr, flush=True)
        print(json.dumps(_run(known[name], lab)), file=answers, flush=True)
    lab.stop()


def _read(names: queue.SimpleQueue[str]) -> None:
    """Pass names on; end this process, and with it its session, when the runner is gone."""
    for line in sys.stdin:
        names.put(line.strip())
    os.kill(os.getpid(), signal.SIGKILL)


def _run(check: checks.Check, lab: Lab) -> dict[str, Any]:
    """Run one check; what it raises is its result."""
    texts: list[str] = []
    holds = True
    try:
        with contextlib.closing(check.run(lab)) as findings:
            for good, text in findings:
                holds &= good is not False
                texts.append(f"{'MISSED: ' * (good is False)}{text}")
    except checks.Skip as reason:
        return {"status": "skipped", "measured": str(reason)}
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - one check may fail in any way
        traceback.print_exc()
        lab.changed()
        holds = False
        texts.append(f"MISSED: {type(error).__name__}: {str(error)[:400]}")
    return {"status": "holds" if holds else "fails", "measured": "; ".join(texts)}
