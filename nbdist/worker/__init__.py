"""What runs on a rank. torch lives here; nothing of it is imported in the kernel."""
