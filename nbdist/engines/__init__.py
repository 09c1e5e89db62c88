"""Where launchers are started: `local` today; Ray and Slurm will stand beside it.

An engine starts launchers and holds their links; cells never go through it.
Runs in the notebook's kernel. Called by `kernel` only.
"""
