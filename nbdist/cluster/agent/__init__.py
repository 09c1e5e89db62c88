"""The agent of a cluster node: runs the launcher there and forwards messages to the kernel.

Runs in a process that a cluster (Ray, Slurm) has started there. Called by `engines` alone, over
the network.
"""
