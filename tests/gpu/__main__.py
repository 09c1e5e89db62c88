"""Run the checks of `checks.py` in order, each within its own time: started by run.sh.

The checks run in a worker process, which keeps one session for many of them. This process hands
it one check at a time and kills it, with its session, when a check does not end; the next check
gets a new worker. `gpu.json` and `gpu.md` are written after every check.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import importlib.metadata
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if "--rehearse" in sys.argv:  # before anything asks for the devices
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import checks
import worker

from nbdist.hardware import discovery

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from checks import Check

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers")
ENDED_S = 10.0
"""A worker's processes may take so long to end."""
WORDS = {True: "yes", False: "**no**", None: "-"}


def main() -> int:
    """Run the checks; the exit status is 1 when one does not hold."""
    asked = arguments()
    if asked.worker:
        worker.serve(asked.rehearse, asked.ranks, Path(asked.worker))
        return 0
    try:
        chosen = named(asked.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if asked.list:
        for check in chosen:
            print(f"{check.name:28}{check.gpus} GPU{'s'[: check.gpus - 1]:4}{check.bar}")
        return 0
    gpus = asked.ranks if asked.rehearse else len(discovery.discover_machine().gpus)
    if not gpus:
        print("no GPU is visible here; --rehearse runs the checks on CPU ranks", file=sys.stderr)
        return 2
    out = Path(asked.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    run = Run(chosen, gpus, out, rehearse=asked.rehearse, minutes=asked.minutes)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return run.all()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description="GPU checks of nbdist")
    parser.add_argument("--minutes", type=float, default=10, help="for all checks (default 10)")
    parser.add_argument("--out", default=os.environ.get("OUT") or ROOT / "build" / "gpu")
    parser.add_argument("--only", default="", help="names, or beginnings of names, with commas")
    parser.add_argument("--list", action="store_true", help="list the checks and run none")
    parser.add_argument("--rehearse", action="store_true", help="on CPU ranks, with tiny sizes")
    parser.add_argument("--ranks", type=int, default=2, help="of a rehearsal (default 2)")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def named(only: str) -> list[Check]:
    """The checks that are asked for, in their order; all without a name."""
    wanted = [name for name in only.split(",") if name]
    for name in wanted:
        if not any(check.name.startswith(name) for check in checks.CHECKS):
            message = f"no check is named {name!r}; --list shows all names."
            raise ValueError(message)
    return [one for one in checks.CHECKS if not wanted or one.name.startswith(tuple(wanted))]


class Run:
    """One run of the checks and its results."""

    def __init__(
        self, chosen: Sequence[Check], gpus: int, out: Path, *, rehearse: bool, minutes: float
    ) -> None:
        self.chosen, self.gpus, self.out, self.rehearse = chosen, gpus, out, rehearse
        self.deadline = time.monotonic() + 60 * minutes
        self.head = {
            "rehearsal": rehearse,
            "minutes": minutes,
            "machine": f"{gpus} CPU ranks" if rehearse else discovery.discover_machine().describe(),
            "driver": "" if rehearse else driver(),
            "python": sys.version.split()[0],
            **{name: importlib.metadata.version(name) for name in PACKAGES},
            "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        }
        self.rows: list[dict[str, Any]] = []
        self.work = Path(tempfile.mkdtemp(prefix="gpu-checks-"))
        self.worker: Worker | None = None

    def all(self) -> int:
        """Run what the time allows; whatever happens, each check gets its row."""
        stopped = "the time was up"
        try:
            for check in self.chosen:
                self.add(check, self.one(check))
        except KeyboardInterrupt:
            stopped = "the run was stopped"
            if self.worker is not None:
                self.worker.kill()
                self.worker = None
        finally:
            for check in self.chosen[len(self.rows) :]:
                self.add(check, {"status": "not run", "measured": stopped})
            if self.worker is not None:
                self.worker.close()
            shutil.rmtree(self.work, ignore_errors=True)
        print(f"{self.counts()}: {self.out / 'gpu.json'}, {self.out / 'gpu.md'}")
        return int(any(row["status"] == "fails" for row in self.rows))

    def one(self, check: Check) -> dict[str, Any]:
        left = self.deadline - time.monotonic()
        if check.gpus > self.gpus:
            return {"status": "skipped", "measured": f"needs {check.gpus} GPUs; {self.gpus} here"}
        if check.cost > left:
            words = f"takes about {check.cost} s; {max(0, left):.0f} s were left"
            return {"status": "not run", "measured": words}
        if self.worker is None:
            log = self.out / "checks.log"
            self.worker = Worker(self.work, log, rehearse=self.rehearse, ranks=self.gpus)
        began = time.monotonic()
        limit = min(check.limit, left)
        reply = self.worker.run(check.name, limit)
        if reply is None:
            alive, left_behind = self.worker.process.poll() is None, self.worker.kill()
            self.worker = None
            words = f"did not end within {limit:.0f} s" if alive else "the worker died"
            words += f"; left behind: {', '.join(left_behind)}" if left_behind else ""
            cut = alive and limit < check.limit
            reply = {"status": "not run" if cut else "fails", "measured": words}
        return {**reply, "seconds": round(time.monotonic() - began, 1)}

    def add(self, check: Check, reply: dict[str, Any]) -> None:
        """Keep a result, print it and write both files."""
        row = {"check": check.name, "decides": check.items, "bar": check.bar, **reply}
        row["holds"] = {"holds": True, "fails": False}.get(row["status"])
        self.rows.append(row)
        print(f"{row['status']:8} {check.name:28} {row['measured']}", flush=True)
        written(self.out / "gpu.json", json.dumps({**self.head, "checks": self.rows}, indent=1))
        written(self.out / "gpu.md", self.table())

    def counts(self) -> str:
        """How many checks hold, fail, were skipped and were not run."""
        statuses = [row["status"] for row in self.rows]
        words = ("holds", "fails", "skipped", "not run")
        return ", ".join(f"{statuses.count(word)} {word}" for word in words)

    def table(self) -> str:
        what = "A rehearsal, which proves nothing about GPUs: " if self.rehearse else ""
        known = ", ".join(f"{name} {self.head[name]}" for name in ("python", *PACKAGES))
        lines = [
            f"{what}{self.head['machine']}. {self.head['date']}. {self.counts()}.",
            f"{known}{', driver ' * bool(self.head['driver'])}{self.head['driver']}.",
            "",
            "| check | decides | bar | measured | holds |",
            "|---|---|---|---|---|",
        ]
        for row in self.rows:
            ran = "" if row["holds"] is not None else f"{row['status']}: "
            cells = (row["check"], row["decides"], row["bar"], f"{ran}{row['measured']}")
            plain = " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells)
            lines.append(f"| {plain} | {WORDS[row['holds']]} |")
        return "\n".join(lines) + "\n"


def written(path: Path, text: str) -> None:
    """Replace a file whole."""
    fresh = path.with_name(f".{path.name}")
    fresh.write_text(text)
    fresh.replace(path)


def driver() -> str:
    nvml: Any = discovery.import_pynvml()
    with discovery.open_nvml(nvml):
        return str(nvml.nvmlSystemGetDriverVersion())


class Worker:
    """The process that runs checks; it takes their names on stdin and answers on stdout."""

    def __init__(self, work: Path, log: Path, *, rehearse: bool, ranks: int) -> None:
        command = [sys.executable, str(Path(__file__).parent), "--worker", str(work)]
        command += ["--ranks", str(ranks), *(["--rehearse"] if rehearse else [])]
        with log.open("ab") as file:
            # Its own session: a Stop from the keyboard is for this process, and checks press
            # Stop themselves.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )

    def run(self, name: str, limit_s: float) -> dict[str, Any] | None:
        """Run one check; None when it did not answer in time."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{name}\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        if not select.select([self.process.stdout], [], [], limit_s)[0]:
            return None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        """End it and its session; what does not end is killed."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(ENDED_S)
        self.kill()

    def kill(self) -> list[str]:
        """Kill it; returns which of its processes did not end with it and were killed too."""
        family: Iterable[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.send_signal(signal.SIGUSR1)  # its stacks go to the log
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.5)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        _, alive = psutil.wait_procs(family, timeout=ENDED_S)
        words = []
        for one in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                words.append(f"{one.name()} (pid {one.pid})")
                one.kill()
        return words


if __name__ == "__main__":
    sys.exit(main())
