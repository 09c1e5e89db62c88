"""Short measurements: bandwidth between ranks and devices, and of a disk."""
