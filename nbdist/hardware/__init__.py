"""GPUs, memory and processes of this machine, through NVML and /proc."""
