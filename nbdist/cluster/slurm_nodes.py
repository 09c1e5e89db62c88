"""What Slurm says of its nodes, and whether those that a session had still answer.

Runs in the notebook's kernel, used by `cluster.slurm` alone. Slurm itself sees after minutes
(SlurmdTimeout) that a node is gone.
"""

from __future__ import annotations

import re
import socket
import subprocess

COMMAND_S = 10.0
ANSWER_S = 2.0
"""For a node to take a connection."""
_UNUSABLE = re.compile(r"down|drain|fail|error|unk|future|inval|maint|.*\*$")
"""States of nodes that take no jobs; with a star: Slurm hears nothing of it."""
_PLACE = re.compile(r"NodeAddr=(\S+) .*\bPort=(\d+)")


def run(*command: str) -> str:
    """What a command of Slurm answers; "" where it fails: then nothing is known."""
    try:
        done = subprocess.run(  # noqa: S603 - Slurm's own commands
            command, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def usable(*, job: str, partition: str) -> set[str]:
    """Names of the nodes that a job has, or without a job those of a partition that take jobs.

    Args:
        job: its number, or "".
        partition: its name; "": the default one.
    """
    if job:
        listed = run("squeue", "--noheader", "--jobs", job, "--format", "%N")
        return set(run("scontrol", "show", "hostnames", listed).split()) if listed else set()
    lines = run("sinfo", "--noheader", "--Node", "--format", "%N %P %T").splitlines()
    return {
        name
        for name, own, state in (line.split() for line in lines)
        if (own.removesuffix("*") == partition if partition else own.endswith("*"))
        and not _UNUSABLE.match(state)
    }


def answers(name: str) -> bool:
    """Whether a node's slurmd takes a connection; True where Slurm does not say where it is."""
    place = _PLACE.search(run("scontrol", "show", "node", name, "--oneliner"))
    if place is None:
        return True
    try:
        socket.create_connection((place[1], int(place[2])), ANSWER_S).close()
    except OSError:
        return False
    return True
