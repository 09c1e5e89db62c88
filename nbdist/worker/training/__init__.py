"""Prepared models: how to rebuild them, their state, optimizers, data loaders and RNG state."""
