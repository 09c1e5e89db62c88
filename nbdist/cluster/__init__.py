"""Runs launchers on this machine, or on the nodes of Ray or Slurm through agents.

A ``LauncherProvider`` provides a ``LauncherGroup``: launchers and the channels to their ranks. The
groups have the same methods. Runs in the notebook's kernel; some modules are
also used by the agent of a node.
"""

from __future__ import annotations

import platform

from nbdist.errors import StartError

if platform.system() != "Linux":
    raise StartError(
        f"nbdist runs ranks on Linux only, and this is {platform.system()}. On Windows use WSL 2;"
        " nbdist.plan() works everywhere."
    )
