"""Launcher process between the kernel and the ranks: imports the libraries once and forks ranks.

Runs in its own session (setsid) and ends when the kernel closes its end of the link. Sees no GPU
and initialises no device. Only the launcher imports this package.
"""
