"""The agent of a node: what the kernel is to its launcher on one machine, for one node of several.

Runs in a process that a cluster (Ray, Slurm) has started there. Called by `engines` alone, over
the network.
"""
