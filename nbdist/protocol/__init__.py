"""Every message between the kernel, the launcher and the ranks, and how it is signed."""
