"""Nodes of Slurm: one `srun`, whose tasks hold the agents; a queue is waited for and shown.

Runs in the notebook's kernel, on a login node or inside an allocation. The tasks say what their
nodes are on srun's output, and get their tickets on its input: no shared folder is needed, and
no secret is in a command line, an environment or a file. When this process ends, srun's input
ends, and with it the agents.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from nbdist.cluster import bootstrap, slurm_nodes, version_check
from nbdist.cluster.allocation import Place, Wanted
from nbdist.cluster.rank_distribution import Spread, counted, filled
from nbdist.errors import OptionError, StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.cluster.allocation import Kind

TASKS_S = 90.0
"""For the tasks to say what their nodes are, once Slurm runs them."""
CLOSE_S = bootstrap.END_S + 2.0
READ_S = 1.0
"""For the last words of a process that has ended to be read."""
POLL_S = 0.5
ASK_QUEUE_S = 5.0
"""How often the queue is asked: every user's squeue burdens the same controller."""
TIME = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}")
"""As sbatch takes it: 90, 1:30:00, 2-12."""
_QUEUED = re.compile(r"job (\d+) queued")
_TASKS_ENDED = re.compile(r"error: (\S+): tasks? ([\d,\s-]+): (.+)")
_NODE_FAILED = re.compile(r"[Nn]ode failure on (\S+)")
_STEP_ENDED = re.compile(r"\*\*\* (?:STEP|JOB) \S+ (?:ON \S+ )?CANCELLED AT \S+ ?(.*?) ?\*\*\*")
_OF_ALLOCATION = frozenset({"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CONF", "SLURM_CLUSTERS"})
_LAST_LINES = 6
NEVER = frozenset({"PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints"})
"""Reasons of a queue that no waiting ends."""


