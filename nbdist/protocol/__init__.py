"""Messages between the kernel, the launcher and the ranks, and the format of payload files."""
