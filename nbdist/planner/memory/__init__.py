"""Memory of a training step under DDP, FSDP and DeepSpeed ZeRO, moment by moment."""
