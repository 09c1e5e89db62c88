"""Nodes of a Slurm cluster: one `srun` whose tasks run the agents; shows the state of the queue.

Runs in the notebook's kernel, on a login node or inside an allocation. The tasks describe their
nodes on srun's stdout and receive their tickets on its stdin: no shared folder is needed, and no
secret is in a command line, an environment variable or a file. When this process ends, srun's stdin
closes, which ends the agents.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from nbdist.cluster import node_bootstrap
from nbdist.cluster.allocation import (
    AllocatedNode,
    AllocationRequest,
    RankDistribution,
    check_folder,
    format_count,
    number_nodes,
    requested_counts,
)
from nbdist.errors import OptionError, StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nbdist.cluster.allocation import DeviceType

TASKS_S = 90.0
"""Timeout of the tasks' first reply, once the job runs."""
CLOSE_S = node_bootstrap.END_S + 2.0
READ_S = 1.0
"""Time to read the last output of a process that has ended."""
POLL_S = 0.5
ASK_QUEUE_S = 5.0
"""Interval of squeue calls, which load the controller shared by all users."""
TIME_PATTERN = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}")
"""Time formats of sbatch: 90, 1:30:00, 2-12."""
_QUEUED = re.compile(r"job (\d+) queued")
_TASKS_ENDED = re.compile(r"error: (\S+): tasks? ([\d,\s-]+): (.+)")
_NODE_FAILED = re.compile(r"[Nn]ode failure on (\S+)")
_ALLOCATION_VARIABLES = frozenset({"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CONF", "SLURM_CLUSTERS"})
_LAST_LINES = 6
UNSATISFIABLE_REASONS = frozenset(
    {"PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints"}
)
"""Pending reasons that cannot be resolved by waiting."""

COMMAND_S = 10.0
ANSWER_S = 2.0
"""Timeout of a connection to a node."""
_UNUSABLE = re.compile(r"down|drain|fail|error|unk|future|inval|maint|.*\*$")
"""States of nodes that take no jobs; a star marks a node that does not respond to Slurm."""
_NODE_ADDRESS = re.compile(r"NodeAddr=(\S+) .*\bPort=(\d+)")


