"""Memory of this rank: what a training step allocates, and advice after an OOM error."""
