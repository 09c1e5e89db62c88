"""Memory of a rank: measurements of a training step, and advice after an out-of-memory error."""
