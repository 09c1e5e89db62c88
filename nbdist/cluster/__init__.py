"""Runs launchers on this machine, or on the nodes of Ray or Slurm through agents.

A ``LauncherProvider`` provides a ``LauncherGroup``: launchers and the channels to their ranks. The
session uses all groups through the same interface. Runs in the notebook's kernel; some modules are
also used by the agent of a node.
"""