class SlurmCluster:
    """Nodes of the Slurm cluster that this machine belongs to.

    Args:
        partition, time, account: Slurm's own options; not allowed inside an allocation, which
            has its own.
        interface: network interface between the nodes, such as "ib0". Default: the one with
            the route to the notebook.

    Raises:
        OptionError: invalid time, or an option that the allocation determines.
    """

    name = "slurm"

    def __init__(
        self, *, partition: str = "", time: str = "", account: str = "", interface: str = ""
    ) -> None:
        """Validate the options, without calling Slurm."""
        if time and not TIME_PATTERN.fullmatch(time):
            raise OptionError(
                f"--time {time!r} is not a Slurm time. Use minutes, H:MM:SS or days-hours,"
                " for example --time 1:00:00."
            )
        self._allocation = os.environ.get("SLURM_JOB_ID", "")
        job_options = {"partition": partition, "time": time, "account": account}
        self._job_options = {name: value for name, value in job_options.items() if value}
        if self._allocation and self._job_options:
            named = " and ".join(f"--{name}" for name in self._job_options)
            raise OptionError(
                f"{named} cannot be used: this notebook runs inside Slurm job {self._allocation},"
                f" whose nodes are used. Leave {named} out."
            )
        self._interface = interface
        self._kernel_address = ""
        self._srun: SrunProcess | None = None
        self.distribution: RankDistribution
        """Ranks to allocate nodes for; set by the session."""
        self._places: list[AllocatedNode] = []
        self._tasks: list[int] = []
        """Task number of each node."""

    def distribute_ranks(
        self, nproc: int | None, nodes: int | None, gpus_per_node: int | None
    ) -> RankDistribution:
        """Complete the request from the allocation; without one, the default is one node.

        Raises:
            OptionError: contradictory options, or the number of ranks is missing.
            StartError: Slurm was not found.
        """
        environ = os.environ if self._allocation else {}
        if gpus_per_node is None:
            gpus_here = environ.get("SLURM_GPUS_ON_NODE", "")
            gpus_per_node = int(gpus_here) if gpus_here.isdecimal() else 0
            if nproc is not None and nodes is not None and gpus_per_node:
                gpus_per_node = min(gpus_per_node, -(-nproc // nodes))
        if nodes is None and nproc is None and self._allocation:
            nodes = int(environ.get("SLURM_JOB_NUM_NODES", "1"))
        kind: Any = "cuda" if gpus_per_node else "cpu"
        request = AllocationRequest(
            kind=kind, nproc=nproc, nodes=nodes, gpus_per_node=gpus_per_node
        )
        count, each = requested_counts(request)
        if count is None and each is None and nproc is None:
            raise OptionError(
                "--on slurm needs the number of ranks. Use -n N, or --nodes N with"
                " --gpus-per-node N."
            )
        _find_srun()
        count = count or 1
        return RankDistribution(kind, count, each or (nproc // count if nproc else 1))

    def num_available_nodes(self, kind: DeviceType, each: int, nodes: int) -> int:  # noqa: ARG002 - as Ray's
        """Return the number of usable nodes of the allocation or partition, at most `nodes`."""
        known, silent = self._query_nodes()
        return min(len(known - silent), nodes) if known else nodes

    def _query_nodes(self) -> tuple[set[str], set[str]]:
        """Names of the nodes known to Slurm, and of the last used nodes that do not respond."""
        known = usable_nodes(job=self._allocation, partition=self._job_options.get("partition", ""))
        ours = {place.name for place in self._places}
        return known, {name for name in ours if not is_reachable(name)}

    def _unresponsive_nodes(self, nodes: int, progress: Callable[[str], None]) -> list[str]:
        """Nodes to exclude: the last used ones that do not respond. Waits if they are needed."""
        start_time = time.monotonic()
        while self._places:
            known, silent = self._query_nodes()
            if not silent & known or len(known - silent) >= nodes:
                return sorted(silent)
            progress(
                f"waiting for {' and '.join(sorted(silent & known))}: slurmd does not respond"
                f" ({time.monotonic() - start_time:.0f} s); interrupt the cell to stop waiting"
            )
            time.sleep(ASK_QUEUE_S)
        return []

    @property
    def kernel_address(self) -> str:
        """Address of this machine for the nodes."""
        if self._interface:
            return node_bootstrap.interface_address(self._interface)
        return self._kernel_address

    def allocate_nodes(self, progress: Callable[[str], None]) -> list[AllocatedNode]:
        """Start one task on each node; report waiting in the queue.

        Raises:
            StartError: Slurm's error message, or versions differ. Nothing stays reserved.
        """
        spread = self.distribution
        self.close()
        avoided = self._unresponsive_nodes(spread.num_nodes, progress)
        try:
            # without this notebook's own job step, whose settings srun would use
            inherited = {
                name: value
                for name, value in os.environ.items()
                if name.startswith("SLURM_")
                and (not self._allocation or name in _ALLOCATION_VARIABLES)
            }
            environ = node_bootstrap.agent_environment(os.environ) | inherited
            self._srun = SrunProcess(self._command(spread, avoided), environ)
            self._places = self._number_nodes(spread, self._srun, progress)
        except BaseException:
            self.close()
            raise
        return self._places

    def _command(self, spread: RankDistribution, avoided: Sequence[str] = ()) -> list[str]:
        """Return the command that starts the tasks; it contains no secret."""
        options = {
            "nodes": spread.num_nodes,
            "ntasks": spread.num_nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": spread.ranks_per_node if spread.kind == "cpu" else None,
            "gpus-per-node": spread.ranks_per_node if spread.kind == "cuda" else None,
            "job-name": "nbdist",
            "mpi": "none",
            "kill-on-bad-exit": 0,  # nbdist ends the other nodes and reports the cause
            "wait": 0,
            "exclude": ",".join(avoided) or None,
            **self._job_options,
        }
        arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
        flags = ["--no-kill", *(["--overlap"] if self._allocation else [])]
        return [
            _find_srun(),
            *arguments,
            *flags,
            sys.executable,
            "-P",
            "-m",
            "nbdist.cluster.node_bootstrap",
        ]

    def _number_nodes(
        self, spread: RankDistribution, srun: SrunProcess, progress: Callable[[str], None]
    ) -> list[AllocatedNode]:
        """Read the nodes' descriptions and number the nodes, this machine first."""
        folder = os.getcwd()  # noqa: PTH109 - sent as a string
        with contextlib.suppress(StartError):  # srun's error is reported below
            srun.send(about=["", self._interface, folder])
        found = self._wait_for_tasks(srun, spread.num_nodes, progress)
        tasks = sorted(found)
        self._kernel_address = found[tasks[0]]["toward"]
        nodes = [found[task] for task in tasks]
        order, places = number_nodes(nodes, self.kernel_address, spread)
        check_folder(nodes, folder)
        self._tasks = [tasks[i] for i in order]
        return places

    def _wait_for_tasks(
        self, srun: SrunProcess, count: int, progress: Callable[[str], None]
    ) -> dict[int, Any]:
        """Return the description of every task's node. Waits in the queue without a timeout."""
        found = dict[int, Any]()
        began = running_since = time.monotonic()
        polled_at, is_queued = 0.0, False
        while len(found) < count:
            with contextlib.suppress(Empty):
                answer = srun.answers.get(timeout=POLL_S)
                found[answer["task"]] = answer["about"]
                continue
            now = time.monotonic()
            if srun.exit_code is not None:
                raise StartError(
                    self._slurm_error(srun.last_output() or f"code {srun.exit_code} of srun")
                )
            if srun.job and now - polled_at >= ASK_QUEUE_S:
                polled_at = now
                query = ("--noheader", "--jobs", srun.job, "--format", "%T|%r")
                state, _, reason = run_slurm_command("squeue", *query).partition("|")
                is_queued = state in {"PENDING", "CONFIGURING"}
                if is_queued and reason in UNSATISFIABLE_REASONS:
                    raise StartError(self._slurm_error(f"the request exceeds {reason}"))
                words = state.lower() or "starts"
                words += f": {reason}" if reason not in {"", "None"} else ""
                progress(
                    f"Slurm job {srun.job} is {words} ({now - began:.0f} s);"
                    " interrupt the cell to cancel it"
                )
            if is_queued:
                running_since = now
            elif now - running_since > TASKS_S:
                raise StartError(
                    f"{count - len(found)} of {format_count(count, 'Slurm task')} did not respond"
                    f" within {TASKS_S:.0f} s. {srun.last_output()}"
                )
        return found

    def _slurm_error(self, message: str) -> str:
        command = ["sinfo", "--noheader"]
        command += ["--format", "%P: %D nodes, %c CPUs and %G on each, %l"]
        if "partition" in self._job_options:
            command.append(f"--partition={self._job_options['partition']}")
        listed = run_slurm_command(*command)
        has = "; ".join(line.replace("(null)", "no GPUs") for line in listed.splitlines())
        return f"Slurm rejected the request: {message}. Available: {has or 'no such partition'}."

    def start_agents(self, tickets: Sequence[str]) -> None:
        """Send each task its ticket over srun's stdin."""
        if self._srun is None:
            raise StartError("No Slurm job is running. The next %%distribute cell requests one.")
        by_task = [""] * len(tickets)
        for task, ticket in zip(self._tasks, tickets, strict=True):
            by_task[task] = ticket
        self._srun.send(tickets=by_task)

    def drained_nodes(self) -> Mapping[int, float | None]:
        """Return none: Slurm sends SIGTERM, and drains a node when its jobs have ended."""
        return {}

    def lost_nodes(self) -> Mapping[int, str]:
        """Return the nodes whose task or machine has ended, as reported by srun."""
        srun = self._srun
        if srun is None:
            return {}
        nodes = zip(self._tasks, self._places, strict=True)
        causes = [srun.end_cause(task, node.name) for task, node in nodes]
        return {i: f"is lost: {cause}" for i, cause in enumerate(causes) if cause is not None}

    def close(self) -> None:
        """End the tasks, and the job or job step."""
        srun, self._srun = self._srun, None
        if srun is not None:
            srun.close()

    disconnect = close


def _find_srun() -> str:
    """Return the path of srun; raises StartError if it was not found."""
    path = shutil.which("srun")
    if path is None:
        raise StartError(
            "--on slurm needs Slurm's srun, which was not found. Open the notebook on a login"
            " node of the cluster, or inside a job."
        )
    return path


class SrunProcess:
    """A running `srun`: sends lines to the tasks, reads their marked lines and srun's messages."""

    def __init__(self, command: list[str], environ: Mapping[str, str]) -> None:
        """Start it in its own session, so that Jupyter's interrupt does not reach it."""
        self._process = subprocess.Popen(  # noqa: S603 - srun with validated options
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environ),
            text=True,
            start_new_session=True,
        )
        self.answers: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._lock = threading.Lock()
        self._messages: deque[str] = deque(maxlen=_LAST_LINES)
        self._ended: dict[int | str, str] = {}
        """Causes of ended tasks, by number, and of failed nodes, by name."""
        self._has_answered = False
        """True if a task has answered."""
        self.job = ""
        """Job number, if it was queued."""
        self._readers = [
            threading.Thread(target=read, name="nbdist-srun", daemon=True)
            for read in (self._read_answers, self._read_stderr)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    def send(self, **what: Any) -> None:
        """Send a line to all tasks, including those that have not started yet.

        Raises:
            StartError: srun has ended.
        """
        try:
            print(json.dumps(what), file=self._process.stdin, flush=True)
        except OSError as error:
            raise StartError(f"Slurm ended the job. {self.last_output()}") from error

    def last_output(self) -> str:
        """Return the last messages of srun as one line; complete once srun has ended."""
        if self.exit_code is not None:
            for reader in self._readers:
                reader.join(READ_S)
        with self._lock:
            return "; ".join(self._messages)

    def end_cause(self, task: int, node: str) -> str | None:
        """Return why a task or its node has ended; None while it runs."""
        with self._lock:
            cause = self._ended.get(task) or self._ended.get(node)
        if cause is None and self.exit_code is not None:
            cause = f"Slurm ended the job: {self.last_output() or f'code {self.exit_code}'}"
        return cause

    def close(self) -> None:
        """Close stdin, then end what still runs."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        if self.job and not self._has_answered:
            run_slurm_command("scancel", self.job)  # it may still be queued
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
            marked = line.find(node_bootstrap.STDOUT_MARKER)
            if marked < 0:
                continue  # output of a site's scripts
            answer = json.loads(line[marked + len(node_bootstrap.STDOUT_MARKER) :])
            self._has_answered = True
            if "ended" in answer:
                with self._lock:
                    self._ended.setdefault(answer["task"], answer["ended"])
            else:
                self.answers.put(answer)

    def _read_stderr(self) -> None:
        """Keep srun's last messages, and the states of job, tasks and nodes that they report."""
        for line in map(str.strip, self._process.stderr or ()):
            if queued := _QUEUED.search(line):
                self.job = queued[1]
                continue
            with self._lock:
                self._messages.append(line.removeprefix("srun: ").removeprefix("error: "))
                for task, words in parse_ended_tasks(line).items():
                    self._ended.setdefault(task, words)
                if failed := _NODE_FAILED.search(line):
                    self._ended[failed[1]] = "Slurm reported a node failure"


def parse_ended_tasks(line: str) -> dict[int, str]:
    """Parse ended tasks from a line of srun: "srun: error: n1: tasks 0-1: Killed"."""
    match = _TASKS_ENDED.search(line)
    if match is None:
        return {}
    tasks: list[int] = []
    for part in match[2].replace(" ", "").split(","):
        first, _, last = part.partition("-")
        tasks += range(int(first), int(last or first) + 1)
    return dict.fromkeys(tasks, f"Slurm reported that its task ended: {match[3].strip()}")


def run_slurm_command(*command: str) -> str:
    """Return the output of a Slurm command; "" if it fails."""
    try:
        done = subprocess.run(  # noqa: S603 - Slurm's own commands
            command, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def usable_nodes(*, job: str, partition: str) -> set[str]:
    """Return the names of a job's nodes, or of a partition's nodes that accept jobs.

    Args:
        job: job number, or "".
        partition: name of the partition; "": the default one.
    """
    if job:
        listed = run_slurm_command("squeue", "--noheader", "--jobs", job, "--format", "%N")
        if not listed:
            return set()
        return set(run_slurm_command("scontrol", "show", "hostnames", listed).split())
    lines = run_slurm_command("sinfo", "--noheader", "--Node", "--format", "%N %P %T").splitlines()
    return {
        name
        for name, own, state in (line.split() for line in lines)
        if (own.removesuffix("*") == partition if partition else own.endswith("*"))
        and not _UNUSABLE.match(state)
    }


def is_reachable(name: str) -> bool:
    """Return True if a node's slurmd accepts a connection, or its address is unknown."""
    place = _NODE_ADDRESS.search(run_slurm_command("scontrol", "show", "node", name, "--oneliner"))
    if place is None:
        return True
    try:
        socket.create_connection((place[1], int(place[2])), ANSWER_S).close()
    except OSError:
        return False
    return True
