"""The engines' stories: what DDP, FSDP and DeepSpeed hold at the moments of a training step."""
