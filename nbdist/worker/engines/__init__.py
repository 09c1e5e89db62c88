"""DDP, FSDP and DeepSpeed engines of a rank: the accelerator, `--auto` and the HF Trainer."""
