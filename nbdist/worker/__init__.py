"""Code that runs inside a rank's process."""
