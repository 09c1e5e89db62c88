"""Queries Slurm for its nodes, and checks whether a session's previous nodes are reachable.

Slurm itself needs minutes (SlurmdTimeout) to notice a lost node.
"""

from __future__ import annotations

import re
import socket
import subprocess

COMMAND_S = 10.0
ANSWER_S = 2.0
"""Timeout of a connection to a node."""
_UNUSABLE = re.compile(r"down|drain|fail|error|unk|future|inval|maint|.*\*$")
"""States of nodes that take no jobs; a star marks a node that does not respond to Slurm."""
_PLACE = re.compile(r"NodeAddr=(\S+) .*\bPort=(\d+)")


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
        return (
            set(run_slurm_command("scontrol", "show", "hostnames", listed).split())
            if listed
            else set()
        )
    lines = run_slurm_command("sinfo", "--noheader", "--Node", "--format", "%N %P %T").splitlines()
    return {
        name
        for name, own, state in (line.split() for line in lines)
        if (own.removesuffix("*") == partition if partition else own.endswith("*"))
        and not _UNUSABLE.match(state)
    }


def is_reachable(name: str) -> bool:
    """Return True if a node's slurmd accepts a connection, or its address is unknown."""
    place = _PLACE.search(run_slurm_command("scontrol", "show", "node", name, "--oneliner"))
    if place is None:
        return True
    try:
        socket.create_connection((place[1], int(place[2])), ANSWER_S).close()
    except OSError:
        return False
    return True
