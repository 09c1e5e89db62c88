"""Sharded training state: where each engine keeps it, and how it is resharded between them.

Runs on ranks, with torch; knows checkpoints, but neither the session nor the kernel. The one
form that all engines share: per parameter (and per element-wise tensor of optimizer state)
contiguous intervals of the row-major flattened tensor, as views of the engine's own storage.
`shards` has that form, `layouts` reads it off each engine, `moving` takes it from one engine's
cut to another's, `digest` tells whether two cuts hold the same numbers.
"""
