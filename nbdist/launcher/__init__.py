"""The warm process between kernel and ranks: imports the libraries once and forks ranks.

Runs in its own session (setsid), ends when the kernel's end of its link closes.
Sees no GPU and initialises no device. Nobody imports this package but the launcher itself.
"""
