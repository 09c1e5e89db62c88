"""The prepared models: how to rebuild them, and their optimizers, dataloaders and RNG state."""
