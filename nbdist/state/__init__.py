"""Sharded training state: the layout of each engine, resharding, and checkpoint files.

Runs on ranks, with torch; independent of the session and the kernel. All engines share one
representation: each parameter and each element-wise tensor of optimizer state is a set of
contiguous intervals of the row-major flattened tensor, as views of the engine's own storage.
`shards` defines it, `layouts` reads it from each engine, `reshard` converts between two
shardings, `tensor_digest` checks that two shardings hold the same values.
"""
