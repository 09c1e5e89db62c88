"""DDP, FSDP and DeepSpeed on this rank: the accelerator, its options, `--auto`, the Trainer."""