class SlurmCluster:
    """Nodes of the Slurm that this machine belongs to.

    Args:
        partition, time, account: as Slurm's own options; not inside an allocation, which has
            its own.
        interface: of the network between the nodes, as "ib0". Default: the one that reaches
            the notebook.

    Raises:
        OptionError: a time that Slurm does not read, or an option that the allocation has set.
    """

    name = "slurm"

    def __init__(
        self, *, partition: str = "", time: str = "", account: str = "", interface: str = ""
    ) -> None:
        """Check the options; ask Slurm nothing yet."""
        if time and not TIME.fullmatch(time):
            raise OptionError(
                f"--time {time!r} is no time of Slurm; use minutes, H:MM:SS or days-hours,"
                " as --time 1:00:00."
            )
        self._allocation = os.environ.get("SLURM_JOB_ID", "")
        given = {"partition": partition, "time": time, "account": account}
        self._given = {name: value for name, value in given.items() if value}
        if self._allocation and self._given:
            named = " and ".join(f"--{name}" for name in self._given)
            raise OptionError(
                f"{named}: this notebook runs inside Slurm's job {self._allocation}, whose nodes"
                f" are used as they are; leave {named} out."
            )
        self._interface = interface
        self._reach = ""
        self._srun: Srun | None = None
        self.chosen: Spread | None = None
        """What `allot` takes. Default: what is wanted of it."""
        self._places: list[Place] = []
        self._tasks: list[int] = []
        """Number of the task at each place."""

    def spread(self, nproc: int | None, nodes: int | None, gpus_per_node: int | None) -> Spread:
        """Fill in what the user left open: from the allocation, else one node.

        Raises:
            OptionError: contradictions, or nothing that says how many ranks.
            StartError: this machine has no Slurm.
        """
        environ = os.environ if self._allocation else {}
        if gpus_per_node is None:
            here = environ.get("SLURM_GPUS_ON_NODE", "")
            gpus_per_node = int(here) if here.isdecimal() else 0
            if nproc is not None and nodes is not None and gpus_per_node:
                gpus_per_node = min(gpus_per_node, -(-nproc // nodes))
        if nodes is None and nproc is None and self._allocation:
            nodes = int(environ.get("SLURM_JOB_NUM_NODES", "1"))
        kind: Any = "cuda" if gpus_per_node else "cpu"
        wanted = Wanted(kind=kind, nproc=nproc, nodes=nodes, gpus_per_node=gpus_per_node)
        count, each = filled(wanted)
        if count is None and each is None and nproc is None:
            raise OptionError(
                "--on slurm needs to know how many ranks: say -n N, or --nodes N with"
                " --gpus-per-node N."
            )
        _found_srun()
        count = count or 1
        return Spread(kind, count, each or (nproc // count if nproc else 1))

    def left(self, kind: Kind, each: int, nodes: int) -> int:  # noqa: ARG002 - as Ray's
        """How many nodes, at most as many as before, the allocation has or Slurm gives jobs."""
        there, silent = self._there()
        return min(len(there - silent), nodes) if there else nodes

    def _there(self) -> tuple[set[str], set[str]]:
        """Names of the nodes that Slurm knows, and those of our last ones that do not answer."""
        known = slurm_nodes.usable(job=self._allocation, partition=self._given.get("partition", ""))
        ours = {place.name for place in self._places}
        return known, {name for name in ours if not slurm_nodes.answers(name)}

    def _avoided(self, nodes: int, progress: Callable[[str], None]) -> list[str]:
        """Nodes to keep away from: ours that do not answer. They are waited for where needed."""
        began = time.monotonic()
        while self._places:
            known, silent = self._there()
            if not silent & known or len(known - silent) >= nodes:
                return sorted(silent)
            progress(
                f"waiting for {' and '.join(sorted(silent & known))}, whose slurmd does not answer"
                f" ({time.monotonic() - began:.0f} s); Stop ends the waiting"
            )
            time.sleep(ASK_QUEUE_S)
        return []

    @property
    def reach(self) -> str:
        """Address of this machine that the nodes reach."""
        return bootstrap.of_interface(self._interface) if self._interface else self._reach

    def allot(self, wanted: Wanted, progress: Callable[[str], None]) -> list[Place]:
        """Start one task on each node; waits in the queue, and says so.

        Raises:
            StartError: Slurm refuses, in its own words; or versions differ. Nothing stays.
        """
        spread = self.chosen or self.spread(
            wanted.nproc, wanted.nodes, 0 if wanted.kind == "cpu" else wanted.gpus_per_node
        )
        self.close()
        avoided = self._avoided(spread.nodes, progress)
        try:
            self._srun = Srun(self._command(spread, avoided), self._environ())
            self._places = self._number(spread, self._srun, progress)
            version_check.check(bootstrap.versions(), self._places)
        except BaseException:
            self.close()
            raise
        return self._places

    def _command(self, spread: Spread, avoided: Sequence[str] = ()) -> list[str]:
        """The line that starts the tasks; it has no secret."""
        options = {
            "nodes": spread.nodes,
            "ntasks": spread.nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": spread.each if spread.kind == "cpu" else None,
            "gpus-per-node": spread.each if spread.kind == "cuda" else None,
            "job-name": "nbdist",
            "mpi": "none",
            "kill-on-bad-exit": 0,  # the other nodes are ended by us, who say why
            "wait": 0,
            "exclude": ",".join(avoided) or None,
            **self._given,
        }
        words = [f"--{name}={value}" for name, value in options.items() if value is not None]
        flags = ["--no-kill", *(["--overlap"] if self._allocation else [])]
        return [
            _found_srun(),
            *words,
            *flags,
            sys.executable,
            "-P",
            "-m",
            "nbdist.cluster.bootstrap",
        ]

    def _environ(self) -> dict[str, str]:
        """Without what the step that holds this notebook was given: srun would take it as asked."""
        environ = bootstrap.handed_on(os.environ)
        slurms = {name: v for name, v in os.environ.items() if name.startswith("SLURM_")}
        if self._allocation:
            slurms = {name: v for name, v in slurms.items() if name in _OF_ALLOCATION}
        return environ | slurms

    def _number(self, spread: Spread, srun: Srun, progress: Callable[[str], None]) -> list[Place]:
        """Hear what the nodes are; number them, this machine's first."""
        folder = os.getcwd()  # noqa: PTH109 - a plain string for the wire
        with contextlib.suppress(StartError):  # a refusal is told below, in srun's words
            srun.send(about=["", self._interface, folder])
        told = self._all(srun, "about", spread.nodes, progress)
        bootstrap.check(told.values())
        bootstrap.check_folder(told.values(), folder)
        self._reach = next(iter(told.values()))["toward"]
        self._tasks = sorted(told, key=lambda task: (told[task]["address"] != self.reach, task))
        return [
            Place(
                name=one["host"],
                address=one["address"],
                ranks=spread.each,
                gpus=tuple(one["gpus"][: spread.each]) if spread.kind == "cuda" else (),
                versions=one["versions"],
            )
            for one in (told[task] for task in self._tasks)
        ]

    def _all(
        self, srun: Srun, what: str, count: int, progress: Callable[[str], None]
    ) -> dict[int, Any]:
        """An answer of every task; as long as the job waits in the queue, however long that is."""
        queue, told = Queue(srun, progress), dict[int, Any]()
        while len(told) < count:
            answer = srun.next(POLL_S)
            if answer is not None and what in answer:
                told[answer["task"]] = answer[what]
            elif srun.code is not None and answer is None:
                raise StartError(self._refused(srun.last_words() or f"code {srun.code} of srun"))
            elif queue.waits():
                if queue.reason in NEVER:
                    raise StartError(self._refused(f"what was asked for is beyond {queue.reason}"))
            elif queue.since_running() > TASKS_S:
                raise StartError(
                    f"{count - len(told)} of {counted(count, 'task')} of Slurm did not answer"
                    f" for {TASKS_S:.0f} s. {srun.last_words()}"
                )
        return told

    def _refused(self, words: str) -> str:
        """Slurm's words, and what there is."""
        only = [f"--partition={self._given['partition']}"] if "partition" in self._given else []
        listed = slurm_nodes.run(
            "sinfo", "--noheader", "--format", "%P: %D nodes, %c CPUs and %G on each, %l", *only
        )
        has = "; ".join(line.replace("(null)", "no GPUs") for line in listed.splitlines())
        return f"Slurm does not give the nodes: {words}. It has {has or 'no such partition'}."

    def start(self, tickets: Sequence[str]) -> None:
        """Give each task its ticket, over srun's input."""
        srun = self._running()
        by_task = [""] * len(tickets)
        for task, ticket in zip(self._tasks, tickets, strict=True):
            by_task[task] = ticket
        srun.send(tickets=by_task)

    def _running(self) -> Srun:
        if self._srun is None:
            raise StartError("Slurm has given no nodes; the next %%distribute cell asks for some.")
        return self._srun

    def lost(self) -> Mapping[int, str]:
        """Places whose task or node has ended, as far as srun says."""
        srun = self._srun
        if srun is None:
            return {}
        by_task, by_node = srun.ended()
        found = {}
        for place, task in enumerate(self._tasks):
            cause = by_task.get(task) or by_node.get(self._places[place].name)
            if cause is None and srun.code is not None:
                cause = f"Slurm has ended the job: {srun.last_words() or f'code {srun.code}'}"
            if cause is not None:
                found[place] = f"is lost: {cause}"
        return found

    def close(self) -> None:
        """End the tasks, and the job or our step of it."""
        srun, self._srun = self._srun, None
        if srun is not None:
            srun.close()

    leave = close


def _found_srun() -> str:
    """Where Slurm's program is.

    Raises:
        StartError: nowhere here.
    """
    found = shutil.which("srun")
    if found is None:
        raise StartError(
            "--on slurm needs Slurm's srun, which is not found here; open the notebook on a login"
            " node of the cluster, or inside a job."
        )
    return found


class Srun:
    """A running `srun`: lines in, marked lines out, and what it says itself."""

    def __init__(self, command: list[str], environ: Mapping[str, str]) -> None:
        """Start it, out of reach of Jupyter's interrupt."""
        self._process = subprocess.Popen(  # noqa: S603 - srun, with options that were checked
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environ),
            text=True,
            start_new_session=True,
        )
        self._answers: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._lock = threading.Lock()
        self._said: list[str] = []
        self._ended: dict[int, str] = {}
        self._failed: dict[str, str] = {}
        self._heard = False
        """Whether a task has answered."""
        self.job = ""
        """Its number, where it was queued."""
        self._readers = [
            threading.Thread(target=read, name="nbdist-srun", daemon=True)
            for read in (self._read_answers, self._read_words)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def send(self, **what: Any) -> None:
        """Give a line to all tasks, also to those that do not run yet.

        Raises:
            StartError: srun has ended.
        """
        try:
            print(json.dumps(what), file=self._process.stdin, flush=True)
        except OSError as error:
            raise StartError(f"Slurm has ended the job. {self.last_words()}") from error

    def next(self, within_s: float) -> dict[str, Any] | None:
        """The next answer of a task, or None."""
        try:
            return self._answers.get(timeout=within_s)
        except Empty:
            return None

    def last_words(self) -> str:
        """What srun has said last, as one line; all of it, once it has ended."""
        if self.code is not None:
            for reader in self._readers:
                reader.join(READ_S)
        with self._lock:
            return "; ".join(self._said[-_LAST_LINES:])

    def ended(self) -> tuple[dict[int, str], dict[str, str]]:
        """Tasks that have ended and nodes that have failed, with the cause in words."""
        with self._lock:
            return dict(self._ended), dict(self._failed)

    def close(self) -> None:
        """End the input, and what does not end by that."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        if self.job and not self._heard:
            slurm_nodes.run("scancel", self.job)  # it still waits in the queue
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.terminate()  # srun then ends its tasks
            try:
                self._process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for reader in self._readers:
            reader.join(READ_S)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _read_answers(self) -> None:
        for line in self._process.stdout or ():
            marked = line.find(bootstrap.MARK)
            if marked < 0:
                continue  # of a site's own scripts
            answer = json.loads(line[marked + len(bootstrap.MARK) :])
            self._heard = True
            if "ended" in answer:
                with self._lock:
                    self._ended.setdefault(answer["task"], answer["ended"])
            else:
                self._answers.put(answer)

    def _read_words(self) -> None:
        for line in self._process.stderr or ():
            self._take(line.strip())

    def _take(self, line: str) -> None:
        """Keep a line of srun's own, and what it tells of the job."""
        if queued := _QUEUED.search(line):
            self.job = queued[1]
            return
        with self._lock:
            self._said = [*self._said, line.removeprefix("srun: ").removeprefix("error: ")][-50:]
            for task, words in tasks_ended(line).items():
                self._ended.setdefault(task, words)
            if failed := _NODE_FAILED.search(line):
                self._failed[failed[1]] = "Slurm says that the node failed"


class Queue:
    """Where a job stands, told now and then."""

    def __init__(self, srun: Srun, progress: Callable[[str], None]) -> None:
        """Ask nothing yet."""
        self._srun, self._progress = srun, progress
        self._asked_at = 0.0
        self._waits = False
        self.reason = ""
        """Why it waits, in Slurm's word."""
        self._running_since = self._since = time.monotonic()

    def waits(self) -> bool:
        """Whether the job still waits; tells where it stands."""
        now = time.monotonic()
        if not self._srun.job:
            return False
        if now - self._asked_at >= ASK_QUEUE_S:
            self._asked_at = now
            state, _, self.reason = slurm_nodes.run(
                "squeue", "--noheader", "--jobs", self._srun.job, "--format", "%T|%r"
            ).partition("|")
            self._waits = state in {"PENDING", "CONFIGURING"}
            words = state.lower() or "starts"
            words += f": {self.reason}" if self.reason not in {"", "None"} else ""
            self._progress(
                f"Slurm's job {self._srun.job} is {words} ({now - self._since:.0f} s);"
                " Stop takes it out of the queue"
            )
        if self._waits:
            self._running_since = now
        return self._waits

    def since_running(self) -> float:
        """Seconds since the job was last seen waiting."""
        return time.monotonic() - self._running_since


def tasks_ended(line: str) -> dict[int, str]:
    """What a line of srun says of tasks: "srun: error: n1: tasks 0-1: Killed"."""
    found = _TASKS_ENDED.search(line)
    if found is None:
        return {}
    tasks: list[int] = []
    for part in found[2].replace(" ", "").split(","):
        first, _, last = part.partition("-")
        tasks += range(int(first), int(last or first) + 1)
    return dict.fromkeys(tasks, f"Slurm says that its task ended: {found[3].strip()}")
