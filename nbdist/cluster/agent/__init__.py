"""Agent of a cluster node: runs the launcher there and forwards messages to the kernel.

Runs in a process that the cluster (Ray, Slurm) starts on the node.
"""
